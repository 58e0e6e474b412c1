"""Checks of arguments that the core never sees as they came: kinds of arrays, Python numbers."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any

import numpy as np

from ._torch import Tensor, ops
from .errors import InvalidArgumentError

PLAN_ONLY: Any = object()
"""As `workspace` it makes an operation return its Plan instead of running."""

_INT64 = 2**63


def integers(operation: str, **values: Any) -> list[int]:
    """`values` as ints that fit 64 bits, or an error that names the wrong one. Symbolic integers pass through."""
    return [value if type(value) is int and -_INT64 <= value < _INT64 else _integer(operation, name, value)
            for name, value in values.items()]  # fmt: skip


def _integer(operation: str, name: str, value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool):
        try:
            if isinstance(value, Tensor | np.ndarray):
                raise TypeError
            value = operator.index(int(value) if isinstance(value, bool) else value)  # torch takes no bool for a size
        except TypeError:
            raise InvalidArgumentError(
                f"{operation}: {name}: got a {type(value).__name__}, expected an integer"
            ) from None
    if type(value) is int and not -_INT64 <= value < _INT64:
        raise InvalidArgumentError(f"{operation}: {name}: got {value}, expected a 64-bit integer")
    return value  # type: ignore[no-any-return]


def number(operation: str, name: str, value: Any) -> float | None:
    """`value` as a float or None (the default of a scale), or an error that names it."""
    if value is None or isinstance(value, float):
        return value
    try:
        if isinstance(value, str | bytes) or getattr(value, "ndim", 0) != 0:
            raise TypeError
        return float(value)
    except (TypeError, ValueError, OverflowError):
        raise InvalidArgumentError(f"{operation}: {name}: got a {type(value).__name__}, expected a number") from None


def cache_scale(operation: str, name: str, value: Any) -> tuple[float | None, Any]:
    """The factor of a float8 cache, as a number or as the 0-d array that holds it."""
    if isinstance(value, Tensor | np.ndarray):
        return None, value
    return number(operation, name, value), None


def all_given(workspace: Any, *results: Any) -> bool:
    """Whether the call is to run and the caller brought every result that it writes."""
    for result in results:
        if result is None:
            return False
    return workspace is not PLAN_ONLY


def choose_operators(operation: str, needed: Mapping[str, Any], optional: Mapping[str, Any]) -> Any:
    """torch's operators, or None for numpy arrays. Refuses, by name, what is missing, mixed or no array."""
    first = next(iter(needed.values()))
    kind: Any = Tensor if isinstance(first, Tensor) else np.ndarray
    for name, value in needed.items():
        if not isinstance(value, kind):
            raise _wrong_kind(operation, name, value, first)
    for name, value in optional.items():
        if value is not None and value is not PLAN_ONLY and not isinstance(value, kind):
            raise _wrong_kind(operation, name, value, first)
    return ops if kind is Tensor else None


def _wrong_kind(operation: str, name: str, value: Any, first: Any) -> InvalidArgumentError:
    if value is None:
        return InvalidArgumentError(f"{operation}: {name}: missing, expected a torch tensor or a numpy array")
    if value is first or not isinstance(value, Tensor | np.ndarray):
        expected = "a torch tensor or a numpy array"
    else:
        expected = f"a {_name(type(first))} (torch tensors and numpy arrays cannot be mixed in a call)"
    return InvalidArgumentError(f"{operation}: {name}: got a {_name(type(value))}, expected {expected}")


def _name(kind: type) -> str:
    module = kind.__module__.partition(".")[0]
    return kind.__qualname__ if module == "builtins" else f"{module}.{kind.__qualname__}"
