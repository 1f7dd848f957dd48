"""Curves as unit-wise functions: Tanh, Sigmoid, ELU and Softplus, and LeakyReLU, which lets no unit stand still either.

Where psi is curved, what a slope leaves of it lies below any of its tangents on a concave piece and above on a convex one,
and the slope from c to any point lies between the least and the largest slope.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from locallip.activations import Box, Increasing
from locallip.bounds.bend import Before, Bend, box_points, numbered, radius_of, seen_from, slopes_from
from locallip.rounding import gamma, up

#: Steps that look for the slope of a line over a curve, and what each leaves of the interval: the golden section.
GOLDEN_STEPS, GOLDEN = 24, (5**0.5 - 1) / 2
#: Parts of equal length that branches may cut a curve into, beside its kinks.
CURVE_PARTS = 8


@dataclass(frozen=True)
class Curved(Bend):
    """A psi that its computation leaves a little off, with curved pieces or without; no slope is below 0.

    center, lower and upper (B, h) are c and the ends of the box, points (P, B, h) what runs and rises are of. The part that
    is looked at reaches from start to end. No slope in the box is above `steepest`; `radius` bounds ||weight * (y' - c)||.
    """

    activation: Increasing = field(kw_only=True)
    center: Tensor = field(kw_only=True)
    lower: Tensor = field(kw_only=True)
    upper: Tensor = field(kw_only=True)
    start: Tensor = field(kw_only=True)
    end: Tensor = field(kw_only=True)
    steepest: Tensor = field(kw_only=True)
    weight: Tensor = field(kw_only=True)
    points: Tensor = field(kw_only=True)

    @property
    def _per_sample(self) -> tuple[str, ...]:
        return (*super()._per_sample, "center", "lower", "upper", "start", "end", "steepest", "weight")

    @property
    def _per_point(self) -> tuple[str, ...]:
        return (*super()._per_point, "points")

    def with_cuts(self) -> Curved:
        """Curves are cut at their kinks, and at points at equal distances; all else at its kinks."""
        if not self.activation.curves:
            return self
        shares = torch.arange(1, CURVE_PARTS, dtype=self.lower.dtype, device=self.lower.device) / CURVE_PARTS
        between = self.lower + shares[:, None, None] * (self.upper - self.lower)
        points = torch.cat([self.points, torch.minimum(torch.maximum(between, self.lower), self.upper)])
        runs, rises = seen_from(self.activation, self.center, points)
        return replace(self, points=points, runs=runs, rises=rises)

    def between(self, first: Tensor, last: Tensor) -> Curved:
        """psi over a part, as for any other; its slopes there lie between the least and the largest."""
        part = super().between(first, last)
        assert isinstance(part, Curved)
        start, end = numbered(self.points, first), numbered(self.points, last)
        low, high = self.activation.least_slope(Box(start, end)), self.activation.slope(Box(start, end))
        return replace(part, start=start, end=end, low=low, high=high, middle=(low + high) / 2)

    def rest(self, alpha: Tensor, outward: bool) -> tuple[Tensor, Tensor]:
        """On a curved piece r lies on one side of its tangent at any point t; t near the end of r gives the best one."""
        least, most = super().rest(alpha, outward)
        origin, loss = self.activation(self.center), torch.zeros_like(alpha)
        if outward:
            # Values are off by a few roundings of themselves, or of their argument; slopes by more, as the product in
            # Softplus is rounded before the exponential, which makes up to 745 times as much of it. c may lie anywhere in
            # the box, so a part of it loses as much as all of it.
            ends, slopes = torch.stack([self.lower, self.upper]), self.steepest + alpha.abs()
            loss = gamma(32, alpha.dtype) * (self.activation(ends).abs().amax(0) + slopes * ends.abs().amax(0))
            least, most = least - loss, most + loss
            loss = loss + gamma(2048, alpha.dtype) * slopes * (self.upper - self.lower)
        for curve in self.activation.curves or ():
            start, end = (torch.clamp(self.start.new_full((), v), self.start, self.end) for v in (curve.start, curve.end))
            t = torch.clamp(self.activation.with_slope(alpha.detach(), curve), start, end)
            here = self.activation(t) - origin - alpha * (t - self.center)
            # It is 0 but for rounding, which would decide between its gradients: that of `here` is the whole one.
            tilt = (self.activation.derivative(t) - alpha).detach()
            ends = torch.stack([tilt * (start - t), tilt * (end - t)])
            if curve.convex:
                least = torch.minimum(least, here + ends.amin(0).clamp(max=0) - loss)
            else:
                most = torch.maximum(most, here + ends.amax(0).clamp(min=0) + loss)
        return least, most

    def _size(self, alpha: Tensor, outward: bool) -> Tensor:
        """Every slope between c and a point lies between 0 and the steepest, also where the point is in another part.

        The radius is that of weight * (y' - c), so s is divided by the weight.
        """
        size = torch.where(self.straight, (self.slope - alpha).abs(), torch.maximum(self.steepest - alpha, alpha))
        return up(size / self.weight) if outward else size / self.weight

    def lines(self) -> tuple[Tensor, Tensor]:
        """The ends of r are convex and concave functions of alpha, so a golden section finds the best slopes."""
        found, middle = [], (self.runs.amin(0) + self.runs.amax(0)) / 2
        for which, sign in ((0, -1.0), (1, 1.0)):
            low, high = self.low, self.high
            left, right = high - GOLDEN * (high - low), low + GOLDEN * (high - low)
            here, there = (sign * self._in_the_middle(alpha, middle)[which] for alpha in (left, right))
            for _ in range(GOLDEN_STEPS - 1):  # one of the two points is the other one of the next step
                better = here < there
                low, high = torch.where(better, low, left), torch.where(better, right, high)
                new = torch.where(better, high - GOLDEN * (high - low), low + GOLDEN * (high - low))
                fresh = sign * self._in_the_middle(new, middle)[which]
                left, right = torch.where(better, new, right), torch.where(better, left, new)
                here, there = torch.where(better, fresh, there), torch.where(better, here, fresh)
            found.append(torch.where(here < there, left, right))
        return torch.where(self.straight, self.slope, found[0]), torch.where(self.straight, self.slope, found[1])


def curved(before: Before, activation: Increasing) -> Curved:
    """An increasing psi, which its computation may leave a little off everywhere."""
    c, lower, upper = before.center.flatten(1), before.box.lower.flatten(1), before.box.upper.flatten(1)
    lower, upper = torch.minimum(lower, c), torch.maximum(upper, c)
    points = box_points(lower, upper, [torch.full_like(c, kink) for kink in activation.kinks])
    runs, rises = seen_from(activation, c, points)
    slope = activation.slope(Box(lower, upper))
    high = up(slope, 16).clamp(min=1e-30)  # one that underflowed is not zero
    # Without curves it is linear on either side of its kinks.
    crossed = [(lower < kink) & (upper > kink) for kink in activation.kinks]
    straight = torch.zeros_like(c, dtype=torch.bool) if activation.curves else ~torch.stack(crossed).any(0)
    weight = before.varying.inputs.flatten(1)
    radius = radius_of(before, torch.zeros_like(c), torch.zeros_like(straight), up(weight.amax(1)))
    least, most = slopes_from(runs, rises, high)
    value_off = gamma(32, c.dtype) * (activation(c).abs() + high * c.abs()) + torch.finfo(c.dtype).tiny
    zero = torch.zeros_like(c)
    return Curved(
        runs,
        rises,
        zero,
        high,
        ((least + most) / 2).clamp(max=high),
        straight,
        slope,
        radius,
        zero,
        value_off,
        activation=activation,
        center=c,
        lower=lower,
        upper=upper,
        start=lower,
        end=upper,
        steepest=high,
        weight=weight,
        points=points,
    )
