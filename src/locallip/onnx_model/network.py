"""The modules that an ONNX graph becomes: a chain of layers, or layers with the wiring between them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from locallip.network import Affine, register_layer
from locallip.ops import Permute


@dataclass(frozen=True)
class Step:
    """A layer and the steps whose values it reads, by position; -1 is the network's input."""

    name: str
    layer: nn.Module
    sources: tuple[int, ...]


class OnnxNetwork(nn.Module):
    """A network of an ONNX file; `input_shape` is that of one sample, and it gives `classes` numbers.

    `left_out` is the operator at the end of the file that is not part of it.
    """

    input_shape: tuple[int, ...]
    classes: int
    left_out: str = ""


class Chain(OnnxNetwork, nn.Sequential):
    """Every layer reads what the one before it gives."""


class Wired(OnnxNetwork):
    """Layers whose values may be read several times, as in residual networks."""

    def __init__(self, steps: Sequence[Step]):
        super().__init__()
        self.layers = nn.ModuleDict({step.name: step.layer for step in steps})
        self.wiring = tuple((step.name, step.sources) for step in steps)

    def forward(self, x: Tensor) -> Tensor:
        values = [x]
        for name, sources in self.wiring:
            values.append(self.layers[name](*(values[source + 1] for source in sources)))
        return values[-1]

    def extra_repr(self) -> str:
        """The wiring is part of what the network is: rows of certificates keep a checksum of its description."""
        return f"wiring={self.wiring}"


class WithConstant(nn.Module):
    """A layer with one stored tensor, which broadcasts against a sample."""

    value: Tensor

    def __init__(self, value: Tensor):
        super().__init__()
        self.register_buffer("value", value)

    def extra_repr(self) -> str:
        return f"shape={tuple(self.value.shape)}"


class Plus(WithConstant):
    """z + value."""

    def forward(self, z: Tensor) -> Tensor:
        return z + self.value


class Minus(WithConstant):
    """z - value."""

    def forward(self, z: Tensor) -> Tensor:
        return z - self.value


class MinusFrom(WithConstant):
    """value - z."""

    def forward(self, z: Tensor) -> Tensor:
        return self.value - z


class Times(WithConstant):
    """z * value."""

    def forward(self, z: Tensor) -> Tensor:
        return z * self.value


class Over(WithConstant):
    """z / value."""

    def forward(self, z: Tensor) -> Tensor:
        return z / self.value


class Sum(nn.Module):
    """a + b, two values of one shape."""

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return a + b


class Difference(nn.Module):
    """a - b, two values of one shape."""

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return a - b


class Reshaped(nn.Module):
    """The numbers of every sample in another shape, in the same order."""

    def __init__(self, shape: Sequence[int]):
        super().__init__()
        self.shape = tuple(shape)

    def forward(self, z: Tensor) -> Tensor:
        return z.reshape(-1, *self.shape)

    def extra_repr(self) -> str:
        return f"shape={self.shape}"


class Permuted(nn.Module):
    """The dimensions of every sample in another order, `order` of 0, 1, ... without the batch."""

    def __init__(self, order: Sequence[int]):
        super().__init__()
        self.order = tuple(order)

    def forward(self, z: Tensor) -> Tensor:
        return z.permute(0, *(dim + 1 for dim in self.order))

    def extra_repr(self) -> str:
        return f"order={self.order}"


@register_layer(Permuted)
def _permute(module: Permuted, in_shape: torch.Size, like: Tensor) -> Affine:
    return Affine(Permute(in_shape, module.order))


def wired(steps: Sequence[Step], input_shape: Sequence[int], classes: int) -> OnnxNetwork:
    """The network whose value is that of the last step."""
    chain = all(step.sources == (number - 1,) for number, step in enumerate(steps))
    network: OnnxNetwork = Chain() if chain else Wired(steps)
    if isinstance(network, Chain):
        for step in steps:
            network.add_module(step.name, step.layer)
    network.input_shape, network.classes = tuple(input_shape), classes
    return network.eval()


def needed(steps: Sequence[Step], result: int) -> list[Step]:
    """The steps behind `result`, which comes last, with their sources renumbered."""
    behind = {result}
    for number in range(result, -1, -1):  # a step reads earlier ones alone
        if number in behind:
            behind.update(steps[number].sources)
    place = {number: new for new, number in enumerate(sorted(behind - {-1}))} | {-1: -1}
    return [
        Step(steps[number].name, steps[number].layer, tuple(place[source] for source in steps[number].sources))
        for number in sorted(behind - {-1})
    ]
