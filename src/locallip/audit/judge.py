"""Who says whether an attempt has broken a certificate: the network in float64, with a bound of what its rounding hides."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from locallip.attacks import margins
from locallip.audit.claims import Claims
from locallip.audit.inside import inside
from locallip.certify.prover import Prover, exact_arithmetic
from locallip.norms import Guarantee


class Judgement(NamedTuple):
    """Per point, (B,): whether it counts (it lies in the ball), whether it surely has another class, whether that may be
    due to rounding, and the label's lead there as a share of its lead at x."""

    counts: Tensor
    broken: Tensor
    doubtful: Tensor
    lead: Tensor


class Judge:
    """Holds points against claims about one network."""

    def __init__(self, model: nn.Module, input_shape: torch.Size, device: torch.device):
        # No norm enters what is used of it: logits at single points and a bound of their error.
        self._prover = Prover(model, input_shape, Guarantee.ESTIMATE, power_steps=1, seed=0, device=device)
        self.network = self._prover.network
        kinds = [p.dtype for p in model.parameters()]
        #: Searches may be in the network's own precision; what they find is judged in float64.
        self.dtype = torch.float64 if torch.float64 in kinds else torch.float32

    def __call__(self, claims: Claims, points: Tensor) -> Judgement:
        """One claim per point, (B, *shape) in float64."""
        with exact_arithmetic():
            counts = inside(claims.x, points, claims.radius, claims.ball)
            lead = margins(self.network(points), claims.y)
            clean = margins(self.network(claims.x), claims.y)
            lost = counts & ~(lead > 0)  # a NaN is lost, too
            broken = torch.zeros_like(lost)
            rows = lost.nonzero()[:, 0]
            if len(rows):
                broken[rows] = self._surely_behind(points[rows], claims.y[rows])
        return Judgement(counts, broken, lost & ~broken, lead / clean)

    def _surely_behind(self, points: Tensor, y: Tensor) -> Tensor:
        """Where some class is above y by more than rounding can explain, (B,) bool."""
        logits, error = self._prover.clean_logits(points)
        own = (logits + error).gather(1, y[:, None])
        others = (logits - error).scatter(1, y[:, None], -float("inf"))
        return (others > own).any(1) & torch.isfinite(logits).all(1)
