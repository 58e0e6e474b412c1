"""A small layer with MiniMax-M3's structure, twice: openmsa's and transformers'. Prompts must exceed TOPK blocks."""

from __future__ import annotations

from typing import Any

import torch
from openmsa.nn import SparseAttention
from torch import Tensor, nn

TOPK = 3
BLOCK = 32
_SIZES: dict[str, Any] = {
    "hidden_size": 48, "num_heads": 8, "num_kv_heads": 2, "head_dim": 16, "index_heads": 4, "index_head_dim": 8,
    "rotary_dim": 8, "topk": TOPK, "block_size": BLOCK,
}  # fmt: skip


def randomize(module: nn.Module, seed: int = 0) -> None:
    """Weights that make scores differ well, and norms that are not at their start."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            if not parameter.is_meta:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.25)


def make_layer(seed: int = 0, **settings: Any) -> SparseAttention:
    layer = SparseAttention(**(_SIZES | settings))
    randomize(layer, seed)
    return layer


class M3:
    """transformers' attention, eager, with the KL of its indexer over the chosen tokens as dense code."""

    def __init__(self, **settings: Any) -> None:
        from transformers.models.minimax_m3_vl.configuration_minimax_m3_vl import MiniMaxM3VLTextConfig
        from transformers.models.minimax_m3_vl.modeling_minimax_m3_vl import (
            MiniMaxM3VLAttention,
            MiniMaxM3VLRotaryEmbedding,
        )

        config = MiniMaxM3VLTextConfig(
            hidden_size=48, num_attention_heads=8, num_key_value_heads=2, head_dim=16, num_hidden_layers=1,
            layer_types=["minimax_m3_sparse"], index_block_size=BLOCK, index_topk_blocks=TOPK,
            rope_parameters={"rope_type": "default", "rope_theta": 5e6, "partial_rotary_factor": 0.5},
            **({"index_n_heads": 4, "index_head_dim": 8} | settings),
        )  # fmt: skip
        config._attn_implementation = "eager"
        self.rotary = MiniMaxM3VLRotaryEmbedding(config)
        self.attention = MiniMaxM3VLAttention(config, 0)
        randomize(self.attention)

    def _positions(self, hidden: Tensor) -> Tensor:
        return torch.arange(hidden.shape[1]).expand(hidden.shape[0], -1)

    def indices(self, hidden: Tensor) -> Tensor:
        """[B, Hi, S, topk] of the indexer."""
        positions = self._positions(hidden)
        return self.attention.indexer(hidden, self.rotary(hidden, positions), None, positions)

    def __call__(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Output and KL."""
        from transformers.models.minimax_m3_vl.modeling_minimax_m3_vl import apply_rotary_pos_emb

        positions = self._positions(hidden)
        cos, sin = self.rotary(hidden, positions)
        out, weights = self.attention(hidden, (cos, sin), None, position_ids=positions)

        indexer, tokens = self.attention.indexer, hidden.detach()
        index_q = indexer.q_norm(indexer.q_proj(tokens).unflatten(-1, (-1, indexer.head_dim))).transpose(1, 2)
        index_k = indexer.k_norm(indexer.k_proj(tokens).unflatten(-1, (-1, indexer.head_dim))).transpose(1, 2)
        index_q, index_k = apply_rotary_pos_emb(index_q, index_k, cos, sin)
        teacher = weights.detach().unflatten(1, (indexer.num_heads, -1)).mean(2)
        scores = (index_q @ index_k.transpose(-1, -2)) * indexer.head_dim**-0.5
        student = scores.masked_fill(teacher == 0, -torch.inf).log_softmax(-1)
        terms = torch.where(teacher > 0, teacher * (teacher.clamp_min(1e-38).log() - student), 0.0)
        return out, terms.sum(-1).mean()


def make_m3(**settings: Any) -> M3:
    return M3(**settings)
