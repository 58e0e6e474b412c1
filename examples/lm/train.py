"""Training: the stages of the schedule, one AdamW over them."""

import copy
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .config import Config, Stage
from .data import Batch, draw_batch
from .evaluate import BITS, layer_masses
from .model import ByteModel, Layer
from .progress import Progress, Row

REPORTS = 10  # lines of progress a stage
CLIP = 1.0  # on the main weights' gradient; the index branch, with its own loss, stays out of it


@dataclass
class Position:
    """Where a stage stands: what a checkpoint needs beside models and optimisers to go on with the same windows."""

    generator: torch.Generator
    step: int = 0
    bits: list[float] = field(default_factory=list)  # since the last report
    recall: list[float] = field(default_factory=list)
    kl: list[list[float]] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)

    @classmethod
    def start(cls, stage: Stage) -> "Position":
        return cls(torch.Generator().manual_seed(stage.seed))

    def state(self) -> dict[str, Any]:
        seen = {"bits": self.bits, "recall": self.recall, "kl": self.kl, "seconds": self.seconds}
        return {"generator": self.generator.get_state(), "step": self.step, **seen}

    @classmethod
    def restored(cls, state: dict[str, Any]) -> "Position":
        rest = {name: value for name, value in state.items() if name != "generator"}
        return cls(torch.Generator().set_state(state["generator"]), **rest)

    def forget(self) -> None:
        self.bits, self.recall, self.kl, self.seconds = [], [], [], []


class Trainer:
    """A model with its optimiser. `twin()` continues both on another path from the same state."""

    def __init__(self, model: ByteModel, config: Config) -> None:
        self.model, self.config = model, config
        matrices, others, index = model.parameter_groups()
        self.main = matrices + others
        self.optimiser = torch.optim.AdamW(
            [
                {"params": matrices, "base": config.rate, "weight_decay": 0.05},
                {"params": others, "base": config.rate, "weight_decay": 0.0},
                {"params": index, "base": config.index_rate, "weight_decay": 0.0},
            ],
            lr=config.rate,
            betas=(0.9, 0.98),
            fused=True,
        )

    def twin(self) -> "Trainer":
        twin = Trainer(copy.deepcopy(self.model), self.config)
        twin.optimiser.load_state_dict(copy.deepcopy(self.optimiser.state_dict()))
        return twin

    def state(self) -> dict[str, Any]:
        return {"model": self.model.state_dict(), "optimiser": self.optimiser.state_dict()}

    def restore(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        self.optimiser.load_state_dict(state["optimiser"])

    def draw(self, text: Tensor, stage: Stage, generator: torch.Generator) -> Batch:
        batch = draw_batch(text, generator, stage.batch, stage.context, stage.planting)
        return batch.to(self.model.device)

    def backward(self, batch: Batch, stage: Stage, probe: list[Tensor] | None = None) -> tuple[float, float]:
        """Adds the gradients of one batch -> bits per byte of the plain text, and recall of the repeats."""
        logits, kl = self.model(batch.inputs, stage.attention, probe=probe)
        loss = F.cross_entropy(logits.flatten(0, 1), batch.targets.flatten(), reduction="none").view_as(batch.targets)
        ((loss * batch.weights).sum() / batch.weights.sum() + kl).backward()
        with torch.no_grad():
            plain = (batch.recall == 0) & (batch.weights > 0)
            right = logits.argmax(-1) == batch.targets
            return float(loss[plain].mean()) * BITS, float(right[batch.graded].float().mean())

    def seconds_per_step(self, text: Tensor, stage: Stage) -> float:
        """Measures one step of the stage and forgets its gradients."""
        batch = self.draw(text, stage, torch.Generator().manual_seed(0))
        start = time.monotonic()
        self.backward(batch, stage)
        self.optimiser.zero_grad()
        return time.monotonic() - start

    def run(
        self,
        text: Tensor,
        stage: Stage,
        position: Position,
        progress: Progress,
        after_step: Callable[[bool], None] = lambda reported: None,
    ) -> None:
        """The rest of the stage from `position` on. `after_step` is told whether the step came with a report."""
        every = -(-stage.steps // REPORTS)
        while position.step < stage.steps:
            started = time.monotonic()
            step = position.step + 1
            done = position.step / stage.steps
            factor = (stage.rate[0] + (stage.rate[1] - stage.rate[0]) * done) * min(1.0, step / max(stage.rise, 1))
            for group in self.optimiser.param_groups:
                group["lr"] = group["base"] * factor
            report = step % every == 0 or step == stage.steps
            trains_index = stage.attention.trains_index
            selects = trains_index and stage.context > self.config.topk * self.config.block
            probe: list[Tensor] | None = [] if report and selects else None
            bits, recall = self.backward(self.draw(text, stage, position.generator), stage, probe)
            # Before the step changes the weights that made what the probe holds.
            masses = [self._masses(layer, x) for layer, x in enumerate(probe or [])]
            torch.nn.utils.clip_grad_norm_(self.main, CLIP)
            self.optimiser.step()
            self.optimiser.zero_grad()
            position.step = step
            position.bits.append(bits)
            position.recall.append(recall)
            if trains_index:
                position.kl.append(self.model.kls())
            position.seconds.append(time.monotonic() - started)
            progress.step(stage.name, position.seconds[-1])
            if report:
                row = Row(
                    seconds=progress.elapsed,
                    stage=stage.name,
                    step=step,
                    bits=fmean(position.bits),
                    recall=fmean(position.recall),
                    tokens_per_second=stage.tokens / fmean(position.seconds),
                    kl=[fmean(values) for values in zip(*position.kl, strict=True)],
                    captured=[captured for captured, _ in masses],
                    best=[best for _, best in masses],
                )
                progress.report(row, stage.steps)
                position.forget()
            after_step(report)

    @torch.no_grad()
    def _masses(self, number: int, x: Tensor) -> tuple[float, float]:
        layer = self.model.layers[number]
        assert isinstance(layer, Layer)
        masses = layer_masses(layer.heads(layer.normed(x[:1])), self.config)
        return masses.captured, masses.best
