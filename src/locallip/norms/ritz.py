"""The norm from below by Lanczos: the largest Rayleigh quotient that so many products with A^T A can find.

Power iteration ends with the quotient of one vector of the Krylov space of its start; Lanczos with as many products takes
the best of the whole space (Golub and Van Loan 2013, section 10.1), so it is never further from the norm, and mostly has
converged where power iteration still creeps. Neither proves anything.
"""

from __future__ import annotations

import torch
from torch import Tensor

from locallip.norms.base import Guarantee, Noise, NormKey, NormRule
from locallip.norms.lanczos import ORTHOGONAL_LIMIT, Lanczos, gram_operator
from locallip.ops import Masked


class RitzNorm(NormRule):
    """At most the norm, but for rounding, after `steps` products with A^T A from a random start; ESTIMATE.

    Large layers are computed in float32, several times as fast on a GPU and good to 1e-6.
    """

    guarantee = Guarantee.ESTIMATE

    def __init__(self, steps: int, seed: int | None = None, memory: int = 2**30):
        self.steps, self.memory = steps, memory
        self._noise = Noise(seed)

    def norm(self, op: Masked, key: NormKey, like: Tensor) -> Tensor:
        n = min(op.in_shape.numel(), op.out_shape.numel())
        steps = min(self.steps, n)
        orthogonal = n <= ORTHOGONAL_LIMIT
        chunk = max(1, self.memory // (8 * n * (4 + (steps if orthogonal else 0))))
        with torch.no_grad():
            parts = [self._part(op.select(slice(i, i + chunk)), steps, orthogonal, like) for i in range(0, op.batch, chunk)]
        return torch.cat(parts).to(like.dtype)

    def _part(self, op: Masked, steps: int, orthogonal: bool, like: Tensor) -> Tensor:
        numbers = like if orthogonal else like.float()
        gram, support = gram_operator(op, numbers)
        process = Lanczos(gram, lambda: self._noise(support.shape, numbers) * support, steps, orthogonalize=orthogonal)
        process.run(steps)
        return process.matrix().largest_eigenvalue().clamp(min=0).sqrt()
