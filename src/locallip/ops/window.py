"""Which inputs an output of a map over images can depend on, per spatial dimension."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Window(NamedTuple):
    """Along one dimension, output p depends on the inputs p * stride - before ... p * stride + after at most.

    `before` and `after` may be negative, as where a convolution is padded by more than its kernel.
    """

    stride: int
    before: int
    after: int

    @property
    def extent(self) -> int:
        """How far apart two inputs of one output can be."""
        return max(self.before + self.after, 0)


#: One window per spatial dimension of tensors (channels, *spatial).
Windows = tuple[Window, ...]


def point_windows(shape: Sequence[int]) -> Windows | None:
    """Of a map that takes every position to itself; None where there are no positions."""
    return tuple(Window(1, 0, 0) for _ in shape[1:]) or None


def composed_windows(outer: Windows | None, inner: Windows | None) -> Windows | None:
    """Of outer after inner."""
    if outer is None or inner is None:
        return None
    return tuple(
        Window(o.stride * i.stride, o.before * i.stride + i.before, o.after * i.stride + i.after)
        for o, i in zip(outer, inner, strict=True)
    )


def joined_windows(parts: Sequence[Windows | None]) -> Windows | None:
    """Of a sum of maps; None where their strides differ."""
    known = [part for part in parts if part is not None]
    if len(known) < len(parts) or len({tuple(window.stride for window in part) for part in known}) != 1:
        return None
    return tuple(
        Window(windows[0].stride, max(w.before for w in windows), max(w.after for w in windows))
        for windows in zip(*known, strict=True)
    )
