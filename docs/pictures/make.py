#!/usr/bin/env python3
"""Draws the pictures of the documentation beside this file; needs openmsa, PyTorch and matplotlib."""

from pathlib import Path

import matplotlib
import numpy as np
import openmsa
import torch
from matplotlib.axes import Axes
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch, Rectangle

matplotlib.use("svg")
import matplotlib.pyplot as plt

HERE = Path(__file__).resolve().parent
INDEX, MAIN, KEYS, NEUTRAL = "#c2571a", "#1f5fa8", "#7a8a99", "#44505c"
plt.rcParams |= {"svg.hashsalt": "openmsa", "font.size": 10, "axes.spines.top": False, "axes.spines.right": False}


def save(figure: plt.Figure, name: str) -> None:
    figure.savefig(HERE / name, metadata={"Date": None}, facecolor="white")
    plt.close(figure)


def drifting_vectors(tokens: int, heads: int, dim: int, step: float, seed: int) -> torch.Tensor:
    """Unit vectors that turn slowly from token to token, as the topics of a text do: [tokens, heads, dim]."""
    generator = torch.Generator().manual_seed(seed)
    vectors = torch.randn(heads, dim, generator=generator)
    rows = []
    for _ in range(tokens):
        vectors = torch.nn.functional.normalize(vectors + step * torch.randn(heads, dim, generator=generator), dim=-1)
        rows.append(vectors)
    return torch.stack(rows)


def chosen(indices: torch.Tensor, blocks: int) -> np.ndarray:
    """Indices [tokens, topk] -> [tokens, blocks]: 1 where the query attends to the block."""
    picture = torch.zeros(indices.shape[0], blocks + 1)
    picture.scatter_(1, torch.where(indices < 0, blocks, indices).long(), 1.0)
    return picture[:, :blocks].numpy()


def selection() -> None:
    """Which blocks queries read: all, the nearest, or those that two index heads choose."""
    tokens, block, topk = 2048, 64, 6
    blocks = tokens // block
    index_q = drifting_vectors(tokens, 2, 16, 0.03, seed=1)
    index_k = torch.nn.functional.normalize(
        index_q.mean(dim=1, keepdim=True).roll(384, 0) + 0.4 * index_q[:, :1] + 0.3 * index_q[:, 1:].roll(1024, 0),
        dim=-1,
    )
    indices = openmsa.select_blocks(index_q, index_k, topk=topk, block_size=block)
    own = torch.arange(tokens)[:, None] // block
    dense = torch.arange(blocks)[None].where(torch.arange(blocks)[None] <= own, torch.tensor(-1))
    window = (own - torch.arange(topk)).clamp(min=-1)
    views = {
        "dense attention": chosen(dense, blocks),
        f"a window of {topk} blocks": chosen(window, blocks),
        f"MSA, index head 0, topk {topk}": chosen(indices[0], blocks),
        f"MSA, index head 1, topk {topk}": chosen(indices[1], blocks),
    }
    figure, panels = plt.subplots(1, 4, figsize=(12, 3.4), layout="constrained", sharey=True)
    for axes, (title, picture) in zip(panels, views.items(), strict=True):
        axes.imshow(
            picture, aspect="auto", cmap="Blues", vmin=0, vmax=1.4, extent=(0, blocks, tokens, 0), interpolation="none"
        )
        axes.set(title=title, xlabel=f"block of {block} keys")
    panels[0].set_ylabel("query")
    figure.savefig(HERE / "selection.png", dpi=110, metadata={"Software": None}, facecolor="white")
    plt.close(figure)


def box(axes: Axes, x: float, y: float, width: float, text: str, color: str, filled: bool = False) -> None:
    axes.add_patch(
        FancyBboxPatch(
            (x, y), width, 0.8, boxstyle="round,pad=0.02,rounding_size=0.12", linewidth=1.4, edgecolor=color,
            facecolor=color if filled else "white",
        )
    )  # fmt: skip
    axes.text(x + width / 2, y + 0.4, text, ha="center", va="center", color="white" if filled else color, fontsize=9.5)


def arrow(axes: Axes, start: tuple[float, float], end: tuple[float, float], color: str, dashed: bool = False) -> None:
    style = {"linestyle": (0, (4, 3))} if dashed else {}
    axes.add_patch(
        FancyArrowPatch(start, end, arrowstyle="-|>", mutation_scale=12, linewidth=1.3, color=color, **style)
    )


def branches() -> None:
    """How the index branch and the main branch of one layer meet."""
    figure, axes = plt.subplots(figsize=(11, 4.1), layout="constrained")
    axes.set(xlim=(-0.2, 14.2), ylim=(0, 4.3))
    axes.axis("off")
    box(axes, 0, 3.3, 2.3, "index_q, index_k", INDEX)
    box(axes, 3.1, 3.3, 2.5, "token scores z\nvisible keys", INDEX)
    box(axes, 6.4, 3.3, 2.4, "best score\nof each block", INDEX)
    box(axes, 9.6, 3.3, 2.3, "topk blocks\n+ own block", INDEX, filled=True)
    for left, right in ((2.3, 3.1), (5.6, 6.4), (8.8, 9.6)):
        arrow(axes, (left + 0.05, 3.7), (right - 0.02, 3.7), INDEX)
    box(axes, 0, 0.9, 2.3, "q, k, v", MAIN)
    box(
        axes,
        6.4,
        0.9,
        5.5,
        "exact softmax attention of G query heads\nover the visible tokens of these blocks",
        MAIN,
        filled=True,
    )
    box(axes, 12.7, 0.9, 1.3, "out", MAIN)
    arrow(axes, (2.35, 1.3), (6.35, 1.3), MAIN)
    arrow(axes, (11.95, 1.3), (12.65, 1.3), MAIN)
    arrow(axes, (10.75, 3.25), (10.75, 1.75), INDEX)
    axes.text(10.9, 2.5, "indices", color=INDEX, va="center")
    box(axes, 3.1, 2.1, 2.5, "KL(teacher || student)", NEUTRAL)
    arrow(axes, (7.2, 1.75), (5.65, 2.4), NEUTRAL, dashed=True)
    axes.text(
        6.75, 2.28, "teacher: mean of the heads'\nprobabilities, detached", color=NEUTRAL, fontsize=8.5, va="center"
    )
    arrow(axes, (3.9, 3.25), (3.9, 2.95), INDEX)
    axes.text(4.05, 3.08, "student: softmax of z", color=NEUTRAL, fontsize=8.5, va="center")
    arrow(axes, (3.05, 2.5), (1.15, 3.25), NEUTRAL, dashed=True)
    axes.text(0.0, 2.45, "trains the index\nbranch only", color=NEUTRAL, fontsize=8.5, va="center")
    axes.text(0.0, 0.35, "the language-model loss trains q, k, v only, through out", color=MAIN, fontsize=9)
    save(figure, "branches.svg")


def work() -> None:
    """FLOP of attention a token at M3's shape, by the formulas of the definition: dense beside MSA."""
    contexts = 2.0 ** np.arange(11, 21)
    heads, dim, index_heads, block, topk = 64, 128, 4, 128, 16
    seen = np.arange(1, 2**20 + 1)
    chosen_keys = np.minimum(seen, (topk - 1) * block + (seen - 1) % block + 1)
    mean_seen, mean_chosen = (np.array([keys[: int(n)].mean() for n in contexts]) for keys in (seen, chosen_keys))
    dense = 4 * dim * heads * mean_seen
    index = 2 * dim * index_heads * mean_seen
    main = 4 * dim * heads * mean_chosen
    figure, axes = plt.subplots(figsize=(7.2, 3.8), layout="constrained")
    axes.loglog(contexts, dense / 1e6, color=KEYS, marker="o", label="dense attention")
    axes.loglog(contexts, (index + main) / 1e6, color=MAIN, marker="o", label="MSA: index branch + selected blocks")
    axes.loglog(contexts, index / 1e6, "--", color=INDEX, label="MSA: index branch alone")
    for context in (2**15, 2**17, 2**20):
        place = int(np.log2(context)) - 11
        ratio = dense[place] / (index[place] + main[place])
        axes.annotate(f"{ratio:.1f}x", (context, dense[place] / 1e6), (-6, 6), textcoords="offset points", ha="right")
    axes.set(xlabel="tokens of context", ylabel="MFLOP a token, forward")
    axes.set_xticks(
        contexts[::3], [f"{int(context) // 1024}K" if context < 2**20 else "1M" for context in contexts[::3]]
    )
    axes.minorticks_off()
    axes.legend(frameon=False)
    axes.grid(alpha=0.25)
    save(figure, "work.svg")


def blocks() -> None:
    """Where blocks begin, what a query sees of them, and how a paged cache holds them."""
    figure, axes = plt.subplots(figsize=(11, 2.6), layout="constrained")
    axes.set(xlim=(-0.2, 14), ylim=(-0.5, 3.2))
    axes.axis("off")
    axes.text(0, 2.95, "two packed sequences; blocks are counted from each sequence's first key", color=NEUTRAL)
    start = 0.0
    for sequence, (length, color) in enumerate(((5.3, MAIN), (7.4, INDEX))):
        place, block = 0.0, 0
        while place < length:
            width = min(2.0, length - place)
            axes.add_patch(
                Rectangle(
                    (start + place, 1.9),
                    width,
                    0.7,
                    edgecolor="white",
                    facecolor=color,
                    alpha=0.35 + 0.3 * (block % 2),
                    linewidth=2,
                )
            )
            axes.text(start + place + width / 2, 2.25, f"{block}", ha="center", va="center")
            place, block = place + width, block + 1
        axes.text(start, 1.65, f"sequence {sequence}: cu_seqlens_k[{sequence}]", color=color, fontsize=9, va="center")
        start += length + 0.4
    query = 5.7 + 5.1
    axes.plot([query, query], [1.85, 2.65], color="black", linewidth=2)
    axes.text(query + 0.1, 1.62, "last key that a query sees: its own block is 2", fontsize=9, ha="center", va="center")
    axes.text(0, 1.05, "the same keys in pages of a pool: block_table[b] = page of each block", color=NEUTRAL)
    for page, (label, color) in enumerate(
        (
            ("1: 3", INDEX),
            ("0: 1", MAIN),
            ("", KEYS),
            ("1: 0", INDEX),
            ("0: 0", MAIN),
            ("1: 2", INDEX),
            ("0: 2", MAIN),
            ("1: 1", INDEX),
        )
    ):
        axes.add_patch(
            Rectangle((page * 1.65, 0), 1.55, 0.7, edgecolor=color, facecolor=color if label else "white", alpha=0.5)
        )
        axes.text(page * 1.65 + 0.77, 0.35, label, ha="center", va="center")
        axes.text(page * 1.65 + 0.77, -0.25, f"page {page}", ha="center", va="center", fontsize=8, color=NEUTRAL)
    save(figure, "blocks.svg")


if __name__ == "__main__":
    selection()
    branches()
    work()
    blocks()
