"""The norm of a whole layer with a gradient that sees more than one direction: for training with a global bound."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from locallip.norms.base import NormKey, NormRule
from locallip.norms.power import PowerNorm
from locallip.norms.starts import BatchStarts, Place
from locallip.ops import Masked

#: Power steps of a probe: enough to leave the small singular values, too few to leave those near the largest.
PROBE_STEPS = 5


class ProbedNorm(NormRule):
    """The value of `rule`, and the mean gradient of a few norms found from `probes`, fresh random vectors (P, *shape) each.

    The gradient of a spectral norm is that of one singular pair. Where many singular values are nearly the largest, as Muon
    makes them, pushing one down lets the others grow, and the bound grows with them. After a few power steps from random
    vectors each probe is a mixture of the directions near the top, so that together they push them all.
    """

    def __init__(self, rule: PowerNorm, probes: Mapping[Place, Tensor], noise: Mapping[Place, Tensor]):
        self.rule, self.guarantee = rule, rule.guarantee
        self.probes = PowerNorm(PROBE_STEPS, BatchStarts(probes, noise), rule.index)

    def norm(self, op: Masked, key: NormKey, like: Tensor) -> Tensor:
        with torch.no_grad():
            value = self.rule.norm(op, key, like)
        found = self.probes.norm(op, key, like).mean()
        return value + (found - found.detach())
