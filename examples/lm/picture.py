"""report.png: how training went, what selection costs by position, and which blocks queries choose."""

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import openmsa
import torch
from torch import Tensor

from .attention import Heads
from .checkpoint import write_whole
from .config import CONTROL, Attention, Stage
from .data import Batch, draw_batch
from .evaluate import SEED
from .model import ByteModel, Layer
from .report import Results


@torch.no_grad()
def choices(model: ByteModel, text: Tensor) -> tuple[Batch, list[Tensor]]:
    """A held-out window with planted strings, and each layer's choice of blocks in it: [index_heads, tokens, topk]."""
    config = model.config
    batch = draw_batch(text, torch.Generator().manual_seed(SEED), 1, config.context, config.planting)
    probe: list[Tensor] = []
    model(batch.inputs.to(model.device), Attention.SPARSE, probe=probe)
    chosen = []
    for layer, x in zip(model.layers, probe, strict=True):
        assert isinstance(layer, Layer)
        heads: Heads = layer.heads(layer.normed(x))
        indices = openmsa.select_blocks(heads.index_q, heads.index_k, topk=config.topk, block_size=config.block)
        chosen.append(indices.cpu())
    return batch, chosen


def draw(results: Results, stages: Sequence[Stage], model: ByteModel, text: Tensor, path: Path) -> bool:
    """Writes the picture; False where matplotlib is missing."""
    try:
        import matplotlib
    except ImportError:
        return False
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    heads = model.config.layers * model.config.index_heads
    figure = plt.figure(figsize=(16, 9), layout="constrained")
    parts: Any = figure.subfigures(2, 1, height_ratios=(1, 1.3))
    above, below = parts
    loss, recall, index, position = above.subplots(1, 4)
    _training(results, stages, loss, recall, index)
    _positions(results, model.config.context, position)
    _choices(*choices(model, text), model, below.subplots(1, heads, sharey=True, squeeze=False)[0])
    below.suptitle(
        "Blocks that queries choose in a held-out window (dark), and where the byte to come stood first (red)",
        fontsize="medium",
    )
    content = io.BytesIO()
    figure.savefig(content, dpi=90, format="png")
    plt.close(figure)
    write_whole(path, content.getvalue())
    return True


def _training(results: Results, stages: Sequence[Stage], loss: Any, recall: Any, index: Any) -> None:
    start = 0
    for stage in stages:
        rows = [row for row in results.rows if row.stage == stage.name]
        # The control stands beside the sparse stage that it is the control of.
        offset = start - stage.steps if stage.model == CONTROL else start
        steps = [offset + row.step for row in rows]
        loss.plot(steps, [row.bits for row in rows], label=stage.name)
        recall.plot(steps, [row.recall for row in rows], label=stage.name)
        for layer in range(len(rows[0].kl)):
            label = f"KL, layer {layer}" if stage.attention is Attention.SPARSE else None
            index.plot(steps, [row.kl[layer] for row in rows], color=f"C{layer}", label=label)
        for layer in range(len(rows[0].captured)):
            label = f"captured mass, layer {layer}" if stage.attention is Attention.SPARSE else None
            index.plot(steps, [row.captured[layer] for row in rows], "--", color=f"C{layer}", label=label)
        start = offset + stage.steps
    for axes, title in (
        (loss, "bits per byte in training"),
        (recall, "recall of planted repeats"),
        (index, "index branch, in the three stages"),
    ):
        axes.set(title=title, xlabel="step", ylim=(0, None))
        axes.legend(fontsize="small")
        axes.grid(alpha=0.3)


def _positions(results: Results, context: int, axes: Any) -> None:
    for name, quality in results.quality.items():
        bins = len(quality.bits_by_position)
        axes.plot([(part + 0.5) * context / bins for part in range(bins)], quality.bits_by_position, "o-", label=name)
    axes.set(title="held-out bits per byte", xlabel="position in the context")
    axes.legend(fontsize="small")
    axes.grid(alpha=0.3)


def _choices(batch: Batch, chosen: list[Tensor], model: ByteModel, panels: Sequence[Any]) -> None:
    block, context = model.config.block, model.config.context
    places = torch.arange(context)
    graded = batch.graded[0]
    source = batch.origin[0] // block
    panel = iter(panels)
    for layer, indices in enumerate(chosen):
        for head, rows in enumerate(indices):
            axes = next(panel)
            picture = torch.zeros(context, -(-context // block))
            visible = rows >= 0
            picture[places[:, None].expand_as(rows)[visible], rows[visible].long()] = 1.0
            axes.imshow(picture, aspect="auto", cmap="Greys", interpolation="nearest", vmax=1.4)
            axes.scatter(source[graded], places[graded], s=1.5, color="red", linewidths=0)
            found = (rows == source[:, None]).any(dim=-1)[graded].float().mean()
            axes.set_title(f"layer {layer}, head {head}: {found:.0%} of the sources chosen", fontsize="small")
            axes.set(xlabel=f"block of {block} keys")
    panels[0].set(ylabel="query")
