"""One run from its first step to its results, in as many sessions as it takes."""

import dataclasses
import os
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from . import checkpoint
from .config import CONTROL, SPARSE_MODEL, Attention, Config, Settings, schedule
from .data import Corpus
from .evaluate import index_quality, quality
from .generate import generate
from .interrupt import Interrupt, Stopped
from .model import ByteModel
from .progress import Progress, clock
from .report import Results, stage_speeds
from .train import Position, Trainer

WINDOWS = 24  # held-out windows a measurement, of each kind


class Run:
    def __init__(self, settings: Settings, corpus: Corpus, device: torch.device, out: Path) -> None:
        self.settings, self.corpus, self.out = settings, corpus, out
        self.config = Config(settings.context, settings.block, settings.topk, settings.seed)
        self.stages = schedule(self.config, settings.scale)
        self.trainers = {SPARSE_MODEL: Trainer(self.fresh_model(device), self.config)}
        self.stage = 0
        self.position = Position.start(self.stages[0])
        self.progress: Progress | None = None

    def __enter__(self) -> "Run":
        self._lock = checkpoint.lock(self.out)
        return self

    def __exit__(self, *error: object) -> None:
        os.close(self._lock)

    @property
    def model(self) -> ByteModel:
        return self.trainers[SPARSE_MODEL].model

    def fresh_model(self, device: torch.device) -> ByteModel:
        torch.manual_seed(self.config.seed)
        return ByteModel(self.config).to(device)

    def restore(self, state: dict[str, Any]) -> None:
        """Goes on from a checkpoint of a run with the same settings and text."""
        if not {SPARSE_MODEL} <= state["trainers"].keys() <= {SPARSE_MODEL, CONTROL}:
            raise ValueError(f"models {', '.join(state['trainers'])}")
        for name, saved in state["trainers"].items():
            if name not in self.trainers:
                self.trainers[name] = self.trainers[SPARSE_MODEL].twin()
            self.trainers[name].restore(saved)
        self.stage = range(len(self.stages))[state["stage"]]
        self.position = Position.restored(state["position"])
        self.progress = Progress.restored(self.stages, self.config.layers, state["progress"])

    def save(self) -> None:
        assert self.progress is not None
        state = {
            "settings": dataclasses.asdict(self.settings),
            "text_digest": self.corpus.digest,
            "trainers": {name: trainer.state() for name, trainer in self.trainers.items()},
            "stage": self.stage,
            "position": self.position.state(),
            "progress": self.progress.state(),
        }
        checkpoint.save(self.out, state)
        self.progress.save(self.out)

    def describe(self) -> str:
        corpus, config = self.corpus, self.config
        parameters = sum(parameter.numel() for parameter in self.model.parameters())
        blocks = config.context // config.block
        megabytes = {name: len(text) / 1e6 for name, text in (("train", corpus.train), ("held out", corpus.held_out))}
        return (
            f"{corpus.source}: {megabytes['train']:.1f} MB ({corpus.train_files} files) to train on,"
            f" {megabytes['held out']:.2f} MB ({corpus.held_out_files} files) held out\n"
            f"{parameters / 1e6:.2f} M parameters on {self.model.device}, {torch.get_num_threads()} threads; context"
            f" {config.context}: a query attends to {config.topk} of up to {blocks} blocks of {config.block} bytes"
        )

    def train(self, interrupt: Interrupt) -> None:
        """All that is left of training. Raises Stopped after a step at which `interrupt` was asked for."""
        progress = self.progress
        if progress is None:
            progress = self.progress = self._measured()
        interrupt.deferred = True
        print(
            f"about {clock(progress.left)} minutes to go; lines average over the steps since the last one", flush=True
        )

        def after_step(reported: bool) -> None:
            if reported or interrupt.requested:
                self.save()
            if interrupt.requested:
                raise Stopped

        while True:
            stage = self.stages[self.stage]
            if stage.attention is Attention.SPARSE and CONTROL not in self.trainers:
                self.trainers[CONTROL] = self.trainers[SPARSE_MODEL].twin()
            self.trainers[stage.model].run(self.corpus.train, stage, self.position, progress, after_step)
            if self.stage + 1 == len(self.stages):
                break
            self.stage += 1
            self.position = Position.start(self.stages[self.stage])
        interrupt.deferred = False

    def _measured(self) -> Progress:
        print("measuring this machine's speed ...", flush=True)
        trainer = self.trainers[SPARSE_MODEL]
        seconds: dict[str, float] = {}
        for stage in self.stages:
            trainer.seconds_per_step(self.corpus.train, stage)  # the first one finds cold caches
            seconds[stage.name] = trainer.seconds_per_step(self.corpus.train, stage)
        # A window's forward pass takes about a third of its training step; there are 8 a window to measure.
        sparse = next(stage for stage in self.stages if stage.attention is Attention.SPARSE)
        return Progress(
            self.stages, self.config.layers, seconds, evaluation=seconds[sparse.name] / sparse.batch * WINDOWS * 3
        )

    def measure(self) -> Results:
        """What was learned, on held-out text."""
        assert self.progress is not None
        print("measuring on held-out files ...", flush=True)
        started = time.monotonic()
        held_out: Tensor = self.corpus.held_out
        qualities = {CONTROL: quality(self.trainers[CONTROL].model, held_out, Attention.DENSE, WINDOWS)}
        for attention in (Attention.SPARSE, Attention.WINDOW, Attention.RANDOM):
            qualities[attention.value] = quality(self.model, held_out, attention, WINDOWS)
        index = index_quality(self.model, held_out, WINDOWS, self.fresh_model(self.model.device))
        return Results(
            quality=qualities,
            trained=[trained for trained, _ in index],
            untrained=[untrained for _, untrained in index],
            continuation=generate(self.model, held_out),
            rows=self.progress.rows,
            speeds=stage_speeds(self.stages, self.progress.rows),
            evaluation_seconds=time.monotonic() - started,
            seconds=self.progress.elapsed,
        )
