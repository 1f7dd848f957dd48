"""Flatten, view, reshape and permute: the same numbers in another shape or order."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from locallip.ops.base import LinearOp


class Reshape(LinearOp):
    """v -> v with another shape, row-major within one sample."""

    disjoint_rows = True
    single_entry_rows = True
    fan_in = 0

    def __init__(self, in_shape: Sequence[int], out_shape: Sequence[int]):
        self.in_shape, self.out_shape = torch.Size(in_shape), torch.Size(out_shape)
        if self.in_shape.numel() != self.out_shape.numel():
            raise ValueError(f"cannot reshape {tuple(in_shape)} to {tuple(out_shape)}")

    def apply(self, v: Tensor) -> Tensor:
        return v.reshape(-1, *self.out_shape)

    def adjoint(self, w: Tensor) -> Tensor:
        return w.reshape(-1, *self.in_shape)

    def apply_abs(self, r: Tensor) -> Tensor:
        return self.apply(r)

    def adjoint_abs(self, w: Tensor) -> Tensor:
        return self.adjoint(w)

    def row_norms(self, cols: Tensor) -> Tensor:
        return self.apply(cols)

    def smallest(self) -> float:
        return 0.0


class Permute(LinearOp):
    """v -> v with its dimensions in another order; `order` counts those of one sample from 0."""

    disjoint_rows = True
    single_entry_rows = True
    fan_in = 0

    def __init__(self, in_shape: Sequence[int], order: Sequence[int]):
        if sorted(order) != list(range(len(in_shape))):
            raise ValueError(f"{tuple(order)} is no order of the dimensions of {tuple(in_shape)}")
        self.in_shape, self.order = torch.Size(in_shape), tuple(order)
        self.out_shape = torch.Size(in_shape[dim] for dim in order)
        self._back = tuple(self.order.index(dim) for dim in range(len(order)))

    def apply(self, v: Tensor) -> Tensor:
        return v.permute(0, *(dim + 1 for dim in self.order))

    def adjoint(self, w: Tensor) -> Tensor:
        return w.permute(0, *(dim + 1 for dim in self._back))

    def apply_abs(self, r: Tensor) -> Tensor:
        return self.apply(r)

    def adjoint_abs(self, w: Tensor) -> Tensor:
        return self.adjoint(w)

    def row_norms(self, cols: Tensor) -> Tensor:
        return self.apply(cols)

    def smallest(self) -> float:
        return 0.0
