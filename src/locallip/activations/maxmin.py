"""MaxMin, which sorts pairs of units, and its clipped form with constant regions."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from locallip.activations.base import Activation, Box, Hinge, Varying


def _halves(z: Tensor) -> tuple[Tensor, Tensor]:
    """The two groups x1, x2 of the paper: first and second half of the channels, each (B, C/2, ...)."""
    if z.shape[1] % 2:
        raise ValueError(f"MaxMin pairs channels, so their number must be even; got {z.shape[1]}")
    first, second = z.chunk(2, dim=1)
    return first, second


class MaxMin(nn.Module):
    """(x1, x2) -> (max(x1, x2), min(x1, x2)), the halves of dimension 1: max channels first, then min channels."""

    def forward(self, z: Tensor) -> Tensor:
        first, second = _halves(z)
        return torch.cat([torch.maximum(first, second), torch.minimum(first, second)], dim=1)


class ClippedMaxMin(nn.Module):
    """(x1, x2) -> (min(max(x1, x2), a), max(min(x1, x2), b)) with learnable thresholds a (`upper`) and b (`lower`).

    `shape` is the shape of one half, without batch.
    """

    def __init__(self, shape: int | Sequence[int], upper: float = 1.0, lower: float = -1.0):
        super().__init__()
        shape = (shape,) if isinstance(shape, int) else tuple(shape)
        self.upper = nn.Parameter(torch.full(shape, float(upper)))
        self.lower = nn.Parameter(torch.full(shape, float(lower)))

    def forward(self, z: Tensor) -> Tensor:
        first, second = _halves(z)
        top = torch.minimum(torch.maximum(first, second), self.upper)
        bottom = torch.maximum(torch.minimum(first, second), self.lower)
        return torch.cat([top, bottom], dim=1)

    def extra_repr(self) -> str:
        return f"shape={tuple(self.upper.shape)}"


class SortPairs(Activation):
    """The rule of MaxMin and, with thresholds, of ClippedMaxMin."""

    def __init__(self, module: MaxMin | ClippedMaxMin):
        self.module = module

    def thresholds(self, dtype: torch.dtype) -> tuple[Tensor | float, Tensor | float]:
        """a and b: the upper one of the maximum and the lower one of the minimum."""
        if isinstance(self.module, ClippedMaxMin):
            return self.module.upper.to(dtype), self.module.lower.to(dtype)
        return float("inf"), -float("inf")

    def spread(self, error: Tensor) -> Tensor:
        """Maximum and minimum of two move by no more than the one that moves more."""
        more = torch.maximum(*_halves(error))
        return torch.cat([more, more], dim=1)

    def __call__(self, z: Tensor) -> Tensor:
        first, second = _halves(z)
        upper, lower = self.thresholds(z.dtype)
        top = torch.maximum(first, second).clamp(max=upper)
        bottom = torch.minimum(first, second).clamp(min=lower)
        return torch.cat([top, bottom], dim=1)

    def image(self, box: Box) -> Box:
        """Every output is monotone in every input, so the ends of the box map to the ends of the image."""
        return Box(self(box.lower), self(box.upper))

    def _ends(self, box: Box) -> tuple[Tensor, Tensor]:
        """LB_max and UB_min of the paper, each (B, C/2, ...)."""
        return torch.maximum(*_halves(box.lower)), torch.minimum(*_halves(box.upper))

    def varying(self, box: Box) -> Varying:
        """A column goes when its output is constant; the two rows of a pair only when both outputs are."""
        lowest_max, highest_min = self._ends(box)
        upper, lower = self.thresholds(box.lower.dtype)
        # An end that overflowed to infinity proves nothing.
        top = ~((lowest_max >= upper) & (lowest_max < float("inf")))
        bottom = ~((highest_min <= lower) & (highest_min > -float("inf")))
        either = top | bottom
        return Varying(torch.cat([either, either], dim=1), torch.cat([top, bottom], dim=1))

    def hinge(self, box: Box) -> Hinge:
        """max(0, UB_min - b) and max(0, a - LB_max) of eqn:sparse_loss; zero without thresholds."""
        lowest_max, highest_min = self._ends(box)
        if not isinstance(self.module, ClippedMaxMin):
            return Hinge(torch.zeros_like(lowest_max), torch.zeros_like(lowest_max))
        upper, lower = self.thresholds(box.lower.dtype)
        return Hinge((highest_min - lower).clamp(min=0), (upper - lowest_max).clamp(min=0))
