"""Attack at the certified radius: gradient ascent towards a chosen class, with steps of several lengths."""

from __future__ import annotations

import torch
from torch import Tensor

from locallip.audit.paths import Found, Goal, choice, lead_and_slope, lead_of, noise, on_sphere, shaped, unit

#: Lengths of the first step in radii; they shrink to nothing. The longest goes nearly to where the slope points.
STRIDES = (0.05, 0.2, 0.5, 4.0)


def attack(goal: Goal) -> Found:
    """Ends on the sphere: at the best point of the path, or where the slope at that point leads, whichever is better."""
    x, radius = goal.claims.x.to(goal.dtype), goal.claims.radius.to(goal.dtype)
    delta = climb(goal, x, radius)
    points = on_sphere(goal.claims, delta)
    precise = goal._replace(dtype=torch.float64)
    lead, slope = lead_and_slope(precise, points)
    other = on_sphere(goal.claims, goal.claims.ball.steepest(slope))
    better = lead_of(precise, other) < lead
    return Found(torch.where(shaped(better, x), other, points), goal.claims)


def climb(goal: Goal, x: Tensor, radius: Tensor) -> Tensor:
    """The best delta of each path, (B, *shape); half of the paths start at x and half on the sphere."""
    reach, stride = shaped(radius, x), shaped(choice(goal, STRIDES), x)
    delta = unit(goal.claims, noise(goal)) * reach * shaped(choice(goal, (1e-3, 1.0)), x)
    best, best_lead = delta, torch.full_like(radius, float("inf"))
    for step in range(goal.steps + 1):
        lead, slope = lead_and_slope(goal, x + delta)
        better = lead < best_lead
        best_lead = torch.where(better, lead, best_lead)
        best = torch.where(shaped(better, x), delta, best)
        moved = delta + stride * (1 - step / (goal.steps + 1)) * reach * goal.claims.ball.steepest(slope)
        delta = goal.claims.ball.shortened(moved, reach)
    return best
