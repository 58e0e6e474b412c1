"""The torch side when torch is there. numpy works without it.

Eager calls on plain tensors go to the kernels of _ops.py directly; everything else (compilation, tracing, fake tensors,
subclasses, transforms) goes through the registered operators. The dispatcher alone would cost several microseconds.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

# apache-tvm-ffi imports torch when it is installed, so it is in sys.modules exactly when it is there.
if sys.modules.get("torch") is not None:
    import torch

    from ._autograd import eager as eager
    from ._ops import new as new
    from ._ops import refuse_unreadable as refuse_unreadable

    Tensor: Any = torch.Tensor
    ops: Any = torch.ops.openmsa

    _PLAIN = frozenset((torch.Tensor, torch.nn.Parameter))
    _is_compiling = torch.compiler.is_compiling
    _dispatch_modes = torch._C._len_torch_dispatch_stack
    _function_modes = torch._C._len_torch_function_stack
    _transformed = torch._C._are_functorch_transforms_active
    _grad_enabled = torch.is_grad_enabled

    def plain(needed: tuple[Any, ...], *optional: Any) -> bool:
        """Whether this is an eager torch call that nothing observes, on tensors that are what they seem."""
        if _is_compiling() or _dispatch_modes() or _function_modes() or _transformed():
            return False
        for tensor in needed:
            if type(tensor) not in _PLAIN or tensor.is_neg():
                return False
        for tensor in optional:  # noqa: SIM110  (a generator costs more than the loop)
            if tensor is not None and (type(tensor) not in _PLAIN or tensor.is_neg()):
                return False
        return True

    def wants_gradient(*tensors: Any) -> bool:
        if _grad_enabled():
            for tensor in tensors:
                if tensor.requires_grad:
                    return True
        return False
else:

    class Tensor:  # type: ignore[no-redef]
        """No value is an instance of it."""

    ops = eager = new = None  # type: ignore[assignment]

    def plain(needed: tuple[Any, ...], *optional: Any) -> bool:
        return False

    def wants_gradient(*tensors: Any) -> bool:
        return False

    def refuse_unreadable(name: str, arguments: Sequence[Any]) -> None:
        pass
