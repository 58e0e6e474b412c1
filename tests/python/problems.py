"""Small problems for the Python tests, and MSA once more as dense, differentiable torch code in float64."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

TRAINED = ("q", "k", "v", "index_q", "index_k")


@dataclass
class Problem:
    q: Tensor
    k: Tensor
    v: Tensor
    index_q: Tensor
    index_k: Tensor
    topk: int = 2
    block_size: int = 32
    lengths: list[tuple[int, int, int]] = field(default_factory=list)  # (n_q, first key, end of keys) of each sequence
    sequences: dict[str, Tensor] = field(default_factory=dict)

    @property
    def attention(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.q, self.k, self.v

    @property
    def index(self) -> tuple[Tensor, Tensor]:
        return self.index_q, self.index_k

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return (*self.attention, *self.index)

    @property
    def selection(self) -> dict[str, Any]:
        return {"topk": self.topk, "block_size": self.block_size, **self.sequences}

    @property
    def layout(self) -> dict[str, Any]:
        return {"block_size": self.block_size, **self.sequences}

    def trainable(self) -> Problem:
        for tensor in self.tensors:
            tensor.requires_grad_()
        return self


def make_problem(
    lengths: tuple[tuple[int, int], ...] = ((150, 150),), *, packed: bool | None = None, shared_keys: bool = False,
    dtype: torch.dtype = torch.float32, heads: tuple[int, int, int, int] = (4, 1, 2, 1), dim: int = 16, dim_v: int = 24,
    dim_index: int = 8, seed: int = 0, **settings: Any,
) -> Problem:  # fmt: skip
    """Sequences of (queries, keys); `heads` is (Hq, Hkv, Hi, Hik). With `shared_keys` all start at key 0."""
    generator = torch.Generator().manual_seed(seed)
    q_heads, kv_heads, index_heads, index_key_heads = heads
    ends_q, ends_k, starts = [0], [0], []
    for n_q, n_k in lengths:
        starts.append(0 if shared_keys else ends_k[-1])
        ends_q.append(ends_q[-1] + n_q)
        ends_k.append(n_k if shared_keys else ends_k[-1] + n_k)
    tokens_q, tokens_k = ends_q[-1], ends_k[-1]

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    sequences = {}
    if packed or shared_keys or len(lengths) > 1:
        sequences["cu_seqlens_q"] = torch.tensor(ends_q, dtype=torch.int32)
        sequences["cu_seqlens_k"] = torch.tensor(ends_k, dtype=torch.int32)
    if shared_keys:
        sequences["k_starts"] = torch.tensor(starts, dtype=torch.int32)
    return Problem(
        normal(tokens_q, q_heads, dim), normal(tokens_k, kv_heads, dim), normal(tokens_k, kv_heads, dim_v),
        normal(tokens_q, index_heads, dim_index), normal(tokens_k, index_key_heads, dim_index),
        lengths=[(n_q, start, end) for (n_q, _), start, end in zip(lengths, starts, ends_k[1:], strict=True)],
        sequences=sequences, **settings,
    )  # fmt: skip


@dataclass
class Paged:
    """The same keys in pages of a pool, in shuffled order."""

    k_cache: Tensor
    v_cache: Tensor
    index_k_cache: Tensor
    block_table: Tensor
    seq_lens: Tensor
    cu_seqlens_q: Tensor

    @property
    def requests(self) -> dict[str, Tensor]:
        return {"block_table": self.block_table, "seq_lens": self.seq_lens, "cu_seqlens_q": self.cu_seqlens_q}


def make_paged(problem: Problem, seed: int = 0) -> Paged:
    block = problem.block_size
    counts = [-(-(end - start) // block) for _, start, end in problem.lengths]
    order = torch.randperm(sum(counts) + 2, generator=torch.Generator().manual_seed(seed))
    pages = len(order)
    table = torch.full((len(counts), max(counts) + 1), -7, dtype=torch.int32)
    caches = [torch.full((pages, block, *x.shape[1:]), math.nan).to(x.dtype) for x in
              (problem.k, problem.v, problem.index_k)]  # fmt: skip
    taken = 0
    for request, (_, start, end) in enumerate(problem.lengths):
        for number in range(counts[request]):
            page = int(order[taken])
            taken += 1
            table[request, number] = page
            rows = slice(start + number * block, min(start + (number + 1) * block, end))
            for cache, source in zip(caches, (problem.k, problem.v, problem.index_k), strict=True):
                cache[page, : rows.stop - rows.start] = source.detach()[rows]
    ends = [0]
    for n_q, _, _ in problem.lengths:
        ends.append(ends[-1] + n_q)
    lens = torch.tensor([end - start for _, start, end in problem.lengths], dtype=torch.int32)
    return Paged(*caches, table, lens, torch.tensor(ends, dtype=torch.int32))


@dataclass
class Dense:
    out: Tensor
    kl: Tensor
    lse: Tensor
    index_lse: Tensor


def dense_msa(
    problem: Problem, tensors: tuple[Tensor, ...], indices: Tensor | None, scale: float | None = None,
    index_scale: float | None = None,
) -> Dense:  # fmt: skip
    """The definition with dense masks; `indices` None is warm-up. Gradients flow as the contract says."""
    q, k, v, index_q, index_k = tensors
    heads, index_heads = q.shape[1], index_q.shape[1]
    group = heads // index_heads
    scale = scale or q.shape[2] ** -0.5
    index_scale = index_scale or index_q.shape[2] ** -0.5
    outs, lses, index_lses = [], [], []
    kl = torch.zeros((), dtype=torch.float64)
    first = 0
    for n_q, start, end in problem.lengths:
        n_k = end - start
        position = n_k - n_q + torch.arange(n_q)
        visible = torch.arange(n_k)[None, :] <= position[:, None]
        chosen = visible.expand(index_heads, n_q, n_k)
        if indices is not None:
            blocks = torch.arange(n_k) // problem.block_size
            rows = indices[:, first : first + n_q].long()
            chosen = chosen & (rows[..., None] == blocks).any(2)
        keys = k[start:end].repeat_interleave(heads // k.shape[1], 1)
        values = v[start:end].repeat_interleave(heads // v.shape[1], 1)
        index_keys = index_k[start:end].repeat_interleave(index_heads // index_k.shape[1], 1)
        mask = chosen.repeat_interleave(group, 0)
        scores = torch.einsum("ihd,jhd->hij", q[first : first + n_q], keys) * scale
        lse = torch.logsumexp(scores.masked_fill(~mask, -math.inf), -1)
        seen = torch.isfinite(lse)
        weights = torch.where(mask & seen[..., None], (scores - torch.where(seen, lse, 0)[..., None]).exp(), 0)
        outs.append(torch.einsum("hij,jhd->ihd", weights, values))
        z = torch.einsum("ird,jrd->rij", index_q[first : first + n_q], index_keys) * index_scale
        index_lse = torch.logsumexp(z.masked_fill(~chosen, -math.inf), -1)
        student = z - torch.where(torch.isfinite(index_lse), index_lse, 0)[..., None]
        teacher = weights.detach().unflatten(0, (index_heads, group)).mean(1)
        entropy = torch.where(teacher > 0, teacher * torch.where(teacher > 0, teacher, 1).log(), 0)
        kl = kl + (entropy - torch.where(chosen, teacher * student, 0)).sum()
        lses.append(lse)
        index_lses.append(index_lse)
        first += n_q
    rows = max(1, index_heads * q.shape[0])
    return Dense(torch.cat(outs), kl / rows, torch.cat(lses, 1), torch.cat(index_lses, 1))


def dense_gradients(
    problem: Problem, indices: Tensor | None, d_out: Tensor, d_kl: float
) -> tuple[Dense, tuple[Tensor, ...]]:
    tensors = tuple(x.detach().double().requires_grad_() for x in problem.tensors)
    dense = dense_msa(problem, tensors, indices)
    loss = (dense.out * d_out.double()).sum() + d_kl * dense.kl
    return dense, torch.autograd.grad(loss, tensors, allow_unused=True, materialize_grads=True)


def relative_error(result: Tensor, expected: Tensor) -> float:
    difference = (result.detach().double() - expected.detach().double()).norm()
    return float(difference / expected.detach().double().norm().clamp_min(1e-30))
