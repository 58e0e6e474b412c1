"""Scratch memory of the operations."""

from __future__ import annotations

from typing import Any

from . import _numpy
from ._arguments import PLAN_ONLY, integers
from ._library import binding
from ._torch import refuse_unreadable
from .attention import msa_attention, sparse_attention
from .errors import Error, InvalidArgumentError
from .paged import paged_msa_attention, paged_select_blocks, paged_sparse_attention
from .select import select_blocks

_OPERATIONS: dict[str, Any] = {
    function.__name__: function
    for function in (
        select_blocks, sparse_attention, msa_attention, paged_select_blocks, paged_sparse_attention,
        paged_msa_attention,
    )
}  # fmt: skip


def workspace_size(operation: str, *args: Any, **kwargs: Any) -> int:
    """Bytes that ``workspace``, a uint8 array on the call's device, must have for an operation.

    Args:
        operation: the operation's name, for example "select_blocks".
        *args: the operation's arguments; tensors are checked, but neither read nor written.
        **kwargs: the operation's keyword arguments; ``workspace`` itself is left out.

    Raises:
        InvalidArgumentError: the operation takes no workspace, or one of its arguments is wrong.
    """
    function = _OPERATIONS.get(operation) if isinstance(operation, str) else None
    if function is None:
        raise InvalidArgumentError(
            f"workspace_size: operation: got {operation!r}, expected one of {', '.join(_OPERATIONS)}"
        )
    kwargs["workspace"] = PLAN_ONLY
    plan = function(*args, **kwargs)
    try:
        return _numpy.workspace_size(plan.operation, plan.inputs, plan.outputs)
    except Error:
        raise
    except RuntimeError:
        refuse_unreadable(plan.operation, plan.inputs)
        raise


def set_workspace_limit(bytes: int) -> None:
    """Set the most workspace that an operation may ask for, beyond what grows with its queries. 1 GiB by default.

    Args:
        bytes: the limit, above 0.
    """
    (limit,) = integers("set_workspace_limit", bytes=bytes)
    binding.set_workspace_limit(limit)
