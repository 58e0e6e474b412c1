"""Shapes and types of every operation's results, for numpy, torch and torch's fake tensors alike.

They must not fail on arrays of a wrong rank: the core refuses those, by name, when the call reaches it.
"""

from __future__ import annotations

from typing import Any, NamedTuple


class Output(NamedTuple):
    """One result: `dtype` is a name such as "float32"; None means the type of the array `like`."""

    shape: tuple[Any, ...]
    dtype: str | None = "float32"
    like: Any = None


def axis(array: Any, index: int) -> Any:
    return array.shape[index] if len(array.shape) > index else 0


def indices(index_q: Any, topk: Any) -> Output:
    # A topk that is no length goes on to the check that names it.
    length = topk if hasattr(topk, "__index__") and 0 < topk < 2**31 else 0
    return Output((axis(index_q, 1), axis(index_q, 0), length), "int32")


def per_head(q: Any) -> Output:
    """[heads, Tq]: lse of q's heads, or index_lse of index_q's."""
    return Output((axis(q, 1), axis(q, 0)))


def attention(q: Any, v: Any) -> Output:
    return Output((axis(q, 0), axis(q, 1), axis(v, max(len(v.shape) - 1, 0))), None, q)


def combined(outs: Any, lses: Any) -> tuple[Output, Output]:
    return Output(tuple(outs.shape[1:]), None, outs), Output(tuple(lses.shape[1:]))


def mass(indices: Any) -> Output:
    return Output((axis(indices, 0), axis(indices, 1)))


SCALAR = Output(())
