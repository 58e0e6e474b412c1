"""Sparse attention over contiguous keys, and both branches of MSA together."""

from __future__ import annotations

from typing import Any, Literal, overload

from . import _shapes
from ._arguments import PLAN_ONLY, all_given, choose_operators, integers, number
from ._call import Plan, run
from ._torch import eager, plain, wants_gradient
from ._types import ArrayT, MsaResult
from .errors import InvalidArgumentError, UnsupportedError

_KL_MODES = ("forward", "backward", "off")


@overload
def sparse_attention(
    q: ArrayT, k: ArrayT, v: ArrayT, indices: ArrayT, *, block_size: int = 128, scale: float | None = None,
    cu_seqlens_q: ArrayT | None = None, cu_seqlens_k: ArrayT | None = None, k_starts: ArrayT | None = None,
    return_lse: Literal[False] = False, deterministic: bool = False, out: ArrayT | None = None,
    lse_out: ArrayT | None = None, workspace: ArrayT | None = None,
) -> ArrayT: ...  # fmt: skip
@overload
def sparse_attention(
    q: ArrayT, k: ArrayT, v: ArrayT, indices: ArrayT, *, block_size: int = 128, scale: float | None = None,
    cu_seqlens_q: ArrayT | None = None, cu_seqlens_k: ArrayT | None = None, k_starts: ArrayT | None = None,
    return_lse: Literal[True], deterministic: bool = False, out: ArrayT | None = None,
    lse_out: ArrayT | None = None, workspace: ArrayT | None = None,
) -> tuple[ArrayT, ArrayT]: ...  # fmt: skip
def sparse_attention(
    q: Any,
    k: Any,
    v: Any,
    indices: Any,
    *,
    block_size: int = 128,
    scale: float | None = None,
    cu_seqlens_q: Any = None,
    cu_seqlens_k: Any = None,
    k_starts: Any = None,
    return_lse: bool = False,
    deterministic: bool = False,
    out: Any = None,
    lse_out: Any = None,
    workspace: Any = None,
) -> Any:
    """Exact softmax attention of each query over the visible tokens of its chosen blocks (arXiv 2606.13392).

    Differentiable in q, k and v (torch, without ``out`` and ``lse_out``); the log-sum-exp is not.

    Args:
        q: [Tq, Hq, D], float32 (CPU), float16 or bfloat16.
        k: [Tk, Hkv, D], q's type.
        v: [Tk, Hkv, Dv], q's type.
        indices: [Hi, Tq, topk] int32 or int64, block numbers within the sequence's own keys, in any order; entries
            below 0 or beyond the visible blocks are ignored and a repeated block counts once. Index head r serves the
            query heads ``[r Hq/Hi, (r+1) Hq/Hi)``.
        block_size: tokens per block, 128 or 64 (32 on the CPU).
        scale: factor of the scores, finite and above 0; ``1 / sqrt(D)`` by default.
        cu_seqlens_q: [B+1] int32, offsets of the sequences' queries; None for one sequence.
        cu_seqlens_k: [B+1] int32, offsets of the sequences' keys; given exactly with ``cu_seqlens_q``.
        k_starts: [B] int32: sequence b's keys are ``[k_starts[b], cu_seqlens_k[b+1])``.
        return_lse: whether to return the log-sum-exp too.
        deterministic: whether the gradients are to be bitwise repeatable (the forward pass always is).
        out: where to write the output.
        lse_out: where to write the log-sum-exp.
        workspace: uint8, at least :func:`openmsa.workspace_size` bytes; None lets the call allocate.

    Returns:
        ``out`` [Tq, Hq, Dv], q's type; 0 for a query that sees no key. With ``return_lse`` also ``lse`` [Hq, Tq]
        float32, the natural log-sum-exp of the scaled scores; -inf for a query that sees no key.

    Raises:
        InvalidArgumentError: an argument is wrong; the message names it.
        UnsupportedError: the backend cannot do this, or a second derivative was asked for.
    """
    operators = eager
    scale = number("sparse_attention", "scale", scale)
    if not plain((q, k, v, indices), cu_seqlens_q, cu_seqlens_k, k_starts, out, lse_out, workspace):
        (block_size,) = integers("sparse_attention", block_size=block_size)
        operators = choose_operators(
            "sparse_attention",
            {"q": q, "k": k, "v": v, "indices": indices},
            {
                "cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k, "k_starts": k_starts, "out": out,
                "lse_out": lse_out, "workspace": workspace,
            },
        )  # fmt: skip
    inputs: tuple[Any, ...] = (q, k, v, indices, cu_seqlens_q, cu_seqlens_k, k_starts, block_size, scale)
    if operators is not None and out is None and lse_out is None and workspace is None:
        out, lse_out = operators.sparse_attention(*inputs, bool(deterministic), bool(return_lse))
    elif operators is not None and workspace is not PLAN_ONLY and wants_gradient(q, k, v):
        for name, given in (("out", out), ("lse_out", lse_out)):
            if given is not None:
                raise UnsupportedError(
                    f"sparse_attention: {name}: got a tensor although q, k or v requires a gradient, expected None or "
                    "torch.no_grad() (results written in place have no gradient)"
                )
        out, lse_out = operators.sparse_attention_workspace(*inputs, bool(deterministic), bool(return_lse), workspace)
    elif operators is not None and all_given(workspace, out, lse_out if return_lse else out):
        operators.sparse_attention_out(*inputs, workspace, out, lse_out)
    else:
        lse = _shapes.per_head(q) if return_lse or lse_out is not None else None
        plan = Plan("sparse_attention", inputs, (_shapes.attention(q, v), lse), (out, lse_out))
        if workspace is PLAN_ONLY:
            return plan
        out, lse_out = run(plan, workspace, operators)
    return (out, lse_out) if return_lse else out


def msa_attention(
    q: ArrayT,
    k: ArrayT,
    v: ArrayT,
    index_q: ArrayT,
    index_k: ArrayT,
    *,
    topk: int = 16,
    block_size: int = 128,
    init_blocks: int = 0,
    local_blocks: int = 1,
    scale: float | None = None,
    index_scale: float | None = None,
    cu_seqlens_q: ArrayT | None = None,
    cu_seqlens_k: ArrayT | None = None,
    k_starts: ArrayT | None = None,
    kl: str = "forward",
    kl_out: ArrayT | None = None,
    warmup: bool = False,
    deterministic: bool = False,
    workspace: ArrayT | None = None,
) -> MsaResult:
    """Choose blocks with the index branch, attend to them, and measure how well the choice follows attention.

    ``kl`` is KL(teacher || student) over the visible tokens of the chosen blocks, summed over queries and index heads
    and divided by ``Hi Tq`` (arXiv 2606.13392). The student is the softmax of the index scores; the teacher is the mean
    of the attention probabilities of the index head's query heads, and is detached. ``out`` is differentiable in q, k
    and v only, ``kl`` in index_q and index_k only.

    Args:
        q: [Tq, Hq, D], float32 (CPU), float16 or bfloat16.
        k: [Tk, Hkv, D], q's type.
        v: [Tk, Hkv, Dv], q's type.
        index_q: [Tq, Hi, Di], float32 (CPU), float16, bfloat16 or float8_e4m3fn; Hkv divides Hi and Hi divides Hq.
        index_k: [Tk, Hik, Di], index_q's type; Hik divides Hi.
        topk: blocks per query and index head, at least 1.
        block_size: tokens per block, 128 or 64 (32 on the CPU).
        init_blocks: how many first blocks are forced.
        local_blocks: how many last blocks are forced; with 0 the own block competes by its score.
        scale: factor of the attention scores, finite and above 0; ``1 / sqrt(D)`` by default.
        index_scale: factor of the index scores, finite and above 0; ``1 / sqrt(Di)`` by default.
        cu_seqlens_q: [B+1] int32, offsets of the sequences' queries; None for one sequence.
        cu_seqlens_k: [B+1] int32, offsets of the sequences' keys; given exactly with ``cu_seqlens_q``.
        k_starts: [B] int32: sequence b's keys are ``[k_starts[b], cu_seqlens_k[b+1])``; gradients of shared keys add.
        kl: "forward": the returned ``kl`` is exact (it costs another product of queries and keys). "backward" (torch):
            the returned ``kl`` reads 0 and carries gradients, and every backward pass through ``out`` or ``kl`` writes
            the KL itself into ``kl_out`` at next to no cost. "off": neither KL nor its gradients.
        kl_out: 0-d float32 on q's device, required with ``kl="backward"`` and optional with "forward": the call itself
            then writes the KL too. Every backward pass through ``out`` or ``kl`` overwrites it with the KL itself.
        warmup: attend to every visible key, and take the KL over all of them; topk, init_blocks and local_blocks are
            ignored and ``indices`` is None.
        deterministic: whether the gradients are to be bitwise repeatable (the forward pass always is).
        workspace: uint8, at least :func:`openmsa.workspace_size` bytes; None lets the call allocate.

    Returns:
        :class:`MsaResult`: ``out`` [Tq, Hq, Dv], ``kl`` 0-d float32, ``indices`` [Hi, Tq, topk] int32, ``lse`` [Hq, Tq]
        and ``index_lse`` [Hi, Tq] float32 (natural logarithms). ``kl`` and ``index_lse`` are None with ``kl="off"``.

    Raises:
        InvalidArgumentError: an argument is wrong; the message names it.
        UnsupportedError: the backend cannot do this, a float8 tensor wants a gradient, or a second derivative was asked
            for.
    """
    operators = eager
    scale = number("msa_attention", "scale", scale)
    index_scale = number("msa_attention", "index_scale", index_scale)
    if not plain((q, k, v, index_q, index_k), cu_seqlens_q, cu_seqlens_k, k_starts, kl_out, workspace):
        topk, init_blocks, local_blocks, block_size = integers(
            "msa_attention", topk=topk, init_blocks=init_blocks, local_blocks=local_blocks, block_size=block_size
        )
        operators = choose_operators(
            "msa_attention",
            {"q": q, "k": k, "v": v, "index_q": index_q, "index_k": index_k},
            {
                "cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k, "k_starts": k_starts, "kl_out": kl_out,
                "workspace": workspace,
            },
        )  # fmt: skip
    _check_kl(kl, kl_out, q, operators)
    warmup = bool(warmup)
    inputs: tuple[Any, ...] = (
        q, k, v, index_q, index_k, cu_seqlens_q, cu_seqlens_k, k_starts, topk, init_blocks, local_blocks, block_size,
        scale, index_scale, warmup,
    )  # fmt: skip
    results: Any
    if operators is not None and workspace is not PLAN_ONLY:
        settings = (*inputs, kl, bool(deterministic), kl_out)
        if workspace is None:
            results = operators.msa_attention(*settings)
        else:
            results = operators.msa_attention_workspace(*settings, workspace)
    else:
        plan = Plan(
            "msa_attention",
            inputs,
            (
                _shapes.attention(q, v),
                _shapes.per_head(q),
                None if warmup else _shapes.indices(index_q, topk),
                None if kl == "off" else _shapes.per_head(index_q),
                _shapes.SCALAR if kl == "forward" else None,
            ),
            (None, None, None, None, kl_out),
        )
        if workspace is PLAN_ONLY:
            return plan  # type: ignore[return-value]
        results = run(plan, workspace, None)
    out, lse, indices, index_lse, divergence = results
    if kl == "off":
        divergence = index_lse = None
    elif kl == "forward" and kl_out is not None:
        # The returned kl is another array: it stays what it is when kl_out is written again.
        given: Any = kl_out
        if operators is None:
            divergence = given.copy()
        else:
            given.copy_(divergence.detach())
    return MsaResult(out, divergence, None if warmup else indices, lse, index_lse)


def _check_kl(kl: Any, kl_out: Any, q: Any, operators: Any) -> None:
    if not isinstance(kl, str) or kl not in _KL_MODES:
        raise InvalidArgumentError(f"msa_attention: kl: got {kl!r}, expected 'forward', 'backward' or 'off'")
    if kl_out is not None and kl == "off":
        raise InvalidArgumentError("msa_attention: kl_out: got an array with kl='off', expected None")
    if operators is None:
        if kl == "backward":
            raise UnsupportedError("msa_attention: kl: got 'backward' with numpy arrays, which have no backward pass, "
                                   "expected 'forward' or 'off'")  # fmt: skip
        return
    if kl_out is None:
        if kl != "backward":
            return
        got = "missing although kl='backward'"
    elif (
        len(kl_out.shape) == 0 and str(kl_out.dtype) == "torch.float32" and kl_out.device == q.device
        and not kl_out.requires_grad
    ):  # fmt: skip
        return
    else:
        got = f"got {kl_out.dtype} {list(kl_out.shape)} on {kl_out.device}"
        if kl_out.requires_grad:
            got += " that requires a gradient"
    raise InvalidArgumentError(
        f"msa_attention: kl_out: {got}, expected a 0-d torch.float32 tensor on {q.device} that requires no gradient"
    )
