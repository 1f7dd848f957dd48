"""An operator in another arithmetic: training in 16 bits, with weights and sums over them in 32."""

from __future__ import annotations

import torch
from torch import Tensor

from locallip.ops.base import LinearOp


class Cast(LinearOp):
    """v -> W v, v and W rounded to `dtype` first and the result left in it; row norms stay in the dtype asked for.

    What it computes is a rounded W v, so it is for training alone: `exact` is False, and proven norms and outward rounding
    refuse it.
    """

    exact = False

    def __init__(self, base: LinearOp, dtype: torch.dtype):
        self.base, self.dtype = base, dtype
        self.in_shape, self.out_shape = base.in_shape, base.out_shape
        self.disjoint_rows, self.single_entry_rows, self.fan_in = base.disjoint_rows, base.single_entry_rows, base.fan_in

    @property
    def fan_out(self) -> int:
        return self.base.fan_out

    def apply(self, v: Tensor) -> Tensor:
        return self.base.apply(v.to(self.dtype))

    def adjoint(self, w: Tensor) -> Tensor:
        return self.base.adjoint(w.to(self.dtype))

    def apply_abs(self, r: Tensor) -> Tensor:
        return self.base.apply_abs(r.to(self.dtype))

    def adjoint_abs(self, w: Tensor) -> Tensor:
        return self.base.adjoint_abs(w.to(self.dtype))

    def row_norms(self, cols: Tensor) -> Tensor:
        return self.base.row_norms(cols)

    def smallest(self) -> float:
        return self.base.smallest()
