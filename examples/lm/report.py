"""The results as a table, as files, and as a verdict."""

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path

from .config import Attention, Config
from .evaluate import IndexQuality, Quality
from .progress import Row, clock

CONTROL = "dense control"


@dataclass(frozen=True)
class Results:
    quality: dict[str, Quality]  # by the way of attending; the control is a model of its own
    untrained: list[IndexQuality]  # by layer, before training
    trained: list[IndexQuality]
    rows: list[Row]
    seconds: float


def table(results: Results) -> str:
    lines = [f"{'held-out text':<26}{'bits/byte':>10}{'late half':>11}{'planted recall':>16}"]
    for name, quality in results.quality.items():
        lines.append(f"{name:<26}{quality.bits:>10.4f}{quality.late_bits:>11.4f}{quality.recall:>16.1%}")
    lines.append("  (one sparse-trained model, three selections; the control continued densely from the same warm-up)")
    lines.append("")
    header = ("layer", "captured", "random", "best", "normalised", "KL", "uniform", "ratio", "untrained")
    lines.append(f"{header[0]:<8}" + "".join(f"{name:>12}" for name in header[1:]))
    for layer, (index, before) in enumerate(zip(results.trained, results.untrained, strict=True)):
        masses = index.masses
        shares = f"{masses.captured:>12.1%}{masses.random:>12.1%}{masses.best:>12.1%}{masses.normalised:>12.2f}"
        kls = f"{index.kl:>12.4f}{index.kl_uniform:>12.4f}{index.kl / index.kl_uniform:>12.2f}"
        lines.append(f"{layer:<8}{shares}{kls}{before.kl / before.kl_uniform:>12.2f}")
    lines.append(
        "  (share of dense attention inside the selected, random and best blocks, and KL beside that of a student"
    )
    lines.append("   that weighs all selected tokens alike; late half of the context; 'untrained': the ratio before)")
    lines.append("")
    lines.append(f"{clock(results.seconds)} minutes in all")
    return "\n".join(lines)


def failures(results: Results) -> list[str]:
    """What a model that learned would show and this one does not."""
    recall = {name: quality.recall for name, quality in results.quality.items()}
    sparse, window, random = (recall[way.value] for way in (Attention.SPARSE, Attention.WINDOW, Attention.RANDOM))
    checks = {
        f"recall of the dense control {recall[CONTROL]:.1%} is not above 80 %": recall[CONTROL] > 0.8,
        f"sparse recall {sparse:.1%} is not within 5 points of the control's": sparse > recall[CONTROL] - 0.05,
        f"window-only recall {window:.1%} is not below half of the control's": window < recall[CONTROL] / 2,
        f"random blocks' recall {random:.1%} is not below the sparse one's": random < sparse,
    }
    control_bits, sparse_bits = results.quality[CONTROL].bits, results.quality[Attention.SPARSE.value].bits
    checks[f"sparse bits per byte {sparse_bits:.4f} exceed the control's {control_bits:.4f} by over 3 %"] = (
        sparse_bits < 1.03 * control_bits
    )
    for layer, index in enumerate(results.trained):
        ratio, normalised = index.kl / index.kl_uniform, index.masses.normalised
        checks[f"layer {layer}: KL is {ratio:.2f} of a uniform student's, not below 0.5"] = ratio < 0.5
        checks[f"layer {layer}: normalised captured mass {normalised:.2f} is not above 0.4"] = normalised > 0.4
    return [message for message, passed in checks.items() if not passed]


def save(results: Results, config: Config, out: Path) -> list[Path]:
    """Writes results.json and, with matplotlib, report.png -> the files in `out`, metrics.csv among them."""
    files = [out / "metrics.csv", out / "results.json"]
    summary = {
        "config": dataclasses.asdict(config),
        "quality": {name: dataclasses.asdict(quality) for name, quality in results.quality.items()},
        "index": [dataclasses.asdict(index) for index in results.trained],
        "index_untrained": [dataclasses.asdict(index) for index in results.untrained],
        "seconds": round(results.seconds, 1),
    }
    files[1].write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
    try:
        import matplotlib
    except ImportError:
        return files
    matplotlib.use("Agg")
    files.append(out / "report.png")
    _plot(results, files[-1])
    return files


def _plot(results: Results, path: Path) -> None:
    import matplotlib.pyplot as plt

    figure, (loss, recall, index) = plt.subplots(1, 3, figsize=(15, 4), layout="constrained")
    start = 0
    for stage in dict.fromkeys(row.stage for row in results.rows):
        rows = [row for row in results.rows if row.stage == stage]
        offset = (
            start - rows[-1].steps if stage == "control" else start
        )  # beside the sparse stage that it stands in for
        steps = [offset + row.step for row in rows]
        loss.plot(steps, [row.bits for row in rows], label=stage)
        recall.plot(steps, [row.recall for row in rows], label=stage)
        for layer in range(len(rows[0].kl)):
            kl, captured = [row.kl[layer] for row in rows], [row.captured[layer] for row in rows]
            index.plot(steps, kl, color=f"C{layer}", label=f"KL, layer {layer}" if stage == "warm-up" else None)
            label = f"captured mass, layer {layer}" if stage == "warm-up" else None
            index.plot(steps, captured, "--", color=f"C{layer}", label=label)
        start = offset + rows[-1].steps
    for axes, title in (
        (loss, "bits per byte"),
        (recall, "recall of planted repeats"),
        (index, "index branch: warm-up, then sparse"),
    ):
        axes.set(title=title, xlabel="step", ylim=(0, None))
        axes.legend(fontsize="small")
        axes.grid(alpha=0.3)
    figure.savefig(path, dpi=120)
    plt.close(figure)
