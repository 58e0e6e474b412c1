"""Small random MiniMax-M3 models of transformers, on its eager attention and on openmsa's with the same weights."""

from __future__ import annotations

from typing import Any

import torch
from openmsa.integrations import transformers as integration
from torch import Tensor, nn
from transformers.models.minimax_m3_vl.configuration_minimax_m3_vl import MiniMaxM3VLTextConfig
from transformers.models.minimax_m3_vl.modeling_minimax_m3_vl import MiniMaxM3VLForCausalLM

SETTINGS: dict[str, dict[str, Any]] = {
    "M3's heads": {},
    "more index heads than KV heads, two local blocks": {
        "num_attention_heads": 8, "index_n_heads": 4, "index_block_size": 64, "index_topk_blocks": 3,
        "index_local_blocks": 2, "index_head_dim": 24,
    },
}  # fmt: skip


def make_config(**changes: Any) -> MiniMaxM3VLTextConfig:
    """A dense and two sparse layers; prompts of 300 tokens have 10 blocks, of which 3 are read."""
    settings: dict[str, Any] = {
        "vocab_size": 97, "hidden_size": 48, "intermediate_size": 32, "dense_intermediate_size": 64,
        "shared_intermediate_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
        "head_dim": 16, "index_n_heads": 2, "index_head_dim": 16, "index_block_size": 32, "index_topk_blocks": 3,
        "layer_types": ["full_attention", "minimax_m3_sparse", "minimax_m3_sparse"],
        "mlp_layer_types": ["dense", "dense", "sparse"], "num_local_experts": 4, "num_experts_per_tok": 2,
        "rotary_dim": 8, "max_position_embeddings": 1024, "pad_token_id": 0, "bos_token_id": None,
        "eos_token_id": None, "initializer_range": 0.3,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
    }  # fmt: skip
    return MiniMaxM3VLTextConfig(**{**settings, **changes})


def make_models(**changes: Any) -> tuple[Any, Any]:
    """(eager, openmsa), in evaluation mode."""
    torch.manual_seed(0)
    eager = MiniMaxM3VLForCausalLM._from_config(make_config(**changes), attn_implementation="eager")
    for name, parameter in eager.named_parameters():
        if "norm" in name:
            nn.init.normal_(parameter, std=0.3)
    model = MiniMaxM3VLForCausalLM._from_config(make_config(**changes), attn_implementation=integration.register())
    model.load_state_dict(eager.state_dict())
    return eager.eval(), model.eval()


def tokens(*shape: int, seed: int = 0) -> Tensor:
    """Random ones, none of them padding."""
    return torch.randint(1, 97, shape, generator=torch.Generator().manual_seed(seed))


def gradients(model: Any) -> dict[str, Tensor | None]:
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def sparse_layers(model: Any) -> list[Any]:
    return [layer.self_attn for layer in model.model.layers if layer.self_attn.indexer is not None]


def padded(side: str, lengths: tuple[int, ...] = (300, 230, 97)) -> tuple[Tensor, Tensor]:
    """Tokens and attention mask of rows of these lengths, padded on one side."""
    ids = tokens(len(lengths), max(lengths))
    place = torch.arange(max(lengths))
    ends = torch.tensor(lengths)[:, None]
    mask = place < ends if side == "right" else place >= max(lengths) - ends
    return ids * mask, mask.long()
