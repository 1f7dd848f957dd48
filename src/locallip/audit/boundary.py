"""Boundary search: go out until the class changes, come back to just there, and slide along to the nearest such point."""

from __future__ import annotations

import torch
from torch import Tensor

from locallip.audit.paths import Found, Goal, lead_and_slope, lead_of, length, noise, on_sphere, shaped, unit

#: Steps outwards of this many radii each, halvings of a bracket, and rounds of sliding for every ten steps of a path.
STRIDE, HALVINGS, ROUNDS = 0.4, 10, 3
#: How far beyond a guess the boundary is looked for.
BEYOND = 1.3


def boundary(goal: Goal) -> Found:
    """Ends at the nearest point found beyond the boundary; where that is outside of the ball, on the sphere below it."""
    x, radius = goal.claims.x.to(goal.dtype), goal.claims.radius.to(goal.dtype)
    delta = _outwards(goal, x, radius)
    beyond = ~(lead_of(goal, x + delta) > 0)
    delta = _back(goal, x, delta, beyond)
    for _ in range(max(1, ROUNDS * goal.steps // 10)):
        delta = _slide(goal, x, delta, beyond)
    far = length(goal.claims, delta.double()) / goal.claims.radius
    # What lies well within the ball is taken as it is; on the sphere an error of the search is worth the most.
    points = torch.where(shaped(beyond & (far < 1 - 1e-6), x), goal.claims.x + delta.double(), on_sphere(goal.claims, delta))
    seen = beyond & lead_of(goal, x + delta).isfinite()  # an overflow of float32 is no boundary
    return Found(points, goal.claims, torch.where(seen, far, float("inf")))


def _outwards(goal: Goal, x: Tensor, radius: Tensor) -> Tensor:
    """Uphill without a ball, for each path until the class has changed."""
    stride = shaped(radius, x) * STRIDE
    delta = unit(goal.claims, noise(goal)) * stride * 0.1
    for _ in range(goal.steps):
        lead, slope = lead_and_slope(goal, x + delta)
        delta = torch.where(shaped(lead > 0, x), delta + stride * goal.claims.ball.steepest(slope), delta)
    return delta


def _back(goal: Goal, x: Tensor, delta: Tensor, beyond: Tensor) -> Tensor:
    """The part of delta at which the class changes, from the far side; delta itself where it does not."""
    low, high = torch.zeros_like(goal.claims.radius, dtype=goal.dtype), torch.ones_like(goal.claims.radius, dtype=goal.dtype)
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        changed = ~(lead_of(goal, x + shaped(middle, x) * delta) > 0)
        low, high = torch.where(changed, low, middle), torch.where(changed, middle, high)
    return torch.where(shaped(beyond, x), shaped(high, x) * delta, delta)


def _slide(goal: Goal, x: Tensor, delta: Tensor, beyond: Tensor) -> Tensor:
    """Half way to the nearest point of the plane that touches the boundary, then back to the boundary; kept if nearer."""
    logits = goal.network(x + delta).detach()
    rival = logits.scatter(1, goal.claims.y[:, None], -float("inf")).argmax(1)
    _, slope = lead_and_slope(goal, x + delta, rival)
    missing = (logits.gather(1, goal.claims.y[:, None]) - logits.gather(1, rival[:, None]))[:, 0]
    along = (slope * delta).flatten(1).sum(1) + missing
    step = goal.claims.ball.steepest(slope)
    nearest = step * shaped(along / (slope * step).flatten(1).sum(1), x)
    trial = (delta + nearest) * (BEYOND / 2)
    changed = beyond & ~(lead_of(goal, x + trial) > 0)
    trial = _back(goal, x, trial, changed)
    nearer = changed & (length(goal.claims, trial) < length(goal.claims, delta))
    return torch.where(shaped(nearer, x), trial, delta)
