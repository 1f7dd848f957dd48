"""What every activation promises, for each row of the table of activations."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from locallip.activations import (
    Activation,
    Box,
    ClippedMaxMin,
    Increasing,
    MaxMin,
    ReLUTheta,
    SortPairs,
    Varying,
    relu,
    relu_theta,
)

from .cases import ACTIVATIONS, ActivationCase

activations = pytest.mark.parametrize("case", ACTIVATIONS, ids=lambda case: case.name)
SAMPLES = 64
INF, NAN = float("inf"), float("nan")


class Draw:
    """Random boxes and points for one case; every tensor is (SAMPLES, *shape) in float64."""

    def __init__(self, case: ActivationCase):
        self.case = case
        self.generator = torch.Generator().manual_seed(0)
        self.size = (SAMPLES, *case.shape)

    def normal(self) -> Tensor:
        return torch.randn(self.size, generator=self.generator, dtype=torch.float64)

    def uniform(self) -> Tensor:
        return torch.rand(self.size, generator=self.generator, dtype=torch.float64)

    def point(self) -> Tensor:
        """Thresholds of the activation, one of them per sample."""
        points = [torch.as_tensor(p, dtype=torch.float64).expand(self.case.shape) for p in self.case.points]
        return torch.stack([points[i % len(points)] for i in range(SAMPLES)])

    def boxes(self) -> Iterator[Box]:
        for scale, width in ((2.0, 6.0), (1.0, 1e-3), (1.0, 1e-9), (50.0, 20.0), (0.3, 0.3)):
            lower = scale * self.normal()
            yield Box(lower, lower + width * self.uniform())
        center = self.normal()
        yield Box(center, center)
        for far in (-200.0, -50.0, 50.0, 200.0):
            yield Box(far + self.normal(), far + 4 + self.uniform())
        point = self.point()
        for below, above in ((1.0, 1.0), (1e-6, 1e-6), (0.0, 1.0), (1.0, 0.0), (0.0, 0.0)):
            yield Box(point - below * self.uniform(), point + above * self.uniform())
        mixed = 3 * self.normal()
        yield Box(mixed, mixed + (self.uniform() > 0.5) * self.uniform() ** 8 * 5)

    def inside(self, box: Box) -> Iterator[Tensor]:
        """Points of the box: corners, thresholds, random ones."""
        yield box.lower
        yield box.upper
        yield torch.where(self.uniform() > 0.5, box.lower, box.upper)
        yield self.point().clamp(box.lower, box.upper)
        for _ in range(3):
            yield (box.lower + self.uniform() * (box.upper - box.lower)).clamp(box.lower, box.upper)

    def pairs(self, box: Box) -> Iterator[tuple[Tensor, Tensor]]:
        """Every pair of points, and the same pair with all but a few units alike."""
        points = list(self.inside(box))
        for i, a in enumerate(points):
            for b in points[:i]:
                yield a, b
                yield a, torch.where(self.uniform() < 0.15, b, a)

    def smaller(self, box: Box) -> Box:
        width = box.upper - box.lower
        lower = (box.lower + 0.5 * self.uniform() * width).clamp(box.lower, box.upper)
        upper = (box.upper - 0.5 * self.uniform() * width).clamp(lower, box.upper)
        return Box(lower, upper)


def norm(v: Tensor) -> Tensor:
    return v.flatten(1).norm(dim=1)


def at_least(a: Varying, b: Varying) -> bool:
    """No weight of `a` is below its counterpart in `b`, but for the last bits; NaN counts as large."""
    return all(bool((~(x.double() < y.double() * (1 - 1e-13))).all()) for x, y in zip(a, b, strict=True))


@activations
def test_image_holds_every_value(case: ActivationCase) -> None:
    draw = Draw(case)
    for box in draw.boxes():
        image = case.activation.image(box)
        for a in draw.inside(box):
            value = case.activation(a)
            assert (image.lower <= value).all()
            assert (value <= image.upper).all()


@activations
def test_image_is_not_wider_than_needed(case: ActivationCase) -> None:
    """The activations here are monotone, so the ends of the image are values at the ends of the box."""
    for box in Draw(case).boxes():
        image = case.activation.image(box)
        torch.testing.assert_close(image.lower, case.activation(box.lower), rtol=1e-12, atol=1e-300)
        torch.testing.assert_close(image.upper, case.activation(box.upper), rtol=1e-12, atol=1e-300)


@activations
def test_varying_bounds_every_change(case: ActivationCase) -> None:
    """phi(a) - phi(b) = diag(outputs) D diag(inputs) (a - b) with ||D|| <= 1, for all a, b in the box."""
    draw = Draw(case)
    for box in draw.boxes():
        inputs, outputs = (weights.double() for weights in case.activation.varying(box))
        for a, b in draw.pairs(box):
            change = case.change(a, b)
            assert not change[outputs.expand_as(change) == 0].any()
            scaled = torch.where(outputs > 0, change / outputs, 0.0)
            assert (norm(scaled) <= norm(inputs * (a - b)) * (1 + 1e-12)).all()


@activations
def test_shapes_of_the_weights(case: ActivationCase) -> None:
    box = next(Draw(case).boxes())
    varying = case.activation.varying(box)
    assert varying.inputs.shape == box.lower.shape
    assert varying.outputs.shape == case.activation(box.lower).shape
    assert varying.outputs.shape[1:] == case.activation.out_shape(torch.Size(case.shape))


@activations
def test_a_smaller_box_never_varies_more(case: ActivationCase) -> None:
    draw = Draw(case)
    for box in draw.boxes():
        large = case.activation.varying(box)
        assert at_least(large, case.activation.varying(draw.smaller(box)))
        small = Box(box.upper, box.upper)
        assert at_least(large, case.activation.varying(small))


@activations
def test_the_whole_space_varies_most(case: ActivationCase) -> None:
    everything = Box.everything(torch.Size(case.shape), torch.zeros(1, dtype=torch.float64))
    most = case.activation.varying(everything)
    assert all(bool(weights.double().isfinite().all()) for weights in most)
    for box in Draw(case).boxes():
        assert at_least(most, case.activation.varying(box))


@activations
def test_nan_counts_as_varying(case: ActivationCase) -> None:
    """A NaN end says nothing, so the weights are at least those of a box without that end."""
    for box in Draw(case).boxes():
        nan, inf = torch.full_like(box.lower, NAN), torch.full_like(box.lower, INF)
        assert at_least(case.activation.varying(Box(nan, box.upper)), case.activation.varying(Box(-inf, box.upper)))
        assert at_least(case.activation.varying(Box(box.lower, nan)), case.activation.varying(Box(box.lower, inf)))
        assert at_least(case.activation.varying(Box(nan, nan)), case.activation.varying(Box(-inf, inf)))


@activations
def test_one_nan_among_numbers_counts_as_varying(case: ActivationCase) -> None:
    for box in Draw(case).boxes():
        lower, upper, low_open, high_open = box.lower.clone(), box.upper.clone(), box.lower.clone(), box.upper.clone()
        lower[:, 0], upper[:, 0], low_open[:, 0], high_open[:, 0] = NAN, NAN, -INF, INF
        assert at_least(case.activation.varying(Box(lower, upper)), case.activation.varying(Box(low_open, high_open)))


@activations
def test_overflow_counts_as_varying(case: ActivationCase) -> None:
    """Both ends infinite with one sign come from overflow: the unit may still move as far as it does at large numbers."""
    for sign in (-1.0, 1.0):
        far, beyond = (torch.full((2, *case.shape), sign * size, dtype=torch.float64) for size in (1e300, INF))
        assert at_least(case.activation.varying(Box(beyond, beyond)), case.activation.varying(Box(far, far)))


@activations
def test_module_computes_the_same(case: ActivationCase) -> None:
    draw = Draw(case)
    for box in draw.boxes():
        for a in draw.inside(box):
            torch.testing.assert_close(case.activation(a), case.module(a), rtol=1e-14, atol=max(case.tolerance, 1e-15))


@activations
def test_hinges_are_distances(case: ActivationCase) -> None:
    for box in Draw(case).boxes():
        hinge = case.activation.hinge(box)
        assert (hinge.below >= 0).all()
        assert (hinge.above >= 0).all()


increasing = pytest.mark.parametrize(
    "case", [c for c in ACTIVATIONS if isinstance(c.activation, Increasing)], ids=lambda case: case.name
)


@increasing
def test_slope_of_a_point_is_the_derivative(case: ActivationCase) -> None:
    z = (3 * Draw(case).normal()).requires_grad_()
    derivative = torch.autograd.grad(case.activation(z).sum(), z)[0]
    inputs, outputs = case.activation.varying(Box(z.detach(), z.detach()))
    torch.testing.assert_close(inputs * outputs, derivative, rtol=1e-9, atol=0.0)


@increasing
def test_far_units_are_not_called_constant(case: ActivationCase) -> None:
    """These activations are constant nowhere, also where their slope is below the smallest number."""
    for far in (350.0, 400.0, 700.0, 730.0, 1000.0):
        for sign in (-1.0, 1.0):
            ends = sign * torch.full((1, *case.shape), far, dtype=torch.float64)
            assert all(bool((weights > 0).all()) for weights in case.activation.varying(Box(ends - 1, ends + 1)))


# The paper's equations -------------------------------------------------------------------------------------------------


def grid_box(shape: tuple[int, ...]) -> Box:
    """Boxes whose ends often equal thresholds: multiples of 0.5 between -2 and 2."""
    ends = torch.randint(-4, 5, (2, 500, *shape), generator=torch.Generator().manual_seed(3)).double() / 2
    return Box(ends.amin(0), ends.amax(0))


def theta_module() -> ReLUTheta:
    module = ReLUTheta((6,)).double()
    with torch.no_grad():
        module.raw_theta.copy_(torch.tensor([0.0, 0.5, 1.0, 1.5, -0.5, 2.0]))
    return module


def test_relu_mask_is_indicator_relu0() -> None:
    box = grid_box((6,))
    expected = box.upper > 0
    varying = relu().varying(box)
    assert varying.inputs.dtype == torch.bool
    assert torch.equal(varying.inputs, expected)
    assert torch.equal(varying.outputs, expected)


def test_relu_theta_mask_is_indicator_relux() -> None:
    module, box = theta_module(), grid_box((6,))
    expected = (box.upper > 0) & (box.lower < module.theta)
    varying = relu_theta(module).varying(box)
    assert torch.equal(varying.inputs, expected)
    assert torch.equal(varying.outputs, expected)


def test_rows_of_a_pair_go_only_together() -> None:
    module, box = ClippedMaxMin((3,), upper=0.5, lower=-0.5).double(), grid_box((6,))
    inputs, outputs = SortPairs(module).varying(box)
    (x1_low, x2_low), (x1_high, x2_high) = box.lower.chunk(2, 1), box.upper.chunk(2, 1)
    top = ~((x1_low >= 0.5) | (x2_low >= 0.5))
    bottom = ~((x1_high <= -0.5) | (x2_high <= -0.5))
    assert torch.equal(outputs, torch.cat([top, bottom], 1))
    assert torch.equal(inputs, torch.cat([top | bottom, top | bottom], 1))
    # The boxes hold every kind of pair.
    assert {(bool(t), bool(b)) for t, b in zip(top.flatten(), bottom.flatten(), strict=True)} == {
        (t, b) for t in (False, True) for b in (False, True)
    }


def test_maxmin_without_thresholds_keeps_everything() -> None:
    assert all(bool(weights.all()) for weights in SortPairs(MaxMin()).varying(grid_box((6,))))


def test_hinge_of_relu_theta_is_the_sparsity_loss() -> None:
    module, box = theta_module(), grid_box((6,))
    hinge = relu_theta(module).hinge(box)
    theta = [0.0, 0.5, 1.0, 1.5, 0.5, 2.0]
    for i in range(6):
        for lower, upper, below, above in zip(*(t[:, i].tolist() for t in (*box, *hinge)), strict=True):
            assert below == max(0.0, upper)
            assert above == max(0.0, theta[i] - lower)


def test_hinge_of_relu_has_no_upper_term() -> None:
    box = grid_box((6,))
    hinge = relu().hinge(box)
    assert torch.equal(hinge.below, torch.maximum(box.upper, torch.zeros(())))
    assert not hinge.above.any()


def test_hinge_of_clipped_maxmin_is_the_sparsity_loss() -> None:
    upper, lower, box = 1.0, -0.5, grid_box((2,))
    hinge = SortPairs(ClippedMaxMin((1,), upper=upper, lower=lower).double()).hinge(box)
    assert hinge.below.shape == hinge.above.shape == (500, 1)
    for (low1, low2), (high1, high2), below, above in zip(*(t.tolist() for t in (*box, *hinge)), strict=True):
        assert below == [max(0.0, min(high1, high2) - lower)]
        assert above == [max(0.0, upper - max(low1, low2))]


def test_threshold_is_never_negative() -> None:
    module = ReLUTheta((50,))
    for scale in (1e-30, 1.0, 1e30):
        with torch.no_grad():
            module.raw_theta.copy_(scale * torch.randn(50))
        assert (module.theta >= 0).all()
        value = module(torch.randn(8, 50))
        assert (value >= 0).all()
        assert (value <= module.theta).all()
    with pytest.raises(ValueError):
        ReLUTheta((3,), init=-1.0)
    with pytest.raises(ValueError):
        ReLUTheta((3,), init=NAN)


def test_thresholds_learn() -> None:
    module = theta_module()
    module(torch.full((4, 6), 5.0, dtype=torch.float64)).sum().backward()
    assert module.raw_theta.grad is not None
    assert module.raw_theta.grad[1:].abs().tolist() == [4.0] * 5


def test_odd_channels_are_refused() -> None:
    with pytest.raises(ValueError, match="even"):
        MaxMin()(torch.zeros(1, 3))


@activations
def test_what_an_error_becomes(case: ActivationCase) -> None:
    """No unit moves by more than `spread` says; the rule for any activation says no less than its own."""
    draw, activation = Draw(case), case.activation
    for box in draw.boxes():
        for a, b in draw.pairs(box):
            error = (a - b).abs()
            moved = case.change(a, b).abs()
            allowed = activation.spread(error)
            rounding = 1e-15 * (1 + a.abs().amax() + b.abs().amax())  # of a - b, and of what is compared
            assert bool((moved <= allowed * (1 + 1e-12) + rounding).all())
            assert bool((allowed <= Activation.spread(activation, error) * (1 + 1e-12)).all())
