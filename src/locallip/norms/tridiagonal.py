"""Symmetric tridiagonal matrices T in batches: the largest eigenvalue, and how far above it det(mu - T) passes a value.

det(mu - T) is the product of the pivots d_1 = mu - alpha_1, d_i = mu - alpha_i - beta_{i-1}^2 / d_{i-1}, all positive
exactly where mu is above every eigenvalue (Sturm). Computed pivots are the exact ones of a matrix whose entries differ in
their last digits (Kahan 1966), so that what is found moves by a few units of rounding of the largest entry. Many mu are
tried at a time: a step of the recurrence is one small kernel, whatever their number.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

#: Points tried at a time, and how often an interval is cut into so many: 64^6 = 7e10 and 64^4 = 2e7 parts.
POINTS = 64
CUTS_OF_EIGENVALUE, CUTS_OF_GAP = 6, 4
#: No gap above the largest eigenvalue is resolved below this share of it.
SMALLEST_GAP = 1e-13
#: Pivots held at a time: 256 MB.
_PIVOTS = 2**25


class Tridiagonal(NamedTuple):
    """alpha (B, k) on the diagonal, beta (B, k - 1) beside it, in float64."""

    alpha: Tensor
    beta: Tensor

    def largest_eigenvalue(self) -> Tensor:
        """(B,), from above to a share of 1e-10; NaN where an entry is not finite."""
        finite, matrix = self._finite()
        beside = matrix.beta.abs()
        reach = torch.nn.functional.pad(beside, (0, 1)) + torch.nn.functional.pad(beside, (1, 0))
        high = (matrix.alpha + reach).amax(1)  # Gershgorin
        low = matrix.alpha.amax(1)
        high = high + 1e-15 * (matrix.alpha.abs() + reach).amax(1)
        found = _first_above(low, high, CUTS_OF_EIGENVALUE, lambda mu: matrix._of_pivots(mu, _all_positive))
        return torch.where(finite, found, float("nan"))

    def passes(self, top: Tensor, log_value: Tensor) -> Tensor:
        """(B,) at least the mu above the largest eigenvalue `top` where log det(mu - T) is log_value (B,)."""
        finite, matrix = self._finite()
        finite = finite & torch.isfinite(top) & ~log_value.isnan()
        top = torch.where(finite, top, 1.0)
        # Every eigenvalue is at most `top`, so det is at least (mu - top)^k.
        high = log_value / matrix.alpha.shape[1]
        low = (SMALLEST_GAP * top).clamp(min=torch.finfo(top.dtype).tiny).log()
        some = torch.where(high > low, high, low)
        gap = _first_above(
            low, some, CUTS_OF_GAP, lambda gap: matrix.log_determinant(top[:, None] + gap.exp()) > log_value[:, None]
        ).exp()
        gap = torch.where(top > 0, gap, high.exp())
        return torch.where(finite, top + gap, float("nan"))

    def log_determinant(self, mu: Tensor) -> Tensor:
        """log det(mu - T) for mu (B, m), minus infinity where mu is not above all eigenvalues."""
        return self._of_pivots(mu, lambda pivots: pivots.log().sum(0).where(_all_positive(pivots), -float("inf")))

    def _of_pivots(self, mu: Tensor, reduce: Callable[[Tensor], Tensor]) -> Tensor:
        """What `reduce` makes of the pivots (k, B, m) for mu (B, m)."""
        chunk = max(1, _PIVOTS // (self.alpha.shape[1] * mu.shape[1]))
        parts = zip(self.alpha.split(chunk), self.beta.split(chunk), mu.split(chunk), strict=True)
        return torch.cat([reduce(_pivots(*part)) for part in parts])

    def _finite(self) -> tuple[Tensor, Tridiagonal]:
        """Where all entries are finite (B,), and the matrices with zeros elsewhere."""
        finite = torch.isfinite(self.alpha).all(1) & torch.isfinite(self.beta).all(1)
        return finite, Tridiagonal(*(torch.where(finite[:, None], entries, 0.0) for entries in self))


def _pivots(alpha: Tensor, beta: Tensor, mu: Tensor) -> Tensor:
    pivots = mu - alpha.T[:, :, None]
    squares = -(beta.T[:, :, None] ** 2)
    for i in range(1, len(pivots)):
        pivots[i].addcdiv_(squares[i - 1], pivots[i - 1])
    return pivots


def _all_positive(pivots: Tensor) -> Tensor:
    return (pivots > 0).all(0)


def _first_above(low: Tensor, high: Tensor, cuts: int, is_above: Callable[[Tensor], Tensor]) -> Tensor:
    """(B,) the first point of a fine grid on [low, high] for which `is_above` holds, else high."""
    shares = torch.linspace(0, 1, POINTS + 1, dtype=low.dtype, device=low.device)[1:-1]
    for _ in range(cuts):
        points = torch.cat([low[:, None], low[:, None] + (high - low)[:, None] * shares, high[:, None]], 1)
        above = is_above(points[:, 1:-1])
        first = torch.nn.functional.pad(above, (0, 1), value=True).int().argmax(1, keepdim=True)
        low, high = points.gather(1, first)[:, 0], points.gather(1, first + 1)[:, 0]
    return high
