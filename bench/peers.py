"""Other libraries' block-sparse attention at M3's shape, on the tensors of the benches.

OPENMSA_PEERS names a folder that goes onto Python's path, with vLLM's minimax_m3 `index_topk.py` and `sparse_attn.py`
as vllm.m3.*, FlashInfer's flashinfer.msa_ops._sm90_dispatch, and what these import. vLLM takes bf16, FlashInfer float8
index vectors, keys and values. Buffers are allocated as each library's own callers do: vLLM's scores on every call,
FlashInfer's once. Caches of pages are made before a call; a page table in order is the best case of paged reads.
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

BLOCK, TOPK = 128, 16
LONGEST = 2**17  # both keep [Hi, n / 128, n] float32 scores: 2 GiB here

Select = Callable[[], Tensor]  # queues scores and top-k, returns indices [Hi, n, topk] in the library's own order
Attend = Callable[[Tensor], Tensor]  # queues attention to such indices, returns [n, Hq, D]


@dataclass(frozen=True)
class AttendPeer:
    name: str
    attend: Attend
    k: Tensor  # [n, Hkv, D], what the library's cache holds
    v: Tensor


def _offsets(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device="cuda")


def _table(n: int) -> Tensor:
    return torch.arange(n // BLOCK, dtype=torch.int32, device="cuda")[None]


def vllm_select(index_q: Tensor, index_k: Tensor) -> Select:
    from vllm.m3.index_topk import minimax_m3_index_score, minimax_m3_index_topk  # type: ignore[import-not-found]

    n, heads, dim = index_q.shape
    pages = index_k.view(n // BLOCK, BLOCK, dim)
    table, ends, length, prefix = _table(n), _offsets(0, n), _offsets(n), _offsets(0)

    def select() -> Tensor:
        scores = minimax_m3_index_score(index_q, pages, table, ends, length, prefix, n, n, heads)
        result: Tensor = minimax_m3_index_topk(scores, ends, prefix, n, TOPK, 0, 1)
        return result

    return select


def flashinfer_select(index_q: Tensor, index_k: Tensor) -> Select:
    from flashinfer.msa_ops import _sm90_dispatch as ops  # type: ignore[import-not-found]

    n, heads, dim = index_q.shape
    pages = index_k.view(n // BLOCK, 1, BLOCK, dim)
    table, ends, length = _table(n), _offsets(0, n), _offsets(n)
    visible = torch.arange(n, dtype=torch.int32, device="cuda") // BLOCK + 1
    scores = torch.full((heads, n // BLOCK, n), -torch.inf, device="cuda")
    indices = torch.empty(n, heads, TOPK, dtype=torch.int32, device="cuda")

    def select() -> Tensor:
        ops.proxy_score_sm90(
            index_q, pages, ends, table, length, scores, max_seqlen_q=n, batch_size=1, kv_fp8=True, use_fp32_acc=True
        )
        ops.topk_select_sm90(scores, TOPK, indices, num_valid_pages=visible, force_end_blocks=1)
        return indices.transpose(0, 1)

    return select


def _cache(k: Tensor, v: Tensor, dtype: torch.dtype) -> Tensor:
    """[pages, Hkv, block, 2 D]: both libraries' pages, keys and values of a token side by side."""
    n, heads, dim = k.shape
    pages = torch.cat([k, v], -1).view(n // BLOCK, BLOCK, heads, 2 * dim).transpose(1, 2)
    return pages.contiguous().to(dtype)


def _contents(cache: Tensor) -> tuple[Tensor, Tensor]:
    pages, heads, block, both = cache.shape
    k, v = cache.transpose(1, 2).reshape(pages * block, heads, both).float().chunk(2, -1)
    return k, v


def vllm_attend(q: Tensor, k: Tensor, v: Tensor) -> AttendPeer:
    from vllm.m3.sparse_attn import minimax_m3_sparse_attn  # type: ignore[import-not-found]

    n, heads = k.shape[:2]
    cache, out = _cache(k, v, torch.bfloat16), torch.empty_like(q)
    table, ends, length, prefix = _table(n), _offsets(0, n), _offsets(n), _offsets(0)
    scale = 1 / math.sqrt(q.shape[-1])

    def attend(indices: Tensor) -> Tensor:
        minimax_m3_sparse_attn(q, cache, indices, table, ends, length, prefix, n, heads, scale, out)
        return out

    return AttendPeer("vllm", attend, k, v)


def flashinfer_attend(q: Tensor, k: Tensor, v: Tensor) -> AttendPeer:
    from flashinfer.msa_ops import _sm90_dispatch as ops

    n, dim = k.shape[0], k.shape[-1]
    cache, out = _cache(k, v, torch.float8_e4m3fn), torch.empty_like(q)
    keys, values = cache[..., :dim], cache[..., dim:]
    table, ends, length = _table(n), _offsets(0, n), _offsets(n)

    def attend(indices: Tensor) -> Tensor:
        ops.sparse_prefill_sm90(q, keys, values, indices.contiguous(), ends, table, length, out)
        return out

    return AttendPeer("flashinfer", attend, *_contents(cache))


_SELECT: dict[torch.dtype, tuple[str, Callable[[Tensor, Tensor], Select]]] = {
    torch.bfloat16: ("vllm", vllm_select),
    torch.float8_e4m3fn: ("flashinfer", flashinfer_select),
}
_ATTEND: dict[str, Callable[[Tensor, Tensor, Tensor], AttendPeer]] = {
    "bf16": vllm_attend,
    "fp8kv": flashinfer_attend,
    "fp8index": flashinfer_attend,  # FlashInfer has no other keys and values
}
NAMES = {"bf16": "vllm", "fp8index": "flashinfer", "fp8kv": "flashinfer"}  # the peer of a dtype


def find_peers() -> bool:
    """Whether OPENMSA_PEERS is set; its folder is then on Python's path."""
    folder = os.environ.get("OPENMSA_PEERS")
    if folder and folder not in sys.path:
        sys.path.insert(0, folder)
    return bool(folder)


def select_peer(index_q: Tensor, index_k: Tensor) -> tuple[str, Select] | None:
    """Name and call of the peer for these vectors; None where OPENMSA_PEERS is not set or none takes them."""
    if index_q.dtype not in _SELECT or index_q.shape[0] > LONGEST or not find_peers():
        return None
    name, make = _SELECT[index_q.dtype]
    return name, make(index_q, index_k)


def attend_peer(dtype: str, q: Tensor, k: Tensor, v: Tensor) -> AttendPeer | None:
    """The peer for bf16 queries, keys and values, which FlashInfer casts to float8; None as in select_peer."""
    if dtype not in _ATTEND or q.shape[0] > LONGEST or not find_peers():
        return None
    return _ATTEND[dtype](q, k, v)
