"""MiniMax-M3 of transformers (`minimax_m3_vl`) on openmsa: its attention, its mask and its indexer.

The model's indexer scores every key in float32, [B, Hi, Sq, Sk], and hands on block numbers. Here it only projects: the
attention function, which knows the padding, selects with select_blocks and attends. Only imported with transformers.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers.cache_utils import StaticLayer
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import causal_mask_function
from transformers.models.minimax_m3_vl import modeling_minimax_m3_vl as m3

from ..attention import msa_attention, sparse_attention
from ..errors import InvalidArgumentError, UnsupportedError
from ..select import select_blocks
from ._index_kl import Recording, recording
from ._rows import Layout, Rows, causal_mask, plain_layout

NAME = "openmsa"
OPERATION = f"attn_implementation={NAME!r}"

_MODELS = ("minimax_m3_vl", "minimax_m3_vl_text", "minimax_m3_vl_vision")
_WITHOUT = ("sliding_window", "softcap", "s_aux", "position_bias")
"""Arguments that other models' attention takes, and MSA does not have."""

transformers_indexer: Callable[..., Tensor] = m3.MiniMaxM3VLIndexer.forward


class IndexBranch(NamedTuple):
    """What the indexer hands to the attention function in place of block numbers."""

    index_q: Tensor
    """[B, Hi, Sq, Di]"""
    index_k: Tensor
    """[B, 1, Sk, Di], cached keys included"""
    topk: int
    block_size: int
    local_blocks: int
    recording: Recording | None

    @property
    def selection(self) -> dict[str, Any]:
        return {"topk": self.topk, "block_size": self.block_size, "local_blocks": self.local_blocks}

    def block_indices(self, attention_mask: Any = None) -> Tensor:
        """The selection as transformers' own indexer gives it.

        Returns:
            [B, Hi, Sq, min(topk, blocks)] int64: the local blocks first, the query's own one leading, then the others
            by descending score, then -1. Rows of padding hold -1.
        """
        batch, heads, n_q, _ = self.index_q.shape
        n_k = self.index_k.shape[2]
        layout = _layout(attention_mask, batch, n_q, n_k, self.index_q.device)
        indices = self.select(layout).long()
        valid = (indices >= 0).sum(-1, keepdim=True)
        # select_blocks has the own block last among the valid ones: local blocks come to the front from the back.
        place = torch.arange(indices.shape[-1], device=indices.device).expand_as(indices)
        local = valid.clamp(max=self.local_blocks)
        source = torch.where(place < local, valid - 1 - place, place - local)
        indices = torch.where(place < valid, indices.gather(-1, source.clamp(min=0)), -1)
        width = min(self.topk, -(-n_k // self.block_size))
        rows = indices[..., :width].transpose(0, 1)
        if layout.queries is not None:
            rows = rows.new_full((batch * n_q, heads, width), -1).index_copy(0, layout.queries, rows)
        return rows.reshape(batch, n_q, heads, width).transpose(1, 2)

    def select(self, layout: Layout) -> Tensor:
        indices: Tensor = select_blocks(
            layout.pack_queries(self.index_q), layout.pack_keys(self.index_k), **self.selection, **layout.offsets
        )  # fmt: skip
        return indices


def indexer_forward(
    self: Any, hidden_states: Tensor, position_embeddings: Any, past_key_values: Any, position_ids: Tensor
) -> Any:
    """MiniMaxM3VLIndexer.forward: the model's own unless its attention is openmsa's, else :class:`IndexBranch`."""
    if self.config._attn_implementation != NAME:
        return transformers_indexer(self, hidden_states, position_embeddings, past_key_values, position_ids)
    now = recording(self, self.layer_idx, hidden_states.device)
    # Only the KL trains the index branch, and it trains nothing else: hidden states are detached.
    with torch.set_grad_enabled(now is not None and now.graph):
        index_q, index_k = _project(self, hidden_states.detach(), position_embeddings)
        if past_key_values is not None:
            index_k = _cache_layer(past_key_values, self.layer_idx).update_index(index_k)
    return IndexBranch(index_q, index_k, self.topk_blocks, self.block_size, self.local_blocks, now)


def _project(indexer: Any, hidden_states: Tensor, position_embeddings: Any) -> tuple[Tensor, Tensor]:
    batch, n_q, _ = hidden_states.shape
    dim = indexer.head_dim
    index_q = indexer.q_norm(indexer.q_proj(hidden_states).view(batch, n_q, -1, dim)).transpose(1, 2)
    index_k = indexer.k_norm(indexer.k_proj(hidden_states).view(batch, n_q, 1, dim)).transpose(1, 2)
    cos, sin = position_embeddings
    rotated: tuple[Tensor, Tensor] = m3.apply_rotary_pos_emb(index_q, index_k, cos[..., :dim], sin[..., :dim])
    return rotated


def _cache_layer(past_key_values: Any, layer: int) -> Any:
    cache = past_key_values.layers[layer]
    if isinstance(cache, StaticLayer):
        raise UnsupportedError(
            f"{OPERATION}: past_key_values: got a static cache ({type(cache).__name__}), expected a DynamicCache"
        )
    if not hasattr(cache, "update_index"):
        raise InvalidArgumentError(
            f"{OPERATION}: past_key_values: layer {layer} is a {type(cache).__name__}, which holds no index keys, "
            "expected DynamicCache(config=model.config)"
        )
    return cache


def attention_forward(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any = None,
    dropout: float = 0.0,
    scaling: float | None = None,
    block_indices: Any = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """transformers' attention function: exact attention to the chosen blocks; dense layers through PyTorch's SDPA.

    Args:
        module: the attention layer.
        query: [B, Hq, Sq, D].
        key: [B, Hkv, Sk, D], cached keys included; the queries are the last Sq tokens.
        value: [B, Hkv, Sk, Dv].
        attention_mask: None, [B, Sk] with 0 for padding, or what :func:`mask` returned.
        dropout: of a dense layer; 0 in a sparse one.
        scaling: factor of the scores; ``1 / sqrt(D)`` by default.
        block_indices: what openmsa's indexer returned, or block numbers [B, Hi, Sq, topk] in any order, -1 for none;
            counted from a row's first real token; None in dense layers.

    Returns:
        [B, Sq, Hq, Dv], and None in place of attention weights.
    """
    _refuse(module, attention_mask, kwargs)
    batch, _, n_q, _ = query.shape
    n_k = key.shape[2]
    if block_indices is None:
        dense = _dense_mask(module, attention_mask, n_q, n_k, query.device)
        return sdpa_attention_forward(module, query, key, value, dense, dropout=dropout, scaling=scaling, **kwargs)  # type: ignore[no-any-return]
    if dropout:
        raise UnsupportedError(f"{OPERATION}: attention_dropout: got {dropout} in a sparse layer, expected 0")
    if kwargs.get("is_causal") is False:
        raise UnsupportedError(f"{OPERATION}: is_causal: got False in a sparse layer, expected True")
    rows = _rows(attention_mask, n_k)
    if rows is not None:
        rows.check_positions(OPERATION, kwargs.get("position_ids"), n_q)
    layout = _layout(rows, batch, n_q, n_k, query.device)
    cast = _autocast(query.device)
    q, k, v = cast(layout.pack_queries(query)), cast(layout.pack_keys(key)), cast(layout.pack_keys(value))
    if isinstance(block_indices, IndexBranch):
        branch = block_indices._replace(index_q=cast(block_indices.index_q), index_k=cast(block_indices.index_k))
        out = _attend(branch, q, k, v, layout, scaling)
    else:
        _check_block_indices(block_indices, batch, n_q)
        indices = block_indices.transpose(0, 1).flatten(1, 2)
        if layout.queries is not None:
            indices = indices.index_select(1, layout.queries)
        out = sparse_attention(q, k, v, indices, block_size=module.indexer.block_size, scale=scaling, **layout.offsets)
    return layout.unpack(out, batch, n_q), None


def _attend(branch: IndexBranch, q: Tensor, k: Tensor, v: Tensor, layout: Layout, scaling: float | None) -> Tensor:
    now = branch.recording
    if now is None or (now.kl == "off" and not now.warmup):
        out: Tensor = sparse_attention(
            q, k, v, branch.select(layout), block_size=branch.block_size, scale=scaling, **layout.offsets
        )  # fmt: skip
        return out
    with torch.enable_grad() if now.aside else contextlib.nullcontext():
        result = msa_attention(
            q, k, v, layout.pack_queries(branch.index_q), layout.pack_keys(branch.index_k), **branch.selection,
            scale=scaling, **layout.offsets, kl=now.kl, kl_out=now.kl_out, warmup=now.warmup,
        )  # fmt: skip
    if result.kl is not None:
        now.give(result.kl)
    attended: Tensor = result.out
    return attended


def mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: Any = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Tensor] = causal_mask_function,
    attention_mask: Tensor | None = None,
    config: Any = None,
    device: Any = "cpu",
    **_: Any,
) -> Rows | None:
    """transformers' mask function: which document each token belongs to; None when every row is one whole document."""
    _check_model(config)
    if isinstance(q_offset, Tensor):
        raise UnsupportedError(f"{OPERATION}: past_key_values: got a static cache, expected a DynamicCache")
    if attention_mask is not None:
        if attention_mask.shape[1] != kv_length:
            raise InvalidArgumentError(
                f"{OPERATION}: attention_mask: got {list(attention_mask.shape)}, expected [{batch_size}, {kv_length}], "
                "cached tokens included (a static cache is longer than its tokens and not supported)"
            )
        if mask_function is not causal_mask_function:
            raise UnsupportedError(
                f"{OPERATION}: mask_function: got one beside attention_mask, expected the causal one"
            )
        return None if bool(attention_mask.all()) else Rows(attention_mask)
    if mask_function is causal_mask_function:
        return None
    return _documents(mask_function, batch_size, q_length, kv_length, device)


def _documents(mask_function: Callable[..., Tensor], batch: int, n_q: int, n_k: int, device: Any) -> Rows | None:
    """The documents that transformers found in position_ids and put into a mask function; an error for another one."""
    token = torch.arange(n_q, device=device)[None]
    row = torch.arange(batch, device=device)[:, None]
    head = token.new_zeros(())

    def sees(queries: Tensor, keys: Tensor) -> Tensor:
        return mask_function(row, head, queries, keys).expand(batch, queries.shape[1])

    goes_on = sees(token[:, 1:], token[:, :-1])
    start = torch.cat([token.new_zeros(batch, 1), torch.where(goes_on, 0, token[:, 1:])], 1).cummax(1).values
    before = (start - 1).clamp(min=0)
    causal_documents = (
        n_q == n_k
        and bool(sees(token, start).all())  # as far back as the document's start
        and not bool((sees(token, before) & (start > 0)).any())  # no further
        and not bool(sees(token[:, :-1], token[:, 1:]).any())  # not ahead
    )
    if not causal_documents:
        raise UnsupportedError(
            f"{OPERATION}: mask_function: got another than causal attention within documents, expected that"
        )
    return None if bool(goes_on.all()) else Rows(1 + torch.nn.functional.pad(~goes_on, (1, 0)).long().cumsum(1))


def _refuse(module: Any, attention_mask: Any, kwargs: dict[str, Any]) -> None:
    _check_model(getattr(module, "config", None))
    if kwargs.get("output_attentions"):
        raise UnsupportedError(f"{OPERATION}: output_attentions: got True, expected False (attention is not stored)")
    for name in _WITHOUT:
        if kwargs.get(name) is not None:
            raise UnsupportedError(f"{OPERATION}: {name}: got a {type(kwargs[name]).__name__}, expected None")
    if isinstance(attention_mask, Tensor) and attention_mask.dim() != 2:
        raise UnsupportedError(
            f"{OPERATION}: attention_mask: got {list(attention_mask.shape)}, expected [B, Sk] with 0 for padding"
        )


def _check_block_indices(block_indices: Any, batch: int, n_q: int) -> None:
    shape = list(block_indices.shape) if isinstance(block_indices, Tensor) else type(block_indices).__name__
    if not isinstance(shape, list) or len(shape) != 4 or (shape[0], shape[2]) != (batch, n_q):
        raise InvalidArgumentError(f"{OPERATION}: block_indices: got {shape}, expected [{batch}, Hi, {n_q}, topk]")


def _check_model(config: Any) -> None:
    kind = getattr(config, "model_type", None)
    if kind not in _MODELS:
        raise UnsupportedError(f"{OPERATION}: config: got model_type {kind!r}, expected 'minimax_m3_vl'")


def _rows(attention_mask: Any, n_k: int) -> Rows | None:
    if attention_mask is None or isinstance(attention_mask, Rows):
        return attention_mask
    if attention_mask.shape[1] != n_k:
        raise InvalidArgumentError(
            f"{OPERATION}: attention_mask: got {list(attention_mask.shape)}, expected [B, {n_k}]"
        )
    return Rows(attention_mask != 0)


def _layout(attention_mask: Any, batch: int, n_q: int, n_k: int, device: torch.device) -> Layout:
    rows = _rows(attention_mask, n_k)
    return plain_layout(batch, n_q, n_k, device) if rows is None else rows.layout(n_q, device)


def _dense_mask(module: Any, attention_mask: Any, n_q: int, n_k: int, device: torch.device) -> Tensor | None:
    rows = _rows(attention_mask, n_k)
    if rows is not None:
        return rows.dense_mask(n_q, device)
    # SDPA's own causal mask aligns queries with the first keys.
    chunk = module.is_causal and 1 < n_q != n_k
    return causal_mask(n_q, n_k, device) if chunk else None


def _autocast(device: torch.device) -> Callable[[Tensor], Tensor]:
    """Under autocast rotary embeddings leave float32 beside the lower type of the projections."""
    if not torch.is_autocast_enabled(device.type):
        return lambda tensor: tensor
    dtype = torch.get_autocast_dtype(device.type)
    return lambda tensor: tensor.to(dtype)
