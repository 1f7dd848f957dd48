"""Attempts to make slopes, block proofs, batches or float32 claims say something false, held against exact arithmetic."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from fractions import Fraction

import pytest
import torch
from torch import Tensor, nn

import locallip as ll
from locallip.bounds import Trace, pullback, worst_logits
from locallip.bounds.pullback import Pullback, Way
from locallip.certify.prover import Prover
from locallip.network import Network, UnsupportedLayer
from locallip.norms import CholeskyNorm, LanczosNorm, NormKey, cholesky
from locallip.ops import Compose, Conv, Diagonal, Identity, LinearOp, Masked, Sum
from tests.test_attacker import _number, linear, tensor

U = Fraction(1, 2**53)
Vector = list[Fraction]


# Sums over many branches -----------------------------------------------------------------------------------------------


class Branches(nn.Module):
    """sum_k s_k clip(x, -1, 1), one stage per k, all but the first and the last smaller than half a unit of the sum."""

    def __init__(self, scales: list[float], behind: nn.Module):
        super().__init__()
        self.scales, self.act, self.behind = scales, nn.Hardtanh(), behind

    def forward(self, x: Tensor) -> Tensor:
        out = self.act(x) * self.scales[0]
        for scale in self.scales[1:]:
            out = out + self.act(x) * scale
        return self.behind(out)


def test_many_branches_before_a_threshold() -> None:
    """Each of 450 branches adds less than rounding shows; together they lift a unit over its threshold."""
    half, small = 0.5, 0.99 * 2.0**-53
    total = Fraction(half) * (1 + 450 * Fraction(small))
    low, bias = (float(Fraction(half) * (1 + k * U)) for k in (240, 400))
    model = Branches([1.0] + [small] * 450, nn.Sequential(nn.Hardtanh(low, 100.0), linear([[1.0], [0.0]], [0.0, bias])))
    exact = Fraction(bias) - max(total, Fraction(low))
    assert exact < 0  # so that class 0 wins at x' = 0.5
    prover = Prover(model, (1,), "deterministic", method="local")
    margin = prover.margin(tensor([[0.0]]).repeat(2, 1), torch.tensor([1, 1]), tensor([half, half / 2]), local="none").worst
    assert Fraction(margin[0].item()) <= exact
    assert margin[1].item() > 0  # nothing is lifted over it in half of the ball


def test_many_branches_that_cancel_on_the_way_back() -> None:
    """Slopes of 1 and -1 meet at the input, and 400 that are smaller than half a unit of 1 come between them."""
    small = 0.99 * 2.0**-53
    model = Branches([-1.0] + [small] * 400 + [1.0], linear([[1.0], [0.0]]))
    prover = Prover(model, (1,), "deterministic")
    trace = prover.trace(tensor([[0.0]]), tensor([0.5]), local="none")
    with torch.no_grad():
        way = Way(Pullback(prover.network, trace), *(torch.tensor([k]) for k in (0, 0, 1)), torch.float64, outward=True)
        rise = way.value([torch.ones_like(slope) for slope in way.line_slopes()])
    assert Fraction(rise.item()) >= 400 * Fraction(small) / 2
    assert rise.item() < 1e-11  # the way back sees that 1 and -1 cancel


# Random networks in exact arithmetic -----------------------------------------------------------------------------------


def _layer(rng: random.Random, ins: int, outs: int) -> nn.Linear:
    """Scales from 1e-100 to 1e50 and biases that are much larger or smaller than what is added to them."""
    scale = rng.choice([1.0, 1.0, 1.0, 1e6, 1e-6, 1e-30, 1e30, 1e-100, 1e50])
    shift = rng.choice([0.0, 1.0, 1.0, scale, 1e8, 1e15, 1e-16, 1e-300])
    weight = [[_number(rng, scale) for _ in range(ins)] for _ in range(outs)]
    return linear(weight, [_number(rng, shift) for _ in range(outs)])


def _activation(rng: random.Random, width: int) -> nn.Module:
    kind = rng.choice(["relu", "hardtanh", "theta", "maxmin", "clipped", "leaky"])
    if kind == "theta":
        theta = ll.ReLUTheta(width).double()
        _fill(theta.raw_theta, lambda: rng.choice([0.0, 1.0, -1.0, 1e-8, 5e-324, 1e300, rng.gauss(0, 1)]))
        return theta
    if kind == "clipped":
        clipped = ll.ClippedMaxMin(width // 2).double()
        for thresholds in (clipped.upper, clipped.lower):
            _fill(thresholds, lambda: rng.choice([0.0, 1.0, -1.0, rng.gauss(0, 1)]))
        return clipped
    if kind == "hardtanh":
        return nn.Hardtanh(-rng.choice([1.0, 1e-8, 1e8]), rng.choice([1.0, 1e-9, 1e9]))
    return {"relu": nn.ReLU(), "maxmin": ll.MaxMin(), "leaky": nn.LeakyReLU(rng.choice([0.0, 0.1, 2.0]))}[kind]


def _fill(values: nn.Parameter, draw: Callable[[], float]) -> None:
    with torch.no_grad():
        values.copy_(tensor([draw() for _ in range(values.numel())]))


class Wild(nn.Module):
    """Dense layers, some with a skip around them, and now and then a way from the input to the logits."""

    def __init__(self, rng: random.Random, ins: int, classes: int):
        super().__init__()
        width, depth = rng.choice([2, 4]), rng.choice([1, 1, 2, 3, 5])
        self.layers = nn.ModuleList([_layer(rng, ins if k == 0 else width, width) for k in range(depth)])
        self.acts = nn.ModuleList([_activation(rng, width) for _ in range(depth)])
        self.skips = [k > 0 and rng.random() < 0.4 for k in range(depth)]
        self.last, self.direct = _layer(rng, width, classes), _layer(rng, ins, classes) if rng.random() < 0.3 else None

    def forward(self, x: Tensor) -> Tensor:
        z = x
        for layer, act, skip in zip(self.layers, self.acts, self.skips, strict=True):
            z = act(layer(z)) + z if skip else act(layer(z))
        return self.last(z) if self.direct is None else self.last(z) + self.direct(x)

    def exact(self, x: Vector) -> Vector:
        z = x
        for layer, act, skip in zip(self.layers, self.acts, self.skips, strict=True):
            new = _act(act, _affine(layer, z))
            z = [a + b for a, b in zip(new, z, strict=True)] if skip else new
        out = _affine(self.last, z)
        return out if self.direct is None else [a + b for a, b in zip(out, _affine(self.direct, x), strict=True)]


def _affine(layer: nn.Module, z: Vector) -> Vector:
    rows, bias = layer.weight.tolist(), layer.bias.tolist()  # type: ignore[union-attr, operator]
    return [
        sum((Fraction(w) * v for w, v in zip(row, z, strict=True)), Fraction(b)) for row, b in zip(rows, bias, strict=True)
    ]


def _act(act: nn.Module, z: Vector) -> Vector:
    if isinstance(act, (ll.MaxMin, ll.ClippedMaxMin)):
        pairs = list(zip(z[: len(z) // 2], z[len(z) // 2 :], strict=True))
        high, low = [max(pair) for pair in pairs], [min(pair) for pair in pairs]
        if isinstance(act, ll.ClippedMaxMin):
            high = [min(v, Fraction(t)) for v, t in zip(high, act.upper.tolist(), strict=True)]
            low = [max(v, Fraction(t)) for v, t in zip(low, act.lower.tolist(), strict=True)]
        return high + low
    if isinstance(act, nn.LeakyReLU):
        return [v if v > 0 else v * Fraction(act.negative_slope) for v in z]
    if isinstance(act, ll.ReLUTheta):
        return [min(max(v, Fraction(0)), Fraction(t)) for v, t in zip(z, act.theta.tolist(), strict=True)]
    low_, high_ = (Fraction(act.min_val), Fraction(act.max_val)) if isinstance(act, nn.Hardtanh) else (Fraction(0), None)
    return [max(v, low_) if high_ is None else min(max(v, low_), high_) for v in z]


def _points(rng: random.Random, model: Wild, x: list[float], eps: float, domain: tuple[float, float] | None) -> list[Vector]:
    """The center, the ends of the axes, steepest and random directions; all of them exactly inside."""
    ins = len(x)
    moves = [[s * eps * (k == j) for k in range(ins)] for j in range(ins) for s in (1, -1)]
    leaf = tensor([x]).requires_grad_()
    logits = model(leaf)[0]
    for other in range(len(logits)):
        (slope,) = torch.autograd.grad(logits[other] - logits.max(), leaf, retain_graph=True)
        length = float(slope.norm())
        if 0 < length < math.inf:
            moves.append([eps * float(s) / length for s in slope[0]])
    moves += [[eps * rng.gauss(0, 1) / ins for _ in range(ins)] for _ in range(4)]
    center = [Fraction(v) for v in x]
    found = [center]
    for move in moves:
        for share in (Fraction(1), 1 - Fraction(1, 2**50), Fraction(1, 3)):
            step = [share * Fraction(m) for m in move]
            point = [c + s for c, s in zip(center, step, strict=True)]
            if domain is not None:
                point = [min(max(p, Fraction(domain[0])), Fraction(domain[1])) for p in point]
            if sum((p - c) ** 2 for p, c in zip(point, center, strict=True)) <= Fraction(eps) ** 2:
                found.append(point)
    return found


def _slopes(kind: str) -> Callable[..., tuple[Tensor, list[Tensor]]]:
    """Slopes in place of those that are searched: psi's own, the middle, or any."""

    def choose(search: Way, *args: object) -> tuple[Tensor, list[Tensor]]:
        bends, rows = search.in_turn, torch.arange(len(search.samples))
        if kind == "random":
            return rows, [bend.low + (bend.high - bend.low) * torch.rand_like(bend.low) for bend in bends]
        return rows, [bend.slope if kind == "own" else bend.middle for bend in bends]

    return choose


def _claims(network: Network, trace: Trace, y: Tensor, monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """Worst logits of every depth, number of steps and kind of slopes."""
    options = [{"depth": depth, "slope_steps": 3} for depth in (None, 1, 2, 99)] + [{"slope_steps": 0}]
    found = [worst_logits(network, trace, y, outward=True, **option).worst for option in options]  # type: ignore[arg-type]
    for kind in ("own", "middle", "random"):
        with monkeypatch.context() as patch:
            patch.setattr(pullback.Way, "searched", _slopes(kind))
            found.append(worst_logits(network, trace, y, outward=True, depth=99).worst)
    return [worst.detach() for worst in found]


@pytest.mark.parametrize("part", range(2))
def test_worst_logits_of_wild_networks_are_never_below_exact_ones(part: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """No point of the ball raises a class by more than any depth, any steps and any slopes allow, to the last bit."""
    torch.manual_seed(part)
    tight = certified = 0
    for seed in range(6 * part, 6 * part + 6):
        rng = random.Random(seed)
        ins, classes = rng.choice([1, 1, 2, 3]), rng.choice([2, 3])
        model = Wild(rng, ins, classes)
        domain = rng.choice([None, None, (0.0, 1.0)])
        values = [0.0, 1.0, rng.random()] if domain else [0.0, 1.0, rng.gauss(0, 1), 1e8, 1e-10]
        rows = [[rng.choice(values) for _ in range(ins)] for _ in range(3)]
        radii = [rng.choice([0.0, 1e-300, 1e-12, 1e-3, 0.1, 1.0, 1e6, 2.0 ** -rng.randint(0, 40)]) for _ in range(3)]
        x, eps = tensor(rows), tensor(radii)
        y = model(x).argmax(1)
        exact = [
            [model.exact(point) for point in _points(rng, model, row, e, domain)] for row, e in zip(rows, radii, strict=True)
        ]
        prover = Prover(model, (ins,), "deterministic")
        for local in ("none", "all"):
            trace = prover.trace(x, eps, local=local, domain=domain)
            for worst in _claims(prover.network, trace, y, monkeypatch):
                for row, logits, label in zip(worst.tolist(), exact, y.tolist(), strict=True):
                    if not all(map(math.isfinite, row)):
                        continue
                    for i in set(range(classes)) - {label}:
                        claim, true = Fraction(row[i]) - Fraction(row[label]), max(z[i] - z[label] for z in logits)
                        assert true <= claim
                        tight += claim - true <= abs(claim) / 10**9
        result = ll.certify(model, x, y, eps, guarantee="high_probability", input_domain=domain, attack_steps=0)
        for proved, margin, logits, label in zip(result.certified, result.margin, exact, y.tolist(), strict=True):
            if proved:
                certified += 1
                assert Fraction(margin.item()) <= min(z[label] - z[i] for z in logits for i in set(range(classes)) - {label})
    assert tight > 20
    assert certified > 2


@pytest.mark.parametrize("seed", range(3))
def test_radii_end_before_the_exact_ones(seed: int) -> None:
    """One input: at the ends of the interval that is reported as proved, and within it, the label leads exactly."""
    rng = random.Random(1000 + seed)
    model = Wild(rng, 1, 2)
    rows = [[rng.choice([0.0, 1.0, rng.gauss(0, 1)])] for _ in range(4)]
    y = model(tensor(rows)).argmax(1)
    radii = ll.certified_radius(model, tensor(rows), y, guarantee="deterministic", batch_size=3).tolist()
    for (center,), radius, label in zip(rows, radii, y.tolist(), strict=True):
        for share in range(-8, 9):
            z = model.exact([Fraction(center) + Fraction(radius) * Fraction(share, 8)])
            assert z[label] > z[1 - label] or radius == 0
    assert max(radii) > 0


# Numbers that cancel ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["slopes", "deeper", "center", "behind"])
@pytest.mark.parametrize("order", [(1e16, 1.0, -1e16), (1.0, 1e16, -1e16), (1e16, -1e16, 1.0)])
def test_numbers_that_cancel_on_the_way_back(order: tuple[float, ...], where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """1e16 + 1 - 1e16 is 1, and 0 in float64 in this order: as a slope, at the center, and in front of another layer."""
    model = Wild(random.Random(0), 1, 2)
    ones, column, zero = [[1.0] * 3, [0.0] * 3], [[v] for v in order], [0.0] * 3
    first = linear([[2.0**-10]] * 3, list(order)) if where in ("center", "behind") else linear(column, zero)
    layers, last = [first], linear(ones, [0.0, 0.5])
    if where in ("deeper", "behind"):
        layers, last = [first, linear([[1.0] * 3], [0.0])], linear([[1.0], [0.0]], [0.0, 0.5])
    model.layers, model.acts = nn.ModuleList(layers), nn.ModuleList([nn.Hardtanh(-1e20, 1e20) for _ in layers])
    model.skips, model.last, model.direct = [False] * len(layers), last, None
    prover = Prover(model, (1,), "deterministic")
    trace = prover.trace(tensor([[0.0]]), tensor([1.0]))
    highest = max(z[0] - z[1] for z in (model.exact([Fraction(k)]) for k in (-1, 0, 1)))
    assert highest >= Fraction(1, 2)
    for worst in _claims(prover.network, trace, torch.tensor([1]), monkeypatch):
        assert Fraction(worst[0, 0].item()) - Fraction(worst[0, 1].item()) >= highest


# Units on kinks --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["relu", "theta", "theta_zero", "hardtanh", "maxmin", "clipped", "clipped_equal"])
@pytest.mark.parametrize("at", [-0.25, 0.0, 0.25])
def test_units_that_start_or_end_on_their_kinks(kind: str, at: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Centers and ends of boxes lie on thresholds, pairs are equal at the center, and all numbers are powers of two."""
    acts: dict[str, nn.Module] = {
        "relu": nn.ReLU(),
        "theta": ll.ReLUTheta(2, init=0.25).double(),
        "theta_zero": ll.ReLUTheta(2, init=0.0).double(),
        "hardtanh": nn.Hardtanh(0.0, 0.25),
        "maxmin": ll.MaxMin(),
        "clipped": ll.ClippedMaxMin(1, upper=0.25, lower=-0.25).double(),
        "clipped_equal": ll.ClippedMaxMin(1, upper=0.0, lower=0.0).double(),
    }
    model = Wild(random.Random(0), 1, 2)
    model.layers, model.skips, model.direct = nn.ModuleList([linear([[1.0], [-1.0]], [at, at])]), [False], None
    model.acts = nn.ModuleList([acts[kind]])
    gap = 0
    for weight in ([1.0, 0.0], [0.0, 1.0], [1.0, 1.0], [-1.0, 1.0], [2.0, -1.0]):
        model.last = linear([weight, [0.0, 0.0]], [0.0, 1.0])
        prover = Prover(model, (1,), "deterministic")
        trace = prover.trace(tensor([[0.0]]), tensor([0.25]))
        exact = [model.exact([Fraction(k, 64)]) for k in range(-16, 17)]
        true = max(z[0] - z[1] for z in exact)
        for worst in _claims(prover.network, trace, torch.tensor([1]), monkeypatch):
            claim = Fraction(worst[0, 0].item()) - Fraction(worst[0, 1].item())
            assert true <= claim
            gap += claim - true < Fraction(1, 10**12)
    assert gap > 0


# Norms proved in blocks ------------------------------------------------------------------------------------------------


def _convolution(rng: random.Random, shape: tuple[int, ...], same: bool = False) -> Conv | None:
    dims, channels = len(shape) - 1, shape[0]
    groups = rng.choice([k for k in (1, 2, channels) if channels % k == 0])
    out = channels if same else groups * rng.choice([1, 2, 3])
    kernel = [rng.choice([1, 3] if same else [1, 2, 3]) for _ in range(dims)]
    dilation, stride = (
        [rng.choice([1, 1, 2]) for _ in range(dims)],
        [1 if same else rng.choice([1, 1, 2, 3]) for _ in range(dims)],
    )
    extent = [d * (k - 1) + 1 for d, k in zip(dilation, kernel, strict=True)]
    sides = [((e - 1) // 2,) * 2 if same else (rng.randint(0, 4), rng.randint(0, 4)) for e in extent]
    if any(n + a + b < e for n, (a, b), e in zip(shape[1:], sides, extent, strict=True)):
        return None
    weight = torch.randn(out, channels // groups, *kernel, dtype=torch.float64) * rng.choice([1, 1, 1e-8, 1e8])
    return Conv(lambda: weight, shape, stride, sides, dilation, groups)


def _operator(rng: random.Random) -> LinearOp | None:
    shape = (rng.choice([1, 2, 4]), *[rng.choice([1, 3, 5, 7]) for _ in range(rng.choice([1, 2, 2]))])
    kind = rng.choice(["plain", "residual", "two", "scaled"])
    first = _convolution(rng, shape, same=kind == "residual")
    if first is None or kind == "plain":
        return first
    if kind == "residual":
        second = _convolution(rng, shape, same=True)
        assert second is not None
        return Sum([Identity(shape), first, Compose(second, first)])
    if kind == "two":
        second = _convolution(rng, tuple(first.out_shape))
        return None if second is None else Compose(second, first)
    factor = torch.rand(first.out_shape[0], *[1] * (len(shape) - 1), dtype=torch.float64)
    return Compose(Diagonal(lambda dtype: factor.to(dtype), first.out_shape), first)


@pytest.mark.parametrize("guess", [1.0, 0.9])
def test_norms_in_blocks_of_masked_convolutions_and_sums(guess: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Groups, strides, dilation, padding beyond the kernel, I + conv; samples that keep all, some, few or no units.

    A guess of the norm that is too small must be refuted by the factorization.
    """
    rng, blocks = random.Random(0), 0
    torch.manual_seed(0)
    key, rule, bracket = NormKey(0, 0, "layer"), CholeskyNorm(whole=0), LanczosNorm.bracket
    monkeypatch.setattr(LanczosNorm, "bracket", lambda *args: (guess * bracket(*args)[0], None))
    largest = cholesky._largest_eigenvalue
    monkeypatch.setattr(cholesky, "_largest_eigenvalue", lambda gram: guess**2 * largest(gram))
    share = torch.tensor([1.0, 0.5, 0.05, 0.0])
    for _ in range(50):
        op = _operator(rng)
        if op is None or max(op.in_shape.numel(), op.out_shape.numel()) > 300:
            continue
        rows, cols = (torch.rand(4, *shape) < share.reshape(-1, *[1] * len(shape)) for shape in (op.out_shape, op.in_shape))
        weights = cols * torch.rand(cols.shape, dtype=torch.float64)
        like = torch.ones(4, dtype=torch.float64)
        found = rule.norm(Masked(op, rows, weights), key, like)
        slabs = rule._slabs(op, key)
        blocks += slabs is not None and slabs.number > 2
        exact = torch.linalg.matrix_norm(
            op.materialize(like) * rows.flatten(1)[:, :, None] * weights.flatten(1)[:, None], ord=2
        )
        assert bool((found >= exact * (1 - 1e-14)).all())
        assert guess < 1 or bool((found <= exact * 1.01 + 1e-300).all())
    assert blocks > 5


# Rows of a batch -------------------------------------------------------------------------------------------------------


def _many() -> tuple[nn.Module, Tensor, Tensor, Tensor]:
    """Rows that different checks decide, radii from 1e-12 to 1e6, one row that is not finite, and rows twice."""
    torch.manual_seed(3)
    model = nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(64, 16), ll.MaxMin(), nn.Linear(16, 3)
    )
    x = torch.randn(24, 1, 4, 4)
    y = model(x).argmax(1)
    y[::7] = (y[::7] + 1) % 3
    eps = tensor([1e-12, 0.05, 0.1, 0.2, 0.4, 1e6] * 4)
    x[5, 0, 0, 0] = float("nan")
    x[20:], y[20:], eps[20:] = x[1:5], y[1:5], eps[1:5]
    return model.double(), x.double(), y, eps


def test_rows_keep_their_verdicts_in_any_order_and_batch() -> None:
    """What one row is told does not depend on the others: order, size of batches, memory layout, or company."""
    model, x, y, eps = _many()
    options = {"guarantee": "deterministic", "seed": 0, "attack_steps": 0}
    whole = ll.certify(model, x, y, eps, **options)
    assert len(set(whole.decided_by)) >= 4
    order = torch.randperm(len(x))
    for batch_size in (5, 64):
        wide = x[order].repeat_interleave(2, dim=3)[..., ::2]
        assert not wide.is_contiguous()
        other = ll.certify(model, wide, y[order], eps[order], batch_size=batch_size, **options)
        assert other.verdicts == [whole.verdicts[i] for i in order.tolist()]
        assert torch.equal(other.eps, whole.eps[order])
        sure = whole.certified[order]
        assert torch.allclose(other.margin[sure], whole.margin[order][sure], rtol=1e-3)
    assert whole.verdicts[20:] == whole.verdicts[1:5]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_short_weights_are_taken_as_they_are(dtype: torch.dtype) -> None:
    """A network in 16 bits and the same numbers in 64 have the same bounds, to the last bit."""
    torch.manual_seed(0)
    short = nn.Sequential(
        nn.Linear(3, 6), ll.ReLUTheta(6, init=0.3), nn.Linear(6, 4), ll.ClippedMaxMin(2), nn.Linear(4, 2)
    ).to(dtype)
    x, y = torch.randn(8, 3).to(dtype), torch.zeros(8, dtype=torch.long)
    options = {"guarantee": "deterministic", "attack_steps": 0}
    first = ll.certify(short, x, y, 0.1, **options)
    second = ll.certify(short.double(), x.double(), y, 0.1, **options)
    assert torch.equal(first.margin.nan_to_num(7.0), second.margin.nan_to_num(7.0))
    assert first.verdicts == second.verdicts


# The program in float32 ------------------------------------------------------------------------------------------------


class Cancelling(nn.Module):
    """Class 0 has (x + large) - large + lead, which float32 keeps few digits of, and class 1 has x."""

    def __init__(self, large: float, branches: int, lead: float):
        super().__init__()
        self.large, self.branches = large, branches
        self.act, self.last, self.direct = nn.Hardtanh(-1e9, 1e9), nn.Linear(1, 2), nn.Linear(1, 2, bias=False)
        with torch.no_grad():
            self.last.weight.copy_(torch.tensor([[1.0], [0.0]]))
            self.last.bias.copy_(torch.tensor([lead, 0.0]))
            self.direct.weight.copy_(torch.tensor([[0.0], [1.0]]))

    def forward(self, x: Tensor) -> Tensor:
        z = self.act(x + self.large)
        for _ in range(self.branches):
            z = z + self.act(x * 0.1) - self.act(x * 0.1)
        return self.last(z - self.large) + self.direct(x)


@pytest.mark.parametrize("large", [0.0, 1e3, 1e6])
@pytest.mark.parametrize("branches", [0, 4])
def test_leads_that_float32_loses_are_not_certified_for_it(large: float, branches: int) -> None:
    """The smaller the lead, the sooner float32 loses it; wherever it does, the certificate for float32 is not given."""
    x = torch.rand(64, 1, generator=torch.Generator().manual_seed(0))
    y, eps = torch.zeros(64, dtype=torch.long), torch.full((64,), 1e-12, dtype=torch.float64)
    given = lost = 0
    for power in range(-30, 0, 3):
        model = Cancelling(large, branches, max(large, 1.0) * 2.0**power)
        prover = Prover(model, (1,), "deterministic", deployed_dtype="float32")
        proved = prover.margin(x.double(), y, eps, local="none", slopes=False).worst > 0
        logits = model(x)
        keeps = logits[:, 0] > logits[:, 1]
        given, lost = given + int(proved.sum()), lost + int((~keeps).sum())
        assert not bool((proved & ~keeps).any())
    assert given > 0
    assert lost > 0


def test_a_variance_below_zero_is_refused() -> None:
    """var + eps cancels, and float32 has another eps: its program has logits that are off by a percent."""
    norm = nn.BatchNorm1d(2)
    norm.running_var.fill_(-1e-5 + 1e-11)  # type: ignore[union-attr, operator]
    model = nn.Sequential(norm, nn.Linear(2, 2)).eval()
    real = (norm.running_var.double() + norm.eps).rsqrt()  # type: ignore[union-attr, operator]
    assert bool((norm(torch.ones(1, 2)) / real - 1).abs().max() > 1e-3)
    with pytest.raises(UnsupportedLayer, match="negative running variance"):
        ll.certify(model, torch.ones(1, 2), torch.tensor([0]), 1e-9, deployed_dtype="float32")
