"""torch operators of namespace ``openmsa``: schemas, kernels for CPU and CUDA tensors, and fake (shape) kernels.

Every operation has a functional operator, which makes its results, and an ``_out`` operator, which writes into given
ones and takes the workspace. The arguments of an ``_out`` operator are those of the binding, in the same order, so that
its kernel is the binding. _autograd.py adds the gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from . import _shapes
from ._library import binding
from ._shapes import Output
from ._threads import follow_torch
from .errors import Error, InvalidArgumentError, UnsupportedError

library: Any = torch.library.Library("openmsa", "DEF")  # type: ignore[no-untyped-call]
kernels = SimpleNamespace()
"""Each operator's kernel, by the operator's name."""

_SEQUENCES = "Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, Tensor? k_starts"
_REQUESTS = "Tensor block_table, Tensor seq_lens, Tensor cu_seqlens_q"
_SELECTION = "SymInt topk, SymInt init_blocks, SymInt local_blocks"
_CACHE_SCALES = "float? k_scale, Tensor? k_scale_tensor, float? v_scale, Tensor? v_scale_tensor"

_SELECT = f"Tensor index_q, Tensor index_k, {_SEQUENCES}, {_SELECTION}, SymInt block_size, float? scale"
_ATTEND = f"Tensor q, Tensor k, Tensor v, Tensor indices, {_SEQUENCES}, SymInt block_size, float? scale"
_PAGED_SELECT = f"Tensor index_q, Tensor index_k_cache, {_REQUESTS}, {_SELECTION}, float? scale"
_PAGED_ATTEND = f"Tensor q, Tensor k_cache, Tensor v_cache, Tensor indices, {_REQUESTS}, float? scale, {_CACHE_SCALES}"
_PAGED_MSA = (
    "Tensor q, Tensor k_cache, Tensor v_cache, Tensor index_q, Tensor index_k_cache, "
    f"{_REQUESTS}, {_SELECTION}, float? scale, float? index_scale, {_CACHE_SCALES}"
)
_MSA = (
    f"Tensor q, Tensor k, Tensor v, Tensor index_q, Tensor index_k, {_SEQUENCES}, {_SELECTION}, SymInt block_size, "
    "float? scale, float? index_scale, bool warmup, str kl, bool deterministic, Tensor? kl_out"
)
_MSA_RESULTS = "(Tensor out, Tensor lse, Tensor indices, Tensor index_lse, Tensor kl)"

_OUT = "Tensor(a!)? workspace, Tensor(b!) out, Tensor(c!)? lse_out"

Kernel = Callable[..., Any]


def define(name: str, arguments: str, results: str, kernel: Kernel, fake: Kernel, *, autograd: bool = False) -> None:
    """Defines one operator. Without `autograd` its results carry no gradient."""
    library.define(f"{name}({arguments}) -> {results}")
    kernel = _explained(name, kernel)
    setattr(kernels, name, kernel)
    for key in ("CPU", "CUDA"):
        library.impl(name, kernel, key)
    torch.library.register_fake(f"openmsa::{name}", fake, lib=library)
    if not autograd:
        library.impl(name, torch.library.fallthrough_kernel, "Autograd")


def _explained(name: str, kernel: Kernel) -> Kernel:
    def explained(*arguments: Any) -> Any:
        follow_torch()
        try:
            return kernel(*arguments)
        except Error:
            raise
        except RuntimeError:
            refuse_unreadable(name, arguments)
            raise

    return explained


def refuse_unreadable(name: str, arguments: Sequence[Any]) -> None:
    """Raises for the first of an operator's arguments that torch cannot hand to the core: torch does not name it."""
    operation = name.removesuffix("_out").removesuffix("_workspace")
    schema = getattr(torch.ops.openmsa, name).default._schema
    for argument, value in zip(schema.arguments, arguments, strict=False):
        if not isinstance(value, Tensor):
            continue
        place = f"{operation}: {argument.name.removesuffix('_tensor')}"
        if value.layout is not torch.strided or value.is_nested or value.is_quantized:
            kind = "a nested tensor" if value.is_nested else f"a tensor of layout {value.layout} and type {value.dtype}"
            raise InvalidArgumentError(f"{place}: got {kind}, expected a plain strided tensor")
        if value.device.type not in ("cpu", "cuda"):
            raise UnsupportedError(f"{place}: got a tensor on {value.device}, expected cpu or cuda")


def new(like: Tensor, output: Output) -> Tensor:
    if output.dtype is None:
        return like.new_empty(output.shape, dtype=output.like.dtype)
    return like.new_empty(output.shape, dtype=getattr(torch, output.dtype))


def _absent(like: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Stands for a result that was not asked for: operators return a fixed number of tensors."""
    return like.new_empty((0,), dtype=dtype)


def written(*tensors: Tensor | None) -> None:
    """Tells autograd that these were written in place, so that an earlier use of their values is noticed."""
    changed = [tensor for tensor in tensors if tensor is not None and not tensor.is_inference()]
    if changed:
        torch.autograd.graph.increment_version(changed)


def _into(function: Kernel, results: int) -> Kernel:
    """The kernel of an `_out` operator whose last `results` arguments are written by `function`."""

    def kernel(*arguments: Any) -> None:
        function(*arguments)
        written(*arguments[-results:])

    return kernel


def _nothing(*_: Any) -> None:
    """The fake kernel of an operator that writes into given tensors."""


# ---- select_blocks and paged_select_blocks ---------------------------------------------------------------------------


def _new_selection(index_q: Tensor, topk: int, return_lse: bool) -> tuple[Tensor, Tensor]:
    indices = new(index_q, _shapes.indices(index_q, topk))
    return indices, new(index_q, _shapes.per_head(index_q)) if return_lse else _absent(index_q)


def _select_fake(index_q: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    topk, return_lse = rest[4], rest[-1]  # after index_k and three offsets or tables, in both operators
    return _new_selection(index_q, topk, return_lse)


def _select(function: Any) -> Kernel:
    def kernel(index_q: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
        indices, lse = _select_fake(index_q, *rest)
        function(index_q, *rest[:-1], None, indices, lse if rest[-1] else None)
        return indices, lse

    return kernel


for _name, _arguments in (("select_blocks", _SELECT), ("paged_select_blocks", _PAGED_SELECT)):
    _function = getattr(binding, _name)
    define(_name, f"{_arguments}, bool return_lse", "(Tensor, Tensor)", _select(_function), _select_fake)
    define(f"{_name}_out", f"{_arguments}, {_OUT}", "()", _into(_function, 2), _nothing)


# ---- sparse_attention ------------------------------------------------------------------------------------------------


def _new_attention(q: Tensor, v: Tensor, return_lse: bool) -> tuple[Tensor, Tensor]:
    return new(q, _shapes.attention(q, v)), new(q, _shapes.per_head(q)) if return_lse else _absent(q)


def _sparse_attention_fake(
    q: Tensor, k: Tensor, v: Tensor, indices: Tensor, cu_seqlens_q: Tensor | None, cu_seqlens_k: Tensor | None,
    k_starts: Tensor | None, block_size: int, scale: float | None, deterministic: bool, return_lse: bool,
    workspace: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    return _new_attention(q, v, return_lse)


def _sparse_attention(
    q: Tensor, k: Tensor, v: Tensor, indices: Tensor, cu_seqlens_q: Tensor | None, cu_seqlens_k: Tensor | None,
    k_starts: Tensor | None, block_size: int, scale: float | None, deterministic: bool, return_lse: bool,
    workspace: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    out, lse = _new_attention(q, v, return_lse)
    binding.sparse_attention(
        q, k, v, indices, cu_seqlens_q, cu_seqlens_k, k_starts, block_size, scale, workspace,
        out, lse if return_lse else None,
    )  # fmt: skip
    return out, lse


_FLAGS = "bool deterministic, bool return_lse"
define("sparse_attention", f"{_ATTEND}, {_FLAGS}", "(Tensor, Tensor)", _sparse_attention, _sparse_attention_fake,
       autograd=True)  # fmt: skip
define("sparse_attention_workspace", f"{_ATTEND}, {_FLAGS}, Tensor(a!) workspace", "(Tensor, Tensor)",
       _sparse_attention, _sparse_attention_fake, autograd=True)  # fmt: skip
define("sparse_attention_out", f"{_ATTEND}, {_OUT}", "()", _into(binding.sparse_attention, 2), _nothing)


def _new_gradients(*tensors: Tensor) -> tuple[Tensor, ...]:
    return tuple(tensor.new_empty(tensor.shape) for tensor in tensors)


def _sparse_attention_backward_fake(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, ...]:
    return _new_gradients(q, k, v)


def _sparse_attention_backward(
    q: Tensor, k: Tensor, v: Tensor, indices: Tensor, out: Tensor, lse: Tensor, d_out: Tensor, *rest: Any
) -> tuple[Tensor, ...]:
    gradients = _new_gradients(q, k, v)
    binding.sparse_attention_backward(q, k, v, indices, out, lse, d_out.contiguous(), *rest, None, *gradients)
    return gradients


define(
    "sparse_attention_backward",
    "Tensor q, Tensor k, Tensor v, Tensor indices, Tensor out, Tensor lse, Tensor d_out, "
    f"{_SEQUENCES}, SymInt block_size, float? scale, bool deterministic",
    "(Tensor, Tensor, Tensor)",
    _sparse_attention_backward,
    _sparse_attention_backward_fake,
    autograd=True,
)


# ---- msa_attention ---------------------------------------------------------------------------------------------------


def _msa_attention_fake(
    q: Tensor, k: Tensor, v: Tensor, index_q: Tensor, index_k: Tensor, cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None, k_starts: Tensor | None, topk: int, init_blocks: int, local_blocks: int,
    block_size: int, scale: float | None, index_scale: float | None, warmup: bool, kl: str, deterministic: bool,
    kl_out: Tensor | None, workspace: Tensor | None = None,
) -> tuple[Tensor, ...]:  # fmt: skip
    out, lse = _new_attention(q, v, True)
    indices = _absent(q, torch.int32) if warmup else new(q, _shapes.indices(index_q, topk))
    index_lse = _absent(q) if kl == "off" else new(q, _shapes.per_head(index_q))
    divergence = _absent(q) if kl == "off" else q.new_empty((), dtype=torch.float32)
    return out, lse, indices, index_lse, divergence


def _msa_attention(
    q: Tensor, k: Tensor, v: Tensor, index_q: Tensor, index_k: Tensor, cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None, k_starts: Tensor | None, topk: int, init_blocks: int, local_blocks: int,
    block_size: int, scale: float | None, index_scale: float | None, warmup: bool, kl: str, deterministic: bool,
    kl_out: Tensor | None, workspace: Tensor | None = None,
) -> tuple[Tensor, ...]:  # fmt: skip
    results = _msa_attention_fake(
        q, k, v, index_q, index_k, cu_seqlens_q, cu_seqlens_k, k_starts, topk, init_blocks, local_blocks,
        block_size, scale, index_scale, warmup, kl, deterministic, kl_out,
    )  # fmt: skip
    out, lse, indices, index_lse, divergence = results
    binding.msa_attention(
        q, k, v, index_q, index_k, cu_seqlens_q, cu_seqlens_k, k_starts, topk, init_blocks, local_blocks,
        block_size, scale, index_scale, warmup, workspace, out, lse, None if warmup else indices,
        None if kl == "off" else index_lse, divergence if kl == "forward" else None,
    )  # fmt: skip
    if kl == "backward":
        divergence.zero_()
    return results


define("msa_attention", _MSA, _MSA_RESULTS, _msa_attention, _msa_attention_fake, autograd=True)
define("msa_attention_workspace", f"{_MSA}, Tensor(a!) workspace", _MSA_RESULTS, _msa_attention, _msa_attention_fake,
       autograd=True)  # fmt: skip


def _msa_attention_backward_fake(
    q: Tensor, k: Tensor, v: Tensor, index_q: Tensor, index_k: Tensor, out: Tensor, lse: Tensor,
    indices: Tensor | None, index_lse: Tensor | None, d_out: Tensor | None, d_kl: Tensor | None, *_: Any,
) -> tuple[Tensor, ...]:  # fmt: skip
    main = (_absent(q), _absent(k), _absent(v)) if d_out is None else _new_gradients(q, k, v)
    index = (_absent(index_q), _absent(index_k)) if d_kl is None else _new_gradients(index_q, index_k)
    return (*main, *index)


def _msa_attention_backward(
    q: Tensor, k: Tensor, v: Tensor, index_q: Tensor, index_k: Tensor, out: Tensor, lse: Tensor,
    indices: Tensor | None, index_lse: Tensor | None, d_out: Tensor | None, d_kl: Tensor | None, *rest: Any,
) -> tuple[Tensor, ...]:  # fmt: skip
    gradients = _msa_attention_backward_fake(q, k, v, index_q, index_k, out, lse, indices, index_lse, d_out, d_kl)
    *settings, kl_out = rest
    binding.msa_attention_backward(
        q, k, v, index_q, index_k, out, lse, indices, index_lse, None if d_out is None else d_out.contiguous(), d_kl,
        *settings, None, *(gradients[:3] if d_out is not None else (None,) * 3),
        *(gradients[3:] if d_kl is not None else (None,) * 2), kl_out,
    )  # fmt: skip
    written(kl_out)
    return gradients


_MSA_BACKWARD = (
    "Tensor q, Tensor k, Tensor v, Tensor index_q, Tensor index_k, Tensor out, Tensor lse, Tensor? indices, "
    f"Tensor? index_lse, Tensor? d_out, Tensor? d_kl, {_SEQUENCES}, SymInt block_size, float? scale, "
    "float? index_scale, bool warmup, bool deterministic"
)
_GRADIENTS = "(Tensor d_q, Tensor d_k, Tensor d_v, Tensor d_index_q, Tensor d_index_k)"


def _msa_attention_backward_without_kl(*arguments: Any) -> tuple[Tensor, ...]:
    return _msa_attention_backward(*arguments, None)


define("msa_attention_backward", _MSA_BACKWARD, _GRADIENTS, _msa_attention_backward_without_kl,
       _msa_attention_backward_fake, autograd=True)  # fmt: skip
define("msa_attention_backward_kl", f"{_MSA_BACKWARD}, Tensor(a!) kl_out", _GRADIENTS, _msa_attention_backward,
       _msa_attention_backward_fake, autograd=True)  # fmt: skip


# ---- paged_sparse_attention and paged_msa_attention ------------------------------------------------------------------


def _paged_sparse_attention_fake(q: Tensor, k_cache: Tensor, v_cache: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    return _new_attention(q, v_cache, rest[-1])


def _paged_sparse_attention(q: Tensor, k_cache: Tensor, v_cache: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    out, lse = _new_attention(q, v_cache, rest[-1])
    binding.paged_sparse_attention(q, k_cache, v_cache, *rest[:-1], None, out, lse if rest[-1] else None)
    return out, lse


define("paged_sparse_attention", f"{_PAGED_ATTEND}, bool return_lse", "(Tensor, Tensor)", _paged_sparse_attention,
       _paged_sparse_attention_fake)  # fmt: skip
define("paged_sparse_attention_out", f"{_PAGED_ATTEND}, {_OUT}", "()", _into(binding.paged_sparse_attention, 2),
       _nothing)  # fmt: skip


def _paged_msa_attention_fake(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, index_q: Tensor, index_k_cache: Tensor, block_table: Tensor,
    seq_lens: Tensor, cu_seqlens_q: Tensor, topk: int, *_: Any,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    return (*_new_attention(q, v_cache, True), new(q, _shapes.indices(index_q, topk)))


def _paged_msa_attention(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    results = _paged_msa_attention_fake(*arguments)
    binding.paged_msa_attention(*arguments, None, *results)
    return results


define("paged_msa_attention", _PAGED_MSA, "(Tensor out, Tensor lse, Tensor indices)", _paged_msa_attention,
       _paged_msa_attention_fake)  # fmt: skip
define("paged_msa_attention_out",
       f"{_PAGED_MSA}, Tensor(a!)? workspace, Tensor(b!) out, Tensor(c!) lse_out, Tensor(d!) indices_out", "()",
       _into(binding.paged_msa_attention, 3), _nothing)  # fmt: skip


# ---- paged_append, combine, captured_mass ----------------------------------------------------------------------------


def _paged_append(*arguments: Any) -> None:
    *inputs, k_cache, v_cache, index_k_cache = arguments
    binding.paged_append(*inputs, None, k_cache, v_cache, index_k_cache)
    written(k_cache, v_cache, index_k_cache)


define("paged_append",
       f"Tensor k, Tensor v, Tensor index_k, {_REQUESTS}, {_CACHE_SCALES}, Tensor(a!) k_cache, Tensor(b!) v_cache, "
       "Tensor(c!) index_k_cache", "()", _paged_append, _nothing)  # fmt: skip


def _combine_fake(outs: Tensor, lses: Tensor) -> tuple[Tensor, Tensor]:
    out, lse = _shapes.combined(outs, lses)
    return new(outs, out), new(outs, lse)


def _combine(outs: Tensor, lses: Tensor) -> tuple[Tensor, Tensor]:
    out, lse = _combine_fake(outs, lses)
    binding.combine(outs, lses, None, out, lse)
    return out, lse


define("combine", "Tensor outs, Tensor lses", "(Tensor, Tensor)", _combine, _combine_fake)


def _captured_mass_fake(q: Tensor, k: Tensor, indices: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    shape = _shapes.mass(indices)
    return new(q, shape), new(q, shape)


def _captured_mass(q: Tensor, k: Tensor, indices: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    share, best = _captured_mass_fake(q, k, indices)
    binding.captured_mass(q, k, indices, *rest, None, share, best)
    return share, best


define("captured_mass", f"Tensor q, Tensor k, Tensor indices, {_SEQUENCES}, SymInt block_size, float? scale",
       "(Tensor, Tensor)", _captured_mass, _captured_mass_fake)  # fmt: skip
