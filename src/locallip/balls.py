"""What a ball of radius eps around x is: the norm that measures a perturbation, l2 or l-infinity.

Every bound knows of a ball two things: the box that holds it, and an l2 ball that holds it. An l-infinity ball is its box,
so linear functions have their exact largest value over it; the l2 ball around a box with half widths r has the radius ||r||,
at most eps sqrt(n) for n inputs. An attack knows how to step, to come back into the ball, and to start anywhere in it.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable

import torch
from torch import Tensor

from locallip.rounding import FLOOR, floored, gamma, up

#: A box that inputs do not leave: the two ends of every value, numbers or tensors (*shape); None for no such box.
Domain = tuple[float, float] | tuple[Tensor, Tensor] | None
#: By so much points stay away from the edge of the ball, which covers the rounding of x + delta unless eps is tiny.
SHRINK = 1e-6


class Ball(ABC):
    """All x' with ||x' - x|| <= eps in one norm; eps is (B,), `reach` is eps as (B, 1, ..., 1)."""

    #: What users write for the norm, and how it is called in sentences.
    norm: str
    words: str
    #: Whether the ball is a box, so that cut with the domain it is one too.
    is_box: bool

    def __repr__(self) -> str:
        return f"the {self.words} ball"

    @abstractmethod
    def stretch(self, count: int) -> float:
        """The radius of the l2 ball around a ball of radius 1 in `count` dimensions, up to rounding."""

    @abstractmethod
    def l2_radius(self, x: Tensor, eps: Tensor, box: tuple[Tensor, Tensor], outward: bool) -> Tensor:
        """||x' - x||_2 at most, for all x' of the ball that lie in the box (each end (B, *shape)); (B,), or as eps is."""

    @abstractmethod
    def length(self, delta: Tensor) -> Tensor:
        """||delta||, (B,), up to rounding."""

    @abstractmethod
    def steepest(self, slope: Tensor) -> Tensor:
        """The step of length 1 along which a function with this gradient (B, *shape) rises most; 0 where there is none."""

    @abstractmethod
    def shortened(self, delta: Tensor, reach: Tensor) -> Tensor:
        """The closest delta, or nearly, that is no longer than `reach`."""

    @abstractmethod
    def drawn(self, noise: torch.Generator | None, like: Tensor, reach: Tensor) -> Tensor:
        """Random numbers (B, *shape) from which `shortened` makes a start."""

    def project(self, x: Tensor, delta: Tensor, reach: Tensor, domain: Domain) -> Tensor:
        """x + delta, back in the ball and then in the domain (a box that holds x, so the ball is not left again)."""
        return within(x + self.shortened(delta, reach * (1 - SHRINK)), domain)

    def random_start(self, x: Tensor, reach: Tensor, domain: Domain, generator: torch.Generator | None) -> Tensor:
        return self.project(x, self.drawn(generator, x, reach), reach, domain)

    def diameter(self, domain: Domain, x: Tensor) -> float:
        """No two points of the domain are further apart; infinity without one. x is (B, *shape), with B > 0."""
        if domain is None:
            return math.inf
        low, high = (torch.as_tensor(end, dtype=torch.float64, device=x.device).expand(x.shape[1:]) for end in domain)
        return float(self.length((high - low)[None]))


class _L2(Ball):
    norm, words, is_box = "2", "l2", False

    def stretch(self, count: int) -> float:
        return 1.0

    def l2_radius(self, x: Tensor, eps: Tensor, box: tuple[Tensor, Tensor], outward: bool) -> Tensor:
        return floored(eps, eps > 0) if outward else eps

    def length(self, delta: Tensor) -> Tensor:
        return delta.flatten(1).norm(dim=1)

    def steepest(self, slope: Tensor) -> Tensor:
        """Divided twice, as the square of a gradient may overflow or vanish."""
        tiny = torch.finfo(slope.dtype).tiny
        slope = torch.nan_to_num(slope, nan=0.0, posinf=0.0, neginf=0.0)
        shape = (-1, *[1] * (slope.dim() - 1))
        slope = slope / slope.flatten(1).abs().amax(1).clamp(min=tiny).reshape(shape)
        return slope / slope.flatten(1).norm(dim=1).clamp(min=tiny).reshape(shape)

    def shortened(self, delta: Tensor, reach: Tensor) -> Tensor:
        length = self.length(delta).clamp(min=torch.finfo(delta.dtype).tiny).reshape(reach.shape)
        return delta * (reach / length).clamp(max=1)

    def drawn(self, noise: torch.Generator | None, like: Tensor, reach: Tensor) -> Tensor:
        return _on(like, noise, torch.randn) * reach


class _Inf(Ball):
    norm, words, is_box = "inf", "l-infinity", True

    def stretch(self, count: int) -> float:
        return math.sqrt(count)

    def l2_radius(self, x: Tensor, eps: Tensor, box: tuple[Tensor, Tensor], outward: bool) -> Tensor:
        """eps sqrt(n), or the distance from x to the furthest corner of the box, rounded up."""
        radius = eps * self.stretch(x[:1].numel())
        if not outward:
            return radius
        radius, (lower, upper) = floored(up(radius), eps > 0), box
        half = up(torch.maximum(upper - x, x - lower).clamp(min=0)).flatten(1)
        # Squares of numbers below 1e-154 vanish, which FLOOR covers.
        corner = up(half.norm(dim=1), 16 + half.shape[1]) + FLOOR
        return torch.where(corner < radius, corner, radius)  # a NaN changes nothing

    def length(self, delta: Tensor) -> Tensor:
        return delta.flatten(1).abs().amax(1)

    def steepest(self, slope: Tensor) -> Tensor:
        return torch.nan_to_num(slope, nan=0.0, posinf=0.0, neginf=0.0).sign()

    def shortened(self, delta: Tensor, reach: Tensor) -> Tensor:
        return torch.minimum(torch.maximum(delta, -reach), reach)

    def drawn(self, noise: torch.Generator | None, like: Tensor, reach: Tensor) -> Tensor:
        return (2 * _on(like, noise, torch.rand) - 1) * reach


L2: Ball = _L2()
INF: Ball = _Inf()
_BALLS = (L2, INF)
NORMS = tuple(ball.norm for ball in _BALLS)


def as_ball(norm: object) -> Ball:
    """The ball of a norm: "2" or 2, "inf" or infinity, or a ball itself."""
    if isinstance(norm, Ball):
        return norm
    for ball in _BALLS:
        if norm == ball.norm or (isinstance(norm, (int, float)) and not isinstance(norm, bool) and norm == float(ball.norm)):
            return ball
    raise ValueError(f"norm must be '2' or 'inf', got {norm!r}: those are the balls that bounds are known over")


def said(norm: str) -> str:
    """What a sentence adds to a radius that is not one of l2."""
    return "" if norm == L2.norm else f" in {as_ball(norm).words}"


def within(x: Tensor, domain: Domain) -> Tensor:
    """x moved into the domain."""
    if domain is None:
        return x
    low, high = domain
    if isinstance(low, Tensor) or isinstance(high, Tensor):
        low, high = (torch.as_tensor(end, dtype=x.dtype, device=x.device) for end in domain)
        return torch.minimum(torch.maximum(x, low), high)
    return x.clamp(low, high)


def outside(x: Tensor, domain: Domain) -> Tensor:
    """Which samples have a value outside the domain, or a NaN, (B,) bool."""
    if domain is None:
        return torch.zeros(len(x), dtype=torch.bool, device=x.device)
    low, high = (end.to(x.device) if isinstance(end, Tensor) else end for end in domain)
    return ~((x >= low) & (x <= high)).flatten(1).all(1)


def reach_of(x: Tensor, eps: Tensor) -> Tensor:
    """eps (B,) in the dtype of x and with as many dimensions, (B, 1, ..., 1)."""
    return eps.to(x.dtype).reshape(-1, *[1] * (x.dim() - 1))


def box_of(x: Tensor, eps: Tensor, domain: Domain, outward: bool) -> tuple[Tensor, Tensor]:
    """The box around every ball of radius eps (B,), cut with the domain: the same in every norm."""
    reach = reach_of(x, eps)
    if outward:
        reach = up(reach) + gamma(2, x.dtype) * x.abs()
    lower, upper = x - reach, x + reach
    return within(lower, domain), within(upper, domain)


def _on(like: Tensor, generator: torch.Generator | None, draw: Callable[..., Tensor]) -> Tensor:
    """Random numbers of the shape of `like`; a generator of the CPU gives the same ones on every device."""
    place = like.device if generator is None else generator.device
    return draw(like.shape, dtype=like.dtype, device=place, generator=generator).to(like.device)
