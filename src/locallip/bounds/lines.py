"""Two lines for every unit of an activation over its box, seen from the center of the ball.

    phi(c) + below.slope (y' - c) - below.gap  <=  phi(y')  <=  phi(c) + above.slope (y' - c) + above.gap

A weight g of the output becomes g above.slope where it is positive and g below.slope elsewhere, and costs |g| times the gap.
The units of a stage cannot all be at the ends of their boxes, where the gaps are: what is left of phi besides a line is at
most `size` |y' - c|, and the y' - c of all units lie in a ball. So the costs together are at most those over box and ball.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from locallip.activations import Activation, Box, Clip, MaxPool2d, SortPairs
from locallip.bounds.bend import Before, Bend
from locallip.bounds.bends import bends, clipped
from locallip.network import PassThrough
from locallip.rounding import gamma, up

#: Products that underflow lose less than this times the widths they meet (`met`), whatever their number.
DUST = 1e-290
#: Steps of the multiplier where a box cuts a ball: any number gives a bound.
STEPS = 2


class Side(NamedTuple):
    """The lines on one side: slope (B, h); the gap is at most size times t, 0 <= t <= cap, both (B, h')."""

    slope: Tensor
    size: Tensor
    cap: Tensor


@dataclass(frozen=True)
class Lines:
    """Lines of an activation with h inputs and h' outputs, or of one of the steps that it is made of.

    The t of all units together are no longer than radius (B,), None where no ball is known. lost (B, h') is what a weight of
    1 costs in rounding, dust (B,) what any weight does by underflow. `to_inputs` takes weights of h' outputs to h inputs,
    where one output has several. `paired`: the units are the sums, then the differences, of the halves of dimension 1.
    """

    below: Side
    above: Side
    radius: Tensor | None
    lost: Tensor
    dust: Tensor
    paired: bool = False
    to_inputs: Callable[[Tensor], Tensor] | None = None

    @property
    def is_unitwise(self) -> bool:
        return not self.paired and self.to_inputs is None

    def back(self, g: Tensor, some: slice) -> tuple[Tensor, Tensor]:
        """Weights (b, n, h) of the inputs and the cost (b, n) for weights g (b, n, h') of outputs, of the samples `some`."""
        if self.paired:
            first, second = g.chunk(2, dim=2)
            g = torch.cat([first + second, first - second], dim=2) / 2
        below, above = (Side(*(values[some, None] for values in side)) for side in (self.below, self.above))
        size = g.abs()
        radius = None if self.radius is None else self.radius[some, None]
        cost = gaps(g, below, above, radius) + summed(size, self.lost[some]) + self.dust[some, None]
        h = g if self.to_inputs is None else self.to_inputs(g)
        h = h * torch.where(h > 0, above.slope, below.slope)
        if self.paired:
            first, second = h.chunk(2, dim=2)
            h = torch.cat([first + second, first - second], dim=2)
        return h, cost


def gaps(g: Tensor, below: Side, above: Side, radius: Tensor | None) -> Tensor:
    """sum |g| size t at most, (b, n), rounded up, for weights g (b, n, h), sides that fit them, and radius (b, 1)."""
    if radius is None:
        down, rise = (up(side.size * side.cap) for side in (below, above))
        # |g| down where g < 0 and |g| rise where g > 0.
        half = [_weighed(g.clamp(min=0), rise), _weighed((-g).clamp(min=0), down)]
        return half[0] + half[1] + up(DUST * (down + rise).sum(2), 8 + g.shape[2])
    size, cap = (torch.where(g > 0, up_, down) for up_, down in zip(above[1:], below[1:], strict=True))
    return up(_reached(g.abs() * size, cap, radius).clamp(min=0)) + up(DUST * cap.sum(2), 8 + g.shape[2])


def _reached(d: Tensor, cap: Tensor, radius: Tensor) -> Tensor:
    """max d . t over 0 <= t <= cap, ||t|| <= radius, or larger, (b, n), for d >= 0: `support`, with less to do per unit."""
    tiny = torch.finfo(d.dtype).tiny ** 0.5
    mu = radius / d.norm(dim=2).clamp(min=tiny)
    for _ in range(STEPS):
        t = mu[..., None] * d
        a = torch.where(t < cap, d, 0.0).square().sum(2)
        b = torch.minimum(t, cap).square().sum(2) - mu.square() * a
        root = ((radius.square() - b).clamp(min=0) / a.clamp(min=tiny)).sqrt()
        mu = torch.where(a > tiny, torch.maximum(mu, root), mu)
    mu = mu.clamp(min=tiny)
    t = torch.minimum(mu[..., None] * d, cap)
    share, gain, square = radius.square() / (2 * mu), (d * t).sum(2), t.square().sum(2) / (2 * mu)
    slack = gamma(d.shape[2] + 16, d.dtype)
    dual = share + gain - square + slack * (share + gain + square)
    return torch.minimum(dual, (d * cap).sum(2) * (1 + slack))


def summed(size: Tensor, weight: Tensor) -> Tensor:
    """sum size weight over the units, (b, n), rounded up, for size (b, n, h) and weight (b, h), both >= 0."""
    return up(torch.bmm(size, weight[..., None])[..., 0], 8 + size.shape[2])


def _weighed(size: Tensor, weight: Tensor) -> Tensor:
    """As `summed`, for weight (b, 1, h)."""
    return summed(size, weight[:, 0])


def lines_of(activation: Activation, before: Before) -> list[Lines] | None:
    """The steps of an activation between lines, the last first; none for the identity, None for an unknown activation."""
    if type(activation) is MaxPool2d:
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


def _lines(bend: Bend) -> Lines:
    lower, upper = bend.lines()
    down, least, _ = bend.remainder(lower, True)
    above, _, most = bend.remainder(upper, True)
    width = up(bend.width)
    dust = up(DUST * (width + most - least).sum(1), 8 + width.shape[1])
    return Lines(
        Side(lower, down, -least), Side(upper, above, most), bend.radius, _lost(bend, lower, upper), dust, bend.paired
    )


def _lost(bend: Bend, lower: Tensor, upper: Tensor) -> Tensor:
    """What a weight of 1 costs in rounding on its way through lines with these slopes."""
    slopes = torch.maximum(lower.abs(), upper.abs())
    return up((1 + slopes) * (gamma(8, lower.dtype) * up(bend.width) + bend.off) + bend.value_off)


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
        slope = bend.lines()[1]
        top, lost, width = bend.rest(slope, True)[1], _lost(bend, slope, slope), up(bend.width)
        over = (center - m).clamp(min=0).flatten(1)
        parts = pool.to_outputs((over + top).reshape(center.shape)) + (middle - top_center)
        sizes = pool.to_outputs((over + top + width).reshape(center.shape)) + middle.abs() + top_center.abs()
        rise = (parts + gamma(64 + pool.window, center.dtype) * sizes).clamp(min=0).flatten(1)
        lost = up(pool.to_outputs(lost.reshape(center.shape)), 8 + pool.window).flatten(1)
        slope = torch.where(pool.used(center), slope.reshape(center.shape), 0.0).flatten(1)
        if best is None:
            best = slope, rise, lost
            continue
        lower_here = rise < best[1]
        inputs = pool.to_inputs(lower_here.reshape(middle.shape)).flatten(1)
        best = (
            torch.where(inputs, slope, best[0]),
            torch.where(lower_here, rise, best[1]),
            torch.maximum(lost, best[2]),
        )
    assert best is not None
    slope, rise, lost = best
    lower = torch.zeros_like(center).flatten(2).scatter(2, place.flatten(2), 1.0).flatten(1)
    width = torch.maximum(box.upper - center, center - box.lower).flatten(1)
    dust = up(DUST * (width.sum(1) + rise.sum(1)))

    def to_inputs(g: Tensor) -> Tensor:
        shaped = g.flatten(0, 1).reshape(-1, *top_center.shape[1:])
        return pool.to_inputs(shaped).reshape(*g.shape[:2], -1)

    none, one = torch.zeros_like(rise), torch.ones_like(rise)
    return Lines(Side(lower, none, none), Side(slope, one, rise), None, lost, dust, to_inputs=to_inputs)
