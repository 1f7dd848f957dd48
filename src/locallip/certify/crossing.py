"""Where a margin that falls with eps is used up, for many samples at once, in few probes."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

#: Gives the margins of the samples `index` (K,) at eps (K,); NaN where there is none.
Probe = Callable[[Tensor, Tensor], Tensor]
#: What a margin loses on a ball grows about as eps ** power; this is taken for the power until two probes say otherwise.
POWER = 1.3
_POWERS = 0.5, 8.0
#: A step outwards or inwards without a bracket goes at most so far, as a factor.
_STRIDE = 32.0


class Crossing:
    """A bracket per sample: the margin was above 0 at `low` (0: at no eps) and not above 0 at `high` (infinity: nowhere).

    log(what the margin has lost / what it was at eps 0) is nearly a line over log(eps), so steps are those of a secant in
    these coordinates. Where both ends are known, the end that stays loses half its weight (Illinois), and a step goes half a
    tolerance beyond the root that is guessed, to the side where no probe was last, which closes the bracket. Nothing but the
    number of probes rests on this: what is reported was probed.
    """

    def __init__(self, lead: Tensor, most: Tensor, power: Tensor | None = None):
        self.lead, self.most = lead, most
        self.low, self.high = torch.zeros_like(lead), torch.full_like(lead, float("inf"))
        self.power = torch.full_like(lead, POWER) if power is None else power.clone()
        self._low_loss, self._high_loss = torch.full_like(lead, -float("inf")), torch.full_like(lead, float("inf"))
        self._last = torch.zeros_like(lead)  # the eps of the last probe
        self._last_loss = torch.full_like(lead, float("nan"))
        self._low_was_last = torch.zeros_like(lead, dtype=torch.bool)

    def search(
        self,
        probe: Probe,
        index: Tensor,
        first: Tensor,
        rtol: float,
        probes: int,
        enough: Tensor | None = None,
        trusting: bool = False,
    ) -> None:
        """Narrow the brackets of `index`, from eps `first` (N,) on, and no longer where `high` is at most `enough` (N,).

        `trusting` brackets need not be closed: it is enough that the guess lies that near to `low`.
        Dear probes are spared so.
        """
        trial = first
        for _ in range(probes):
            open_ = (self.high - self.low > rtol * self.high) | torch.isinf(self.high)
            open_ &= (self.low < self.most) & (trial > 0)
            if trusting:
                open_ &= torch.isinf(self.high) | ~(self.root() <= self.low * (1 + rtol))
            if enough is not None:
                open_ &= self.high > enough
            index = index[open_[index]]
            if not len(index):
                return
            trial = torch.minimum(trial, self.most)
            self.tell(index, trial[index], probe(index, trial[index]))
            trial = self.next(rtol)

    def tell(self, index: Tensor, eps: Tensor, margin: Tensor) -> None:
        """Margins (K,) that were found at eps (K,)."""
        # Rounding may let a margin on a small ball be larger than at its center: then nothing is lost.
        loss = ((self.lead[index] - margin) / self.lead[index]).clamp(min=0).log()
        loss = torch.where(torch.isfinite(margin), loss, float("inf"))
        step = (eps / self._last[index]).log()
        slope = (loss - self._last_loss[index]) / step
        clear = torch.isfinite(slope) & (step.abs() > 0.02)  # a smaller step shows more noise of norms than slope
        self.power[index] = torch.where(clear, slope.clamp(*_POWERS), self.power[index])
        self._last[index], self._last_loss[index] = eps, loss
        up, again = margin > 0, self._low_was_last[index]
        self._halve(index[up & again], index[~up & ~again])
        self._low_was_last[index] = up
        self._raise(index[up], eps[up], loss[up])
        self._lower(index[~up], eps[~up], loss[~up])

    def _halve(self, low_again: Tensor, high_again: Tensor) -> None:
        self._high_loss[low_again] /= 2
        self._low_loss[high_again] /= 2

    def _raise(self, index: Tensor, eps: Tensor, loss: Tensor) -> None:
        better = eps > self.low[index]
        self.low[index[better]], self._low_loss[index[better]] = eps[better], loss[better]

    def _lower(self, index: Tensor, eps: Tensor, loss: Tensor) -> None:
        better = eps < self.high[index]
        self.high[index[better]], self._high_loss[index[better]] = eps[better], loss[better]

    def root(self) -> Tensor:
        """Where the margin is guessed to be 0, (N,), inside the bracket."""
        width = (self.high / self.low).log()
        share = self._low_loss / (self._low_loss - self._high_loss)
        inside = self.low * (width * torch.where(torch.isfinite(share), share, 0.5).clamp(0, 1)).exp()
        outwards = self.low * (-self._low_loss / self.power).exp().clamp(max=_STRIDE)
        inwards = self.high * (-self._high_loss / self.power).exp().clamp(min=1 / _STRIDE)
        guess = torch.where(torch.isinf(self.high), outwards, torch.where(self.low > 0, inside, inwards))
        return torch.minimum(torch.maximum(guess, self.low), self.high)

    def next(self, rtol: float) -> Tensor:
        """The eps to probe next, (N,)."""
        beyond = 1 + rtol / 2 * torch.where(self._low_was_last, torch.ones_like(self.low), -1.0)
        bracketed = (self.low > 0) & torch.isfinite(self.high)
        # Without a bracket the guess is rougher, and a step too short costs a probe.
        guess = self.root() * torch.where(bracketed, beyond, beyond**4)
        inside = torch.minimum(torch.maximum(guess, self.low * (1 + rtol / 4)), self.high * (1 - rtol / 4))
        return torch.where(bracketed, inside, guess)
