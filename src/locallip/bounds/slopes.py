"""Activations seen by their slopes: how a change of their input, anywhere in the box, becomes a change of their output.

For all a, b in the box of a unit-wise activation phi(a) - phi(b) = d (a - b) with low <= d <= high, unit by unit; any d will
do where a = b. Sorting a pair takes the changes e1, e2 of its members to p e1 + (1 - p) e2 and (1 - p) e1 + p e2 for some p
between 0 and 1, because y1 + y2 stays as it is and |y1 - y2| has slopes between -1 and 1. The largest of a window changes by
a weighted mean of the changes of those inputs that can be the largest (the mean value theorem for Lipschitz functions,
Clarke 1983). So phi(a) - phi(b) = D (a - b) with a matrix D of known shape, and no derivative needs to exist.

Rows of weights on the output become rows on the input by D^T. They are followed as intervals, entry by entry, or through the
middle M of all D, and then g (D - M) is bounded as a whole.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from locallip.activations import Activation, Box, Clip, Increasing, MaxPool2d, SortPairs, Varying
from locallip.bounds.bends import sorted_pairs
from locallip.network import PassThrough
from locallip.rounding import gamma, up


class Rows(NamedTuple):
    """low <= g <= high for rows g of weights, each (B, r, *shape)."""

    low: Tensor
    high: Tensor


class Slopes(ABC):
    """One step of an activation on B samples: what D can be."""

    @abstractmethod
    def back(self, rows: Rows) -> Rows:
        """Every D^T g for the rows g of weights on the output, rounded outward."""

    @abstractmethod
    def middle(self, g: Tensor) -> Tensor:
        """M^T g for rows g (B, r, *shape), off by gamma(8) of the same for |g|."""

    @abstractmethod
    def stray(self, g: Tensor) -> Tensor:
        """Rows h (B, r, any shape) with ||g (D - M) v|| <= ||h|| ||diag(inputs) v|| for all D and v, but for 8 roundings."""

    def lost(self, g: Tensor) -> Tensor:
        """As `stray`, for the rounding of `middle`."""
        return gamma(8, g.dtype) * self.middle(g.abs())


@dataclass(frozen=True)
class UnitSlopes(Slopes):
    """D is diagonal with entries between low and high, (B, *shape); `inputs` are those of `Varying`."""

    low: Tensor
    high: Tensor
    inputs: Tensor

    def back(self, rows: Rows) -> Rows:
        low, high = self.low[:, None], self.high[:, None]
        least = rows.low * torch.where(rows.low < 0, high, low)
        most = rows.high * torch.where(rows.high > 0, high, low)
        return _outward(least, most, (high == 0) | ((rows.low == 0) & (rows.high == 0)))

    @property
    def _center(self) -> Tensor:
        return (self.low + self.high) / 2

    def middle(self, g: Tensor) -> Tensor:
        return g * self._center[:, None]

    def stray(self, g: Tensor) -> Tensor:
        center = self._center
        reach = up(torch.maximum(self.high - center, center - self.low).clamp(min=0))
        return g * _divided(reach, self.inputs.to(g.dtype))[:, None]

    def lost(self, g: Tensor) -> Tensor:
        return gamma(8, g.dtype) * g.abs() * _divided(self._center, self.inputs.to(g.dtype))[:, None]


@dataclass(frozen=True)
class PairSlopes(Slopes):
    """D takes the halves (e1, e2) to (p e1 + (1 - p) e2, (1 - p) e1 + p e2), low <= p <= high, each (B, half, ...)."""

    low: Tensor
    high: Tensor

    def back(self, rows: Rows) -> Rows:
        ends = [_mixed(value, p) for value in rows for p in (self.low, self.high)]
        least, most = torch.minimum(*ends[:2]), torch.maximum(*ends[2:])
        return _outward(least, most, (least == 0) & (most == 0))

    def middle(self, g: Tensor) -> Tensor:
        return _mixed(g, (self.low + self.high) / 2)

    def stray(self, g: Tensor) -> Tensor:
        """D - M is (p - middle) [[1, -1], [-1, 1]], whose norm is twice that of its first entry."""
        first, second = g.chunk(2, dim=2)
        return (first - second) * (0.5**0.5 * (self.high - self.low))[:, None]


@dataclass(frozen=True)
class WindowSlopes(Slopes):
    """D has weighted means over windows as rows; `candidates` (B, *in_shape) are the inputs that can be the largest.

    `known` (B, *out_shape): where nothing is known of a window, bounds are infinite.
    """

    pool: MaxPool2d
    candidates: Tensor
    known: Tensor

    @property
    def _count(self) -> Tensor:
        return self.pool.to_outputs(self.candidates.double()).clamp(min=1)

    def back(self, rows: Rows) -> Rows:
        seen = Rows(*(self.pool.to_inputs(torch.where(self.known[:, None], value, float("nan"))) for value in rows))
        high = self.candidates.to(rows.low.dtype)
        alone = high * (self.pool.to_inputs(self._count) == 1)
        return UnitSlopes(alone, high, self.candidates).back(seen)

    def middle(self, g: Tensor) -> Tensor:
        share = self.candidates / self.pool.to_inputs(self._count)
        return self.pool.to_inputs(torch.where(self.known[:, None], g, float("nan"))) * share.to(g.dtype)[:, None]

    def stray(self, g: Tensor) -> Tensor:
        """Of all weighted means of n numbers those that take a single one are furthest from the mean: 1 - 1/n, squared."""
        count = self._count
        reach = up(torch.where(count > 1, (1 - 1 / count).sqrt() + torch.finfo(g.dtype).eps, 0.0))
        return g * torch.where(self.known, reach, float("nan")).to(g.dtype)[:, None]


def slopes_of(activation: Activation, box: Box, varying: Varying) -> list[Slopes] | None:
    """The steps of an activation over its box, the last first; none for the identity, None for an unknown activation."""
    # A class that derives from one of these may be another function.
    if type(activation) is PassThrough:
        return []
    if type(activation) is Clip:
        return [_clip_slopes(box, *activation.thresholds(box.lower.dtype), varying.inputs)]
    if isinstance(activation, Increasing):
        high = up(activation.slope(box), 16).clamp(min=1e-30)  # one that underflowed is not zero
        return [UnitSlopes(activation.least_slope(box), high, varying.inputs)]
    if type(activation) is SortPairs:
        return _pair_slopes(activation, box, varying)
    if type(activation) is MaxPool2d:
        largest = activation(box.lower)
        return [WindowSlopes(activation, varying.inputs, torch.isfinite(largest))]
    return None


def _clip_slopes(box: Box, bottom: Tensor | float, top: Tensor | float, inputs: Tensor) -> UnitSlopes:
    """An end that overflowed proves nothing."""
    lower, upper = torch.where(box.lower < float("inf"), box.lower, -float("inf")), box.upper
    upper = torch.where(upper > -float("inf"), upper, float("inf"))
    constant = (upper <= bottom) | (lower >= top)
    linear = (lower >= bottom) & (upper <= top) & ~constant
    return UnitSlopes(linear.to(box.lower.dtype), (~constant).to(box.lower.dtype), inputs)


def _pair_slopes(activation: SortPairs, box: Box, varying: Varying) -> list[Slopes]:
    dtype, infinite = box.lower.dtype, float("inf")
    (l1, l2), (u1, u2) = box.lower.chunk(2, dim=1), box.upper.chunk(2, dim=1)
    first = (l1 >= u2) & (l1 < infinite) & (u2 > -infinite)
    second = (u1 <= l2) & (l2 < infinite) & (u1 > -infinite) & ~first
    pairs = PairSlopes(first.to(dtype), (~second).to(dtype))
    upper, lower = activation.thresholds(dtype)
    if not isinstance(upper, Tensor):  # without thresholds
        return [pairs]
    half = l1.shape[1:]
    none = torch.full(half, infinite, dtype=dtype, device=l1.device)
    bottom, top = (
        torch.cat([-none, torch.as_tensor(lower, device=none.device).expand(half)]),
        torch.cat([upper.expand(half), none]),
    )
    # The sorted changes of a pair are no longer than its changes, so its `inputs` serve both steps.
    ordered = Box(sorted_pairs(box.lower), sorted_pairs(box.upper))
    return [_clip_slopes(ordered, bottom, top, varying.inputs), pairs]


def _mixed(g: Tensor, p: Tensor) -> Tensor:
    """Rows on the sorted pair as rows on the pair."""
    first, second = g.chunk(2, dim=2)
    p = p[:, None]
    return torch.cat([first * p + second * (1 - p), first * (1 - p) + second * p], dim=2)


def _outward(least: Tensor, most: Tensor, zero: Tensor) -> Rows:
    info, step = torch.finfo(least.dtype), gamma(4, least.dtype)
    least, most = least - (step * least.abs() + info.tiny), most + (step * most.abs() + info.tiny)
    return Rows(torch.where(zero, 0.0, least), torch.where(zero, 0.0, most))


def _divided(value: Tensor, weight: Tensor) -> Tensor:
    """value / weight, 0 where the value is: what does not vary needs no weight."""
    return torch.where(value == 0, value, value / weight)
