"""Attempts to make a proof say something false, each held against exact rational arithmetic or a closed form."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from decimal import Decimal, localcontext
from fractions import Fraction

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import locallip as ll
from locallip.bounds import support
from locallip.norms import LanczosNorm, NormKey
from locallip.ops import Dense, Masked

PROOFS = ("deterministic", "high_probability")
Line = tuple[Fraction, Fraction]


def tensor(values: object) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def linear(weight: list[list[float]], bias: list[float] | None = None) -> nn.Linear:
    """A float64 layer with these weights."""
    layer = nn.Linear(len(weight[0]), len(weight), bias=bias is not None, dtype=torch.float64)
    with torch.no_grad():
        layer.weight.copy_(tensor(weight))
        if bias is not None:
            layer.bias.copy_(tensor(bias))
    return layer


def verdict(model: nn.Module, x: Tensor, y: int, eps: float, guarantee: str, **options: object) -> str:
    result = ll.certify(model, x, torch.tensor([y]), eps, guarantee=guarantee, **options)  # type: ignore[arg-type]
    return str(result.verdicts[0])


class Pieces:
    """A network with one input on an interval, exactly: its linear pieces as (slope, offset) of every unit."""

    def __init__(self, low: Fraction, high: Fraction, layers: list[nn.Module]):
        self.cuts, self.lines = [low, high], [[(Fraction(1), Fraction(0))]]
        for layer in layers:
            self._apply(layer)

    def _apply(self, layer: nn.Module) -> None:
        zero = Fraction(0)
        if isinstance(layer, nn.Linear):
            self._linear(layer)
        elif isinstance(layer, ll.MaxMin):
            half = len(self.lines[0]) // 2
            self._pieces(lambda z: [_minus(z[i], z[i + half]) for i in range(half)], lambda z, m: _sorted_pairs(z, m, half))
        elif isinstance(layer, nn.ReLU):
            self._clip(zero, None, zero)
        elif isinstance(layer, nn.LeakyReLU):
            self._clip(zero, None, Fraction(layer.negative_slope))
        elif isinstance(layer, ll.ReLUTheta):
            self._clip(zero, [Fraction(t) for t in layer.theta.tolist()], zero)
        else:
            assert isinstance(layer, nn.Hardtanh)
            self._clip(Fraction(layer.min_val), [Fraction(layer.max_val)] * len(self.lines[0]), zero)

    def _linear(self, layer: nn.Linear) -> None:
        rows = [[Fraction(w) for w in row] for row in layer.weight.tolist()]
        shift = [Fraction(0)] * len(rows) if layer.bias is None else [Fraction(b) for b in layer.bias.tolist()]
        self.lines = [
            [
                (
                    sum((w * k for w, (k, _) in zip(row, z, strict=True)), Fraction(0)),
                    sum((w * c for w, (_, c) in zip(row, z, strict=True)), b),
                )
                for row, b in zip(rows, shift, strict=True)
            ]
            for z in self.lines
        ]

    def _clip(self, low: Fraction, high: list[Fraction] | None, slope: Fraction) -> None:
        """min(max(z, low), high), or slope * z in place of low = 0."""

        def one(line: Line, top: Fraction | None, middle: Fraction) -> Line:
            value = line[0] * middle + line[1]
            if value < low:
                return (slope * line[0], slope * line[1]) if slope else (Fraction(0), low)
            return (Fraction(0), top) if top is not None and value > top else line

        tops = [None] * len(self.lines[0]) if high is None else high
        self._pieces(
            lambda z: [(k, c - t) for (k, c), top in zip(z, tops, strict=True) for t in (low, top) if t is not None],
            lambda z, middle: [one(line, top, middle) for line, top in zip(z, tops, strict=True)],
        )

    def _pieces(self, kinks: Callable[[list[Line]], list[Line]], act: Callable[[list[Line], Fraction], list[Line]]) -> None:
        cuts, lines = self.cuts[:1], []
        for low, high, z in zip(self.cuts, self.cuts[1:], self.lines, strict=False):
            for end in [*sorted({-c / k for k, c in kinks(z) if k and low < -c / k < high}), high]:
                lines.append(act(z, (cuts[-1] + end) / 2))
                cuts.append(end)
        self.cuts, self.lines = cuts, lines

    def lead(self, y: int) -> Fraction:
        """The smallest lead of class y on the interval."""
        return min(
            _at(_minus(z[y], z[j]), point)
            for low, high, z in zip(self.cuts, self.cuts[1:], self.lines, strict=False)
            for point in (low, high)
            for j in range(len(z))
            if j != y
        )

    def steepest_squared(self) -> Fraction:
        return max(sum((k * k for k, _ in z), Fraction(0)) for z in self.lines)


def _minus(a: Line, b: Line) -> Line:
    return a[0] - b[0], a[1] - b[1]


def _at(line: Line, point: Fraction) -> Fraction:
    return line[0] * point + line[1]


def _sorted_pairs(z: list[Line], middle: Fraction, half: int) -> list[Line]:
    pairs = [sorted((z[i], z[i + half]), key=lambda line: _at(line, middle)) for i in range(half)]
    return [high for _, high in pairs] + [low for low, _ in pairs]


def hold_against_exact(
    layers: list[nn.Module], x: float, y: int, eps: float, guarantee: str, domain: tuple[float, float] | None = None
) -> str:
    """Compare verdict, margin and Lipschitz bound with the exact pieces; returns the verdict."""
    model, point = nn.Sequential(*layers), tensor([[x]])
    result = ll.certify(model, point, torch.tensor([y]), eps, guarantee=guarantee, input_domain=domain)
    low, high = Fraction(x) - Fraction(eps), Fraction(x) + Fraction(eps)
    if domain is not None:
        low, high = max(low, Fraction(domain[0])), min(high, Fraction(domain[1]))
    exact = Pieces(low, high, layers)
    lead, found = exact.lead(y), str(result.verdicts[0])
    if found == "CERTIFIED":
        assert lead > 0
        assert Fraction(result.margin[0].item()) <= lead
    if found == "ATTACKED":
        assert lead <= 0
    if found == "MISCLASSIFIED":
        assert _lead_at(layers, x, y) < 0
    bound = float(ll.local_lipschitz(model, point, eps, guarantee=guarantee, input_domain=domain)[0])
    assert math.isinf(bound) or Fraction(bound) ** 2 >= exact.steepest_squared()
    return found


def _lead_at(layers: list[nn.Module], x: float, y: int) -> Fraction:
    z = Pieces(Fraction(x), Fraction(x) + 1, layers).lines[0]
    return min(_at(_minus(z[y], z[j]), Fraction(x)) for j in range(len(z)) if j != y)


# Rounding --------------------------------------------------------------------------------------------------------------


def _number(rng: random.Random, scale: float) -> float:
    """Plain numbers, dyadic ones that tie, powers of two over a wide range, and numbers that nearly cancel."""
    kinds = (
        lambda: rng.gauss(0, 1),
        lambda: rng.randint(-8, 8) / 8,
        lambda: rng.choice([-1, 1]) * 2.0 ** rng.randint(-52, 30),
        lambda: rng.choice([-1, 1]) * (1 + rng.randint(-3, 3) * 2.0**-52),
        lambda: rng.choice([0.0, -0.0, 1.0]),
    )
    return scale * rng.choice(kinds)()


def _layer(rng: random.Random, ins: int, outs: int) -> nn.Linear:
    scale, shift = rng.choice([1.0, 1.0, 1e8, 1e-8, 1e-30]), rng.choice([0.0, 1.0, 1.0, 1e8, 1e15, 1e-16])
    weight = [[_number(rng, scale) for _ in range(ins)] for _ in range(outs)]
    return linear(weight, [_number(rng, shift) for _ in range(outs)] if rng.random() < 0.8 else None)


def _activation(rng: random.Random, width: int) -> nn.Module:
    kinds: tuple[Callable[[], nn.Module], ...] = (
        nn.ReLU,
        ll.MaxMin,
        lambda: nn.LeakyReLU(rng.choice([0.01, 2.0, 0.0, 1e-10])),
        lambda: nn.Hardtanh(-rng.choice([1.0, 1e-8, 1e8]), rng.choice([1.0, 1e-9, 1e9])),
        lambda: ll.ReLUTheta(width, init=rng.choice([0.0, 1.0, 1e-8])).double(),
    )
    return rng.choice(kinds)()


@pytest.mark.parametrize("guarantee", PROOFS)
@pytest.mark.parametrize("seed", range(14))
def test_wild_networks_against_their_exact_pieces(seed: int, guarantee: str) -> None:
    """Cancelling biases of 1e8 and 1e15, weights over 2^82, ties and tiny thresholds, at the edge of the proved radius."""
    rng = random.Random(seed)
    width, layers, last = rng.choice([2, 4]), list[nn.Module](), 1
    for _ in range(rng.choice([1, 2, 4])):
        layers += [_layer(rng, last, width), _activation(rng, width)]
        last = width
    layers.append(_layer(rng, last, rng.choice([2, 3])))
    x = rng.choice([0.0, 1.0, rng.gauss(0, 1), 1e8, 1e-10])
    y = int(nn.Sequential(*layers)(tensor([[x]])).argmax())
    radius = float(ll.certified_radius(nn.Sequential(*layers), tensor([[x]]), torch.tensor([y]), guarantee=guarantee)[0])
    for eps in (1.0, 1e-3, radius, radius * 1.0005):
        if 0 < eps < 1e200:
            hold_against_exact(layers, x, y, eps, guarantee)


@pytest.mark.parametrize("guarantee", PROOFS)
def test_deep_chain_at_its_exact_boundary(guarantee: str) -> None:
    """Fifty active layers, where the bound is tight: a radius one part in 1e15 too large must not be certified."""
    rng = random.Random(5)
    layers: list[nn.Module] = []
    for _ in range(50):
        layers += [linear([[1 + rng.random() / 3]], [rng.random()]), nn.ReLU()]
    layers.append(linear([[1.0], [0.0]], [0.0, 0.0]))
    at, slope = (lambda line: (_at(line, Fraction(1)), line[0]))(Pieces(Fraction(1), Fraction(2), layers).lines[0][0])
    layers[-1] = linear([[1.0], [0.0]], [0.0, float(at) * 0.999])
    true = (at - Fraction(layers[-1].bias[1].item())) / slope  # type: ignore[index, union-attr]
    too_large = math.nextafter(float(true), math.inf)
    assert hold_against_exact(layers, 1.0, 0, too_large, guarantee) != "CERTIFIED"
    assert hold_against_exact(layers, 1.0, 0, float(true) * (1 - 1e-7), guarantee) == "CERTIFIED"


@pytest.mark.parametrize(
    ("fan_in", "offset", "guarantee"),
    [(100_000, 0.0, PROOFS[1]), *((*case, proof) for case in ((1000, 1e15), (3, 1e8), (50, 0.0)) for proof in PROOFS)],
)
def test_linear_classifier_at_its_exact_radius(fan_in: int, offset: float, guarantee: str) -> None:
    """Sums of 1e5 cancelling terms under a common logit of 1e15: the radius is lead / ||w_0 - w_1||, exactly."""
    generator = torch.Generator().manual_seed(fan_in)
    x = torch.randn(1, fan_in, generator=generator, dtype=torch.float64)
    model = nn.Linear(fan_in, 2, dtype=torch.float64)
    with torch.no_grad():
        model.weight.copy_(torch.randn(2, fan_in, generator=generator, dtype=torch.float64))
        model.bias.copy_(tensor([offset + max(1.0, offset * 1e-9), offset]))
        model.bias[0] -= model.weight[0] @ x[0] - model.weight[1] @ x[0]
    step = [Fraction(a) - Fraction(b) for a, b in zip(*model.weight.tolist(), strict=True)]
    lead = sum((d * Fraction(v) for d, v in zip(step, x[0].tolist(), strict=True)), Fraction(0))
    lead += Fraction(model.bias[0].item()) - Fraction(model.bias[1].item())
    length_squared = sum((d * d for d in step), Fraction(0))
    true = float(lead) / math.sqrt(length_squared)
    for share in (1 + 1e-15, 1 + 1e-12, 1 + 1e-9):
        eps = true * share
        if Fraction(eps) ** 2 * length_squared > lead * lead:
            assert verdict(model, x, 0, eps, guarantee) != "CERTIFIED"
    assert verdict(model, x, 0, true * 0.9, guarantee) == "CERTIFIED"


@pytest.mark.parametrize("seed", range(20))
def test_batch_norm_that_cancels_its_own_shift(seed: int) -> None:
    """mean / std of 1e8 against a bias that cancels it to the last bit: the sign at x = 0 is decided by rounding."""
    generator = torch.Generator().manual_seed(seed)
    mean = float(1e8 * (1 + torch.rand(1, generator=generator, dtype=torch.float64)))
    var = float(0.5 + torch.rand(1, generator=generator, dtype=torch.float64))
    layer = nn.BatchNorm1d(3, dtype=torch.float64).eval()
    rounded = -mean * float((tensor(var) + layer.eps).rsqrt())
    with localcontext() as context:
        context.prec = 60
        exact = -Decimal(mean) / (Decimal(var) + Decimal(layer.eps)).sqrt()
        error = float(exact - Decimal(rounded))
        bias = -rounded - error / 2
        sign = exact + Decimal(bias)
    with torch.no_grad():
        assert layer.running_mean is not None
        assert layer.running_var is not None
        layer.running_mean.copy_(tensor([mean, 0.0, 0.0]))
        layer.running_var.copy_(tensor([var, 1.0, 1.0]))
        layer.bias.copy_(tensor([bias, 0.0, -1e12]))
    right = 0 if sign > 0 else 1
    x = torch.zeros(1, 3, dtype=torch.float64)
    assert verdict(layer, x, right, 1e-13, "deterministic") not in ("MISCLASSIFIED", "ATTACKED")
    assert verdict(layer, x, 1 - right, 1e-13, "deterministic") != "CERTIFIED"


@pytest.mark.parametrize("constant", [1 + 9e-9, 16777217.0, 0.1, -1 / 3])
def test_numbers_in_forward_keep_their_last_bits(constant: float) -> None:
    """A Python number that float32 would round: as a factor and as a summand."""

    class Scaled(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * constant + constant

    bound = ll.global_lipschitz(Scaled(), (2,), guarantee="deterministic")
    assert Fraction(bound) >= abs(Fraction(constant))
    x = tensor([[0.0, -constant * 1e-12]])
    lead = -constant * constant * 1e-12
    assert verdict(Scaled(), x, int(lead > 0), 1e-30, "deterministic") != "MISCLASSIFIED"


def _amplifier(times: int) -> list[nn.Module]:
    return [layer for _ in range(times) for layer in (linear([[1e58]]), nn.ReLU())]


@pytest.mark.parametrize("guarantee", PROOFS)
@pytest.mark.parametrize(
    ("at", "activation", "times"),
    [(-720.0, nn.Sigmoid(), 6), (-800.0, nn.Sigmoid(), 7), (-2000.0, nn.Softplus(), 16), (-800.0, nn.Softplus(3.0), 19)],
)
def test_smooth_units_below_the_smallest_number(at: float, activation: nn.Module, times: int, guarantee: str) -> None:
    """e^-800 is 0 in float64, and layers of 1e58 make it the largest logit."""
    model = nn.Sequential(linear([[1.0]], [at]), activation, *_amplifier(times), linear([[1.0], [0.0]], [0.0, 0.5]))
    assert verdict(model, tensor([[0.0]]), 1, 1e-9, guarantee) == "UNKNOWN"


def test_slope_below_the_smallest_number() -> None:
    """LeakyReLU(1e-320) at -1e-10, made large again by later layers."""
    layers = [
        linear([[1.0]], [-1e-10]),
        nn.LeakyReLU(1e-320),
        linear([[-1e58]]),
        *_amplifier(6),
        linear([[1.0], [0.0]], [0.0, 0.5]),
    ]
    assert verdict(nn.Sequential(*layers), tensor([[0.0]]), 1, 1e-12, "deterministic") == "UNKNOWN"


@pytest.mark.parametrize("eps", [1e-150, 1e-200, 1e-300, 5e-324])
def test_no_false_attack_where_squares_vanish(eps: float) -> None:
    """Norms of points that near are 0 in float64, so everything looks as if it were inside the ball."""
    model = linear([[0.0] * 100, [0.1] * 100], [2 * eps, 0.0])
    assert verdict(model, torch.zeros(1, 100, dtype=torch.float64), 0, eps, "deterministic") in ("UNKNOWN", "CERTIFIED")


# Masks -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("guarantee", PROOFS)
@pytest.mark.parametrize("shift", [-1.5, -1.0, -0.5, -0.0, 0.5, 1.0])
@pytest.mark.parametrize("kind", ["relu", "theta_zero", "theta", "hardtanh", "narrow", "maxmin"])
def test_boxes_that_end_exactly_at_a_threshold(kind: str, shift: float, guarantee: str) -> None:
    """Dyadic weights put the ends of the box on 0 and on theta, where units are just constant or just not."""
    activations: dict[str, nn.Module] = {
        "relu": nn.ReLU(),
        "theta_zero": ll.ReLUTheta(2, init=0.0).double(),
        "theta": ll.ReLUTheta(2, init=0.5).double(),
        "hardtanh": nn.Hardtanh(-0.5, 0.5),
        "narrow": nn.Hardtanh(0.5, math.nextafter(0.5, 1.0)),
        "maxmin": ll.MaxMin(),
    }
    head = linear([[2.0, -1.0], [-1.0, 1.0]], [0.25, 0.0])
    layers = [linear([[1.0], [-0.5]], [shift, -shift / 2]), activations[kind], head]
    for x in (0.0, 0.5):
        y = int(nn.Sequential(*layers)(tensor([[x]])).argmax())
        for eps in (1.0, 0.5, 0.25):
            hold_against_exact(layers, x, y, eps, guarantee)
            if eps == 1.0:
                hold_against_exact(layers, x, y, eps, guarantee, domain=(x, 2.0))


@pytest.mark.parametrize(
    "settings", [(2, 3, 0, False), (3, 3, 1, False), (2, 3, 0, True), (3, 4, 1, True), (1, 2, 0, False)]
)
@pytest.mark.parametrize("size", [4, 5, 7])
def test_max_pooling_with_gaps_padding_and_ties(settings: tuple[int, int, int, bool], size: int) -> None:
    """No Jacobian inside the ball is larger than the local bound, ties and unseen pixels included."""
    kernel, stride, padding, ceil_mode = settings
    pool = nn.MaxPool2d(kernel, stride, padding, ceil_mode=ceil_mode)
    model = nn.Sequential(nn.Unflatten(1, (1, size, size)), pool, nn.Flatten())
    generator = torch.Generator().manual_seed(size)
    x = torch.randint(-2, 3, (1, size * size), generator=generator).double()
    bound = float(ll.local_lipschitz(model, x, 0.5, guarantee="deterministic")[0])
    for _ in range(8):
        noise = torch.randn(x.shape, generator=generator, dtype=torch.float64)
        jacobian = torch.autograd.functional.jacobian(model, x + 0.5 * noise / noise.norm())
        assert float(torch.linalg.matrix_norm(jacobian.reshape(-1, size * size), 2)) <= bound


@pytest.mark.parametrize(
    ("activation", "slope"),
    [
        (nn.LeakyReLU(3.0), lambda z: 3.0 if z < 0 else 1.0),
        (nn.ELU(2.5), lambda z: 2.5 * math.exp(z) if z < 0 else 1.0),
        (nn.ELU(0.0), lambda z: 0.0 if z < 0 else 1.0),
        (nn.Softplus(beta=50.0), lambda z: 1 / (1 + math.exp(-50 * z)) if z > -10 else math.exp(50 * z)),
        (nn.Tanh(), lambda z: 1 / math.cosh(z) ** 2),
        (nn.Sigmoid(), lambda z: 1 / (4 * math.cosh(z / 2) ** 2)),
    ],
)
@pytest.mark.parametrize("at", [-30.0, -0.5, -1e-9, 0.0, 1e-9, 0.5, 30.0])
def test_slopes_at_the_ends_of_the_interval(activation: nn.Module, slope: Callable[[float], float], at: float) -> None:
    """The steepest point of the ball is one of its ends or 0: the bound may not miss it."""
    for eps in (1e-9, 0.5, 1.0):
        bound = float(ll.local_lipschitz(nn.Sequential(activation), tensor([[at]]), eps, guarantee="deterministic")[0])
        points = [at - eps, at, at + eps, *([-1e-300, 0.0] if abs(at) < eps else [])]
        assert bound * (1 + 1e-14) >= max(slope(z) for z in points)


# The mathematics -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("steps", [0, 1, 3, 30])
@pytest.mark.parametrize("scale", [1e-60, 1.0, 1e60])
def test_support_is_a_bound_after_any_number_of_steps(steps: int, scale: float) -> None:
    """Points of box and ball, some at zero-width sides, never exceed the dual."""
    generator = torch.Generator().manual_seed(steps)
    direction = torch.randn(4, 3, 6, generator=generator, dtype=torch.float64)
    lower = -torch.rand(4, 1, 6, generator=generator, dtype=torch.float64) * scale
    upper = torch.rand(4, 1, 6, generator=generator, dtype=torch.float64) * scale
    lower[:, :, 0], upper[:, :, 1] = 0.0, 0.0
    radius = tensor([0.0, 0.3, 1.0, 5.0])[:, None] * scale
    value = support(direction, lower, upper, radius, steps, slack=1e-14)
    for _ in range(200):
        noise = torch.randn(4, 1, 6, generator=generator, dtype=torch.float64)
        ray = (noise * scale * 2 + direction * scale).clamp(lower, upper)
        point = ray * (radius[..., None] / ray.norm(dim=-1, keepdim=True).clamp(min=1e-300)).clamp(max=1)
        assert bool(((direction * point).sum(-1) <= value * (1 + 1e-12) + 1e-13 * radius).all())


@pytest.mark.parametrize(("n", "steps"), [(300, 8), (300, 20), (60, 8)])
def test_lanczos_fails_no_more_often_than_it_says(n: int, steps: int) -> None:
    """An isolated top eigenvalue and few steps, with a failure probability large enough to be seen."""
    eigenvalues = torch.rand(n, generator=torch.Generator().manual_seed(n), dtype=torch.float64)
    eigenvalues[0] = 1.03
    op = Masked(Dense(lambda: torch.diag(eigenvalues.sqrt())), None, None)
    like = torch.ones(1, dtype=torch.float64)
    values = [float(LanczosNorm(0.5, max_steps=steps, seed=s)(op, NormKey(0, 0, ""), like)) for s in range(80)]
    assert sum(value < 1.03**0.5 for value in values) <= 40


@pytest.mark.parametrize("guarantee", PROOFS)
def test_one_sample_does_not_change_the_bound_of_another(guarantee: str) -> None:
    """Huge, tiny and infinite neighbours in the batch, with eps from 0 to 1e300: the same verdicts as alone."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3)).double()
    x = torch.randn(6, 4, dtype=torch.float64) * tensor([1.0, 1e200, 1e-200, 1.0, float("inf"), 1.0])[:, None]
    eps = [0.05, 1.0, 1e-300, 1e300, 0.1, 0.0]
    y = model(x).nan_to_num().argmax(1)
    together = ll.certify(model, x, y, eps, guarantee=guarantee, batch_size=6)
    alone = [ll.certify(model, x[i : i + 1], y[i : i + 1], eps[i], guarantee=guarantee).verdicts[0] for i in range(6)]
    assert together.verdicts == alone
    assert str(alone[3]) != "CERTIFIED"
    assert str(alone[4]) == "UNKNOWN"


@pytest.mark.parametrize("guarantee", PROOFS)
def test_equal_logits_are_never_certified(guarantee: str) -> None:
    """All logits equal, with 2 and with 1000 classes: a tie is not a prediction."""
    for classes in (2, 1000):
        model = linear([[1.0, -1.0]] * classes, [1e15] * classes)
        assert verdict(model, tensor([[0.3, 0.4]]), 1, 0.0, guarantee) == "UNKNOWN"


class Tangled(nn.Module):
    """One module used twice, a skip of the input to the last layer, scaling by 0 and by negative numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.shared, self.head, self.act = nn.Linear(3, 3), nn.Linear(3, 3), nn.LeakyReLU(2.0)

    def forward(self, x: Tensor) -> Tensor:
        z = self.act(self.shared(x))
        z = self.act(self.shared(z) - 0.5 * z) * -2.0
        return self.head(z) - 3 * x + z * 0.0 + self.head(x) / -4


@pytest.mark.parametrize("guarantee", PROOFS)
@pytest.mark.parametrize("seed", range(3))
def test_shared_modules_and_skips_to_the_last_layer(seed: int, guarantee: str) -> None:
    """Jacobians in the ball against the local bound, and a search on the sphere against the certified radius."""
    torch.manual_seed(seed)
    model = Tangled().double()
    x = torch.randn(1, 3, dtype=torch.float64)
    y = model(x).argmax(1)
    radius = float(ll.certified_radius(model, x, y, guarantee=guarantee)[0])
    bound = float(ll.local_lipschitz(model, x, radius, guarantee=guarantee)[0])
    noise = torch.randn(2000, 3, dtype=torch.float64)
    points = x + radius * noise / noise.norm(dim=1, keepdim=True)
    assert radius > 0
    assert bool((model(points).argmax(1) == y).all())
    for point in points[:20]:
        jacobian = torch.autograd.functional.jacobian(model, point[None]).reshape(3, 3)
        assert float(torch.linalg.matrix_norm(jacobian, 2)) <= bound


@pytest.mark.parametrize(
    "pool",
    [
        nn.AvgPool2d(3, 2, 1, ceil_mode=True),
        nn.AvgPool2d(2, 3, ceil_mode=True, count_include_pad=False),
        nn.AvgPool2d(3, 3, 1, divisor_override=-2),
        nn.AvgPool2d((1, 3), (2, 1), (0, 1), count_include_pad=False),
    ],
)
def test_average_pooling_at_its_borders(pool: nn.Module) -> None:
    """Counts that differ at the border, a negative divisor: the norm against singular values."""
    model = nn.Sequential(pool, nn.Flatten())
    jacobian = torch.autograd.functional.jacobian(model, torch.zeros(1, 2, 5, 5, dtype=torch.float64))
    true = float(torch.linalg.matrix_norm(jacobian.reshape(-1, 50), 2))
    for guarantee in PROOFS:
        bound = ll.global_lipschitz(model, (2, 5, 5), guarantee=guarantee)
        assert true * (1 - 1e-14) <= bound <= true * 1.01


# Lowering --------------------------------------------------------------------------------------------------------------


class Overwriting(nn.Module):
    """Clips a value in place at thresholds that the comparison's samples never reach, and reads it again."""

    def __init__(self, how: str):
        super().__init__()
        self.how, self.clip = how, nn.Hardtanh(-1e4, 1e4, inplace=True)
        self.head = linear([[1.0, 0.0], [0.0, 0.0]], [0.0, 1.5e4])

    def forward(self, x: Tensor) -> Tensor:
        z = x * 1.0
        if self.how == "module":
            self.clip(z)
        elif self.how == "positional":
            F.hardtanh(z, -1e4, 1e4, True)
        else:
            F.hardtanh(z, -1e4, 1e4, inplace=True)
        return self.head(z)


@pytest.mark.parametrize("how", ["module", "positional", "named"])
def test_overwritten_values_are_refused(how: str) -> None:
    """The graph shows the head on the unclipped value; the module computes it on the clipped one."""
    with pytest.raises(ll.UnsupportedLayer, match="overwrites"):
        ll.certify(Overwriting(how), tensor([[2e4, 0.0]]), torch.tensor([0]), 1.0)


class Odd(nn.Module):
    """A network with one step that no rule describes."""

    def __init__(self, step: Callable[[Tensor], Tensor]):
        super().__init__()
        self.step, self.head = step, linear([[1.0, 0.0], [0.0, 1.0]])

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.step(x))


@pytest.mark.parametrize(
    "step",
    [
        lambda x: torch.where(x > 1e6, -x, x),
        lambda x: x.clamp(-1e6, 1e6),
        lambda x: x.squeeze(0),
        lambda x: x + 1e-6 * x.size(0),
        lambda x: x + 1e-6 * torch.randn(2),
        lambda x: torch.div(x, 1.0, rounding_mode="trunc"),
        lambda x: x.flip(1),
        lambda x: x * x.detach(),
        lambda x: F.softplus(x, 1.0, 5.0),
        lambda x: F.leaky_relu(x, -0.1),
        lambda x: F.elu(x, -1.0),
        lambda x: F.dropout(x, 1e-9),
        lambda x: x.view(torch.float64) if x.dtype == torch.int64 else x.data,
    ],
)
def test_steps_that_differ_elsewhere_are_refused(step: Callable[[Tensor], Tensor]) -> None:
    """Each agrees with some supported network on ordinary samples or nearly so."""
    with pytest.raises(ll.UnsupportedLayer):
        ll.lower(Odd(step), (2,))
