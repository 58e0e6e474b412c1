"""Index vectors that benches and tests select on, from a seed. numpy only; float32, cast as needed.

random(...)   independent normal vectors: neighbouring tokens choose almost unrelated blocks.
overlap(...)  keys as in random, with key 5 moved to 16 u (|u| = 1), a sink; queries follow q[i] = rho q[i-1] +
              sqrt(1 - rho^2) noise[i] along the sequence, plus 6 u. At 128 Ki tokens, topk 16 and blocks of 128, 4, 8
              and 16 neighbours choose about 23, 30 and 41 distinct blocks, and more than 99 % choose block 0.

The selection itself is what select_blocks makes of these vectors, so that a time from end to end includes it.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

Vectors = tuple[NDArray[np.float32], NDArray[np.float32]]  # index_q [n, heads, dim], index_k [n, 1, dim]

SINK, SINK_LENGTH, QUERY_PULL = 5, 16, 6


def random(n: int, heads: int = 4, dim: int = 128, seed: int = 0) -> Vectors:
    generator = np.random.default_rng(seed)
    index_q = generator.standard_normal((n, heads, dim), dtype=np.float32)
    return index_q, generator.standard_normal((n, 1, dim), dtype=np.float32)


def overlap(n: int, heads: int = 4, dim: int = 128, seed: int = 0, rho: float = 0.99) -> Vectors:
    return make_overlap(*random(n, heads, dim, seed), seed, rho)


def make_overlap(index_q: NDArray[np.float32], index_k: NDArray[np.float32], seed: int, rho: float = 0.99) -> Vectors:
    """`overlap` from what `random` made of the same seed, in place: the draws take longest."""
    n, heads, dim = index_q.shape
    direction: NDArray[np.float32] = np.asarray(np.random.default_rng(seed).standard_normal(dim), dtype=np.float32)
    direction /= np.linalg.norm(direction)
    correlate(index_q.reshape(n, heads * dim), rho)
    index_q += QUERY_PULL * direction
    if n > SINK:
        index_k[SINK, 0] = SINK_LENGTH * direction
    return index_q, index_k


def correlate(rows: NDArray[np.float32], rho: float) -> None:
    """rows[i] = rho rows[i-1] + sqrt(1 - rho^2) rows[i] in place, in float32 and in this order, about 2 us a row."""
    if len(rows) == 0:
        return
    rows[1:] *= np.float32(np.sqrt(1 - rho * rho))
    carried, factor, previous = np.empty_like(rows[0]), np.float32(rho), rows[0]
    for row in rows[1:]:
        np.multiply(previous, factor, out=carried)
        np.add(carried, row, out=row)
        previous = row


GENERATORS: dict[str, Callable[..., Vectors]] = {"random": random, "overlap": overlap}
