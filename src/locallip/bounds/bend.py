"""A unit-wise function, seen from the center of the ball: what any slope leaves of it over the box, or over a part of it.

Around the center c and for any slope alpha

    psi(y') - psi(c) = alpha (y' - c) + r(y'),   |r(y')| <= s |y' - c|   for all y' in the box.

Where psi is piecewise linear, r has its ends at the ends of the box and at kinks, and so has (psi(y') - psi(c)) / (y' - c):
it is monotone on every piece, and constant on the one that holds c.

From r follow the two lines of linear relaxation: psi(c) + alpha (y' - c) + max r from above, and with min r from below.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import TypeVar

import torch
from torch import Tensor

from locallip.activations import Box, Varying
from locallip.rounding import gamma, raised, up

T = TypeVar("T", Tensor, Tensor | None)


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
            tuple(numbered(values, which) for values in (self.runs, self.rises)) for which in (first, last)
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


def box_points(lower: Tensor, upper: Tensor, kinks: Sequence[Tensor]) -> Tensor:
    """The ends of the box and the kinks, which are moved into the box, (P, B, h)."""
    return torch.stack([lower, upper, *(torch.minimum(torch.maximum(kink, lower), upper) for kink in kinks)])


def seen_from(psi: Callable[[Tensor], Tensor], c: Tensor, points: Tensor) -> tuple[Tensor, Tensor]:
    """Runs and rises from c to points (P, B, h)."""
    at = psi(c)
    return torch.stack([p - c for p in points]), torch.stack([psi(p) - at for p in points])


def numbered(values: Tensor, which: Tensor) -> Tensor:
    """The values (P, B, h) of the points with the numbers (B, h)."""
    return values.gather(0, which.long()[None])[0]


def slopes_from(runs: Tensor, rises: Tensor, own: Tensor) -> tuple[Tensor, Tensor]:
    """The least and the largest slope between c and the points, `own` where a point is c itself."""
    here = runs == 0
    slopes = torch.where(here, own, rises / torch.where(here, 1.0, runs))
    return slopes.amin(0), slopes.amax(0)


def radius_of(before: Before, width: Tensor, stray: Tensor, weight: Tensor | float = 1.0) -> Tensor:
    """||y' - c|| over the varying units, and the `stray` ones that only the widened box lets vary, (B,).

    `weight` (B,) is the largest of the varying units' weights, by which the radius is measured.
    """
    roundings = 8 + width.shape[1]
    error = up(weight * up(before.error.flatten(1).norm(dim=1), roundings))
    return up(before.radius + error + up(torch.where(stray, width, 0.0).norm(dim=1), roundings))
