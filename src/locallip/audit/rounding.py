"""Rounding search: neighbours of the best point on the sphere, moved by single roundings and still exactly in the ball.

After Jin, Ohrimenko and Rubinstein, Getting a-Round Guarantees (2022): a certificate whose radius was computed without
regard to rounding is broken by points whose distance is at most the radius, and by a hair.
"""

from __future__ import annotations

import torch
from torch import Tensor

from locallip.audit.attack import attack
from locallip.audit.claims import Claims
from locallip.audit.paths import Found, Goal, lead_and_slope, length, pulled_in, shaped

#: Neighbours that are tried of one point that an attack has found; roundings by which a coordinate moves at most.
NEIGHBOURS, FARTHEST = 16, 64


def rounding(goal: Goal) -> Found:
    """Ends at neighbours in float64 and, one in four, at numbers of float32, as a file of images would hold them."""
    some = goal.take(torch.arange(0, len(goal.claims), NEIGHBOURS, device=goal.rival.device))
    base = _outermost(some.claims, attack(some).points)
    _, slope = lead_and_slope(some._replace(dtype=torch.float64), base)
    rows = torch.arange(len(goal.claims), device=base.device) // NEIGHBOURS
    claims = some.claims.take(rows)
    neighbours = _neighbours(goal, claims, base[rows], slope[rows])
    itself = torch.arange(len(rows), device=base.device) % NEIGHBOURS == 0
    return Found(torch.where(shaped(itself, base), base[rows], neighbours), claims)


def _outermost(claims: Claims, points: Tensor) -> Tensor:
    """As near to the radius as float64 lets them be."""
    delta = points - claims.x
    return pulled_in(claims, claims.x + delta * shaped(claims.radius / length(claims, delta), delta))


def _neighbours(goal: Goal, claims: Claims, base: Tensor, slope: Tensor) -> Tensor:
    """Random coordinates move by some roundings, most of them in the direction of the slope."""
    touched = _uniform(goal, base.shape) < _uniform(goal, shaped(claims.radius, base).shape)
    moves = (_uniform(goal, base.shape) * (FARTHEST + 1)).floor() * touched
    sign = torch.where(_uniform(goal, base.shape) < 0.1, -slope.sign(), slope.sign())
    spacing = torch.finfo(torch.float64).eps * base.abs().clamp(min=1e-30)
    fine = pulled_in(claims, base + sign * moves * spacing)
    coarse = (base + sign * (moves > FARTHEST // 2) * base.abs() * torch.finfo(torch.float32).eps).float().double()
    as_float32 = torch.arange(len(base), device=base.device) % 4 == 3
    return torch.where(shaped(as_float32, base), pulled_in(claims, coarse, torch.float32), fine)


def _uniform(goal: Goal, shape: torch.Size) -> Tensor:
    return torch.rand(shape, dtype=torch.float64, device=goal.rival.device, generator=goal.generator)
