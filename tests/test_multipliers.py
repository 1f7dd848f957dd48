"""Semidefinite bounds with proof: nothing in the ball exceeds them, whatever the search finds, and they are close."""

from __future__ import annotations

import sys
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "benchmarks"))

import locallip as ll
from enumeration import exact_lipschitz
from locallip.bounds import jacobian_bounds, multiplier_bounds
from locallip.bounds import multipliers as module
from locallip.bounds.jacobian import known
from locallip.bounds.multipliers import Chain, Matrix, chain_of, proved, searched
from locallip.network import Network
from tests.random_networks import random_network
from tests.test_jacobian import KINDS, AroundSine, all_patterns, exact_square, jacobians, largest_slope, points_of, traced

DOUBLE = torch.float64


def bounds_of(network: Network, x: Tensor, radius: float, steps: int = 10) -> Tensor:
    trace = traced(network, x, radius)
    with torch.no_grad():
        return multiplier_bounds(network, trace, steps)


@pytest.mark.parametrize(("body", "activation", "seed"), KINDS)
def test_no_slope_in_the_ball_exceeds_the_bound(body: str, activation: str, seed: int) -> None:
    model, shape = random_network(body, activation, seed, 1.5)
    network = ll.lower(model, shape)
    x = torch.rand(2, *shape, generator=torch.Generator().manual_seed(seed), dtype=DOUBLE)
    radius = (0.05, 0.3, 1.5)[seed]
    found = bounds_of(network, x, radius)
    for i in range(len(x)):
        assert largest_slope(network, points_of(x[i], radius, 24)) * (1 - 1e-9) <= float(found[i])


def mlp(seed: int, *widths: int) -> nn.Sequential:
    torch.manual_seed(seed)
    layers: list[nn.Module] = []
    for i in range(len(widths) - 1):
        layers += [nn.Linear(widths[i], widths[i + 1]), nn.ReLU()]
    return nn.Sequential(*layers[:-1]).double().requires_grad_(False)


@pytest.mark.parametrize("seed", range(8))
def test_it_lies_between_every_pattern_and_the_other_bounds(seed: int) -> None:
    model = mlp(seed, 4, 8, 6, 3)
    network, x = ll.lower(model, (4,)), torch.randn(1, 4, dtype=DOUBLE)
    radius, count = 0.4, 99
    while count > 12:
        trace = traced(network, x, radius)
        count = sum(int(((box.lower < 0) & (box.upper > 0)).sum()) for box in trace.boxes)
        radius *= 0.8
    with torch.no_grad():
        found, others = float(multiplier_bounds(network, trace)), float(jacobian_bounds(network, trace))
    largest = all_patterns(network, trace)
    assert largest <= found * (1 + 1e-12)
    assert found <= min(others * 1.001, 1.3 * largest)
    assert exact_lipschitz(model, x[0], radius / 0.8).lipschitz <= found * (1 + 1e-12)


def chain_at(seed: int, radius: float = 0.5) -> tuple[Network, Tensor, Chain]:
    """A network, a point and its chain; of the next seed where a layer is dead."""
    network, x = ll.lower(mlp(seed, 3, 6, 5, 2), (3,)), torch.randn(1, 3, dtype=DOUBLE)
    trace = traced(network, x, radius)
    with torch.no_grad():
        chain = chain_of(known(network, trace, slice(0, 1)), module.written(network, trace.logits))
    return chain_at(seed + 1000, radius) if chain is None or chain.source else (network, x, chain)


@settings(max_examples=25)
@given(seed=st.integers(0, 50), spread=st.floats(0, 3), factor=st.floats(0.3, 3))
def test_whatever_the_search_says_the_proof_holds(seed: int, spread: float, factor: float) -> None:
    """Multipliers and sigma at random: either nothing is proved or what is proved is a bound."""
    network, x, chain = chain_at(seed)
    taus, sigma = searched(chain, 3)
    generator = torch.Generator().manual_seed(seed)
    taus = [tau * (spread * torch.randn(tau.shape, generator=generator, dtype=DOUBLE)).exp() for tau in taus]
    with torch.no_grad():
        bound = float(proved(chain, (taus, sigma * factor)))
    assert largest_slope(network, points_of(x[0], 0.5, 60)) * (1 - 1e-9) <= bound


@pytest.mark.parametrize("seed", range(6))
def test_the_form_is_that_of_lipsdp(seed: int) -> None:
    """rho E - C^T C - sum of t (w - low y)(high y - w) has no negative eigenvalue, written with outputs w in place of s."""
    _, _, chain = chain_at(seed, 1.0)
    taus, sigma = searched(chain, 10)
    with torch.no_grad():
        bound = float(proved(chain, (taus, sigma)))
    bending = [int((level.high > level.low).sum()) for level in chain.levels]
    inputs = chain.levels[0].weight.value.shape[1]
    states, place = inputs + sum(bending), inputs
    z, total = np.eye(inputs, states), np.diag([bound**2] * inputs + [0.0] * sum(bending))
    for level, tau in zip(chain.levels, taus, strict=True):
        y, low, high = level.weight.value.numpy() @ z, level.low.numpy(), level.high.numpy()
        z, multipliers = low[:, None] * y, iter(tau.tolist())
        for unit in np.flatnonzero(high > low):
            w = np.eye(states)[place]
            product = np.outer(w - low[unit] * y[unit], high[unit] * y[unit] - w)
            # y^2 - s^2 with w = m y + r s is (w - low y)(high y - w) / r^2.
            total -= next(multipliers) ** 2 * (product + product.T) / 2 / ((high[unit] - low[unit]) / 2) ** 2
            z[unit], place = w, place + 1
    outputs = chain.last.value.numpy() @ z
    total -= outputs.T @ outputs
    assert np.linalg.eigvalsh(total).min() >= -1e-9 * np.abs(total).max()


@settings(max_examples=20)
@given(st.integers(0, 10**6))
def test_rounding_never_takes_it_below_the_exact_norm(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    layers = [nn.Linear(3, 4), nn.Linear(4, 3), nn.Linear(3, 1)]
    with torch.no_grad():
        for layer, bias in zip(layers, (1e3, 1e6, 0.0), strict=True):
            layer.weight.copy_(torch.randn(layer.weight.shape, generator=generator))
            layer.bias.fill_(bias)
    network = ll.lower(nn.Sequential(layers[0], nn.ReLU(), layers[1], nn.LeakyReLU(0.3), layers[2]), (3,))
    weights = [[[Fraction(float(v)) for v in row] for row in layer.weight.detach()] for layer in layers]
    found = Fraction(float(bounds_of(network, torch.zeros(1, 3, dtype=DOUBLE), 0.01)))
    square = exact_square(weights)
    assert square <= found**2 <= square * (1 + Fraction(1, 10**6))


def test_sums_and_differences_of_pairs_are_what_a_pair_is() -> None:
    """A network of MaxMin whose pairs keep their order is linear; exchanged inputs exchange what it does."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 6), ll.MaxMin(), nn.Linear(6, 4), ll.MaxMin(), nn.Linear(4, 2))
    model = model.double().requires_grad_(False)
    network, x = ll.lower(model, (3,)), torch.randn(5, 3, dtype=DOUBLE)
    true = torch.linalg.matrix_norm(jacobians(network, x), ord=2)
    found = bounds_of(network, x, 1e-9)
    assert (found >= true * (1 - 1e-12)).all()
    assert (found <= true * (1 + 1e-6)).all()


def test_errors_of_the_matrices_are_counted() -> None:
    """An error of every entry takes away what it might hide."""
    _, _, chain = chain_at(1)
    found = searched(chain, 10)
    with torch.no_grad():
        sharp = float(proved(chain, found))
        last = Matrix(chain.last.value, torch.full_like(chain.last.value, 1e-3))
        assert float(proved(chain._replace(last=last), found)) > sharp * (1 + 1e-4)
        level = chain.levels[0]
        level = level._replace(weight=Matrix(level.weight.value, torch.full_like(level.weight.value, 1e-3)))
        assert float(proved(chain._replace(levels=[level, *chain.levels[1:]]), found)) > sharp * (1 + 1e-4)


def test_where_nothing_is_found_it_is_infinite(monkeypatch: pytest.MonkeyPatch) -> None:
    network = ll.lower(AroundSine(), (1,))  # its outputs read two regions
    assert bounds_of(network, torch.ones(1, 1, dtype=DOUBLE), 0.5).tolist() == [float("inf")]
    model, shape = random_network("dense", "relu", 0, 1.5)
    network = ll.lower(model, shape)
    x = torch.rand(3, *shape, dtype=DOUBLE, generator=torch.Generator().manual_seed(0))
    healthy = bounds_of(network, x, 0.2)
    assert torch.isfinite(healthy).all()
    broken = x.clone()
    broken[1, 2] = float("nan")
    found = bounds_of(network, broken, 0.2)
    torch.testing.assert_close(found[[0, 2]], healthy[[0, 2]], rtol=1e-6, atol=0)
    assert float(found[1]) >= float(healthy[1])
    for name, most in (("ENTRIES", 10), ("LIVE", 1), ("BENDING", -1)):
        with monkeypatch.context() as patch:
            patch.setattr(module, name, most)
            assert bounds_of(network, x, 0.2).tolist() == [float("inf")] * 3


def test_it_may_begin_behind_any_region(monkeypatch: pytest.MonkeyPatch) -> None:
    """With fewer units at a time the way ends earlier, and the product before it takes over."""
    network, x = ll.lower(mlp(0, 5, 20, 8, 8, 3), (5,)), torch.randn(2, 5, dtype=DOUBLE)
    whole = bounds_of(network, x, 0.5)
    monkeypatch.setattr(module, "LIVE", 8)
    part = bounds_of(network, x, 0.5)
    trace = traced(network, x, 0.5)
    assert (whole < part).all()
    assert (part < trace.lipschitz).all()
    for i in range(len(x)):
        assert largest_slope(network, points_of(x[i], 0.5, 60)) * (1 - 1e-9) <= float(part[i])
