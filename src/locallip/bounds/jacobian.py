"""Bounds of a network's Lipschitz constant on the ball from the slopes that its activations can have there.

For any two points of the ball F(x') - F(x'') = J (x' - x''), J = W_L D_{L-1} W_{L-1} ... D_1 W_1 with the D of slopes.py.
Rows of J are followed from the logits back: F(x') - F(x'') = G (z_k(x') - z_k(x'')) behind stage k, and from the forward
pass z_k(x') - z_k(x'') = diag(outputs) t with ||t|| <= lip_k ||x' - x''||. So ||G diag(outputs)|| lip_k is a bound at every
k, from the product of all norms at the last one to ||J|| itself at the input, and the smallest counts. In a residual
network G has a part for every source that is still open, and their bounds add up. Three ways to know G:

- "absolute": |G| entry by entry, through |W| and the largest slopes; all signs are lost.
- "intervals": low <= G <= high entry by entry, through W and the intervals of slopes, as FastLip (Weng et al. 2018) and
  RecurJac (Zhang et al. 2019) do: where slopes are known, signs are kept.
- "middle": G through the middle M of all D is one matrix. What that leaves of a stage, G (D - M) (y_k(x') - y_k(x'')), is at
  most ||h|| lip_k ||x' - x''|| with the rows h of `Slopes.stray`: nothing is taken entry by entry.

All is rounded outward (docs/soundness.md).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, Literal, TypeVar

import torch
from torch import Tensor

from locallip.activations import Box, Varying
from locallip.bounds.region import Trace
from locallip.bounds.slopes import Rows, Slopes, slopes_of
from locallip.network import Network
from locallip.norms import matrix_norms
from locallip.ops import LinearOp, total
from locallip.rounding import floored, gamma, up

JacobianWay = Literal["absolute", "intervals", "middle"]
#: Numbers in one tensor: what is looked at together is limited by it.
TOGETHER = {"cpu": 2**24, "cuda": 2**28}

G = TypeVar("G", Tensor, Rows)


def jacobian_bounds(network: Network, trace: Trace, ways: Sequence[JacobianWay] = ("intervals", "middle")) -> Tensor:
    """Upper bounds of the Lipschitz constant on each ball of a trace with outward rounding, (B,), the smallest of some ways.

    Infinite where one sample's rows do not fit (TOGETHER).
    """
    batch, size = len(trace.logits), _together(network, trace.logits)
    bound = trace.lipschitz.new_full((batch,), float("inf"))
    for first in range(0, batch, size) if size else ():
        some = slice(first, first + size)
        parts = known(network, trace, some)
        for way in ways:
            found = Middle(parts).bound() if way == "middle" else Intervals(parts, signs=way == "intervals").bound()
            bound[some] = torch.minimum(bound[some], found.nan_to_num(float("inf"), float("inf")))
    return bound


def fits(network: Network, like: Tensor) -> bool:
    """Whether the rows of one sample do, on the device of `like`."""
    return _together(network, like) > 0


def _together(network: Network, like: Tensor) -> int:
    """Samples that are looked at together."""
    shapes = [network.input_shape, *(op.in_shape for stage in network.stages for op in stage.terms.values())]
    numbers = network.output_shape.numel() * max(shape.numel() for shape in shapes)
    return TOGETHER.get(like.device.type, TOGETHER["cpu"]) // max(1, numbers)


@dataclass(frozen=True)
class Known:
    """What the ways need of some samples: per source the slopes (None: not known), outputs and Lipschitz constants."""

    network: Network
    slopes: Mapping[int, list[Slopes] | None]
    outputs: list[Tensor | None]
    lipschitz: list[Tensor]


def known(network: Network, trace: Trace, some: slice) -> Known:
    slopes: dict[int, list[Slopes] | None] = {}
    for k, (stage, box, varying) in enumerate(zip(network.stages[:-1], trace.boxes, trace.varying, strict=True), start=1):
        assert stage.activation is not None
        slopes[k] = slopes_of(stage.activation, Box(*(v[some] for v in box)), Varying(*(v[some] for v in varying)))
    outputs = [None if region.outputs is None else region.outputs[some] for region in trace.regions]
    lipschitz = [region.lipschitz.expand(len(trace.logits))[some] for region in trace.regions]
    return Known(network, slopes, outputs, lipschitz)


class Way(ABC, Generic[G]):
    """The way back from the logits: what is known of G, and what was given away before."""

    def __init__(self, known: Known):
        self.known = known

    def bound(self) -> Tensor:
        """The smallest bound on the way, (B,)."""
        *stages, last = self.known.network.stages
        one = self.known.lipschitz[0]
        eye = torch.eye(last.linear_shape.numel(), dtype=one.dtype, device=one.device)
        pending: dict[int, G]
        pending, cost = self._through(self.start(eye.reshape(1, -1, *last.linear_shape)), last.terms, {})
        best = torch.full_like(one, float("inf"))
        for k in range(len(stages), -1, -1):
            if k not in pending:
                continue
            best = torch.minimum(best, up(cost + self._sizes(pending)))
            rows, steps = pending.pop(k), self.known.slopes.get(k)
            if steps is None:  # the way of this part ends here
                cost = up(cost + self.size(rows, k))
                continue
            for step in steps:
                rows, more = self.bent(rows, step, k)
                cost = up(cost + more)
            pending, more = self._through(rows, stages[k - 1].terms, pending)
            cost = up(cost + more)
        return best

    def _through(self, rows: G, terms: Mapping[int, LinearOp], pending: dict[int, G]) -> tuple[dict[int, G], Tensor]:
        """Rows before a stage as rows on its sources, added to those that are there."""
        found, costs = dict(pending), [torch.zeros_like(self.known.lipschitz[0])]
        for source, op in terms.items():
            back, cost = self.pulled(rows, op, source)
            found[source] = self.added(found[source], back) if source in found else back
            costs.append(cost)
        return found, up(total(costs), 8 + len(costs))

    def _sizes(self, pending: Mapping[int, G]) -> Tensor:
        return up(total([self.size(rows, source) for source, rows in pending.items()]), 8 + len(pending))

    def _roundings(self, op: LinearOp) -> int:
        """Behind one entry of W^T g, and of the sum of several such."""
        return max(op.roundings, op.out_shape.numel()) + len(self.known.network.stages) + 16

    def _weighed(self, g: Tensor, source: int) -> Tensor:
        """g diag(outputs), (b, r, h)."""
        outputs = self.known.outputs[source]
        return (g if outputs is None else g * outputs[:, None].to(g.dtype)).flatten(2)

    @abstractmethod
    def start(self, g: Tensor) -> G: ...

    @abstractmethod
    def pulled(self, rows: G, op: LinearOp, source: int) -> tuple[G, Tensor]:
        """G W, and what its rounding costs."""

    @abstractmethod
    def bent(self, rows: G, step: Slopes, k: int) -> tuple[G, Tensor]:
        """G D, and what is not in it."""

    @abstractmethod
    def added(self, one: G, other: G) -> G: ...

    @abstractmethod
    def size(self, rows: G, source: int) -> Tensor:
        """||G diag(outputs)|| lip or larger, (b,)."""


class Intervals(Way[Rows]):
    """G entry by entry; without `signs` its absolute value alone."""

    def __init__(self, known: Known, signs: bool):
        super().__init__(known)
        self.signs = signs

    def start(self, g: Tensor) -> Rows:
        return Rows(g, g) if self.signs else Rows(-g, g)

    def pulled(self, rows: Rows, op: LinearOp, source: int) -> tuple[Rows, Tensor]:
        n, (middle, reach) = self._roundings(op), _covering(rows)
        center = _by_rows(op.adjoint, middle)
        # What is not zero is raised to FLOOR, so that no product with weights underflows.
        reach = floored(reach + gamma(n, center.dtype) * middle.abs(), middle != 0)
        reach = up(up(_by_rows(op.adjoint_abs, reach), n) + gamma(n, center.dtype) * center.abs())
        return Rows(center - reach, center + reach), torch.zeros_like(self.known.lipschitz[0])

    def bent(self, rows: Rows, step: Slopes, k: int) -> tuple[Rows, Tensor]:
        return step.back(rows), torch.zeros_like(self.known.lipschitz[0])

    def added(self, one: Rows, other: Rows) -> Rows:
        """Rounding is in `_roundings`."""
        return Rows(one.low + other.low, one.high + other.high)

    def size(self, rows: Rows, source: int) -> Tensor:
        """That of absolute values, or of the middle and what is around it."""
        middle, reach = (_norms(self._weighed(v, source)) for v in _covering(rows))
        absolute = _norms(self._weighed(torch.maximum(rows.low.abs(), rows.high.abs()), source))
        return up(torch.minimum(absolute, up(middle + reach)) * self.known.lipschitz[source])


class Middle(Way[Tensor]):
    """G through the middle of all slopes."""

    def start(self, g: Tensor) -> Tensor:
        return g

    def pulled(self, rows: Tensor, op: LinearOp, source: int) -> tuple[Tensor, Tensor]:
        n = self._roundings(op)
        most = up(_by_rows(op.adjoint_abs, floored(rows.abs(), rows != 0)), n)
        lost = gamma(n, rows.dtype) * _size(self._weighed(most, source))
        return _by_rows(op.adjoint, rows), up(lost * self.known.lipschitz[source])

    def bent(self, rows: Tensor, step: Slopes, k: int) -> tuple[Tensor, Tensor]:
        cost = up(_norms(step.stray(rows).flatten(2)) + _size(step.lost(rows).flatten(2)))
        cost = floored(cost, (rows != 0).flatten(1).any(1))  # products of rows and slopes may vanish
        return step.middle(rows), up(cost * self.known.lipschitz[k])

    def added(self, one: Tensor, other: Tensor) -> Tensor:
        """Rounding is in `_roundings`."""
        return one + other

    def size(self, rows: Tensor, source: int) -> Tensor:
        return up(_norms(self._weighed(rows, source)) * self.known.lipschitz[source])


def _by_rows(apply: Callable[[Tensor], Tensor], g: Tensor) -> Tensor:
    """A map of (n, *shape) on rows (b, r, *shape)."""
    return apply(g.flatten(0, 1)).unflatten(0, g.shape[:2])


def _covering(rows: Rows) -> tuple[Tensor, Tensor]:
    """m and r so that m +- r covers the interval."""
    middle = (rows.low + rows.high) / 2
    return middle, up(torch.maximum(rows.high - middle, middle - rows.low).clamp(min=0))


def _norms(matrix: Tensor) -> Tensor:
    """At least the norm of each matrix (b, r, h) whose entries are off by some roundings of themselves, (b,)."""
    return up(matrix_norms(matrix) + gamma(16, matrix.dtype) * _size(matrix))


def _size(matrix: Tensor) -> Tensor:
    """At least the Frobenius norm of each, (b,); squares of numbers below 1e-154 vanish, which FLOOR covers."""
    flat = matrix.flatten(1)
    return up(floored(flat.norm(dim=1), (flat != 0).any(1)), flat.shape[1] + 64)
