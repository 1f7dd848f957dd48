"""Multiplication of every entry by its own factor: scalar scaling, batch normalisation in eval mode, Normalize."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from locallip.ops.base import LinearOp, smallest_entry
from locallip.ops.patch import Patch
from locallip.ops.window import point_windows


class Diagonal(LinearOp):
    """v -> factor * v; `factor(dtype)` is computed in the dtype asked for and broadcasts against (B, *shape)."""

    disjoint_rows = True
    single_entry_rows = True
    fan_in = 8  # the factor itself may be a quotient and a square root of stored numbers

    def __init__(self, factor: Callable[[torch.dtype], Tensor], shape: Sequence[int]):
        self.factor = factor
        self.in_shape = self.out_shape = torch.Size(shape)
        self.windows = point_windows(shape)

    def apply(self, v: Tensor) -> Tensor:
        return v * self.factor(v.dtype)

    def adjoint(self, w: Tensor) -> Tensor:
        return w * self.factor(w.dtype)

    def adjoint_patch(self, w: Patch) -> Patch | None:
        if len(self.in_shape) != 3:
            return None
        factor = self.factor(w.values.dtype).expand(1, *self.in_shape)
        return Patch(w.values * w.seen(factor, torch.zeros_like(w.origin[:, 0]))[:, None], w.origin)

    def apply_abs(self, r: Tensor) -> Tensor:
        return r * self.factor(r.dtype).abs()

    def adjoint_abs(self, w: Tensor) -> Tensor:
        return self.apply_abs(w)

    def row_norms(self, cols: Tensor) -> Tensor:
        return self.apply_abs(cols)

    def smallest(self) -> float:
        return smallest_entry(self.factor(torch.float64))
