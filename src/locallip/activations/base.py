"""What the bound needs to know of an activation: its image of a box, and which units can change inside it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import NamedTuple

import torch
from torch import Tensor


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

    def hinge(self, box: Box) -> Hinge:
        """Terms of the sparsity loss; zero for an activation without constant regions."""
        zero = torch.zeros_like(box.lower)
        return Hinge(zero, zero)

    def out_shape(self, in_shape: torch.Size) -> torch.Size:
        return in_shape
