"""What every activation's slopes promise: no change of its output, anywhere in the box, is out of their reach."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from locallip.activations import ELU, Activation, Box, Clip, LeakyReLU, MaxMin, SortPairs, Tanh, Varying, relu
from locallip.bounds.slopes import PairSlopes, Rows, Slopes, UnitSlopes, WindowSlopes, slopes_of

from .cases import ACTIVATIONS, ActivationCase
from .test_activations import SAMPLES, Draw

activations = pytest.mark.parametrize("case", ACTIVATIONS, ids=lambda case: case.name)
INF, NAN = float("inf"), float("nan")
#: Rounding of what the tests compute themselves, relative to the largest number that they meet.
ROUNDING = 1e-12


def steps_of(activation: Activation, box: Box) -> list[Slopes]:
    steps = slopes_of(activation, box, activation.varying(box))
    assert steps is not None
    return steps


def rows_for(case: ActivationCase, outputs: Tensor, seed: int = 3) -> Tensor:
    """Random weights on the outputs and some of single ones, (SAMPLES, 6, *shape)."""
    generator = torch.Generator().manual_seed(seed)
    g = torch.randn(len(outputs), 6, *outputs.shape[1:], generator=generator, dtype=torch.float64)
    which = torch.randint(outputs[0].numel(), (len(outputs), 3), generator=generator)
    g[:, 3:] = torch.nn.functional.one_hot(which, outputs[0].numel()).reshape(len(outputs), 3, *outputs.shape[1:])
    return g


def weighed(g: Tensor, change: Tensor) -> Tensor:
    """g . change for every row, (B, r)."""
    return torch.einsum("brn,bn->br", g.flatten(2), change.flatten(1))


def changes(case: ActivationCase, draw: Draw, box: Box) -> Iterator[tuple[Tensor, Tensor]]:
    for a, b in draw.pairs(box):
        yield a - b, case.change(a, b)


@activations
def test_intervals_reach_every_change(case: ActivationCase) -> None:
    """g . (phi(a) - phi(b)) = h . (a - b) for some h in the interval, also where only a few units change."""
    draw = Draw(case)
    for box in draw.boxes():
        steps = steps_of(case.activation, box)
        g = rows_for(case, case.activation(box.lower))
        wide = 0.3 * rows_for(case, case.activation(box.lower), 4).abs()
        for rows in (Rows(g, g), Rows(g - wide, g + 2 * wide)):
            back = rows
            for step in steps:
                back = step.back(back)
            low, high = (v.flatten(2) for v in back)
            for change, found in changes(case, draw, box):
                e = change.flatten(1)[:, None]
                most = torch.maximum(low * e, high * e).sum(2)
                scale = (torch.maximum(low.abs(), high.abs()) * e.abs()).sum(2) + (g.flatten(2).abs()).amax(2) * 1e-290
                slack = ROUNDING * scale + case.tolerance * g.flatten(2).abs().sum(2)
                assert (weighed(g, found) <= most + slack).all()


@activations
def test_middle_and_stray_reach_every_change(case: ActivationCase) -> None:
    """||g (phi(a) - phi(b)) - g M (a - b)|| <= ||stray|| ||inputs (a - b)||, for all rows together and step by step."""
    draw = Draw(case)
    for box in draw.boxes():
        varying = case.activation.varying(box)
        g = rows_for(case, case.activation(box.lower))
        middle, reach = g, torch.zeros(SAMPLES, dtype=torch.float64)
        for step in steps_of(case.activation, box):
            reach = reach + torch.linalg.matrix_norm(step.stray(middle).flatten(2), ord=2)
            middle = step.middle(middle)
        sizes = g.flatten(1).norm(dim=1)
        for change, found in changes(case, draw, box):
            left = (weighed(g, found) - weighed(middle, change)).norm(dim=1)
            length = (varying.inputs * change).flatten(1).norm(dim=1)
            slack = ROUNDING * sizes * (change.flatten(1).norm(dim=1) + 1e-290) + case.tolerance * sizes
            assert (left <= reach * length + slack).all()


@activations
def test_nothing_strays_from_stable_units(case: ActivationCase) -> None:
    """On a single point slopes are known but for rounding, of which Softplus makes more."""
    draw = Draw(case)
    center = 2.5 * draw.normal() + 0.3
    for step in steps_of(case.activation, Box(center, center)):
        g = rows_for(case, case.activation(center) if not isinstance(step, PairSlopes) else center)
        assert step.stray(g).abs().max() <= 1e-12


@given(
    slope=st.floats(0, 3),
    alpha=st.floats(0, 5),
    ends=st.tuples(st.floats(-40, 40), st.floats(-40, 40)),
    share=st.lists(st.floats(0, 1), min_size=2, max_size=6),
)
def test_quotients_of_any_two_points(slope: float, alpha: float, ends: tuple[float, float], share: list[float]) -> None:
    lower, upper = (torch.tensor([[v]], dtype=torch.float64) for v in (min(ends), max(ends)))
    points = torch.clamp(lower + torch.tensor([share], dtype=torch.float64) * (upper - lower), lower, upper)[0]
    for activation in (relu(), Clip(-1.0, lambda dtype: 2.0), LeakyReLU(slope), ELU(alpha), Tanh()):
        (step,) = steps_of(activation, Box(lower, upper))
        assert isinstance(step, UnitSlopes)
        a, b = points[:, None], points[None, :]
        rise, run = activation(a) - activation(b), a - b
        tolerance = 1e-13 * (1 + activation(points).abs().amax())
        assert ((rise - step.low * run) * run.sign() >= -tolerance).all()
        assert ((step.high * run - rise) * run.sign() >= -tolerance).all()


def test_stable_units_have_one_slope() -> None:
    box = Box(torch.tensor([[1.0, -2.0, -1.0, 0.0, -1.0]]).double(), torch.tensor([[2.0, -1.0, 1.0, 3.0, 0.0]]).double())
    (step,) = steps_of(relu(), box)
    assert isinstance(step, UnitSlopes)
    assert step.low.tolist() == [[1, 0, 0, 1, 0]]
    assert step.high.tolist() == [[1, 0, 1, 1, 0]]


def test_pairs_that_keep_their_order_have_one_slope() -> None:
    box = Box(
        torch.tensor([[1.0, -1.0, 0.0, 0.0, 3.0, 0.5]]).double(), torch.tensor([[2.0, 0.0, 1.0, 0.5, 4.0, 2.0]]).double()
    )
    (step,) = steps_of(SortPairs(MaxMin()), box)
    assert isinstance(step, PairSlopes)
    assert step.low.tolist() == [[1, 0, 0]]
    assert step.high.tolist() == [[1, 0, 1]]


class Steeper(Tanh):
    """Another function, by a class that says of its slopes only how large they are."""

    def __call__(self, z: Tensor) -> Tensor:
        return torch.tanh(z).pow(3)

    def slope(self, box: Box) -> Tensor:
        return torch.ones_like(box.lower)


class Foreign(Activation):
    def __call__(self, z: Tensor) -> Tensor:
        return z.abs()

    def image(self, box: Box) -> Box:
        return Box(torch.zeros_like(box.lower), torch.maximum(box.lower.abs(), box.upper.abs()))

    def varying(self, box: Box) -> Varying:
        ones = torch.ones_like(box.lower, dtype=torch.bool)
        return Varying(ones, ones)


class MyClip(Clip):
    def __call__(self, z: Tensor) -> Tensor:
        return -super().__call__(z)


def test_what_derives_from_ours_is_not_taken_for_ours() -> None:
    box = Box(torch.full((1, 4), 0.1).double(), torch.full((1, 4), 0.2).double())
    (step,) = steps_of(Steeper(), box)
    assert isinstance(step, UnitSlopes)
    assert not step.low.any()
    for activation in (Foreign(), MyClip(0.0, lambda dtype: INF)):
        assert slopes_of(activation, box, activation.varying(box)) is None


@pytest.mark.parametrize("ends", [(NAN, NAN), (NAN, 1.0), (1.0, NAN), (-INF, INF), (-INF, NAN), (NAN, INF)])
@activations
def test_ends_that_are_not_known_prove_nothing(case: ActivationCase, ends: tuple[float, float]) -> None:
    """No slope is ruled out that the activation has where a unit may be."""
    far = [end if abs(end) < INF else (-30.0, 30.0)[i] for i, end in enumerate(ends)]
    box, known = (Box(*(torch.full((SAMPLES, *case.shape), v, dtype=torch.float64) for v in both)) for both in (ends, far))
    for here, wide in zip(steps_of(case.activation, box), steps_of(case.activation, known), strict=True):
        if isinstance(here, WindowSlopes):
            assert isinstance(wide, WindowSlopes)
            assert (here.candidates | ~wide.candidates).all() or not here.known.any()
            continue
        assert isinstance(here, (UnitSlopes, PairSlopes))
        assert isinstance(wide, (UnitSlopes, PairSlopes))
        assert (here.low <= wide.low + 1e-12).all()
        assert not (here.high < wide.high - 1e-12).any()
