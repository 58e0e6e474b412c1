"""Facts of the machine that CPU benches run on: its name, clock and product rate, and the memory that a call takes."""

from __future__ import annotations

import ctypes
import re
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch

PRODUCT_SIZE = 2048


def _cpuinfo(field: str) -> list[str]:
    text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    return re.findall(rf"^{field}\s*:\s*(.*)$", text, re.MULTILINE)


def processor_name() -> str:
    names = _cpuinfo("model name")
    return names[0].strip() if names else "unknown"


def clock_mhz() -> int | None:
    """Mean over the processors, as the kernel tells it."""
    clocks = [float(clock) for clock in _cpuinfo("cpu MHz")]
    return round(statistics.mean(clocks)) if clocks else None


def product_rate(seconds: float) -> float:
    """TFLOP/s of torch.mm on float32 matrices of 2048 x 2048: the median."""
    a, b = torch.randn(2, PRODUCT_SIZE, PRODUCT_SIZE).unbind()
    out = torch.empty_like(a)
    torch.mm(a, b, out=out)
    times = []
    deadline = time.perf_counter() + seconds
    while len(times) < 5 or time.perf_counter() < deadline:
        started = time.perf_counter()
        torch.mm(a, b, out=out)
        times.append(time.perf_counter() - started)
    return 2 * PRODUCT_SIZE**3 / statistics.median(times) / 1e12


def _status(field: str) -> int:
    """Bytes of a field of /proc/self/status, such as VmRSS."""
    for line in Path("/proc/self/status").read_text(encoding="utf-8").splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise ValueError(f"/proc/self/status has no {field}")


def peak_above(call: Callable[[], int]) -> int:
    """Bytes of resident memory at the call's peak, beyond what was there before and the bytes of results that `call`
    returns. What earlier calls freed goes back to the system first, so that it cannot hide memory used again."""
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # the peak starts anew at what is resident now
    before = _status("VmRSS")
    results = call()
    return _status("VmHWM") - before - results
