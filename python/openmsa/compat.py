"""flash-msa's functions on openmsa: the same arguments, ``[B, H, S, D]`` tensors and results (https://github.com/poolsideai/flash-msa).

A program changes its import and nothing else. What differs is said here once, for both functions:

- The returned ``kl`` is the KL divergence itself. flash-msa returns 0 that only carries gradients; so does openmsa when
  ``kl_metric`` is given, since the backward pass then writes the value at next to no cost.
- Blocks are chosen by exact scores; flash-msa rounds scores to bfloat16 before it compares them.
- Documents (``document_list``, ``cu_seqlens``) count their blocks from their own first token; flash-msa counts all
  blocks of a row from the row's first token, so selections differ where a document starts inside such a block.
- ``kl_metric`` belongs to one call: every backward pass overwrites it.
- Any sequence length, any ``top_k`` of whole blocks (also beyond the sequence, where everything visible is read), and
  every head dimension, type and device that openmsa's backend takes: CPUs and float32 too.
"""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import Tensor

from ._arguments import integers
from ._library import check_inputs
from .attention import msa_attention
from .errors import Error, InvalidArgumentError

_BLOCK_SIZE = 128

_NAMES = {
    "index_q": "q_proxy", "index_k": "k_proxy", "topk": "top_k", "index_scale": "scale", "kl_out": "kl_metric",
    "cu_seqlens_q": "cu_seqlens", "cu_seqlens_k": "cu_seqlens",
}  # fmt: skip
"""What msa_attention calls the arguments of flash-msa."""


def flash_msa_func(
    q_proxy: Tensor,
    k_proxy: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    top_k: int,
    scale: float,
    document_list: Tensor | None = None,
    *,
    cu_seqlens: Tensor | None = None,
    kl_metric: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Causal attention of each query over the ``top_k`` keys, in blocks of 128, that its proxy head chooses.

    The block of the query itself is always among the chosen ones. Proxy head r chooses for the query heads
    ``[r Hq/Hp, (r+1) Hq/Hp)``. Differentiable: ``out`` in q, k and v, ``kl`` in q_proxy and k_proxy. See the module for
    what differs from flash-msa.

    Args:
        q_proxy: [B, Hp, S, D], the index branch's queries; Hkv divides Hp and Hp divides Hq.
        k_proxy: [B, Hpk, S, D], q_proxy's type; Hpk divides Hp, and is 1 normally.
        q: [B, Hq, S, D].
        k: [B, Hkv, S, D], q's type.
        v: [B, Hkv, S, D], q's type.
        top_k: keys per query and proxy head, a multiple of 128.
        scale: factor of the scores of both branches, finite and above 0; usually ``D ** -0.5``.
        document_list: [B, S] integers: a row's tokens of one document hold the same number and are neighbours. Reading
            it waits for the device; ``cu_seqlens`` does not.
        cu_seqlens: [documents + 1] int32, offsets of the documents in the B*S tokens, every row's end among them.
        kl_metric: 0-d float32 on q's device; the backward pass writes the KL into it and ``kl`` reads 0.

    Returns:
        ``out`` [B, S, Hq * D], q's type, and ``kl``, 0-d float32: KL(teacher || proxy) over the chosen visible keys,
        averaged over batch, proxy heads and queries. The teacher is the mean of the attention probabilities of the
        proxy head's query heads, detached.

    Raises:
        InvalidArgumentError: an argument is wrong; the message names it.
        UnsupportedError: the backend cannot do this.
    """
    return _attend(
        "flash_msa_func", q_proxy, k_proxy, q, k, v, top_k, scale, document_list, cu_seqlens, kl_metric, warmup=False
    )


def flash_msa_warmup_func(
    q_proxy: Tensor,
    k_proxy: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    top_k: int,
    scale: float,
    document_list: Tensor | None = None,
    *,
    cu_seqlens: Tensor | None = None,
    kl_metric: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Dense causal attention, and the KL of the proxy over every visible key: the phase before sparse training.

    Arguments, results and errors are those of :func:`flash_msa_func`; ``top_k`` is checked and otherwise ignored.
    """
    return _attend(
        "flash_msa_warmup_func", q_proxy, k_proxy, q, k, v, top_k, scale, document_list, cu_seqlens, kl_metric,
        warmup=True,
    )  # fmt: skip


flash_msa_func_warmup = flash_msa_warmup_func
"""flash-msa exports the function under both names."""


def _attend(
    name: str, q_proxy: Tensor, k_proxy: Tensor, q: Tensor, k: Tensor, v: Tensor, top_k: int, scale: float,
    document_list: Tensor | None, cu_seqlens: Tensor | None, kl_metric: Tensor | None, *, warmup: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    tensors = {"q_proxy": q_proxy, "k_proxy": k_proxy, "q": q, "k": k, "v": v}
    _check_shapes(name, tensors)
    (top_k,) = integers(name, top_k=top_k)
    if top_k < _BLOCK_SIZE or top_k % _BLOCK_SIZE:
        raise InvalidArgumentError(f"{name}: top_k: got {top_k}, expected a positive multiple of {_BLOCK_SIZE} keys")
    if scale is None:
        raise InvalidArgumentError(f"{name}: scale: missing, expected a number")
    batch, _, length, _ = q.shape
    if document_list is not None:
        if cu_seqlens is not None:
            raise InvalidArgumentError(f"{name}: document_list: got a tensor beside cu_seqlens, expected one of them")
        cu_seqlens = _offsets_of_documents(name, document_list, q)
    elif cu_seqlens is not None:
        _check_offsets(name, cu_seqlens, batch, length)
    elif batch != 1:
        cu_seqlens = torch.arange(batch + 1, device=q.device, dtype=torch.int32) * length
    try:
        result = msa_attention(
            *(_packed(tensors[argument]) for argument in ("q", "k", "v", "q_proxy", "k_proxy")),
            topk=top_k // _BLOCK_SIZE, block_size=_BLOCK_SIZE, scale=scale, index_scale=scale,
            cu_seqlens_q=cu_seqlens, cu_seqlens_k=cu_seqlens, kl="forward" if kl_metric is None else "backward",
            kl_out=kl_metric, warmup=warmup,
        )  # fmt: skip
    except Error as error:
        raise type(error)(_renamed(name, str(error))) from error
    assert result.kl is not None
    return result.out.reshape(batch, length, -1), result.kl


def _packed(tensor: Tensor) -> Tensor:
    """[B, H, S, D] as [B * S, H, D]: a view where the tensor's memory has the tokens of all rows evenly spaced."""
    return tensor.transpose(1, 2).flatten(0, 1)


def _check_shapes(name: str, tensors: dict[str, Any]) -> None:
    for argument, tensor in tensors.items():
        if not isinstance(tensor, Tensor):
            raise InvalidArgumentError(f"{name}: {argument}: got a {type(tensor).__name__}, expected a torch tensor")
        if tensor.dim() != 4:
            raise InvalidArgumentError(f"{name}: {argument}: got rank {tensor.dim()}, expected [B, H, S, D]")
    q = tensors["q"]
    for argument, tensor in tensors.items():
        if (tensor.shape[0], tensor.shape[2]) != (q.shape[0], q.shape[2]):
            raise InvalidArgumentError(
                f"{name}: {argument}: got {list(tensor.shape)}, expected B = {q.shape[0]} and S = {q.shape[2]} as of q"
            )
    heads = {argument: tensor.shape[1] for argument, tensor in tensors.items()}
    for argument, number, divisor in (
        ("q_proxy", heads["q_proxy"], "k_proxy"), ("q_proxy", heads["q_proxy"], "k"), ("q", heads["q"], "q_proxy"),
    ):  # fmt: skip
        if number == 0 or heads[divisor] == 0 or number % heads[divisor]:
            raise InvalidArgumentError(
                f"{name}: {argument}: got {number} heads, expected a multiple of {divisor}'s {heads[divisor]}"
            )
    if heads["v"] != heads["k"]:
        raise InvalidArgumentError(f"{name}: v: got {heads['v']} heads, expected {heads['k']} as of k")


def _offsets_of_documents(name: str, document_list: Any, q: Tensor) -> Tensor:
    batch, _, length, _ = q.shape
    expected = f"integers [{batch}, {length}] on {q.device}"
    if not isinstance(document_list, Tensor):
        raise InvalidArgumentError(
            f"{name}: document_list: got a {type(document_list).__name__}, expected a torch tensor, {expected}"
        )
    kind = document_list.dtype
    if (
        document_list.shape != (batch, length) or document_list.device != q.device
        or kind.is_floating_point or kind.is_complex or kind is torch.bool
    ):  # fmt: skip
        raise InvalidArgumentError(
            f"{name}: document_list: got {kind} {list(document_list.shape)} on {document_list.device}, "
            f"expected {expected}"
        )
    starts = torch.ones(batch, length, dtype=torch.bool, device=q.device)
    starts[:, 1:] = document_list[:, 1:] != document_list[:, :-1]
    ordered = document_list.sort(dim=1).values
    if int(starts[:, 1:].sum()) != int((ordered[:, 1:] != ordered[:, :-1]).sum()):
        raise InvalidArgumentError(
            f"{name}: document_list: a row's document has other tokens between its own, expected neighbours"
        )
    offsets = starts.flatten().nonzero().flatten()
    return torch.nn.functional.pad(offsets, (0, 1), value=batch * length).to(torch.int32)


def _check_offsets(name: str, cu_seqlens: Any, batch: int, length: int) -> None:
    """The core checks the rest; that no document runs from one row into the next is flash-msa's own rule."""
    if not isinstance(cu_seqlens, Tensor) or cu_seqlens.dtype != torch.int32 or cu_seqlens.dim() != 1:
        got = f"{cu_seqlens.dtype} {list(cu_seqlens.shape)}" if isinstance(cu_seqlens, Tensor) else type(cu_seqlens)
        raise InvalidArgumentError(f"{name}: cu_seqlens: got {got}, expected int32 [documents + 1]")
    if batch == 1 or torch.compiler.is_compiling() or not (cu_seqlens.device.type == "cpu" or check_inputs()):
        return
    ends = torch.arange(batch + 1, device=cu_seqlens.device) * length
    missing = ends[~torch.isin(ends, cu_seqlens)]
    if missing.numel():
        raise InvalidArgumentError(
            f"{name}: cu_seqlens: no offset {int(missing[0])}, expected each row's start and end among the offsets "
            f"({batch} rows of {length} tokens)"
        )


def _renamed(name: str, message: str) -> str:
    return re.sub(
        r"^msa_attention: (\w+)", lambda found: f"{name}: {_NAMES.get(found[1], found[1])}", message
    )  # fmt: skip
