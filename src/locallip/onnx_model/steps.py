"""What rules work with: values that depend on the input, constants, and the steps that are made of nodes."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from locallip.onnx_model.network import Step
from locallip.onnx_model.nodes import Node

#: More numbers than this in one value of one sample are a mistake or worse.
LARGEST = 2**26


@dataclass(frozen=True)
class Flow:
    """A value that depends on the input: the step that gives it, and its shape in the file for a batch of one.

    `batched` says that the first dimension is the batch; it is not there where the input of the network has none.
    """

    step: int
    shape: tuple[int, ...]
    batched: bool = True

    @property
    def sample(self) -> tuple[int, ...]:
        """The shape of one sample."""
        return self.shape[1:] if self.batched else self.shape


#: A value of the graph; constants are arrays, and an input that is left out is None.
Value = Flow | np.ndarray


@dataclass
class Steps:
    """The steps so far. `dtype` is that of the module, which holds every number of the file exactly."""

    kind: np.dtype
    found: list[Step] = field(default_factory=list)

    @property
    def dtype(self) -> torch.dtype:
        return torch.float64 if self.kind == np.float64 else torch.float32

    def stored(self, node: Node, array: np.ndarray) -> Tensor:
        """A constant as a tensor of the module."""
        if array.dtype != self.kind:
            raise node.wrong(f"it mixes {array.dtype} with the {self.kind} of the input; export it in one type")
        return torch.from_numpy(np.array(array)).to(self.dtype)  # a copy: the message's own memory is not writable

    def add(self, node: Node, layer: nn.Module, sample: tuple[int, ...], *sources: Flow) -> Flow:
        """A new step that reads `sources`, all batched or none, and gives samples of this shape."""
        check_size(node, sample)
        number = len(self.found)
        again = sum(step.name.split("_")[0] == str(node.index) for step in self.found[-4:])
        name = f"{node.index}_{node.operator}" + (f"_{again}" if again else "")
        self.found.append(Step(name, layer, tuple(source.step for source in sources)))
        batched = sources[0].batched
        return Flow(number, (1, *sample) if batched else sample, batched)


def check_size(node: Node, shape: tuple[int, ...]) -> None:
    """Refuse shapes that no memory could hold, before there is anything of that shape."""
    if min(shape, default=0) < 1 or math.prod(shape) > LARGEST:
        raise node.wrong(f"it gives samples of shape {shape}; expected from 1 to {LARGEST:,} numbers, and no empty shape")


Rule = Callable[[Node, list[Value | None], Steps], Value]
AnyRule = TypeVar("AnyRule", bound=Rule)


@dataclass(frozen=True)
class Operator:
    """The rule of an operator, with how many inputs it takes and which attributes it understands."""

    rule: Rule
    inputs: tuple[int, int]
    attributes: frozenset[str]


OPERATORS: dict[str, Operator] = {}


def operator(*names: str, inputs: tuple[int, int], attributes: str = "") -> Callable[[AnyRule], AnyRule]:
    """Decorator: `rule(node, inputs, steps)` reads nodes of these operators."""

    def keep(rule: AnyRule) -> AnyRule:
        OPERATORS.update(dict.fromkeys(names, Operator(rule, inputs, frozenset(attributes.split()))))
        return rule

    return keep


def flow(node: Node, value: Value | None, dims: range | None = None) -> Flow:
    """A value that must depend on the input; with `dims`, one with a batch and a sample of so many dimensions."""
    if not isinstance(value, Flow):
        raise node.wrong("it is applied to constants alone, or to a constant in the wrong place, which has no rule")
    if dims is not None and not (value.batched and len(value.sample) in dims):
        expected = " or ".join(str(count + 1) for count in dims)
        raise node.wrong(f"it reads a value of shape {value.shape}; expected {expected} dimensions, the first the batch")
    return value


def constant(node: Node, value: Value | None, what: str) -> np.ndarray:
    if not isinstance(value, np.ndarray):
        raise node.wrong(f"its {what} must be stored in the file and not be computed; simplify the file (fold constants)")
    return value


def numbers(node: Node, value: Value | None, what: str) -> tuple[int, ...]:
    """A stored list of whole numbers, such as the target of a reshape."""
    array = constant(node, value, what)
    if array.dtype.kind != "i" or array.ndim > 1 or array.size > 64:
        raise node.wrong(f"its {what} must be a short list of whole numbers, got {array.dtype} of shape {array.shape[:8]}")
    return tuple(int(number) for number in array.reshape(-1))
