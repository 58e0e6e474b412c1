"""Dense causal attention of other libraries on the tensors of the benches: what sparse attention has to beat."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

Dense = Callable[[], Tensor]  # queues the attention, returns [n, Hq, D]


def cudnn(q: Tensor, k: Tensor, v: Tensor) -> Dense:
    heads_first = [x.transpose(0, 1)[None] for x in (q, k, v)]

    def attend() -> Tensor:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            out = scaled_dot_product_attention(*heads_first, is_causal=True, enable_gqa=True)
        return out[0].transpose(0, 1)

    return attend


def fa4(q: Tensor, k: Tensor, v: Tensor) -> Dense:
    from flash_attn.cute.interface import flash_attn_func  # type: ignore[import-not-found]

    batch = [x[None] for x in (q, k, v)]

    def attend() -> Tensor:
        out: Tensor = flash_attn_func(*batch, causal=True)[0]
        return out[0]

    return attend


def torch_attention(q: Tensor, k: Tensor, v: Tensor) -> Dense:
    """Without a GPU: shows that a bench works."""
    heads_first = [x.transpose(0, 1)[None] for x in (q, k, v)]
    return lambda: scaled_dot_product_attention(*heads_first, is_causal=True, enable_gqa=True)[0].transpose(0, 1)


def dense_calls(q: Tensor, k: Tensor, v: Tensor) -> dict[str, Dense]:
    """Every library that runs here, by its name in the results. OPENMSA_PEERS names a folder for Python's path."""
    folder = os.environ.get("OPENMSA_PEERS")
    if folder and folder not in sys.path:
        sys.path.insert(0, folder)
    if q.device.type != "cuda":
        return {"torch": torch_attention(q, k, v)}
    calls = {}
    for name, make in {"fa4": fa4, "cudnn": cudnn}.items():
        try:
            call = make(q, k, v)
            with torch.no_grad():
                call()
            torch.cuda.synchronize()
        except Exception as error:
            print(f"dense {name} left out: {type(error).__name__}: {error}", flush=True)
            continue
        calls[name] = call
    return calls
