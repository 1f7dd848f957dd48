"""Singular values of the whole matrix: the oracle of the tests, without allowance for rounding."""

from __future__ import annotations

import torch
from torch import Tensor

from locallip.norms.base import Guarantee, NormKey, NormRule
from locallip.ops import Masked


class ExactNorm(NormRule):
    """The largest singular value by SVD. An ESTIMATE by its guarantee: correct to rounding, which it does not count."""

    guarantee = Guarantee.ESTIMATE

    def norm(self, op: Masked, key: NormKey, like: Tensor) -> Tensor:
        matrix = op.base.materialize(like)[None]
        if op.rows is not None:
            matrix = matrix * op.rows.flatten(1)[:, :, None].to(like.dtype)
        if op.cols is not None:
            matrix = matrix * op.cols.flatten(1)[:, None, :].to(like.dtype)
        return torch.linalg.matrix_norm(matrix, ord=2)
