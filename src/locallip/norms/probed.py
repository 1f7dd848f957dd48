"""The norm of a whole layer with a gradient that sees more than one direction: for training with a global bound."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from locallip.norms.base import NormKey, NormRule
from locallip.norms.power import PowerNorm, unit
from locallip.norms.starts import BatchStarts, Place
from locallip.ops import Masked

#: Singular values above this share of the largest pass the filter, and the more the nearer they are to it.
NEAR_THE_TOP = 0.95
#: Degree of the filter: what lies below is 88 times weaker than the top, for which power iteration needs 44 steps.
DEGREE = 8


class ProbedNorm(NormRule):
    """The value of `rule`, and the mean gradient of a few norms found from `probes`, fresh random vectors (P, *shape) each.

    The gradient of a spectral norm is that of one singular pair. Where many singular values are nearly the largest, as Muon
    makes them, pushing one down lets the others grow, and the bound grows with them. Each probe is a random mixture of the
    directions near the top, so that together they push them all; and none further down, which would cost the network
    strength that the bound does not charge for.
    """

    def __init__(self, rule: PowerNorm, probes: Mapping[Place, Tensor], noise: Mapping[Place, Tensor]):
        self.rule, self.guarantee = rule, rule.guarantee
        self.probes, self.noise = probes, noise

    def norm(self, op: Masked, key: NormKey, like: Tensor) -> Tensor:
        place = key[:2]
        with torch.no_grad():
            value = self.rule.norm(op, key, like)
            mixture = near_the_top(op, self.probes[place].to(like.dtype), value)
        found = PowerNorm(1, BatchStarts({place: mixture}, self.noise), self.rule.index).norm(op, key, like).mean()
        return value + (found - found.detach())


def near_the_top(op: Masked, u: Tensor, norm: Tensor) -> Tensor:
    """What `u` (P, *in_shape) has of the singular directions near the largest, each of length 1; `norm` (1,) is that one.

    Applies the Chebyshev polynomial T of A^T A whose interval [-1, 1] is that of the singular values up to NEAR_THE_TOP
    times the norm: |T| is at most 1 there and grows as fast beyond as any polynomial of its degree can.
    """
    smallest = torch.finfo(torch.float32).tiny ** 0.5
    scale = (2**0.5 / (NEAR_THE_TOP * norm).clamp(min=smallest)).to(u.dtype).reshape(-1, *[1] * (u.dim() - 1))

    def moved(v: Tensor) -> Tensor:  # scaled after either product, as their square may be out of range
        return op.adjoint(op.apply(v) * scale) * scale - v

    before, now = u, moved(u)
    for _ in range(DEGREE - 1):
        before, now = now, 2 * moved(now) - before
    return unit(now)
