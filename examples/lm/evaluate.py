"""What was learned, measured on held-out text."""

import math
from dataclasses import dataclass

import openmsa
import torch
import torch.nn.functional as F
from torch import Tensor

from .config import Attention, Config
from .data import draw_batch
from .model import ByteModel, Heads, random_indices

BITS = 1 / math.log(2)  # in a nat
SEED = 11  # of the held-out windows: every model and selection sees the same ones


@dataclass(frozen=True)
class Quality:
    bits: float  # per held-out byte, without planted strings
    late_bits: float  # of the late half of the context
    recall: float  # of planted repeats, byte by byte


@dataclass(frozen=True)
class Masses:
    """Shares of dense attention's probability inside as many blocks, in the late half of the context."""

    captured: float
    random: float
    best: float

    @property
    def normalised(self) -> float:
        """0: as random blocks, 1: as the best blocks."""
        return (self.captured - self.random) / max(self.best - self.random, 1e-9)


@dataclass(frozen=True)
class IndexQuality:
    masses: Masses
    kl: float  # of the student to the teacher, over the selected tokens
    kl_uniform: float  # of a uniform student, over the same tokens


def late_half(heads: Heads) -> tuple[Heads, Tensor, Tensor]:
    """One sequence's late queries with all its keys -> heads, cu_seqlens_q, cu_seqlens_k."""
    length, half = heads.length, heads.length // 2
    late = Heads(heads.q[half:], heads.k, heads.v, heads.index_q[half:], heads.index_k, 1)
    offsets_q = torch.tensor([0, length - half], dtype=torch.int32)
    return late, offsets_q, torch.tensor([0, length], dtype=torch.int32)


@torch.no_grad()
def layer_masses(heads: Heads, config: Config, indices: Tensor | None = None) -> Masses:
    """`heads` of one sequence; `indices` of its late queries, selected here unless given."""
    late, offsets_q, offsets_k = late_half(heads)
    block = config.block
    if indices is None:
        indices = openmsa.select_blocks(
            late.index_q,
            late.index_k,
            topk=config.topk,
            block_size=block,
            cu_seqlens_q=offsets_q,
            cu_seqlens_k=offsets_k,
        )
    guess = random_indices(heads, config, torch.Generator().manual_seed(SEED))[:, heads.length // 2 :]
    captured, best = openmsa.captured_mass(
        late.q, late.k, indices, block_size=block, cu_seqlens_q=offsets_q, cu_seqlens_k=offsets_k
    )
    random, _ = openmsa.captured_mass(
        late.q, late.k, guess, block_size=block, cu_seqlens_q=offsets_q, cu_seqlens_k=offsets_k
    )
    return Masses(float(captured.mean()), float(random.mean()), float(best.mean()))


def uniform_kl(heads: Heads, indices: Tensor, config: Config) -> float:
    """KL of a student that knows nothing, over late queries' selected tokens: log(tokens) - the teacher's entropy."""
    half, length = heads.length // 2, heads.length
    keys = torch.arange(length)
    position = torch.arange(half, length)
    chosen = (indices[..., None] == keys // config.block).any(dim=-2) & (keys <= position[:, None])
    groups = config.query_heads // config.kv_heads
    k = heads.k.repeat_interleave(groups, dim=1)
    scores = torch.einsum("qhd,khd->hqk", heads.q[half:], k) * config.head_dim**-0.5
    per_index_head = scores.unflatten(0, (config.index_heads, -1))
    teacher = per_index_head.masked_fill(~chosen[:, None], -math.inf).softmax(dim=-1).mean(dim=1)
    entropy = -torch.xlogy(teacher, teacher).sum(dim=-1)
    return float((chosen.sum(dim=-1).log() - entropy).mean())


@torch.no_grad()
def index_quality(model: ByteModel, text: Tensor, windows: int) -> list[IndexQuality]:
    """One entry a layer: captured mass and KL in windows with planted recall, late half of the context."""
    config = model.config
    generator = torch.Generator().manual_seed(SEED)
    found: list[list[IndexQuality]] = [[] for _ in model.layers]
    for _ in range(windows):
        batch = draw_batch(text, generator, 1, config.context, config.planting)
        probe: list[Heads] = []
        model(batch.inputs, Attention.SPARSE, probe)
        for layer, heads in enumerate(probe):
            late, offsets_q, offsets_k = late_half(heads)
            result = openmsa.msa_attention(
                late.q,
                late.k,
                late.v,
                late.index_q,
                late.index_k,
                topk=config.topk,
                block_size=config.block,
                cu_seqlens_q=offsets_q,
                cu_seqlens_k=offsets_k,
                kl="forward",
            )
            masses = layer_masses(heads, config, result.indices)
            found[layer].append(IndexQuality(masses, float(result.kl), uniform_kl(heads, result.indices, config)))
    return [_mean(entries) for entries in found]


def _mean(entries: list[IndexQuality]) -> IndexQuality:
    def mean(values: list[float]) -> float:
        return sum(values) / len(values)

    masses = Masses(
        mean([entry.masses.captured for entry in entries]),
        mean([entry.masses.random for entry in entries]),
        mean([entry.masses.best for entry in entries]),
    )
    return IndexQuality(masses, mean([entry.kl for entry in entries]), mean([entry.kl_uniform for entry in entries]))


@torch.no_grad()
def quality(model: ByteModel, text: Tensor, attention: Attention, windows: int) -> Quality:
    """`windows` windows with planted strings for recall, and as many plain ones for bits per byte."""
    config = model.config
    generator = torch.Generator().manual_seed(SEED)

    planted = draw_batch(text, generator, windows, config.context, config.planting)
    right = model(planted.inputs, attention)[0].argmax(-1) == planted.targets
    plain = draw_batch(text, generator, windows, config.context, config.planting.without())
    logits, _ = model(plain.inputs, attention)
    bits = BITS * F.cross_entropy(logits.flatten(0, 1), plain.targets.flatten(), reduction="none").view_as(
        plain.targets
    )
    late = bits[:, config.context // 2 :]
    return Quality(float(bits.mean()), float(late.mean()), float(right[planted.graded].float().mean()))
