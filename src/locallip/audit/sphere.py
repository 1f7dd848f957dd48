"""Random points: uniform directions, or corners of a cube, half of them on the sphere and half at a random distance."""

from __future__ import annotations

import torch

from locallip.audit.paths import Found, Goal, noise, on_sphere, shaped


def sphere(goal: Goal) -> Found:
    points, x = on_sphere(goal.claims, goal.claims.ball.steepest(noise(goal))), goal.claims.x
    share = torch.rand(len(x), dtype=x.dtype, device=x.device, generator=goal.generator)
    share = torch.where(torch.arange(len(x), device=x.device) % 2 == 0, 1.0, share)
    return Found(torch.where(shaped(share < 1, x), x + shaped(share, x) * (points - x), points), goal.claims)
