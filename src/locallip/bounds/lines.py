"""Two lines for every unit of an activation over its box, seen from the center of the ball.

    phi(c) + lower (y' - c) + bottom  <=  phi(y')  <=  phi(c) + upper (y' - c) + top

A weight g of the output becomes g upper where it is positive and g lower elsewhere, and costs g top or g bottom.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from locallip.activations import Activation, Box, Clip, MaxPool2d, SortPairs
from locallip.bounds.bends import Before, Bend, bends, clipped
from locallip.network import PassThrough
from locallip.rounding import gamma, up

#: Products that underflow lose less than this times the widths they meet (`met`), whatever their number.
DUST = 1e-290


@dataclass(frozen=True)
class Lines:
    """Lines of an activation, or of one of the steps that it is made of; tensors are (B, h), but (B, h') as said.

    lower and upper are slopes; bottom <= 0 <= top (B, h') tell how far the lines are from phi at c; lost (B, h') is what a
    weight of 1 costs in rounding, dust (B,) what any weight does by underflow. `to_inputs` takes weights of h' outputs to h
    inputs, where one output has several. `paired`: h are the sums, then the differences, of the halves of dimension 1.
    """

    lower: Tensor
    upper: Tensor
    bottom: Tensor
    top: Tensor
    lost: Tensor
    dust: Tensor
    paired: bool = False
    to_inputs: Callable[[Tensor], Tensor] | None = None

    @property
    def is_unitwise(self) -> bool:
        return not self.paired and self.to_inputs is None

    def weights(self, units: int) -> tuple[Tensor, Tensor]:
        """What g and |g| are multiplied by in the cost, (B, h') each, with the rounding of sums of so many units.

        g top where g > 0 and g bottom elsewhere is g (top + bottom) / 2 + |g| (top - bottom) / 2.
        """
        middle, half = (self.top + self.bottom) / 2, (self.top - self.bottom) / 2
        return middle, half + self.lost + gamma(units + 16, middle.dtype) * (half + middle.abs())

    def slopes(self) -> tuple[Tensor, Tensor]:
        """What g and |g| are multiplied by on their way to the inputs, (B, h) each."""
        return (self.upper + self.lower) / 2, (self.upper - self.lower) / 2

    def back(self, g: Tensor, some: slice) -> tuple[Tensor, Tensor]:
        """Weights (b, n, h) of the inputs and the cost (b, n) for weights g (b, n, h') of outputs, of the samples `some`."""
        if self.paired:
            first, second = g.chunk(2, dim=2)
            g = torch.cat([first + second, first - second], dim=2) / 2
        size = g.abs()
        (middle, weight), (slope, bend) = self.weights(g.shape[2]), self.slopes()
        cost = summed(size, weight[some]) + torch.bmm(g, middle[some, :, None])[..., 0]
        if self.to_inputs is not None:
            g, size = self.to_inputs(g), self.to_inputs(size)
        h = (g * slope[some, None]).addcmul_(size, bend[some, None])
        if self.paired:
            first, second = h.chunk(2, dim=2)
            h = torch.cat([first + second, first - second], dim=2)
        return h, up(cost.clamp(min=0)) + self.dust[some, None]


def summed(size: Tensor, weight: Tensor) -> Tensor:
    """sum size weight over the units, (b, n), rounded up, for size (b, n, h) and weight (b, h), both >= 0."""
    return up(torch.bmm(size, weight[..., None])[..., 0], 8 + size.shape[2])


def lines_of(activation: Activation, before: Before) -> list[Lines] | None:
    """The steps of an activation between lines, the last first; none for the identity, None for an unknown activation."""
    if isinstance(activation, PassThrough):
        return []
    if isinstance(activation, MaxPool2d):
        return [_pool(activation, before)]
    found = bends(activation, before)
    return None if found is None else [_lines(bend) for bend in found]


def unstable(activation: Activation, box: Box) -> Tensor:
    """The units whose smaller box may bring two lines closer together, (B, *shape)."""
    if isinstance(activation, PassThrough):
        return torch.zeros_like(box.lower, dtype=torch.bool)
    if isinstance(activation, Clip):
        low, high = activation.thresholds(box.lower.dtype)
        return ((box.lower < low) & (box.upper > low)) | ((box.lower < high) & (box.upper > high))
    if isinstance(activation, SortPairs):
        (l1, l2), (u1, u2) = box.lower.chunk(2, dim=1), box.upper.chunk(2, dim=1)
        upper, lower = activation.thresholds(box.lower.dtype)
        bent = (l1 < u2) & (l2 < u1)
        bent = bent | ((torch.maximum(l1, l2) < upper) & (torch.maximum(u1, u2) > upper))
        bent = bent | ((torch.minimum(l1, l2) < lower) & (torch.minimum(u1, u2) > lower))
        return torch.cat([bent, bent], dim=1)
    if isinstance(activation, MaxPool2d):
        return activation.varying(box).inputs
    return box.lower < box.upper


class _Ends(NamedTuple):
    """Slopes and distances of the two lines of a bend, and what a weight costs in rounding on its way through them."""

    lower: Tensor
    upper: Tensor
    bottom: Tensor
    top: Tensor
    lost: Tensor
    width: Tensor


def _ends(bend: Bend) -> _Ends:
    lower, upper = bend.lines()
    bottom, top = bend.rest(lower, True)[0], bend.rest(upper, True)[1]
    bottom, top = (torch.where(bend.straight, 0.0, end) for end in (bottom, top))
    slopes, width = torch.maximum(lower.abs(), upper.abs()), up(bend.width)
    lost = up((1 + slopes) * (gamma(8, lower.dtype) * width + bend.off) + bend.value_off)
    return _Ends(lower, upper, bottom, top, lost, width)


def _lines(bend: Bend) -> Lines:
    lower, upper, bottom, top, lost, width = _ends(bend)
    return Lines(lower, upper, bottom, top, lost, up(DUST * (width + top - bottom).sum(1)), bend.paired)


def _pool(pool: MaxPool2d, before: Before) -> Lines:
    """The maximum of a window is at least the entry that is largest at c, and at most m + sum max(y - m, 0) for any m.

    Three m are tried: the largest of the lower ends, the second largest of the upper ends, and the largest, which leaves a
    constant; each window takes what is lowest at c.
    """
    center, box = before.center, before.box
    top_center, place = F.max_pool2d(center, *pool.geometry, ceil_mode=pool.ceil_mode, return_indices=True)
    largest, where = F.max_pool2d(box.upper, *pool.geometry, ceil_mode=pool.ceil_mode, return_indices=True)
    others = box.upper.flatten(2).scatter(2, where.flatten(2), -float("inf")).reshape(box.upper.shape)
    second = pool(others)
    best: tuple[Tensor, Tensor, Tensor] | None = None
    for middle in (pool(box.lower), torch.where(torch.isfinite(second), second, largest), largest):
        m = pool.to_inputs(middle)
        bend = clipped(before, center, box, before.varying.inputs, m, float("inf"))
        _, upper, _, top, lost, width = _ends(bend)
        over = (center - m).clamp(min=0).flatten(1)
        parts = pool.to_outputs((over + top).reshape(center.shape)) + (middle - top_center)
        sizes = pool.to_outputs((over + top + width).reshape(center.shape)) + middle.abs() + top_center.abs()
        rise = (parts + gamma(64 + pool.window, center.dtype) * sizes).clamp(min=0).flatten(1)
        lost = up(pool.to_outputs(lost.reshape(center.shape)), 8 + pool.window).flatten(1)
        upper = torch.where(pool.used(center), upper.reshape(center.shape), 0.0).flatten(1)
        if best is None:
            best = upper, rise, lost
            continue
        lower_here = rise < best[1]
        inputs = pool.to_inputs(lower_here.reshape(middle.shape)).flatten(1)
        best = (
            torch.where(inputs, upper, best[0]),
            torch.where(lower_here, rise, best[1]),
            torch.maximum(lost, best[2]),
        )
    assert best is not None
    upper, rise, lost = best
    lower = torch.zeros_like(center).flatten(2).scatter(2, place.flatten(2), 1.0).flatten(1)
    width = torch.maximum(box.upper - center, center - box.lower).flatten(1)
    dust = up(DUST * (width.sum(1) + rise.sum(1)))

    def to_inputs(g: Tensor) -> Tensor:
        shaped = g.flatten(0, 1).reshape(-1, *top_center.shape[1:])
        return pool.to_inputs(shaped).reshape(*g.shape[:2], -1)

    return Lines(lower, upper, torch.zeros_like(rise), rise, lost, dust, to_inputs=to_inputs)
