"""Block selection over contiguous keys."""

from __future__ import annotations

from typing import Any, Literal, overload

from . import _shapes
from ._arguments import PLAN_ONLY, all_given, choose_operators, integers, number
from ._call import Plan, run
from ._torch import eager, plain
from ._types import ArrayT


@overload
def select_blocks(
    index_q: ArrayT, index_k: ArrayT, *, topk: int = 16, block_size: int = 128, init_blocks: int = 0,
    local_blocks: int = 1, scale: float | None = None, cu_seqlens_q: ArrayT | None = None,
    cu_seqlens_k: ArrayT | None = None, k_starts: ArrayT | None = None, return_lse: Literal[False] = False,
    out: ArrayT | None = None, lse_out: ArrayT | None = None, workspace: ArrayT | None = None,
) -> ArrayT: ...  # fmt: skip
@overload
def select_blocks(
    index_q: ArrayT, index_k: ArrayT, *, topk: int = 16, block_size: int = 128, init_blocks: int = 0,
    local_blocks: int = 1, scale: float | None = None, cu_seqlens_q: ArrayT | None = None,
    cu_seqlens_k: ArrayT | None = None, k_starts: ArrayT | None = None, return_lse: Literal[True],
    out: ArrayT | None = None, lse_out: ArrayT | None = None, workspace: ArrayT | None = None,
) -> tuple[ArrayT, ArrayT]: ...  # fmt: skip
def select_blocks(
    index_q: Any,
    index_k: Any,
    *,
    topk: int = 16,
    block_size: int = 128,
    init_blocks: int = 0,
    local_blocks: int = 1,
    scale: float | None = None,
    cu_seqlens_q: Any = None,
    cu_seqlens_k: Any = None,
    k_starts: Any = None,
    return_lse: bool = False,
    out: Any = None,
    lse_out: Any = None,
    workspace: Any = None,
) -> Any:
    """Choose, for each query and index head, the blocks of keys that attention will read (arXiv 2606.13392).

    The score of a block is the largest scaled dot product of the query with a visible key of the block. The
    ``local_blocks`` blocks that end at the query's own block and the first ``init_blocks`` blocks are always chosen and
    use slots; the best-scored earlier blocks take the rest. Query i of a sequence with n_q queries and n_k keys sees
    its keys ``j <= n_k - n_q + i``.

    Args:
        index_q: [Tq, Hi, Di], float32 (CPU), float16, bfloat16 or float8_e4m3fn.
        index_k: [Tk, Hik, Di], the same type; Hik divides Hi.
        topk: blocks per query and index head, at least 1.
        block_size: tokens per block, 128 or 64 (32 on the CPU).
        init_blocks: how many first blocks are forced.
        local_blocks: how many last blocks are forced; with 0 the own block competes by its score.
        scale: factor of the scores, finite and above 0; ``1 / sqrt(Di)`` by default. An fp8 scale is folded into it.
        cu_seqlens_q: [B+1] int32, offsets of the sequences' queries; None for one sequence.
        cu_seqlens_k: [B+1] int32, offsets of the sequences' keys; given exactly with ``cu_seqlens_q``.
        k_starts: [B] int32: sequence b's keys are ``[k_starts[b], cu_seqlens_k[b+1])``.
        return_lse: whether to return the index branch's log-sum-exp too.
        out: where to write the indices, int32 or int64.
        lse_out: where to write the log-sum-exp.
        workspace: uint8, at least :func:`openmsa.workspace_size` bytes; None lets the call allocate.

    Returns:
        ``indices`` [Hi, Tq, topk] int32: block numbers within the sequence's own keys, scored blocks by descending
        score, then the forced local blocks ascending, then -1. With ``return_lse`` also ``index_lse`` [Hi, Tq] float32,
        the natural log-sum-exp of the scaled scores over the visible tokens of the chosen blocks.

    Raises:
        InvalidArgumentError: an argument is wrong; the message names it.
        UnsupportedError: the backend cannot do this.
    """
    operators = eager
    scale = number("select_blocks", "scale", scale)
    if not plain((index_q, index_k), cu_seqlens_q, cu_seqlens_k, k_starts, out, lse_out, workspace):
        topk, init_blocks, local_blocks, block_size = integers(
            "select_blocks", topk=topk, init_blocks=init_blocks, local_blocks=local_blocks, block_size=block_size
        )
        operators = choose_operators(
            "select_blocks",
            {"index_q": index_q, "index_k": index_k},
            {
                "cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k, "k_starts": k_starts, "out": out,
                "lse_out": lse_out, "workspace": workspace,
            },
        )  # fmt: skip
    inputs: tuple[Any, ...] = (
        index_q, index_k, cu_seqlens_q, cu_seqlens_k, k_starts, topk, init_blocks, local_blocks, block_size, scale,
    )  # fmt: skip
    if operators is not None and out is None and lse_out is None and workspace is None:
        out, lse_out = operators.select_blocks(*inputs, bool(return_lse))
    elif operators is not None and all_given(workspace, out, lse_out if return_lse else out):
        operators.select_blocks_out(*inputs, workspace, out, lse_out)
    else:
        lse = _shapes.per_head(index_q) if return_lse or lse_out is not None else None
        plan = Plan("select_blocks", inputs, (_shapes.indices(index_q, topk), lse), (out, lse_out))
        if workspace is PLAN_ONLY:
            return plan
        out, lse_out = run(plan, workspace, operators)
    return (out, lse_out) if return_lse else out
