"""Power iteration: the paper's spectral norm. It approaches from below, so it is an estimate: right for training."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from locallip.norms.base import Guarantee, Noise, NormKey, NormRule
from locallip.norms.starts import WarmStarts
from locallip.ops import Masked


class PowerNorm(NormRule):
    """`steps` steps of Algorithm 1, from the saved vectors of the samples `index` or from random ones.

    With v = A u / ||A u|| and u' = A^T v / ||A^T v|| of the last step, the paper's sigma = v^T A u' is ||A^T v||: the last adjoint
    is the whole product, and the only one that the gradient runs through.
    Differs from the paper: the authors' code differentiates through all iterations.
    """

    guarantee = Guarantee.ESTIMATE

    def __init__(
        self,
        steps: int,
        starts: WarmStarts | None = None,
        index: Tensor | None = None,
        seed: int | None = None,
    ):
        if steps < 1:
            raise ValueError(f"power iteration needs at least one step, got {steps}")
        if (starts is None) != (index is None):
            raise ValueError("warm starts need the index of each sample, and the other way round")
        self.steps, self.starts, self.index, self._noise = steps, starts, index, Noise(seed)

    def norm(self, op: Masked, key: NormKey, like: Tensor) -> Tensor:
        masks = _Weights.of(op, like.dtype)
        with torch.no_grad():
            u = self._start(op, masks, key, like)
            for step in range(self.steps - 1):
                u = masks.adjoint(masks.apply(u))
                if step % 4 == 0:  # often enough against overflow
                    u = _unit_(u)
            v = _unit_(masks.on_rows(masks.apply(u)))
            v = v if masks.projects else masks.on_rows(v)
        image = op.base.adjoint(v)
        with torch.no_grad():
            weighed = masks.on_cols(image)
            sigma = _length(weighed)
            u = weighed / _shaped(sigma.clamp(min=torch.finfo(v.dtype).tiny), weighed)
            self._keep(op, key, u)
            u = u if masks.projects else masks.on_cols(u)
        return _through_product(u, image, sigma)

    def _start(self, op: Masked, masks: _Weights, key: NormKey, like: Tensor) -> Tensor:
        if self.starts is None or not self._has_own_vectors(op):
            start = self._noise((op.batch, *op.in_shape), like)
        else:
            assert self.index is not None
            # A saved vector may lie wholly in the columns that today's mask removes; a little of everything does not.
            start = self.starts.get(key, op.in_shape, self.index).to(like.dtype)
            start = start + self.starts.jitter(key, op.in_shape, like)
        return masks.on_cols(start)

    def _keep(self, op: Masked, key: NormKey, u: Tensor) -> None:
        if self.starts is not None and self.index is not None and self._has_own_vectors(op):
            self.starts.put(key, self.index, u)

    def _has_own_vectors(self, op: Masked) -> bool:
        """An operator without masks is the same for all samples of a batch and has no vector per sample."""
        return self.index is not None and op.batch == len(self.index)


def _through_product(u: Tensor, image: Tensor, sigma: Tensor) -> Tensor:
    """sigma, with the gradient of u^T image. In training u is kept for it in 16 bits: half the memory, 0.2 % of a step."""
    if u.dtype == torch.float32 and image.requires_grad:
        u = u.to(torch.bfloat16)
    product = (u * image).sum(tuple(range(1, u.dim())))
    return product + (sigma - product.detach())


@dataclass(frozen=True)
class _Weights:
    """The masks of an operator, converted once; 0/1 masks are applied once where the formula has them twice."""

    op: Masked
    rows: Tensor | None
    cols: Tensor | None
    projects: bool

    @classmethod
    def of(cls, op: Masked, dtype: torch.dtype) -> _Weights:
        rows = None if op.rows is None else op.rows.to(dtype)
        cols = None if op.cols is None else op.cols.to(dtype)
        projects = all(weights is None or weights.dtype == torch.bool for weights in (op.rows, op.cols))
        return cls(op, rows, cols, projects)

    def on_rows(self, w: Tensor) -> Tensor:
        return w if self.rows is None else w * self.rows

    def on_cols(self, u: Tensor) -> Tensor:
        return u if self.cols is None else u * self.cols

    def apply(self, u: Tensor) -> Tensor:
        """W diag(cols) u; 0/1 columns are in u already."""
        return self.op.base.apply(u if self.projects else self.on_cols(u))

    def adjoint(self, w: Tensor) -> Tensor:
        """A^T diag(rows) w; 0/1 rows are applied once."""
        w = self.on_rows(w)
        return self.on_cols(self.op.base.adjoint(w if self.projects else self.on_rows(w)))


def _unit_(v: Tensor) -> Tensor:
    """v / ||v|| per sample, and 0 for 0; overwrites v, which nobody else may hold."""
    return v.div_(_shaped(_length(v).clamp(min=torch.finfo(v.dtype).tiny), v))


def _length(v: Tensor) -> Tensor:
    """||v|| per sample, (B,), in whatever memory format v comes."""
    return torch.linalg.vector_norm(v, dim=tuple(range(1, v.dim())))


def _shaped(values: Tensor, like: Tensor) -> Tensor:
    return values.reshape(-1, *[1] * (like.dim() - 1))
