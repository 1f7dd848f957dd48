"""Branch and bound over units that bend: the ball is cut along their kinks until every part is proved, or time is up.

On a part a unit lies between two of its kinks, so that its activation is one line there (Bend.between); curves are cut at
points at equal distances as well, and are closer to a line on every part. What is known of the unit pulls too: for any
weight b and all y' of the part, b (y' - c) is at least its value at one end p of the unit's part. So b may be added to the
weights before the activation at the cost of -b (p - c); these are the multipliers of beta-CROWN (Wang et al. 2021). Any
slopes and any b give a bound; they are sought in float32, and a part is done only where one evaluation in float64 with
outward rounding says so. The parts that a unit is cut into cover its box, so what holds on all of them holds.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from locallip.bounds.bend import Bend
from locallip.bounds.descent import RATE, descend
from locallip.bounds.margin import lowered
from locallip.bounds.pullback import DUST, TOGETHER, Pullback, Way, summed_up
from locallip.bounds.region import Trace
from locallip.bounds.support import multiplier, support
from locallip.network import Network
from locallip.rounding import gamma, up

#: Steps of descent for the whole ball, and for a part that begins with the numbers of the one it was cut from.
FIRST_STEPS, STEPS = 40, 10
#: Parts that wait are given up beyond so many numbers in all.
WAITING = 2**29
#: The first step of a pull as a share of the largest weight that it may change.
PULL = 0.1
#: Where nothing is left to be cut, steps become shorter by this factor each time that they gain less than this share.
CLOSER, GAIN = 0.7, 1e-3


@dataclass(frozen=True)
class Parts:
    """Parts (m) of one ball: the class that each is about, and for every bend the first and last point of its units' boxes.

    first, last, slopes and pulls have one tensor (m, h) per bend; value (m,) is the bound that slopes and pulls gave, pace
    (m,) the length of steps that look for better ones, as a share of the usual. The next cut is that of the unit cut[:, 1]
    of the bend cut[:, 0] at its point cut[:, 2]; all -1 where there is none.
    """

    _LISTS: ClassVar = ("first", "last", "slopes", "pulls")

    classes: Tensor
    first: list[Tensor]
    last: list[Tensor]
    slopes: list[Tensor]
    pulls: list[Tensor]
    value: Tensor
    pace: Tensor
    cut: Tensor

    def take(self, index: Tensor) -> Parts:
        first, last, slopes, pulls = ([v[index] for v in getattr(self, name)] for name in self._LISTS)
        return Parts(self.classes[index], first, last, slopes, pulls, self.value[index], self.pace[index], self.cut[index])

    @staticmethod
    def joined(parts: Sequence[Parts]) -> Parts:
        first, last, slopes, pulls = (
            [torch.cat(v) for v in zip(*(getattr(part, name) for part in parts), strict=True)] for name in Parts._LISTS
        )
        names = ("classes", "value", "pace", "cut")
        classes, value, pace, cut = (torch.cat([getattr(part, name) for part in parts]) for name in names)
        return Parts(classes, first, last, slopes, pulls, value, pace, cut)

    def halves(self) -> Parts:
        """Every part on both sides of its cut; parts that have none stay whole."""
        uncut = self.cut[:, 0] < 0
        both = Parts.joined([self, self.take((~uncut).nonzero()[:, 0])])
        second = (~uncut).cumsum(0) - 1 + len(uncut)  # where the other half of a part stands
        rows = torch.arange(len(uncut), device=uncut.device)
        for place in range(len(both.first)):
            here = rows[self.cut[:, 0] == place]
            unit, point = self.cut[here, 1], self.cut[here, 2].to(torch.int8)
            both.last[place][here, unit] = point
            both.first[place][second[here], unit] = point
        return both


class CutWay(Way):
    """The way back for parts of the ball of one sample; slopes and pulls are those of the units that bend, `units`.

    After a bound in float32, `shares` has what each of these units adds to it and `scales` the usual size of weights before
    a bend.
    """

    def __init__(self, of: Pullback, units: list[Tensor], parts: Parts, label: int, dtype: torch.dtype, outward: bool):
        self.units, self.parts = units, parts
        self.pulls: Sequence[Tensor] = ()
        self.shares: list[Tensor] = []
        self.scales: list[Tensor] = []
        sample = torch.zeros_like(parts.classes)
        super().__init__(of, sample, parts.classes, torch.full_like(parts.classes, label), dtype, outward)
        self.whole = [bend.at(sample[:1], dtype) for bend in bends_of(of)]
        self.is_cut = [(a != 0) | (b != 1) for a, b in zip(parts.first, parts.last, strict=True)]

    def _seen(self) -> dict[int, list[Bend]]:
        found: dict[int, list[Bend]] = {}
        ends = iter(zip(self.units, self.parts.first, self.parts.last, strict=True))
        for k in sorted(self.of.stages, reverse=True):
            found[k] = []
            for bend in self.of.stages[k].bends:
                units, first, last = next(ends)
                some = bend.only(units).at(self.samples, self.dtype)
                found[k].append(some.between(first, last))
        return found

    def bound(self, numbers: list[Tensor]) -> Tensor:
        """The bound (n,) for slopes and, behind them, pulls."""
        half = len(numbers) // 2
        self.pulls, self.shares, self.scales = numbers[half:], [], []
        return self.value(numbers[:half])

    def within(self, numbers: Sequence[Tensor]) -> list[Tensor]:
        """Slopes where psi's own can lie, and pulls on units that were cut."""
        half = len(numbers) // 2
        return [*self.kept(numbers[:half]), *(b * cut for b, cut in zip(numbers[half:], self.is_cut, strict=True))]

    def next_cut(self) -> Tensor:
        """The unit that adds most to the last bound, as in Parts."""
        shares, points, places, units = [], [], [], []
        for place, (share, bend) in enumerate(zip(self.shares, self.in_turn, strict=True)):
            point = _point_inside(bend)
            shares.append(torch.where(point > 0, share, 0.0))
            points.append(point)
            places.append(torch.full_like(point, place))
            units.append(torch.arange(point.shape[1], device=point.device).expand_as(point))
        most, which = torch.cat(shares, 1).max(1, keepdim=True)
        found = [torch.cat(values, 1).gather(1, which) for values in (places, units, points)]
        return torch.where(most > 0, torch.cat(found, 1), -1)

    def _meeting(self, g: Tensor, place: int) -> Tensor:
        return g[:, self.units[place]]

    def _bend(self, g: Tensor, bend: Bend, alpha: Tensor, place: int) -> tuple[Tensor, Tensor]:
        """Units that do not bend have their own slope; of the others r, and what the part says of them."""
        units, whole = self.units[place], self.whole[place]
        some = g[:, units]
        self.scales.append(some.detach().norm(dim=1, keepdim=True) / max(1, some.shape[1]) ** 0.5)
        size, least, most = bend.remainder(alpha, self.outward)
        cost = self._remainder(some * size, bend, least, most)
        h, pull = some * alpha, self._pull(bend, some * alpha, place)
        if pull is not None:
            h, cost = h + pull[0], cost + pull[1]
        if self.outward:
            slopes = whole.slope.expand_as(g).index_copy(1, units, alpha)
            cost = cost + self._lost(g, whole, slopes) + DUST * summed_up(most - least)
        return (g * whole.slope).index_copy(1, units, h), cost

    def _remainder(self, direction: Tensor, bend: Bend, least: Tensor, most: Tensor) -> Tensor:
        """max d . t over least <= t <= most and the ball, (n,): what t surely has is taken apart, so that 0 lies between."""
        sure = torch.minimum(least.clamp(min=0), most)
        terms = direction * sure
        if self.outward:
            least, most, slack = -up(sure - least), up(most - sure), gamma(direction.shape[1] + 16, self.dtype)
        else:
            least, most, slack = least - sure, most - sure, 0.0
            with torch.no_grad():
                mu = multiplier(direction[:, None], least[:, None], most[:, None], bend.radius[:, None], self.steps)
                self.shares.append(direction * torch.minimum(torch.maximum(mu * direction, least), most))
        left = support(direction[:, None], least[:, None], most[:, None], bend.radius[:, None], self.steps, slack)[:, 0]
        return self._signed(terms) + left

    def _pull(self, bend: Bend, h: Tensor, place: int) -> tuple[Tensor, Tensor] | None:
        """Weights b (n, u) that are added to h, and what they cost, (n,)."""
        if not self.pulls:
            return None
        b = self.pulls[place]
        price = -b * torch.where(b > 0, bend.runs.amin(0), bend.runs.amax(0))
        cost = self._signed(price)
        if self.outward:
            # The rounding of h + b, and of c and the points that runs lie between.
            reach = gamma(8, self.dtype) * bend.width + 2 * bend.off
            cost = cost + summed_up((b.abs() + h.abs() + DUST) * reach) + DUST * summed_up(bend.width)
        return b, cost

    def _signed(self, terms: Tensor) -> Tensor:
        """The sum of terms (n, u) of either sign, (n,), which may be far below others that it is added to.

        So its size counts in the rounding of what is summed up: without negative terms that is relative to the sum.
        """
        if not self.outward:
            return terms.sum(1)
        return terms.sum(1) + gamma(terms.shape[1] + 16 + 4 * self.roundings, self.dtype) * summed_up(terms.abs())


def branched(network: Network, trace: Trace, y: Tensor, worst: Tensor, level: Tensor, seconds: float) -> Tensor:
    """`worst` (1, C) of one sample, with less for all classes that are not below `level` (1,), where that can be shown.

    It takes about so many seconds. The trace is one with outward rounding.
    """
    assert trace.logits_error is not None
    left = ~(worst < level) & (torch.arange(worst.shape[1], device=y.device) != y)
    classes = left[0].nonzero()[:, 0]
    if not len(classes):
        return worst
    here, error = trace.logits[0, classes], trace.logits_error[0, classes]
    # What the sum of rise, logit and error is rounded by; whether it was enough is seen at the end.
    needed = level - here - error - 1e-12 * (level.abs() + here.abs() + error)
    rises = Branching(network, trace, int(y))(classes, needed, seconds)
    return worst if rises is None else lowered(trace, worst, torch.zeros_like(classes), classes, rises)


class Branching:
    """What parts of the ball show of one sample: made for a trace of it alone, with outward rounding."""

    def __init__(self, network: Network, trace: Trace, label: int):
        self.pullback, self.label = Pullback(network, trace), label
        for stage in self.pullback.stages.values():
            stage.bends = [bend.with_cuts() for bend in stage.bends]
        self.units = [(~bend.straight[0]).nonzero()[:, 0] for bend in bends_of(self.pullback)]
        kind, bent = trace.logits.device.type, sum(len(units) for units in self.units)
        largest = max(region.center.numel() for region in trace.regions)
        # Every part keeps all points of its units: three where there is one kink, and more on curves.
        points = sum(len(units) * len(bend.runs) for units, bend in zip(self.units, bends_of(self.pullback), strict=True))
        self.room = max(2, TOGETHER[kind if kind in TOGETHER else "cpu"] // (2 * points // 3 + 2 * largest))
        self.waiting = WAITING // (3 * max(1, bent))
        self.parts = 0

    def __call__(self, classes: Tensor, needed: Tensor, seconds: float) -> Tensor | None:
        """max (w_i - w_y) . (z(x') - c) or larger for classes i (n,), if each is shown to be below `needed` (n,), or None.

        It ends after about so many seconds.
        """
        # At x itself nothing has risen.
        if not any(len(units) for units in self.units) or not bool((torch.isfinite(needed) & (needed > 0)).all()):
            return None
        end, shown = time.monotonic() + seconds, torch.zeros_like(needed)
        left = self._bounded(self._whole(classes), FIRST_STEPS)
        while True:
            place = (left.classes[:, None] == classes).long().argmax(1)  # where a class stands in `classes`
            done = self._done(left, needed[place], shown, place)
            left, missing = left.take((~done).nonzero()[:, 0]), (left.value - needed[place])[~done]
            if not len(left.classes):
                return shown
            if time.monotonic() > end or len(left.classes) > self.waiting:
                return None
            order = missing.sort(descending=True, stable=True).indices
            now, later = order[: self.room // 2], order[self.room // 2 :]
            steps = FIRST_STEPS if bool((left.cut[now, 0] < 0).any()) else STEPS
            left = Parts.joined([self._bounded(left.take(now).halves(), steps), left.take(later)])

    def _done(self, parts: Parts, needed: Tensor, shown: Tensor, place: Tensor) -> Tensor:
        """The parts (m,) that are proved to stay below `needed` (m,); what is proved of each class goes into `shown`."""
        hopeful = (parts.value < needed).nonzero()[:, 0]
        done = torch.zeros_like(needed, dtype=torch.bool)
        for index in hopeful.split(self.room):
            some, wide = parts.take(index), needed.dtype
            way = CutWay(self.pullback, self.units, some, self.label, wide, outward=True)
            value = way.bound([v.to(wide) for v in (*some.slopes, *some.pulls)])
            proved = value < needed[index]
            done[index] = proved
            shown.scatter_reduce_(0, place[index[proved]], value[proved], "amax")
        return done

    def _whole(self, classes: Tensor) -> Parts:
        """The ball itself for every class."""
        first = [torch.zeros(len(classes), len(u), dtype=torch.int8, device=classes.device) for u in self.units]
        none = [f.float() for f in first]
        nowhere = torch.full((len(classes), 3), -1, device=classes.device)
        zero = torch.zeros(len(classes), device=classes.device)
        parts = Parts(classes, first, [f + 1 for f in first], none, none, zero, zero + 1, nowhere)
        way = CutWay(self.pullback, self.units, parts, self.label, torch.float32, outward=False)
        return replace(parts, slopes=way.line_slopes())

    def _bounded(self, parts: Parts, steps: int) -> Parts:
        """The parts with better slopes and pulls, what these give, and where to cut next."""
        found = []
        for index in torch.arange(len(parts.classes), device=parts.classes.device).split(self.room):
            some = parts.take(index)
            self.parts += len(index)
            way = CutWay(self.pullback, self.units, some, self.label, torch.float32, outward=False)
            numbers = way.within([*some.slopes, *some.pulls])
            with torch.no_grad():
                way.bound(numbers)
            pace = some.pace[:, None]
            rates = [RATE * pace] * len(some.slopes) + [PULL * pace * scale for scale in way.scales]
            numbers, value = descend(way.bound, way.within, numbers, steps, rates)
            with torch.no_grad():
                way.bound(numbers)
            half = len(numbers) // 2
            slow = (some.cut[:, 0] < 0) & ~(value < some.value - GAIN * some.value.abs())
            pace = torch.where(slow, CLOSER * some.pace, some.pace)
            cut = way.next_cut()
            found.append(replace(some, slopes=numbers[:half], pulls=numbers[half:], value=value, pace=pace, cut=cut))
        return Parts.joined(found)


def bends_of(pullback: Pullback) -> list[Bend]:
    """The bends of all stages in the order in which a way meets them."""
    return [bend for k in sorted(pullback.stages, reverse=True) for bend in pullback.stages[k].bends]


def _point_inside(bend: Bend) -> Tensor:
    """The number of the point inside the part that is nearest to its middle, (m, h); -1 where there is none."""
    low, high = bend.runs.amin(0), bend.runs.amax(0)
    found, nearest = torch.full_like(low, -1, dtype=torch.long), torch.full_like(low, float("inf"))
    for point in range(2, len(bend.runs)):
        run = bend.runs[point]
        away = (run - (low + high) / 2).abs()
        closer = (run > low) & (run < high) & ~bend.straight & (away < nearest)
        found, nearest = torch.where(closer, point, found), torch.where(closer, away, nearest)
    return found
