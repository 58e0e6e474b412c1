"""How the tokens of a call form sequences: one, several packed, or the rows of a batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..errors import InvalidArgumentError


class Sequences(NamedTuple):
    positions: Tensor
    """[T], each token's place in its sequence."""
    arguments: dict[str, Tensor]
    """What the operations take: cu_seqlens_q, cu_seqlens_k and k_starts, or nothing for one sequence."""


def sequences_of(hidden: Tensor, cu_seqlens: Tensor | None, lengths: Tensor | None) -> Sequences:
    """The sequences of `hidden`, [T, channels] or [B, S, channels]."""
    if hidden.ndim == 3:
        refuse("cu_seqlens", cu_seqlens, "None with a batch (its rows are the sequences)")
        return _batched(hidden, lengths)
    refuse("lengths", lengths, "None with packed tokens (cu_seqlens says where sequences end)")
    tokens = torch.arange(hidden.shape[0], device=hidden.device)
    if cu_seqlens is None:
        return Sequences(tokens, {})
    check_integers("cu_seqlens", cu_seqlens, "[B+1]", lambda shape: len(shape) == 1 and shape[0] > 0, torch.int32)
    _check_device("cu_seqlens", cu_seqlens, hidden)
    return Sequences(positions_within(cu_seqlens, tokens), {"cu_seqlens_q": cu_seqlens, "cu_seqlens_k": cu_seqlens})


def positions_within(cu_seqlens: Tensor, tokens: Tensor) -> Tensor:
    """Each token's place in its sequence. Empty sequences are allowed."""
    offsets = cu_seqlens.to(tokens)
    sequence = torch.searchsorted(offsets, tokens, right=True) - 1
    return tokens - offsets[sequence.clamp(0, offsets.shape[0] - 1)]


def _batched(hidden: Tensor, lengths: Tensor | None) -> Sequences:
    batch, length, _ = hidden.shape
    positions = torch.arange(length, device=hidden.device).repeat(batch)
    ends = torch.arange(batch + 1, dtype=torch.int32, device=hidden.device) * length
    if lengths is None:
        return Sequences(positions, {"cu_seqlens_q": ends, "cu_seqlens_k": ends})
    check_integers("lengths", lengths, f"[{batch}]", lambda shape: shape == (batch,))
    if lengths.device.type == "cpu" and not torch.compiler.is_compiling():
        wrong = [int(n) for n in lengths if not 0 <= n <= length]
        if wrong:
            raise InvalidArgumentError(f"SparseAttention: lengths: got {wrong[0]}, expected 0 to {length}")
    # Each row becomes two sequences: its tokens, and its padding, whose queries get no keys.
    starts, ends = ends[:-1], ends[1:]
    cuts = torch.stack((starts + lengths.to(ends), ends), dim=1).flatten()
    offsets = torch.cat((cuts.new_zeros(1), cuts))
    keys = torch.stack((starts, ends), dim=1).flatten()
    return Sequences(positions, {"cu_seqlens_q": offsets, "cu_seqlens_k": offsets, "k_starts": keys})


def positions_given(positions: Tensor, hidden: Tensor) -> Tensor:
    """The caller's positions, as [T]."""
    *rows, length, _ = hidden.shape
    check_integers(
        "positions", positions, str(list(hidden.shape[:-1])), lambda shape: shape in ((length,), (*rows, length))
    )
    _check_device("positions", positions, hidden)
    return positions.expand(*rows, length).reshape(-1)


def refuse(name: str, value: Any, expected: str) -> None:
    """Refuses a value that has no meaning in this call."""
    if value is not None:
        raise InvalidArgumentError(f"SparseAttention: {name}: got a {type(value).__name__}, expected {expected}")


def _check_device(name: str, value: Tensor, hidden: Tensor) -> None:
    if value.device != hidden.device:
        raise InvalidArgumentError(
            f"SparseAttention: {name}: got a tensor on {value.device}, expected one on {hidden.device}, as hidden"
        )


def check_integers(
    name: str, value: Any, expected: str, fits: Callable[[tuple[int, ...]], bool], *dtypes: torch.dtype
) -> None:
    """Refuses what is no integer tensor, of `dtypes` when given, or has a shape that does not fit."""
    dtypes = dtypes or (torch.int32, torch.int64)
    if isinstance(value, Tensor) and value.dtype in dtypes and fits(tuple(value.shape)):
        return
    got = f"{value.dtype} {list(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
    kinds = " or ".join(str(dtype) for dtype in dtypes)
    raise InvalidArgumentError(f"SparseAttention: {name}: got {got}, expected {kinds} {expected}")
