"""Average pooling, as a convolution with ones followed by a division by each window's count."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from locallip.ops.base import Compose, LinearOp
from locallip.ops.conv import Conv
from locallip.ops.diagonal import Diagonal


def average_pool(
    pool: Callable[[Tensor], Tensor],
    in_shape: Sequence[int],
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    like: Tensor,
) -> LinearOp:
    """The operator of `pool`, a torch average pooling with these settings, whatever its counting of the padding.

    The count of each window is read off `pool` itself: its value on an input of ones over the sum of that window.
    """
    channels, *sizes = in_shape
    ones = torch.ones(1, channels, *sizes, dtype=torch.float64, device=like.device)
    out_sizes = pool(ones).shape[2:]
    # ceil_mode lets the last window reach past the padding: zeros on that side make it a whole one.
    geometry = list(zip(sizes, out_sizes, kernel, stride, padding, strict=True))
    after = [max(p, (out - 1) * s + k - n - p) for n, out, k, s, p in geometry]
    weight = torch.ones(channels, 1, *kernel, dtype=torch.float64, device=like.device)
    sums = Conv(
        lambda: weight,
        in_shape,
        stride,
        list(zip(padding, after, strict=True)),
        [1] * len(sizes),
        groups=channels,
    )
    if sums.out_shape[1:] != out_sizes:
        raise ValueError(f"this pooling gives {tuple(out_sizes)} where {tuple(sums.out_shape[1:])} was expected")
    share = pool(ones) / sums.apply(ones)
    return Compose(Diagonal(lambda dtype: share.to(dtype), sums.out_shape), sums)
