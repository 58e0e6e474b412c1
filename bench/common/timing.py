"""One way of timing for every bench: warm-up, then alternating repeats, then the median.

A call is repeated 20 times, or until its repeats took 1.5 s (three at least). Several calls of one `measure`
alternate, so that a clock that drifts meets all of them. `GpuTimer` flushes the L2 cache before calls under 1 ms by
reading a large buffer: writing one would leave dirty lines for the timed call to evict.
"""

from __future__ import annotations

import ctypes
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

REPEATS = 20
LEAST_REPEATS = 3
SECONDS = 1.5
WARMUP_SECONDS = 0.3
FLUSH_BELOW_MS = 1.0
FLUSH_BYTES = 256 * 2**20  # four times the L2 cache of an H200

Call = Callable[[], object]


@dataclass(frozen=True)
class Measured:
    ms: float  # median
    repeats: int
    clock_mhz: int | None  # median SM clock during the repeats


class Timer:
    """Times calls that return when their work is done, by the host's clock."""

    def once(self, call: Call, *, flush: bool = False) -> float:
        """Milliseconds of one call."""
        started = time.perf_counter()
        call()
        return (time.perf_counter() - started) * 1e3

    def clock_mhz(self) -> int | None:
        return None

    def measure(self, *calls: Call) -> list[Measured]:
        flush = [self._warm_up(call) < FLUSH_BELOW_MS for call in calls]
        times: list[list[float]] = [[] for _ in calls]
        clocks: list[list[int]] = [[] for _ in calls]
        for _ in range(REPEATS):
            for i, call in enumerate(calls):
                if len(times[i]) >= LEAST_REPEATS and sum(times[i]) >= SECONDS * 1e3:
                    continue
                times[i].append(self.once(call, flush=flush[i]))
                if (clock := self.clock_mhz()) is not None:
                    clocks[i].append(clock)
        return [
            Measured(statistics.median(t), len(t), round(statistics.median(c)) if c else None)
            for t, c in zip(times, clocks, strict=True)
        ]

    def _warm_up(self, call: Call) -> float:
        total = last = 0.0
        for _ in range(3):
            last = self.once(call)
            total += last
            if total > WARMUP_SECONDS * 1e3:
                break
        return last


class GpuTimer(Timer):
    """Times what calls queue on PyTorch's current stream, by events."""

    def __init__(self) -> None:
        import torch

        self._torch = torch
        self._buffer = torch.zeros(FLUSH_BYTES // 4, dtype=torch.float32, device="cuda")
        self._sum = torch.zeros((), dtype=torch.float32, device="cuda")
        self._management = Management(str(torch.cuda.get_device_properties().uuid))
        self._clock: int | None = None

    @property
    def driver(self) -> str:
        return self._management.driver

    def once(self, call: Call, *, flush: bool = False) -> float:
        start, end = (self._torch.cuda.Event(enable_timing=True) for _ in range(2))
        if flush:
            self._torch.sum(self._buffer, dim=0, out=self._sum)
        start.record()
        call()
        end.record()
        self._clock = self._management.sm_clock()  # while the call runs, or right after a short one
        end.synchronize()
        return float(start.elapsed_time(end))

    def clock_mhz(self) -> int | None:
        return self._clock


class Management:
    """The driver's management library: SM clock and driver version of one GPU; empty answers where it is missing."""

    _SM_CLOCK = 1  # NVML_CLOCK_SM

    def __init__(self, uuid: str) -> None:
        self.driver = ""
        self._library: Any = None
        try:
            library = ctypes.CDLL("libnvidia-ml.so.1")
        except OSError:
            return
        self._device = ctypes.c_void_p()
        version = ctypes.create_string_buffer(96)
        name = f"GPU-{uuid.removeprefix('GPU-')}".encode()
        if library.nvmlInit_v2() != 0 or library.nvmlDeviceGetHandleByUUID(name, ctypes.byref(self._device)) != 0:
            return
        if library.nvmlSystemGetDriverVersion(version, len(version)) == 0:
            self.driver = version.value.decode()
        self._library = library

    def sm_clock(self) -> int | None:
        clock = ctypes.c_uint()
        if self._library is None or self._library.nvmlDeviceGetClockInfo(
            self._device, self._SM_CLOCK, ctypes.byref(clock)
        ):
            return None
        return clock.value
