#!/usr/bin/env python3
"""Draws the README's charts from the committed results; needs matplotlib."""

import csv
from pathlib import Path

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt

RESULTS = Path(__file__).resolve().parent / "results"
PICTURES = RESULTS.parents[1] / "docs" / "pictures"
COLORS = {"bf16": "#1f5fa8", "fp8index": "#c2571a", "fp32": "#7a8a99"}
plt.rcParams |= {"svg.hashsalt": "openmsa", "font.size": 10, "axes.spines.top": False, "axes.spines.right": False}


def rows(path: str, **wanted: str) -> list[dict[str, str]]:
    """The rows of a results file whose columns have the wanted values."""
    with (RESULTS / path).open(newline="", encoding="utf-8") as file:
        return [row for row in csv.DictReader(file) if all(row[name] == value for name, value in wanted.items())]


def length(n: str) -> str:
    return f"{int(n) >> 20}M" if int(n) >= 1 << 20 else f"{int(n) >> 10}K"


def save(figure: plt.Figure, name: str) -> None:
    figure.savefig(PICTURES / name, metadata={"Date": None}, facecolor="white")
    plt.close(figure)
    print(PICTURES / name)


def select_on_hopper() -> None:
    """Useful TFLOP/s of select by context, under the rate that the run's plain matrix product reached."""
    figure, axes = plt.subplots(figsize=(7.2, 3.8), layout="constrained")
    for dtype, name, above in (("fp8index", "fp8 e4m3", 8), ("bf16", "bf16", -15)):
        timed = rows("h200/stage_select.csv", selection="random", dtype=dtype)
        (product,) = rows("h200_context/stage_select.csv", quantity="product-start", dtype=dtype)
        rates = [float(row["useful_tflops"]) for row in timed]
        axes.plot([length(row["n"]) for row in timed], rates, marker="o", color=COLORS[dtype], label=f"select, {name}")
        axes.axhline(float(product["value"]), color=COLORS[dtype], linestyle=":", label=f"matrix product, {name}")
        for place, rate in enumerate(rates):
            axes.annotate(
                f"{rate:.0f}", (place, rate), (0, above), textcoords="offset points", ha="center", fontsize=8.5
            )
    axes.set(ylim=(0, 1500), xlabel="tokens of context", ylabel="useful TFLOP/s")
    axes.set_title(f"index scores and exact top-16 on one {timed[0]['gpu']}", fontsize=10.5)
    axes.legend(frameon=False, ncols=2, fontsize=8.5, loc="lower right")
    axes.grid(axis="y", alpha=0.25)
    save(figure, "select_h200.svg")


def prefill_on_hopper() -> None:
    """How many times as fast a prefill is as the faster dense attention, by context."""
    dense = {"fa4", "cudnn", "fa4-scaled", "fa4-extrapolated"}
    places = {
        ("fp8index", "overlap"): ((0, 7), "center"),
        ("bf16", "overlap"): ((8, -6), "left"),
        ("bf16", "random"): ((8, -10), "left"),
    }
    figure, axes = plt.subplots(figsize=(7.2, 4.2), layout="constrained")
    for dtype, name in (("fp8index", "fp8 index"), ("bf16", "bf16")):
        for selection, words, line in (("overlap", "neighbours choose alike", "-"), ("random", "unrelated", "--")):
            ratios: dict[int, float] = {}
            timed = rows("h200/prefill.csv", case="prefill", selection=selection, dtype=dtype)
            for row in timed:
                if row["baseline"] in dense:
                    n, ratio = int(row["n"]), float(row["ratio"])
                    ratios[n] = min(ratio, ratios.get(n, ratio))  # the fastest baseline counts
            if not ratios:
                continue
            lengths = sorted(ratios)
            times = [ratios[n] for n in lengths]
            label = f"{name}, {words}"
            axes.plot(lengths, times, marker="o", color=COLORS[dtype], linestyle=line, label=label)
            if (dtype, selection) in places:
                offset, align = places[dtype, selection]
                for n, ratio in zip(lengths, times, strict=True):
                    shown = f"{ratio:.1f}x" if ratio < 10 else f"{ratio:.0f}x"
                    axes.annotate(shown, (n, ratio), offset, textcoords="offset points", ha=align, fontsize=8.5)
    axes.axhline(1, color="black", linewidth=1)
    axes.set(xscale="log", yscale="log", xlabel="tokens of context", ylabel="times as fast as dense attention")
    ticks = sorted({int(row["n"]) for row in rows("h200/prefill.csv", case="prefill") if row["selection"] != "real"})
    axes.set_xticks(ticks, [length(str(n)) for n in ticks])
    axes.minorticks_off()
    shown = [t for t in (0.5, 1, 2, 5, 10, 20, 50) if axes.get_ylim()[0] <= t <= axes.get_ylim()[1]]
    axes.set_yticks(shown, [f"{t:g}x" for t in shown])
    axes.text(ticks[-1], 1.04, "FlashAttention 4 or cuDNN", ha="right", va="bottom", fontsize=9)
    title = f"prefill beside the faster dense attention on one {rows('h200/prefill.csv')[0]['gpu']}"
    axes.set_title(title, fontsize=10.5)
    axes.legend(frameon=False, fontsize=8.5, loc="upper left")
    axes.grid(axis="y", alpha=0.25)
    save(figure, "prefill_h200.svg")


def cpu_beside_pytorch() -> None:
    """How many times as fast the cpu backend is as PyTorch's dense attention in its faster type."""
    cases = (
        ("prefill", "8192", "forward, 8K"),
        ("prefill", "32768", "forward, 32K"),
        ("train", "8192", "training, 8K"),
    )
    figure, axes = plt.subplots(figsize=(7.2, 3.2), layout="constrained")
    for shift, dtype in ((-0.2, "fp32"), (0.2, "bf16")):
        ratios = []
        for case, n, _ in cases:
            (row,) = rows("cpu/cpu.csv", case=case, n=n, selection="random", dtype=dtype, baseline="torch")
            ratios.append(float(row["ratio"]))
        places = [place + shift for place in range(len(cases))]
        bars = axes.bar(places, ratios, 0.38, color=COLORS[dtype], label=dtype)
        axes.bar_label(bars, fmt="%.1fx", fontsize=9)
    axes.axhline(1, color="black", linewidth=1)
    axes.text(-0.55, 1.08, "PyTorch", ha="left", fontsize=9)
    axes.set_xlim(-0.6, len(cases) - 0.4)
    axes.set_xticks(range(len(cases)), [label for *_, label in cases])
    axes.set_ylabel("times as fast")
    axes.set_title(f"cpu backend beside dense attention, {row['gpu']} ({row['driver'].upper()})", fontsize=10.5)
    axes.legend(frameon=False)
    save(figure, "cpu.svg")


if __name__ == "__main__":
    select_on_hopper()
    if (RESULTS / "h200" / "prefill.csv").exists():
        prefill_on_hopper()
    cpu_beside_pytorch()
