"""Gradients of the torch operators.

``out`` has gradients in q, k and v only, ``kl`` in index_q and index_k only (arXiv 2606.13392: the language-model loss
trains the main branch, the KL divergence the index branch). Everything else that an operator returns has none.
"""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from ._ops import Kernel, kernels, library
from .errors import UnsupportedError

_ops = torch.ops.openmsa


class SparseAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, run: Kernel, *arguments: Any) -> Any:
        q, k, v, indices, cu_seqlens_q, cu_seqlens_k, k_starts, block_size, scale, deterministic, _, *rest = arguments
        out, lse = run(
            q, k, v, indices, cu_seqlens_q, cu_seqlens_k, k_starts, block_size, scale, deterministic, True, *rest
        )
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
            gradients = _ops.sparse_attention_backward(q, k, v, indices, out, lse, d_out, *sequences, *ctx.settings)
        wanted = ctx.needs_input_grad[1:4]
        main = (gradient if want else None for gradient, want in zip(gradients, wanted, strict=True))
        return (None, *main, *(None,) * (len(ctx.needs_input_grad) - 4))


class MsaAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, run: Kernel, *arguments: Any) -> Any:
        q, k, v, index_q, index_k, *sequences = arguments[:8]
        block_size, scale, index_scale, warmup, kl_mode, deterministic, kl_out = arguments[11:18]
        if kl_mode != "off":
            _refuse_float8("index_q", index_q)
            _refuse_float8("index_k", index_k)
        out, lse, indices, index_lse, kl = run(*arguments)
        ctx.save_for_backward(
            q, k, v, index_q, index_k, out, lse, None if warmup else indices,
            None if kl_mode == "off" else index_lse, *sequences,
        )  # fmt: skip
        ctx.settings = (block_size, scale, index_scale, warmup, deterministic)
        # Not saved as an input: backward overwrites it and may run more than once, and the caller may write it too.
        ctx.kl_out = kl_out
        if kl_out is not None:
            _leave_unwatched(kl_out)
        absent = [lse, indices, index_lse]
        if not any(ctx.needs_input_grad[1:4]):
            absent.append(out)
        if kl_mode == "off" or not any(ctx.needs_input_grad[4:6]):
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
        wanted = (want and there for want, there in zip(ctx.needs_input_grad[1:6], given, strict=True))
        inputs = (gradient if want else None for gradient, want in zip(gradients, wanted, strict=True))
        return (None, *inputs, *(None,) * (len(ctx.needs_input_grad) - 6))


class _Backward(torch.autograd.Function):
    """A backward operator under create_graph: its results are right, and differentiating them is an error by name."""

    @staticmethod
    def forward(ctx: Any, run: Kernel, name: str, *arguments: Any) -> Any:
        ctx.name = name
        return run(*arguments)

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        raise UnsupportedError(f"{ctx.name}: double backward is not supported, expected first derivatives only")


def _requires_grad(tensors: Any) -> bool:
    return any(isinstance(tensor, Tensor) and tensor.requires_grad for tensor in tensors)


def _refuse_float8(name: str, tensor: Tensor) -> None:
    if tensor.requires_grad and tensor.dtype.itemsize == 1:
        raise UnsupportedError(
            f"msa_attention: {name}: got {tensor.dtype} that requires a gradient, expected torch.bfloat16, "
            "torch.float16 or torch.float32 (float8 tensors have no gradient)"
        )


def _leave_unwatched(tensor: Tensor) -> None:
    """In a graph that is being traced: backward takes the tensor whatever was written into it after forward."""
    if torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.PROXY) is not None:
        from torch.fx.experimental.proxy_tensor import _get_proxies

        for proxy in _get_proxies(tensor):
            proxy.node.meta["saved_tensor_with_no_vc_check"] = True


def _refuse_forward_mode(operation: str, tensors: Any) -> None:
    for tensor in tensors:
        if forward_ad.unpack_dual(tensor).tangent is not None:  # type: ignore[no-untyped-call]
            raise UnsupportedError(
                f"{operation}: forward-mode derivatives are not supported, expected tensors without a tangent"
            )


def sparse_attention(run: Kernel, *arguments: Any) -> Any:
    """The operator with its gradients, computed by `run`."""
    if forward_ad._current_level >= 0:
        _refuse_forward_mode("sparse_attention", arguments[:3])
    if torch.is_grad_enabled() and _requires_grad(arguments[:3]):
        return SparseAttention.apply(run, *arguments)
    return run(*arguments)


def msa_attention(run: Kernel, *arguments: Any) -> Any:
    """The operator with its gradients, computed by `run`."""
    if forward_ad._current_level >= 0:
        _refuse_forward_mode("msa_attention", arguments[:5])
    trained = arguments[:3] if arguments[15] == "off" else arguments[:5]
    if torch.is_grad_enabled() and _requires_grad(trained):
        return MsaAttention.apply(run, *arguments)
    return run(*arguments)


def _backward(name: str) -> Kernel:
    def call(run: Kernel, *arguments: Any) -> Any:
        if torch.is_grad_enabled() and _requires_grad(arguments):
            return _Backward.apply(run, name, *arguments)
        return run(*arguments)

    return call


# Eager calls on plain tensors take these instead of the operators: see _torch.py.
eager = SimpleNamespace(**vars(kernels))


def _register(name: str, call: Kernel) -> None:
    op = getattr(torch.ops.openmsa, name).default

    def kernel(keyset: Any, *arguments: Any) -> Any:
        return call(functools.partial(op.redispatch, keyset & torch._C._after_autograd_keyset), *arguments)

    library.impl(name, kernel, "Autograd", with_keyset=True)
    setattr(eager, name, functools.partial(call, getattr(kernels, name)))


for _suffix in ("", "_workspace"):
    _register(f"sparse_attention{_suffix}", sparse_attention)
    _register(f"msa_attention{_suffix}", msa_attention)
_register("sparse_attention_backward", _backward("sparse_attention"))
for _suffix in ("", "_kl"):
    _register(f"msa_attention_backward{_suffix}", _backward("msa_attention"))
