"""What all searches share: slopes, and points that are surely in the ball."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from locallip.attacks import margins
from locallip.audit.claims import Claims
from locallip.audit.inside import inside


class Goal(NamedTuple):
    """A batch of search paths: a claim and a rival class for each, (B,), in a network that takes any dtype."""

    network: Callable[[Tensor], Tensor]
    claims: Claims
    rival: Tensor
    dtype: torch.dtype
    generator: torch.Generator
    steps: int

    def take(self, rows: Tensor) -> Goal:
        return self._replace(claims=self.claims.take(rows), rival=self.rival[rows])


class Found(NamedTuple):
    """Where paths ended, (B, *shape) in float64, the claim that each is about, and where known how far away the class
    changes, in radii, (B,)."""

    points: Tensor
    claims: Claims
    distance: Tensor | None = None


class Search(Protocol):
    """One kind of attempt."""

    def __call__(self, goal: Goal) -> Found: ...


def shaped(values: Tensor, like: Tensor) -> Tensor:
    return values.reshape(-1, *[1] * (like.dim() - 1))


def length(claims: Claims, delta: Tensor) -> Tensor:
    """||delta|| per sample in the norm of the claims, (B,), never 0."""
    return claims.ball.length(delta).clamp(min=torch.finfo(delta.dtype).tiny)


def unit(claims: Claims, delta: Tensor) -> Tensor:
    return delta / shaped(length(claims, delta), delta)


def noise(goal: Goal) -> Tensor:
    """Normal numbers of the shape of the inputs, in the dtype of the search."""
    x = goal.claims.x
    return torch.randn(x.shape, dtype=goal.dtype, device=x.device, generator=goal.generator)


def choice(goal: Goal, values: tuple[float, ...]) -> Tensor:
    """One of the values for each path, (B,)."""
    x = goal.claims.x
    drawn = torch.randint(0, len(values), (len(x),), device=x.device, generator=goal.generator)
    return torch.tensor(values, dtype=goal.dtype, device=x.device)[drawn]


def lead_of(goal: Goal, point: Tensor) -> Tensor:
    """How far the label is ahead of the best other class, (B,)."""
    with torch.no_grad():
        return margins(goal.network(point), goal.claims.y)


def lead_and_slope(goal: Goal, point: Tensor, rival: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The lead over the best other class, (B,), and the direction in which the rival gains most on the label."""
    rival = goal.rival if rival is None else rival
    with torch.enable_grad():
        point = point.detach().requires_grad_()
        logits = goal.network(point)
        gain = logits.gather(1, rival[:, None]) - logits.gather(1, goal.claims.y[:, None])
        (slope,) = torch.autograd.grad(gain.sum(), point)
    return margins(logits.detach(), goal.claims.y), slope


def on_sphere(claims: Claims, delta: Tensor) -> Tensor:
    """x + delta with delta stretched to the radius, short of it by what the rounding of the sum can add."""
    direction = unit(claims, delta.double())
    far = length(claims, claims.x + direction * shaped(claims.radius, delta))
    share = (1 - 1e-13 - 4e-16 * far / claims.radius).clamp(min=0)
    return claims.x + direction * shaped(claims.radius * share, delta)


def pulled_in(claims: Claims, point: Tensor, dtype: torch.dtype = torch.float64) -> Tensor:
    """The points themselves where they lie in the ball, else moved inwards by as few roundings of `dtype` as possible."""
    kept, out = point.clone(), ~inside(claims.x, point, claims.radius, claims.ball)
    for power in range(12):
        rows = out.nonzero()[:, 0]
        if not len(rows):
            break
        part, delta = claims.take(rows), point[rows] - claims.x[rows]
        share = (part.radius / length(claims, delta)).clamp(max=1) * (1 - 2.0**power * torch.finfo(dtype).eps)
        kept[rows] = (part.x + delta * shaped(share, delta)).to(dtype).double()
        out[rows] = ~inside(part.x, kept[rows], part.radius, claims.ball)
    return kept
