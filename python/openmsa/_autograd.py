"""Gradients of the torch operators.

``out`` has gradients in q, k and v only, ``kl`` in index_q and index_k only (arXiv 2606.13392: the language-model loss
trains the main branch, the KL divergence the index branch). Everything else that an operator returns has none.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ._ops import Kernel, library
from .errors import UnsupportedError

_ops = torch.ops.openmsa
_BELOW = torch._C._after_autograd_keyset


class _SparseAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, keyset: Any, op: Any, *arguments: Any) -> Any:
        q, k, v, indices, cu_seqlens_q, cu_seqlens_k, k_starts, block_size, scale, deterministic, _, *rest = arguments
        out, lse = op.redispatch(
            keyset & _BELOW, q, k, v, indices, cu_seqlens_q, cu_seqlens_k, k_starts, block_size, scale, deterministic,
            True, *rest,
        )  # fmt: skip
        ctx.save_for_backward(q, k, v, indices, out, lse, cu_seqlens_q, cu_seqlens_k, k_starts)
        ctx.settings = (block_size, scale, deterministic)
        ctx.mark_non_differentiable(lse)
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    def backward(ctx: Any, d_out: Tensor | None, _: Any) -> Any:
        q, k, v, indices, out, lse, *sequences = ctx.saved_tensors
        gradients: Any = (None, None, None)
        if d_out is not None:
            gradients = _ops.sparse_attention_backward(
                q, k, v, indices, out, lse, d_out, *sequences, *ctx.settings
            )
        wanted = ctx.needs_input_grad[2:5]
        main = (gradient if want else None for gradient, want in zip(gradients, wanted, strict=True))
        return (None, None, *main, *(None,) * (len(ctx.needs_input_grad) - 5))


class _MsaAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, keyset: Any, op: Any, *arguments: Any) -> Any:
        q, k, v, index_q, index_k, *sequences = arguments[:8]
        block_size, scale, index_scale, warmup, kl_mode, deterministic, kl_out = arguments[11:18]
        out, lse, indices, index_lse, kl = op.redispatch(keyset & _BELOW, *arguments)
        ctx.save_for_backward(
            q, k, v, index_q, index_k, out, lse, None if warmup else indices,
            None if kl_mode == "off" else index_lse, *sequences,
        )  # fmt: skip
        ctx.settings = (block_size, scale, index_scale, warmup, deterministic)
        # Not saved as an input: backward overwrites it, and may run more than once.
        ctx.kl_out = kl_out
        absent = [lse, indices, index_lse]
        if not any(ctx.needs_input_grad[2:5]):
            absent.append(out)
        if kl_mode == "off" or not any(ctx.needs_input_grad[5:7]):
            absent.append(kl)
        ctx.mark_non_differentiable(*absent)
        ctx.set_materialize_grads(False)
        return out, lse, indices, index_lse, kl

    @staticmethod
    def backward(ctx: Any, d_out: Tensor | None, _lse: Any, _indices: Any, _index_lse: Any, d_kl: Tensor | None) -> Any:
        gradients: Any = (None,) * 5
        if d_out is not None or d_kl is not None:
            *tensors, cu_seqlens_q, cu_seqlens_k, k_starts = ctx.saved_tensors
            arguments = (*tensors, d_out, d_kl, cu_seqlens_q, cu_seqlens_k, k_starts, *ctx.settings)
            if ctx.kl_out is None:
                gradients = _ops.msa_attention_backward(*arguments)
            else:
                gradients = _ops.msa_attention_backward_kl(*arguments, ctx.kl_out)
        given = (d_out is not None,) * 3 + (d_kl is not None,) * 2
        wanted = (want and there for want, there in zip(ctx.needs_input_grad[2:7], given, strict=True))
        inputs = (gradient if want else None for gradient, want in zip(gradients, wanted, strict=True))
        return (None, None, *inputs, *(None,) * (len(ctx.needs_input_grad) - 7))


class _Backward(torch.autograd.Function):
    """A backward operator under create_graph: its results are right, and differentiating them is an error by name."""

    @staticmethod
    def forward(ctx: Any, keyset: Any, op: Any, name: str, *arguments: Any) -> Any:
        ctx.name = name
        return op.redispatch(keyset & _BELOW, *arguments)

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        raise UnsupportedError(f"{ctx.name}: double backward is not supported, expected first derivatives only")


def _requires_grad(tensors: Any) -> bool:
    return any(isinstance(tensor, Tensor) and tensor.requires_grad for tensor in tensors)


def _is_float8(tensor: Tensor) -> bool:
    return tensor.dtype.is_floating_point and tensor.dtype.itemsize == 1


def _sparse_attention(op: Any) -> Kernel:
    def kernel(keyset: Any, *arguments: Any) -> Any:
        if torch.is_grad_enabled() and _requires_grad(arguments[:3]):
            return _SparseAttention.apply(keyset, op, *arguments)
        return op.redispatch(keyset & _BELOW, *arguments)

    return kernel


def _msa_attention(op: Any) -> Kernel:
    def kernel(keyset: Any, *arguments: Any) -> Any:
        if torch.is_grad_enabled():
            trained = arguments[3:5] if arguments[15] != "off" else ()
            for name, tensor in zip(("index_q", "index_k"), trained, strict=False):
                if tensor.requires_grad and _is_float8(tensor):
                    raise UnsupportedError(
                        f"msa_attention: {name}: got {tensor.dtype} that requires a gradient, expected bfloat16, "
                        "float16 or float32 (float8 tensors have no gradient)"
                    )
            if _requires_grad(arguments[:3]) or _requires_grad(trained):
                return _MsaAttention.apply(keyset, op, *arguments)
        return op.redispatch(keyset & _BELOW, *arguments)

    return kernel


def _backward(op: Any, name: str) -> Kernel:
    def kernel(keyset: Any, *arguments: Any) -> Any:
        if torch.is_grad_enabled() and _requires_grad(arguments):
            return _Backward.apply(keyset, op, name, *arguments)
        return op.redispatch(keyset & _BELOW, *arguments)

    return kernel


def _register(name: str, kernel: Kernel) -> None:
    library.impl(name, kernel, "Autograd", with_keyset=True)


for _suffix in ("", "_workspace"):
    _register(f"sparse_attention{_suffix}", _sparse_attention(getattr(_ops, f"sparse_attention{_suffix}").default))
    _register(f"msa_attention{_suffix}", _msa_attention(getattr(_ops, f"msa_attention{_suffix}").default))
_register("sparse_attention_backward", _backward(_ops.sparse_attention_backward.default, "sparse_attention"))
for _suffix in ("", "_kl"):
    _name = f"msa_attention_backward{_suffix}"
    _register(_name, _backward(getattr(_ops, _name).default, "msa_attention"))
