"""Live progress: a line a report on the terminal, the rows of metrics.csv, and the time left."""

import csv
import dataclasses
import io
import math
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .checkpoint import write_whole
from .config import Stage

PER_LAYER = ("kl", "captured", "best")
NAME = "metrics.csv"


@dataclass(frozen=True)
class Row:
    """The state of training at one step; bits, recall, KL and speed are means over the steps since the last row.

    Lists hold one number a layer, or nothing where the index branch is idle.
    """

    seconds: float  # since the run's start, without the time between its sessions
    stage: str
    step: int
    bits: float
    recall: float
    tokens_per_second: float
    kl: list[float]
    captured: list[float]  # share of dense attention inside the selected blocks, late half of one sequence
    best: list[float]  # the most that as many blocks could hold


class Progress:
    """`seconds`: a step's measured seconds by stage, kept up to date as training goes."""

    def __init__(self, stages: list[Stage], layers: int, seconds: dict[str, float], evaluation: float) -> None:
        self.rows: list[Row] = []
        self.done = {stage.name: 0 for stage in stages}
        self._stages, self._layers, self._seconds, self._evaluation = stages, layers, dict(seconds), evaluation
        self._before, self._start = 0.0, time.monotonic()

    def state(self) -> dict[str, Any]:
        return {
            "rows": [dataclasses.asdict(row) for row in self.rows],
            "done": self.done,
            "seconds": self._seconds,
            "evaluation": self._evaluation,
            "elapsed": self.elapsed,
        }

    @classmethod
    def restored(cls, stages: list[Stage], layers: int, state: dict[str, Any]) -> "Progress":
        progress = cls(stages, layers, state["seconds"], state["evaluation"])
        progress.rows = [Row(**row) for row in state["rows"]]
        progress.done = dict(state["done"])
        progress._before = state["elapsed"]
        return progress

    @property
    def elapsed(self) -> float:
        return self._before + time.monotonic() - self._start

    @property
    def left(self) -> float:
        """Seconds to go, by the latest speed of each stage."""
        training = sum((stage.steps - self.done[stage.name]) * self._seconds[stage.name] for stage in self._stages)
        return training + self._evaluation

    def step(self, stage: str, seconds: float) -> None:
        self.done[stage] += 1
        self._seconds[stage] += 0.2 * (seconds - self._seconds[stage])

    def report(self, row: Row, steps: int) -> None:
        self.rows.append(row)
        cells = [f"{row.bits:.2f} bits/byte", f"recall {row.recall:4.0%}"]
        if row.kl:
            cells.append("KL " + " ".join(f"{value:.3f}" for value in row.kl))
        if row.captured:
            cells.append("captured " + " ".join(f"{value:.0%}" for value in row.captured))
        cells.append(f"{row.tokens_per_second:,.0f} tokens/s")
        cells.append(f"{clock(self.left)} left")
        print(f"{row.stage:>14} {row.step:4d}/{steps}  " + " · ".join(cells), flush=True)

    def save(self, folder: Path) -> Path:
        """Writes metrics.csv: all rows, so that a run that continues repeats none."""
        text = io.StringIO(newline="")
        table = csv.writer(text)
        per_layer = [f"{name}_{layer}" for name in PER_LAYER for layer in range(self._layers)]
        table.writerow(["seconds", "stage", "step", "bits_per_byte", "recall", "tokens_per_second", *per_layer])
        for row in self.rows:
            values = [row.bits, row.recall, row.tokens_per_second]
            for name in PER_LAYER:
                values += getattr(row, name) or [math.nan] * self._layers
            table.writerow([f"{row.seconds:.1f}", row.stage, row.step, *(f"{value:.6g}" for value in values)])
        path = folder / NAME
        write_whole(path, text.getvalue().encode())
        return path


def clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes}:{rest:02d}"
