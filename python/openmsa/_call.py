"""One call of an operation outside the functional torch operators: results are made or given, then the core runs."""

from __future__ import annotations

from typing import Any, NamedTuple

from . import _numpy
from ._shapes import Output
from ._torch import Tensor, new, ops


class Plan(NamedTuple):
    """What a call passes to the core, in the order of openmsa.h."""

    operation: str
    inputs: tuple[Any, ...]
    outputs: tuple[Output | None, ...]
    """The results; None: not wanted."""
    given: tuple[Any, ...]
    """The caller's arrays for the results, None where the call makes one."""


def run(plan: Plan, workspace: Any) -> tuple[Any, ...]:
    """Runs the plan and returns its results."""
    first = plan.inputs[0]
    on_torch = isinstance(first, Tensor)
    results = tuple(
        array if array is not None or output is None else new(first, output) if on_torch else _numpy.new(output)
        for output, array in zip(plan.outputs, plan.given, strict=True)
    )
    if on_torch:
        getattr(ops, plan.operation + "_out")(*plan.inputs, workspace, *results)
    else:
        _numpy.call(plan.operation, plan.inputs, (workspace, *results))
    return results
