"""The largest value of a linear function over a box cut with a ball, by a dual of which every multiplier is valid."""

from __future__ import annotations

import torch
from torch import Tensor

from locallip.bounds.region import Region
from locallip.rounding import up


def support(direction: Tensor, lower: Tensor, upper: Tensor, radius: Tensor, steps: int = 30, slack: float = 0.0) -> Tensor:
    """max d.t over lower <= t <= upper, ||t|| <= radius, or larger; d (B, C, h), bounds (B, 1, h), radius (B, 1).

    The one-multiplier dual: for every mu > 0 the value  radius^2 / (2 mu) + sum_i max_t (d_i t - t^2 / (2 mu))  is an upper
    bound, and the best mu gives the optimum. So `steps` changes tightness, never validity. Needs lower <= 0 <= upper.
    `slack` is a relative rounding allowance per term.
    """
    with torch.no_grad():
        mu = multiplier(direction, lower, upper, radius, steps)
    t = torch.minimum(torch.maximum(mu[..., None] * direction, lower), upper)
    quadratic = t.square().sum(-1) / (2 * mu)
    ball_share = radius.square() / (2 * mu)
    dual = ball_share + (direction * t).sum(-1) - quadratic
    most = corner(direction, lower, upper)
    if slack:
        dual = dual + slack * (ball_share + (direction * t).abs().sum(-1) + quadratic)
        most = most * (1 + slack)
    return torch.minimum(dual, most)


def corner(direction: Tensor, lower: Tensor, upper: Tensor) -> Tensor:
    """max d.t over the box alone, (B, C)."""
    return (direction * torch.where(direction > 0, upper, lower)).sum(-1)


def multiplier(direction: Tensor, lower: Tensor, upper: Tensor, radius: Tensor, steps: int) -> Tensor:
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


def scaled_box(region: Region, outward: bool) -> tuple[Tensor, Tensor]:
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
