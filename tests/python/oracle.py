"""What openmsa computes, once more: float64 numpy on dense masks, written from the definition alone.

Every function takes float64 arrays in the library's shapes (caches already decoded) and `sequences`, a list of (first
query row, n_q, rows of the keys by position, -1 where a key is invisible). Small problems only: masks are
[queries, keys]."""

from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

Array = np.ndarray[Any, Any]
Sequences = list[tuple[int, int, Array]]


@dataclass
class View:
    """The queries and keys of one sequence."""

    queries: slice
    rows: Array  # key rows, 0 where invisible
    visible: Array  # [n_q, n_k] bool
    block_of: Array  # [n_k]
    blocks: int
    position: Array  # [n_q]: last key position that the query may see, negative for none


def views(sequences: Sequences, block_size: int) -> list[View]:
    result = []
    for first, n_q, rows in sequences:
        n_k = len(rows)
        position = n_k - n_q + np.arange(n_q)
        j = np.arange(n_k)
        visible = (j[None, :] <= position[:, None]) & (rows >= 0)[None, :]
        result.append(
            View(
                slice(first, first + n_q),
                np.maximum(rows, 0),
                visible,
                j // block_size,
                -(-n_k // block_size),
                position,
            )
        )
    return result


def flat(x: Array) -> Array:
    """A key tensor as [rows, heads, dim]; paged ones count rows through the pool."""
    return x.reshape(-1, *x.shape[-2:])


def log_sum_exp(x: Array) -> Array:
    """Over the last axis; -inf where there is nothing, NaN where any element is NaN, +inf where one is +inf."""
    top = x.max(axis=-1, initial=-np.inf)
    shift = np.where(np.isfinite(top), top, 0.0)
    with np.errstate(divide="ignore", over="ignore"):
        return np.where(np.isposinf(top), np.inf, shift + np.log(np.exp(x - shift[..., None]).sum(axis=-1)))


def masked_scores(q: Array, k: Array, scale: float, mask: Array) -> Array:
    with np.errstate(invalid="ignore"):
        return np.where(mask, scale * (q @ k.T), -np.inf)


def probabilities(scores: Array, lse: Array) -> Array:
    """exp(score - lse), 0 where a query has no key or the key is masked."""
    with np.errstate(invalid="ignore"):
        p = np.exp(scores - lse[..., None])
    return np.where(np.isneginf(scores) & ~np.isnan(lse[..., None]), 0.0, p)


def weighted_sum(weights: Array, x: Array, mask: Array) -> Array:
    """weights @ x where only masked-in pairs count, even if x holds NaN or inf elsewhere."""
    bad = ~np.isfinite(x).all(axis=1)
    with np.errstate(invalid="ignore"):
        result = np.where(mask[:, ~bad], weights[:, ~bad], 0.0) @ x[~bad]
        for j in np.flatnonzero(bad):
            result += np.where(mask[:, j, None], weights[:, j, None] * x[j], 0.0)
    return result


# ---- selection ------------------------------------------------------------------------------------------------------


@dataclass
class BlockScores:
    """Per sequence: scores [Hi, n_q, blocks] with -inf for NaN, which blocks are visible, which are forced."""

    scores: Array
    visible: Array  # [n_q, blocks]
    own: Array  # [n_q], -1 for none
    queries: slice


def block_scores(
    index_q: Array, index_k: Array, sequences: Sequences, block_size: int, scale: float
) -> list[BlockScores]:
    heads, per = index_q.shape[1], index_q.shape[1] // index_k.shape[-2]
    keys = flat(index_k)
    result = []
    for view in views(sequences, block_size):
        n_q, n_k = view.visible.shape
        padding = view.blocks * block_size - n_k
        visible = np.pad(view.visible, ((0, 0), (0, padding))).reshape(n_q, view.blocks, block_size).any(-1)
        scores = np.full((heads, n_q, view.blocks), -np.inf)
        for r in range(heads):
            z = masked_scores(index_q[view.queries, r], keys[view.rows, r // per], scale, view.visible)
            z = np.where(np.isnan(z), -np.inf, z)
            z = np.pad(z, ((0, 0), (0, padding)), constant_values=-np.inf)
            scores[r] = z.reshape(n_q, view.blocks, block_size).max(-1)
        result.append(BlockScores(scores, visible, np.maximum(view.position, -1) // block_size, view.queries))
    return result


def select(
    index_q: Array,
    index_k: Array,
    sequences: Sequences,
    *,
    topk: int,
    block_size: int,
    init_blocks: int,
    local_blocks: int,
    scale: float,
) -> tuple[Array, Array]:
    """(indices [Hi, Tq, topk], index_lse [Hi, Tq])."""
    tokens, heads, _ = index_q.shape
    indices = np.full((heads, tokens, topk), -1, np.int64)
    for part in block_scores(index_q, index_k, sequences, block_size, scale):
        n_q, blocks = part.visible.shape
        if n_q == 0 or blocks == 0:
            continue
        number = np.broadcast_to(np.arange(blocks), (n_q, blocks))
        local = part.visible & (number > part.own[:, None] - local_blocks) & (number <= part.own[:, None])
        init = part.visible & ~local & (number < init_blocks)
        rest = part.visible & ~local & ~init
        # Who gets a slot: local from the own block backwards, init from the first, the rest by score.
        group = np.select([local, init, rest], [0, 1, 2], 3)
        for r in range(heads):
            score = part.scores[r]
            urgency = np.select([local, init, rest], [-number, number, -score], np.inf)
            order = np.lexsort((number, urgency, group), axis=-1)
            taken = np.zeros((n_q, blocks), bool)
            np.put_along_axis(taken, order[:, :topk], True, axis=-1)
            taken &= part.visible
            # How they stand: scored and init blocks by score, then local ones ascending, then nothing.
            place = np.select([taken & ~local, taken & local], [0, 1], 2)
            order = np.lexsort((number, np.where(local, number, -score), place), axis=-1)
            sorted_taken = np.take_along_axis(taken, order, axis=-1)
            width = min(topk, blocks)
            indices[r, part.queries, :width] = np.where(sorted_taken, order, -1)[:, :width]
    return indices, index_lse(index_q, index_k, indices, sequences, block_size, scale)


def chosen_masks(indices: Array | None, heads: int, view: View, block_size: int) -> Array:
    """[Hi, n_q, n_k]: visible keys of the chosen blocks; of every block without indices."""
    if indices is None:
        return np.broadcast_to(view.visible, (heads, *view.visible.shape))
    n_q, _ = view.visible.shape
    entries = indices[:, view.queries].astype(np.int64)
    own = np.maximum(view.position, -1) // block_size
    valid = (entries >= 0) & (entries <= own[None, :, None])
    chosen = np.zeros((heads, n_q, view.blocks + 1), bool)
    np.put_along_axis(chosen, np.where(valid, entries, view.blocks), True, axis=-1)
    return chosen[:, :, view.block_of] & view.visible


def index_lse(
    index_q: Array, index_k: Array, indices: Array | None, sequences: Sequences, block_size: int, scale: float
) -> Array:
    tokens, heads, _ = index_q.shape
    per = heads // index_k.shape[-2]
    keys = flat(index_k)
    result = np.full((heads, tokens), -np.inf)
    for view in views(sequences, block_size):
        masks = chosen_masks(indices, heads, view, block_size)
        for r in range(heads):
            z = masked_scores(index_q[view.queries, r], keys[view.rows, r // per], scale, masks[r])
            result[r, view.queries] = log_sum_exp(z)
    return result


# ---- attention ------------------------------------------------------------------------------------------------------


def attend(
    q: Array,
    k: Array,
    v: Array,
    indices: Array | None,
    index_heads: int,
    sequences: Sequences,
    block_size: int,
    scale: float,
) -> tuple[Array, Array]:
    """(out [Tq, Hq, Dv], lse [Hq, Tq])."""
    tokens, hq, _ = q.shape
    group, per = hq // index_heads, hq // k.shape[-2]
    keys, vals = flat(k), flat(v)
    out = np.zeros((tokens, hq, v.shape[-1]))
    lse = np.full((hq, tokens), -np.inf)
    for view in views(sequences, block_size):
        masks = chosen_masks(indices, index_heads, view, block_size)
        for h in range(hq):
            mask = masks[h // group]
            s = masked_scores(q[view.queries, h], keys[view.rows, h // per], scale, mask)
            lse[h, view.queries] = log_sum_exp(s)
            p = probabilities(s, lse[h, view.queries])
            out[view.queries, h] = weighted_sum(p, vals[view.rows, h // per], mask)
    return out, lse


@dataclass
class Gradients:
    q: Array
    k: Array
    v: Array
    index_q: Array | None
    index_k: Array | None
    kl: float


def backward(
    q: Array,
    k: Array,
    v: Array,
    d_out: Array,
    indices: Array | None,
    index_heads: int,
    sequences: Sequences,
    block_size: int,
    scale: float,
    index: tuple[Array, Array, float] | None = None,
    d_kl: float = 0.0,
) -> Gradients:
    """Gradients of <out, d_out> in q, k, v, and of d_kl * KL (teacher detached) in index: (index_q, index_k, scale)."""
    tokens, hq, _ = q.shape
    group, per = hq // index_heads, hq // k.shape[-2]
    keys, vals = flat(k), flat(v)
    dq, dk, dv = np.zeros(q.shape), np.zeros(keys.shape), np.zeros(vals.shape)
    kl = 0.0
    if index is not None:
        iq, ik_any, index_scale = index
        ik, index_per = flat(ik_any), index_heads // ik_any.shape[-2]
        diq, dik = np.zeros(iq.shape), np.zeros(ik.shape)
    for view in views(sequences, block_size):
        masks = chosen_masks(indices, index_heads, view, block_size)
        rows, queries = view.rows, view.queries
        for r in range(index_heads):
            mask = masks[r]
            teacher = np.zeros(mask.shape)
            for h in range(r * group, (r + 1) * group):
                kv = h // per
                s = masked_scores(q[queries, h], keys[rows, kv], scale, mask)
                p = probabilities(s, log_sum_exp(s))
                teacher += p / group
                do = d_out[queries, h]
                with np.errstate(invalid="ignore"):
                    dp = np.where(mask, do @ vals[rows, kv].T, 0.0)
                    delta = (p * dp).sum(-1, keepdims=True)
                    ds = np.where(mask, p * (dp - delta), 0.0)
                dq[queries, h] += scale * weighted_sum(ds, keys[rows, kv], mask)
                np.add.at(dk[:, kv], rows, scale * weighted_sum(ds.T, q[queries, h], mask.T))
                np.add.at(dv[:, kv], rows, weighted_sum(p.T, do, mask.T))
            if index is None:
                continue
            z = masked_scores(iq[queries, r], ik[rows, r // index_per], index_scale, mask)
            student_lse = log_sum_exp(z)
            with np.errstate(divide="ignore", invalid="ignore"):
                terms = teacher * (np.log(teacher) - (z - student_lse[:, None]))
                kl += np.where(mask & ~(teacher == 0), terms, 0.0).sum()
            student = probabilities(z, student_lse)
            dz = np.where(mask, (student - teacher) * (d_kl / max(index_heads * tokens, 1)), 0.0)
            diq[queries, r] += index_scale * weighted_sum(dz, ik[rows, r // index_per], mask)
            np.add.at(dik[:, r // index_per], rows, index_scale * weighted_sum(dz.T, iq[queries, r], mask.T))
    mean = kl / (index_heads * tokens) if tokens else 0.0
    if index is None:
        return Gradients(dq, dk.reshape(k.shape), dv.reshape(v.shape), None, None, 0.0)
    return Gradients(dq, dk.reshape(k.shape), dv.reshape(v.shape), diq, dik.reshape(ik_any.shape), float(mean))


# ---- the rest -------------------------------------------------------------------------------------------------------


def captured_mass(
    q: Array, k: Array, indices: Array, sequences: Sequences, block_size: int, scale: float
) -> tuple[Array, Array]:
    """(share, best), both [Hi, Tq]."""
    heads, (tokens, hq, _) = indices.shape[0], q.shape
    group, per = hq // heads, hq // k.shape[-2]
    keys = flat(k)
    share, best = np.zeros((heads, tokens)), np.zeros((heads, tokens))
    for view in views(sequences, block_size):
        masks = chosen_masks(indices, heads, view, block_size)
        n_q, n_k = view.visible.shape
        if n_q == 0 or n_k == 0:
            continue
        starts = np.arange(0, n_k, block_size)
        for r in range(heads):
            dense = np.zeros((n_q, n_k))
            for h in range(r * group, (r + 1) * group):
                s = masked_scores(q[view.queries, h], keys[view.rows, h // per], scale, view.visible)
                dense += probabilities(s, log_sum_exp(s)) / group
            mass = np.add.reduceat(dense, starts, axis=1)
            chosen = np.logical_or.reduceat(masks[r], starts, axis=1)
            share[r, view.queries] = np.where(chosen, mass, 0.0).sum(1)
            falling = -np.sort(-mass, axis=1)
            allowed = np.arange(view.blocks)[None, :] < chosen.sum(1)[:, None]
            best[r, view.queries] = np.where(allowed, falling, 0.0).sum(1)
    return share, best


def combine(outs: Array, lses: Array) -> tuple[Array, Array]:
    lse = log_sum_exp(np.moveaxis(lses, 0, -1))
    weights = probabilities(np.moveaxis(lses, 0, -1), lse)  # [Hq, Tq, S]
    return np.einsum("hts,sthd->thd", weights, outs), lse


def store_e4m3(x: Array, factor: float) -> Array:
    """Nearest float8 e4m3 of the float32 quotient x / factor, ties to even, saturated at 448."""
    quotient = x.astype(np.float32) / np.float32(factor)
    return np.clip(quotient, -448.0, 448.0).astype(ml_dtypes.float8_e4m3fn)


def append_targets(
    cu_seqlens_q: list[int], seq_lens: list[int], block_table: list[list[int]], block_size: int
) -> list[tuple[int, int]]:
    """(new row, row of the pool) of everything that paged_append writes."""
    result = []
    for b, length in enumerate(seq_lens):
        n_q = cu_seqlens_q[b + 1] - cu_seqlens_q[b]
        for t in range(n_q):
            position = length - n_q + t
            if position >= 0:
                row = block_table[b][position // block_size] * block_size + position % block_size
                result.append((cu_seqlens_q[b] + t, row))
    return result
