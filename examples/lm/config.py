"""Sizes and schedule of the example, in one place."""

from dataclasses import dataclass, replace
from enum import Enum


class Attention(Enum):
    """How a layer attends. All but DENSE run openmsa."""

    DENSE = "dense"  # torch's dense attention, index branch idle: the short first stage and the control
    WARMUP = "warm-up"  # dense, while the index branch learns over the whole prefix
    SPARSE = "sparse"  # the blocks that the index branch selects
    WINDOW = "window only"  # the nearest blocks
    RANDOM = "random blocks"  # the own block and random earlier ones


@dataclass(frozen=True)
class Planting:
    """Recall to learn: random strings that return."""

    share: float  # of a window's bytes, asked to belong to a string or its repeat
    gap: int  # a repeat begins more than this many bytes after the first occurrence began
    string: int  # bytes of a string, and of the slot it stands in

    def without(self) -> "Planting":
        return replace(self, share=0.0)


@dataclass(frozen=True)
class Config:
    layers: int = 2
    width: int = 128
    query_heads: int = 4
    kv_heads: int = 2
    index_heads: int = 2
    head_dim: int = 32
    index_dim: int = 32
    rotary_dim: int = 8

    block: int = 32
    topk: int = 4
    context: int = 512

    seed: int = 0
    rate: float = 3e-3
    index_rate: float = 2e-2

    @property
    def planting(self) -> Planting:
        """Repeats come out of a window's reach."""
        return Planting(share=0.4, gap=self.block * self.topk, string=16)


@dataclass(frozen=True)
class Stage:
    """Training steps of one kind. The factor on every learning rate goes linearly from rate[0] to rate[1]."""

    name: str
    attention: Attention
    steps: int
    batch: int
    context: int
    planting: Planting
    rate: tuple[float, float]
    rise: int = 0  # first steps, over which the rates rise from 0

    @property
    def tokens(self) -> int:
        return self.batch * self.context


def schedule(config: Config, scale: float) -> list[Stage]:
    """Dense on short contexts, dense with the index branch learning, sparse, and the sparse stage's dense control."""

    def stage(name: str, attention: Attention, steps: int, rate: tuple[float, float]) -> Stage:
        batch = max(1, 512 // config.context)
        return Stage(name, attention, max(1, round(steps * scale)), batch, config.context, config.planting, rate)

    short = min(config.context, 256)
    return [
        replace(
            stage("short contexts", Attention.DENSE, 120, (1.0, 1.0)),
            batch=16,
            context=short,
            planting=Planting(share=0.5, gap=short // 4, string=16),
            rise=30,
        ),
        stage("warm-up", Attention.WARMUP, 240, (1.0, 0.7)),
        stage("sparse", Attention.SPARSE, 240, (0.7, 0.03)),
        stage("control", Attention.DENSE, 240, (0.7, 0.03)),
    ]
