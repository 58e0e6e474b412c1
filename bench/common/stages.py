"""Times of the stages inside one call, from the GPU's own record of its kernels."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from common.timing import Call

REPEATS = 3
# Words in the names of kernels.
STAGES = {
    "select": ("select_kernel", "schedule_kernel", "merge_kernel"),
    "plan": ("find_owners", "plan_tiles", "list_items", "RadixSort"),
    "attend": ("attend_kernel", "rest_kernel", "join_kernel", "repair_kernel"),
    "index-lse": ("partial_lse", "merge_lse", "prefix_lse"),
}
WHOLE = "whole"


@dataclass(frozen=True)
class Kernel:
    name: str
    start: float  # us
    end: float


def stage_of(name: str) -> str | None:
    return next((stage for stage, words in STAGES.items() if any(word in name for word in words)), None)


def spans(kernels: Sequence[Kernel]) -> dict[str, float]:
    """Milliseconds of each stage and of the whole call. Neighbouring kernels of a stage count from the first one's
    start to the last one's end, with the gaps between them; a fill belongs to the kernel after it."""
    if not kernels:
        return {}
    ordered = sorted(kernels, key=lambda kernel: kernel.start)
    stages: list[str | None] = []
    following: str | None = None
    for kernel in reversed(ordered):
        following = stage_of(kernel.name) or following
        stages.append(following)
    total = {WHOLE: (max(kernel.end for kernel in ordered) - ordered[0].start) / 1e3}
    for stage, group in itertools.groupby(zip(reversed(stages), ordered, strict=True), key=lambda pair: pair[0]):
        members = [kernel for _, kernel in group]
        if stage is not None:
            span = max(kernel.end for kernel in members) - members[0].start
            total[stage] = total.get(stage, 0.0) + span / 1e3
    return total


def stage_times(call: Call) -> dict[str, float]:
    """Medians over a few calls, whose kernels PyTorch's profiler records; empty where it records none."""
    recorded: list[dict[str, float]] = []
    for _ in range(REPEATS):
        torch.cuda.synchronize()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            call()
            torch.cuda.synchronize()
        kernels = [
            Kernel(event.name, event.time_range.start, event.time_range.end)
            for event in profile.events() or []
            if event.device_type.name == "CUDA"
        ]
        if kernels:
            recorded.append(spans(kernels))
    names = {name for times in recorded for name in times}
    return {name: statistics.median(times.get(name, 0.0) for times in recorded) for name in names}
