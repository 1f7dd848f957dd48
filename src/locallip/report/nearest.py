"""The nearest point at which an attack succeeds: gradient ascent in shrinking balls, then back along a line to the image."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from locallip.attacks import margins, pgd_l2

ROUNDS, STEPS, HALVINGS = 5, 20, 12


class Nearest(NamedTuple):
    """point (B, *shape) has lost its label at distance (B,); infinite, and the image itself, where nothing was found."""

    point: Tensor
    distance: Tensor


def nearest(logits: Callable[[Tensor], Tensor], x: Tensor, y: Tensor, top: float, seed: int) -> Nearest:
    """Search from radius `top` downwards; every round looks in a ball of nine tenths of the best distance so far."""
    generator = torch.Generator(x.device).manual_seed(seed)
    best, distance = x.clone(), torch.full((len(x),), float("inf"), dtype=x.dtype, device=x.device)
    reach = torch.full_like(distance, top)
    for _ in range(ROUNDS):
        found = pgd_l2(logits, x, y, reach, steps=STEPS, generator=generator)
        point = _back(logits, x, found, y)
        away = (point - x).flatten(1).norm(dim=1)
        better = _lost(logits, point, y) & (away < distance)
        distance = torch.where(better, away, distance)
        best = torch.where(better.reshape(-1, *[1] * (x.dim() - 1)), point, best)
        reach = torch.where(torch.isfinite(distance), 0.9 * distance, reach)
    return Nearest(best, distance)


def _back(logits: Callable[[Tensor], Tensor], x: Tensor, found: Tensor, y: Tensor) -> Tensor:
    """The nearest point on the line from `found` to x that halving finds to have lost its label."""
    low, high = torch.zeros_like(y, dtype=x.dtype), torch.ones_like(y, dtype=x.dtype)
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        lost = _lost(logits, _between(x, found, middle), y)
        low, high = torch.where(lost, low, middle), torch.where(lost, middle, high)
    return _between(x, found, high)


def _between(x: Tensor, found: Tensor, share: Tensor) -> Tensor:
    return x + share.reshape(-1, *[1] * (x.dim() - 1)) * (found - x)


@torch.no_grad()
def _lost(logits: Callable[[Tensor], Tensor], point: Tensor, y: Tensor) -> Tensor:
    return margins(logits(point), y) < 0
