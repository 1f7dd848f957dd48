"""Boxes of inner units by slopes of their own: nothing in the ball leaves them, and deep networks gain by them."""

from __future__ import annotations

import itertools
import os

import pytest
import torch
from torch import Tensor, nn

import locallip as ll
from locallip.balls import INF, L2, Ball, Domain
from locallip.bounds import CeilingNorm, Trace, global_bound, inner, propagate
from locallip.bounds.pullback import Pullback
from locallip.certify import Certifier
from locallip.certify.prover import Prover
from locallip.network import Network
from locallip.norms import CholeskyNorm
from tests.random_networks import random_network
from tests.test_relaxation import KINDS, escapes, searched

DOUBLE = torch.float64


def traced(
    network: Network, x: Tensor, radius: float, relax: str, ball: Ball = L2, domain: Domain = None, search: int = 2**24
) -> Trace:
    eps = torch.full((len(x),), radius, dtype=DOUBLE)
    with torch.no_grad():
        ceiling = global_bound(network, CholeskyNorm(), eps, outward=True)
        options = {"outward": True, "relax": relax, "ball": ball, "input_domain": domain, "search": search}
        return propagate(network, x, eps, CeilingNorm(ceiling), ceiling=ceiling, limit=1e9, **options)  # type: ignore[arg-type]


def deep(seed: int = 0, width: int = 16, count: int = 6) -> tuple[nn.Module, Tensor, Tensor]:
    """A network of five hidden layers with inputs and their labels."""
    torch.manual_seed(seed)
    widths = (8, *[width] * 5, 4)
    layers = [layer for pair in itertools.pairwise(widths) for layer in (nn.Linear(*pair), nn.ReLU())]
    model = nn.Sequential(*layers[:-1]).double().eval()
    x = torch.randn(count, 8, dtype=DOUBLE)
    return model, x, model(x).argmax(1)


@pytest.mark.parametrize(("body", "activation", "seed"), KINDS if os.environ.get("LOCALLIP_THOROUGH") else KINDS[::2])
def test_nothing_in_the_ball_leaves_its_box(body: str, activation: str, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inner, "STEPS", 8)
    model, shape = random_network(body, activation, seed, 1.5)
    network = ll.lower(model, shape)
    x = torch.rand(2, *shape, generator=torch.Generator().manual_seed(seed), dtype=DOUBLE)
    radius, domain = (0.05, 0.3, 1.5)[seed], (None, (0.0, 1.0))[seed % 2]
    trace = traced(network, x, radius, "slopes", domain=domain)
    assert escapes(network, trace, x, searched(network, x, radius, domain)) == 0


def test_bounds_that_are_too_small_let_something_escape(monkeypatch: pytest.MonkeyPatch) -> None:
    """So the search of the test above can fail."""
    old, found = Pullback.__call__, 0
    monkeypatch.setattr(Pullback, "__call__", lambda *all: 0.8 * old(*all))  # type: ignore[arg-type]
    for seed in range(4):
        model, shape = random_network("dense", "relu", seed, 1.5)
        network = ll.lower(model, shape)
        x = torch.rand(4, *shape, generator=torch.Generator().manual_seed(9), dtype=DOUBLE)
        found += escapes(network, traced(network, x, 0.4, "slopes"), x, searched(network, x, 0.4))
    assert found > 0


@pytest.mark.parametrize("ball", [L2, INF])
def test_boxes_of_deep_layers_become_smaller(ball: Ball) -> None:
    """In the mean: lines may be further from a unit whose box is smaller, and with them what is behind it."""
    model, x, _ = deep()
    network = ll.lower(model, (8,))
    radius = 1.0 if ball is L2 else 0.3
    lines, slopes = (traced(network, x, radius, relax, ball) for relax in ("boxes", "slopes"))
    shares = []
    for a, b in zip(lines.boxes, slopes.boxes, strict=True):
        assert float(((b.lower < a.lower) | (b.upper > a.upper)).double().mean()) < 0.25
        shares.append(float((b.upper - b.lower).mean() / (a.upper - a.lower).mean()))
    assert shares[0] == 1  # behind the input alone all is known exactly
    assert all(share < 0.98 for share in shares[1:])
    assert shares[-1] < 0.92


def test_corners_of_a_small_box_stay_inside() -> None:
    """Small integers and dyadic fractions: what a unit is at each corner and on a grid is known without rounding."""
    for seed in range(20):
        torch.manual_seed(seed)
        layers = [nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 2)]
        model = nn.Sequential(*layers).double().eval()
        for p in model.parameters():
            p.data = torch.randint(-6, 7, p.shape).double() / 4
        network, x = ll.lower(model, (2,)), torch.randint(-4, 5, (1, 2)).double() / 4
        trace = traced(network, x, 0.5, "slopes", INF)
        grid = torch.tensor(list(itertools.product(torch.linspace(-0.5, 0.5, 33).tolist(), repeat=2)), dtype=DOUBLE)
        values = x + grid
        for stage, box in zip((0, 2, 4), trace.boxes, strict=True):
            before = model[: stage + 1](values)
            assert bool((before >= box.lower).all())
            assert bool((before <= box.upper).all())


def test_no_sample_depends_on_those_beside_it() -> None:
    model, x, _ = deep()
    network = ll.lower(model, (8,))
    whole, alone = traced(network, x, 1.0, "slopes"), traced(network, x[2:3], 1.0, "slopes")
    for a, b in zip(whole.boxes, alone.boxes, strict=True):
        torch.testing.assert_close(a.upper[2:3], b.upper, rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(a.lower[2:3], b.lower, rtol=1e-9, atol=1e-9)


def test_stages_beyond_the_limit_stay_as_they_are() -> None:
    model, x, _ = deep()
    network = ll.lower(model, (8,))
    lines, slopes = traced(network, x, 1.0, "boxes"), traced(network, x, 1.0, "slopes", search=0)
    assert all(torch.equal(a.upper, b.upper) for a, b in zip(lines.boxes, slopes.boxes, strict=True))
    numbers = 2 * 16 * (8 + 16)  # of the second hidden layer, the first that is searched for
    assert inner.pays(network, numbers)
    assert not inner.pays(network, numbers - 1)


def test_inputs_that_are_not_finite_prove_nothing() -> None:
    model, x, y = deep()
    x[0, 0], x[1] = float("nan"), float("inf")
    prover = Prover(model, (8,), "deterministic", seed=0)
    assert prover.boxes == "slopes"
    worst = prover.margin(x, y, torch.ones(len(x), dtype=DOUBLE), relax="slopes").worst
    assert not bool((worst[:2] > 0).any())
    assert bool(worst[2:].isfinite().all())


def test_deep_networks_are_certified_that_lines_leave_open(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x, y = deep(width=32, count=12)
    found = {}
    for limit in (0, inner.LIMIT):
        monkeypatch.setattr(inner, "LIMIT", limit)
        certifier = Certifier(model, (8,), guarantee="deterministic", attack_steps=0, seed=0)
        found[limit] = certifier(x, y, 1.0).certified
    assert bool((found[0] <= found[inner.LIMIT]).all())
    assert found[inner.LIMIT].sum() > found[0].sum()
