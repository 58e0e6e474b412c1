"""What the layer is made of besides projections and attention: norm, rotary embedding, and how the KL reaches it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


class HeadNorm(nn.Module):
    """Gemma's RMSNorm over the last axis: ``x / rms(x) * (1 + weight)``, computed in float32.

    Args:
        dim: length of the last axis.
        eps: added to the mean square.
        device: of ``weight`` [dim], which starts at 0.
        dtype: of ``weight``.
    """

    def __init__(
        self, dim: int, eps: float = 1e-6, *, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.zeros(dim, device=device, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        """[..., dim] of any float type; the result is float32."""
        return nn.functional.rms_norm(x.float(), self.weight.shape, 1.0 + self.weight.float(), self.eps)

    def extra_repr(self) -> str:
        return f"{self.weight.shape[0]}, eps={self.eps}"


def rotary_angles(positions: Tensor, rotary_dim: int, theta: float) -> tuple[Tensor, Tensor]:
    """Cosine and sine of each token's angles, both [T, rotary_dim / 2] float32, for positions [T]."""
    # Not a buffer: casting the module would round it, and moving it from the meta device would leave it unset.
    exponents = torch.arange(0, rotary_dim, 2, dtype=torch.float32, device=positions.device) / max(rotary_dim, 1)
    angles = positions.float()[:, None] * (1.0 / theta**exponents)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates the first ``2 * cos.shape[-1]`` of x's [T, heads, dim] channels, the first half against the second."""
    half = cos.shape[-1]
    cos, sin = cos[:, None], sin[:, None]
    first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return torch.cat((first * cos - second * sin, second * cos + first * sin, rest), dim=-1)


class AddLoss(torch.autograd.Function):
    """Returns ``out`` as it is; every backward pass through it also adds the scalar ``loss`` to what is minimised.

    The loss then needs no way of its own out of the layer: a checkpoint that keeps nothing but ``out`` loses the graph
    of everything else that its first forward pass made.
    """

    @staticmethod
    def forward(out: Tensor, loss: Tensor) -> Tensor:
        return out.view_as(out)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor, Tensor]:
        return d_out, d_out.new_ones((), dtype=torch.float32)
