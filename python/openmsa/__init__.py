"""openmsa: MiniMax Sparse Attention (arXiv 2606.13392) on CPUs and Hopper GPUs.

Operations take torch tensors or numpy arrays and return the same kind. Letters in shapes: Tq, Tk query and key tokens
of all sequences together; B sequences; Hq query heads; Hkv key/value heads; Hi index heads; Hik index key heads; D, Dv,
Di head dimensions of q and k, of v, and of the index branch. Hkv divides Hi, Hi divides Hq, Hik divides Hi. Only the
last axis of an array must be contiguous.
"""

import importlib
from typing import TYPE_CHECKING, Any

from ._library import check_inputs, info, version
from ._types import MsaResult
from .analysis import captured_mass, combine
from .attention import msa_attention, sparse_attention
from .errors import DeviceError, Error, InternalError, InvalidArgumentError, OutOfMemoryError, UnsupportedError
from .paged import paged_append, paged_msa_attention, paged_select_blocks, paged_sparse_attention
from .select import select_blocks
from .workspace import set_workspace_limit, workspace_size

if TYPE_CHECKING:
    from . import compat as compat
    from . import integrations as integrations
    from . import nn as nn

__version__ = version()

__all__ = [
    "DeviceError",
    "Error",
    "InternalError",
    "InvalidArgumentError",
    "MsaResult",
    "OutOfMemoryError",
    "UnsupportedError",
    "__version__",
    "captured_mass",
    "check_inputs",
    "combine",
    "info",
    "msa_attention",
    "paged_append",
    "paged_msa_attention",
    "paged_select_blocks",
    "paged_sparse_attention",
    "select_blocks",
    "set_workspace_limit",
    "sparse_attention",
    "workspace_size",
]


def __getattr__(name: str) -> Any:
    """Parts that need PyTorch are imported by whoever uses them."""
    if name in ("compat", "integrations", "nn"):
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
