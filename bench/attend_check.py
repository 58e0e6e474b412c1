"""Whether attention over selected blocks is right, against float64 on sampled rows."""

from __future__ import annotations

import math

import torch
from torch import Tensor

# Relative norm of a (query, head) row: the contract's tolerance of the whole result, four times over, since a row is
# a small sample of it.
TOLERANCES = {torch.float32: 2e-4, torch.float16: 8e-3, torch.bfloat16: 3.2e-2}


class WrongAttentionError(Exception):
    pass


def selected_keys(indices: Tensor, visible: int, block: int) -> Tensor:
    """Keys of the distinct visible blocks among one row's entries, ascending."""
    blocks = sorted({b for b in indices.tolist() if b >= 0 and b * block < visible})
    keys = [torch.arange(b * block, min((b + 1) * block, visible)) for b in blocks]
    return torch.cat(keys) if keys else torch.empty(0, dtype=torch.long)


def check_attention(
    out: Tensor, lse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, indices: Tensor | None, rows: Tensor, *,
    block: int = 128,
) -> float:  # fmt: skip
    """The worst relative error of a row, after raising WrongAttentionError where one exceeds its tolerance. `out`
    [n_q, Hq, D], `lse` [Hq, n_q] or None, contiguous k and v [n_k, Hkv, D], indices [Hi, n_q, topk]; None: dense."""
    n_q, heads, dim = q.shape
    kv_heads = k.shape[1]
    index_heads = kv_heads if indices is None else indices.shape[0]
    group, worst = heads // index_heads, 0.0
    for row in rows.tolist():
        visible = k.shape[0] - n_q + row + 1
        for head in range(index_heads):
            if indices is None:
                keys = torch.arange(visible, device=k.device)
            else:
                keys = selected_keys(indices[head, row].cpu(), visible, block).to(k.device)
            kv_head = head * kv_heads // index_heads
            mine = slice(head * group, (head + 1) * group)
            scores = q[row, mine].double() @ k[keys, kv_head].double().T / math.sqrt(dim)
            want = scores.softmax(-1) @ v[keys, kv_head].double()
            error = float(((out[row, mine].double() - want).norm(dim=-1) / want.norm(dim=-1).clamp(min=1e-30)).max())
            if lse is not None:
                away = float((lse[mine, row].double() - scores.logsumexp(-1)).abs().max())
                error = error if away <= 2e-3 * max(1.0, float(scores.abs().max())) else math.inf
            if not error <= TOLERANCES[out.dtype]:
                raise WrongAttentionError(f"query {row} of {n_q}, index head {head}: relative error {error:.3g}")
            worst = max(worst, error)
    return worst


def selected_pairs(indices: Tensor, n_k: int, block: int = 128) -> int:
    """Visible (query, key) pairs of the distinct blocks that the rows select, over all index heads."""
    _, n_q, _ = indices.shape
    visible = n_k - n_q + 1 + torch.arange(n_q, device=indices.device)
    total = 0
    for head in indices:
        ascending = head.long().sort(-1).values
        distinct = torch.ones_like(ascending, dtype=torch.bool)
        distinct[:, 1:] = ascending[:, 1:] != ascending[:, :-1]
        keys = (visible[:, None] - ascending * block).clamp(0, block)
        total += int(keys.where(distinct & (ascending >= 0), 0).sum())
    return total
