"""Loads the core library and its binding, once.

``OPENMSA_LIBRARY_DIR`` names another folder that holds ``libopenmsa.so`` and ``libopenmsa_ffi.so``; without it they
come from ``openmsa/_lib`` of the installed package.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import tvm_ffi

from . import errors


def _load() -> Any:
    for kind in ("InvalidArgumentError", "UnsupportedError", "OutOfMemoryError", "DeviceError", "InternalError"):
        tvm_ffi.register_error(f"openmsa.{kind}", getattr(errors, kind))
    override = os.environ.get("OPENMSA_LIBRARY_DIR")
    # An editable install keeps the libraries in another folder of the package's path than its sources.
    folders = [Path(override)] if override else [Path(root) / "_lib" for root in sys.modules[__package__].__path__]
    found = [folder / "libopenmsa_ffi.so" for folder in folders if (folder / "libopenmsa_ffi.so").is_file()]
    if not found:
        where = "OPENMSA_LIBRARY_DIR" if override else "the package"
        raise ImportError(f"openmsa: {where} has no libopenmsa_ffi.so; looked in {', '.join(map(str, folders))}")
    return tvm_ffi.load_module(str(found[0]))


binding: Any = _load()


def info() -> dict[str, Any]:
    """What this build holds and this machine offers.

    Returns a dictionary with ``version``, ``backends`` (name, device, available, operations, ...; ``target``, the
    instruction set, of the ``cpu`` one) and ``devices``.
    """
    result: dict[str, Any] = json.loads(binding.info())
    return result


def check_inputs(enabled: bool | None = None) -> bool:
    """Turn the checking mode on or off, and return whether it is on afterwards.

    In this mode calls on a GPU also validate the values of offsets, lengths and tables, as calls on the CPU always do,
    and raise instead of clamping; this waits for the GPU. Without an argument the mode stays as it is.
    """
    if enabled is not None:
        binding.set_check_inputs(bool(enabled))
    return bool(binding.check_inputs())


def version() -> str:
    return str(binding.version())
