"""Worst logits: how far each class can come up on the label inside the last box and ball (eqn:bcpworst)."""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from locallip.bounds import inner
from locallip.bounds.pullback import Pullback, Wanted
from locallip.bounds.region import Region, Trace
from locallip.bounds.support import corner, scaled_box, support
from locallip.network import Network
from locallip.ops import LinearOp
from locallip.rounding import FLOOR, floored, gamma, up

MarginForm = Literal["box_ball", "box", "ball", "lmt"]
#: Steps of the search for slopes, where a certificate needs it: more add little.
SLOPE_STEPS = 20
#: The way to the input lowers a rise by less than this share beyond what the last activation does.
CLOSE = 0.15
#: Where a verdict alone is asked for, a class is given up without a search whose worst logit is above what is wanted by more
#: than this share of what it was allowed to rise: slopes of the last activation, and then those on the way to the input,
#: hardly ever bring more (benchmarks/NOTES.md).
FAR, FAR_BEHIND = 0.25, 0.05
#: In networks of fewer units a search costs too little to be given up.
SMALL = 2**14
#: Numbers of samples times classes times units that are compared at once: all of them but for many classes.
AT_ONCE = 2**28


class WorstLogits(NamedTuple):
    """clean = F(x) and worst with worst_i - worst_y >= max over the ball of F_i - F_y; both (B, C)."""

    clean: Tensor
    worst: Tensor


def worst_logits(
    network: Network,
    trace: Trace,
    y: Tensor,
    *,
    form: MarginForm = "box_ball",
    steps: int = 30,
    outward: bool = False,
    slope_steps: int | None = None,
    depth: int | None = None,
    wanted: Tensor | None = None,
) -> WorstLogits:
    """Logits that no point of the ball exceeds relative to the label's, for labels y (B,).

    form "box_ball" is BCP's (eqn:bcpworst), "ball" GloRo's, which drops the box, "box" that of interval arithmetic, which
    drops the ball, and "lmt" adds sqrt(2) eps L. With `outward` and "box_ball", classes that this leaves above the label are
    pulled back through the last `depth` activations with slopes found in `slope_steps` steps (None: SLOPE_STEPS; 0: not at
    all). Without `depth` it is the last activation, and all of them where that leaves little to be shown.

    Where only a verdict counts, `wanted` (B,) is the lead that the label must have: then no class is looked at for longer of
    a sample that will hardly be shown, and the logits of such a sample are not as low as they might be.
    """
    clean = trace.logits
    if form == "lmt":
        rise = (2**0.5 * trace.regions[0].radius * trace.lipschitz)[:, None].expand_as(clean)
        rise = up(rise) if outward else rise
    else:
        last = network.stages[-1]
        at_once = AT_ONCE if trace.plan is None else trace.plan.numbers(AT_ONCE, len(y))
        rises = [_rise(op, trace.regions[k], y, form, steps, outward, at_once) for k, op in last.terms.items()]
        rise = torch.stack(rises).sum(0)
    label = torch.nn.functional.one_hot(y, clean.shape[1]).bool()
    if not outward:
        return WorstLogits(clean, clean + rise.masked_fill(label, 0))
    assert trace.logits_error is not None
    rise = up(rise, 8 + len(network.stages[-1].terms)) + up(trace.logits_error) + gamma(8, clean.dtype) * clean.abs()
    lowest = clean - up(trace.logits_error) - gamma(8, clean.dtype) * clean.abs()
    worst = torch.where(label, lowest, clean + up(rise))
    if trace.relaxation is not None and form == "box_ball":
        worst = _by_lines(network, trace, y, worst)
    slope_steps = SLOPE_STEPS if slope_steps is None else slope_steps
    slope_steps = max(slope_steps, inner.STEPS) if slope_steps and trace.is_small else slope_steps
    if slope_steps and form == "box_ball":
        worst = _pulled(network, trace, y, worst, slope_steps, depth, wanted)
    return WorstLogits(clean, worst)


def rises_by_lines(network: Network, trace: Trace, y: Tensor, classes: Tensor) -> Tensor:
    """How far F_i - F_y can rise above what it was computed as, for classes i (B, n), by lines to the input; (B, n)."""
    assert trace.relaxation is not None
    assert trace.logits_error is not None
    assert trace.logits_box is not None
    weights = torch.eye(trace.logits.shape[1], dtype=trace.logits.dtype, device=y.device)
    found = []
    # No more numbers than the square of the classes, however many samples there are, unless that is little.
    for part in classes.split(max(1, max(2**20, weights.numel()) // max(1, len(y) * len(weights))), dim=1):
        g = weights[part] - weights[y][:, None]
        found.append(trace.relaxation.rises(network.stages[-1], trace.logits, trace.logits_error, trace.logits_box, g))
    return torch.cat(found, dim=1)


def _by_lines(network: Network, trace: Trace, y: Tensor, worst: Tensor) -> Tensor:
    """`worst` with the smaller of both bounds, the other by lines."""
    here, classes = trace.logits, worst.shape[1]
    rise = rises_by_lines(network, trace, y, torch.arange(classes, device=y.device).expand(len(y), -1))
    # F_i - F_y <= here_i - here_y + rise, with the errors of `here` in it: worst_i may be worst_y - here_y + here_i + rise.
    lowest, own = worst.gather(1, y[:, None]), here.gather(1, y[:, None])
    value = here + up(rise) + (lowest - own) + gamma(16, here.dtype) * (here.abs() + own.abs() + lowest.abs() + rise)
    others = torch.ones_like(worst, dtype=torch.bool).scatter(1, y[:, None], False)
    return torch.where(others & (value < worst), value, worst)


def _pulled(
    network: Network, trace: Trace, y: Tensor, worst: Tensor, steps: int, depth: int | None, wanted: Tensor | None
) -> Tensor:
    """`worst`, lower where it is not below the label's and the way back through the network shows that it can be.

    Where only a verdict counts, the class that is hardest to show comes first, and no other if it is not shown.
    """
    others = torch.isfinite(trace.logits).all(1, keepdim=True).expand_as(worst).scatter(1, y[:, None], False)
    if wanted is None:
        return _pulled_back(network, trace, y, worst, steps, depth, others, None)
    excess = _excess(worst, y, wanted).masked_fill(~others, -float("inf"))
    first = others.logical_and(torch.nn.functional.one_hot(excess.argmax(1), worst.shape[1]).bool())
    worst = _pulled_back(network, trace, y, worst, steps, depth, first, wanted)
    shown = ~(first & ~(_excess(worst, y, wanted) < 0)).any(1, keepdim=True)
    return _pulled_back(network, trace, y, worst, steps, depth, others & ~first & shown, wanted)


def _pulled_back(
    network: Network,
    trace: Trace,
    y: Tensor,
    worst: Tensor,
    steps: int,
    depth: int | None,
    which: Tensor,
    wanted: Tensor | None,
) -> Tensor:
    """`worst`, lower for those of the classes `which` (B, C) that are not below the label's.

    The last activation is cheap to pass and brings most; the way to the input is left to those that are close by then. Where
    lines sharpened the boxes, the whole way is the bound that counts.
    """
    both = depth is None and trace.relaxation is None and len(trace.before) > 1
    # Lines are for networks that norms say little of: there what is dear goes on.
    hasty = wanted is not None and trace.relaxation is None and sum(r.center[0].numel() for r in trace.regions) > SMALL
    for way in (1, None) if both else (depth,):
        excess, plain = _excess(worst, y, wanted), worst - trace.logits
        needed = which & ~(excess < 0)
        if hasty and (both or way == 1):
            needed = needed & (excess <= (FAR if way == 1 else FAR_BEHIND) * plain)
        elif way is None and both:
            needed = needed & (excess <= CLOSE * plain)
        some = needed.any(1).nonzero()[:, 0]
        if not len(some):
            continue
        samples, classes = needed.nonzero(as_tuple=True)
        rise = plain[samples, classes]
        hope = None if not hasty else Wanted(rise - excess[samples, classes], rise)
        places = torch.searchsorted(some, samples)
        rough = torch.float64 if trace.is_small else torch.float32
        found = Pullback(network, trace.of(some), way, rough)(places, classes, y[samples], steps, hope)
        worst = lowered(trace, worst, samples, classes, found)
    return worst


def _excess(worst: Tensor, y: Tensor, wanted: Tensor | None) -> Tensor:
    """How far every class is above what is wanted of it, (B, C)."""
    excess = worst - worst.gather(1, y[:, None])
    return excess if wanted is None else excess + wanted[:, None]


def lowered(trace: Trace, worst: Tensor, samples: Tensor, classes: Tensor, rise: Tensor) -> Tensor:
    """`worst` with the smaller of both bounds for pairs of sample and class (n,); `rise` (n,) is max (w_i - w_y) . (z' - c).

    A NaN changes nothing.
    """
    assert trace.logits_error is not None
    here, error = trace.logits[samples, classes], trace.logits_error[samples, classes]
    value = here + up(up(rise) + up(error) + gamma(8, here.dtype) * here.abs())
    old = worst[samples, classes]
    return worst.index_put((samples, classes), torch.where(value < old, value, old))


def _rise(op: LinearOp, region: Region, y: Tensor, form: MarginForm, steps: int, outward: bool, at_once: int) -> Tensor:
    """max (w_i - w_y) . (z(x') - z(x)) over the region of one source, (B, C); so many numbers are compared at once."""
    like = region.center
    classes = op.out_shape.numel()
    rows = op.adjoint(torch.eye(classes, dtype=like.dtype, device=like.device)).flatten(1)  # (C, h)
    size = max(1, at_once // max(1, len(like) * rows.shape[1]))
    parts = rows.split(size)
    slack = gamma(op.roundings + rows.shape[1] + 16, like.dtype) if outward else 0.0

    def rise(part: Tensor) -> Tensor:
        return _rise_of(part, rows[y], region, form, steps, slack, outward)

    if len(parts) == 1:
        value = rise(rows)
    elif torch.is_grad_enabled():  # computed again on the way back, so that one part's numbers are there at a time
        value = torch.cat([checkpoint(rise, part, use_reentrant=False) for part in parts], 1)
    else:
        value = torch.cat([rise(part) for part in parts], 1)
    if not outward:
        return value
    # What the rounding of the rows themselves can add, over the whole box; no width vanishes on its way through W.
    reach = torch.maximum(-region.box.lower + region.center, region.box.upper - region.center)
    reach = up(reach.clamp(min=0) + (0.0 if region.error is None else region.error))
    lost = gamma(op.roundings + 8, like.dtype) * up(op.apply_abs(floored(reach, reach > 0)), op.fan_in + 8)
    return value + lost + lost.gather(1, y[:, None])


def _rise_of(
    rows: Tensor, label: Tensor, region: Region, form: MarginForm, steps: int, slack: float, outward: bool
) -> Tensor:
    """The rise of some classes: rows (c, h) of the last layer, label (B, h) those of the samples' own; (B, c)."""
    direction = rows[None] - label[:, None]  # (B, c, h)
    if region.outputs is not None:
        direction = direction * region.outputs.flatten(1)[:, None].to(rows.dtype)
    lower, upper = scaled_box(region, outward)
    radius = region.radius[:, None]
    if form == "ball":
        return radius * (direction.norm(dim=-1) * (1 + slack) + (FLOOR if outward else 0.0))
    if form == "box":
        return corner(direction, lower[:, None], upper[:, None]) * (1 + slack)
    return support(direction, lower[:, None], upper[:, None], radius, steps, slack)
