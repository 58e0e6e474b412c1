"""The torch operators when torch is there. numpy works without it."""

from __future__ import annotations

import sys
from typing import Any

# apache-tvm-ffi imports torch when it is installed, so it is in sys.modules exactly when it is there.
if "torch" in sys.modules:
    import torch

    from . import _autograd as _autograd
    from . import _ops as _ops

    Tensor: Any = torch.Tensor
    ops: Any = torch.ops.openmsa
    new = _ops._new

    def wants_gradient(*tensors: Any) -> bool:
        return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)
else:

    class Tensor:  # type: ignore[no-redef]
        """No value is an instance of it."""

    ops = None

    def new(like: Any, output: Any) -> Any:
        raise AssertionError("torch is not there")

    def wants_gradient(*tensors: Any) -> bool:
        return False
