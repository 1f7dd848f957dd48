"""Branch and bound: every part against points that lie in it, whole answers against enumeration, and stopping early."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy.optimize import minimize  # type: ignore[import-untyped]
from torch import Tensor, nn

import locallip as ll
from locallip.activations import SortPairs
from locallip.attacks import pgd_l2
from locallip.bounds import Trace, global_bound, propagate
from locallip.bounds.bend import Bend
from locallip.bounds.branching import Branching, CutWay, Parts, bends_of
from locallip.network import Network, PassThrough
from locallip.norms import CholeskyNorm
from tests.random_networks import ACTIVATIONS, BODIES, random_network

CURVES = ("leaky_relu", "elu", "tanh", "sigmoid", "softplus")
KINDS = list(itertools.product(BODIES, ("relu", "relu_theta", "hardtanh", "maxmin", "clipped_maxmin", *CURVES)))


def traced(model: nn.Module, x: Tensor, radius: float, relax: str | None = None) -> tuple[Network, Trace]:
    network = ll.lower(model, x.shape[1:])
    eps = torch.full((len(x),), radius, dtype=torch.float64)
    with torch.no_grad():
        ceiling = global_bound(network, CholeskyNorm(), eps, outward=True)
        return network, propagate(network, x, eps, CholeskyNorm(), ceiling=ceiling, outward=True, relax=relax)  # type: ignore[arg-type]


def before_activations(network: Network, x: Tensor) -> list[Tensor]:
    """What stands before every activation."""
    values, found = [x], []
    for stage in network.stages:
        z = torch.stack([op.apply(values[source]) for source, op in stage.terms.items()]).sum(0) + stage.offset(x)
        found.append(z)
        if stage.activation is not None:
            values.append(stage.activation(z))
    return found


def runs_of(branching: Branching, network: Network, trace: Trace, point: Tensor) -> list[Tensor]:
    """y' - c of all units (h,) of every bend, in the order of `bends_of`, for a point (1, *shape)."""
    after, found = before_activations(network, point), []
    for k in sorted(branching.pullback.stages, reverse=True):
        activation, y, c = network.stages[k - 1].activation, after[k - 1], trace.before[k - 1].center
        if isinstance(activation, SortPairs):
            if len(branching.pullback.stages[k].bends) == 2:
                found.append((_sorted(y) - _sorted(c)).flatten())
            found.append((_turned(y) - _turned(c)).flatten())
        elif not isinstance(activation, PassThrough):
            found.append((y - c).flatten())
    return found


def _sorted(z: Tensor) -> Tensor:
    first, second = z.chunk(2, dim=1)
    return torch.cat([torch.maximum(first, second), torch.minimum(first, second)], dim=1)


def _turned(z: Tensor) -> Tensor:
    first, second = z.flatten(1).chunk(2, dim=1)
    return torch.cat([first + second, first - second], dim=1)


def part_of(
    found: Branching, runs: list[Tensor], label: int, other: int, generator: torch.Generator
) -> tuple[Parts, list[Tensor]]:
    """A part that holds a point: every unit is cut at random points of which one is below and one above it."""
    first, last, numbers = [], [], []
    for bend, units, run in zip(bends_of(found.pullback), found.units, runs, strict=True):
        here = bend.only(units)
        low, high = torch.zeros(1, len(units), dtype=torch.int8), torch.ones(1, len(units), dtype=torch.int8)
        for point in range(2, len(here.runs)):
            coin = torch.rand(len(units), generator=generator) < 0.7
            at, value = here.runs[point, 0], run[units]
            low[0][coin & (value >= at) & (at >= here.runs.gather(0, low.long()[None])[0, 0])] = point
            high[0][coin & (value <= at) & (at <= here.runs.gather(0, high.long()[None])[0, 0])] = point
        first.append(low)
        last.append(high)
        numbers.append(2 * torch.rand(1, len(units), generator=generator, dtype=torch.float64) - 0.5)
    pulls = [torch.randn(v.shape, generator=generator, dtype=torch.float64) for v in numbers]
    where = torch.full((1, 3), -1)
    return Parts(torch.tensor([other]), first, last, numbers, pulls, torch.zeros(1), torch.ones(1), where), [
        *numbers,
        *pulls,
    ]


def excess(body: str, activation: str, seed: int, radius: float, points: int = 6) -> float:
    """How far a rise at some point exceeds the bound of a part that holds the point, for any slopes and pulls."""
    model, shape = random_network(body, activation, seed, 1.5)
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(1, *shape, generator=generator, dtype=torch.float64)
    network, trace = traced(model, x, radius, "boxes" if seed % 2 else None)
    label, worst = int(trace.logits.argmax()), -float("inf")
    found = Branching(network, trace, label)
    if not found.pullback.stages:
        return worst
    with torch.no_grad():
        for _ in range(points):
            move = torch.randn(x.shape, generator=generator, dtype=torch.float64)
            point = x + move * radius / move.norm() * (1 - 1e-12)
            runs = runs_of(found, network, trace, point)
            other = int(torch.randint(1, 3, (), generator=generator) + label) % 3
            parts, numbers = part_of(found, runs, label, other, generator)
            gain = model(point)[0] - trace.logits[0]
            bound = CutWay(found.pullback, found.units, parts, label, torch.float64, outward=True).bound(numbers)
            worst = max(worst, float(gain[other] - gain[label] - bound))
    return worst


@pytest.mark.parametrize(("body", "activation"), KINDS)
@pytest.mark.parametrize("radius", [0.1, 1.0])
def test_no_point_of_a_part_exceeds_its_bound(body: str, activation: str, radius: float) -> None:
    for seed in range(2):
        assert excess(body, activation, seed, radius) <= 1e-12


def exact_rise(weights: list[np.ndarray], biases: list[np.ndarray], x: np.ndarray, radius: float, row: np.ndarray) -> float:
    """max row . (F(x') - F(x)) over the ball for a network of ReLUs with one hidden layer, by all patterns of its units."""
    (first, second), (b, _) = weights, biases
    best = -np.inf
    for pattern in itertools.product((0.0, 1.0), repeat=len(first)):
        on = np.array(pattern)
        slope = row @ second @ (on[:, None] * first)
        sides = (2 * on - 1)[:, None] * first
        found = minimize(
            lambda d, slope=slope: -slope @ d,
            np.zeros(len(x)),
            jac=lambda d, slope=slope: -slope,
            constraints=[
                {"type": "ineq", "fun": lambda d, on=on, sides=sides: (2 * on - 1) * (first @ x + b) + sides @ d},
                {"type": "ineq", "fun": lambda d: radius**2 - d @ d, "jac": lambda d: -2 * d},
            ],
            method="SLSQP",
        )
        inside = found.x * min(1.0, radius / max(np.linalg.norm(found.x), 1e-300))  # what is reached there is surely exact
        best = max(best, float(row @ second @ np.maximum(first @ (x + inside) + b, 0)))
    return best - float(row @ second @ np.maximum(first @ x + b, 0))


def enumerated(seed: int) -> tuple[Branching, int, float]:
    """A tiny network around an input: what looks for bounds, the other class, and how far that can rise exactly."""
    generator = torch.Generator().manual_seed(seed)
    model = nn.Sequential(nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, 2)).double()
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn(p.shape, generator=generator, dtype=torch.float64))
    x = torch.randn(1, 3, generator=generator, dtype=torch.float64)
    network, trace = traced(model, x, 1.0, "boxes")
    label = int(trace.logits.argmax())
    weights = [model[0].weight.detach().numpy(), model[2].weight.detach().numpy()]
    biases = [model[0].bias.detach().numpy(), model[2].bias.detach().numpy()]
    row = np.array([-1.0, 1.0]) if label == 0 else np.array([1.0, -1.0])
    return Branching(network, trace, label), 1 - label, exact_rise(weights, biases, x[0].numpy(), 1.0, row)


def shown(found: Branching, other: int, needed: float, seconds: float) -> float | None:
    with torch.no_grad():
        value = found(torch.tensor([other]), torch.tensor([needed], dtype=torch.float64), seconds)
    return None if value is None else float(value)


@pytest.mark.parametrize("seed", range(6))
def test_agrees_with_enumeration(seed: int) -> None:
    """What is just above the exact rise is shown, and nothing below it."""
    found, other, exact = enumerated(seed)
    above = exact * 1.002 + 1e-6
    value = shown(found, other, above, 60.0)
    assert value is not None
    assert exact * (1 - 1e-6) <= value < above
    assert shown(found, other, exact * 0.998, 0.3) is None


def _mutated(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if name == "sign of a pull":
        pull = CutWay._pull

        def turned(self: CutWay, bend: Bend, h: Tensor, place: int) -> tuple[Tensor, Tensor] | None:
            found = pull(self, bend, h, place)
            return None if found is None else (found[0], -found[1])

        monkeypatch.setattr(CutWay, "_pull", turned)
    elif name == "remainders left out":
        remainder = CutWay._remainder
        monkeypatch.setattr(CutWay, "_remainder", lambda *args: 0.0 * remainder(*args))
    elif name == "one half forgotten":
        halves = Parts.halves
        monkeypatch.setattr(Parts, "halves", lambda parts: halves(parts).take(torch.arange(len(parts.classes))))
    elif name == "parts cut too short":
        between = Bend.between

        def shorter(bend: Bend, first: Tensor, last: Tensor) -> Bend:
            found = between(bend, first, last)
            return replace(found, runs=0.9 * found.runs, rises=0.9 * found.rises)

        monkeypatch.setattr(Bend, "between", shorter)
    elif name == "an unstable unit dropped":
        made = Branching.__init__

        def dropped(self: Branching, *args: object) -> None:
            made(self, *args)  # type: ignore[arg-type]
            self.units = [units[1:] for units in self.units]

        monkeypatch.setattr(Branching, "__init__", dropped)


MUTATIONS = [
    "sign of a pull",
    "remainders left out",
    "one half forgotten",
    "parts cut too short",
    "an unstable unit dropped",
]


@pytest.mark.parametrize("name", MUTATIONS)
def test_what_is_wrong_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each mistake shows something below what is reached, for one network at least."""
    _mutated(name, monkeypatch)
    for seed in range(6):
        found, other, exact = enumerated(seed)
        if shown(found, other, exact * 0.98, 0.5) is not None:
            return
    raise AssertionError("nothing was noticed")


def narrow(seed: int, act: Callable[[tuple[int, ...]], nn.Module]) -> tuple[nn.Module, Tensor, Tensor]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 12), act((12,)), nn.Linear(12, 10), act((10,)), nn.Linear(10, 3)).double()
    with torch.no_grad():
        for layer in model:
            if isinstance(layer, nn.Linear):
                layer.weight.mul_(2.0)
    x = torch.randn(4, 4, dtype=torch.float64)
    return model, x, model(x).argmax(1)


@pytest.mark.parametrize("activation", ["relu", "relu_theta", "maxmin", "clipped_maxmin"])
@pytest.mark.parametrize("guarantee", ["deterministic", "high_probability"])
def test_certifies_more_and_nothing_that_breaks(activation: str, guarantee: str) -> None:
    more = 0
    for seed in (0,) if guarantee == "deterministic" else (1,):
        model, x, y = narrow(seed, ACTIVATIONS[activation])
        eps = ll.certified_radius(model, x, y, guarantee=guarantee, seed=0) * 1.25
        plain = ll.certify(model, x, y, eps, guarantee=guarantee, seed=0)
        found = ll.certify(model, x, y, eps, guarantee=guarantee, seed=0, branch_seconds=1.0)
        assert bool((found.certified >= plain.certified).all())
        assert not bool((found.certified & torch.tensor([v is ll.Verdict.ATTACKED for v in plain.verdicts])).any())
        more += sum(check == "branch and bound" for check in found.decided_by)
        generator = torch.Generator().manual_seed(seed)
        for _ in range(20):
            move = torch.randn(x.shape, generator=generator, dtype=torch.float64)
            near = x + move / move.norm(dim=1, keepdim=True) * eps[:, None]
            assert bool((model(near).argmax(1) == y)[found.certified].all())
        assert bool((found.margin[found.certified] > 0).all())
    assert more > 0


@pytest.mark.parametrize("guarantee", ["deterministic", "high_probability"])
def test_radii_grow_by_branches_and_hold(guarantee: str) -> None:
    model, x, y = narrow(1, ACTIVATIONS["relu"])
    y[3] = (y[3] + 1) % 3
    plain = ll.certified_radius(model, x, y, guarantee=guarantee, seed=0)
    found = ll.certified_radius(model, x, y, guarantee=guarantee, seed=0, branch_seconds=1.5)
    assert bool((found >= plain).all())
    assert bool((found > 1.02 * plain).any())
    assert found[3] == 0
    for start in range(5):
        near = pgd_l2(model, x, y, found, steps=40, generator=torch.Generator().manual_seed(start))
        assert bool((model(near).argmax(1) == y)[found > 0].all())


@pytest.mark.parametrize("scale", [float("nan"), 1e90])
def test_what_is_not_finite_is_not_certified(scale: float) -> None:
    model, x, y = narrow(0, ACTIVATIONS["relu"])
    if scale == scale:
        with torch.no_grad():
            for layer in (model[0], model[2], model[4]):
                layer.weight.mul_(scale)
    else:
        x[:] = scale
    found = ll.certify(model, x, y, 1e-3 if scale != scale else 1e50, branch_seconds=0.2, attack_steps=0)
    assert not bool(found.certified.any())


@pytest.mark.parametrize("seconds", [-1.0, float("nan"), float("inf"), "5", True])
def test_seconds_that_are_none(seconds: object) -> None:
    model, x, y = narrow(0, ACTIVATIONS["relu"])
    with pytest.raises(ValueError, match="branch_seconds must be a number of at least 0"):
        ll.certify(model, x, y, 0.1, branch_seconds=seconds)  # type: ignore[arg-type]


def test_the_paper_bound_alone_has_no_branches() -> None:
    model, x, y = narrow(0, ACTIVATIONS["relu"])
    with pytest.raises(ValueError, match="left out by method='local'"):
        ll.certify(model, x, y, 0.1, branch_seconds=1.0, method="local")


def test_halves_cover_their_part() -> None:
    """Parts with a cut are there twice, on either side of it; those without one stay as they are."""
    first, last = [torch.zeros(3, 2, dtype=torch.int8)], [torch.ones(3, 2, dtype=torch.int8)]
    none = [torch.zeros(3, 2)]
    cut = torch.tensor([[0, 1, 2], [-1, -1, -1], [0, 0, 2]])
    both = Parts(torch.arange(3), first, last, none, none, torch.zeros(3), torch.ones(3), cut).halves()
    assert both.classes.tolist() == [0, 1, 2, 0, 2]
    assert both.first[0].tolist() == [[0, 0], [0, 0], [0, 0], [0, 2], [2, 0]]
    assert both.last[0].tolist() == [[1, 2], [1, 1], [2, 1], [1, 1], [1, 1]]
