"""Activations that are the identity between two thresholds and constant outside: ReLU, ReLU-theta, ReLU6, Hardtanh."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from locallip.activations.base import Box, Hinge, Unitwise, Varying, within


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
    """min(max(z, low), high) of up to four tensors of one shape, keeping one byte per unit for the backward pass.

    Torch's clamp keeps its whole input. The bound clips the center and both ends of every unit, so that would be most of
    what it keeps. The byte holds two bits per tensor: whether z lies between the thresholds, and whether above them.
    """

    @staticmethod
    def forward(low: float, high: Tensor, *values: Tensor) -> tuple[Tensor, ...]:
        clipped = [torch.clamp(z, z.new_full((), low), high) for z in values]
        code = torch.zeros_like(values[0], dtype=torch.uint8)
        for k, (z, inside) in enumerate(zip(values, clipped, strict=True)):
            code.add_((inside == z).view(torch.uint8), alpha=4**k).add_((z > high).view(torch.uint8), alpha=2 * 4**k)
        return (*clipped, code)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.save_for_backward(output[-1])
        ctx.mark_non_differentiable(output[-1])
        ctx.high_shape = inputs[1].shape

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        (code,) = ctx.saved_tensors
        passed, above = [], None
        for k, grad in enumerate(grads[:-1]):
            # On a CPU numbers times numbers are ten times faster than a choice by booleans.
            passed.append((code >> 2 * k & 1).to(grad.dtype).mul_(grad))
            if ctx.needs_input_grad[1]:
                share = (code >> 2 * k + 1 & 1).to(grad.dtype).mul_(grad)
                above = share if above is None else above.add_(share)
        return None, None if above is None else above.sum_to_size(ctx.high_shape), *passed


class Clip(Unitwise):
    """z -> min(max(z, low), high): constant at `low` where upper <= low, at `high` where lower >= high.

    `high(dtype)` gives the upper threshold, a number or one value per unit.
    """

    def __init__(self, low: float, high: Callable[[torch.dtype], Tensor | float]):
        self.low, self._high = low, high

    def thresholds(self, dtype: torch.dtype) -> tuple[float, Tensor | float]:
        """low and high."""
        return self.low, self._high(dtype)

    def _clip(self, *values: Tensor) -> tuple[Tensor, ...]:
        dtype = values[0].dtype
        low, high = within(self.low, dtype), self._high(dtype)
        high = high if isinstance(high, Tensor) else values[0].new_full((), within(high, dtype))
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():  # a compiler chooses itself what to keep
            return _ClipByte.apply(low, high, *values)[:-1]
        return tuple(torch.clamp(z, z.new_full((), low), high) for z in values)

    def __call__(self, z: Tensor) -> Tensor:
        return self._clip(z)[0]

    def image(self, box: Box) -> Box:
        return Box(*self._clip(*box))

    def center_and_image(self, center: Tensor, box: Box) -> tuple[Tensor, Box]:
        center, lower, upper = self._clip(center, *box)
        return center, Box(lower, upper)

    def varying(self, box: Box) -> Varying:
        """eq:indicator_relux, negated so that NaN stays varying; an end that overflowed to infinity proves nothing."""
        high = self._high(box.lower.dtype)
        constant = box.upper <= self.low
        if isinstance(high, Tensor) or high < float("inf"):
            constant = constant | ((box.lower >= high) & (box.lower < float("inf")))
        varying = ~constant
        return Varying(varying, varying)

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
