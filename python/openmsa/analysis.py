"""What surrounds attention: merging partial attentions, and how much of dense attention a selection holds."""

from __future__ import annotations

from typing import Any

from . import _shapes
from ._arguments import choose_operators, integers, number
from ._call import Plan, run
from ._torch import eager, plain
from ._types import ArrayT


def combine(outs: ArrayT, lses: ArrayT) -> tuple[ArrayT, ArrayT]:
    """Merge attentions of the same queries over disjoint sets of keys. It has no gradient.

    Args:
        outs: [S, Tq, Hq, Dv], float32 (CPU), float16 or bfloat16: the partial outputs.
        lses: [S, Hq, Tq] float32: their natural log-sum-exps; -inf where a part saw no key.

    Returns:
        ``out`` [Tq, Hq, Dv], outs' type, and ``lse`` [Hq, Tq] float32.

    Raises:
        InvalidArgumentError: an argument is wrong; the message names it.
        UnsupportedError: the backend cannot do this.
    """
    operators = eager
    if not plain((outs, lses)):
        operators = choose_operators("combine", {"outs": outs, "lses": lses}, {})
    results: Any
    if operators is None:
        results = run(Plan("combine", (outs, lses), _shapes.combined(outs, lses), (None, None)), None, None)
    else:
        results = operators.combine(outs, lses)
    out, lse = results
    return out, lse


def captured_mass(
    q: ArrayT,
    k: ArrayT,
    indices: ArrayT,
    *,
    block_size: int = 128,
    scale: float | None = None,
    cu_seqlens_q: ArrayT | None = None,
    cu_seqlens_k: ArrayT | None = None,
    k_starts: ArrayT | None = None,
) -> tuple[ArrayT, ArrayT]:
    """How much of dense attention a selection holds, and the most that one of its size could. It has no gradient.

    Args:
        q: [Tq, Hq, D], float32 (CPU), float16 or bfloat16.
        k: [Tk, Hkv, D], q's type.
        indices: [Hi, Tq, topk] int32 or int64, as in :func:`openmsa.sparse_attention`.
        block_size: tokens per block, 128 or 64 (32 on the CPU).
        scale: factor of the scores, finite and above 0; ``1 / sqrt(D)`` by default.
        cu_seqlens_q: [B+1] int32, offsets of the sequences' queries; None for one sequence.
        cu_seqlens_k: [B+1] int32, offsets of the sequences' keys; given exactly with ``cu_seqlens_q``.
        k_starts: [B] int32: sequence b's keys are ``[k_starts[b], cu_seqlens_k[b+1])``.

    Returns:
        ``share`` and ``best``, both [Hi, Tq] float32 from 0 to 1: the dense attention probability, averaged over the
        index head's query heads, inside the row's valid distinct blocks, and the most that as many blocks could hold.
        Both are 0 for a query that sees no key.

    Raises:
        InvalidArgumentError: an argument is wrong; the message names it.
        UnsupportedError: the backend cannot do this.
    """
    operators = eager
    scale = number("captured_mass", "scale", scale)
    if not plain((q, k, indices), cu_seqlens_q, cu_seqlens_k, k_starts):
        (block_size,) = integers("captured_mass", block_size=block_size)
        operators = choose_operators(
            "captured_mass",
            {"q": q, "k": k, "indices": indices},
            {"cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k, "k_starts": k_starts},
        )
    inputs: tuple[Any, ...] = (q, k, indices, cu_seqlens_q, cu_seqlens_k, k_starts, block_size, scale)
    results: Any
    if operators is None:
        results = run(Plan("captured_mass", inputs, (_shapes.mass(indices),) * 2, (None, None)), None, None)
    else:
        results = operators.captured_mass(*inputs)
    share, best = results
    return share, best
