"""Convolutions in one, two or three dimensions, with any stride, zero padding, dilation and groups."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from locallip.ops.base import LinearOp, smallest_entry
from locallip.ops.patch import Patch
from locallip.ops.window import Window
from locallip.rounding import root

_CONV = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}
_CONV_TRANSPOSE = {1: F.conv_transpose1d, 2: F.conv_transpose2d, 3: F.conv_transpose3d}


class Conv(LinearOp):
    """v -> conv(v, W) with zero padding given per side: `padding[d] = (before, after)`.

    The adjoint is the convolution with the turned kernel where the stride is 1 (in float64 on a GPU much faster than the
    transposed one), else the transposed convolution with the output padding that restores the input size, so in-sizes that
    the stride does not divide are exact too.
    """

    def __init__(
        self,
        weight: Callable[[], Tensor],
        in_shape: Sequence[int],
        stride: Sequence[int],
        padding: Sequence[tuple[int, int]],
        dilation: Sequence[int],
        groups: int = 1,
    ):
        self.weight = weight
        self.stride, self.dilation, self.groups = tuple(stride), tuple(dilation), groups
        self.in_shape = torch.Size(in_shape)
        self._dims = len(in_shape) - 1
        out_channels, group_channels, *kernel = weight().shape
        extent = [d * (k - 1) + 1 for k, d in zip(kernel, dilation, strict=True)]
        padded = [n + a + b for n, (a, b) in zip(in_shape[1:], padding, strict=True)]
        rest = [n - e for n, e in zip(padded, extent, strict=True)]
        self.out_shape = torch.Size((out_channels, *(n // s + 1 for n, s in zip(rest, stride, strict=True))))
        self._sides = list(padding)
        self._output_padding = [n % s for n, s in zip(rest, stride, strict=True)]
        # With stride 1 the adjoint is a convolution too, with the kernel turned round; it needs no more padding than this.
        self._adjoint_sides = [(e - 1 - a, e - 1 - b) for e, (a, b) in zip(extent, padding, strict=True)]
        self._turns = all(s == 1 for s in stride) and all(min(pair) >= 0 for pair in self._adjoint_sides)
        self.disjoint_rows = out_channels == groups and all(s >= e for s, e in zip(stride, extent, strict=True))
        self.windows = tuple(Window(s, a, e - 1 - a) for s, e, (a, _) in zip(stride, extent, padding, strict=True))
        self.fan_in = int(group_channels * torch.Size(kernel).numel())
        self._fan_out = int(out_channels // groups * torch.Size(kernel).numel())

    @property
    def fan_out(self) -> int:
        return self._fan_out

    def _convolve(self, v: Tensor, weight: Tensor, sides: Sequence[tuple[int, int]], stride: Sequence[int]) -> Tensor:
        """Zero padding per side, then a convolution; unequal sides ("same" with an even kernel) are padded by hand."""
        inside = [a if a == b else 0 for a, b in sides]
        if any(a != b for a, b in sides):
            v = F.pad(v, [n for a, b in reversed(sides) for n in ((0, 0) if a == b else (a, b))])
        return _CONV[self._dims](v, weight, None, stride, inside, self.dilation, self.groups)

    def _forward(self, v: Tensor, weight: Tensor) -> Tensor:
        return self._convolve(v, weight, self._sides, self.stride)

    def apply(self, v: Tensor) -> Tensor:
        return self._forward(v, self.weight().to(v.dtype))

    def adjoint(self, w: Tensor) -> Tensor:
        return self._backward(w, self.weight().to(w.dtype))

    def adjoint_abs(self, w: Tensor) -> Tensor:
        return self._backward(w, self.weight().to(w.dtype).abs())

    def _backward(self, w: Tensor, weight: Tensor) -> Tensor:
        if self._turns:
            return self._convolve(w, self._turned(weight), self._adjoint_sides, self.stride)
        inside = [a if a == b else 0 for a, b in self._sides]
        geometry = (self.stride, inside, self._output_padding, self.groups, self.dilation)
        v = _CONV_TRANSPOSE[self._dims](w, weight, None, *geometry)
        for d, (before, after) in enumerate(self._sides, start=2):
            if before != after:
                v = v.narrow(d, before, v.shape[d] - before - after)
        return v

    def adjoint_patch(self, w: Patch) -> Patch | None:
        if self._dims != 2:
            return None
        (n, r, *shape), flat = w.values.shape, w.values.flatten(2)
        # As one matrix, where that is made of fewer rows than there are: products of matrices are far faster.
        whole = (
            torch.eye(flat.shape[2], dtype=flat.dtype, device=flat.device) if n * r > flat.shape[2] else flat.flatten(0, 1)
        )
        weight, geometry = self.weight().to(flat.dtype), (self.stride, 0, 0, self.groups, self.dilation)
        values = F.conv_transpose2d(whole.reshape(-1, *shape), weight, None, *geometry)
        if n * r > flat.shape[2]:
            values = (flat.flatten(0, 1) @ values.flatten(1)).reshape(-1, *values.shape[1:])
        shift = [[stride, side[0]] for stride, side in zip(self.stride, self._sides, strict=True)]
        stride, before = w.origin.new_tensor(shift).T
        return Patch(values.unflatten(0, (n, r)), w.origin * stride - before)

    def _turned(self, weight: Tensor) -> Tensor:
        """The kernel of the adjoint: turned round in space, input and output channels exchanged within each group."""
        out, group_in, *kernel = weight.shape
        grouped = weight.reshape(self.groups, out // self.groups, group_in, *kernel).transpose(1, 2)
        turned = grouped.flip(list(range(3, grouped.dim()))).reshape(self.groups * group_in, out // self.groups, *kernel)
        if weight.dim() == 4 and weight.is_contiguous(memory_format=torch.channels_last) and not weight.is_contiguous():
            return turned.contiguous(memory_format=torch.channels_last)  # else the convolution converts it at every call
        return turned

    def apply_abs(self, r: Tensor) -> Tensor:
        return self._forward(r, self.weight().to(r.dtype).abs())

    def row_norms(self, cols: Tensor) -> Tensor:
        """One convolution of the squared mask with W**2: never looser than the filter norm, and right at the borders."""
        return root(self._forward(cols.square(), self.weight().to(cols.dtype).square()))

    def smallest(self) -> float:
        return smallest_entry(self.weight())
