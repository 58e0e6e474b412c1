"""The ways of attending that are compared, on one layer's heads."""

from dataclasses import dataclass

import openmsa
import torch
import torch.nn.functional as F
from torch import Tensor

from .config import Attention, Config


@dataclass(frozen=True)
class Heads:
    """One layer's attention inputs, packed: sequences of one length behind one another."""

    q: Tensor  # [tokens, query_heads, head_dim]
    k: Tensor  # [tokens, kv_heads, head_dim]
    v: Tensor  # [tokens, kv_heads, head_dim]
    index_q: Tensor  # [tokens, index_heads, index_dim]
    index_k: Tensor  # [tokens, 1, index_dim]
    batch: int  # sequences

    @property
    def length(self) -> int:
        return self.q.shape[0] // self.batch

    def offsets(self) -> Tensor:
        return torch.arange(0, self.batch + 1, dtype=torch.int32, device=self.q.device) * self.length


def window_indices(heads: Heads, config: Config) -> Tensor:
    """The nearest blocks: [index_heads, tokens, topk] int32, -1 where there is none."""
    device = heads.q.device
    own = torch.arange(heads.length, dtype=torch.int32, device=device) // config.block
    nearest = own[:, None] - torch.arange(config.topk, dtype=torch.int32, device=device)
    return nearest.clamp(min=-1).repeat(heads.batch, 1).expand(config.index_heads, -1, -1)


def random_indices(heads: Heads, config: Config, generator: torch.Generator) -> Tensor:
    """The own block and random earlier ones: [index_heads, tokens, topk] int32, -1 where there is none."""
    own = torch.arange(heads.length).repeat(heads.batch) // config.block
    blocks = torch.arange(-(-heads.length // config.block))
    order = torch.rand(config.index_heads, len(own), len(blocks), generator=generator)
    order = order.masked_fill(blocks == own[:, None], 2.0).masked_fill(blocks > own[:, None], -1.0)
    best = order.topk(min(config.topk, len(blocks)), dim=-1)
    return best.indices.masked_fill(best.values < 0, -1).to(heads.q.device, torch.int32)


def attend(
    heads: Heads, attention: Attention, config: Config, kl_out: Tensor, generator: torch.Generator
) -> tuple[Tensor, Tensor | None]:
    """-> attention's output [tokens, query_heads, head_dim], and the KL term of the loss, None where none is to learn.

    Where the index branch trains, the backward pass writes the KL itself into `kl_out`.
    """
    if attention is Attention.DENSE:
        q, k, v = (x.unflatten(0, (heads.batch, heads.length)).transpose(1, 2) for x in (heads.q, heads.k, heads.v))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return out.transpose(1, 2).flatten(0, 1), None
    offsets = heads.offsets()
    if attention.trains_index:
        training = torch.is_grad_enabled()
        result = openmsa.msa_attention(
            heads.q,
            heads.k,
            heads.v,
            heads.index_q,
            heads.index_k,
            topk=config.topk,
            block_size=config.block,
            cu_seqlens_q=offsets,
            cu_seqlens_k=offsets,
            kl="backward" if training else "off",
            kl_out=kl_out if training else None,
            warmup=attention is Attention.WARMUP,
            deterministic=True,
        )
        return result.out, result.kl
    if attention is Attention.WINDOW:
        indices = window_indices(heads, config)
    else:
        indices = random_indices(heads, config, generator)
    out = openmsa.sparse_attention(
        heads.q, heads.k, heads.v, indices, block_size=config.block, cu_seqlens_q=offsets, cu_seqlens_k=offsets
    )
    return out, None
