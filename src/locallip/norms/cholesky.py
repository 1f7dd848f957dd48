"""A proof of the norm: t^2 I - A A^T is positive definite because its Cholesky factorization in float64 succeeds.

If the factorization of a symmetric matrix M of order p runs to completion, the computed factor satisfies R^T R = M + E
with ||E|| <= gamma_{p+1} / (1 - gamma_{p+1}) trace(M) (Demmel 1989; Rump 2006), so the smallest eigenvalue of M is at
least -||E||. The roundings of forming A, its Gram matrix and the difference are bounded and added to t^2.
"""

from __future__ import annotations

import torch
from torch import Tensor

from locallip.norms.base import Guarantee, NormKey, ProvenRule
from locallip.norms.lanczos import Lanczos
from locallip.ops import LinearOp, Masked
from locallip.rounding import gamma, up

_INFLATIONS = (1e-13, 1e-11, 1e-9, 1e-7, 1e-5, 1e-3, 1e-1, 1.0)


class LayerTooLarge(ValueError):
    """A layer whose dense factorization would not fit; the message names it and the alternative."""


class CholeskyNorm(ProvenRule):
    """At least the norm, always; DETERMINISTIC. For layers whose smaller side has at most `dense_limit` units."""

    guarantee = Guarantee.DETERMINISTIC

    def __init__(self, dense_limit: int = 4096, memory: int = 2**30):
        self.dense_limit, self.memory = dense_limit, memory

    def check_size(self, op: LinearOp, key: NormKey) -> None:
        rows, cols = op.out_shape.numel(), op.in_shape.numel()
        if min(rows, cols) > self.dense_limit or 8 * rows * cols > 2 * self.memory:
            raise LayerTooLarge(
                f"the layer '{key.name}' maps {cols} units to {rows}: too large for a dense deterministic proof "
                f"(its smaller side may have {self.dense_limit} units); use guarantee='high_probability'"
            )

    def proven_norm(self, op: Masked, key: NormKey, like: Tensor, coarse: Tensor) -> Tensor:
        self.check_size(op, key)
        dtype, like = like.dtype, like.double()
        matrix, absolute = op.base.materialize(like), op.base.materialize_abs(like)
        if matrix.shape[0] > matrix.shape[1]:
            matrix, absolute, first, second = matrix.T, absolute.T, op.cols, op.rows
        else:
            first, second = op.rows, op.cols
        entry_error = gamma(op.roundings + 4, like.dtype)
        values = []
        for i in range(op.batch):
            weighed = _weigh(matrix, first, second, i)
            size = up(_weigh(absolute, first, second, i), 8 + op.fan_in).norm()
            values.append(_proven_norm(weighed, size, entry_error))
        return up(torch.stack(values).to(dtype), 2)


def _weigh(matrix: Tensor, rows: Tensor | None, cols: Tensor | None, sample: int) -> Tensor:
    """diag(rows) M diag(cols) of one sample with the removed rows and columns left out."""
    if rows is not None:
        weight = rows[sample].flatten().to(matrix.dtype)
        matrix = matrix[weight != 0] * weight[weight != 0, None]
    if cols is not None:
        weight = cols[sample].flatten().to(matrix.dtype)
        matrix = matrix[:, weight != 0] * weight[weight != 0]
    return matrix


def _proven_norm(matrix: Tensor, frobenius: Tensor, entry_error: float) -> Tensor:
    """A proved upper bound of ||A||, where |A - matrix| <= entry_error |A| or so and `frobenius` bounds || |A| ||_F."""
    p, contraction = matrix.shape
    if p == 0 or contraction == 0 or not bool(frobenius > torch.finfo(matrix.dtype).tiny):
        return torch.zeros_like(frobenius)
    gram = matrix @ matrix.T
    gram_error = (gamma(contraction + 2, gram.dtype) + 3 * entry_error) * up(frobenius.square(), matrix.numel() + 64)
    guess = _largest_eigenvalue(gram)
    for inflation in _INFLATIONS:
        t2 = up(guess * (1 + inflation))
        difference = t2 * torch.eye(p, dtype=gram.dtype, device=gram.device) - gram
        _, info = torch.linalg.cholesky_ex(difference)
        if int(info) == 0 and bool(torch.isfinite(difference).all()):
            growth = gamma(p + 2, gram.dtype)
            factor_error = growth / (1 - growth) * up(difference.diagonal().sum(), p + 8)
            difference_error = gamma(2, gram.dtype) * (t2 + gram.diagonal().amax())
            return up((t2 + up(gram_error + factor_error + difference_error)).sqrt())
    return torch.full_like(frobenius, float("inf"))


def _largest_eigenvalue(gram: Tensor) -> Tensor:
    """A guess for t^2; nothing rests on it but tightness."""
    if not bool(torch.isfinite(gram).all()):
        return torch.full_like(gram[0, 0], float("nan"))
    if len(gram) <= 128:
        return torch.linalg.eigvalsh(gram)[-1].clamp(min=0)
    generator = torch.Generator(gram.device).manual_seed(0)

    def noise() -> Tensor:
        return torch.randn(1, len(gram), dtype=gram.dtype, device=gram.device, generator=generator)

    process = Lanczos(lambda q: q @ gram, noise, 200, orthogonalize=True)
    process.run(min(200, len(gram)))
    return process.matrix().largest_eigenvalue()[0].clamp(min=0)
