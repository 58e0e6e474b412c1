"""Training: the stages of the schedule, one AdamW over them."""

import copy
import time
from statistics import fmean

import torch
import torch.nn.functional as F

from .config import Attention, Config, Stage
from .data import Batch, draw_batch
from .evaluate import BITS, layer_masses
from .model import ByteModel, Heads
from .progress import Progress, Row

REPORTS = 10  # lines of progress a stage
CLIP = 1.0  # on the main weights' gradient; the index branch, with its own loss, stays out of it


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
        )

    def twin(self) -> "Trainer":
        twin = Trainer(copy.deepcopy(self.model), self.config)
        twin.optimiser.load_state_dict(copy.deepcopy(self.optimiser.state_dict()))
        return twin

    def draw(self, text: torch.Tensor, stage: Stage, generator: torch.Generator) -> Batch:
        return draw_batch(text, generator, stage.batch, stage.context, stage.planting)

    def backward(self, batch: Batch, attention: Attention, probe: list[Heads] | None = None) -> tuple[float, float]:
        """Adds the gradients of one batch -> bits per byte of the plain text, and recall of the repeats."""
        logits, kl = self.model(batch.inputs, attention, probe)
        loss = F.cross_entropy(logits.flatten(0, 1), batch.targets.flatten(), reduction="none").view_as(batch.targets)
        ((loss * batch.weights).sum() / batch.weights.sum() + kl).backward()
        with torch.no_grad():
            plain = (batch.recall == 0) & (batch.weights > 0)
            right = logits.argmax(-1) == batch.targets
            return float(loss[plain].mean()) * BITS, float(right[batch.graded].float().mean())

    def seconds_per_step(self, text: torch.Tensor, stage: Stage) -> float:
        """Measures one step of the stage and forgets its gradients."""
        batch = self.draw(text, stage, torch.Generator().manual_seed(0))
        start = time.monotonic()
        self.backward(batch, stage.attention)
        self.optimiser.zero_grad()
        return time.monotonic() - start

    def run(self, text: torch.Tensor, stage: Stage, progress: Progress, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        every = -(-stage.steps // REPORTS)
        bits_seen: list[float] = []
        recall_seen: list[float] = []
        for step in range(1, stage.steps + 1):
            start = time.monotonic()
            done = (step - 1) / stage.steps
            factor = (stage.rate[0] + (stage.rate[1] - stage.rate[0]) * done) * min(1.0, step / max(stage.rise, 1))
            for group in self.optimiser.param_groups:
                group["lr"] = group["base"] * factor
            report = step % every == 0 or step == stage.steps
            trains_index = stage.attention in (Attention.WARMUP, Attention.SPARSE)
            probe: list[Heads] | None = [] if report and trains_index else None
            bits, recall = self.backward(self.draw(text, stage, generator), stage.attention, probe)
            bits_seen.append(bits)
            recall_seen.append(recall)
            torch.nn.utils.clip_grad_norm_(self.main, CLIP)
            self.optimiser.step()
            self.optimiser.zero_grad()
            seconds = time.monotonic() - start
            progress.step(stage.name, seconds)
            if report:
                masses = [layer_masses(heads.first(), self.config) for heads in probe or []]
                progress.report(
                    Row(
                        stage=stage.name,
                        step=step,
                        steps=stage.steps,
                        bits=fmean(bits_seen),
                        recall=fmean(recall_seen),
                        tokens_per_second=stage.tokens / seconds,
                        kl=self.model.kls() if trains_index else [],
                        captured=[mass.captured for mass in masses],
                        best=[mass.best for mass in masses],
                    )
                )
                bits_seen, recall_seen = [], []
