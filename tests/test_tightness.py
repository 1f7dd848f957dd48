"""The way back through the network with free slopes: against search, exact arithmetic, and the bound without it."""

from __future__ import annotations

import itertools
import json
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import locallip as ll
from locallip.activations import Box, SortPairs, Varying, clip, relu
from locallip.bounds import Trace, global_bound, propagate, worst_logits
from locallip.bounds.bend import Before
from locallip.bounds.bends import bends
from locallip.bounds.pullback import Pullback, Way
from locallip.norms import CholeskyNorm
from tests.random_networks import BODIES, random_network

ROOT = Path(__file__).parent.parent
BENT = ("relu", "relu_theta", "hardtanh", "maxmin", "clipped_maxmin")
KINDS = [(body, BENT[i % len(BENT)]) for i, body in enumerate(BODIES)] + [("dense", name) for name in BENT]
KINDS = [kind for kind in dict.fromkeys(KINDS) if kind[0] in BODIES]


def traced(body: str, activation: str, seed: int, radius: float) -> tuple[ll.Network, nn.Module, Tensor, Trace]:
    model, shape = random_network(body, activation, seed, 1.0)
    network = ll.lower(model, shape)
    x = torch.randn(3, *shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    eps = torch.full((3,), radius, dtype=torch.float64)
    with torch.no_grad():
        ceiling = global_bound(network, CholeskyNorm(), eps, outward=True)
        return network, model, x, propagate(network, x, eps, CholeskyNorm(), ceiling=ceiling, outward=True)


def pairs(y: Tensor, classes: int) -> tuple[Tensor, Tensor]:
    """Every sample with every class but its own."""
    other = torch.ones(len(y), classes, dtype=torch.bool).scatter(1, y[:, None], False)
    return other.nonzero(as_tuple=True)  # type: ignore[return-value]


def found_rise(model: nn.Module, x: Tensor, radius: float, samples: Tensor, classes: Tensor, y: Tensor) -> Tensor:
    """The largest gain of a class on the label that ascent in the ball finds, (n,)."""
    starts = 16
    center = x[samples].repeat(starts, *[1] * (x.dim() - 1))
    own, other = y[samples].repeat(starts), classes.repeat(starts)
    ones = [1] * (x.dim() - 1)

    def into(v: Tensor, always: bool = False) -> Tensor:
        size = v.flatten(1).norm(dim=1).clamp(min=1e-300).reshape(-1, *ones)
        return v * (radius / size if always else (radius / size).clamp(max=1))

    def gain(points: Tensor) -> Tensor:
        logits = model(points)
        return (logits.gather(1, other[:, None]) - logits.gather(1, own[:, None]))[:, 0]

    move = into(torch.randn_like(center), always=True)
    best = torch.full((len(center),), -1e300, dtype=torch.float64)
    for _ in range(20):
        move.requires_grad_()
        value = gain(center + move)
        best = torch.maximum(best, value.detach())
        (slope,) = torch.autograd.grad(value.sum(), move)
        move = into(move.detach() + 0.5 * into(slope, always=True))
    with torch.no_grad():
        return (best - gain(center)).reshape(starts, -1).amax(0)


@pytest.mark.parametrize(("body", "activation"), KINDS)
@pytest.mark.parametrize("radius", [0.05, 0.5])
def test_nothing_found_in_the_ball_exceeds_the_bound_of_any_slopes(body, activation, radius):
    torch.manual_seed(0)
    network, model, x, trace = traced(body, activation, 7, radius)
    y = trace.logits.argmax(1)
    samples, classes = pairs(y, trace.logits.shape[1])
    found = found_rise(model, x, radius, samples, classes, y)
    with torch.no_grad():
        for depth in (1, 2, None):
            pullback = Pullback(network, trace, depth)
            values = [pullback(samples, classes, y[samples], steps) for steps in (1, 8)]
            if pullback.stages:
                way = Way(pullback, samples, classes, y[samples], torch.float64, outward=True)
                values.append(way.value([2 * torch.rand_like(a) - 0.5 for a in way.line_slopes()]))
            for value in values:
                assert bool((value >= found - 1e-12 * (1 + found.abs())).all())


@pytest.mark.parametrize(("body", "activation"), KINDS)
def test_never_looser_than_without_and_somewhere_tighter(body, activation):
    tighter = False
    for seed in range(3):
        network, _, _, trace = traced(body, activation, seed, 0.4)
        y = trace.logits.argmax(1)
        with torch.no_grad():
            plain = worst_logits(network, trace, y, outward=True, slope_steps=0).worst
            pulled = worst_logits(network, trace, y, outward=True).worst
        assert bool((pulled <= plain).all())
        tighter = tighter or bool((pulled < plain - 1e-9).any())
        assert torch.equal(pulled.gather(1, y[:, None]), plain.gather(1, y[:, None]))
    assert tighter or activation != "relu"  # where thresholds cut the boxes, the last box alone may be as good


def test_a_linear_part_is_bounded_exactly():
    """Where no unit bends inside the ball, the pulled-back bound can reach the exact value ||w A|| eps."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 9), nn.ReLU(), nn.Linear(9, 3)).double()
    with torch.no_grad():
        model[0].bias.fill_(20.0)
    network, x, eps = ll.lower(model, (6,)), torch.randn(4, 6).double(), torch.full((4,), 0.5).double()
    with torch.no_grad():
        trace = propagate(network, x, eps, CholeskyNorm(), outward=True)
        y = trace.logits.argmax(1)
        samples, classes = pairs(y, 3)
        way = Way(Pullback(network, trace), samples, classes, y[samples], torch.float64, outward=True)
        value = way.value([torch.ones_like(a) for a in way.line_slopes()])
        rows = (model[2].weight[classes] - model[2].weight[y[samples]]) @ model[0].weight
    exact = 0.5 * rows.norm(dim=1)
    assert bool((value >= exact).all())
    assert bool((value <= exact * (1 + 1e-9)).all())


def exact_margin(weights: list[np.ndarray], biases: list[np.ndarray], x: list[Fraction], y: int, other: int) -> Fraction:
    """F_other - F_y of a ReLU network in rational arithmetic."""
    z = x
    for k, (w, b) in enumerate(zip(weights, biases, strict=True)):
        z = [
            sum((Fraction(float(a)) * v for a, v in zip(row, z, strict=True)), Fraction(float(c)))
            for row, c in zip(w, b, strict=True)
        ]
        if k < len(weights) - 1:
            z = [max(v, Fraction(0)) for v in z]
    return z[other] - z[y]


@pytest.mark.parametrize("scale", [1.0, 1e-6, 1e8])
def test_outward_rounding_holds_in_rational_arithmetic(scale):
    """One input, so the ball is an interval: 41 of its points are looked at exactly, down to radii of nearly zero."""
    for seed in range(6):
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(1, 5), nn.ReLU(), nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 2)).double()
        with torch.no_grad():
            model[0].weight.mul_(scale)
        network = ll.lower(model, (1,))
        x = torch.randn(1, 1, dtype=torch.float64)
        weights, biases = ([getattr(model[k], name).detach().numpy() for k in (0, 2, 4)] for name in ("weight", "bias"))
        for radius in (1e-15, 1e-3 / scale, 1.0):
            eps = torch.tensor([radius], dtype=torch.float64)
            with torch.no_grad():
                trace = propagate(network, x, eps, CholeskyNorm(), outward=True)
                y = trace.logits.argmax(1)
                rival = 1 - y
                rise = Pullback(network, trace)(torch.tensor([0]), rival, y, 8)
                bound = worst_logits(network, trace, y, outward=True).worst
            lead = Fraction(float(bound[0, rival[0]])) - Fraction(float(bound[0, y[0]]))
            middle, reach = Fraction(float(x)), Fraction(radius)
            center = exact_margin(weights, biases, [middle], int(y), int(rival))
            slack = 2 * Fraction(float(trace.logits_error.sum()))
            for i in range(-20, 21):
                value = exact_margin(weights, biases, [middle + reach * Fraction(i, 20)], int(y), int(rival))
                assert value <= lead
                assert value - center <= Fraction(float(rise)) + slack


@pytest.mark.parametrize("activation", [relu(), clip(-0.3, 0.4), SortPairs(ll.MaxMin()), SortPairs(ll.ClippedMaxMin(4))])
def test_a_bend_holds_all_values_of_its_activation(activation):
    """psi(y') - psi(c) = alpha (y' - c) + r with r / s between its ends and |r| <= s |y' - c|, for points of the box."""
    generator = torch.Generator().manual_seed(3)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    center = draw(50, 8)
    center[:, 0], center[:, 1] = 0.0, 0.4  # on kinks
    box = Box(center - draw(50, 8).abs() * 0.7, center + draw(50, 8).abs() * 0.7)
    with torch.no_grad():
        varying = activation.varying(box)
        ones = torch.ones(50, dtype=torch.float64)
        found = bends(activation, Before(center, torch.zeros_like(center), box, Varying(*varying), ones))
        for point in (torch.lerp(box.lower, box.upper, torch.rand(50, 8).double()), *box):
            value, start = point, center
            for bend in reversed(found):
                if bend.paired:
                    value, start = (
                        torch.cat([sum(v.chunk(2, 1)), v.chunk(2, 1)[0] - v.chunk(2, 1)[1]], 1) for v in (value, start)
                    )
                alpha = bend.low + (bend.high - bend.low) * torch.rand_like(bend.low)
                size, least, most = bend.remainder(alpha, True)
                if bend.paired:
                    images = [torch.cat([v[:, :4], v[:, 4:].abs()], 1) for v in (value, start)]
                else:
                    low, high = (-0.3, 0.4) if not isinstance(activation, SortPairs) else (None, None)
                    low, high = (0.0, float("inf")) if activation.__dict__.get("low") == 0.0 else (low, high)
                    if low is None:
                        images = [torch.cat([v[:, :4].clamp(max=1.0), v[:, 4:].clamp(min=-1.0)], 1) for v in (value, start)]
                    else:
                        images = [v.clamp(low, high) for v in (value, start)]
                rest = images[0] - images[1] - alpha * (value - start)
                assert bool((rest.abs() <= size * (value - start).abs() + 1e-13).all())
                assert bool(((rest >= size * least - 1e-13) & (rest <= size * most + 1e-13)).all())
                if bend.paired:
                    images = [torch.cat([v[:, :4] + v[:, 4:], v[:, :4] - v[:, 4:]], 1) / 2 for v in images]
                value, start = images
            assert bool((value - activation(point)).abs().amax() <= 1e-13)


def test_numbers_that_are_not_finite_prove_nothing():
    network, _, x, _ = traced("dense" if "dense" in BODIES else next(iter(BODIES)), "relu", 0, 0.3)
    for bad in (float("nan"), float("inf"), 1e200):
        broken = x.clone()
        broken[0].view(-1)[0] = bad
        eps = torch.full((3,), 0.3, dtype=torch.float64)
        with torch.no_grad():
            trace = propagate(network, broken, eps, CholeskyNorm(), outward=True)
            y = torch.zeros(3, dtype=torch.long)
            worst = worst_logits(network, trace, y, outward=True).worst
            clean = worst_logits(network, propagate(network, x, eps, CholeskyNorm(), outward=True), y, outward=True).worst
        assert not bool((worst[0, 0] > worst[0, 1:]).all()) or bad == 1e200
        assert torch.allclose(worst[1:], clean[1:], rtol=1e-4)  # the other samples are not touched
    huge = torch.full((3,), float("inf"), dtype=torch.float64)
    with torch.no_grad():
        trace = propagate(network, x, huge, CholeskyNorm(), outward=True)
        worst = worst_logits(network, trace, y, outward=True).worst
    assert not bool((worst[:, :1] > worst[:, 1:]).any())


@pytest.mark.parametrize("activation", BENT)
def test_a_smaller_ball_has_a_smaller_bound(activation):
    """The search may end elsewhere in a smaller ball, so the order of the bounds holds but for a little."""
    rises = []
    for radius in (0.05, 0.1, 0.2, 0.4, 0.8):
        network, _, _, trace = traced("dense", activation, 2, radius)
        y = trace.logits.argmax(1)
        with torch.no_grad():
            worst = worst_logits(network, trace, y, outward=True).worst
        rises.append(worst - worst.gather(1, y[:, None]) - (trace.logits - trace.logits.gather(1, y[:, None])))
    for small, large in itertools.pairwise(rises):
        assert bool((small <= large * 1.02 + 1e-12).all())


def test_training_does_not_take_the_way_back():
    network, _, x, _ = traced(next(iter(BODIES)), "relu", 1, 0.3)
    eps = torch.full((3,), 0.3, dtype=torch.float64)
    with torch.no_grad():
        trace = propagate(network, x, eps, CholeskyNorm())
        y = trace.logits.argmax(1)
        assert trace.before == ()
        assert torch.equal(worst_logits(network, trace, y).worst, worst_logits(network, trace, y, slope_steps=0).worst)


def test_all_parts_of_the_bound_were_measured_and_slopes_certify_no_less(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import tightness

    measured = [json.loads(path.read_text()) for path in (ROOT / "results").glob("tightness-*.json")]
    assert measured
    for values in measured:
        for network in values["networks"]:
            rows = {row["row"]: row["certified"] for row in network["rows"]}
            assert set(rows) == {row.title for row in tightness.ROWS}
            assert rows["all parts: the default"] >= rows["no slopes: last layer over box and ball"]
