"""Norms of matrices that are written out, one per sample: always proved, whatever the guarantee asks for."""

from __future__ import annotations

import torch
from torch import Tensor

from locallip.norms.cholesky import proven_norms
from locallip.rounding import FLOOR, up

#: Rows or columns, whichever are fewer, up to which a factorization is worth its time.
LIMIT = 1024


def matrix_norms(matrix: Tensor) -> Tensor:
    """At least ||A|| for float64 matrices (B, p, q), (B,); inf where an entry is not finite, 0 only where all are 0."""
    if not matrix.numel():
        return matrix.new_zeros(len(matrix))
    if matrix.shape[1] > matrix.shape[2]:
        matrix = matrix.mT
    largest = matrix.abs().flatten(1).amax(1)
    # Divided by a power of 2, squares neither overflow nor vanish but where entries are 1e-154 of the largest one.
    scale = torch.ldexp(torch.ones_like(largest), torch.frexp(largest).exponent.clamp(-1000, 1000))
    scaled = matrix / scale[:, None, None]
    size = up(scaled.flatten(1).norm(dim=1), matrix[0].numel() + 64)
    found = size
    if matrix.shape[1] <= LIMIT:
        found = torch.minimum(size, proven_norms(scaled, size, 0.0))
    sums = [up(scaled.abs().sum(dim), 8 + scaled.shape[dim]).amax(1) for dim in (1, 2)]  # ||A||^2 <= ||A||_1 ||A||_inf
    found = up(torch.minimum(found, up((sums[0] * sums[1]).sqrt()))) * scale + FLOOR
    return torch.where(largest == 0, 0.0, torch.where(torch.isfinite(found), found, float("inf")))
