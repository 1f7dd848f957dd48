"""Activations as unit-wise functions, the last first.

ReLU and its clipped forms are unit-wise. Sorting a pair (y1, y2) leaves y1 + y2 as it is and takes the absolute value of
y1 - y2, which is unit-wise too; a clipped MaxMin is a clip behind that.
"""

from __future__ import annotations

import torch
from torch import Tensor

from locallip.activations import Activation, Box, Clip, Increasing, SortPairs
from locallip.bounds.bend import Before, Bend, box_points, radius_of, seen_from, slopes_from
from locallip.bounds.curved import curved
from locallip.network import PassThrough
from locallip.rounding import gamma, up


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
        return [curved(before, activation)] if vars(type(activation)).get("curves") is not None else None
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
    runs, rises = seen_from(lambda y: torch.minimum(torch.maximum(y, bottom), top), c, box_points(lower, upper, kinks))
    constant = ((upper <= bottom) & (upper > -infinite)) | ((lower >= top) & (lower < infinite))
    linear = (lower >= bottom) & (upper <= top)
    radius = radius_of(before, torch.maximum(upper - c, c - lower), ~varying.flatten(1) & ~constant)
    slope = (linear & ~constant).to(c.dtype)
    least, most = slopes_from(runs, rises, slope)
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


def _difference(before: Before, stray: Tensor) -> Bend:
    """(y1 + y2, |y1 - y2|) of every pair: slope 1, and slopes between -1 and 1; `stray` (B, h / 2) as in `radius_of`."""
    (c1, c2), (l1, l2), (u1, u2) = (v.flatten(1).chunk(2, dim=1) for v in (before.center, *before.box))
    width = torch.cat([torch.maximum(u - c, c - v).clamp(min=0) for c, v, u in ((c1, l1, u1), (c2, l2, u2))], dim=1)
    radius = up(2**0.5 * radius_of(before, width, torch.cat([stray, stray], dim=1)))  # ||(y1 + y2, y1 - y2)|| = sqrt 2 ||y||
    c, lower, upper, step = c1 - c2, l1 - u2, u1 - l2, gamma(2, width.dtype)
    lower, upper = torch.minimum(lower - step * lower.abs(), c), torch.maximum(upper + step * upper.abs(), c)
    runs, rises = seen_from(torch.abs, c, box_points(lower, upper, [torch.zeros_like(c)]))
    linear, slope = (lower >= 0) | (upper <= 0), torch.where(lower >= 0, 1.0, -1.0).to(c.dtype)
    least, most = slopes_from(runs, rises, slope)
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
