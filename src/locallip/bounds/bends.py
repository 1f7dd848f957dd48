"""Activations as unit-wise functions, seen from the center of the ball: what any slope leaves of them over the box.

ReLU and its clipped forms are unit-wise. Sorting a pair (y1, y2) leaves y1 + y2 as it is and takes the absolute value of
y1 - y2, which is unit-wise too; a clipped MaxMin is a clip behind that. Around the center c and for any slope alpha

    psi(y') - psi(c) = alpha (y' - c) + r(y'),   |r(y')| <= s |y' - c|   for all y' in the box.

Where psi is piecewise linear, r has its ends at the ends of the box and at kinks, and so has (psi(y') - psi(c)) / (y' - c):
it is monotone on every piece, and constant on the one that holds c. Where psi is curved, r lies below any of its tangents on
a concave piece and above on a convex one, and that quotient lies between the least and the largest slope.

From r follow the two lines of linear relaxation: psi(c) + alpha (y' - c) + max r from above, and with min r from below.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations
from typing import TypeVar

import torch
from torch import Tensor

from locallip.activations import Activation, Box, Clip, Increasing, SortPairs, Varying
from locallip.network import PassThrough
from locallip.rounding import gamma, raised, up

T = TypeVar("T", Tensor, Tensor | None)
#: Steps that look for the slope of a line over a curve, and what each leaves of the interval: the golden section.
GOLDEN_STEPS, GOLDEN = 24, (5**0.5 - 1) / 2
#: Parts of equal length that branches may cut a curve into, beside its kinks.
CURVE_PARTS = 8


def taken(value: T, index: Tensor) -> T:
    """The samples `index` of something per sample (B, ...); what is the same for all, (1, ...), stays, and so does None."""
    return value if value is None or len(value) == 1 else value[index]


@dataclass(frozen=True)
class Before:
    """What is known before an activation: c (B, *shape), numbers within `error` of y(x), the box, and the masks behind it.

    The activation maps c to the center behind it without rounding. radius (B,) bounds ||diag(inputs) (y(x') - y(x))||.
    """

    center: Tensor
    error: Tensor
    box: Box
    varying: Varying
    radius: Tensor

    def of(self, index: Tensor) -> Before:
        """The same of the samples `index`."""
        (center, error, radius), (lower, upper), (inputs, outputs) = (
            [taken(value, index) for value in values]
            for values in ((self.center, self.error, self.radius), self.box, self.varying)
        )
        return Before(center, error, Box(lower, upper), Varying(inputs, outputs), radius)


@dataclass(frozen=True)
class Bend:
    """A unit-wise function psi around c. runs and rises are (P, B, h), radius is (B,), all else (B, h).

    runs = p - c and rises = psi(p) - psi(c) at the ends p of the box and the kinks in it, each rounded once or twice.
    Slopes are sought between low and high, from `middle`, the middle of psi's own. Where `straight`, psi is exactly linear
    over the box, with slope `slope`.
    radius bounds ||y' - c|| over the units where a slope other than psi's own can meet a weight other than zero.
    c itself is off by at most `off`, and psi(c) as it was computed by at most `value_off`.
    `paired`: the units are the sums, then the differences, of the halves of dimension 1. `cut`: the box is a part of the
    one around c, and c may lie outside it.
    """

    runs: Tensor
    rises: Tensor
    low: Tensor
    high: Tensor
    middle: Tensor
    straight: Tensor
    slope: Tensor
    radius: Tensor
    off: Tensor
    value_off: Tensor
    paired: bool = False
    cut: bool = False

    @property
    def width(self) -> Tensor:
        """|y' - c| or larger, (B, h), but for rounding."""
        return self.runs.abs().amax(0)

    def at(self, index: Tensor, dtype: torch.dtype) -> Bend:
        """The samples `index`, in another dtype."""
        found = {name: getattr(self, name)[index].to(dtype) for name in self._per_sample}
        found |= {name: getattr(self, name)[:, index].to(dtype) for name in self._per_point}
        return replace(self, straight=self.straight[index], **found)

    @property
    def _per_sample(self) -> tuple[str, ...]:
        return ("low", "high", "middle", "slope", "radius", "off", "value_off")

    @property
    def _per_point(self) -> tuple[str, ...]:
        return ("runs", "rises")

    def only(self, units: Tensor) -> Bend:
        """The units (u,) by their number."""
        names = [name for name in (*self._per_sample, *self._per_point, "straight") if name != "radius"]
        return replace(self, **{name: getattr(self, name)[..., units] for name in names})

    def with_cuts(self) -> Bend:
        """With all points at which branches may cut it; kinks are points already."""
        return self

    def between(self, first: Tensor, last: Tensor) -> Bend:
        """psi over the part of every unit's box between two of its points, given by their numbers (B, h).

        The points are those of runs: the ends of the box and the kinks. On a part without a kink inside psi has one slope.
        """
        (low, floor), (high, top) = (
            tuple(_numbered(values, which) for values in (self.runs, self.rises)) for which in (first, last)
        )
        below, above = self.runs < low, self.runs > high
        runs = torch.where(below, low, torch.where(above, high, self.runs))
        rises = torch.where(below, floor, torch.where(above, top, self.rises))
        bent = ((runs > low) & (runs < high)).any(0) | ((first == 0) & (last == 1))
        # Slopes of all that has kinks are whole numbers; another would be valid too.
        slope = torch.round((top - floor) / torch.where(high > low, high - low, 1.0))
        low, high, middle = (torch.where(bent, slopes, slope) for slopes in (self.low, self.high, self.middle))
        return replace(self, runs=runs, rises=rises, low=low, high=high, middle=middle, cut=True)

    def rest(self, alpha: Tensor, outward: bool) -> tuple[Tensor, Tensor]:
        """The ends of r for slopes alpha (B, h), or wider; 0 lies between them where the box holds c."""
        rest = self.rises - alpha * self.runs
        least, most = rest.amin(0), rest.amax(0)
        if not self.cut:
            least, most = least.clamp(max=0), most.clamp(min=0)
        if not outward:
            return least, most
        loss = gamma(16, alpha.dtype) * (self.rises.abs() + (alpha * self.runs).abs()).amax(0)
        return least - loss, most + loss

    def remainder(self, alpha: Tensor, outward: bool) -> tuple[Tensor, Tensor, Tensor]:
        """s and the ends of r / s for slopes alpha (B, h); all zero where psi is straight with slope alpha."""
        least, most = self.rest(alpha, outward)
        size = self._size(alpha, outward)
        zero = size == 0
        divisor = torch.where(zero, 1.0, size)
        least, most = (torch.where(zero, 0.0, end / divisor) for end in (least, most))
        return (size, -raised(-least), raised(most)) if outward else (size, least, most)

    def _size(self, alpha: Tensor, outward: bool) -> Tensor:
        """s: how far the slope from c to any y' is from alpha."""
        here = self.runs == 0
        away = torch.where(here, 0.0, (self.rises / torch.where(here, 1.0, self.runs) - alpha).abs()).amax(0)
        exact = (self.slope - alpha).abs()
        if outward:
            away, exact = away + gamma(16, alpha.dtype) * (1 + alpha.abs()), up(exact)
        return torch.where(self.straight, exact, away)

    def lines(self) -> tuple[Tensor, Tensor]:
        """Slopes (B, h) of the lines below and above psi that are closest to it on the whole; its own where it is straight.

        The area between a line and psi over the box is least where the line is closest in the middle of the box. Such a line
        touches two of the points.
        """
        middle = (self.runs.amin(0) + self.runs.amax(0)) / 2
        below = above = self.slope
        least, most = self._in_the_middle(self.slope, middle)
        for i, j in combinations(range(len(self.runs)), 2):
            run = self.runs[i] - self.runs[j]
            flat = run == 0
            alpha = torch.where(flat, self.slope, (self.rises[i] - self.rises[j]) / torch.where(flat, 1.0, run))
            low, high = self._in_the_middle(alpha, middle)
            below, least = torch.where(low > least, alpha, below), torch.maximum(low, least)
            above, most = torch.where(high < most, alpha, above), torch.minimum(high, most)
        return torch.where(self.straight, self.slope, below), torch.where(self.straight, self.slope, above)

    def _in_the_middle(self, alpha: Tensor, run: Tensor) -> tuple[Tensor, Tensor]:
        """How far the lines of slope alpha below and above are from psi(c), `run` away from c."""
        least, most = self.rest(alpha, False)
        return least + alpha * run, most + alpha * run


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
        runs, rises = _seen(self.activation, self.center, points)
        return replace(self, points=points, runs=runs, rises=rises)

    def between(self, first: Tensor, last: Tensor) -> Curved:
        """psi over a part, as for any other; its slopes there lie between the least and the largest."""
        part = super().between(first, last)
        assert isinstance(part, Curved)
        start, end = _numbered(self.points, first), _numbered(self.points, last)
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
            tilt = self.activation.derivative(t) - alpha
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
            for _ in range(GOLDEN_STEPS):
                left, right = high - GOLDEN * (high - low), low + GOLDEN * (high - low)
                here, there = (self._in_the_middle(alpha, middle)[which] for alpha in (left, right))
                better = sign * here < sign * there
                low, high = torch.where(better, low, left), torch.where(better, right, high)
            found.append((low + high) / 2)
        return torch.where(self.straight, self.slope, found[0]), torch.where(self.straight, self.slope, found[1])


def bends(activation: Activation, before: Before) -> list[Bend] | None:
    """The unit-wise functions of an activation, the last first; none for the identity, None where it is of another kind."""
    # A class that derives from one of these may be another function.
    if type(activation) is PassThrough:
        return []
    if type(activation) is Clip:
        return [
            clipped(before, before.center, before.box, before.varying.inputs, *activation.thresholds(before.center.dtype))
        ]
    if isinstance(activation, Increasing):
        return [_curved(before, activation)] if vars(type(activation)).get("curves") is not None else None
    if type(activation) is not SortPairs:
        return None
    upper, lower = activation.thresholds(before.center.dtype)
    varying = before.varying.inputs.chunk(2, dim=1)[0].flatten(1)
    if not isinstance(upper, Tensor):  # without thresholds
        return [_difference(before, ~varying)]
    center, box = sorted_pairs(before.center), Box(sorted_pairs(before.box.lower), sorted_pairs(before.box.upper))
    half = torch.Size((center.shape[1] // 2, *center.shape[2:]))
    none = torch.full(half, float("inf"), dtype=center.dtype, device=center.device)
    low, high = (
        torch.cat([-none, torch.as_tensor(lower, device=none.device).expand(half)]),
        torch.cat([upper.expand(half), none]),
    )
    last = clipped(before, center, box, before.varying.outputs, low, high)
    dead = last.straight & (last.slope == 0)
    return [last, _difference(before, ~varying & ~(dead.chunk(2, dim=1)[0] & dead.chunk(2, dim=1)[1]))]


def sorted_pairs(z: Tensor) -> Tensor:
    first, second = z.chunk(2, dim=1)
    return torch.cat([torch.maximum(first, second), torch.minimum(first, second)], dim=1)


def clipped(before: Before, center: Tensor, box: Box, varying: Tensor, low: Tensor | float, high: Tensor | float) -> Bend:
    """min(max(y, low), high), thresholds of any shape that fits: slopes between 0 and 1.

    Rounding may leave c outside the box, which is widened to hold it.
    """
    bottom, top = (
        torch.as_tensor(v, dtype=center.dtype, device=center.device).expand_as(center).flatten(1) for v in (low, high)
    )
    c, lower, upper = center.flatten(1), box.lower.flatten(1), box.upper.flatten(1)
    lower, upper = torch.minimum(lower, c), torch.maximum(upper, c)
    infinite = float("inf")
    kinks = [kink for kink, given in ((bottom, low), (top, high)) if isinstance(given, Tensor) or abs(given) < infinite]
    runs, rises = _seen(lambda y: torch.minimum(torch.maximum(y, bottom), top), c, _points(lower, upper, kinks))
    constant = ((upper <= bottom) & (upper > -infinite)) | ((lower >= top) & (lower < infinite))
    linear = (lower >= bottom) & (upper <= top)
    radius = _radius(before, torch.maximum(upper - c, c - lower), ~varying.flatten(1) & ~constant)
    slope = (linear & ~constant).to(c.dtype)
    least, most = _slopes(runs, rises, slope)
    zero, high = torch.zeros_like(c), torch.where(constant, 0.0, most)
    return Bend(
        runs,
        rises,
        zero,
        high,
        torch.where(constant, 0.0, (least + most) / 2),
        linear | constant,
        slope,
        radius,
        zero,
        zero,
    )


def _curved(before: Before, activation: Increasing) -> Curved:
    """An increasing psi, which its computation may leave a little off everywhere."""
    c, lower, upper = before.center.flatten(1), before.box.lower.flatten(1), before.box.upper.flatten(1)
    lower, upper = torch.minimum(lower, c), torch.maximum(upper, c)
    points = _points(lower, upper, [torch.full_like(c, kink) for kink in activation.kinks])
    runs, rises = _seen(activation, c, points)
    slope = activation.slope(Box(lower, upper))
    high = up(slope, 16).clamp(min=1e-30)  # one that underflowed is not zero
    # Without curves it is linear on either side of its kinks.
    crossed = [(lower < kink) & (upper > kink) for kink in activation.kinks]
    straight = torch.zeros_like(c, dtype=torch.bool) if activation.curves else ~torch.stack(crossed).any(0)
    weight = before.varying.inputs.flatten(1)
    radius = _radius(before, torch.zeros_like(c), torch.zeros_like(straight), up(weight.amax(1)))
    least, most = _slopes(runs, rises, high)
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


def _difference(before: Before, stray: Tensor) -> Bend:
    """(y1 + y2, |y1 - y2|) of every pair: slope 1, and slopes between -1 and 1; `stray` (B, h / 2) as in `_radius`."""
    (c1, c2), (l1, l2), (u1, u2) = (v.flatten(1).chunk(2, dim=1) for v in (before.center, *before.box))
    width = torch.cat([torch.maximum(u - c, c - v).clamp(min=0) for c, v, u in ((c1, l1, u1), (c2, l2, u2))], dim=1)
    radius = up(2**0.5 * _radius(before, width, torch.cat([stray, stray], dim=1)))  # ||(y1 + y2, y1 - y2)|| = sqrt 2 ||y||
    c, lower, upper, step = c1 - c2, l1 - u2, u1 - l2, gamma(2, width.dtype)
    lower, upper = torch.minimum(lower - step * lower.abs(), c), torch.maximum(upper + step * upper.abs(), c)
    runs, rises = _seen(torch.abs, c, _points(lower, upper, [torch.zeros_like(c)]))
    linear, slope = (lower >= 0) | (upper <= 0), torch.where(lower >= 0, 1.0, -1.0).to(c.dtype)
    least, most = _slopes(runs, rises, slope)
    ends = torch.stack([-width, width, 0 * width]).unflatten(2, (2, -1)).sum(2)
    one, zero = torch.ones_like(c), torch.zeros_like(c)

    def both(of_sum: Tensor, of_difference: Tensor) -> Tensor:
        return torch.cat([of_sum, of_difference], dim=-1)

    return Bend(
        both(ends, runs),
        both(ends, rises),
        both(one, least.clamp(max=0)),
        both(one, most.clamp(min=0)),
        both(one, (least + most) / 2),
        both(one.bool(), linear),
        both(one, slope),
        radius,
        both(zero, gamma(2, c.dtype) * c.abs()),
        both(zero, zero),
        paired=True,
    )


def _points(lower: Tensor, upper: Tensor, kinks: Sequence[Tensor]) -> Tensor:
    """The ends of the box and the kinks, which are moved into the box, (P, B, h)."""
    return torch.stack([lower, upper, *(torch.minimum(torch.maximum(kink, lower), upper) for kink in kinks)])


def _seen(psi: Callable[[Tensor], Tensor], c: Tensor, points: Tensor) -> tuple[Tensor, Tensor]:
    """Runs and rises from c to points (P, B, h)."""
    at = psi(c)
    return torch.stack([p - c for p in points]), torch.stack([psi(p) - at for p in points])


def _numbered(values: Tensor, which: Tensor) -> Tensor:
    """The values (P, B, h) of the points with the numbers (B, h)."""
    return values.gather(0, which.long()[None])[0]


def _slopes(runs: Tensor, rises: Tensor, own: Tensor) -> tuple[Tensor, Tensor]:
    """The least and the largest slope between c and the points, `own` where a point is c itself."""
    here = runs == 0
    slopes = torch.where(here, own, rises / torch.where(here, 1.0, runs))
    return slopes.amin(0), slopes.amax(0)


def _radius(before: Before, width: Tensor, stray: Tensor, weight: Tensor | float = 1.0) -> Tensor:
    """||y' - c|| over the varying units, and the `stray` ones that only the widened box lets vary, (B,).

    `weight` (B,) is the largest of the varying units' weights, by which the radius is measured.
    """
    roundings = 8 + width.shape[1]
    error = up(weight * up(before.error.flatten(1).norm(dim=1), roundings))
    return up(before.radius + error + up(torch.where(stray, width, 0.0).norm(dim=1), roundings))
