"""Dense causal attention of other libraries on the tensors of the benches: what sparse attention has to beat."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from attend_check import check_attention
from peers import find_peers
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

Dense = Callable[[], Tensor]  # queues the attention, returns [n, Hq, D]

LONGEST = 2**17  # beyond, a time grows with the square
# FlashAttention 4's time over cuDNN's at M3's shape on an H200 (flash-attn-4 4.0.0b36, cuDNN 9.19, 2026-11-30), for
# runs without FlashAttention.
FA4_OVER_CUDNN = {8192: 1.86 / 1.89, 32768: 27.0 / 29.8, 131072: 428.9 / 509.0}


def torch_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    heads_first = (x.transpose(0, 1)[None] for x in (q, k, v))
    out = scaled_dot_product_attention(*heads_first, is_causal=True, enable_gqa=True)  # type: ignore[misc, arg-type]
    return out[0].transpose(0, 1)


def without_gpu(q: Tensor, k: Tensor, v: Tensor) -> Dense:
    """Shows that a bench works."""
    return lambda: torch_attention(q, k, v)


def cudnn(q: Tensor, k: Tensor, v: Tensor) -> Dense:
    def attend() -> Tensor:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return torch_attention(q, k, v)

    return attend


def fa4(q: Tensor, k: Tensor, v: Tensor) -> Dense:
    from flash_attn.cute.interface import flash_attn_func  # type: ignore[import-not-found]

    batch = [x[None] for x in (q, k, v)]

    def attend() -> Tensor:
        out: Tensor = flash_attn_func(*batch, causal=True)[0]
        return out[0]

    return attend


def fa4_packed(q: Tensor, k: Tensor, v: Tensor, queries: Sequence[int], keys: Sequence[int]) -> Dense:
    """Sequences one after the other, each with its last queries."""
    from flash_attn.cute.interface import flash_attn_varlen_func

    ends = [
        torch.tensor([0, *lengths], device=q.device).cumsum(0).to(torch.int32) for lengths in (queries, keys)
    ]  # fmt: skip

    def attend() -> Tensor:
        out: Tensor = flash_attn_varlen_func(
            q, k, v, cu_seqlens_q=ends[0], cu_seqlens_k=ends[1], max_seqlen_q=max(queries), max_seqlen_k=max(keys),
            causal=True,
        )[0]  # fmt: skip
        return out

    return attend


def checked(name: str, make: Callable[[], Dense], check: Callable[[Tensor], object]) -> dict[str, Dense]:
    """The call by its name once its result is right; nothing, after a line that says why, where it fails."""
    try:
        call = make()
        with torch.no_grad():
            check(call())
    except Exception as error:
        print(f"dense {name} left out: {type(error).__name__}: {error}", flush=True)
        return {}
    return {name: call}


def dense_calls(q: Tensor, k: Tensor, v: Tensor, names: Sequence[str] = ("fa4", "cudnn")) -> dict[str, Dense]:
    """Those of the libraries that run here, by their names in the results. OPENMSA_PEERS as in peers.py."""
    find_peers()
    makers = {"fa4": fa4, "cudnn": cudnn} if q.is_cuda else {"torch": without_gpu}
    n = q.shape[0]
    rows = torch.tensor([n // 2, n - 2, n - 1])
    calls: dict[str, Dense] = {}
    for name, make in makers.items():
        if name in names or (not q.is_cuda and names):
            calls |= checked(
                name,
                lambda make=make: make(q, k, v),  # type: ignore[misc]
                lambda out: check_attention(out, None, q, k, v, None, rows),
            )
    return calls


def at_length(times: dict[str, float], n: int) -> dict[str, float]:
    """The dense times of a run at n tokens, and FlashAttention's beside cuDNN's where it did not run."""
    if "cudnn" in times and "fa4" not in times and n in FA4_OVER_CUDNN:
        return times | {"fa4-scaled": times["cudnn"] * FA4_OVER_CUDNN[n]}
    return times
