"""Exceptions of openmsa. Each message names the operation and the argument, what came and what is supported."""

from __future__ import annotations


class Error(Exception):
    """Base of every exception that openmsa raises on purpose."""


class InvalidArgumentError(Error, ValueError):
    """An argument is wrong: its rank, shape, type, value, or that it is missing."""


class UnsupportedError(Error, NotImplementedError):
    """The arguments are valid, but this backend or device cannot do the operation."""


class OutOfMemoryError(Error, RuntimeError):
    """Host or device memory ran out inside the library."""


class DeviceError(Error, RuntimeError):
    """The device or its driver reported an error."""


class InternalError(Error, RuntimeError):
    """A fault of openmsa itself; please report it."""
