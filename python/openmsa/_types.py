"""Types of the public surface."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, TypeVar

if TYPE_CHECKING:
    import numpy.typing as npt
    import torch

    Array: TypeAlias = torch.Tensor | npt.NDArray[Any]
    ArrayT = TypeVar("ArrayT", torch.Tensor, npt.NDArray[Any])
    CacheScale: TypeAlias = float | torch.Tensor | npt.NDArray[Any] | None
else:
    Array = CacheScale = Any
    ArrayT = TypeVar("ArrayT")


class MsaResult(NamedTuple):
    """Results of :func:`openmsa.msa_attention` and :func:`openmsa.paged_msa_attention`."""

    out: Any
    """[Tq, Hq, Dv], q's type."""
    kl: Any
    """0-d float32, or None."""
    indices: Any
    """[Hi, Tq, topk] int32, or None in warm-up."""
    lse: Any
    """[Hq, Tq] float32."""
    index_lse: Any
    """[Hi, Tq] float32, or None."""
