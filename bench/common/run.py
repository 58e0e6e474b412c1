"""One run of a GPU bench: its timer, its machine, its rows, and what stands beside them."""

from __future__ import annotations

import argparse
import platform
import sys
import time
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path

import torch
from selections import GENERATORS
from torch import Tensor

from common.results import Machine, Row, machine, write_rows, write_table
from common.timing import GpuTimer, Timer

CONTEXT_FIELDS = (
    "quantity",
    "selection",
    "dtype",
    "n",
    "value",
    "unit",
    "clock_mhz",
    "gpu",
    "driver",
    "commit",
    "date",
)


@dataclass
class Run:
    timer: Timer
    machine: Machine
    device: str
    rows: list[Row]
    context: list[list[str]]
    rates: dict[str, list[float]]  # TFLOP/s of the bare product by dtype, at the start and at the end
    started: float = field(default_factory=time.monotonic)

    def stage(self, what: str) -> None:
        """A line of progress."""
        print(f"-- {what}, {time.monotonic() - self.started:.0f} s after the start", flush=True)

    def note(
        self, quantity: str, value: float, unit: str, *, selection: str = "", dtype: str = "", n: int | str = "",
        clock: int | None = None,
    ) -> None:  # fmt: skip
        m = self.machine
        shown = "" if clock is None else str(clock)
        self.context.append(
            [quantity, selection, dtype, str(n), f"{value:.5g}", unit, shown, m.gpu, m.driver, m.commit, m.date]
        )
        label = " ".join(word for word in (quantity, selection, dtype, str(n)) if word)
        print(f"{label}: {value:.5g} {unit}" + (f" at {shown} MHz" if shown else ""), flush=True)

    def write(self, out: Path | None, bench: str) -> None:
        """Both files of a bench, so far: after each case, so that a run that is ended keeps what it measured."""
        if out is not None:
            write_rows(out / f"{bench}.csv", self.rows)
            write_table(out / f"{bench}_context.csv", CONTEXT_FIELDS, self.context)


def bench_parser(
    description: str | None, dtypes: Collection[str], *, usual: list[str] | None = None, peers: Collection[str] = ()
) -> argparse.ArgumentParser:
    """The options that GPU benches share; `usual` are the dtypes without --dtypes, else all."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="folder of the CSV files; none without it")
    parser.add_argument("--dtypes", nargs="+", choices=dtypes, default=usual or list(dtypes))
    parser.add_argument("--selections", nargs="+", choices=GENERATORS, default=list(GENERATORS))
    if peers:
        parser.add_argument("--peers", nargs="+", choices=(*peers, "none"), default=list(peers))
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    return parser


def start(bench: str, device: str) -> Run | None:
    """None, after a message, where the device is not there."""
    if device == "cuda" and not torch.cuda.is_available():
        print(f"{bench}: no GPU; --device cpu tries the bench without one", file=sys.stderr)
        return None
    on_gpu = device == "cuda"
    timer = GpuTimer() if on_gpu else Timer()
    name = torch.cuda.get_device_name() if on_gpu else platform.processor() or platform.machine()
    facts = machine(name, timer.driver if isinstance(timer, GpuTimer) else "")
    return Run(timer, facts, device, [], [], {})


def bench_products(run: Run, when: str, dtypes: dict[str, torch.dtype]) -> None:
    """The library's bare product, what the bars are scaled by."""
    size = 8192 if run.device == "cuda" else 256
    a, b = (torch.randn(size, size, device=run.device, dtype=torch.bfloat16) for _ in range(2))
    one = torch.ones((), device=run.device)
    for dtype, element in dtypes.items():
        x, y = a.to(element), b.to(element)
        if element == torch.float8_e4m3fn:
            if run.device != "cuda":
                continue
            column_major = y.T.contiguous().T

            def product(x: Tensor = x, y: Tensor = column_major) -> Tensor:
                return torch._scaled_mm(x, y, scale_a=one, scale_b=one, out_dtype=torch.bfloat16)
        else:

            def product(x: Tensor = x, y: Tensor = y) -> Tensor:
                return x @ y

        (measured,) = run.timer.measure(product)
        rate = 2 * size**3 / measured.ms / 1e9
        run.rates.setdefault(dtype, []).append(rate)
        run.note(f"product-{when}", rate, "TFLOP/s", dtype=dtype, n=size, clock=measured.clock_mhz)
