"""Activations that are the identity between two thresholds and constant outside: ReLU, ReLU-theta, ReLU6, Hardtanh."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from locallip.activations.base import Activation, Box, Hinge, Varying


class ReLUTheta(nn.Module):
    """ReLU with a learnable upper threshold per unit: min(max(z, 0), theta), eq. of ReLU-theta in the paper.

    `shape` is the shape of one sample, without batch. theta is the absolute value of the parameter, so no step of an
    optimizer makes it negative.
    """

    def __init__(self, shape: int | Sequence[int], init: float = 1.0):
        super().__init__()
        if not init >= 0:
            raise ValueError(f"the threshold of ReLUTheta must be >= 0, got init={init}")
        shape = (shape,) if isinstance(shape, int) else tuple(shape)
        self.raw_theta = nn.Parameter(torch.full(shape, float(init)))

    @property
    def theta(self) -> Tensor:
        return self.raw_theta.abs()

    def forward(self, z: Tensor) -> Tensor:
        return torch.minimum(F.relu(z), self.theta)

    def extra_repr(self) -> str:
        return f"shape={tuple(self.raw_theta.shape)}"


class _ClipByte(torch.autograd.Function):
    """min(max(z, low), high), keeping one byte per unit for the backward pass where torch's clamp keeps the input.

    The bound clips center, lower and upper end of every unit, so this is a third of its memory.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(z: Tensor, high: Tensor, low: float) -> tuple[Tensor, Tensor]:
        clipped = torch.clamp(z, z.new_tensor(low), high)
        return clipped, (clipped == z).to(torch.int8) + 2 * (z > high).to(torch.int8)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, float], output: tuple[Tensor, Tensor]) -> None:
        ctx.save_for_backward(output[1])
        ctx.mark_non_differentiable(output[1])
        ctx.high_shape = inputs[1].shape

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Any) -> tuple[Tensor, Tensor | None, None]:
        (code,) = ctx.saved_tensors
        to_high = (grad * (code == 2)).sum_to_size(ctx.high_shape) if ctx.needs_input_grad[1] else None
        return grad * (code == 1), to_high, None


class Clip(Activation):
    """z -> min(max(z, low), high): constant at `low` where upper <= low, at `high` where lower >= high.

    `high(dtype)` gives the upper threshold, a number or one value per unit.
    """

    def __init__(self, low: float, high: Callable[[torch.dtype], Tensor | float]):
        self.low, self._high = low, high

    def __call__(self, z: Tensor) -> Tensor:
        high = self._high(z.dtype)
        high = high if isinstance(high, Tensor) else z.new_tensor(high)
        if not torch.is_grad_enabled():
            return torch.clamp(z, z.new_tensor(self.low), high)
        clipped, _ = _ClipByte.apply(z, high, self.low)
        return clipped

    def image(self, box: Box) -> Box:
        return Box(self(box.lower), self(box.upper))

    def varying(self, box: Box) -> Varying:
        """eq:indicator_relux, negated so that NaN stays varying; an end that overflowed to infinity proves nothing."""
        above = (box.lower >= self._high(box.lower.dtype)) & (box.lower < float("inf"))
        constant = (box.upper <= self.low) | above
        return Varying(~constant, ~constant)

    def hinge(self, box: Box) -> Hinge:
        """max(0, UB) and max(0, theta - LB) of eqn:sparse_loss; no second term without an upper threshold."""
        high = self._high(box.lower.dtype)
        below = (box.upper - self.low).clamp(min=0)
        if not isinstance(high, Tensor) and high == float("inf"):
            return Hinge(below, torch.zeros_like(below))
        return Hinge(below, (high - box.lower).clamp(min=0))


def relu() -> Clip:
    return Clip(0.0, lambda dtype: float("inf"))


def clip(low: float, high: float) -> Clip:
    """Hardtanh and ReLU6."""
    return Clip(low, lambda dtype: high)


def relu_theta(module: ReLUTheta) -> Clip:
    return Clip(0.0, lambda dtype: module.theta.to(dtype))
