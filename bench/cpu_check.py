"""Whether results of CPU benches are right: sampled rows in float64, from the formulas of docs/definition.md."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

BLOCK = 128
TOLERANCES = {torch.float32: 5e-5, torch.float16: 2e-3, torch.bfloat16: 8e-3}  # of outputs; gradients: twice
LSE_TOLERANCES = {torch.float32: 5e-5, torch.float16: 2e-3, torch.bfloat16: 2e-3}
INDEX_GRADIENT_FACTOR = 2.5


class WrongResultError(Exception):
    pass


@dataclass(frozen=True)
class Problem:
    """One causal sequence whose queries are its last tokens; scale 1 / sqrt(dim) in both branches."""

    q: Tensor  # [n_q, Hq, D]
    k: Tensor  # [n, Hkv, D]
    v: Tensor
    index_q: Tensor  # [n_q, Hi, Di]
    index_k: Tensor  # [n, 1, Di]
    indices: Tensor  # [Hi, n_q, topk]

    @property
    def first_key(self) -> int:
        return self.k.shape[0] - self.q.shape[0]

    @property
    def group(self) -> int:
        return self.q.shape[1] // self.index_q.shape[1]

    def kv_head(self, index_head: int) -> int:
        return index_head * self.k.shape[1] // self.index_q.shape[1]

    def tokens(self, row: int, index_head: int) -> Tensor:
        """The visible tokens of a row's blocks."""
        blocks = self.indices[index_head, row].long()
        tokens = (blocks[blocks >= 0, None] * BLOCK + torch.arange(BLOCK)).flatten()
        return tokens[tokens <= self.first_key + row]

    def heads(self, index_head: int) -> slice:
        return slice(index_head * self.group, (index_head + 1) * self.group)

    def scores(self, row: int, index_head: int, tokens: Tensor) -> Tensor:
        q = self.q[row, self.heads(index_head)].double()
        return q @ self.k[tokens, self.kv_head(index_head)].double().T / self.q.shape[-1] ** 0.5

    def index_scores(self, row: int, index_head: int, tokens: Tensor) -> Tensor:
        z = self.index_k[tokens, 0].double() @ self.index_q[row, index_head].double()
        return z / self.index_q.shape[-1] ** 0.5


def visible_pairs(indices: Tensor, keys: int) -> int:
    """Selected visible (query, key) pairs of all index heads: E of the FLOP counts. Rows hold no block twice."""
    queries = indices.shape[1]
    position = (keys - queries + torch.arange(queries))[:, None]
    lengths = (position + 1 - indices.long() * BLOCK).clamp(0, BLOCK)
    return int(torch.where(indices >= 0, lengths, 0).sum())


def _demand(what: str, got: Tensor, expected: Tensor, tolerance: float) -> float:
    error = float((got.double() - expected).norm() / expected.norm().clamp(min=1e-30))
    if not error <= tolerance:  # NaN fails too
        raise WrongResultError(f"{what}: relative error {error:.2e}, at most {tolerance:.1e} is allowed")
    return error


def check_forward(problem: Problem, out: Tensor, lse: Tensor, rows: Tensor) -> float:
    """Raises unless `out` and `lse` of these rows follow from the indices; returns out's relative error."""
    heads = range(problem.index_q.shape[1])
    expected_out, expected_lse = [], []
    for row in rows.tolist():
        for head in heads:
            tokens = problem.tokens(row, head)
            scores = problem.scores(row, head, tokens)
            expected_lse.append(scores.logsumexp(-1))
            expected_out.append(scores.softmax(-1) @ problem.v[tokens, problem.kv_head(head)].double())
    got_out = out[rows].reshape(-1, out.shape[-1])
    _demand("lse", lse[:, rows].T.reshape(-1), torch.cat(expected_lse), LSE_TOLERANCES[out.dtype])
    return _demand("out", got_out, torch.cat(expected_out), TOLERANCES[out.dtype])


@dataclass(frozen=True)
class Gradients:
    d_out: Tensor
    q: Tensor
    k: Tensor
    v: Tensor
    index_q: Tensor
    index_k: Tensor


def check_backward(problem: Problem, got: Gradients, rows: Tensor, blocks: list[int]) -> float:
    """Raises unless the gradients are right: those of queries on sampled rows, those of keys on sampled blocks. Every
    row that selected such a block adds to them. Returns d_q's relative error."""
    dtype = got.q.dtype
    tolerance = 2 * TOLERANCES[dtype]
    g = 1.0 / (problem.index_q.shape[1] * problem.q.shape[0])  # d_kl 1
    keys = {block: slice(block * BLOCK, min((block + 1) * BLOCK, problem.k.shape[0])) for block in blocks}
    sums = {
        block: [torch.zeros_like(tensor[keys[block]], dtype=torch.float64) for tensor in (got.k, got.v, got.index_k)]
        for block in blocks
    }
    d_q, d_index_q = [], []
    sampled = set(rows.tolist())
    scale, index_scale = problem.q.shape[-1] ** -0.5, problem.index_q.shape[-1] ** -0.5
    for head in range(problem.index_q.shape[1]):
        kv = problem.kv_head(head)
        selecting = torch.isin(problem.indices[head], torch.tensor(blocks, dtype=problem.indices.dtype)).any(-1)
        for row in sorted(sampled | set(selecting.nonzero().flatten().tolist())):
            tokens = problem.tokens(row, head)
            p = problem.scores(row, head, tokens).softmax(-1)
            d_out = got.d_out[row, problem.heads(head)].double()
            d_p = d_out @ problem.v[tokens, kv].double().T
            d_s = scale * p * (d_p - (p * d_p).sum(-1, keepdim=True))
            d_z = g * index_scale * (problem.index_scores(row, head, tokens).softmax(-1) - p.mean(0))
            if row in sampled:
                d_q.append((d_s @ problem.k[tokens, kv].double(), row, head))
                d_index_q.append((d_z @ problem.index_k[tokens, 0].double(), row, head))
            for block in blocks:
                of_block = tokens // BLOCK == block
                if not of_block.any():
                    continue
                at = tokens[of_block] - block * BLOCK
                d_k, d_v, d_index_k = sums[block]
                d_k[at, kv] += d_s[:, of_block].T @ problem.q[row, problem.heads(head)].double()
                d_v[at, kv] += p[:, of_block].T @ d_out
                d_index_k[at, 0] += d_z[of_block, None] * problem.index_q[row, head].double()
    for block in blocks:
        for name, tensor, expected, factor in zip(
            ("d_k", "d_v", "d_index_k"), (got.k, got.v, got.index_k), sums[block],
            (1.0, 1.0, INDEX_GRADIENT_FACTOR / 2), strict=True,
        ):  # fmt: skip
            _demand(f"{name} of block {block}", tensor[keys[block]], expected, factor * tolerance)
    got_index_q = torch.stack([got.index_q[row, head] for _, row, head in d_index_q])
    _demand("d_index_q", got_index_q, torch.stack([x for x, _, _ in d_index_q]), INDEX_GRADIENT_FACTOR / 2 * tolerance)
    got_q = torch.stack([got.q[row, problem.heads(head)] for _, row, head in d_q])
    return _demand("d_q", got_q, torch.stack([x for x, _, _ in d_q]), tolerance)
