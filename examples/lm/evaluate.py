"""What was learned, measured on held-out text."""

import math
from dataclasses import dataclass
from statistics import fmean

import openmsa
import torch
import torch.nn.functional as F
from torch import Tensor

from .attention import Heads, random_indices
from .config import Attention, Config
from .data import draw_batch
from .model import ByteModel, Layer

BITS = 1 / math.log(2)  # in a nat
SEED = 11  # of the held-out windows: every model and selection sees the same ones
BINS = 8  # of positions in the context
BATCH = 4  # windows at once


@dataclass(frozen=True)
class Quality:
    bits: float  # per held-out byte, without planted strings
    late_bits: float  # of the late half of the context
    bits_by_position: list[float]  # of BINS equal parts of the context
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

    @property
    def ratio(self) -> float:
        return self.kl / self.kl_uniform


class LateHalf:
    """One sequence's late queries with all its keys."""

    def __init__(self, heads: Heads) -> None:
        length, half, device = heads.length, heads.length // 2, heads.q.device
        self.q, self.k, self.v = heads.q[half:], heads.k, heads.v
        self.index_q, self.index_k = heads.index_q[half:], heads.index_k
        self.offsets_q = torch.tensor([0, length - half], dtype=torch.int32, device=device)
        self.offsets_k = torch.tensor([0, length], dtype=torch.int32, device=device)

    def masses(self, indices: Tensor, block: int) -> tuple[float, float]:
        """-> captured, best."""
        captured, best = openmsa.captured_mass(
            self.q, self.k, indices, block_size=block, cu_seqlens_q=self.offsets_q, cu_seqlens_k=self.offsets_k
        )
        return float(captured.mean()), float(best.mean())


@torch.no_grad()
def layer_masses(heads: Heads, config: Config, indices: Tensor | None = None) -> Masses:
    """`heads` of one sequence; `indices` of its late queries, selected here unless given."""
    late = LateHalf(heads)
    if indices is None:
        indices = openmsa.select_blocks(
            late.index_q,
            late.index_k,
            topk=config.topk,
            block_size=config.block,
            cu_seqlens_q=late.offsets_q,
            cu_seqlens_k=late.offsets_k,
        )
    captured, best = late.masses(indices, config.block)
    guess = random_indices(heads, config, torch.Generator().manual_seed(SEED))[:, heads.length // 2 :]
    random, _ = late.masses(guess, config.block)
    return Masses(captured, random, best)


def uniform_kl(heads: Heads, indices: Tensor, config: Config) -> float:
    """KL of a student that knows nothing, over late queries' selected tokens: log(tokens) - the teacher's entropy."""
    half, length = heads.length // 2, heads.length
    keys = torch.arange(length, device=heads.q.device)
    chosen = (indices[..., None] == keys // config.block).any(dim=-2) & (keys <= keys[half:, None])
    k = heads.k.float().repeat_interleave(config.query_heads // config.kv_heads, dim=1)
    scores = torch.einsum("qhd,khd->hqk", heads.q[half:].float(), k) * config.head_dim**-0.5
    per_index_head = scores.unflatten(0, (config.index_heads, -1))
    teacher = per_index_head.masked_fill(~chosen[:, None], -math.inf).softmax(dim=-1).mean(dim=1)
    entropy = -torch.xlogy(teacher, teacher).sum(dim=-1)
    return float((chosen.sum(dim=-1).log() - entropy).mean())


def layer_index(layer: Layer, x: Tensor, config: Config) -> IndexQuality:
    """The index branch of a layer whose input is x [1, length, width]."""
    heads = layer.heads(layer.normed(x))
    late = LateHalf(heads)
    result = openmsa.msa_attention(
        late.q,
        late.k,
        late.v,
        late.index_q,
        late.index_k,
        topk=config.topk,
        block_size=config.block,
        cu_seqlens_q=late.offsets_q,
        cu_seqlens_k=late.offsets_k,
        kl="forward",
    )
    masses = layer_masses(heads, config, result.indices)
    return IndexQuality(masses, float(result.kl), uniform_kl(heads, result.indices, config))


@torch.no_grad()
def index_quality(
    model: ByteModel, text: Tensor, windows: int, untrained: ByteModel
) -> list[tuple[IndexQuality, IndexQuality]]:
    """(trained, untrained) of each layer: captured mass and KL in windows with planted recall, late half.

    Both see the same layer inputs and main branch: those of `model`. The second has the index branch of `untrained`.
    """
    config = model.config
    generator = torch.Generator().manual_seed(SEED)
    models = (model, model.with_index_of(untrained))
    found: list[list[list[IndexQuality]]] = [[[] for _ in models] for _ in model.layers]
    for _ in range(windows):
        batch = draw_batch(text, generator, 1, config.context, config.planting)
        probe: list[Tensor] = []
        model(batch.inputs.to(model.device), Attention.SPARSE, probe=probe)
        for number, x in enumerate(probe):
            for which, of in enumerate(models):
                layer = of.layers[number]
                assert isinstance(layer, Layer)
                found[number][which].append(layer_index(layer, x, config))
    return [(_mean(trained), _mean(before)) for trained, before in found]


def _mean(entries: list[IndexQuality]) -> IndexQuality:
    masses = Masses(
        fmean(entry.masses.captured for entry in entries),
        fmean(entry.masses.random for entry in entries),
        fmean(entry.masses.best for entry in entries),
    )
    return IndexQuality(masses, fmean(entry.kl for entry in entries), fmean(entry.kl_uniform for entry in entries))


@torch.no_grad()
def quality(model: ByteModel, text: Tensor, attention: Attention, windows: int) -> Quality:
    """`windows` windows with planted strings for recall, and as many plain ones for bits per byte."""
    config = model.config
    generator = torch.Generator().manual_seed(SEED)
    random = torch.Generator().manual_seed(SEED)
    bits: list[Tensor] = []
    right = graded = 0
    for start in range(0, windows, BATCH):
        number = min(BATCH, windows - start)
        planted = draw_batch(text, generator, number, config.context, config.planting).to(model.device)
        hits = model(planted.inputs, attention, random)[0].argmax(-1) == planted.targets
        right += int((hits & planted.graded).sum())
        graded += int(planted.graded.sum())
        plain = draw_batch(text, generator, number, config.context, config.planting.without()).to(model.device)
        logits, _ = model(plain.inputs, attention, random)
        losses = F.cross_entropy(logits.flatten(0, 1), plain.targets.flatten(), reduction="none")
        bits.append(losses.double().view_as(plain.targets) * BITS)
    by_position = torch.cat(bits).mean(dim=0)
    parts = [float(part.mean()) for part in by_position.tensor_split(BINS)]
    late = float(by_position[config.context // 2 :].mean())
    return Quality(float(by_position.mean()), late, parts, right / max(graded, 1))
