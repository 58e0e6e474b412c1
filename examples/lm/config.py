"""Sizes and schedule of the example, in one place."""

from dataclasses import dataclass, fields, replace
from enum import Enum

STEP_TOKENS = 2048
SPARSE_MODEL, CONTROL = "sparse", "dense control"  # the two models: one state at the end of the warm-up


class Attention(Enum):
    """How a layer attends. All but DENSE run openmsa."""

    DENSE = "dense"  # torch's dense attention, index branch idle: the control
    WARMUP = "warm-up"  # dense, while the index branch learns over the whole prefix
    SPARSE = "sparse"  # the blocks that the index branch selects
    WINDOW = "window only"  # the nearest blocks
    RANDOM = "random blocks"  # the own block and random earlier ones

    @property
    def trains_index(self) -> bool:
        return self in (Attention.WARMUP, Attention.SPARSE)


@dataclass(frozen=True)
class Planting:
    """Recall to learn: random strings that return."""

    share: float  # of a window's bytes, asked to belong to a string or its repeat
    gap: int  # a repeat begins more than this many bytes after the first occurrence began
    string: int  # bytes of a string, and of the slot it stands in

    def without(self) -> "Planting":
        return replace(self, share=0.0)


@dataclass(frozen=True)
class Settings:
    """What makes a run the run it is: one that continues keeps them."""

    text: str | None = None  # None: Python's standard library
    scale: float = 1.0
    context: int = 2048
    block: int = 64
    topk: int = 4
    seed: int = 0

    def check_types(self) -> None:
        """Raises TypeError for a value, out of a file, of another type than its default."""
        for field in fields(self):
            kind = str | None if field.default is None else type(field.default)
            if not isinstance(getattr(self, field.name), kind):
                raise TypeError(f"{field.name} is a {type(getattr(self, field.name)).__name__}")


@dataclass(frozen=True)
class Config:
    context: int = 2048
    block: int = 64
    topk: int = 4
    seed: int = 0

    layers: int = 2
    width: int = 128
    # Head dimensions that every backend takes.
    query_heads: int = 4
    kv_heads: int = 2
    index_heads: int = 2
    head_dim: int = 64
    index_dim: int = 64
    rotary_dim: int = 8

    rate: float = 5e-3
    index_rate: float = 2e-2

    @property
    def planting(self) -> Planting:
        """Repeats come from twice as far as a window of topk blocks reaches."""
        return Planting(share=0.4, gap=2 * self.block * self.topk, string=32 if self.context >= 1024 else 16)


@dataclass(frozen=True)
class Stage:
    """Training steps of one kind. The factor on every learning rate goes linearly from rate[0] to rate[1]."""

    name: str
    model: str
    attention: Attention
    steps: int
    batch: int
    context: int
    planting: Planting
    rate: tuple[float, float]
    seed: int  # of the windows drawn; the control sees those of the sparse stage
    rise: int = 0  # first steps, over which the rates rise from 0

    @property
    def tokens(self) -> int:
        return self.batch * self.context


def schedule(config: Config, scale: float) -> list[Stage]:
    """Dense while the index branch learns, on short contexts and then on full ones; sparse; and its dense control."""

    def steps(number: int) -> int:
        return max(1, round(number * scale))

    full, few = config.context, min(config.context, 256)
    warmup = Stage(
        name="warm-up",
        model=SPARSE_MODEL,
        attention=Attention.WARMUP,
        steps=steps(150),
        batch=max(1, STEP_TOKENS // full),
        context=full,
        planting=config.planting,
        rate=(1.0, 0.7),
        seed=config.seed + 2,
    )
    short = replace(
        warmup,
        name="short contexts",
        batch=max(1, STEP_TOKENS // few),
        context=few,
        planting=Planting(share=0.5, gap=few // 4, string=24 if few == 256 else 16),
        rate=(1.0, 1.0),
        seed=config.seed + 1,
        rise=30,
    )
    # The fall of the rate brings the KL down: the teacher stands still.
    sparse = replace(
        warmup, name="sparse", attention=Attention.SPARSE, steps=steps(200), rate=(0.7, 0.03), seed=config.seed + 3
    )
    return [
        replace(short, steps=steps(300)),
        warmup,
        sparse,
        replace(sparse, name="control", model=CONTROL, attention=Attention.DENSE),
    ]
