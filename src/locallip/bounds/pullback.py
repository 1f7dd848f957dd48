"""The difference of two logits pulled back through the network, with slopes that are looked for and may be any.

(w_i - w_y) . (z(x') - z(x)) is bounded over the last box and ball in margin.py. Here an activation is replaced by slopes
alpha and a remainder (bend.py): g . (z' - z) = (alpha g) . (y' - y) + g . r. The remainder is bounded over its own box and
ball, and the first part goes on as (W^T alpha g) . (z' - z) to the sources of the stage, up to the input. Every alpha gives
a bound, so it is sought by descent, mostly in float32; what counts is one evaluation in float64 with outward rounding.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from locallip.bounds.bend import Before, Bend
from locallip.bounds.bends import bends
from locallip.bounds.descent import Descent
from locallip.bounds.lines import DUST
from locallip.bounds.region import Region, Trace, width_of
from locallip.bounds.support import scaled_box, support
from locallip.network import Network
from locallip.ops import Compose, LinearOp, Sum
from locallip.rounding import floored, gamma, raised, up

#: Lines touch the function at two points, and between these rounding would decide which way a search goes. In float64, where
#: results are to repeat themselves beside other samples, it begins so far from there.
ASIDE = 1e-3
#: Steps of the multiplier inside the search, and where it counts.
ROUGH, FINE = 3, 12
#: Numbers in one tensor of the search; what is looked at together is limited by it.
TOGETHER = {"cpu": 2**23, "cuda": 2**26}
#: After so many steps a search is given up where the bound is still above what is wanted by more than this share of what it
#: was without slopes: on the way through one activation, and on longer ways (benchmarks/NOTES.md).
LOOKS_NEAR = {0: 0.1, 2: 0.06, 4: 0.04, 8: 0.02}
LOOKS_FAR = {0: 0.2, 4: 0.1, 8: 0.05, 12: 0.03}


class _Terms:
    """The linear part of a stage, as rounding meets it on the way back; computed where it is asked for."""

    def __init__(self, terms: Mapping[int, LinearOp], widths: list[Tensor]):
        self.terms, self._widths = terms, widths

    @cached_property
    def spread(self) -> dict[int, Tensor]:
        """|W| |z' - c| or larger, by source; what is not zero stays so on the way through W."""
        widths = {source: floored(self._widths[source], self._widths[source] > 0) for source in self.terms}
        return {source: up(op.apply_abs(widths[source]), op.fan_in + 8) for source, op in self.terms.items()}

    @cached_property
    def met(self) -> dict[int, Tensor]:
        """The widths that products on the way back through W meet, by source; (B,)."""
        return {source: met(op, self._widths[source]) for source, op in self.terms.items()}


class _Stage(_Terms):
    """A stage with an activation, ready to be passed from behind: width (B, *shape) bounds |y' - c|, `error` is c's own."""

    def __init__(self, bends: list[Bend], before: Before, terms: Mapping[int, LinearOp], widths: list[Tensor]):
        super().__init__(terms, widths)
        self.bends, self.error = bends, before.error
        self.width = up(torch.maximum(before.box.upper - before.center, before.center - before.box.lower).clamp(min=0))


class Pullback:
    """Upper bounds of (w_i - w_y) . (z' - z) for chosen samples and classes; made for a trace with outward rounding.

    A trace may end before any stage: its units then stand for classes. Slopes are sought in the dtype `rough`.
    """

    def __init__(self, network: Network, trace: Trace, depth: int | None = None, rough: torch.dtype = torch.float32):
        self.rough = rough
        self.regions, self.plan = trace.regions, trace.plan
        self.widths = [width_of(region) for region in trace.regions]
        self.last, self.is_near = _Terms(network.stages[len(trace.before)].terms, self.widths), depth == 1
        self.stages: dict[int, _Stage] = {}
        reached = set(self.last.terms)
        for k in range(len(trace.before), 0, -1):
            stage, before, near = network.stages[k - 1], trace.before[k - 1], depth is None or len(trace.before) - k < depth
            if k not in reached or not near or stage.activation is None:
                continue
            found = bends(stage.activation, before)
            if found is not None:
                self.stages[k] = _Stage(found, before, stage.terms, self.widths)
                reached.update(stage.terms)
        #: Regions where the way ends.
        self.ends = sorted(reached - set(self.stages))

    @property
    def units(self) -> int:
        """Numbers per sample and class."""
        bent = sum(bend.low.shape[1] for stage in self.stages.values() for bend in stage.bends)
        return bent + sum(self.widths[k][0].numel() for k in self.ends)

    def __call__(self, samples: Tensor, classes: Tensor, labels: Tensor, steps: int, wanted: Wanted | None = None) -> Tensor:
        """max (w_i - w_y) . (z(x') - c) or larger for pairs of sample and class, all (n,); c is the last center.

        The number of classes stands for none: w is 0. Infinity where there is nothing to pass, or where `wanted` is seen to
        be out of reach.
        """
        found = torch.full(samples.shape, float("inf"), dtype=self.widths[0].dtype, device=samples.device)
        if not self.stages:
            return found
        together = TOGETHER[samples.device.type if samples.device.type in TOGETHER else "cpu"]
        if self.plan is not None:
            together = self.plan.slope_numbers(together, len(self.widths[0]))
        wide = 2 if self.rough == torch.float64 else 1
        size = max(1, together // (wide * self.units))
        for some in torch.arange(len(samples), device=samples.device).split(size):
            pairs = samples[some], classes[some], labels[some]
            left, value = self._bound(*pairs, steps, None if wanted is None else wanted.of(some))
            found[some[left]] = value
        return found

    def roughly(self, samples: Tensor, classes: Tensor, labels: Tensor) -> Tensor:
        """About what the lines of linear relaxation give, (n,), in float32 and without a search; nothing is proved by it."""
        way = Way(self, samples, classes, labels, torch.float32, outward=False)
        way.steps = 1
        return way.value([], choose=True)

    def _bound(
        self, samples: Tensor, classes: Tensor, labels: Tensor, steps: int, wanted: Wanted | None
    ) -> tuple[Tensor, Tensor]:
        """Which pairs have not been given up, and their bounds."""
        wide = self.widths[0].dtype
        left, slopes = Way(self, samples, classes, labels, self.rough, outward=False).searched(steps, wanted)
        if not len(left):
            return left, torch.zeros(0, dtype=wide, device=samples.device)
        way = Way(self, samples[left], classes[left], labels[left], wide, outward=True)
        return left, way.value([alpha.to(wide) for alpha in slopes])


@dataclass(frozen=True)
class Wanted:
    """What bounds of pairs are wanted to be below, (n,), and what they were without slopes."""

    below: Tensor
    plain: Tensor

    def of(self, rows: Tensor) -> Wanted:
        return Wanted(self.below[rows], self.plain[rows])

    def is_far(self, value: Tensor, share: float) -> Tensor:
        """Where a bound is above what is wanted by more than a share of what it was; what overflowed tells nothing."""
        return value > self.below + share * self.plain


class Way:
    """The way back for some pairs of sample and class, in one dtype."""

    def __init__(self, of: Pullback, samples: Tensor, classes: Tensor, labels: Tensor, dtype: torch.dtype, outward: bool):
        self.of, self.samples, self.dtype, self.outward = of, samples, dtype, outward
        self.steps = FINE if outward else ROUGH
        self.bends = self._seen()
        self.start, self.lost = {}, torch.zeros(len(samples), dtype=dtype, device=samples.device)
        for source, op in of.last.terms.items():
            count = op.out_shape.numel()
            rows = op.adjoint(torch.eye(count, dtype=dtype, device=samples.device).reshape(count, *op.out_shape)).flatten(1)
            rows = _and_none(rows, dim=0)
            self.start[source] = rows[classes] - rows[labels]
            if outward:
                both = _and_none(of.last.spread[source].flatten(1), dim=1)
                share = both[samples, classes] + both[samples, labels]
                self.lost = self.lost + gamma(op.roundings + 8 + len(of.regions), dtype) * share
                self.lost = self.lost + DUST * of.last.met[source][samples]
        self.ends = {k: self._end(of.regions[k]) for k in of.ends}

    def of_rows(self, rows: Tensor) -> Way:
        """The same way for some of the pairs, a mask or numbers of rows."""
        way = copy.copy(self)
        way.samples, way.lost = self.samples[rows], self.lost[rows]
        which = rows.nonzero()[:, 0] if rows.dtype == torch.bool else rows
        way.bends = {k: [bend.at(which, self.dtype) for bend in found] for k, found in self.bends.items()}
        way.start = {source: g[rows] for source, g in self.start.items()}
        way.ends = {
            k: (low[rows], high[rows], radius[rows], None if outputs is None else outputs[rows])
            for k, (low, high, radius, outputs) in self.ends.items()
        }
        return way

    def _seen(self) -> dict[int, list[Bend]]:
        """The bends of every stage, by its region."""
        return {k: [bend.at(self.samples, self.dtype) for bend in stage.bends] for k, stage in self.of.stages.items()}

    def _end(self, region: Region) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        lower, upper = (v[self.samples].to(self.dtype) for v in scaled_box(region, True))
        radius = region.radius.expand(len(region.center))[self.samples].to(self.dtype)
        outputs = None if region.outputs is None else region.outputs.flatten(1)[self.samples].to(self.dtype)
        return lower[:, None], upper[:, None], radius[:, None], outputs

    def line_slopes(self) -> list[Tensor]:
        """Those of the lines of linear relaxation, chosen on the way by the sign of what meets them."""
        chosen: list[Tensor] = []
        self.value(chosen, choose=True)
        return chosen

    def searched(self, steps: int, wanted: Wanted | None = None) -> tuple[Tensor, list[Tensor]]:
        """Pairs that have not been given up, and slopes for which their bounds are small, one tensor (n, h) per bend."""
        left, slopes = torch.arange(len(self.samples), device=self.samples.device), self.line_slopes()
        if not slopes:
            return left, slopes
        if self.dtype == torch.float64:
            slopes = self.kept(
                [alpha + ASIDE * (1 + b.middle - alpha) for alpha, b in zip(slopes, self.in_turn, strict=True)]
            )
        way, search, looks = self, Descent(slopes, steps), LOOKS_NEAR if self.of.is_near else LOOKS_FAR
        while len(left) and search.go_on(way.value, way.kept):
            if wanted is None or search.done - 1 not in looks:
                continue
            open_ = ~wanted.of(left).is_far(search.least, looks[search.done - 1])
            if not bool(open_.all()):
                way, left = way.of_rows(open_), left[open_]
                search.keep(open_)
        return left, search.best

    @property
    def in_turn(self) -> list[Bend]:
        """The bends in the order in which the way meets them, that of all lists of slopes."""
        return [bend for k in sorted(self.bends, reverse=True) for bend in self.bends[k]]

    def kept(self, slopes: Sequence[Tensor]) -> list[Tensor]:
        """The slopes moved to where psi's own can lie."""
        return [torch.minimum(torch.maximum(a, b.low), b.high) for a, b in zip(slopes, self.in_turn, strict=True)]

    def value(self, slopes: list[Tensor], choose: bool = False) -> Tensor:
        """The bound for these slopes, (n,); with `choose` they are chosen on the way and added to an empty list."""
        pending, left = dict(self.start), list(self.kept(slopes) if self.outward and not choose else slopes)
        total, place = self.lost, 0
        for k in range(len(self.of.regions) - 1, -1, -1):
            if k not in pending:
                continue
            g = pending.pop(k)
            if self.outward:  # g itself was rounded
                total = total + summed_up(
                    (gamma(8, self.dtype) * g.abs() + DUST) * self.of.widths[k].flatten(1)[self.samples]
                )
            if k in self.ends:
                total = total + self._over(g, k)
                continue
            for bend in self.bends[k]:
                g = _turned(g, bend)
                if choose:
                    below, above = bend.lines()
                    left.append(torch.where(self._meeting(g, place) > 0, above, below))
                    slopes.append(left[-1])
                g, cost = self._bend(g, bend, left.pop(0), place)
                g, total, place = _turned_back(g, bend), total + cost, place + 1
            stage = self.of.stages[k]
            if self.outward:
                total = total + self._rounding(g, stage)
            for source, op in stage.terms.items():
                back = _Adjoint.apply(g, op)
                pending[source] = pending[source] + back if source in pending else back
        return raised(total, self.roundings) if self.outward else total

    @property
    def roundings(self) -> int:
        """Those of a sum of all costs."""
        return 64 + 8 * len(self.of.regions)

    def _meeting(self, g: Tensor, place: int) -> Tensor:
        """The weights of those units that have slopes at a place of `in_turn`."""
        return g

    def _bend(self, g: Tensor, bend: Bend, alpha: Tensor, place: int) -> tuple[Tensor, Tensor]:
        """alpha g, and the bound of g . r, for weights g of the units of the bend at a place of `in_turn`."""
        size, least, most = bend.remainder(alpha, self.outward)
        slack = gamma(g.shape[1] + 16, self.dtype) if self.outward else 0.0
        cost = support((g * size)[:, None], least[:, None], most[:, None], bend.radius[:, None], self.steps, slack)[:, 0]
        if self.outward:
            cost = cost + self._lost(g, bend, alpha) + DUST * summed_up(most - least)
        return g * alpha, cost

    def _lost(self, g: Tensor, bend: Bend, alpha: Tensor) -> Tensor:
        """What the rounding of g and of alpha g costs, and that of the point c that runs and rises start from."""
        reach = (1 + alpha.abs()) * (gamma(8, self.dtype) * bend.width + bend.off)
        return summed_up((g.abs() + DUST) * (reach + bend.value_off)) + DUST * summed_up(bend.width)

    def _rounding(self, g: Tensor, stage: _Stage) -> Tensor:
        """What g . (y' - c) = sum (W^T g) . (z' - z) + g . (W z + b - c) loses: c's own error, and the rounding of W^T g."""
        cost = summed_up(g.abs() * stage.error.flatten(1)[self.samples])
        cost = cost + summed_up((gamma(8, self.dtype) * g.abs() + DUST) * stage.width.flatten(1)[self.samples])
        for source, op in stage.terms.items():
            spread = stage.spread[source].flatten(1)[self.samples]
            cost = cost + summed_up((gamma(op.roundings + 8 + len(self.of.regions), self.dtype) * g.abs()) * spread)
            cost = cost + DUST * stage.met[source][self.samples]
        return cost

    def _over(self, g: Tensor, k: int) -> Tensor:
        """max g . (z' - c) over box and ball of a region where the way ends."""
        lower, upper, radius, outputs = self.ends[k]
        direction = g if outputs is None else g * outputs
        slack = gamma(g.shape[1] + 16, self.dtype) if self.outward else 0.0
        value = support(direction[:, None], lower, upper, radius, self.steps, slack)[:, 0]
        if not self.outward:
            return value
        region = self.of.regions[k]
        assert region.error is not None
        value = value + summed_up(g.abs() * region.error.flatten(1)[self.samples])
        return value + DUST * summed_up((upper - lower)[:, 0])


def _and_none(values: Tensor, dim: int) -> Tensor:
    """Values (B, C), or of C classes, with a zero behind them for the class that stands for none."""
    return torch.cat([values, torch.zeros_like(values.narrow(dim, 0, 1))], dim=dim)


def _turned(g: Tensor, bend: Bend) -> Tensor:
    """Weights of the sums and differences that a bend works on, where it does."""
    if not bend.paired:
        return g
    first, second = g.chunk(2, dim=1)
    return torch.cat([first + second, first - second], dim=1) / 2


def _turned_back(h: Tensor, bend: Bend) -> Tensor:
    """Weights of the two values that sums and differences are made of."""
    if not bend.paired:
        return h
    first, second = h.chunk(2, dim=1)
    return torch.cat([first + second, first - second], dim=1)


class _Adjoint(torch.autograd.Function):
    """W^T h; its derivative is W, and nothing else takes part: weights need no gradient and may be of inference mode."""

    @staticmethod
    def forward(ctx: Any, h: Tensor, op: LinearOp) -> Tensor:
        ctx.op = op
        return op.adjoint(h.reshape(len(h), *op.out_shape)).flatten(1)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        return ctx.op.apply(grad.reshape(len(grad), *ctx.op.in_shape)).flatten(1), None


def met(op: LinearOp, width: Tensor) -> Tensor:
    """sum |v' - v| over the inputs v of every map that W is made of, for |z' - c| <= width; (B,).

    What a product loses by underflow between two maps is made larger by the weights of the one before, as v' - v is.
    """
    if isinstance(op, Compose):
        return met(op.inner, width) + met(op.outer, op.inner.apply_abs(width))
    if isinstance(op, Sum):
        return torch.stack([met(part, width) for part in op.parts]).sum(0)
    return summed_up(width.flatten(1))


def summed_up(terms: Tensor) -> Tensor:
    """The sum of non-negative terms (n, h), rounded up; (n,)."""
    return up(terms.sum(-1), 8 + terms.shape[-1])
