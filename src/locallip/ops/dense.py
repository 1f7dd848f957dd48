"""The fully connected map."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from locallip.ops.base import LinearOp, smallest_entry
from locallip.rounding import root


class Dense(LinearOp):
    """v -> W v for a weight (out, in); further leading dimensions of one sample are mapped alike, as nn.Linear does."""

    def __init__(self, weight: Callable[[], Tensor], leading: tuple[int, ...] = ()):
        self.weight = weight
        rows, cols = weight().shape
        self.in_shape = torch.Size((*leading, cols))
        self.out_shape = torch.Size((*leading, rows))
        self.fan_in = int(cols)

    def _matrix(self, like: Tensor) -> Tensor:
        return self.weight().to(like.dtype)

    def apply(self, v: Tensor) -> Tensor:
        return F.linear(v, self._matrix(v))

    def adjoint(self, w: Tensor) -> Tensor:
        return F.linear(w, self._matrix(w).T)

    def apply_abs(self, r: Tensor) -> Tensor:
        return F.linear(r, self._matrix(r).abs())

    def adjoint_abs(self, w: Tensor) -> Tensor:
        return F.linear(w, self._matrix(w).abs().T)

    def row_norms(self, cols: Tensor) -> Tensor:
        return root(F.linear(cols.square(), self._matrix(cols).square()))

    def smallest(self) -> float:
        return smallest_entry(self.weight())
