"""Whether selections are right, against float64 products of the same vectors with PyTorch, on sampled rows."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

# Where two blocks' scores differ by more than this share of |q| max |k|, the better one must be chosen. 16-bit products
# are exact and their sums float32. Hopper sums the products of 32 fp8 elements with 13 bits below the largest term:
# 33 truncated terms of at most 2^-13 of the sum, which stays below a quarter of |q| max |k| on these vectors.
MARGINS = {torch.float32: 5e-6, torch.bfloat16: 5e-6, torch.float16: 5e-6, torch.float8_e4m3fn: 1e-3}


class WrongSelectionError(Exception):
    pass


@dataclass(frozen=True)
class Checked:
    rows: int  # (query, head) pairs
    differing: int  # of them choose another set than float64 does
    worst: float  # the largest wrong preference, as a share of |q| max |k|


def sample_rows(n: int, count: int = 48) -> Tensor:
    """Queries to check, ascending: first ones, around a block's edge, the middle, last ones and random ones."""
    fixed = [0, 1, 127, 128, 2047, 2048, 2049, n // 2, n - 129, n - 128, n - 2, n - 1]
    generator = torch.Generator().manual_seed(n)
    drawn = torch.randint(n, (max(count - len(fixed), 0),), generator=generator).tolist()
    return torch.tensor(sorted({row for row in [*fixed, *drawn] if 0 <= row < n}))


def block_scores(index_q: Tensor, index_k: Tensor, rows: Tensor, first_key: int, block: int) -> Tensor:
    """[rows, Hi, blocks] in float64, unscaled; -inf where a row sees nothing. Row i sees keys up to first_key + i."""
    n = index_k.shape[0]
    blocks = -(-n // block)
    queries = index_q[rows].float().double()  # fp8 has no direct way to float64 on every device
    keys = index_k[:, 0].float().double()
    out = torch.full((*queries.shape[:2], blocks), -torch.inf, dtype=torch.float64, device=index_q.device)
    step = 2**17 // block * block  # a few hundred megabytes of scores at a time
    for begin in range(0, n, step):
        end = min(begin + step, n)
        scores = queries @ keys[begin:end].T
        position = torch.arange(begin, end, device=scores.device)
        scores.masked_fill_(position > (first_key + rows)[:, None, None], -torch.inf)
        scores = torch.nn.functional.pad(scores, (0, -(end - begin) % block), value=-torch.inf)
        out[..., begin // block : -(-end // block)] = scores.unflatten(-1, (-1, block)).amax(-1)
    return out


def check_selection(
    indices: Tensor, index_q: Tensor, index_k: Tensor, rows: Tensor, *, block: int = 128, ordered: bool = True
) -> Checked:
    """Raises WrongSelectionError unless these rows of `indices` [Hi, n_q, topk], topk at least 2, are a selection with
    one local block and no init block. `ordered`: in the order of openmsa's rows, else -1 and the own block may stand
    anywhere."""
    rows = rows.to(index_q.device)
    first_key = index_k.shape[0] - index_q.shape[0]
    scores = block_scores(index_q, index_k, rows, first_key, block)
    got = indices[:, rows].transpose(0, 1).long()  # [rows, Hi, topk]
    topk = got.shape[-1]
    own = ((first_key + rows) // block)[:, None]
    valid = torch.minimum(own + 1, torch.tensor(topk, device=own.device))
    if not ordered:  # bring foreign rows into openmsa's order
        rank = scores.gather(-1, got.clamp(min=0)).masked_fill(got < 0, -torch.inf)
        rank = rank.masked_fill(got == own[..., None], -torch.finfo(torch.float64).max)
        got = got.gather(-1, rank.argsort(-1, descending=True))

    slot = torch.arange(topk, device=got.device)
    scored = slot < (valid - 1)[..., None]

    def demand(holds: Tensor, what: str) -> None:
        while holds.dim() > 2:
            holds = holds.all(-1)
        if not holds.all():
            row, head = (~holds).nonzero()[0].tolist()
            raise WrongSelectionError(
                f"{what}: query {int(rows[row])} of {index_q.shape[0]}, head {head}, {index_k.shape[0]} keys, "
                f"{index_q.dtype}: {got[row, head].tolist()}"
            )

    demand(torch.where(slot >= valid[..., None], got == -1, True), "an entry after the last is not -1")
    demand(torch.where(slot == (valid - 1)[..., None], got == own[..., None], True), "the own block is not last")
    demand(torch.where(scored, (got >= 0) & (got < own[..., None]), True), "a block is out of range")
    # Empty slots become distinct negative numbers.
    ascending = torch.where(scored, got, -1 - slot).sort(-1).values
    demand(ascending[..., 1:] != ascending[..., :-1], "a block is chosen twice")

    chosen = scores.gather(-1, got.clamp(min=0)).masked_fill(~scored, torch.inf)
    candidate = torch.arange(scores.shape[-1], device=got.device) < own[..., None]
    left = scores.masked_fill(~candidate, -torch.inf)
    left = left.scatter(-1, torch.where(scored, got, own[..., None]), -torch.inf)
    unit = index_q[rows].float().norm(dim=-1) * index_k[:, 0].float().norm(dim=-1).max()
    best_left = left.amax(-1)
    missed = (best_left - chosen.amin(-1)) / unit
    misordered = torch.where(scored[..., 1:], chosen[..., 1:] - chosen[..., :-1], -torch.inf).amax(-1, keepdim=True)
    misordered = misordered.amax(-1) / unit if ordered else torch.full_like(missed, -torch.inf)
    margin = MARGINS[index_q.dtype]
    demand(missed <= margin, "a better block is left out")
    demand(misordered <= margin, "blocks are not in descending order")
    return Checked(missed.numel(), int((missed > 0).sum()), float(torch.maximum(missed, misordered).clamp(min=0).max()))


def recall(indices: Tensor, expected: Tensor, rows: slice = slice(None)) -> float:
    """Share of the expected scored blocks that `indices` has too, over rows whose slots are all filled: of these the
    last is the own block."""
    got, want = indices[:, rows, :-1], expected[:, rows, :-1]
    hits = sum(int((w[:, :, None] == g[:, None]).any(-1).sum()) for w, g in zip(want, got, strict=True))
    return hits / want.numel()
