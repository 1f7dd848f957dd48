"""`Judge`: is a point that an attack found surely inside the ball, and surely classified otherwise?"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from locallip.arithmetic import exact_arithmetic
from locallip.balls import L2, Ball, Domain, outside, reach_of, within
from locallip.certify.prover import Prover, fingerprint, number_of_classes
from locallip.network import Network
from locallip.norms import Guarantee

#: A norm that is computed in float64 is off by less than this share.
SLACK = 1e-9


class Found(NamedTuple):
    """points (B, *shape) in float64, their distance from x (B,), and where the label is surely lost there, (B,) bool."""

    points: Tensor
    distance: Tensor
    broken: Tensor


class Judge:
    """Verdicts on points in float64, on the stored weights, with the rounding of the logits counted.

    What it calls broken is a counterexample in real arithmetic; where that is not sure, it is none. Nothing here rests on a
    bound of norms.
    """

    def __init__(
        self, model: nn.Module, input_shape: Sequence[int], device: torch.device, batch_size: int = 500, ball: Ball = L2
    ):
        # The norms behind an estimate are the cheapest, and a ball of radius 0 needs none of them.
        self._prover = Prover(model, input_shape, Guarantee.ESTIMATE, power_steps=1, seed=0, device=device, norm=ball)
        self.classes, self.fingerprint, self.batch_size = number_of_classes(self._prover), fingerprint(model), batch_size

    @property
    def logits(self) -> Network:
        """The network that is looked at, for a search in any dtype."""
        return self._prover.network

    def predictions(self, x: Tensor) -> Tensor:
        """The class surely ahead at each x, (B,); -1 for a tie or a NaN."""
        parts = [best_class(*self._prover.clean_logits(part.double())) for part in x.split(self.batch_size)]
        return torch.cat(parts) if parts else torch.zeros(0, dtype=torch.long, device=x.device)

    def look(self, x: Tensor, points: Tensor, y: Tensor, eps: Tensor, domain: Domain = None) -> Found:
        """x and points (B, *shape), y (B,), eps (B,) in float64; points a little outside the ball are pulled into it."""
        batches = (values.split(self.batch_size) for values in (x.double(), points, y, eps.double()))
        parts = [
            confirmed(self._prover, centers, found, labels, radii, domain)
            for centers, found, labels, radii in zip(*batches, strict=True)
        ]
        return Found(*(torch.cat(values) for values in zip(*parts, strict=True)))


def confirmed(prover: Prover, x: Tensor, points: Tensor, y: Tensor, eps: Tensor, domain: Domain) -> Found:
    """Which points, found in any precision, surely lose the label inside the ball; x and eps in float64."""
    with exact_arithmetic():
        points = _pulled(x, points.double(), eps, domain, prover.ball)
        distance = prover.ball.length(points - x)
        inside = (distance * (1 + SLACK) <= eps) & ~outside(points, domain)
    return Found(points, distance, inside & surely(points, y, *prover.clean_logits(points))[1])


def surely(x: Tensor, y: Tensor, logits: Tensor, error: Tensor) -> tuple[Tensor, Tensor]:
    """Where y is surely ahead of all other classes, and where surely not, each (B,) bool."""
    finite = torch.isfinite(x.flatten(1)).all(1) & torch.isfinite(logits).all(1) & torch.isfinite(error).all(1)
    label = torch.nn.functional.one_hot(y, logits.shape[1]).bool()
    own, own_error = logits.gather(1, y[:, None]), error.gather(1, y[:, None])
    ahead = (own - own_error > logits + error).masked_fill(label, True).all(1)
    behind = (logits - error > own + own_error).masked_fill(label, False).any(1)
    return ahead & finite, behind & finite


def best_class(logits: Tensor, error: Tensor) -> Tensor:
    """The class surely ahead of all others, (B,); -1 where there is none."""
    best = logits.argmax(1)
    others = torch.nn.functional.one_hot(best, logits.shape[1]).bool()
    own = (logits - error).gather(1, best[:, None])
    ahead = (own > logits + error).masked_fill(others, True).all(1)
    return torch.where(ahead & torch.isfinite(logits).all(1), best, -1)


def _pulled(x: Tensor, points: Tensor, eps: Tensor, domain: Domain, ball: Ball) -> Tensor:
    """Points that are outside of the ball or nearly so, moved a little further into it."""
    reach = reach_of(x, eps) * (1 - 2 * SLACK)
    far = ball.length(points - x) > reach.flatten()
    pulled = torch.where(far.reshape(reach.shape), x + ball.shortened(points - x, reach), points)
    return within(pulled, domain)
