"""The KL of a transformers model's index branches, layer by layer, for a training loop: see collect_kl."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..errors import InvalidArgumentError

_MODES = ("forward", "backward")


class IndexKl:
    """Collects the KL of each sparse layer of a model, forward pass by forward pass."""

    def __init__(self, kl: str, warmup: bool) -> None:
        self._kl = kl
        self._warmup = warmup
        self._pending: list[Tensor] = []
        self._layers: dict[int, Tensor] = {}

    def total(self) -> Tensor:
        """The sum of the layers' KL, 0-d float32, over the forward passes since the last call.

        Each layer's KL is a mean over the pass's real tokens and index heads. The gradient goes to the index
        projections and their norms, nowhere else.

        Raises:
            InvalidArgumentError: there was no forward pass since the last call.
        """
        if not self._pending:
            raise InvalidArgumentError("collect_kl: total: there was no forward pass since the last one, expected one")
        first, *rest = self._pending
        self._pending = []
        for kl in rest:
            first = first + kl.to(first.device)
        return first

    @property
    def layers(self) -> dict[int, float]:
        """Each layer's KL in its last forward pass (with ``kl="backward"``: its last backward pass), for logs."""
        return {layer: float(kl) for layer, kl in sorted(self._layers.items())}

    def _buffer(self, layer: int, device: torch.device) -> Tensor:
        """What a backward pass writes the layer's KL into."""
        if layer not in self._layers or self._layers[layer].device != device:
            self._layers[layer] = torch.zeros((), device=device)
        return self._layers[layer]

    def _add(self, layer: int, kl: Tensor, buffered: bool) -> None:
        self._pending.append(kl)
        if not buffered:
            self._layers[layer] = kl.detach().clone()  # a later backward pass may write into it


class Recording(NamedTuple):
    """What one pass of one layer computes for the KL."""

    collector: IndexKl | None
    """None when backward repeats the pass: the first one gave its KL already."""
    layer: int
    kl: str
    """As in msa_attention."""
    kl_out: Tensor | None
    warmup: bool
    aside: bool
    """The KL's graph is built although gradients are off: the first pass of a reentrant checkpoint, whose second pass
    cannot reach what left the layer by another way than its results."""

    @property
    def graph(self) -> bool:
        """Whether the index branch needs a graph in this pass."""
        return self.kl != "off" and (self.aside or torch.is_grad_enabled())

    @property
    def repeated(self) -> Recording:
        """What backward computes when it repeats this pass."""
        if self.aside:
            return self._replace(collector=None, aside=False, kl="off", kl_out=None)
        return self._replace(collector=None)

    def give(self, kl: Tensor) -> None:
        if self.collector is not None:
            self.collector._add(self.layer, kl, self.kl_out is not None)


_collectors: weakref.WeakKeyDictionary[nn.Module, IndexKl] = weakref.WeakKeyDictionary()
_last: weakref.WeakKeyDictionary[nn.Module, Recording | None] = weakref.WeakKeyDictionary()
"""What a repetition of an indexer's last forward pass computes. A checkpoint repeats it in the backward pass, perhaps
after collect_kl has ended, and must find the same."""


def recording(indexer: nn.Module, layer: int, device: torch.device) -> Recording | None:
    """What this pass of `indexer` is to record; None for nothing."""
    if torch.compiler.is_compiling():
        return None
    if torch._C._current_graph_task_id() != -1:  # backward is running
        return _last.get(indexer)
    collector = _collectors.get(indexer)
    now = None if collector is None else _new_recording(collector, indexer, layer, device)
    _last[indexer] = None if now is None else now.repeated
    return now


def _new_recording(collector: IndexKl, indexer: nn.Module, layer: int, device: torch.device) -> Recording:
    trained = any(parameter.requires_grad for parameter in indexer.parameters())
    aside = trained and indexer.training and not torch.is_grad_enabled() and not torch.is_inference_mode_enabled()
    # Without a backward pass nothing would ever write the value.
    kl = collector._kl if trained and (aside or torch.is_grad_enabled()) else "forward"
    kl_out = collector._buffer(layer, device) if kl == "backward" else None
    return Recording(collector, layer, kl, kl_out, collector._warmup, aside)


@contextlib.contextmanager
def collecting(indexers: list[Any], kl: str, warmup: bool) -> Iterator[IndexKl]:
    if kl not in _MODES:
        raise InvalidArgumentError(f"collect_kl: kl: got {kl!r}, expected 'forward' or 'backward'")
    if any(indexer in _collectors for indexer in indexers):
        raise InvalidArgumentError("collect_kl: model: its KL is being collected already, expected one collect_kl")
    collector = IndexKl(kl, bool(warmup))
    _collectors.update((indexer, collector) for indexer in indexers)
    try:
        yield collector
    finally:
        for indexer in indexers:
            del _collectors[indexer]
