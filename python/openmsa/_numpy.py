"""numpy arrays as the core's tensors: by pointer, so that read-only arrays and ml_dtypes types pass."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np

from ._library import binding
from ._shapes import Output
from ._threads import follow_torch

# openmsa_tensor of openmsa.h: data, shape[4], strides[4], rank, dtype, device_type, device_index.
_TENSOR = struct.Struct("=Q4q4q4i")
_MAX_RANK = 4
_DTYPES = {"float32": 0, "float16": 1, "bfloat16": 2, "float8_e4m3fn": 3, "int32": 4, "int64": 5, "uint8": 6}
_UNKNOWN_DTYPE = -1


def new(output: Output) -> Any:
    return np.empty(output.shape, output.dtype if output.dtype is not None else output.like.dtype)


def call(operation: str, inputs: tuple[Any, ...], outputs: tuple[Any, ...]) -> None:
    follow_torch()
    getattr(binding, operation)(*map(_describe, inputs), *map(_describe_output, outputs))


def workspace_size(operation: str, inputs: tuple[Any, ...], outputs: tuple[Output | None, ...]) -> int:
    """Bytes that the call needs, without making its results. Takes numpy's and torch's inputs."""
    absent = (None if output is None else _describe_absent(output, inputs[0]) for output in outputs)
    return int(getattr(binding, operation + "_workspace")(*map(_describe, inputs), None, *absent))


def _describe_absent(output: Output, like: Any) -> bytes:
    """A compact tensor of that shape and type without memory, on the device of `like`."""
    name = output.dtype or str(output.like.dtype).removeprefix("torch.")
    device: Any = getattr(like, "device", None)  # numpy's is the word "cpu"
    on_gpu = getattr(device, "type", "cpu") == "cuda"
    index = (device.index or 0) if on_gpu else 0
    shape = [int(length) for length in output.shape]
    strides = [1] * len(shape)
    for position in range(len(shape) - 2, -1, -1):
        strides[position] = strides[position + 1] * shape[position + 1]
    return _pack(0, shape, strides, _DTYPES.get(name, _UNKNOWN_DTYPE), int(on_gpu), index)


def _pack(data: int, shape: Any, strides: Any, dtype: int, device: int = 0, index: int = 0, tail: str = "") -> bytes:
    rank = len(shape)
    padding = (0,) * max(0, _MAX_RANK - rank)
    described = _TENSOR.pack(
        data, *shape[:_MAX_RANK], *padding, *strides[:_MAX_RANK], *padding, rank, dtype, device, index
    )
    return described + tail.encode()


def _refusal(reason: str, dtype: int = 0) -> bytes:
    return _pack(0, (), (), dtype, tail=reason)


def _describe(value: Any) -> Any:
    if not isinstance(value, np.ndarray):
        return value
    dtype = value.dtype
    code = _DTYPES.get(dtype.name)
    if code is None:
        return _refusal(dtype.name, _UNKNOWN_DTYPE)
    if not dtype.isnative:
        return _refusal("got an array of foreign byte order, expected this machine's")
    size = dtype.itemsize
    strides = [0] * value.ndim
    for position, stride in enumerate(value.strides):
        if value.shape[position] > 1:
            strides[position], rest = divmod(stride, size)
            if rest:
                return _refusal(f"got a stride of {stride} bytes, expected a multiple of the element size {size}")
        else:
            strides[position] = 1
    data = value.ctypes.data
    if data % size and value.size:
        return _refusal(f"got an array that is not aligned, expected alignment to its element size {size}")
    return _pack(data, value.shape, strides, code)


def _describe_output(value: Any) -> Any:
    if isinstance(value, np.ndarray) and not value.flags.writeable:
        return _refusal("got a read-only array, expected one that can be written")
    return _describe(value)
