"""A proof that no eigenvalue of a block tridiagonal matrix G is above t: t I - G = L L^T + E with a small E.

L L^T is positive semidefinite whatever L is, so the largest eigenvalue is at most t + ||E||. L comes from a block Cholesky
factorization, and nothing is assumed about how well that was done: E is computed from its blocks, and what rounding may hide
in it is added (Rump 2006 has a bound from the factorization alone, for one that works in plain order). Many matrices of the
same block sizes are treated at a time.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from locallip.rounding import gamma, up


class Blocks(Protocol):
    """B symmetric block tridiagonal matrices; `diagonal(j)` is (B, p, p), `below(j)` block (j + 1, j), None where zero."""

    @property
    def number(self) -> int: ...
    def diagonal(self, j: int) -> Tensor: ...
    def below(self, j: int) -> Tensor | None: ...


def eigenvalue_bound(matrix: Blocks, t: Tensor) -> Tensor:
    """Numbers at least as large as every eigenvalue, slightly above t (B,); inf where t is too small to prove it."""
    within = torch.zeros_like(t)  # norms of blocks of E on the diagonal, and below it
    below = torch.zeros_like(t)
    shift_error = torch.zeros_like(t)
    failed = torch.zeros_like(t, dtype=torch.bool)
    carried: Tensor | None = None  # block (j, j - 1) of L
    for j in range(matrix.number):
        gram = matrix.diagonal(j)
        largest = gram.diagonal(dim1=1, dim2=2).abs().amax(1)
        shift_error = torch.maximum(shift_error, gamma(2, t.dtype) * (t + largest))
        eye = torch.eye(gram.shape[1], dtype=t.dtype, device=t.device)
        block = t[:, None, None] * eye - gram
        schur = block if carried is None else torch.baddbmm(block, carried, carried.mT, alpha=-1)
        lower, info = torch.linalg.cholesky_ex(schur)
        failed = failed | (info != 0)
        if bool(failed.all()):
            break
        lower = torch.where(failed[:, None, None], eye, lower).tril()
        # |E_jj - computed| <= gamma (|block| + |carried||carried|^T + |lower||lower|^T), entry by entry.
        terms = gamma(gram.shape[1] + (0 if carried is None else carried.shape[2]) + 8, t.dtype)
        sizes = _size(block) + _size(lower).square() + (0 if carried is None else _size(carried).square())
        rest = torch.baddbmm(schur, lower, lower.mT, alpha=-1)
        within = torch.maximum(within, up(_size(rest) + up(terms * sizes)))
        carried, error = _next(matrix.below(j) if j + 1 < matrix.number else None, lower)
        below = torch.maximum(below, error)
    total = up(t + up(up(within + 2 * below) + shift_error))
    return torch.where(failed | ~torch.isfinite(total), float("inf"), total)


def _next(gram: Tensor | None, lower: Tensor) -> tuple[Tensor | None, Tensor]:
    """Block (j + 1, j) of L, and the norm of that of E."""
    if gram is None:
        return None, lower.new_zeros(len(lower))
    block = -gram
    beside = torch.linalg.solve_triangular(lower, block.mT, upper=False).mT
    terms = gamma(lower.shape[1] + 8, lower.dtype) * (_size(block) + up(_size(beside) * _size(lower)))
    return beside, up(_size(torch.baddbmm(block, beside, lower.mT, alpha=-1)) + up(terms))


def _size(block: Tensor) -> Tensor:
    """At least the Frobenius norm of each, (B,), which is at least that of the absolute values too."""
    return up(block.flatten(1).norm(dim=1), block[0].numel() + 64)
