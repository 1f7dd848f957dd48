"""Activations as unit-wise functions, seen from the center of the ball: what any slope leaves of them over the box.

ReLU and its clipped forms are unit-wise. Sorting a pair (y1, y2) leaves y1 + y2 as it is and takes the absolute value of
y1 - y2, which is unit-wise too; a clipped MaxMin is a clip behind that. Around the center c and for any slope alpha

    psi(y') - psi(c) = alpha (y' - c) + r(y'),   |r(y')| <= s |y' - c|   for all y' in the box.

psi is piecewise linear, so r has its ends at the ends of the box and at kinks, and so has (psi(y') - psi(c)) / (y' - c):
it is monotone on every piece, and constant on the one that holds c.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from locallip.activations import Activation, Box, Clip, SortPairs, Varying
from locallip.rounding import gamma, up


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


@dataclass(frozen=True)
class Bend:
    """A unit-wise function psi around c. runs and rises are (P, B, h), radius is (B,), all else (B, h).

    runs = p - c and rises = psi(p) - psi(c) at the ends p of the box and the kinks in it, each rounded once or twice.
    Slopes are sought between low and high, from `middle`, the middle of psi's own. Where `straight`, psi is exactly linear
    over the box, with slope `slope`.
    radius bounds ||y' - c|| over the units where a slope other than psi's own can meet a weight other than zero.
    c itself is off by at most `off`. `paired`: the units are the sums, then the differences, of the halves of dimension 1.
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
    paired: bool = False

    @property
    def width(self) -> Tensor:
        """|y' - c| or larger, (B, h), but for rounding."""
        return self.runs.abs().amax(0)

    def at(self, index: Tensor, dtype: torch.dtype) -> Bend:
        """The samples `index`, in another dtype."""
        runs, rises = (v[:, index].to(dtype) for v in (self.runs, self.rises))
        low, high, middle = (v[index].to(dtype) for v in (self.low, self.high, self.middle))
        slope, radius, off = (v[index].to(dtype) for v in (self.slope, self.radius, self.off))
        return Bend(runs, rises, low, high, middle, self.straight[index], slope, radius, off, self.paired)

    def remainder(self, alpha: Tensor, outward: bool) -> tuple[Tensor, Tensor, Tensor]:
        """s and the ends of r / s for slopes alpha (B, h); all zero where psi is straight with slope alpha."""
        here = self.runs == 0
        away = torch.where(here, 0.0, (self.rises / torch.where(here, 1.0, self.runs) - alpha).abs()).amax(0)
        exact = (self.slope - alpha).abs()
        rest = self.rises - alpha * self.runs
        least, most = rest.amin(0).clamp(max=0), rest.amax(0).clamp(min=0)
        if outward:
            slack = gamma(16, alpha.dtype)
            away, exact = away + slack * (1 + alpha.abs()), up(exact)
            loss = slack * (self.rises.abs() + (alpha * self.runs).abs()).amax(0)
            least, most = least - loss, most + loss
        size = torch.where(self.straight, exact, away)
        zero = size == 0
        divisor = torch.where(zero, 1.0, size)
        least, most = (torch.where(zero, 0.0, end / divisor) for end in (least, most))
        return (size, -up(-least), up(most)) if outward else (size, least, most)


def bends(activation: Activation, before: Before) -> list[Bend] | None:
    """The unit-wise functions of an activation, the last first; None where it is of another kind."""
    if isinstance(activation, Clip):
        return [_clip(before, before.center, before.box, before.varying.inputs, *activation.thresholds(before.center.dtype))]
    if not isinstance(activation, SortPairs):
        return None
    upper, lower = activation.thresholds(before.center.dtype)
    varying = before.varying.inputs.chunk(2, dim=1)[0].flatten(1)
    if not isinstance(upper, Tensor):  # without thresholds
        return [_difference(before, ~varying)]
    center, box = _sorted(before.center), Box(_sorted(before.box.lower), _sorted(before.box.upper))
    half = torch.Size((center.shape[1] // 2, *center.shape[2:]))
    none = torch.full(half, float("inf"), dtype=center.dtype, device=center.device)
    low, high = torch.cat([-none, torch.as_tensor(lower).expand(half)]), torch.cat([upper.expand(half), none])
    last = _clip(before, center, box, before.varying.outputs, low, high)
    dead = last.straight & (last.slope == 0)
    return [last, _difference(before, ~varying & ~(dead.chunk(2, dim=1)[0] & dead.chunk(2, dim=1)[1]))]


def _sorted(z: Tensor) -> Tensor:
    first, second = z.chunk(2, dim=1)
    return torch.cat([torch.maximum(first, second), torch.minimum(first, second)], dim=1)


def _clip(before: Before, center: Tensor, box: Box, varying: Tensor, low: Tensor | float, high: Tensor | float) -> Bend:
    """min(max(y, low), high): slopes between 0 and 1. Rounding may leave c outside the box, which is widened to hold it."""
    shape = center.shape[1:]
    bottom, top = (torch.as_tensor(v, dtype=center.dtype, device=center.device).expand(shape).flatten() for v in (low, high))
    c, lower, upper = center.flatten(1), box.lower.flatten(1), box.upper.flatten(1)
    lower, upper = torch.minimum(lower, c), torch.maximum(upper, c)
    runs, rises = _seen(lambda y: torch.minimum(torch.maximum(y, bottom), top), c, lower, upper, [bottom, top])
    infinite = float("inf")
    constant = ((upper <= bottom) & (upper > -infinite)) | ((lower >= top) & (lower < infinite))
    linear = (lower >= bottom) & (upper <= top)
    radius = _radius(before, torch.maximum(upper - c, c - lower), ~varying.flatten(1) & ~constant)
    slope = (linear & ~constant).to(c.dtype)
    least, most = _slopes(runs, rises, slope)
    zero, high = torch.zeros_like(c), torch.where(constant, 0.0, most)
    return Bend(
        runs, rises, zero, high, torch.where(constant, 0.0, (least + most) / 2), linear | constant, slope, radius, zero
    )


def _difference(before: Before, stray: Tensor) -> Bend:
    """(y1 + y2, |y1 - y2|) of every pair: slope 1, and slopes between -1 and 1; `stray` (B, h / 2) as in `_radius`."""
    (c1, c2), (l1, l2), (u1, u2) = (v.flatten(1).chunk(2, dim=1) for v in (before.center, *before.box))
    width = torch.cat([torch.maximum(u - c, c - v).clamp(min=0) for c, v, u in ((c1, l1, u1), (c2, l2, u2))], dim=1)
    radius = up(2**0.5 * _radius(before, width, torch.cat([stray, stray], dim=1)))  # ||(y1 + y2, y1 - y2)|| = sqrt 2 ||y||
    c, lower, upper, step = c1 - c2, l1 - u2, u1 - l2, gamma(2, width.dtype)
    lower, upper = torch.minimum(lower - step * lower.abs(), c), torch.maximum(upper + step * upper.abs(), c)
    runs, rises = _seen(torch.abs, c, lower, upper, [torch.zeros_like(c)])
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
        paired=True,
    )


def _seen(
    psi: Callable[[Tensor], Tensor], c: Tensor, lower: Tensor, upper: Tensor, kinks: Sequence[Tensor]
) -> tuple[Tensor, Tensor]:
    """Runs and rises from c to the ends of the box and to the kinks, which are moved into the box."""
    points = [lower, upper, *(torch.minimum(torch.maximum(kink, lower), upper) for kink in kinks)]
    at = psi(c)
    return torch.stack([p - c for p in points]), torch.stack([psi(p) - at for p in points])


def _slopes(runs: Tensor, rises: Tensor, own: Tensor) -> tuple[Tensor, Tensor]:
    """The least and the largest slope between c and the points, `own` where a point is c itself."""
    here = runs == 0
    slopes = torch.where(here, own, rises / torch.where(here, 1.0, runs))
    return slopes.amin(0), slopes.amax(0)


def _radius(before: Before, width: Tensor, stray: Tensor) -> Tensor:
    """||y' - c|| over the varying units, and the `stray` ones that only the widened box lets vary, (B,)."""
    roundings = 8 + width.shape[1]
    error = up(before.error.flatten(1).norm(dim=1), roundings)
    return up(before.radius + error + up(torch.where(stray, width, 0.0).norm(dim=1), roundings))
