"""Enumeration and mixed-integer programs, the oracles of bounds: sampling comes near, and no bound passes them."""

from __future__ import annotations

import sys
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.optimize import minimize
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "benchmarks"))

import locallip as ll
from enumeration import TooMany, exact_lipschitz, exact_radius, least_norm, weights_of
from mip import exact_radius_inf

DOUBLE = torch.float64


def network(seed: int, *widths: int) -> nn.Sequential:
    torch.manual_seed(seed)
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise(widths):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
    return nn.Sequential(*layers[:-1]).double()


def sampled(model: nn.Sequential, x: torch.Tensor, eps: float, count: int = 4000) -> tuple[float, set[bytes]]:
    """The largest norm of a Jacobian at random points, and the patterns that were met."""
    generator = torch.Generator().manual_seed(0)
    move = torch.randn(count, x.shape[1], dtype=DOUBLE, generator=generator)
    length = eps * torch.rand(count, 1, dtype=DOUBLE, generator=generator) ** (1 / x.shape[1])
    points = x + move / move.norm(dim=1, keepdim=True) * length * (1 - 1e-6)
    jacobian = torch.eye(x.shape[1], dtype=DOUBLE).expand(count, -1, -1)
    z, signs = points, []
    for layer in model:
        if isinstance(layer, nn.Linear):
            z, jacobian = layer(z), layer.weight @ jacobian
        else:
            on = (z > 0).double()
            z, jacobian = z * on, on[:, :, None] * jacobian
            signs.append(on)
    patterns = {row.numpy().tobytes() for row in torch.cat(signs, dim=1).bool()}
    return float(torch.linalg.matrix_norm(jacobian.detach(), ord=2).max()), patterns


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize(("widths", "eps"), [((2, 6, 5, 3), 1.0), ((3, 8, 2), 0.7), ((4, 6, 6, 4, 2), 0.5)])
def test_enumeration_is_what_sampling_comes_near_to_and_bounds_stay_above(
    seed: int, widths: tuple[int, ...], eps: float
) -> None:
    model = network(seed, *widths)
    x = torch.randn(1, widths[0], dtype=DOUBLE)
    exact = exact_lipschitz(model, x[0], eps)
    below, patterns = sampled(model, x, eps)
    assert below <= exact.lipschitz * (1 + 1e-12)
    assert below >= 0.9 * exact.lipschitz
    assert len(patterns) <= exact.patterns
    if widths[0] == 2:
        assert exact.patterns <= len(patterns) + 3  # in the plane random points meet all but slivers
    for method in ("product", "jacobian"):
        bound = float(ll.local_lipschitz(model, x, eps, method=method, guarantee="deterministic"))  # type: ignore[arg-type]
        assert exact.lipschitz <= bound * (1 + 1e-12)
    assert bound <= 5 * exact.lipschitz


@pytest.mark.parametrize("seed", range(10))
def test_least_norms_agree_with_a_solver(seed: int) -> None:
    generator = np.random.default_rng(seed)
    rows, bounds = generator.standard_normal((5, 4)), 0.5 * generator.standard_normal(5)
    found = least_norm(rows, bounds)
    constraint = {"type": "ineq", "fun": lambda u: rows @ u - bounds, "jac": lambda u: rows}
    solved = minimize(lambda u: u @ u, np.zeros(4), jac=lambda u: 2 * u, constraints=[constraint], options={"ftol": 1e-14})
    assert solved.success
    assert found == pytest.approx(np.sqrt(solved.fun), abs=1e-5)
    assert least_norm(np.vstack([rows, -rows[:1]]), np.append(bounds, 1 - bounds[0])) == float("inf")


def test_what_enumeration_is_not_for() -> None:
    with pytest.raises(ValueError, match="Tanh"):
        weights_of(nn.Sequential(nn.Linear(2, 2), nn.Tanh(), nn.Linear(2, 2)))
    model = network(0, 3, 12, 12, 2)
    with pytest.raises(TooMany, match="20 patterns"):
        exact_lipschitz(model, torch.zeros(3), 5.0, most=20)
    assert exact_lipschitz(model, torch.zeros(3), 1e-12).patterns == 1


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("norm", ["2", "inf"])
@pytest.mark.parametrize("widths", [(2, 6, 5, 3), (4, 6, 6, 3)])
def test_no_certificate_passes_the_exact_radius_and_branches_come_near(
    seed: int, norm: str, widths: tuple[int, ...]
) -> None:
    model = network(seed, *widths)
    x = torch.randn(1, widths[0], dtype=DOUBLE)
    y, most = model(x).argmax(1), 2.0
    exact = (exact_radius if norm == "2" else exact_radius_inf)(model, x[0], int(y), most)
    if exact.point is None:
        assert exact.radius == most
    else:
        move, logits = torch.tensor(exact.point) - x[0], model(torch.tensor(exact.point)).detach()
        assert float(move.norm(p=float(norm))) == pytest.approx(exact.radius, rel=1e-5)
        assert float(logits.max() - logits[y]) == pytest.approx(0.0, abs=1e-5)
        for method in ("local", "lines", "auto"):
            assert float(ll.certified_radius(model, x, y, method=method, norm=norm)) <= exact.radius * (1 + 1e-5)
    found = ll.certify(model, x, y, 0.97 * exact.radius, norm=norm, attack_steps=0, branch_seconds=20.0)
    assert bool(found.certified)
