"""Layers of PyTorch models that use MSA, and the paged cache that they decode with. Needs PyTorch."""

from __future__ import annotations

try:
    import torch  # noqa: F401
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        "openmsa.nn needs PyTorch 2.11 or newer (pip install torch); openmsa itself also takes numpy arrays",
        name=error.name,
    ) from error

from .attention import SparseAttention
from .cache import PagedCache

__all__ = ["PagedCache", "SparseAttention"]
