"""Rows of a map over images that are zero outside a window: only the window is kept."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class Patch:
    """Rows over maps (channels, height, width): values (n, r, channels, h, w) from `origin` (n, 2) on, else zero.

    r rows have the same window. It may reach beyond the map; what it holds there belongs to no unit.
    """

    values: Tensor
    origin: Tensor

    @staticmethod
    def of_units(units: Tensor, shape: Sequence[int], like: Tensor) -> Patch:
        """Unit vectors, r = 1, for units (n,) by their number in a map of `shape`."""
        channels, height, width = shape
        channel, place = units // (height * width), units % (height * width)
        values = F.one_hot(channel, channels).to(like.dtype)[:, None, :, None, None]
        return Patch(values, torch.stack([place // width, place % width], dim=1))

    def seen(self, maps: Tensor, own: Tensor) -> Tensor:
        """What each window shows of its own one of the maps (B, *any, height, width); zero outside.

        own (n,) tells which is a window's own: (n, *any, h, w).
        """
        h, w = self.values.shape[3:]
        # So much room on every side that any window that touches the map lies inside; others show nothing but zeros.
        padded = F.pad(maps, (w, w, h, h))
        top, left = ((self.origin[:, d] + room).clamp(0, padded.shape[d - 2] - room) for d, room in ((0, h), (1, w)))
        windows = padded.unfold(-2, h, 1).unfold(-2, w, 1)  # (B, *any, height', width', h, w)
        return windows.movedim((-4, -3), (1, 2))[own, top, left]

    def inside(self, shape: Sequence[int]) -> Patch:
        """The same rows with nothing outside a map of `shape`."""
        ones = self.values.new_ones(1, 1, *shape[1:])
        return Patch(self.values * self.seen(ones, torch.zeros_like(self.origin[:, 0]))[:, None], self.origin)
