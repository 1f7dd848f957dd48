"""What the bound needs to know of an activation: its image of a box, and which units can change inside it."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import NamedTuple

import torch
from torch import Tensor


def within(number: float, dtype: torch.dtype) -> float:
    """A number of float64 as searches in float32 take it: beyond all numbers of the dtype it is infinite."""
    return number if abs(number) <= torch.finfo(dtype).max else math.copysign(math.inf, number)


class Box(NamedTuple):
    """lower <= z <= upper, unit by unit; both (B, *shape)."""

    lower: Tensor
    upper: Tensor

    @staticmethod
    def everything(shape: torch.Size, like: Tensor) -> Box:
        """The whole space, for one sample: the box under which a local bound becomes the global one."""
        infinite = torch.full((1, *shape), float("inf"), dtype=like.dtype, device=like.device)
        return Box(-infinite, infinite)


class Varying(NamedTuple):
    """Weights I_V with phi(a) - phi(b) = diag(outputs) D diag(inputs) (a - b), ||D|| <= 1, for all a, b in the box.

    Booleans for activations of slope 0 or 1 (eq:indicator_relu0, eq:indicator_relux); otherwise the square root of the
    largest slope on each unit's interval, on either side of the unit. `inputs` weighs rows of the map before, `outputs`
    columns of the maps after.
    """

    inputs: Tensor
    outputs: Tensor


class Hinge(NamedTuple):
    """Distances to the constant regions, the two terms of eqn:sparse_loss; both >= 0 and (B, ...)."""

    below: Tensor
    above: Tensor


class Activation(ABC):
    """An activation with bounded slope. Comparisons are written so that NaN counts as varying, never as constant."""

    @abstractmethod
    def __call__(self, z: Tensor) -> Tensor: ...

    @abstractmethod
    def image(self, box: Box) -> Box:
        """A box that holds phi(z) for every z in `box`."""

    @abstractmethod
    def varying(self, box: Box) -> Varying: ...

    def center_and_image(self, center: Tensor, box: Box) -> tuple[Tensor, Box]:
        """phi(center) and the image of the box in one go, for activations that save memory by it."""
        return self(center), self.image(box)

    def spread(self, error: Tensor) -> Tensor:
        """At least |phi(a) - phi(b)|, unit by unit, for all a, b with |a - b| <= error; each (B, *shape)."""
        inputs, outputs = self.varying(Box.everything(error.shape[1:], error))
        length = (inputs * error).flatten(1).norm(dim=1)  # D may mix all units, but no entry of D v is longer than v
        return outputs * length.reshape(-1, *[1] * (outputs.dim() - 1))

    def hinge(self, box: Box) -> Hinge:
        """Terms of the sparsity loss; zero for an activation without constant regions."""
        zero = torch.zeros_like(box.lower)
        return Hinge(zero, zero)

    def out_shape(self, in_shape: torch.Size) -> torch.Size:
        return in_shape


class Unitwise(Activation):
    """An activation of single units: what one gives depends on no other."""

    def spread(self, error: Tensor) -> Tensor:
        inputs, outputs = self.varying(Box.everything(error.shape[1:], error))
        return inputs * outputs * error
