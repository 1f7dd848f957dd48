"""How much memory bounds take, known from the shapes of a network before it is asked for.

Everything that is known of an image's ball is kept while its bound is computed: HELD numbers for every unit of the network,
and more with lines. What is looked at together on the way back, rows or windows, takes WORKING numbers for each of its
own, SLOPE_BYTES for each that slopes are searched for. Parts are made so small that all of it fits what is free. These
numbers were counted (benchmarks/NOTES.md), and tests/test_plan.py holds them.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass

import torch

from locallip.network import Network
from locallip.ops import LinearOp
from locallip.room import free_bytes, in_words

#: Numbers in float64 per unit and image, without lines and with them, and those of the widest stage while it is passed.
HELD, HELD_WITH_LINES, PASSING = 9, 18, 10
#: Numbers in float64 for every number of a part that is looked at together (8, where nothing is sorted in pairs), and bytes
#: where slopes are searched for.
WORKING, SLOPE_BYTES = 11, 210
#: Share of the free memory that a plan uses: allocators leave gaps, and convolutions need room of their own.
USED = 0.8


class TooLittleMemory(UserWarning):
    """Bounds that were asked for are left out, as not even one image fits."""


@dataclass(frozen=True)
class MemoryPlan:
    """What the bounds of a network with so many units take on a device; `largest` is the widest stage.

    `columns` are the numbers that a convolution of one row writes out for itself. `given` bytes are free; None: those that
    are when it is asked.
    """

    device: torch.device
    units: int
    largest: int
    columns: int = 0
    given: float | None = None

    @property
    def free(self) -> float:
        return USED * (free_bytes(self.device) if self.given is None else self.given)

    def image(self, lines: bool) -> int:
        """Bytes that one image takes."""
        return 8 * ((HELD_WITH_LINES if lines else HELD) * self.units + PASSING * self.largest)

    @property
    def row(self) -> int:
        """Bytes that one row takes on its way back."""
        return 8 * (WORKING * self.largest + self.columns)

    @property
    def each(self) -> float:
        """Bytes for every number of a part."""
        return self.row / self.largest

    def images(self, wanted: int, lines: bool) -> int:
        """How many of `wanted` images are looked at together: half of the memory is theirs, 0 where one does not fit."""
        free = self.free
        if self.image(lines) + (self.row if lines else 0) > free:
            return 0
        return max(1, int(min(wanted, free / 2 // self.image(lines))))

    def numbers(self, most: int, images: int) -> int:
        """Numbers of a part on the way back of so many images: `most`, or as often halved as it must be."""
        return self._halved(most, self.each, images)

    def slope_numbers(self, most: int, images: int) -> int:
        """The same where slopes are searched for, of images whose bounds are there already."""
        return self._halved(most, SLOPE_BYTES, images)

    def _halved(self, most: int, each: float, images: int) -> int:
        """By halves: while there is enough, parts are the same, and with them every last bit."""
        room, numbers = self.free - self.image(True) * images, most
        while numbers > self.largest and numbers * each > room:
            numbers //= 2
        return max(1, numbers)

    def warn_of(self, lines: bool) -> None:
        """Say that bounds are left out, and what would help."""
        what = "linear relaxation" if lines else "a bound"
        need = self.image(lines) + (self.row if lines else 0)
        help_ = "a device with more memory" + (", or method='local', which needs half of it" if lines else "")
        warnings.warn(
            f"{what} takes {in_words(need)} for one image of this network, and {in_words(self.free)} of {self.device.type} "
            f"memory can be used: it is left out, and what it would have proved is UNKNOWN; what helps is {help_}",
            TooLittleMemory,
            stacklevel=2,
        )

    def __str__(self) -> str:
        image, plain, row, free = (in_words(n) for n in (self.image(True), self.image(False), self.row, self.free))
        return f"memory: {image} an image with lines, {plain} without, {row} a row; {free} can be used"


def plan_of(network: Network, device: torch.device, given: float | None = None) -> MemoryPlan:
    inside = [network.input_shape.numel(), *(stage.linear_shape.numel() for stage in network.stages[:-1])]
    columns = 0
    if device.type == "cpu":  # where float64 convolutions are products with a written-out copy of all windows
        columns = max(_columns(op) for stage in network.stages for op in stage.terms.values())
    return MemoryPlan(device, sum(inside), max(*inside, network.output_shape.numel()), columns, given)


def _columns(op: LinearOp) -> int:
    """The numbers of all windows of one map, for W v and for W^T w."""
    if len(op.out_shape) != 3:
        return 0
    (channels, *side), others = op.out_shape, op.in_shape[0]
    return max(op.fan_in, op.fan_in * channels // others) * side[0] * side[1]
