"""The results as a table, as files, and as a verdict."""

import dataclasses
import itertools
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors.torch
from torch import Tensor

from .checkpoint import write_whole
from .config import CONTROL, Attention, Config, Settings, Stage
from .evaluate import IndexQuality, Quality
from .generate import Continuation
from .machine import facts
from .model import ByteModel
from .progress import Row, clock


@dataclass(frozen=True)
class Results:
    quality: dict[str, Quality]  # by the way of attending; the control is a model of its own
    trained: list[IndexQuality]  # by layer
    untrained: list[IndexQuality]  # the same layers with the index branch that training started from
    continuation: Continuation
    rows: list[Row]
    speeds: dict[str, float]  # tokens/s by stage
    evaluation_seconds: float
    seconds: float


@dataclass(frozen=True)
class Bars:
    """What a model that learned shows."""

    control_recall: float = 0.95
    sparse_recall: float = 0.03  # below the control's
    window_recall: float = 0.05
    sparse_bits: float = 1.01  # of the control's
    sparse_late_bits: float = 1.02
    window_bits: float = 1.02
    mass: float = 0.6  # normalised captured mass, in every layer
    kl: float = 0.25  # of a uniform student's, in every layer
    kl_sum: float = 0.2


SHORT_BARS = Bars(mass=0.5, kl=0.3, kl_sum=0.25)
SHORTEST = 0.5  # scale from which on a run has time to learn


def bars(scale: float) -> Bars | None:
    """For runs of that scale; None where nothing is known of what one so short should show."""
    if scale >= 1:
        return Bars()
    return SHORT_BARS if scale >= SHORTEST else None


def stage_speeds(stages: list[Stage], rows: list[Row]) -> dict[str, float]:
    speeds: dict[str, float] = {}
    for stage in stages:
        seconds, before = 0.0, 0
        for row in (row for row in rows if row.stage == stage.name):
            seconds += (row.step - before) * stage.tokens / row.tokens_per_second
            before = row.step
        speeds[stage.name] = before * stage.tokens / max(seconds, 1e-9)
    return speeds


def kl_ratio(layers: list[IndexQuality]) -> float:
    return sum(layer.kl for layer in layers) / sum(layer.kl_uniform for layer in layers)


def table(results: Results, config: Config) -> str:
    bins = len(results.quality[CONTROL].bits_by_position)
    edges = [config.context * part // bins for part in range(bins + 1)]
    lines = [f"{'held-out text':<16}{'bits/byte':>10}{'late half':>11}{'planted recall':>16}"]
    for name, quality in results.quality.items():
        lines.append(f"{name:<16}{quality.bits:>10.4f}{quality.late_bits:>11.4f}{quality.recall:>16.1%}")
    lines.append("  (one sparse-trained model, three selections; the control continued densely from the same warm-up)")
    lines.append("")
    lines.append(f"{'bits by position':<16}" + "".join(f"{f'{a}-{b - 1}':>11}" for a, b in itertools.pairwise(edges)))
    for name, quality in results.quality.items():
        lines.append(f"{name:<16}" + "".join(f"{bits:>11.3f}" for bits in quality.bits_by_position))
    lines.append("")
    lines.append(_header("captured mass", "sparse", "random", "best", "normalised", "untrained"))
    for number, (index, before) in enumerate(zip(results.trained, results.untrained, strict=True)):
        masses = index.masses
        shares = "".join(f"{share:>12.1%}" for share in (masses.captured, masses.random, masses.best))
        lines.append(f"layer {number:<10}{shares}{masses.normalised:>12.2f}{before.masses.normalised:>12.2f}")
    lines.append(_header("KL", "sparse", "uniform", "ratio", "untrained"))
    for number, (index, before) in enumerate(zip(results.trained, results.untrained, strict=True)):
        values = f"{index.kl:>12.4f}{index.kl_uniform:>12.4f}{index.ratio:>12.2f}"
        lines.append(f"layer {number:<10}{values}{before.ratio:>12.2f}")
    lines.append(f"{'all':<40}{kl_ratio(results.trained):>12.2f}{kl_ratio(results.untrained):>12.2f}")
    lines += [
        "  (late half of the context. Mass: share of dense attention's probability in the blocks; normalised, 0 is",
        "   that of random blocks and 1 the best. KL: beside that of a student that weighs all selected tokens alike.",
        "   Untrained: the same model with the index branch that training started from)",
    ]
    lines.append("")
    lines.append("tokens/s: " + ", ".join(f"{stage} {speed:,.0f}" for stage, speed in results.speeds.items()))
    lines.append(f"{clock(results.seconds)} minutes in all")
    lines.append("")
    lines += _continuation(results.continuation)
    return "\n".join(lines)


def _header(*names: str) -> str:
    return f"{names[0]:<16}" + "".join(f"{name:>12}" for name in names[1:])


def _continuation(result: Continuation) -> list[str]:
    shown = result.generated.decode("latin-1").encode("unicode_escape").decode()
    before = result.prompt_end.decode("latin-1").encode("unicode_escape").decode()
    same = "the same greedy bytes" if result.same_bytes else "OTHER greedy bytes"
    recalled = f"{result.recalled} of the repeat's other {len(result.expected)} bytes"
    return [
        f"continued through paged keys after {result.prompt_length} held-out bytes, from within a planted repeat:",
        f"  ...{before}",
        f"  -> {shown}",
        f"  {recalled}, {result.distance} bytes after the first occurrence",
        f"  beside one forward pass over all of it: logits within {result.max_difference:.1e}, {same}",
    ]


def failures(results: Results, required: Bars) -> list[str]:
    """What a model that learned would show and this one does not."""
    control, sparse, window = (
        results.quality[name] for name in (CONTROL, Attention.SPARSE.value, Attention.WINDOW.value)
    )
    missed: list[str] = []

    def at_least(what: str, value: float, bar: float) -> None:
        if not value >= bar:  # NaN misses
            missed.append(f"{what} is {value:.4g}, expected at least {bar:.4g}")

    def at_most(what: str, value: float, bar: float) -> None:
        if not value <= bar:
            missed.append(f"{what} is {value:.4g}, expected at most {bar:.4g}")

    at_least("recall of the dense control", control.recall, required.control_recall)
    at_least("sparse recall", sparse.recall, control.recall - required.sparse_recall)
    at_most("window-only recall", window.recall, required.window_recall)
    at_most("sparse bits per byte over the control's", sparse.bits / control.bits, required.sparse_bits)
    at_most("the same in the late half", sparse.late_bits / control.late_bits, required.sparse_late_bits)
    at_least("window-only bits per byte over the control's", window.bits / control.bits, required.window_bits)
    for number, index in enumerate(results.trained):
        at_least(f"layer {number}: normalised captured mass", index.masses.normalised, required.mass)
        at_most(f"layer {number}: KL over a uniform student's", index.ratio, required.kl)
    at_most("KL over a uniform student's, all layers", kl_ratio(results.trained), required.kl_sum)
    paged = results.continuation
    if not paged.equal:
        bytes_said = "the same bytes" if paged.same_bytes else "other bytes"
        missed.append(f"paged generation is {paged.max_difference:.2g} from one pass, with {bytes_said}")
    return missed


def summary(results: Results, settings: Settings, config: Config) -> dict[str, Any]:
    def index(layers: list[IndexQuality]) -> list[dict[str, Any]]:
        return [
            {**dataclasses.asdict(layer), "normalised": layer.masses.normalised, "kl_ratio": layer.ratio}
            for layer in layers
        ]

    def text(value: Any) -> Any:
        return value.decode("latin-1") if isinstance(value, bytes) else value

    required = bars(settings.scale)
    return {
        "settings": dataclasses.asdict(settings),
        "config": dataclasses.asdict(config),
        "machine": facts(),
        "quality": {name: dataclasses.asdict(quality) for name, quality in results.quality.items()},
        "index": index(results.trained),
        "index_untrained": index(results.untrained),
        "kl_ratio": kl_ratio(results.trained),
        "tokens_per_second": {stage: round(speed) for stage, speed in results.speeds.items()},
        "seconds": round(results.seconds, 1),
        "evaluation_seconds": round(results.evaluation_seconds, 1),
        "continuation": {name: text(value) for name, value in dataclasses.asdict(results.continuation).items()},
        "missed": None if required is None else failures(results, required),
    }


def save(results: Results, settings: Settings, config: Config, out: Path) -> Path:
    path = out / "results.json"
    write_whole(path, (json.dumps(summary(results, settings, config), indent=2) + "\n").encode())
    return path


def save_model(model: ByteModel, path: Path) -> Path:
    weights: dict[str, Tensor] = {name: value.cpu().contiguous() for name, value in model.state_dict().items()}
    # One entry: several would be written in an order of chance.
    metadata = {"config": json.dumps(dataclasses.asdict(model.config))}
    write_whole(path, safetensors.torch.save(weights, metadata))
    return path
