"""The model: a decoder over bytes whose attention is openmsa's."""

from dataclasses import dataclass

import openmsa
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .config import Attention, Config

SHIFT = 3  # a query sees three bytes at once, so that one layer can match and copy
TAPS = SHIFT + 1


@dataclass(frozen=True)
class Heads:
    """One layer's attention inputs, packed: sequences of one length behind one another."""

    q: Tensor  # [tokens, query_heads, head_dim]
    k: Tensor  # [tokens, kv_heads, head_dim]
    v: Tensor  # [tokens, kv_heads, head_dim]
    index_q: Tensor  # [tokens, index_heads, index_dim]
    index_k: Tensor  # [tokens, 1, index_dim]
    batch: int

    @property
    def length(self) -> int:
        return self.q.shape[0] // self.batch

    def first(self) -> "Heads":
        """The first sequence alone, without gradients."""
        everything = (self.q, self.k, self.v, self.index_q, self.index_k)
        q, k, v, index_q, index_k = (x[: self.length].detach() for x in everything)
        return Heads(q, k, v, index_q, index_k, batch=1)

    def offsets(self) -> Tensor:
        return torch.arange(0, self.batch + 1, dtype=torch.int32) * self.length


def window_indices(heads: Heads, config: Config) -> Tensor:
    """The nearest blocks: [index_heads, tokens, topk] int32, -1 where there is none."""
    own = torch.arange(heads.length, dtype=torch.int32) // config.block
    nearest = own[:, None] - torch.arange(config.topk, dtype=torch.int32)
    return nearest.clamp(min=-1).repeat(heads.batch, 1).expand(config.index_heads, -1, -1)


def random_indices(heads: Heads, config: Config, generator: torch.Generator) -> Tensor:
    """The own block and random earlier ones: [index_heads, tokens, topk] int32, -1 where there is none."""
    own = torch.arange(heads.length).repeat(heads.batch) // config.block
    blocks = torch.arange(-(-heads.length // config.block))
    order = torch.rand(config.index_heads, len(own), len(blocks), generator=generator)
    order = order.masked_fill(blocks == own[:, None], 2.0).masked_fill(blocks > own[:, None], -1.0)
    best = order.topk(min(config.topk, len(blocks)), dim=-1)
    return best.indices.masked_fill(best.values < 0, -1).to(torch.int32)


def attend(
    heads: Heads, attention: Attention, config: Config, kl_out: Tensor, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """-> attention's output [tokens, query_heads, head_dim], and the KL term of the loss (0 where none is to learn)."""
    nothing = heads.q.new_zeros(())
    if attention is Attention.DENSE:
        q, k, v = (x.unflatten(0, (heads.batch, heads.length)).transpose(1, 2) for x in (heads.q, heads.k, heads.v))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return out.transpose(1, 2).flatten(0, 1), nothing
    offsets = heads.offsets()
    if attention in (Attention.WARMUP, Attention.SPARSE):
        # The backward pass writes the KL into kl_out at next to no cost; the KL that is returned carries its gradient.
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
        )
        return result.out, nothing if result.kl is None else result.kl
    if attention is Attention.WINDOW:
        indices = window_indices(heads, config)
    else:
        indices = random_indices(heads, config, generator)
    out = openmsa.sparse_attention(
        heads.q, heads.k, heads.v, indices, block_size=config.block, cu_seqlens_q=offsets, cu_seqlens_k=offsets
    )
    return out, nothing


def norm(x: Tensor, gain: Tensor) -> Tensor:
    return F.rms_norm(x, (x.shape[-1],)) * gain


def rotate(x: Tensor, dims: int, base: float = 10000.0) -> Tensor:
    """Rotary embedding of the first `dims` channels; x [batch, length, heads, channels]."""
    angles = torch.arange(x.shape[1])[:, None, None] * base ** (-torch.arange(0, dims, 2) / dims)
    cos, sin = angles.cos(), angles.sin()
    first, second, rest = x.split([dims // 2, dims // 2, x.shape[-1] - dims], dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin, rest), dim=-1)


def matrix(rows: int, columns: int, gain: float = 1.0) -> nn.Parameter:
    return nn.Parameter(torch.randn(rows, columns) * gain * columns**-0.5)


class Layer(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        c, width = config, config.width
        # Token shift: channel c of a query starts at the byte c % 3 before its own, of a key one byte earlier still.
        # One product then compares three bytes with the three before a key's byte, which is what copying needs.
        taps, channel = torch.zeros(2, TAPS, width), torch.arange(width)
        taps[0, channel % SHIFT, channel] = 1.0
        taps[1, channel % SHIFT + 1, channel] = 1.0
        self.taps = nn.Parameter(taps)
        self.attention_norm, self.mlp_norm = nn.Parameter(torch.ones(width)), nn.Parameter(torch.ones(width))
        self.w_q, self.w_k = matrix(c.query_heads * c.head_dim, width), matrix(c.kv_heads * c.head_dim, width)
        self.w_v, self.w_o = matrix(c.kv_heads * c.head_dim, width), matrix(width, c.query_heads * c.head_dim, 0.5)
        # An aligned start: keys begin as copies of queries, so that copying forms in about 50 steps whatever the seed.
        per_group = self.w_q.data.view(c.kv_heads, -1, c.head_dim, width)
        self.w_k.data.copy_(per_group[:, 0].reshape(-1, width))
        self.q_gain, self.k_gain = (nn.Parameter(torch.full((c.head_dim,), 1.5)) for _ in range(2))
        self.w_up, self.w_down = matrix(4 * width, width), matrix(width, 4 * width, 0.3)
        self.index_q, self.index_k = matrix(c.index_heads * c.index_dim, width), matrix(c.index_dim, width)
        self.index_q_gain, self.index_k_gain = (nn.Parameter(torch.ones(c.index_dim)) for _ in range(2))

    def heads(self, x: Tensor) -> Heads:
        batch, length, _ = x.shape
        h = norm(x, self.attention_norm)
        padded = F.pad(h, (0, 0, SHIFT, 0))
        shifted = [padded[:, SHIFT - tap : SHIFT - tap + length] for tap in range(TAPS)]
        for_q, for_k = (sum(part * taps[tap] for tap, part in enumerate(shifted)) for taps in self.taps)
        # Only the KL trains the index branch, and it trains nothing else: its input is detached.
        index_q = self._project(for_q.detach(), self.index_q, self.config.index_dim, self.index_q_gain)
        index_k = self._project(for_k.detach(), self.index_k, self.config.index_dim, self.index_k_gain)
        q = self._project(for_q, self.w_q, self.config.head_dim, self.q_gain)
        k = self._project(for_k, self.w_k, self.config.head_dim, self.k_gain)
        v = F.linear(h, self.w_v).view(batch * length, self.config.kv_heads, -1)
        return Heads(q, k, v, index_q, index_k, batch)

    def _project(self, x: Tensor, weight: Tensor, dim: int, gain: Tensor) -> Tensor:
        heads = F.linear(x, weight).unflatten(-1, (-1, dim))
        return rotate(norm(heads, gain), self.config.rotary_dim).flatten(0, 1)

    def forward(
        self, x: Tensor, attention: Attention, kl_out: Tensor, generator: torch.Generator, probe: list[Heads] | None
    ) -> tuple[Tensor, Tensor]:
        heads = self.heads(x)
        if probe is not None:
            probe.append(heads)
        out, kl = attend(heads, attention, self.config, kl_out, generator)
        x = x + F.linear(out.reshape(*x.shape[:2], -1), self.w_o)
        return x + F.linear(F.relu(F.linear(norm(x, self.mlp_norm), self.w_up)).square(), self.w_down), kl


class ByteModel(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Parameter(torch.randn(256, config.width) * 0.7)
        self.head = nn.Parameter(torch.randn(256, config.width) * 0.02)
        self.final_norm = nn.Parameter(torch.ones(config.width))
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.layers))
        self.kl_outs = [torch.zeros(()) for _ in self.layers]
        self.generator = torch.Generator().manual_seed(config.seed)  # of random selections

    def forward(self, tokens: Tensor, attention: Attention, probe: list[Heads] | None = None) -> tuple[Tensor, Tensor]:
        """tokens [batch, length] -> logits [batch, length, 256], and the sum of the layers' KL terms.

        `probe` gets each layer's heads.
        """
        x = self.embedding[tokens]
        total = x.new_zeros(())
        for layer, kl_out in zip(self.layers, self.kl_outs, strict=True):
            x, kl = layer(x, attention, kl_out, self.generator, probe)
            total = total + kl
        return F.linear(norm(x, self.final_norm), self.head), total

    def kls(self) -> list[float]:
        """KL(teacher || student) of each layer in the last training step."""
        return [float(kl) for kl in self.kl_outs]

    def parameter_groups(self) -> tuple[list[nn.Parameter], list[nn.Parameter], list[nn.Parameter]]:
        """-> matrices (with weight decay), other main parameters, the index branch."""
        named = list(self.named_parameters())
        index = [p for name, p in named if ".index_" in name]
        matrices = [p for name, p in named if ".w_" in name]
        others = [p for name, p in named if ".w_" not in name and ".index_" not in name]
        return matrices, others, index
