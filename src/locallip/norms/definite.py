"""A proof that no eigenvalue of a block tridiagonal matrix G is above t: t I - G = L L^T + E with a small E.

L L^T is positive semidefinite whatever L is, so the largest eigenvalue is at most t + ||E||. L comes from a block Cholesky
factorization, and nothing is assumed about how well that was done: E is computed from its blocks, and what rounding may hide
in it is added (Rump 2006 has a bound from the factorization alone, for one that works in plain order).
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from locallip.rounding import gamma, up


class Blocks(Protocol):
    """A symmetric block tridiagonal matrix; `below(j)` is block (j + 1, j), None where it is zero."""

    @property
    def number(self) -> int: ...
    def diagonal(self, j: int) -> Tensor: ...
    def below(self, j: int) -> Tensor | None: ...


def eigenvalue_bound(matrix: Blocks, t: Tensor) -> Tensor | None:
    """A number at least as large as every eigenvalue, slightly above t (a scalar); None where t is too small to prove it."""
    within = torch.zeros_like(t)  # norms of blocks of E on the diagonal, and below it
    below = torch.zeros_like(t)
    shift_error = torch.zeros_like(t)
    carried: Tensor | None = None  # block (j, j - 1) of L
    for j in range(matrix.number):
        gram = matrix.diagonal(j)
        shift_error = torch.maximum(shift_error, gamma(2, t.dtype) * (t + gram.diagonal().abs().amax()))
        block = t * torch.eye(len(gram), dtype=t.dtype, device=t.device) - gram
        schur = block if carried is None else block - carried @ carried.T
        lower, info = torch.linalg.cholesky_ex(schur)
        if int(info) != 0:
            return None
        lower = lower.tril()
        # |E_jj - computed| <= gamma (|block| + |carried||carried|^T + |lower||lower|^T), entry by entry.
        terms = gamma(len(gram) + (0 if carried is None else carried.shape[1]) + 8, t.dtype)
        sizes = _size(block) + _size(lower).square() + (0 if carried is None else _size(carried).square())
        within = torch.maximum(within, up(_size(schur - lower @ lower.T) + up(terms * sizes)))
        carried, error = _next(matrix.below(j) if j + 1 < matrix.number else None, lower)
        below = torch.maximum(below, error)
    total = up(t + up(up(within + 2 * below) + shift_error))
    return total if bool(torch.isfinite(total)) else None


def _next(gram: Tensor | None, lower: Tensor) -> tuple[Tensor | None, Tensor]:
    """Block (j + 1, j) of L, and the norm of that of E."""
    if gram is None:
        return None, lower.new_zeros(())
    block = -gram
    beside = torch.linalg.solve_triangular(lower, block.T, upper=False).T
    terms = gamma(len(lower) + 8, lower.dtype) * (_size(block) + up(_size(beside) * _size(lower)))
    return beside, up(_size(block - beside @ lower.T) + up(terms))


def _size(block: Tensor) -> Tensor:
    """At least the Frobenius norm, which is at least that of the absolute values too."""
    return up(block.norm(), block.numel() + 64)
