"""Batches ``[B, H, S, D]`` whose rows hold padding or several documents, as packed sequences and back.

openmsa sees each document as a sequence of its own, without padding, so blocks are counted from a document's first real
token: a row gives the result that it gives alone, wherever its padding is.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..errors import UnsupportedError


class Layout(NamedTuple):
    """How the tokens of a batch lie in packed tensors."""

    queries: Tensor | None
    """Places of the real query tokens among the B * Sq; None: all are real."""
    keys: Tensor | None
    cu_seqlens_q: Tensor | None
    """[sequences + 1] int32; None for one sequence."""
    cu_seqlens_k: Tensor | None

    @property
    def offsets(self) -> dict[str, Any]:
        return {"cu_seqlens_q": self.cu_seqlens_q, "cu_seqlens_k": self.cu_seqlens_k}

    def pack_queries(self, tensor: Tensor) -> Tensor:
        """[B, H, Sq, D] as [Tq, H, D]."""
        return _pack(tensor, self.queries)

    def pack_keys(self, tensor: Tensor) -> Tensor:
        return _pack(tensor, self.keys)

    def unpack(self, out: Tensor, batch: int, n_q: int) -> Tensor:
        """[Tq, H, D] as [B, Sq, H, D], 0 for padding."""
        if self.queries is not None:
            out = out.new_zeros(batch * n_q, *out.shape[1:]).index_copy(0, self.queries, out)
        return out.reshape(batch, n_q, *out.shape[1:])


class Rows:
    """Which document each key token of a batch belongs to; the queries are the last tokens of each row."""

    def __init__(self, documents: Tensor) -> None:
        """`documents`: [B, Sk] integers or booleans, 0 for padding, else the document's number, rising along a row."""
        self.documents = documents.long()
        self._layouts: dict[tuple[int, torch.device], Layout] = {}
        self._positions_checked = False

    def layout(self, n_q: int, device: torch.device) -> Layout:
        # Layers share it: they are all given the rows of the one forward pass.
        if (n_q, device) not in self._layouts:
            self._layouts[n_q, device] = self._new_layout(n_q, device)
        return self._layouts[n_q, device]

    def _new_layout(self, n_q: int, device: torch.device) -> Layout:
        keys = self.documents.to(device)
        queries = keys[:, keys.shape[1] - n_q :]
        number = int(keys.max()) if keys.numel() else 0
        places, offsets = [], []
        for documents in (queries, keys):
            counts = documents.new_zeros(len(documents), number + 1).scatter_add_(
                1, documents, documents.new_ones(1).expand_as(documents)
            )
            offsets.append(torch.nn.functional.pad(counts[:, 1:].flatten().cumsum(0), (1, 0)).to(torch.int32))
            places.append(documents.flatten().nonzero().flatten())
        return Layout(places[0], places[1], offsets[0], offsets[1])

    def dense_mask(self, n_q: int, device: torch.device) -> Tensor:
        """[B, 1, Sq, Sk] booleans: what a query sees, densely. Padding sees itself, so that its softmax has a term."""
        keys = self.documents.to(device)
        n_k = keys.shape[1]
        queries = keys[:, n_k - n_q :]
        together = (queries[:, :, None] == keys[:, None, :]) & (queries[:, :, None] > 0)
        own = torch.eye(n_k, dtype=torch.bool, device=device)[n_k - n_q :]
        return ((together & _causal(n_q, n_k, device)) | own)[:, None]

    def check_positions(self, operation: str, position_ids: Tensor | None, n_q: int) -> None:
        """Padding between a row's tokens (a padded prompt that went on) is left out, so positions must not count it.

        Padding at either end only shifts a row's positions, which rotary embeddings do not see.
        """
        if self._positions_checked:
            return
        real = self.documents > 0
        begins = real[:, 1:] & ~real[:, :-1]
        gaps = begins.sum(1) + real[:, 0] > 1
        if bool(gaps.any()):
            rank = real.cumsum(1) - 1
            wrong = (real & gaps[:, None])[:, real.shape[1] - n_q :]
            if position_ids is not None:
                wrong = wrong & (position_ids.to(rank.device) != rank[:, rank.shape[1] - n_q :])
            if bool(wrong.any()):
                raise UnsupportedError(
                    f"{operation}: position_ids: got places in a batch that has padding between a row's tokens, "
                    "expected positions that leave padding out, attention_mask.cumsum(1) - 1"
                )
        self._positions_checked = True


def plain_layout(batch: int, n_q: int, n_k: int, device: torch.device) -> Layout:
    """Rows without padding, each one sequence."""
    if batch == 1:
        return Layout(None, None, None, None)
    ends = torch.arange(batch + 1, dtype=torch.int32, device=device)
    return Layout(None, None, ends * n_q, ends * n_k)


def causal_mask(n_q: int, n_k: int, device: torch.device) -> Tensor:
    """[1, 1, Sq, Sk] booleans, the queries aligned with the last keys."""
    return _causal(n_q, n_k, device)[None, None]


def _causal(n_q: int, n_k: int, device: torch.device) -> Tensor:
    return torch.ones(n_q, n_k, dtype=torch.bool, device=device).tril(n_k - n_q)


def _pack(tensor: Tensor, places: Tensor | None) -> Tensor:
    packed = tensor.transpose(1, 2).flatten(0, 1)
    return packed if places is None else packed.index_select(0, places)
