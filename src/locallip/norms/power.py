"""Power iteration: the paper's spectral norm. It approaches from below, so it is an estimate: right for training."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from locallip.norms.base import Guarantee, Noise, NormKey, NormRule
from locallip.norms.starts import BatchStarts, WarmStarts
from locallip.ops import Masked

_SIXTEEN_BITS = (torch.bfloat16, torch.float16)


class PowerNorm(NormRule):
    """Algorithm 1 with the products of `steps` steps, from the saved vectors of the samples `index` or from random ones.

    With v = A u / ||A u|| and u' = A^T v / ||A^T v|| of the last step, the paper's sigma = v^T A u' is ||A^T v||: the last
    adjoint is the whole product, and the only one that the gradient runs through.
    Differs from the paper: the last step takes the best vector of the plane spanned by the last two (Rayleigh-Ritz), which
    costs no further product and gets further; the authors' code differentiates through all iterations.
    """

    guarantee = Guarantee.ESTIMATE

    def __init__(
        self,
        steps: int,
        starts: WarmStarts | BatchStarts | None = None,
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
            for step in range(self.steps - 2):
                u = masks.adjoint(masks.apply(u))
                if step % 4 == 3:  # starts have length 1, so this is often enough against overflow
                    u = unit(u)
            v = masks.on_rows(masks.apply(u))
            if self.steps > 1:
                v = _best_of_two(masks, u, v)
            # v is never divided by its length: that would be one more pass over it, where sigma is one number per sample.
            length = _length(v).clamp(min=torch.finfo(torch.float32).tiny)
            v = v if masks.projects else masks.on_rows(v)
        image = op.base.adjoint(v)
        with torch.no_grad():
            weighed = masks.on_cols(image)
            sigma = _length(weighed) / length
            u = unit(weighed)
            self._keep(op, key, u)
            u = u if masks.projects else masks.on_cols(u)
        sigma = sigma.to(like.dtype)
        if not image.requires_grad:
            return sigma
        # In training u is kept in 16 bits: half the memory, 0.2 % of a step.
        kept = u.to(torch.bfloat16) if u.dtype == torch.float32 else u
        return _ThroughProduct.apply(image, sigma, kept, length)

    def _start(self, op: Masked, masks: _Weights, key: NormKey, like: Tensor) -> Tensor:
        if self.starts is None or not self._has_own_vectors(op):
            start = unit(self._noise((op.batch, *op.in_shape), like))
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


def _best_of_two(masks: _Weights, u: Tensor, v: Tensor) -> Tensor:
    """A x for the x in span{u, A^T A u} with the largest ||A x|| / ||x||, given v = A u; a start for the last adjoint.

    It costs the same two products as a power step, which takes x = A^T A u, and gets further. In the orthonormal
    basis of u and the part of w = A^T A u orthogonal to it, A^T A is the 2 x 2 matrix ((t, s), (s, r)) of a few lengths.
    """
    w = masks.on_cols(masks.op.base.adjoint(v if masks.projects else masks.on_rows(v)))
    after = masks.on_rows(masks.apply(w))
    tiny = torch.finfo(torch.float32).tiny
    uu, uw, ww = (_length(z).square().clamp(min=tiny) for z in (u, v, w))
    t = uw / uu
    if v.dtype in _SIXTEEN_BITS:
        # Lengths of differences, not differences of lengths: the latter would be noise long before u has converged.
        rest = _length(w - _shaped(t, u) * u).square()
        image_of_rest = _length(after - _shaped(t, v) * v).square()
    else:
        rest = ww - t * uw
        image_of_rest = _length(after).square() - 2 * t * ww + t.square() * uw
    known = rest.clamp(min=tiny)
    r = image_of_rest / known
    angle = 0.5 * torch.atan2(2 * (known / uu).sqrt(), t - r)
    on_w = angle.sin() * known.rsqrt()
    on_u = angle.cos() * uu.rsqrt() - on_w * t
    sure = rest > 1e-4 * ww  # else u has nearly converged, and a plain power step does without these small numbers
    on_u, on_w = torch.where(sure, on_u, 0.0), torch.where(sure, on_w, ww.rsqrt())
    return (v * _shaped(on_u, v).to(v.dtype)).add_(after.mul_(_shaped(on_w, v).to(v.dtype)))


class _ThroughProduct(torch.autograd.Function):
    """sigma = u^T image / length with its gradient u / length: the value is known, so the product is never formed."""

    @staticmethod
    def forward(ctx: Any, image: Tensor, sigma: Tensor, u: Tensor, length: Tensor) -> Tensor:
        ctx.save_for_backward(u, length)
        ctx.dtype = image.dtype
        return sigma.clone()

    @staticmethod
    def backward(ctx: Any, grad: Any) -> tuple[Tensor, None, None, None]:
        u, length = ctx.saved_tensors
        return u.to(ctx.dtype, copy=True).mul_(_shaped(grad / length, u)), None, None, None


@dataclass(frozen=True)
class _Weights:
    """The masks of an operator; 0/1 masks (`projects`) are applied once where the formula has them twice."""

    op: Masked
    rows: Tensor | None
    cols: Tensor | None
    projects: bool

    @classmethod
    def of(cls, op: Masked, dtype: torch.dtype) -> _Weights:
        projects = all(weights is None or weights.dtype == torch.bool for weights in (op.rows, op.cols))
        return cls(op, _quick(op.rows, dtype), _quick(op.cols, dtype), projects)

    def on_rows(self, w: Tensor) -> Tensor:
        return _weigh(w, self.rows)

    def on_cols(self, u: Tensor) -> Tensor:
        return _weigh(u, self.cols)

    def apply(self, u: Tensor) -> Tensor:
        """W diag(cols) u; 0/1 columns are in u already."""
        return self.op.base.apply(u if self.projects else self.on_cols(u))

    def adjoint(self, w: Tensor) -> Tensor:
        """A^T diag(rows) w; 0/1 rows are applied once."""
        w = self.on_rows(w)
        return self.on_cols(self.op.base.adjoint(w if self.projects else self.on_rows(w)))


def _quick(weights: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """A mask in the form that is applied fastest: on a CPU as numbers, as choosing by booleans is not vectorised there."""
    return weights if weights is None or weights.is_cuda else weights.to(dtype)


def _weigh(v: Tensor, weights: Tensor | None) -> Tensor:
    if weights is None:
        return v
    return torch.where(weights, v, 0.0) if weights.dtype == torch.bool else v * weights.to(v.dtype)


def unit(v: Tensor) -> Tensor:
    """v / ||v|| per sample, and 0 for 0."""
    return v / _shaped(_length(v).clamp(min=torch.finfo(torch.float32).tiny), v).to(v.dtype)


def _length(v: Tensor) -> Tensor:
    """||v|| per sample, (B,), in whatever memory format v comes; of 16-bit numbers in float32."""
    dtype = torch.float32 if v.dtype in _SIXTEEN_BITS else v.dtype
    return torch.linalg.vector_norm(v, dim=tuple(range(1, v.dim())), dtype=dtype)


def _shaped(values: Tensor, like: Tensor) -> Tensor:
    return values.reshape(-1, *[1] * (like.dim() - 1))
