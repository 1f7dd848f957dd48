"""Parts that branches cut a box into: what a slope leaves of an activation there stays within its ends, and near them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from locallip.activations import Box, Clip, Increasing
from locallip.bounds.bend import Bend
from locallip.bounds.bends import bends
from locallip.bounds.curved import Curved

from .cases import ACTIVATIONS, ActivationCase
from .test_activations import Draw
from .test_lines import before_of

#: Rounding of what the test itself computes, relative to the numbers that it meets.
ROUNDING = 1e-12
#: Activations of one bend, which is the activation itself; pairs have two (tests/test_branching.py).
CASES = [case for case in ACTIVATIONS if isinstance(case.activation, (Clip, Increasing))]


def bend_of(case: ActivationCase, box: Box, share: Tensor) -> tuple[Bend, Tensor]:
    """The bend of an activation with all its cuts, and c (B, h)."""
    before = before_of(case.activation, box, share)
    found = bends(case.activation, before)
    assert found is not None
    (bend,) = found
    return bend.with_cuts(), before.center


def some_part(bend: Bend, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """The numbers (B, h) of two points of every unit, in order."""
    one, other = (torch.randint(0, len(bend.runs), bend.low.shape, generator=generator) for _ in range(2))
    turned = bend.runs.gather(0, one[None])[0] > bend.runs.gather(0, other[None])[0]
    return torch.where(turned, other, one), torch.where(turned, one, other)


@torch.no_grad()
def excess(
    case: ActivationCase, box: Box, seed: int, change: Callable[[Bend], Bend] = lambda part: part
) -> tuple[float, float]:
    """How far r leaves its ends, or s times the way from c, relative to what is met; and how much too wide the ends are.

    The second is seen where many points were looked at, as a share of what r spans there, but for what rounding hides.
    """
    generator = torch.Generator().manual_seed(seed)
    bend, center = bend_of(case, box, torch.rand(box.lower.shape, generator=generator, dtype=torch.float64))
    over, loose = -1.0, 0.0
    c, psi = center.flatten(1), case.activation
    for _ in range(4):
        first, last = some_part(bend, generator)
        part = change(bend.between(first, last))
        low, high = (bend.runs.gather(0, which[None])[0] for which in (first, last))
        alpha = part.low + (part.high - part.low) * (
            1.4 * torch.rand(c.shape, generator=generator, dtype=torch.float64) - 0.2
        )
        size, least, most = part.remainder(alpha, True)
        weight = part.weight if isinstance(part, Curved) else torch.ones_like(c)
        share = torch.linspace(0, 1, 257, dtype=torch.float64)[:, None, None]
        y = (c + torch.minimum(torch.maximum(low + share * (high - low), low), high)).unflatten(2, center.shape[1:])
        run, values = y.flatten(2) - c, torch.stack([psi(one) for one in y]).flatten(2)
        rest = values - psi(center).flatten(1) - alpha * run
        met = values.abs() + psi(center).flatten(1).abs() + (1 + alpha.abs()) * (y.flatten(2).abs() + c.abs()) + 1e-300
        outside = torch.maximum(size * least - rest, rest - size * most)
        far = rest.abs() - size * weight * run.abs()
        over = max(over, float((torch.maximum(outside, far) / met).nan_to_num(nan=1.0).max()))
        span, wide = rest.amax(0) - rest.amin(0), size * (most - least)
        seen = 1e-6 * met.amax(0) + 1e-3 * (high - low) * (1 + part.high)  # what lies between points, or is rounding
        loose = max(loose, float(((wide - span - seen) / (span + seen)).max()))
    return over, loose


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_parts_hold_what_a_slope_leaves(case: ActivationCase) -> None:
    for seed, box in enumerate(Draw(case).boxes()):
        assert excess(case, box, seed)[0] <= ROUNDING


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@given(seed=st.integers(0, 2**32), scale=st.sampled_from([1e-9, 1e-3, 0.3, 2.0, 40.0]), coarse=st.booleans())
def test_parts_hold_on_any_box(case: ActivationCase, seed: int, scale: float, coarse: bool) -> None:
    generator = torch.Generator().manual_seed(seed)
    ends = scale * torch.randn(2, 1, *case.shape, generator=generator, dtype=torch.float64)
    ends = (4 * ends).round() / 4 if coarse else ends
    assert excess(case, Box(ends.amin(0), ends.amax(0)), seed)[0] <= ROUNDING


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_ends_of_parts_are_reached(case: ActivationCase) -> None:
    """Catches: a part for which the whole box counts, so that cutting brings nothing."""
    draw = Draw(case)
    lower = 2 * draw.normal()
    assert excess(case, Box(lower, lower + 3 * draw.uniform()), 0)[1] <= 0.05


def shrunk(part: Bend) -> Bend:
    """Points and ends 1 % nearer to the middle of the part than they are."""
    if not isinstance(part, Curved):
        return replace(part, runs=0.99 * part.runs, rises=0.99 * part.rises)
    middle = (part.start + part.end) / 2
    start, end = (middle + 0.99 * (v - middle) for v in (part.start, part.end))
    points = torch.minimum(torch.maximum(part.points, start), end)
    rises = part.activation(points) - part.activation(part.center)
    return replace(part, start=start, end=end, points=points, runs=points - part.center, rises=rises)


def steepest_of_the_part(part: Bend) -> Bend:
    return replace(part, steepest=part.high) if isinstance(part, Curved) else part


WRONG = [(name, shrunk) for name in ("relu", "leaky", "elu", "tanh", "sigmoid", "softplus")]
WRONG += [(name, steepest_of_the_part) for name in ("leaky", "elu", "tanh", "sigmoid", "softplus")]


@pytest.mark.parametrize(("name", "change"), WRONG)
def test_a_wrong_part_is_found(name: str, change: Callable[[Bend], Bend]) -> None:
    case = next(case for case in CASES if case.name.startswith(name))
    draw = Draw(case)
    lower = 2 * draw.normal()
    assert excess(case, Box(lower, lower + 3 * draw.uniform()), 0, change)[0] > 1e-6
