"""Bounds from slopes: no Jacobian and no quotient of two points of the ball exceeds them, and they are close."""

from __future__ import annotations

import itertools
import os
from dataclasses import replace
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import locallip as ll
from locallip.activations import Activation, Box, Varying
from locallip.bounds import Trace, global_bound, propagate
from locallip.bounds import jacobian as jacobian_module
from locallip.bounds.jacobian import JacobianWay, jacobian_bounds
from locallip.bounds.slopes import Rows
from locallip.network import Network
from locallip.norms import CholeskyNorm
from tests.random_networks import ACTIVATIONS, BODIES, random_network

DOUBLE = torch.float64
WAYS: tuple[JacobianWay, ...] = ("absolute", "intervals", "middle")
#: Every body with every activation, three times with LOCALLIP_THOROUGH=1.
KINDS = [(body, name, seed) for body in BODIES for name in ACTIVATIONS for seed in range(3)]
KINDS = KINDS if os.environ.get("LOCALLIP_THOROUGH") else [kind for i, kind in enumerate(KINDS) if i // 3 % 3 == kind[2]]


def traced(network: Network, x: Tensor, radius: float, domain: tuple[float, float] | None = None) -> Trace:
    eps = torch.full((len(x),), radius, dtype=DOUBLE)
    with torch.no_grad():
        ceiling = global_bound(network, CholeskyNorm(), eps, outward=True)
        return propagate(network, x, eps, CholeskyNorm(), ceiling=ceiling, outward=True, input_domain=domain)


def bounds_of(network: Network, trace: Trace, *ways: JacobianWay) -> Tensor:
    with torch.no_grad():
        return jacobian_bounds(network, trace, ways)


def points_of(x: Tensor, radius: float, count: int, seed: int = 0) -> Tensor:
    """Random points of the ball around one sample, half of them on its surface, (count, *shape)."""
    generator = torch.Generator().manual_seed(seed)
    move = torch.randn(count, *x.shape, generator=generator, dtype=DOUBLE)
    length = radius * torch.rand(count, generator=generator, dtype=DOUBLE).mul(2).clamp(max=1)
    return x + move * (length / move.flatten(1).norm(dim=1)).reshape(-1, *[1] * x.dim()) * (1 - 1e-12)


def largest_slope(network: Network, points: Tensor) -> float:
    """The largest norm of a Jacobian at some points, or of a quotient of two of them."""
    outputs = network(points).detach()
    runs, rises = points - points.roll(1, 0), outputs - outputs.roll(1, 0)
    quotients = rises.norm(dim=1) / runs.flatten(1).norm(dim=1)
    return max(float(torch.linalg.matrix_norm(jacobians(network, points), ord=2).max()), float(quotients.max()))


def jacobians(network: Network, points: Tensor) -> Tensor:
    """(n, classes, inputs)."""
    points = points.clone().requires_grad_()
    outputs = network(points).sum(0)
    rows = [torch.autograd.grad(output, points, retain_graph=True)[0].flatten(1) for output in outputs]
    return torch.stack(rows, dim=1).detach()


@pytest.mark.parametrize(("body", "activation", "seed"), KINDS)
def test_no_slope_in_the_ball_exceeds_the_bounds(body: str, activation: str, seed: int) -> None:
    model, shape = random_network(body, activation, seed, 1.5)
    network = ll.lower(model, shape)
    x = torch.rand(2, *shape, generator=torch.Generator().manual_seed(seed), dtype=DOUBLE)
    radius = (0.05, 0.3, 1.5)[seed]
    trace = traced(network, x, radius)
    found = {way: bounds_of(network, trace, way) for way in WAYS}
    assert (found["intervals"] <= found["absolute"] * (1 + 1e-9)).all()
    assert (found["middle"] <= trace.lipschitz * (1 + 1e-9) + 1e-90).all()
    assert (found["intervals"] <= trace.lipschitz * (1 + 1e-9) + 1e-90).all()
    for i in range(len(x)):
        slope = largest_slope(network, points_of(x[i], radius, 24)) * (1 - 1e-9)
        assert slope <= min(float(bound[i]) for bound in found.values())


def all_patterns(network: Network, trace: Trace) -> float:
    """The largest norm of W D W D ... W with every unit of a dense ReLU network that may bend on or off."""
    choices, steady = [], []
    for box in trace.boxes:
        bends = (box.lower < 0) & (box.upper > 0)
        steady.append((box.lower >= 0).double()[0])
        choices.extend((len(steady) - 1, int(unit)) for unit in bends[0].nonzero()[:, 0])
    assert 2 <= len(choices) <= 12
    weights = [
        next(iter(stage.terms.values())).materialize(torch.zeros(1, dtype=DOUBLE)).detach() for stage in network.stages
    ]
    norms = []
    for pattern in itertools.product((0.0, 1.0), repeat=len(choices)):
        masks = [mask.clone() for mask in steady]
        for (layer, unit), on in zip(choices, pattern, strict=True):
            masks[layer][unit] = on
        jacobian = weights[0]
        for weight, mask in zip(weights[1:], masks, strict=True):
            jacobian = weight @ (mask[:, None] * jacobian)
        norms.append(torch.linalg.matrix_norm(jacobian, ord=2))
    return float(torch.stack(norms).max())


@pytest.mark.parametrize("seed", range(8))
def test_every_pattern_of_units_that_may_bend_stays_below(seed: int) -> None:
    """A bound by slopes knows of no more than boxes, so every choice inside them counts; the largest is not far."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 3)).double()
    network, x = ll.lower(model, (4,)), torch.randn(1, 4, dtype=DOUBLE)
    radius, count = 0.4, 99
    while count > 12:
        trace = traced(network, x, radius)
        count = sum(int(((box.lower < 0) & (box.upper > 0)).sum()) for box in trace.boxes)
        radius *= 0.8
    largest = all_patterns(network, trace)
    found = {way: float(bounds_of(network, trace, way)) for way in WAYS}
    assert all(largest <= value * (1 + 1e-12) for value in found.values())
    assert min(found["intervals"], found["middle"]) <= 2 * largest


def test_stable_networks_are_linear_and_their_norm_is_found() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 9), nn.ReLU(), nn.Linear(9, 9), nn.ReLU(), nn.Linear(9, 3))
    network, x = ll.lower(model.double(), (5,)), torch.randn(4, 5, dtype=DOUBLE)
    trace = traced(network, x, 1e-9)
    true = torch.linalg.matrix_norm(jacobians(network, x), ord=2)
    for way in ("intervals", "middle"):
        found = bounds_of(network, trace, way)
        assert (found >= true * (1 - 1e-14)).all()
        assert (found <= true * (1 + 1e-9)).all()
    assert (trace.lipschitz > 1.2 * true).any()


def exact_square(weights: list[list[list[Fraction]]]) -> Fraction:
    """||w_L ... W_1||^2 for a last layer of one row."""
    row = weights[-1][0]
    for weight in reversed(weights[:-1]):
        row = [sum((a * b for a, b in zip(row, column, strict=True)), Fraction(0)) for column in zip(*weight, strict=True)]
    return sum((value * value for value in row), Fraction(0))


@settings(max_examples=60)
@given(st.integers(0, 10**6))
def test_rounding_never_takes_a_bound_below_the_exact_norm(seed: int) -> None:
    """Without kinks the bound is the exact norm but for rounding: half of all would be below it if that were not counted."""
    generator = torch.Generator().manual_seed(seed)
    layers = [nn.Linear(3, 4), nn.Linear(4, 3), nn.Linear(3, 1)]
    with torch.no_grad():
        for layer in layers:
            layer.weight.copy_(torch.randn(layer.weight.shape, generator=generator))
            layer.bias.fill_(1000.0)
    network = ll.lower(nn.Sequential(layers[0], nn.ReLU(), layers[1], nn.LeakyReLU(0.3), layers[2]), (3,))
    with torch.no_grad():
        layers[1].bias.fill_(1e6)
    weights = [[[Fraction(float(v)) for v in row] for row in layer.weight.detach()] for layer in layers]
    trace = traced(network, torch.zeros(1, 3, dtype=DOUBLE), 0.01)
    square = exact_square(weights)
    for way in ("intervals", "middle"):
        found = Fraction(float(bounds_of(network, trace, way)))
        assert square <= found**2 <= square * (1 + Fraction(1, 10**9))


@pytest.mark.parametrize("seed", range(10))
def test_rows_hold_what_they_would_be_without_rounding(seed: int) -> None:
    """In rational arithmetic: every entry of an interval, and what the rows through the middle lose."""
    generator = torch.Generator().manual_seed(seed)
    layer = nn.Linear(6, 5)
    network = ll.lower(nn.Sequential(layer, nn.ReLU(), nn.Linear(5, 2)).double(), (6,))
    with torch.no_grad():
        layer.weight.copy_(torch.randn(5, 6, generator=generator, dtype=DOUBLE))
    known = jacobian_module.known(network, traced(network, torch.zeros(1, 6, dtype=DOUBLE), 1.0), slice(0, 1))
    op, weight = network.stages[0].terms[0], [[Fraction(v) for v in row] for row in layer.weight.tolist()]
    g = torch.randn(1, 3, 5, generator=generator, dtype=DOUBLE)
    wide = torch.rand(1, 3, 5, generator=generator, dtype=DOUBLE) * (torch.rand(1, 3, 5, generator=generator) < 0.3)
    wide[0, 2] = 0  # with an entry that nearly cancels
    g[0, 2, 0] = -(g[0, 2, 1:] @ layer.weight.detach()[1:, 0]) / layer.weight.detach()[0, 0]
    with torch.no_grad():
        rows, _ = jacobian_module.Intervals(known, signs=True).pulled(Rows(g, g + wide), op, 0)
        middle, lost = jacobian_module.Middle(known).pulled(g, op, 0)
    error = Fraction(0)
    for r, j in itertools.product(range(3), range(6)):
        least = most = exact = Fraction(0)
        for i in range(5):
            low, high, w = Fraction(float(g[0, r, i])), Fraction(float((g + wide)[0, r, i])), weight[i][j]
            least, most = least + min(low * w, high * w), most + max(low * w, high * w)
            exact += low * w
        assert Fraction(float(rows.low[0, r, j])) <= least
        assert most <= Fraction(float(rows.high[0, r, j]))
        assert float(rows.high[0, r, j] - rows.low[0, r, j]) <= float(most - least) + 1e-10
        error += (exact - Fraction(float(middle[0, r, j]))) ** 2
    assert 0 < error <= Fraction(float(lost)) ** 2


class Sine(Activation):
    """Of a kind that slopes are not known of."""

    def __call__(self, z: Tensor) -> Tensor:
        return z.sin()

    def image(self, box: Box) -> Box:
        return Box(-torch.ones_like(box.lower), torch.ones_like(box.lower))

    def varying(self, box: Box) -> Varying:
        ones = torch.ones_like(box.lower, dtype=torch.bool)
        return Varying(ones, ones)


@pytest.mark.parametrize("body", ["dense", "pre_activation", "post_activation"])
@pytest.mark.parametrize("place", [0, 1])
def test_the_way_ends_where_slopes_are_not_known(body: str, place: int) -> None:
    model, shape = random_network(body, "relu", 1, 1.5)
    network = ll.lower(model, shape)
    stages = [*network.stages]
    stages[place] = replace(stages[place], activation=Sine())
    network = replace(network, stages=tuple(stages))
    x = torch.rand(2, *shape, dtype=DOUBLE, generator=torch.Generator().manual_seed(0))
    trace = traced(network, x, 0.2)
    for way in WAYS:
        found = bounds_of(network, trace, way)
        for i in range(len(x)):
            assert largest_slope(network, points_of(x[i], 0.2, 40)) * (1 - 1e-9) <= float(found[i])
    assert (bounds_of(network, trace, "middle") <= trace.lipschitz * (1 + 1e-9)).all()


class AroundSine(nn.Module):
    """z + sin(z - 1) with z = max(x, 0), whose slope at x = 1 is 2."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.head = (nn.Linear(1, 1, dtype=DOUBLE).requires_grad_(False) for _ in range(3))
        for layer, bias in ((self.one, 0.0), (self.two, -1.0), (self.head, 0.0)):
            layer.weight.fill_(1.0)
            layer.bias.fill_(bias)

    def forward(self, x: Tensor) -> Tensor:
        z = torch.relu(self.one(x))
        return self.head(z + torch.relu(self.two(z)))


def test_what_ends_on_the_way_is_added_to_what_goes_on() -> None:
    network = ll.lower(AroundSine(), (1,))
    first, second, last = network.stages
    network = replace(network, stages=(first, replace(second, activation=Sine()), last))
    trace = traced(network, torch.ones(1, 1, dtype=DOUBLE), 0.5)
    for way in WAYS:
        assert 2 <= float(bounds_of(network, trace, way)) <= 2 + 1e-6


def test_parts_change_nothing_and_what_does_not_fit_is_not_known(monkeypatch: pytest.MonkeyPatch) -> None:
    model, shape = random_network("convolutional", "relu", 0, 1.5)
    network = ll.lower(model, shape)
    x = torch.rand(5, *shape, dtype=DOUBLE, generator=torch.Generator().manual_seed(0))
    trace = traced(network, x, 0.2)
    expected = bounds_of(network, trace, *WAYS)
    for numbers in (300, 700, 1000):
        monkeypatch.setitem(jacobian_module.TOGETHER, "cpu", numbers)
        torch.testing.assert_close(bounds_of(network, trace, *WAYS), expected, rtol=1e-9, atol=0)
    monkeypatch.setitem(jacobian_module.TOGETHER, "cpu", 299)
    assert bounds_of(network, trace, *WAYS).tolist() == [float("inf")] * 5


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 1e200])
def test_numbers_that_are_not_finite_give_no_bound_below_the_truth(bad: float) -> None:
    model, shape = random_network("dense", "relu", 0, 1.5)
    network = ll.lower(model, shape)
    x = torch.rand(3, *shape, dtype=DOUBLE, generator=torch.Generator().manual_seed(0))
    healthy = bounds_of(network, traced(network, x, 0.2), *WAYS)
    x[1, 2] = bad
    found = bounds_of(network, traced(network, x, 0.2), *WAYS)
    torch.testing.assert_close(found[[0, 2]], healthy[[0, 2]], rtol=1e-9, atol=0)
    if bad < 1e300:
        assert float(found[1]) >= largest_slope(network, x[1:2].expand(2, -1) + torch.tensor([[0.0], [0.1]]))
    else:
        assert float(found[1]) >= float(healthy.min())


# The public function ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("guarantee", ["high_probability", "deterministic"])
def test_local_lipschitz_takes_the_smaller_bound(guarantee: str) -> None:
    model, shape = random_network("convolutional", "relu", 3, 1.5)
    x = torch.rand(3, *shape, generator=torch.Generator().manual_seed(0), dtype=DOUBLE)
    product, jacobian, auto = (
        ll.local_lipschitz(model, x, 0.2, method=method, guarantee=guarantee, seed=0)  # type: ignore[arg-type]
        for method in ("product", "jacobian", "auto")
    )
    assert torch.equal(auto, jacobian)  # which knows the product too
    assert (auto < 0.8 * product).all()
    network = ll.lower(model, shape)
    for i in range(len(x)):
        assert largest_slope(network, points_of(x[i], 0.2, 50)) <= float(auto[i])


def test_local_lipschitz_stays_inside_the_domain() -> None:
    model, shape = random_network("dense", "relu", 0, 1.5)
    x = torch.zeros(1, *shape, dtype=DOUBLE)
    free = ll.local_lipschitz(model, x, 2.0, method="jacobian", seed=0)
    held = ll.local_lipschitz(model, x, 2.0, method="jacobian", seed=0, input_domain=(0.0, 0.05))
    assert (held < 0.9 * free).all()
    points = points_of(x[0], 2.0, 50).clamp(0.0, 0.05)
    assert largest_slope(ll.lower(model, shape), points) <= float(held)


def test_bad_methods_and_jacobians_that_do_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    model, shape = random_network("dense", "relu", 0, 1.5)
    x = torch.zeros(2, *shape, dtype=DOUBLE)
    with pytest.raises(ValueError, match="'auto', 'product' or 'jacobian', got 'local'"):
        ll.local_lipschitz(model, x, 0.1, method="local")  # type: ignore[arg-type]
    monkeypatch.setitem(jacobian_module.TOGETHER, "cpu", 10)
    with pytest.raises(ValueError, match="use method='product'"):
        ll.local_lipschitz(model, x, 0.1, method="jacobian")
    product = ll.local_lipschitz(model, x, 0.1, method="product", seed=0)
    assert torch.equal(ll.local_lipschitz(model, x, 0.1, seed=0), product)
