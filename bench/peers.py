"""Other libraries' index scores and top-k on the tensors of bench/stage_select.py.

OPENMSA_PEERS names a folder that goes onto Python's path, with vLLM's minimax_m3 `index_topk.py` as vllm.m3.index_topk
and FlashInfer's flashinfer.msa_ops._sm90_dispatch, and what these import. Buffers are allocated as each library's own
callers do: vLLM's scores on every call, FlashInfer's once.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable

import torch
from torch import Tensor

BLOCK, TOPK = 128, 16
LONGEST = 2**17  # both keep [Hi, n / 128, n] float32 scores: 2 GiB here

Select = Callable[[], Tensor]  # queues scores and top-k, returns indices [Hi, n, topk] in the library's own order


def _offsets(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device="cuda")


def vllm(index_q: Tensor, index_k: Tensor) -> Select:
    from vllm.m3.index_topk import minimax_m3_index_score, minimax_m3_index_topk  # type: ignore[import-not-found]

    n, heads, dim = index_q.shape
    pages = index_k.view(n // BLOCK, BLOCK, dim)
    table = torch.arange(n // BLOCK, dtype=torch.int32, device="cuda")[None]
    ends, length, prefix = _offsets(0, n), _offsets(n), _offsets(0)

    def select() -> Tensor:
        scores = minimax_m3_index_score(index_q, pages, table, ends, length, prefix, n, n, heads)
        result: Tensor = minimax_m3_index_topk(scores, ends, prefix, n, TOPK, 0, 1)
        return result

    return select


def flashinfer(index_q: Tensor, index_k: Tensor) -> Select:
    from flashinfer.msa_ops import _sm90_dispatch as ops  # type: ignore[import-not-found]

    n, heads, dim = index_q.shape
    pages = index_k.view(n // BLOCK, 1, BLOCK, dim)
    table = torch.arange(n // BLOCK, dtype=torch.int32, device="cuda")[None]
    ends, length = _offsets(0, n), _offsets(n)
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


_MAKERS: dict[torch.dtype, tuple[str, Callable[[Tensor, Tensor], Select]]] = {
    torch.bfloat16: ("vllm", vllm),
    torch.float8_e4m3fn: ("flashinfer", flashinfer),
}


def select_peer(index_q: Tensor, index_k: Tensor) -> tuple[str, Select] | None:
    """Name and call of the peer for this case; None where OPENMSA_PEERS is not set or none takes the case."""
    folder = os.environ.get("OPENMSA_PEERS")
    if not folder or index_q.dtype not in _MAKERS or index_q.shape[0] > LONGEST:
        return None
    if folder not in sys.path:
        sys.path.insert(0, folder)
    name, make = _MAKERS[index_q.dtype]
    return name, make(index_q, index_k)
