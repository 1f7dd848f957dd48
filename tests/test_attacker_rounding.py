"""Attempts to lose more by rounding or underflow than is allowed for: long sums, long chains, tiny and huge numbers.

All is held against exact arithmetic, or against what torch computes in float32 where that is what is claimed.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from fractions import Fraction

import pytest
import torch
from torch import Tensor, nn

import locallip as ll
from locallip.bounds.pullback import Pullback
from locallip.certify.inputs import SMALLEST
from locallip.certify.prover import Prover
from locallip.network import UnsupportedLayer, lower
from tests.test_attacker import linear, tensor

HALF_UNIT = 2.0**-53
GUARANTEES = ["deterministic", "high_probability"]


class Formula(nn.Module):
    """forward given as a function; the parameter only says that numbers are float64."""

    def __init__(self, formula: Callable[[Tensor], Tensor], behind: nn.Module | None = None):
        super().__init__()
        self.formula, self.behind = formula, nn.Identity() if behind is None else behind
        self.register_buffer("wide", torch.zeros((), dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return self.behind(self.formula(x))


def certificate(model: nn.Module, x: list[float], y: int, eps: float, **options: str) -> ll.Certificate:
    return ll.certify(model, tensor([x]), torch.tensor([y]), eps, attack_steps=0, guarantee="deterministic", **options)


# Underflow between two maps that are composed --------------------------------------------------------------------------


@pytest.mark.parametrize("widening", [830, 850])
def test_slopes_that_vanish_between_two_maps(widening: int) -> None:
    """On the way back the slope falls below 2^-1074 behind one map, and the next would make it large again.

    Catches: counting what vanishes by the widths of the sources alone (pullback._met).
    """
    large, small, last = 2.0**widening, 2.0**-350, 2.0**-376
    slope = Fraction(large) * Fraction(small) ** 2 * Fraction(last)
    bias = float(slope * (1 + Fraction(95, 200)))
    layers = [linear([[large]]), linear([[small]]), nn.ReLU(), linear([[small]]), nn.ReLU()]
    model = nn.Sequential(*layers, linear([[last], [0.0]], [0.0, bias]))
    exact = Fraction(bias) - slope * Fraction(3, 2)
    assert exact < 0  # so that class 0 wins at x' = 1.5
    found = certificate(model, [1.0], 1, 0.5)
    assert not found.certified.any()
    assert Fraction(found.margin.item()) <= exact
    assert certificate(model, [1.0], 1, 0.4).certified.all()


@pytest.mark.parametrize("exponent", [-690, -700, -720])
def test_rows_that_cancel_and_a_ball_that_vanishes_between_two_maps(exponent: int) -> None:
    """The row of class 0 is 0 but for rounding, and the allowance for it passes through numbers below 2^-1074.

    Catches: widths that are not raised to FLOOR on their way through the last map (margin._rise).
    """
    p, rng = 2.0**830, random.Random(1)
    while True:
        a, b = (rng.uniform(1, 2) * 2.0**-395 for _ in range(2))
        q = -float(Fraction(p) * Fraction(a) / Fraction(b))
        row = Fraction(p) * Fraction(a) + Fraction(q) * Fraction(b)
        if row and float(tensor([[p, q]]) @ tensor([[a], [b]])) == 0:
            break
    eps = 2.0**exponent
    bias = float(abs(row) * Fraction(eps) / 2)
    model = nn.Sequential(linear([[a], [b]]), linear([[p, q], [0.0, 0.0]], [0.0, bias]))
    for method in ("local", "auto"):
        assert not certificate(model, [0.0], 1, eps, method=method).certified.any()
    assert certificate(model, [0.0], 1, 0.0).certified.all()


def test_spread_of_slopes_does_not_vanish() -> None:
    """|W| |z' - c|, by which the rounding of slopes is measured, is not 0 where z' is not c.

    Catches: widths that are not raised to FLOOR in Pullback._spread.
    """
    layers = [linear([[2.0**-390]]), linear([[2.0**800]]), nn.ReLU(), linear([[1.0], [0.0]])]
    prover = Prover(nn.Sequential(*layers), (1,), "deterministic")
    trace = prover.trace(tensor([[0.0]]), tensor([2.0**-720]), local="none")
    spread = Pullback(prover.network, trace).stages[1].spread[0]
    assert Fraction(spread.item()) >= Fraction(2) ** (800 - 390 - 720)


# Long chains and long sums ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("guarantee", GUARANTEES)
def test_chain_of_factors_that_all_round_down(guarantee: str) -> None:
    """300 factors, each chosen so that the product so far loses almost half a unit.

    Catches: a `fan_in` of compositions that does not add up (Compose, Diagonal).
    """
    rng, product, computed, factors = random.Random(3), Fraction(1), 1.0, []
    for _ in range(300):
        tries = [rng.uniform(0.9, 1.1) for _ in range(30)]
        lost = {factor: Fraction(computed) * Fraction(factor) / Fraction(computed * factor) for factor in tries}
        best = max(tries, key=lambda factor: lost[factor])
        factors.append(best)
        product, computed = product * Fraction(best), computed * best
    assert product > Fraction(computed) * (1 + 200 * Fraction(HALF_UNIT))

    def formula(x: Tensor) -> Tensor:
        for factor in factors:
            x = x * factor
        return x

    for behind in (None, linear([[1.0], [0.0]])):  # the closed form, and the proof of a norm
        bound = ll.global_lipschitz(Formula(formula, behind), (1,), guarantee=guarantee)
        assert product <= Fraction(bound) <= product * (1 + Fraction(1, 10**7))


@pytest.mark.parametrize("guarantee", GUARANTEES)
def test_sum_of_many_maps_of_one_input(guarantee: str) -> None:
    """x + 700 (0.99 u) x: rounding shows x alone; u is half a unit.

    Catches: a `fan_in` of sums that does not count their parts, and sums within sums, which end in a RecursionError.
    """
    small, count = 0.99 * HALF_UNIT, 700

    def formula(x: Tensor) -> Tensor:
        out = x * 1.0
        for _ in range(count):
            out = out + x * small
        return out

    exact = 1 + count * Fraction(small)
    for behind in (None, linear([[1.0], [0.0]])):
        model = Formula(formula, behind)
        assert Fraction(ll.global_lipschitz(model, (1,), guarantee=guarantee)) >= exact
    bias = float(1 + 600 * Fraction(HALF_UNIT))
    head = nn.Sequential(linear([[1.0], [0.0]], [0.0, bias]))
    assert exact > Fraction(bias)  # class 0 wins at x' = 1
    found = ll.certify(
        Formula(formula, head), tensor([[0.5]] * 2), torch.tensor([1, 1]), [0.5, 0.49], guarantee=guarantee, attack_steps=0
    )
    assert found.certified.tolist() == [False, True]


def test_many_constants_that_are_added() -> None:
    """450 Python numbers below half a unit lift a unit over its threshold, and a chain of scalings is behind them.

    Catches: an Offset.fan_in without the number of its parts, and constants that are rounded to the module's dtype.
    """
    small, count, factor = 0.99 * HALF_UNIT, 450, 1 - HALF_UNIT

    def formula(x: Tensor) -> Tensor:
        out = x + 1.0
        for _ in range(count):
            out = out + small
        return out * factor

    exact = (1 + count * Fraction(small)) * Fraction(factor)
    low, bias = (float(1 + k * Fraction(HALF_UNIT)) for k in (240, 400))
    assert exact > Fraction(bias)
    head = nn.Sequential(nn.Hardtanh(low, 9.0), linear([[1.0], [0.0]], [0.0, bias]))
    model = Formula(formula, head)
    for method in ("local", "auto"):
        assert not certificate(model, [0.0], 1, 0.0, method=method).certified.any()
        assert not certificate(model, [0.0], 1, 1e-9, method=method).certified.any()
    assert certificate(model, [-1e-6], 1, 1e-7).certified.all()


@pytest.mark.parametrize("guarantee", GUARANTEES)
def test_mean_of_many_numbers(guarantee: str) -> None:
    """The norm of a mean over n positions is 1 / sqrt(n), also behind factors that round down.

    Catches: a norm of disjoint rows that is not rounded up.
    """
    for n in (*range(2, 24), 1023):
        model = Formula(lambda x: (x * 0.1).mean(dim=2))
        (norm,) = Prover(model, (2, n), guarantee).ceiling.norms.values()  # the sum over terms is rounded up once more
        bound = norm.item()
        assert Fraction(bound) ** 2 >= Fraction(0.1) ** 2 / n
        assert bound <= 0.1 / n**0.5 * (1 + 1e-9)


# Batch norm with extreme statistics ------------------------------------------------------------------------------------


def batch_norm(var: float, eps: float, weight: float) -> nn.BatchNorm1d:
    layer = nn.BatchNorm1d(1, eps=eps).eval()
    with torch.no_grad():
        for stored, value in ((layer.running_var, var), (layer.weight, weight)):
            assert stored is not None
            stored.fill_(value)
    return layer


@pytest.mark.parametrize(("var", "eps", "weight"), [(0.0, 1e-37, 1e-15), (1e30, 1e-5, 1e-30), (3e38, 1e-5, 3e38), (1, 0, 1)])
def test_norm_of_batch_norm_with_extreme_statistics(var: float, eps: float, weight: float) -> None:
    """Catches: factors that are multiplied in float32, or roundings of the quotient and the root that are not counted."""
    layer = batch_norm(var, eps, weight)
    assert layer.running_var is not None
    square = Fraction(layer.weight.item()) ** 2 / (Fraction(layer.running_var.item()) + Fraction(eps))
    bound = Fraction(ll.global_lipschitz(layer, (1,), guarantee="deterministic")) ** 2
    assert square <= bound <= square * (1 + Fraction(1, 10**12))


def test_batch_norm_whose_factors_meet_below_float32() -> None:
    """1e-15 times 1e-30 is no float32 number, and torch takes that product before it meets x.

    Catches: deployed._vanished that lets each factor meet x by itself.
    """
    layer, x, scale = batch_norm(1e30, 1e-5, 1e-30), torch.tensor([[1e30]]), 1e15
    real = (Fraction(layer.weight.item()) * Fraction(x.item()) * Fraction(scale)) / Fraction(math.isqrt(int(1e30)))
    model = nn.Sequential(layer, linear([[scale], [0.0]], [0.0, 1.1 * float(real)]).float())
    assert model(x).argmax(1).item() == 0  # though class 1 leads by a tenth in real arithmetic
    found = ll.certify(model, x, torch.tensor([1]), 0.0, guarantee="deterministic", attack_steps=0)
    assert found.certified.all()
    runs = ll.certify(model, x, torch.tensor([1]), 0.0, guarantee="deterministic", attack_steps=0, deployed_dtype="float32")
    assert not runs.certified.any()


@pytest.mark.parametrize(("var", "eps"), [(0.0, 2.05e-45), (3e38, 3e38), (0.0, 0.0), (1e-40, 0.0)])
def test_batch_norm_beyond_float32_is_refused(var: float, eps: float) -> None:
    """var + eps has lost its digits in float32, or is infinite there. Catches: a rule that takes any statistics."""
    with pytest.raises(UnsupportedLayer, match="variance"):
        ll.global_lipschitz(batch_norm(var, eps, 1.0), (1,))


# Random networks with extreme magnitudes -------------------------------------------------------------------------------


def _exact(layers: list[nn.Module], x: list[Fraction]) -> list[Fraction]:
    for layer in layers:
        if isinstance(layer, nn.Linear):
            rows = zip(layer.weight.tolist(), layer.bias.tolist(), strict=True)
            x = [sum((Fraction(w) * z for w, z in zip(row, x, strict=True)), Fraction(b)) for row, b in rows]
        else:
            x = [max(z, Fraction(0)) for z in x]
    return x


def _number(rng: random.Random) -> float:
    near_one = [1 - HALF_UNIT, 1 + 2 * HALF_UNIT, 0.1]
    return rng.choice([1, -1]) * rng.choice([*near_one, rng.uniform(0.5, 2), rng.uniform(0.5, 2)])


def _network(rng: random.Random, size: float) -> list[nn.Module]:
    """Maps with scales from 1e-118 to 1e200, up to three between two activations; `size` is about that of the input."""
    layers: list[nn.Module] = []
    width = 2
    for _ in range(rng.randint(1, 3)):
        for _ in range(rng.randint(1, 3)):
            exponent = rng.choice([0.0, rng.uniform(-118, 0), rng.uniform(-60, 0), rng.uniform(0, 200)])
            scale = 10.0**exponent if 1e-280 < size * 10.0 ** min(exponent, 200) < 1e200 else 1.0
            out, size = rng.randint(1, 3), size * scale
            weight = [[_number(rng) * scale for _ in range(width)] for _ in range(out)]
            layers.append(linear(weight, [rng.choice([0.0, _number(rng) * size]) for _ in range(out)]))
            width = out
        layers.append(nn.ReLU())
    last = rng.choice([1.0, 10.0 ** rng.uniform(-118, 0)])
    return [*layers, linear([[_number(rng) * last for _ in range(width)], [0.0] * width], [0.0, 0.0])]


@pytest.mark.parametrize("seed", range(24))
def test_random_networks_with_extreme_magnitudes(seed: int) -> None:
    """The label is set so that it just loses at the worst of some points of the ball: no margin above 0, and none wrong."""
    rng = random.Random(seed)
    x, eps = (
        [rng.choice([0.0, _number(rng)]) * 10.0 ** rng.uniform(-200, 20) for _ in range(2)],
        10.0 ** rng.uniform(-220, 5),
    )
    layers = _network(rng, max(*map(abs, x), eps))
    directions = [(1, 0), (-1, 0), (0, 1), (0, -1), (0.6, 0.79), (-0.6, 0.79), (0.6, -0.79), (-0.6, -0.79), (0, 0)]
    points = [[Fraction(z) + Fraction(eps) * Fraction(d) for z, d in zip(x, way, strict=True)] for way in directions]
    leads = [first - second for second, first in (_exact(layers, point) for point in points)]
    bias = float(-min(leads) - (max(leads) - min(leads)) * Fraction(rng.choice([1e-15, 1e-6, 0.1])))
    last = layers[-1]
    assert isinstance(last, nn.Linear)
    with torch.no_grad():
        last.bias.copy_(tensor([0.0, bias]))
    network = lower(nn.Sequential(*layers), (2,))
    if any(op.smallest() < SMALLEST for stage in network.stages for op in stage.terms.values()):
        with pytest.raises(ValueError, match="multiply to about"):
            Prover(nn.Sequential(*layers), (2,), "deterministic")
        return
    prover = Prover(nn.Sequential(*layers), (2,), "deterministic")
    for local in ("none", "all"):
        margin = prover.margin(tensor([x]), torch.tensor([1]), tensor([eps]), local=local).worst.item()  # type: ignore[arg-type]
        assert not math.isfinite(margin) or Fraction(margin) <= min(leads) + Fraction(bias)
