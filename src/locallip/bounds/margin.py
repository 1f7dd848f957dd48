"""Worst logits: how far each class can come up on the label inside the last box and ball (eqn:bcpworst)."""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from locallip.bounds.propagate import Region, Trace
from locallip.network import Network
from locallip.ops import LinearOp
from locallip.rounding import FLOOR, gamma, up

MarginForm = Literal["box_ball", "box", "ball", "lmt"]


class WorstLogits(NamedTuple):
    """clean = F(x) and worst with worst_i - worst_y >= max over the ball of F_i - F_y; both (B, C)."""

    clean: Tensor
    worst: Tensor


def support(direction: Tensor, lower: Tensor, upper: Tensor, radius: Tensor, steps: int = 30, slack: float = 0.0) -> Tensor:
    """max d.t over lower <= t <= upper, ||t|| <= radius, or larger; d (B, C, h), bounds (B, 1, h), radius (B, 1).

    The one-multiplier dual: for every mu > 0 the value  radius^2 / (2 mu) + sum_i max_t (d_i t - t^2 / (2 mu))  is an upper
    bound, and the best mu gives the optimum. So `steps` changes tightness, never validity. Needs lower <= 0 <= upper.
    `slack` is a relative rounding allowance per term.
    """
    with torch.no_grad():
        mu = _multiplier(direction, lower, upper, radius, steps)
    t = torch.minimum(torch.maximum(mu[..., None] * direction, lower), upper)
    quadratic = t.square().sum(-1) / (2 * mu)
    ball_share = radius.square() / (2 * mu)
    dual = ball_share + (direction * t).sum(-1) - quadratic
    corner = _corner(direction, lower, upper)
    if slack:
        dual = dual + slack * (ball_share + (direction * t).abs().sum(-1) + quadratic)
        corner = corner * (1 + slack)
    return torch.minimum(dual, corner)


def _corner(direction: Tensor, lower: Tensor, upper: Tensor) -> Tensor:
    """max d.t over the box alone, (B, C)."""
    return (direction * torch.where(direction > 0, upper, lower)).sum(-1)


def _multiplier(direction: Tensor, lower: Tensor, upper: Tensor, radius: Tensor, steps: int) -> Tensor:
    """mu with || clip(mu d, lower, upper) || = radius, (B, C), approached from below.

    With the units clipped at the present mu held fixed, the norm is  mu^2 a + b,  which overestimates it for larger mu; its
    root is a step that never overshoots, and each step clips at least one more unit or is the last.
    """
    guard = torch.finfo(direction.dtype).tiny ** 0.5
    mu = radius / direction.norm(dim=-1).clamp(min=guard)
    for _ in range(steps):
        t = mu[..., None] * direction
        clipped = (t <= lower) | (t >= upper)
        a = direction.square().masked_fill(clipped, 0).sum(-1)
        b = torch.minimum(torch.maximum(t, lower), upper).square().masked_fill(~clipped, 0).sum(-1)
        root = ((radius.square() - b).clamp(min=0) / a.clamp(min=guard)).sqrt()
        mu = torch.where(a > guard, torch.maximum(mu, root), mu)
    return mu.clamp(min=guard)


def worst_logits(
    network: Network,
    trace: Trace,
    y: Tensor,
    *,
    form: MarginForm = "box_ball",
    steps: int = 30,
    outward: bool = False,
) -> WorstLogits:
    """Logits that no point of the ball exceeds relative to the label's, for labels y (B,).

    form "box_ball" is BCP's (eqn:bcpworst), "ball" GloRo's, which drops the box, "box" that of interval arithmetic, which
    drops the ball, and "lmt" adds sqrt(2) eps L.
    """
    clean = trace.logits
    if form == "lmt":
        rise = (2**0.5 * trace.regions[0].radius * trace.lipschitz)[:, None].expand_as(clean)
        rise = up(rise) if outward else rise
    else:
        last = network.stages[-1]
        rises = [_rise(op, trace.regions[k], y, form, steps, outward) for k, op in last.terms.items()]
        rise = torch.stack(rises).sum(0)
    label = torch.nn.functional.one_hot(y, clean.shape[1]).bool()
    if not outward:
        return WorstLogits(clean, clean + rise.masked_fill(label, 0))
    assert trace.logits_error is not None
    rise = up(rise) + up(trace.logits_error) + gamma(8, clean.dtype) * clean.abs()
    lowest = clean - up(trace.logits_error) - gamma(8, clean.dtype) * clean.abs()
    return WorstLogits(clean, torch.where(label, lowest, clean + up(rise)))


def _rise(op: LinearOp, region: Region, y: Tensor, form: MarginForm, steps: int, outward: bool) -> Tensor:
    """max (w_i - w_y) . (z(x') - z(x)) over the region of one source, (B, C)."""
    like = region.center
    classes = op.out_shape.numel()
    rows = op.adjoint(torch.eye(classes, dtype=like.dtype, device=like.device)).flatten(1)  # (C, h)
    direction = rows[None] - rows[y][:, None]  # (B, C, h)
    if region.outputs is not None:
        direction = direction * region.outputs.flatten(1)[:, None].to(like.dtype)
    lower, upper = _scaled_box(region, outward)
    radius = region.radius[:, None]
    slack = gamma(op.roundings + direction.shape[-1] + 16, like.dtype) if outward else 0.0
    if form == "ball":
        value = radius * (direction.norm(dim=-1) * (1 + slack) + (FLOOR if outward else 0.0))
    elif form == "box":
        value = _corner(direction, lower[:, None], upper[:, None]) * (1 + slack)
    else:
        value = support(direction, lower[:, None], upper[:, None], radius, steps, slack)
    if not outward:
        return value
    # What the rounding of the rows themselves can add, over the whole box.
    reach = torch.maximum(-region.box.lower + region.center, region.box.upper - region.center)
    reach = up(reach.clamp(min=0) + (0.0 if region.error is None else region.error))
    lost = gamma(op.roundings + 8, like.dtype) * up(op.apply_abs(reach), op.fan_in + 8)
    return value + lost + lost.gather(1, y[:, None])


def _scaled_box(region: Region, outward: bool) -> tuple[Tensor, Tensor]:
    """The box around the center in the coordinates t of z(x') - z(x) = diag(outputs) t; both (B, h), lower <= 0 <= upper."""
    lower = (region.box.lower - region.center).clamp(max=0)
    upper = (region.box.upper - region.center).clamp(min=0)
    if outward and region.error is not None:
        lower, upper = -up(up(-lower) + region.error), up(up(upper) + region.error)
    if region.outputs is None:
        return lower.flatten(1), upper.flatten(1)
    if region.outputs.dtype == torch.bool:
        return (lower * region.outputs).flatten(1), (upper * region.outputs).flatten(1)
    weight = region.outputs.clamp(min=torch.finfo(lower.dtype).tiny)
    lower, upper = lower / weight, upper / weight
    if outward:
        lower, upper = -up(-lower), up(upper)
    return lower.flatten(1), upper.flatten(1)
