"""Increasing activations without constant regions: their slope on the unit's interval takes the place of the 0/1 mask."""

from __future__ import annotations

from abc import abstractmethod
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from locallip.activations.base import Box, Unitwise, Varying, within
from locallip.rounding import gamma, up


class Curve(NamedTuple):
    """An interval on which an activation is curved one way: convex or concave."""

    start: float
    end: float
    convex: bool


class Increasing(Unitwise):
    """A non-decreasing activation with a known largest slope on every interval.

    A class that names its `curves` has lines and slopes too: it is linear outside of them. It must define all of its
    functions itself; those of a class that it derives from are not taken for its own.
    """

    #: Where the slope jumps or the curvature changes its sign.
    kinks: tuple[float, ...] = (0.0,)
    curves: tuple[Curve, ...] | None = None

    @abstractmethod
    def slope(self, box: Box) -> Tensor:
        """The largest slope on [lower, upper], or larger."""

    def least_slope(self, box: Box) -> Tensor:
        """The smallest slope on [lower, upper], or smaller. A class that derives from one of ours does not inherit it."""
        return torch.zeros_like(box.lower)

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if "least_slope" not in vars(cls):
            cls.least_slope = Increasing.least_slope  # type: ignore[method-assign]

    def derivative(self, z: Tensor) -> Tensor:
        """The slope at z, inside a curve."""
        raise NotImplementedError(f"{type(self).__name__} has no curves")

    def with_slope(self, slope: Tensor, curve: Curve) -> Tensor:
        """About where the activation has this slope on a curve; any number where it has it nowhere."""
        raise NotImplementedError(f"{type(self).__name__} has no curves")

    def image(self, box: Box) -> Box:
        """Values at the ends, moved outward: the functions behind them are good to a few units in the last place."""
        lower, upper = self(box.lower), self(box.upper)
        info = torch.finfo(lower.dtype)
        return Box(lower - 16 * info.eps * lower.abs() - info.tiny, upper + 16 * info.eps * upper.abs() + info.tiny)

    def varying(self, box: Box) -> Varying:
        """The square root of the slope on either side; never so small that products with it could underflow."""
        weight = up(up(self.slope(box), 16).sqrt()).clamp(min=1e-15)
        return Varying(weight, weight)


class LeakyReLU(Increasing):
    """z for z > 0, negative_slope * z below."""

    curves = ()

    def __init__(self, negative_slope: float):
        if negative_slope < 0:
            raise ValueError(f"LeakyReLU with a negative slope factor ({negative_slope}) is not monotone")
        self.negative_slope = negative_slope

    def __call__(self, z: Tensor) -> Tensor:
        return F.leaky_relu(z, within(self.negative_slope, z.dtype))

    def slope(self, box: Box) -> Tensor:
        right = (~(box.upper <= 0)).to(box.upper.dtype)
        left = (~(box.lower >= 0)).to(box.lower.dtype) * self.negative_slope
        return torch.maximum(left, right)

    def least_slope(self, box: Box) -> Tensor:
        one = torch.ones_like(box.lower)
        left, right = (torch.where(here, self.negative_slope * one, one) for here in (box.lower < 0, ~(box.upper > 0)))
        return _known(box, torch.minimum(left, right))


class ELU(Increasing):
    """z for z > 0, alpha (e^z - 1) below."""

    def __init__(self, alpha: float):
        if alpha < 0:
            raise ValueError(f"ELU with negative alpha ({alpha}) is not monotone")
        if alpha > 1e100:
            raise ValueError(f"ELU with alpha={alpha} makes much of what e^z loses where it vanishes; use alpha <= 1e100")
        self.alpha = alpha

    curves = (Curve(-float("inf"), 0.0, convex=True),)

    def __call__(self, z: Tensor) -> Tensor:
        return F.elu(z, within(self.alpha, z.dtype))

    def derivative(self, z: Tensor) -> Tensor:
        return self.alpha * z.clamp(max=0).exp()

    def with_slope(self, slope: Tensor, curve: Curve) -> Tensor:
        return _positive(slope).log() - _positive(torch.full_like(slope, within(self.alpha, slope.dtype))).log()

    def slope(self, box: Box) -> Tensor:
        right = (~(box.upper <= 0)).to(box.upper.dtype)
        left = (~(box.lower >= 0)).to(box.lower.dtype) * self.alpha * box.upper.clamp(max=0).exp()
        return torch.maximum(left, right)

    def least_slope(self, box: Box) -> Tensor:
        """Increasing up to 0, where it may jump to 1."""
        left = torch.where(box.lower < 0, _down(self.derivative(box.lower)), 1.0)
        return _known(box, torch.where(box.upper > 0, left.clamp(max=1.0), left))


class Tanh(Increasing):
    """tanh z; the slope 1/cosh^2 is largest at the point of the interval nearest to 0."""

    curves = (Curve(-float("inf"), 0.0, convex=True), Curve(0.0, float("inf"), convex=False))

    def __call__(self, z: Tensor) -> Tensor:
        return torch.tanh(z)

    def derivative(self, z: Tensor) -> Tensor:
        return z.cosh().square().reciprocal()

    def with_slope(self, slope: Tensor, curve: Curve) -> Tensor:
        size = _positive(slope).rsqrt().clamp(min=1).acosh()
        return -size if curve.convex else size

    def slope(self, box: Box) -> Tensor:
        return _nearest_to_zero(box).cosh().square().reciprocal()

    def least_slope(self, box: Box) -> Tensor:
        return _known(box, _down(torch.minimum(self.derivative(box.lower), self.derivative(box.upper))))


class Sigmoid(Increasing):
    """1 / (1 + e^-z); its slope is 1/(4 cosh^2(z/2))."""

    curves = Tanh.curves

    def __call__(self, z: Tensor) -> Tensor:
        return torch.sigmoid(z)

    def derivative(self, z: Tensor) -> Tensor:
        return (z / 2).cosh().square().reciprocal() / 4

    def with_slope(self, slope: Tensor, curve: Curve) -> Tensor:
        size = 2 * (4 * _positive(slope)).rsqrt().clamp(min=1).acosh()
        return -size if curve.convex else size

    def slope(self, box: Box) -> Tensor:
        return (_nearest_to_zero(box) / 2).cosh().square().reciprocal() / 4

    def least_slope(self, box: Box) -> Tensor:
        return _known(box, _down(torch.minimum(self.derivative(box.lower), self.derivative(box.upper))))


class Softplus(Increasing):
    """log(1 + e^(beta z)) / beta, as the mathematical function: torch's linear shortcut above `threshold` is rounding."""

    def __init__(self, beta: float, threshold: float):
        if beta <= 0:
            raise ValueError(f"Softplus needs beta > 0, got {beta}")
        if threshold < 20:
            raise ValueError(
                f"Softplus with threshold={threshold} jumps by {torch.tensor(-threshold).exp().log1p() / beta:.1e} at "
                "the threshold, so it has no Lipschitz constant; use threshold >= 20"
            )
        self.beta, self.threshold = beta, threshold

    kinks = ()
    curves = (Curve(-float("inf"), float("inf"), convex=True),)

    def derivative(self, z: Tensor) -> Tensor:
        return torch.sigmoid(z * self.beta)

    def with_slope(self, slope: Tensor, curve: Curve) -> Tensor:
        return _positive(slope).clamp(max=1 - 1e-12).logit() / self.beta

    def __call__(self, z: Tensor) -> Tensor:
        return torch.logaddexp(z * self.beta, torch.zeros_like(z)) / self.beta

    def image(self, box: Box) -> Box:
        """The product beta z rounds before the exponential, which makes much of it where |beta z| is large."""
        return super().image(_widened(box))

    def slope(self, box: Box) -> Tensor:
        return torch.sigmoid(_widened(box).upper * self.beta)

    def least_slope(self, box: Box) -> Tensor:
        return _known(box, _down(self.derivative(_widened(box).lower)))


def _widened(box: Box) -> Box:
    slack = gamma(4, box.lower.dtype)
    return Box(box.lower - slack * box.lower.abs(), box.upper + slack * box.upper.abs())


def _positive(slope: Tensor) -> Tensor:
    return slope.clamp(min=1e-30)


def _nearest_to_zero(box: Box) -> Tensor:
    """The point of each interval with the smallest absolute value; NaN stays NaN."""
    return torch.maximum(box.lower, -box.upper).clamp(min=0)


def _down(slope: Tensor) -> Tensor:
    """A number no larger than a slope >= 0 that some roundings may have made too large."""
    info = torch.finfo(slope.dtype)
    return (slope * (1 - 64 * info.eps) - info.tiny).clamp(min=0)


def _known(box: Box, slope: Tensor) -> Tensor:
    """`slope`, and 0 where an end of the box overflowed the wrong way, or is NaN: that proves nothing."""
    return torch.where((box.lower < float("inf")) & (box.upper > -float("inf")), slope, 0.0)
