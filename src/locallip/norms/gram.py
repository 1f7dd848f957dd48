"""Gram matrices of maps between images in blocks: positions far apart share nothing, so those blocks are zero.

Two outputs of a convolution share an input, and two inputs an output, only if they are near each other. With the units
sorted by one spatial coordinate and cut into slabs no thinner than that reach, A A^T (or A^T A) is block tridiagonal. Its
entries come from few products: units that are too far apart for a common neighbour can be sent through the map together, as
columns of a sparse Jacobian are by colors (Curtis, Powell and Reid 1974).
"""

from __future__ import annotations

import copy
import math
from typing import NamedTuple

import torch
from torch import Tensor

from locallip.ops import LinearOp, Masked

#: Numbers in the vectors sent through a map at a time: 256 MB of them.
_CHUNK = 2**25


class Slabs(NamedTuple):
    """How one side of a map is cut: which side, its shape, how far units reach, and the slabs along one dimension.

    `dim` counts the spatial dimensions from 0; `thickness` is in positions along it.
    """

    output_side: bool
    shape: torch.Size
    reach: tuple[int, ...]
    dim: int
    thickness: int

    @property
    def number(self) -> int:
        return -(-self.shape[1 + self.dim] // self.thickness)

    @property
    def units(self) -> int:
        """Units in a slab."""
        return self.shape.numel() // self.shape[1 + self.dim] * min(self.thickness, self.shape[1 + self.dim])

    @property
    def periods(self) -> tuple[int, ...]:
        """Units so far apart, along every dimension, have no neighbour in common."""
        return tuple(min(2 * r + 1, n) for r, n in zip(self.reach, self.shape[1:], strict=True))

    @property
    def colors(self) -> int:
        return self.shape[0] * math.prod(self.periods)

    @property
    def cost(self) -> float:
        return factorization_cost(self.number, self.units)


def factorization_cost(blocks: int, units: int) -> float:
    """Operations of a factorization and its check, roughly: products of blocks between neighbours are most of it."""
    return (8.0 * (blocks - 1) + 3.0) * units**3


def best_slabs(op: LinearOp) -> Slabs | None:
    """The side and dimension whose slabs are cheapest to factorize; None where nothing is known about the map."""
    if op.windows is None:
        return None
    choices = []
    for output_side in (True, False):
        shape = op.out_shape if output_side else op.in_shape
        reach = tuple(w.extent // w.stride if output_side else w.extent for w in op.windows)
        choices += [Slabs(output_side, shape, reach, d, max(r, 1)) for d, r in enumerate(reach)]
    return min(choices, key=lambda slabs: slabs.cost)


class Gram:
    """A A^T or A^T A of every sample in the blocks of `slabs`, removed units left out; entries off by gamma (|A| |A|^T).

    Samples keep different units of a slab: their blocks have the size of the largest, filled up with zeros. `units[j]`
    (B, m) are the places of those of block j, -1 where it is filled up.
    """

    def __init__(self, op: Masked, slabs: Slabs, like: Tensor):
        self._reach = slabs.reach
        self._places = _places(slabs.shape, like.device)
        self._color = _colors(self._places, slabs)
        self._answers = torch.stack(
            [_answers(op.select(slice(i, i + 1)), slabs, self._color, like) for i in range(op.batch)]
        )
        weights = op.rows if slabs.output_side else op.cols
        shape = (op.batch, len(self._color))
        kept = torch.ones(shape, dtype=torch.bool, device=like.device) if weights is None else weights.flatten(1) != 0
        slab = self._places[1 + slabs.dim] // slabs.thickness
        units = {j: _indices(kept & (slab == j)) for j in range(slabs.number)}
        units = {j: index for j, index in units.items() if index.shape[1]}
        self.units = list(units.values())
        self._neighbours = [b - a == 1 for a, b in zip(units, list(units)[1:], strict=False)]

    def select(self, index: Tensor) -> Gram:
        """Those of some samples."""
        part = copy.copy(self)
        part._answers, part.units = self._answers[index], [units[index] for units in self.units]
        return part

    @property
    def number(self) -> int:
        return len(self.units)

    def diagonal(self, j: int) -> Tensor:
        """Block (j, j), (B, m, m), exactly symmetric."""
        block = self._block(self.units[j], self.units[j])
        return block.tril() + block.tril(-1).mT

    def below(self, j: int) -> Tensor | None:
        """Block (j + 1, j); None where it is zero."""
        return self._block(self.units[j + 1], self.units[j]) if self._neighbours[j] else None

    def _block(self, rows: Tensor, cols: Tensor) -> Tensor:
        near = (rows >= 0)[:, :, None] & (cols >= 0)[:, None, :]
        for place, reach in zip(self._places[1:], self._reach, strict=True):
            near &= (place[rows][:, :, None] - place[cols][:, None, :]).abs() <= reach
        sample = torch.arange(len(rows), device=rows.device)[:, None, None]
        return torch.where(near, self._answers[sample, self._color[cols][:, None, :], rows[:, :, None]], 0.0)


def _indices(chosen: Tensor) -> Tensor:
    """Where `chosen` (B, n) holds, (B, m) in order, m being the most of any sample; -1 behind the last."""
    number = chosen.sum(1)
    width = int(number.max())
    order = chosen.byte().argsort(dim=1, descending=True, stable=True)[:, :width]
    return torch.where(torch.arange(width, device=chosen.device) < number[:, None], order, -1)


def _places(shape: torch.Size, device: torch.device) -> Tensor:
    """Channel and coordinates of every unit, (1 + spatial dimensions, n)."""
    grids = torch.meshgrid(*(torch.arange(n, device=device) for n in shape), indexing="ij")
    return torch.stack([grid.flatten() for grid in grids])


def _colors(places: Tensor, slabs: Slabs) -> Tensor:
    """(n,) units of one channel whose coordinates agree modulo the periods share a color."""
    color = places[0]
    for place, period in zip(places[1:], slabs.periods, strict=True):
        color = color * period + place % period
    return color


def _answers(op: Masked, slabs: Slabs, color: Tensor, like: Tensor) -> Tensor:
    """What the Gram matrix of one sample makes of the sum of all units of a color, (colors, n)."""
    n = len(color)
    step = max(1, _CHUNK // max(op.in_shape.numel(), op.out_shape.numel()))
    parts = []
    for first in range(0, slabs.colors, step):
        last = min(first + step, slabs.colors)
        of_these = ((color >= first) & (color < last)).nonzero()[:, 0]
        v = torch.zeros(last - first, n, dtype=like.dtype, device=like.device)
        v[color[of_these] - first, of_these] = 1
        v = v.reshape(-1, *slabs.shape)
        image = op.apply(op.adjoint(v)) if slabs.output_side else op.adjoint(op.apply(v))
        parts.append(image.flatten(1))
    return torch.cat(parts)
