"""Rows of bench/results/*/*.csv: one vocabulary and one writer for every bench."""

from __future__ import annotations

import csv
import datetime
import os
import subprocess
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

FIELDS = (
    "case", "selection", "dtype", "n", "batch", "openmsa_ms", "baseline_ms", "baseline", "ratio", "useful_tflops",
    "gbs", "clock_mhz", "gpu", "driver", "commit", "date",
)  # fmt: skip
CASES = frozenset({
    "prefill", "prefill-official", "chunk", "decode", "decode-4q", "decode-8q", "decode-eager", "train",
    "train-official", "warmup", "stage-select", "stage-plan", "stage-attend", "stage-backward",
})  # fmt: skip
SELECTIONS = frozenset({"random", "overlap", "real"})
DTYPES = frozenset({"fp32", "bf16", "fp16", "fp8index", "fp8kv", "fp8"})
BASELINES = frozenset({
    "", "torch", "fa4", "cudnn", "fa4-scaled", "fa4-extrapolated", "vllm", "sglang", "flashinfer", "flash-msa",
})  # fmt: skip


@dataclass(frozen=True)
class Machine:
    """Where and what a run measured; equal in all of its rows."""

    gpu: str  # name of the GPU, or of the processor in CPU benches
    driver: str
    commit: str
    date: str


def machine(name: str, driver: str) -> Machine:
    return Machine(name, driver, commit(), datetime.datetime.now(datetime.UTC).date().isoformat())


def commit() -> str:
    """OPENMSA_COMMIT, which `scripts/gpu run` sets to the bundle's, else this checkout's."""
    if built := os.environ.get("OPENMSA_COMMIT"):
        return built
    command = ["git", "-C", str(Path(__file__).resolve().parent), "rev-parse", "HEAD"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""


@dataclass(frozen=True)
class Row:
    case: str
    selection: str
    dtype: str
    n: int  # keys of each sequence
    batch: int  # sequences
    openmsa_ms: float
    machine: Machine
    baseline: str = ""
    baseline_ms: float | None = None
    useful_tflops: float | None = None
    gbs: float | None = None
    clock_mhz: int | None = None

    def __post_init__(self) -> None:
        for name, known in (
            ("case", CASES), ("selection", SELECTIONS), ("dtype", DTYPES), ("baseline", BASELINES),
        ):  # fmt: skip
            if getattr(self, name) not in known:
                raise ValueError(f"{name}: got {getattr(self, name)!r}, expected one of {', '.join(sorted(known))}")
        if (self.baseline == "") != (self.baseline_ms is None):
            raise ValueError(f"baseline {self.baseline!r} with baseline_ms {self.baseline_ms}")

    @property
    def key(self) -> tuple[str, str, str, int, int, str]:
        return self.case, self.selection, self.dtype, self.n, self.batch, self.baseline

    def cells(self) -> list[str]:
        ratio = None if self.baseline_ms is None else self.baseline_ms / self.openmsa_ms
        m = self.machine
        return [
            self.case, self.selection, self.dtype, str(self.n), str(self.batch), _number(self.openmsa_ms, ".4f"),
            _number(self.baseline_ms, ".4f"), self.baseline, _number(ratio, ".3f"), _number(self.useful_tflops, ".5g"),
            _number(self.gbs, ".1f"), _number(self.clock_mhz, ".0f"), m.gpu, m.driver, m.commit, m.date,
        ]  # fmt: skip


def _number(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)


def write_rows(path: Path, rows: Iterable[Row]) -> None:
    """Replaces the file of a bench. A key may stand once only."""
    rows = list(rows)
    keys = [row.key for row in rows]
    if repeated := {key for key in keys if keys.count(key) > 1}:
        raise ValueError(f"{path}: these keys stand more than once: {sorted(repeated)}")
    write_table(path, FIELDS, [row.cells() for row in rows])


def write_table(path: Path, fields: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(fields)
        writer.writerows(rows)


def merge_table(path: Path, fields: Sequence[str], rows: Iterable[Sequence[str]], key_length: int) -> None:
    """Writes the rows in place of all those whose first cells some row has."""
    rows = list(rows)
    new = {tuple(row[:key_length]) for row in rows}
    old: list[list[str]] = []
    if path.exists():
        with path.open(newline="", encoding="utf-8") as file:
            header, *old = csv.reader(file)
        if header != list(fields):
            raise SystemExit(f"{path}: has other columns than this bench writes")
    write_table(path, fields, [*(row for row in old if tuple(row[:key_length]) not in new), *rows])
