"""Live progress: a line a report on the terminal, a row in metrics.csv, and the time left."""

import csv
import math
import time
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType


@dataclass(frozen=True)
class Row:
    """The state of training at one step; bits and recall are means over the steps since the last row.

    Lists hold one number a layer, or nothing where the index branch is idle.
    """

    stage: str
    step: int
    steps: int
    bits: float
    recall: float
    tokens_per_second: float
    kl: list[float]
    captured: list[float]
    best: list[float]


class Progress:
    """`work`: steps by stage; `seconds`: a step's measured seconds by stage, kept up to date as training goes."""

    def __init__(self, path: Path, layers: int, work: dict[str, int], seconds: dict[str, float]) -> None:
        self.rows: list[Row] = []
        self._layers, self._left, self._seconds = layers, dict(work), dict(seconds)
        self._start = time.monotonic()
        self._file = path.open("w", newline="", encoding="utf-8")
        self._csv = csv.writer(self._file)
        per_layer = [f"{name}_{layer}" for name in ("kl", "captured", "best") for layer in range(layers)]
        self._csv.writerow(["seconds", "stage", "step", "bits_per_byte", "recall", "tokens_per_second", *per_layer])

    def __enter__(self) -> "Progress":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()

    @property
    def elapsed(self) -> float:
        return time.monotonic() - self._start

    @property
    def left(self) -> float:
        """Seconds to go, by the latest speed of each stage."""
        return sum(steps * self._seconds[stage] for stage, steps in self._left.items())

    def step(self, stage: str, seconds: float) -> None:
        self._left[stage] -= 1
        self._seconds[stage] += 0.2 * (seconds - self._seconds[stage])

    def report(self, row: Row) -> None:
        self.rows.append(row)
        cells = [f"{row.bits:.2f} bits/byte", f"recall {row.recall:4.0%}"]
        if row.kl:
            cells.append("KL " + " ".join(f"{value:.3f}" for value in row.kl))
        if row.captured:
            cells.append("captured " + " ".join(f"{value:.0%}" for value in row.captured))
        cells.append(f"{row.tokens_per_second:,.0f} tokens/s")
        cells.append(f"{clock(self.left)} left")
        print(f"{row.stage:>14} {row.step:4d}/{row.steps}  " + " · ".join(cells), flush=True)
        values = [row.bits, row.recall, row.tokens_per_second]
        for per_layer in (row.kl, row.captured, row.best):
            values += per_layer or [math.nan] * self._layers
        self._csv.writerow([f"{self.elapsed:.1f}", row.stage, row.step, *(f"{value:.6g}" for value in values)])
        self._file.flush()


def clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes}:{rest:02d}"
