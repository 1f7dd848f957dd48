"""Linear relaxation: every activation between two lines, and linear functions pulled back through them to the input.

For weights g of the pre-activation y of a stage, g . (y' - c) = sum_k (W_k^T g) . (z_k' - c_k) but for rounding. Weights of
z = phi(y) become weights of y by the two lines of each unit (lines.py), and these go on as g did, up to the input, where the
largest value over box and ball is known (support.py). This is CROWN (Zhang et al. 2018) seen from the center of the ball.

Applied to single units it sharpens their boxes. That brings the lines of later stages closer and makes their masks smaller,
and with them the local bound, whose balls in turn cut the boxes that the lines rest on: all in float64, rounded outward.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from locallip.activations import Box
from locallip.bounds.bend import Before
from locallip.bounds.lines import DUST, STEPS, Lines, Side, gaps, lines_of, summed, unstable
from locallip.bounds.plan import MemoryPlan
from locallip.bounds.pullback import met
from locallip.bounds.region import Region, width_of
from locallip.bounds.support import scaled_box, support
from locallip.network import Stage
from locallip.ops import LinearOp, Patch
from locallip.rounding import FLOOR, floored, gamma, up

#: Numbers in one tensor on the way back; rows are taken in parts of that size, or of what a plan of the memory allows.
TOGETHER = {"cpu": 2**22, "cuda": 2**27}
#: Numbers per sample that sharpening the boxes of one stage may take: some tenths of a second on a CPU.
LIMIT = 2.0**22
#: Windows are kept where they are less than this share of the maps.
SMALL = 0.4


@dataclass(frozen=True)
class _Step:
    """A stage that can be passed from behind: the lines of its activation, then its linear part."""

    stage: Stage
    lines: list[Lines]
    affine: _Affine


@dataclass(frozen=True)
class _Chain:
    """The maps between a stage and the region where its way back ends, and the regions before each.

    Windows have at most `largest` numbers, and `numbers` all together.
    """

    ops: list[LinearOp]
    regions: list[int]
    largest: int
    numbers: int


@dataclass(frozen=True)
class _Affine:
    """The linear part of a stage: its terms, what a weight of 1 costs in rounding (B, h), and any by underflow (B,)."""

    terms: Mapping[int, LinearOp]
    lost: Tensor
    dust: Tensor


class Relaxation:
    """What is known of a network from the input up to some stage, made for pulling weights back; it grows with `learn`.

    The boxes of a stage are sharpened for the samples where that takes no more than `limit` numbers. With a `plan` rows and
    windows are taken in parts that fit the memory.
    """

    def __init__(self, first: Region, limit: float, plan: MemoryPlan | None = None):
        self.limit, self.together = limit, TOGETHER[_kind(first.center.device)]
        if plan is not None:
            self.together = plan.numbers(self.together, len(first.center))
        self.regions, self.widths = [first], [width_of(first)]
        self.passed: list[_Step | None] = [None]

    def learn(self, stage: Stage, before: Before, region: Region) -> None:
        """Take the next stage in: what was known before its activation, and the region behind it."""
        lines = None if stage.activation is None else lines_of(stage.activation, before)
        affine = self._affine(stage, before.center, before.error, before.box)
        self.regions.append(region)
        self.widths.append(width_of(region))
        self.passed.append(None if lines is None else _Step(stage, lines, affine))

    def sharpened(self, stage: Stage, center: Tensor, error: Tensor, box: Box) -> Box:
        """The box before the activation of the next stage, smaller where a unit may bend."""
        if stage.activation is None or all(self.passed[source] is None for source in stage.terms):
            return box  # a ball or a box at the input is known exactly already
        affine, way, slack = (
            self._affine(stage, center, error, box),
            self._chain(stage),
            gamma(4, center.dtype) * center.abs(),
        )
        units = unstable(stage.activation, box).flatten(1)
        units = units & (units.sum(1, keepdim=True) * self._numbers(stage, way) <= self.limit)
        if not bool(units.any()):
            return box
        found = self._by_rows(stage, affine, units) if way is None else self._by_patches(way, affine, units)
        # Units that were only looked at to fill a part keep their boxes: no sample depends on those beside it.
        high, low = (torch.where(units, value, float("inf")).reshape(center.shape) for value in found)
        upper, lower = center + up(high) + slack, center - up(low) - slack
        # A NaN changes nothing.
        return Box(torch.where(lower > box.lower, lower, box.lower), torch.where(upper < box.upper, upper, box.upper))

    def _numbers(self, stage: Stage, way: _Chain | None) -> int:
        """Numbers that one unit of a stage takes on its way back."""
        return (
            way.numbers
            if way is not None
            else stage.linear_shape.numel() + sum(r.center.shape[1:].numel() for r in self.regions)
        )

    def _by_rows(self, stage: Stage, affine: _Affine, units: Tensor) -> tuple[Tensor, Tensor]:
        """How far units (B, h) can move up and down, (B, h) each, infinity where it was not asked for."""
        high = torch.full_like(affine.lost, float("inf"))
        low = high.clone()
        order = units.to(torch.uint8).sort(dim=1, descending=True, stable=True).indices
        for some in self._parts(int(units.sum(1).max()), stage):
            count = int(units[some].sum(1).max())
            if not count:
                continue
            for chosen in order[some, :count].split(self._room(stage), dim=1):
                rows = high.new_zeros(*chosen.shape, units.shape[1])
                rows.scatter_(2, chosen[..., None], 1)
                above, below = self._both(affine, rows, some)
                high[some] = high[some].scatter(1, chosen, above)
                low[some] = low[some].scatter(1, chosen, below)
        return high, low

    def _by_patches(self, way: _Chain, affine: _Affine, units: Tensor) -> tuple[Tensor, Tensor]:
        """The same, where what a unit depends on is a small part of every map on the way."""
        samples, which = units.nonzero(as_tuple=True)
        size = max(1, self.together // (4 * way.largest))
        high = torch.full_like(affine.lost, float("inf"))
        low = high.clone()
        for some, unit in zip(samples.split(size), which.split(size), strict=True):
            cost = up(affine.lost[some, unit]) + affine.dust[some]
            value = self._patch_value(way, Patch.of_units(unit, way.ops[0].out_shape, high), some, cost[:, None])
            high[some, unit], low[some, unit] = value.unbind(1)
        return high, low

    def _chain(self, stage: Stage) -> _Chain | None:
        """The way of single units of a stage to the input, if it is one, and their windows remain small on it."""
        ops, regions = [], []
        while len(stage.terms) == 1 and len(stage.linear_shape) == 3:
            ((source, op),) = stage.terms.items()
            step = self.passed[source]
            ops.append(op)
            regions.append(source)
            if step is None:
                break
            if len(step.lines) != 1 or not step.lines[0].is_unitwise:
                return None
            stage = step.stage
        else:
            return None
        first = self.regions[0].center
        unit = torch.zeros(1, dtype=torch.long, device=first.device)
        patch: Patch | None = Patch.of_units(unit, ops[0].out_shape, first)
        sizes, wholes = [], []
        for op in ops:
            # An operator of a user's that derives from ours inherits this as well, and says by its windows that it must not.
            patch = op.adjoint_patch(patch) if patch is not None and op.windows is not None else None
            if patch is None:
                return None
            sizes.append(patch.values.numel())
            wholes.append(op.in_shape.numel())
        return _Chain(ops, regions, max(sizes), sum(sizes)) if sum(sizes) < SMALL * sum(wholes) else None

    def _patch_value(self, way: _Chain, patch: Patch, samples: Tensor, cost: Tensor) -> Tensor:
        """What unit vectors of a stage and their negatives come to, (n, 2), the cost (n, 1) so far included."""
        for i, (op, k) in enumerate(zip(way.ops, way.regions, strict=True)):
            found = op.adjoint_patch(patch)
            assert found is not None
            g = found.values if i else torch.cat([found.values, -found.values], dim=1)
            size, step = g.abs(), self.passed[k]
            rounded = gamma(8, g.dtype) * self.widths[k]
            cost = cost + up(DUST * self.widths[k].flatten(1).sum(1))[samples, None]
            if step is None:
                cost = cost + _summed(size, found.seen(rounded, samples))
                return up(cost + self._over_patch(Patch(g, found.origin), k, samples), 64 + 16 * len(self.regions))
            lines = step.lines[0]
            # No weight of an input is larger than |g| times the slope.
            slopes = up(torch.maximum(lines.below.slope.abs(), lines.above.slope.abs()))
            weight = up(lines.lost + rounded.flatten(1) + slopes * step.affine.lost)
            maps = torch.stack([v.reshape(rounded.shape) for v in (*lines.below, *lines.above, weight)], dim=1)
            *sides, weight = found.seen(maps, samples).unbind(1)
            below, above = (Side(*(v.flatten(1)[:, None] for v in side)) for side in (sides[:3], sides[3:]))
            radius = None if lines.radius is None else lines.radius[samples, None]
            share = gaps(g.flatten(2), below, above, radius) + _summed(size, weight)
            cost = cost + share + (lines.dust + step.affine.dust)[samples, None]
            h = g.flatten(2) * torch.where(g.flatten(2) > 0, above.slope, below.slope)
            patch = Patch(h.reshape(g.shape), found.origin)
        raise AssertionError("the way ends at a region")

    def _over_patch(self, patch: Patch, k: int, samples: Tensor) -> Tensor:
        """As `_over`, for rows with windows, (n, r)."""
        region = self.regions[k]
        assert region.error is not None
        inside = patch.inside(region.center.shape[1:])
        maps = [region.error] if region.outputs is None else [region.error, region.outputs.to(region.error.dtype)]
        if not region.ball_only:
            maps.extend(v.reshape(region.center.shape) for v in scaled_box(region, True))
        error, *seen = inside.seen(torch.stack(maps, dim=1), samples).unbind(1)
        lost, direction = _summed(inside.values.abs(), error), inside.values.flatten(2)
        box = [v.flatten(1)[:, None] for v in seen]
        if region.outputs is not None:
            direction = direction * box.pop(0)
        return _most(direction, box, region.radius.expand(len(region.center))[samples, None]) + lost

    def rises(self, stage: Stage, center: Tensor, error: Tensor, box: Box, g: Tensor) -> Tensor:
        """max g . (y' - c) or larger over the ball, (B, n), for weights g (B, n, *shape) before the next activation."""
        affine, g = self._affine(stage, center, error, box), g.flatten(2)
        found = []
        for some in self._parts(g.shape[1], stage):
            parts = g[some].split(self._room(stage), dim=1)
            found.append(torch.cat([self._value(*self._through(affine, part, some), some) for part in parts], dim=1))
        return torch.cat(found) if found else g.new_zeros(g.shape[:2])

    def _affine(self, stage: Stage, center: Tensor, error: Tensor, box: Box) -> _Affine:
        dtype, count = center.dtype, len(self.regions)
        width = up(torch.maximum(box.upper - center, center - box.lower).clamp(min=0))
        lost, dust = error + gamma(8, dtype) * width, DUST * width.flatten(1).sum(1)
        for source, op in stage.terms.items():
            reach = self.widths[source]
            spread = up(op.apply_abs(floored(reach, reach > 0)), op.fan_in + 8)
            lost = lost + gamma(op.roundings + 8 + count, dtype) * spread
            dust = dust + DUST * met(op, reach)
        return _Affine(stage.terms, up(lost.flatten(1)), up(dust, 8 + 4 * len(stage.terms)))

    def _parts(self, rows: int, stage: Stage) -> list[slice]:
        """Samples that are looked at together, if each has so many rows."""
        count = len(self.regions[0].center)
        size = max(1, self._room(stage) // max(1, rows))
        return [slice(i, min(i + size, count)) for i in range(0, count, size)]

    def _room(self, stage: Stage) -> int:
        """Rows that are looked at together."""
        largest = max([stage.linear_shape.numel(), *(region.center.shape[1:].numel() for region in self.regions)])
        return max(1, self.together // largest)

    def _both(self, affine: _Affine, rows: Tensor, some: slice) -> tuple[Tensor, Tensor]:
        """The largest value of each row's function, and of its negative."""
        pending, cost = self._through(affine, rows, some)
        negative = {source: -g for source, g in pending.items()}
        return self._value(pending, cost, some), self._value(negative, cost, some)

    def _through(self, affine: _Affine, g: Tensor, some: slice) -> tuple[dict[int, Tensor], Tensor]:
        """W^T g for every source of a stage, and the cost, (b, n)."""
        cost = summed(g.abs(), affine.lost[some]) + affine.dust[some, None]
        flat = g.flatten(0, 1)
        back = {
            source: op.adjoint(flat.reshape(-1, *op.out_shape)).reshape(*g.shape[:2], -1)
            for source, op in affine.terms.items()
        }
        return back, cost

    def _value(self, pending: Mapping[int, Tensor], cost: Tensor, some: slice) -> Tensor:
        """What weights of several regions come to, (b, n), the cost so far included."""
        left = dict(pending)
        for k in range(len(self.regions) - 1, -1, -1):
            if k not in left:
                continue
            g = left.pop(k)
            reach = self.widths[k].flatten(1)[some]
            # g itself was rounded, as a sum of what several stages ask for.
            step, lost = self.passed[k], gamma(8, g.dtype) * reach
            cost = cost + up(DUST * reach.sum(1, keepdim=True))
            if step is None:
                cost = cost + self._over(g, k, some, lost)
                continue
            cost = cost + summed(g.abs(), lost)
            for lines in step.lines:
                g, share = lines.back(g, some)
                cost = cost + share
            back, share = self._through(step.affine, g, some)
            cost = cost + share
            for source, more in back.items():
                left[source] = left[source] + more if source in left else more
        return up(cost, 64 + 16 * len(self.regions))

    def _over(self, g: Tensor, k: int, some: slice, lost: Tensor) -> Tensor:
        """max g . (z' - c) over box and ball of a region where the way ends; a weight of 1 has cost `lost` (b, h) so far."""
        region = self.regions[k]
        assert region.error is not None
        radius, lost = region.radius.expand(len(region.center))[some, None], up(lost + region.error.flatten(1)[some])
        if region.ball_only and region.outputs is None:  # |g| . lost is at most the product of their lengths
            return _most(g, [], up(radius + up(lost.norm(dim=1, keepdim=True), 16 + lost.shape[1]) + FLOOR))
        direction = g if region.outputs is None else g * region.outputs.flatten(1)[some, None].to(g.dtype)
        box = [] if region.ball_only else [v[some, None] for v in scaled_box(region, True)]
        return _most(direction, box, radius) + summed(g.abs(), lost)


def _most(direction: Tensor, box: Sequence[Tensor], radius: Tensor) -> Tensor:
    """max d . t over the ball, or over the ball and a box with the ends `box`, rounded up; d (b, n, h), radius (b, 1)."""
    count = direction.shape[2]
    if not box:
        # Squares of entries below 1e-154 vanish, which FLOOR covers.
        return up((up(direction.norm(dim=2), 16 + count) + FLOOR) * (up(radius) + FLOOR))
    lower, upper = box
    value = support(direction, lower, upper, radius, STEPS, gamma(count + 16, direction.dtype))
    return up(value.clamp(min=0)) + up(DUST * (upper - lower).sum(2), 8 + count)


def _summed(size: Tensor, weight: Tensor) -> Tensor:
    """sum size weight over windows, (n, r), rounded up, for size (n, r, channels, h, w) and weight (n, channels, h, w)."""
    return summed(size.flatten(2), weight.flatten(1))


def _kind(device: torch.device) -> str:
    return device.type if device.type in TOGETHER else "cpu"
