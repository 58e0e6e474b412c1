"""One call of an operation outside the functional torch operators: results are made or given, then the core runs."""

from __future__ import annotations

from typing import Any, NamedTuple

from . import _numpy
from ._shapes import Output
from ._torch import new


class Plan(NamedTuple):
    """What a call passes to the core, in the order of openmsa.h."""

    operation: str
    inputs: tuple[Any, ...]
    outputs: tuple[Output | None, ...]
    """The results; None: not wanted."""
    given: tuple[Any, ...]
    """The caller's arrays for the results, None where the call makes one."""


def run(plan: Plan, workspace: Any, operators: Any) -> tuple[Any, ...]:
    """Runs the plan through torch's `operators`, or numpy's way when they are None, and returns its results."""
    first = plan.inputs[0]
    results = tuple(
        array if array is not None or output is None
        else _numpy.new(output) if operators is None
        else new(first, output)
        for output, array in zip(plan.outputs, plan.given, strict=True)
    )  # fmt: skip
    if operators is None:
        _numpy.call(plan.operation, plan.inputs, (workspace, *results))
    else:
        getattr(operators, plan.operation + "_out")(*plan.inputs, workspace, *results)
    return results
