"""Max pooling over disjoint windows: 1-Lipschitz in l2 because no input feeds two outputs."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from locallip.activations.base import Activation, Box, Varying


class MaxPool2d(Activation):
    """The largest entry of each window, windows disjoint (stride >= kernel)."""

    def __init__(
        self,
        in_shape: Sequence[int],
        kernel: tuple[int, int],
        stride: tuple[int, int],
        padding: tuple[int, int],
        ceil_mode: bool,
    ):
        if any(s < k for s, k in zip(stride, kernel, strict=True)):
            raise ValueError(f"windows overlap: kernel {kernel} with stride {stride}")
        #: Kernel, stride and padding.
        self.geometry, self.ceil_mode = (kernel, stride, padding), ceil_mode
        self._out = self(torch.zeros(1, *in_shape, dtype=torch.float32, device="cpu")).shape[1:]
        geometry = zip(in_shape[1:], self._out[1:], kernel, stride, padding, strict=True)
        (self._row, row_used), (self._col, col_used) = (_window_of(*g) for g in geometry)
        self._used = row_used[:, None] & col_used[None, :]

    def __call__(self, z: Tensor) -> Tensor:
        return F.max_pool2d(z, *self.geometry, ceil_mode=self.ceil_mode)

    @property
    def window(self) -> int:
        """The largest number of inputs of an output."""
        return self.geometry[0][0] * self.geometry[0][1]

    def used(self, like: Tensor) -> Tensor:
        """The inputs that some window sees, (height, width)."""
        return self._used.to(like.device)

    def to_inputs(self, z: Tensor) -> Tensor:
        """What stands at an output, at each of its inputs; that of some output at inputs that no window sees."""
        return z[..., self._row.to(z.device), :][..., self._col.to(z.device)]

    def to_outputs(self, y: Tensor) -> Tensor:
        """The sum of each window, (B, *in_shape) -> (B, *out_shape)."""
        y = torch.where(self.used(y), y, 0.0)
        rows = y.new_zeros(*y.shape[:2], self._out[1], y.shape[3]).index_add_(2, self._row.to(y.device), y)
        return y.new_zeros(*y.shape[:2], *self._out[1:]).index_add_(3, self._col.to(y.device), rows)

    def image(self, box: Box) -> Box:
        return Box(self(box.lower), self(box.upper))

    def varying(self, box: Box) -> Varying:
        """An input that another of its window always exceeds, or that no window sees, cannot matter."""
        highest_lower = self(box.lower)
        inputs = ~(box.upper < self.to_inputs(highest_lower)) & self.used(box.lower)
        return Varying(inputs, torch.ones_like(highest_lower, dtype=torch.bool))

    def spread(self, error: Tensor) -> Tensor:
        """The maximum moves by no more than the entry that moves most."""
        return self(error)

    def out_shape(self, in_shape: torch.Size) -> torch.Size:
        return self._out


def _window_of(size: int, windows: int, kernel: int, stride: int, padding: int) -> tuple[Tensor, Tensor]:
    """For each position along one side: the index of its window, and whether it lies in any."""
    position = torch.arange(size, device="cpu") + padding
    window = position // stride
    used = (position % stride < kernel) & (window < windows)
    return window.clamp(max=windows - 1), used
