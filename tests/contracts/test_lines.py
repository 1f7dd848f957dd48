"""Two lines around every activation: weights that pass them bound what they weigh, and a wrong line is found."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from locallip.activations import Activation, Box
from locallip.bounds.bend import Before
from locallip.bounds.lines import Lines, Side, lines_of, unstable

from .cases import ACTIVATIONS, ActivationCase
from .test_activations import Draw

activations = pytest.mark.parametrize("case", ACTIVATIONS, ids=lambda case: case.name)
#: Rounding of what the test itself computes, relative to the numbers that it meets.
ROUNDING = 1e-13


def before_of(activation: Activation, box: Box, share: Tensor) -> Before:
    """A center in the box and a ball that is just large enough for all of it."""
    center = torch.clamp(box.lower + share * (box.upper - box.lower), box.lower, box.upper)
    varying = activation.varying(box)
    far = torch.maximum(box.upper - center, center - box.lower)
    radius = (varying.inputs * far).flatten(1).norm(dim=1) * (1 + 1e-12)
    return Before(center, torch.zeros_like(center), box, varying, radius)


def points(box: Box, kinks: list[Tensor | float], generator: torch.Generator) -> list[Tensor]:
    """The ends of the box, its kinks, and points between."""
    found = [box.lower, box.upper, (box.lower + box.upper) / 2]
    found += [torch.clamp(torch.as_tensor(kink).expand_as(box.lower), box.lower, box.upper) for kink in kinks]
    for _ in range(12):
        share = torch.rand(box.lower.shape, generator=generator, dtype=torch.float64)
        ends = torch.rand(box.lower.shape, generator=generator, dtype=torch.float64).round()
        found += [box.lower + share * (box.upper - box.lower), torch.where(ends > 0, box.upper, box.lower)]
    return [torch.clamp(point, box.lower, box.upper) for point in found]


@torch.no_grad()
def worst_excess(
    case: ActivationCase, box: Box, share: Tensor, change: Callable[[Lines], Lines] = lambda lines: lines
) -> float:
    """How far weighed outputs exceed the bound by their lines, relative to what is met; ROUNDING at most if all is well."""
    activation = case.activation
    before = before_of(activation, box, share)
    lines = lines_of(activation, before)
    assert lines is not None
    generator = torch.Generator().manual_seed(1)
    start = activation(before.center).flatten(1)
    weights = torch.randn(len(start), 4, start.shape[1], generator=generator, dtype=torch.float64)
    ones = torch.eye(start.shape[1], dtype=torch.float64).expand(len(start), -1, -1)
    g = torch.cat([weights, ones, -ones], dim=1)
    worst = -float("inf")
    for ball in (False, True):
        h, cost = g, torch.zeros(g.shape[:2], dtype=torch.float64)
        for step in map(change, lines if ball else [replace(step, radius=None) for step in lines]):
            h, more = step.back(h, slice(None))
            cost = cost + more
        for y in points(box, list(case.points), generator):
            gain, bound = _sum(g, activation(y).flatten(1) - start), _sum(h, (y - before.center).flatten(1)) + cost
            met = _sum(g.abs(), activation(y).flatten(1).abs() + start.abs()) + _sum(
                h.abs(), (y.abs() + before.center.abs()).flatten(1)
            )
            worst = max(worst, float(((gain - bound) / (met + 1e-300)).nan_to_num(nan=1.0).max()))
    return worst


def _sum(weights: Tensor, values: Tensor) -> Tensor:
    return torch.bmm(weights, values[..., None])[..., 0]


@activations
def test_weighed_outputs_stay_below_their_lines(case: ActivationCase) -> None:
    draw = Draw(case)
    for box in draw.boxes():
        assert worst_excess(case, box, draw.uniform()) <= ROUNDING


@activations
@given(seed=st.integers(0, 2**32), scale=st.sampled_from([1e-9, 1e-3, 0.3, 2.0, 40.0]), coarse=st.booleans())
def test_lines_hold_on_any_box(case: ActivationCase, seed: int, scale: float, coarse: bool) -> None:
    """`coarse` ends are often kinks, or those of another unit."""
    generator = torch.Generator().manual_seed(seed)
    ends = scale * torch.randn(2, 1, *case.shape, generator=generator, dtype=torch.float64)
    ends = (4 * ends).round() / 4 if coarse else ends
    share = torch.rand(1, *case.shape, generator=generator, dtype=torch.float64)
    assert worst_excess(case, Box(ends.amin(0), ends.amax(0)), share.round() if coarse else share) <= ROUNDING


def moved(side: str, slope: float = 0.0, cap: float = 1.0) -> Callable[[Lines], Lines]:
    """Lines with another slope or gap, which the other numbers do not know of."""

    def change(lines: Lines) -> Lines:
        old: Side = getattr(lines, side)
        return replace(lines, **{side: Side(old.slope + slope, old.size, old.cap * cap)})

    return change


@pytest.mark.parametrize("name", ["relu", "relu_theta", "hardtanh", "tanh", "sigmoid", "softplus", "elu", "leaky"])
@pytest.mark.parametrize(
    "change",
    [
        *(moved(side, slope) for side in ("below", "above") for slope in (1e-6, -1e-6)),
        *(moved(side, cap=cap) for side in ("below", "above") for cap in (0.999, -1.0, 0.0)),
    ],
)
def test_a_wrong_line_is_found(name: str, change: Callable[[Lines], Lines]) -> None:
    case = next(case for case in ACTIVATIONS if case.name.startswith(name))
    draw = Draw(case)
    found = [worst_excess(case, box, draw.uniform(), change) for box in draw.boxes()]
    assert max(found) > 1e-9


@activations
def test_stable_units_have_one_line(case: ActivationCase) -> None:
    """Where no unit may bend, nothing is lost but by rounding: lines would gain nothing by a smaller box."""
    activation, draw = case.activation, Draw(case)
    for box in draw.boxes():
        before = before_of(activation, box, draw.uniform())
        for step in lines_of(activation, before) or []:
            if step.is_unitwise:
                gap = (step.above.size * step.above.cap + step.below.size * step.below.cap).reshape(box.lower.shape)
                bent = unstable(activation, box)
                size = box.lower.abs() + box.upper.abs()
                assert bool((gap[~bent] <= 1e-12 * (1 + size[~bent])).all())
