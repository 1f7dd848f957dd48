"""Power iteration: the paper's spectral norm. It approaches from below, so it is an estimate: right for training."""

from __future__ import annotations

import torch
from torch import Tensor

from locallip.norms.base import Guarantee, NormKey, NormRule
from locallip.norms.starts import WarmStarts
from locallip.ops import Masked


class PowerNorm(NormRule):
    """`steps` steps of Algorithm 1, from the saved vectors of the samples `index` or from random ones.

    The vectors are updated without gradient; the gradient runs through the one product ||A u|| = v^T A u.
    Differs from the paper: the authors' code differentiates through all iterations.
    """

    guarantee = Guarantee.ESTIMATE

    def __init__(self, steps: int, starts: WarmStarts | None = None, index: Tensor | None = None):
        if (starts is None) != (index is None):
            raise ValueError("warm starts need the index of each sample, and the other way round")
        self.steps, self.starts, self.index = steps, starts, index

    def norm(self, op: Masked, key: NormKey, like: Tensor) -> Tensor:
        with torch.no_grad():
            u = self._start(op, key, like)
            for _ in range(self.steps):
                u = _unit(op.adjoint(_unit(op.apply(u))))
            self._keep(op, key, u)
        image = op.apply(u)
        return (_unit(image.detach()) * image).flatten(1).sum(1)

    def _start(self, op: Masked, key: NormKey, like: Tensor) -> Tensor:
        if self.starts is None or self._is_shared(op):
            return _unit(_weighed(torch.randn(op.batch, *op.in_shape, dtype=like.dtype, device=like.device), op))
        assert self.index is not None
        saved = _weighed(self.starts.get(key, op.in_shape, self.index).to(like.dtype), op)
        # A saved vector may lie wholly in the columns that today's mask removes: start those samples from the mask.
        fresh = _weighed(torch.ones_like(saved), op)
        alive = saved.flatten(1).norm(dim=1) > 1e-3
        return _unit(torch.where(alive.reshape(-1, *[1] * len(op.in_shape)), saved, fresh))

    def _keep(self, op: Masked, key: NormKey, u: Tensor) -> None:
        if self.starts is not None and self.index is not None and not self._is_shared(op):
            self.starts.put(key, self.index, u)

    def _is_shared(self, op: Masked) -> bool:
        """An operator without masks is the same for all samples and has no vector of its own per sample."""
        return op.rows is None and op.cols is None


def _weighed(u: Tensor, op: Masked) -> Tensor:
    return u if op.cols is None else u * op.cols.to(u.dtype)


def _unit(v: Tensor) -> Tensor:
    """v / ||v|| per sample, and 0 for 0."""
    length = v.flatten(1).norm(dim=1).clamp(min=torch.finfo(v.dtype).tiny)
    return v / length.reshape(-1, *[1] * (v.dim() - 1))
