"""A descent for numbers that many bounds depend on at once, each row of them by itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

#: The length of steps, which shrinks to a tenth.
RATE = 0.08


class Descent:
    """Adam on numbers (n, h) that a bound depends on, every row by itself; of each row the best that was seen counts.

    `rates` are the lengths of the first steps, RATE for all where none are given.
    """

    def __init__(self, slopes: list[Tensor], steps: int, rates: Sequence[Tensor | float] = ()):
        self.steps, self.done, self.rates = steps, 0, list(rates) or [RATE] * len(slopes)
        self.slopes = slopes
        self.means, self.squares = [torch.zeros_like(a) for a in slopes], [torch.zeros_like(a) for a in slopes]
        self.best, self.least = (
            [a.clone() for a in slopes],
            slopes[0].new_full(slopes[0].shape[:1], float("inf")),
        )

    def go_on(self, value: Callable[[list[Tensor]], Tensor], kept: Callable[[Sequence[Tensor]], list[Tensor]]) -> bool:
        """Take the bounds `value` (n,) of the numbers and, but for the last time, a step; False where all was done before.

        `kept` moves numbers to where they may lie.
        """
        if self.done > self.steps:
            return False
        with torch.enable_grad():
            leaves = [alpha.detach().requires_grad_() for alpha in self.slopes]
            found = value(leaves)
            grads = torch.autograd.grad(found.sum(), leaves) if self.done < self.steps else ()
        better = found.detach() < self.least
        self.least = torch.where(better, found.detach(), self.least)
        for kept_so_far, alpha in zip(self.best, self.slopes, strict=True):
            kept_so_far.copy_(torch.where(better[:, None], alpha, kept_so_far))
        self._step(grads)
        self.slopes = kept(self.slopes)
        self.done += 1
        return True

    def _step(self, grads: Sequence[Tensor]) -> None:
        i = self.done
        for alpha, mean, square, grad, rate in zip(self.slopes, self.means, self.squares, grads, self.rates, strict=False):
            if not alpha.numel():
                continue
            mean.lerp_(grad, 0.1)
            square.mul_(0.99).addcmul_(grad, grad, value=0.01)
            root = (square / (1 - 0.99 ** (i + 1))).sqrt()
            root = root + 0.01 * root.amax(1, keepdim=True) + 1e-30  # or units that hardly matter move as noise has it
            alpha.sub_(mean / (1 - 0.9 ** (i + 1)) / root * (rate * (1 - 0.9 * i / max(1, self.steps))))

    def keep(self, rows: Tensor) -> None:
        """Go on with some rows alone."""
        self.slopes, self.means, self.squares, self.best = (
            [values[rows] for values in some] for some in (self.slopes, self.means, self.squares, self.best)
        )
        self.least = self.least[rows]
        self.rates = [rate[rows] if isinstance(rate, Tensor) else rate for rate in self.rates]


def descend(
    value: Callable[[list[Tensor]], Tensor],
    kept: Callable[[Sequence[Tensor]], list[Tensor]],
    slopes: list[Tensor],
    steps: int,
    rates: Sequence[Tensor | float] = (),
) -> tuple[list[Tensor], Tensor]:
    """Numbers (n, h) for which the bounds `value` (n,) are small, and these, by a descent from `slopes` on."""
    search = Descent(slopes, steps, rates)
    while search.go_on(value, kept):
        pass
    return search.best, search.least
