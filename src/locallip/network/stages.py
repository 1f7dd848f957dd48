"""A lowered network: stages of affine maps and activations, in the order in which they are computed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from locallip.activations import Activation, Box, Unitwise, Varying
from locallip.ops import LinearOp
from locallip.rounding import floored


@dataclass(frozen=True)
class Offset:
    """The constant part of a stage: a sum of op(b), each bias b pushed through the linear maps behind it."""

    parts: tuple[tuple[LinearOp, Callable[[torch.dtype], Tensor]], ...] = ()

    def __call__(self, like: Tensor) -> Tensor | float:
        """The offset, (1, *out_shape), in the dtype of `like`; the number 0 where there is none."""
        return sum((op.apply(_expand(value(like.dtype), op)) for op, value in self.parts), 0.0)

    def magnitude(self, like: Tensor) -> Tensor | float:
        """At least the sum of absolute values that went into the offset: what its rounding is measured by."""
        parts = [(op, _expand(value(like.dtype), op)) for op, value in self.parts]
        return sum((op.apply_abs(floored(b.abs(), b != 0)) for op, b in parts), 0.0)

    @property
    def fan_in(self) -> int:
        return max((op.fan_in for op, _ in self.parts), default=0) + len(self.parts) + 8


@dataclass(frozen=True)
class Stage:
    """z_new = activation(sum_k W_k z_k + offset); several sources k make residual networks.

    Index 0 is the network's input and index i the output of stage i - 1. `activation` is None on the last stage alone.
    """

    name: str
    terms: Mapping[int, LinearOp]
    offset: Offset
    activation: Activation | None
    layers: Mapping[int, str] = field(default_factory=dict)  # the path of the linear layer behind each term

    @property
    def linear_shape(self) -> torch.Size:
        """Shape of the pre-activation, without batch."""
        return next(iter(self.terms.values())).out_shape

    def linear(self, sources: Mapping[int, Tensor] | list[Tensor]) -> Tensor:
        """sum_k W_k z_k + offset for values of all sources, each (B, *shape)."""
        total: Tensor | float = 0.0
        for source, op in self.terms.items():
            total = total + op.apply(sources[source])
        assert isinstance(total, Tensor)
        return total + self.offset(total)

    @property
    def fan_in(self) -> int:
        """Roundings behind one pre-activation."""
        return max(op.fan_in for op in self.terms.values()) + len(self.terms) + self.offset.fan_in


@dataclass(frozen=True)
class Network:
    """A user's module as stages; calling it computes what the module computes."""

    input_shape: torch.Size
    stages: tuple[Stage, ...]

    def __call__(self, x: Tensor) -> Tensor:
        values = [x]
        for stage in self.stages:
            z = stage.linear(values)
            values.append(z if stage.activation is None else stage.activation(z))
        return values[-1]

    @property
    def output_shape(self) -> torch.Size:
        return self.stages[-1].linear_shape

    @property
    def num_norms(self) -> int:
        """Spectral norms that one bound of the network needs: one per term of every stage."""
        return sum(len(stage.terms) for stage in self.stages)


class PassThrough(Unitwise):
    """The identity: closes a stage where a sum of branches is used more than once."""

    def __call__(self, z: Tensor) -> Tensor:
        return z

    def image(self, box: Box) -> Box:
        return box

    def varying(self, box: Box) -> Varying:
        everything = torch.ones_like(box.lower, dtype=torch.bool)
        return Varying(everything, everything)


def _expand(value: Tensor, op: LinearOp) -> Tensor:
    return value.expand(1, *op.in_shape)
