"""An eleventh round of attempts: lines and sharpened boxes against fractions and 60 digits, own layers, defaults of ONNX."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from fractions import Fraction
from itertools import pairwise
from pathlib import Path

import mpmath  # type: ignore[import-untyped]
import numpy as np
import pytest
import torch
from torch import Tensor, nn

import locallip as ll
from locallip.activations import Activation, Box, Clip, Increasing, MaxPool2d, SortPairs
from locallip.bounds import CeilingNorm, Trace, global_bound, propagate, relaxation
from locallip.network import Affine, Network, Stage
from locallip.norms import CholeskyNorm
from locallip.ops import Diagonal
from tests.onnx_graphs import Graph, written

DOUBLE = torch.float64
Domain = tuple[float, float] | None
#: Breakpoints of a segment beyond which no more are looked for.
MANY = 40


# Exact arithmetic along a segment ---------------------------------------------------------------------------------------


def exact(values: Tensor) -> np.ndarray:
    return np.vectorize(Fraction, otypes=[object])(values.detach().double().numpy())


class Exact:
    """A lowered network in fractions; all entries of its maps must be exact in float64."""

    def __init__(self, network: Network):
        none = torch.zeros(1, dtype=DOUBLE)
        self.stages = network.stages
        self.maps = [{k: exact(op.materialize(none)) for k, op in stage.terms.items()} for stage in self.stages]
        shapes = [(1, *stage.linear_shape) for stage in self.stages]
        offsets = [torch.as_tensor(stage.offset(none), dtype=DOUBLE) for stage in self.stages]
        self.offsets = [exact(b.expand(shape).flatten())[:, None] for b, shape in zip(offsets, shapes, strict=True)]

    def before(self, x: np.ndarray) -> list[np.ndarray]:
        """What stands before every activation, and the logits, for columns of x."""
        values, found = [x], []
        for stage, maps, offset in zip(self.stages, self.maps, self.offsets, strict=True):
            found.append(offset + sum(m.dot(values[k]) for k, m in maps.items()))
            if stage.activation is not None:
                values.append(_applied(stage, stage.activation, found[-1]))
        return found

    def along(self, x: np.ndarray, move: np.ndarray) -> list[np.ndarray]:
        """The same at x - move, x + move and wherever a unit has a kink between them."""
        places = [Fraction(-1), Fraction(0), Fraction(1)]
        for depth, stage in enumerate(self.stages[:-1]):
            found = self.before(x[:, None] + move[:, None] * np.array(places, dtype=object))[depth]
            for row in _bends(stage, stage.activation, found):
                for i, (a, b) in enumerate(pairwise(row)):
                    if a * b < 0:
                        places.append(places[i] + (places[i + 1] - places[i]) * a / (a - b))
            places = sorted(set(places))
            if len(places) > MANY:
                break
        return self.before(x[:, None] + move[:, None] * np.array(places, dtype=object))


def _ends(stage: Stage, clip: Clip) -> list[np.ndarray]:
    ends = [torch.as_tensor(v, dtype=DOUBLE).expand(stage.linear_shape).flatten() for v in clip.thresholds(DOUBLE)]
    return [exact(end.clamp(-1e300, 1e300))[:, None] for end in ends]


def _windows(stage: Stage, pool: MaxPool2d) -> list[list[int]]:
    numbers = torch.arange(stage.linear_shape.numel()).reshape(stage.linear_shape)
    (kernel, stride, padding), out = pool.geometry, pool.out_shape(stage.linear_shape)
    found = []
    for c, i, j in np.ndindex(*out):
        (top, left), (h, w) = ([n * s - p for n, s, p in zip((i, j), stride, padding, strict=True)], kernel)
        found.append(numbers[c, max(top, 0) : top + h, max(left, 0) : left + w].flatten().tolist())
    return found


def _applied(stage: Stage, activation: Activation, y: np.ndarray) -> np.ndarray:
    if isinstance(activation, Clip):
        low, high = _ends(stage, activation)
        return np.minimum(np.maximum(y, low), high)
    if isinstance(activation, SortPairs):
        first, second = np.split(y, 2)
        return np.concatenate([np.maximum(first, second), np.minimum(first, second)])
    if isinstance(activation, MaxPool2d):
        return np.stack([y[window].max(0) for window in _windows(stage, activation)])
    slope = Fraction(getattr(activation, "negative_slope", 1))  # PassThrough has none
    return np.where(y > 0, y, slope * y)


def _bends(stage: Stage, activation: Activation | None, y: np.ndarray) -> Iterator[np.ndarray]:
    """Rows that cross 0 where a unit has a kink."""
    if isinstance(activation, Clip):
        yield from (row for end in _ends(stage, activation) for row in y - end)
    elif isinstance(activation, SortPairs):
        yield from np.subtract(*np.split(y, 2))
    elif isinstance(activation, MaxPool2d):
        for window in _windows(stage, activation):
            yield from (y[a] - y[b] for a in window for b in window if a < b)
    else:
        yield from y


def into(move: np.ndarray, eps: float) -> np.ndarray:
    """A direction as a vector of fractions that is as long as eps, and not longer."""
    size = np.abs(move).max()
    found = np.array([Fraction(v) for v in (move / size if size > 0 else move)], dtype=object)
    length = sum(v * v for v in found)
    found = found * (Fraction(eps) / Fraction(math.sqrt(length)) if length else 1)
    while sum(v * v for v in found) > Fraction(eps) ** 2:
        found = found * (1 - Fraction(1, 2**54))
    return found


def steepest(network: Network, x: Tensor, draw: random.Random) -> np.ndarray:
    """The gradient of a unit or of a difference of logits at x, or any direction where it is 0."""
    x, depth = x.clone().requires_grad_(), draw.randrange(len(network.stages))
    values = [x]
    for stage in network.stages[:depth]:
        assert stage.activation is not None
        values.append(stage.activation(stage.linear(values)))
    units = network.stages[depth].linear(values).flatten()
    first, second = draw.randrange(len(units)), draw.randrange(len(units))
    value = units[first] - (units[second] if depth == len(network.stages) - 1 and first != second else 0)
    (grad,) = torch.autograd.grad(value, x)
    found = grad.flatten().numpy()
    return found if found.any() else np.array([draw.gauss(0, 1) for _ in found])


def segments(x: Tensor, move: np.ndarray, domain: Domain) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Middles and halves of segments through x, one that ends in both directions, or two that end in the domain."""
    here = exact(x.flatten())
    if domain is None:
        yield here, move
        return
    low, high = (np.array([Fraction(v)], dtype=object) for v in domain)
    for sign in (1, -1):
        half = (np.minimum(np.maximum(here + sign * move, low), high) - here) / 2
        yield here + half, half


def bounded(network: Network, x: Tensor, eps: float, domain: Domain, local: bool) -> tuple[Trace, Tensor]:
    """Sharpened boxes of one sample, and how far any logit can come up on any other, (C, C)."""
    radius = torch.tensor([eps], dtype=DOUBLE)
    with torch.no_grad():
        ceiling = global_bound(network, CholeskyNorm(), radius, outward=True)
        rule = CholeskyNorm() if local else CeilingNorm(ceiling)
        trace = propagate(network, x, radius, rule, ceiling=ceiling, input_domain=domain, outward=True, relax="boxes")
        assert trace.relaxation is not None
        assert trace.logits_error is not None
        assert trace.logits_box is not None
        count = trace.logits.shape[1]
        eye = torch.eye(count, dtype=DOUBLE)
        g = (eye[:, None] - eye[None]).reshape(1, -1, count)
        rises = trace.relaxation.rises(network.stages[-1], trace.logits, trace.logits_error, trace.logits_box, g)
    return trace, rises.reshape(count, count)


def escapes(trace: Trace, rises: Tensor, found: list[np.ndarray]) -> int:
    """Units outside their boxes and differences of logits beyond what was said of them, to the last bit."""
    count = 0
    for values, box in zip(found, trace.boxes, strict=False):
        lower, upper = (exact(end.flatten()) for end in box)
        count += int((values.min(1) < lower).sum() + (values.max(1) > upper).sum())
    logits, here = found[-1], exact(trace.logits[0])
    for i, j in np.ndindex(*rises.shape):
        count += int((logits[i] - logits[j]).max() - (here[i] - here[j]) > Fraction(float(rises[i, j])))
    return count


# Networks ---------------------------------------------------------------------------------------------------------------


class Skips(nn.Module):
    """One region with several readers, in four ways; a layer that is used twice in the second."""

    def __init__(self, inputs: int, width: int, act: Callable[[], nn.Module], kind: int):
        super().__init__()
        self.one, self.two, self.three = nn.Linear(inputs, width), nn.Linear(width, width), nn.Linear(width, width)
        self.skip, self.head, self.kind = nn.Linear(inputs, width), nn.Linear(width, 3), kind
        self.acts = nn.ModuleList(act() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        z = self.acts[0](self.one(x))
        y = self.acts[1](self.two(z))
        if self.kind == 0:
            y = self.acts[2](z + self.three(y))
        elif self.kind == 1:
            y = z + self.three(y)
            y = y - self.acts[2](self.two(y))
        elif self.kind == 2:
            y = self.acts[2](self.skip(x) + self.three(y) - z)
        else:
            y = self.acts[2](self.three(y)) + self.skip(x) - y
        return self.head(y)


def filled(model: nn.Module, draw: random.Random, scales: int) -> nn.Module:
    """Small whole numbers times 2^k with |k| up to `scales`, or plain normal ones for -1."""
    model = model.double().eval().requires_grad_(False)
    for p in model.parameters():
        for place in np.ndindex(*p.shape):
            power = draw.choice([0, 0, draw.randint(-scales, scales)]) if scales > 0 else 0
            p[place] = draw.gauss(0, 1) if scales < 0 else draw.randint(-8, 8) / 4 * 2.0**power
    return model


def dense(draw: random.Random) -> tuple[nn.Module, tuple[int, ...]]:
    inputs, width, slope = draw.choice([1, 1, 2, 3]), draw.choice([2, 4]), draw.choice([0.0, 0.5, 1.0, 8.0])
    kinds = (
        nn.ReLU,
        lambda: nn.Hardtanh(-0.5, 0.25),
        lambda: nn.LeakyReLU(slope),
        ll.MaxMin,
        lambda: ll.ReLUTheta((width,)),
    )
    act, kind = draw.choice(kinds), draw.randrange(5)
    layers = (nn.Linear(inputs, width), act(), nn.Linear(width, width), act(), nn.Linear(width, 3))
    model = nn.Sequential(*layers) if kind == 4 else Skips(inputs, width, act, kind)
    return filled(model, draw, draw.choice([0, 27, -1])), (inputs,)


def images(draw: random.Random) -> tuple[nn.Module, tuple[int, ...]]:
    """Two or three convolutions with odd windows, means and maxima between them."""
    start = shape = (draw.choice([1, 2]), draw.randint(3, 5), draw.randint(3, 5))
    layers: list[nn.Module] = []

    def add(layer: nn.Module) -> None:
        nonlocal shape
        shape = tuple(layer(torch.zeros(1, *shape)).shape[1:])
        layers.append(layer)

    for _ in range(draw.choice([2, 2, 3])):
        two = [draw.randint(1, 2) for _ in range(8)]
        if min(shape[1:]) < 3:
            two[4:6] = [2, 2]  # more padding than the map
        groups = draw.choice([1, shape[0]])
        geometry = {"stride": two[2:4], "padding": [2 * n for n in two[4:6]], "dilation": two[6:8], "groups": groups}
        add(nn.Conv2d(shape[0], 2, two[:2], **geometry))  # type: ignore[arg-type]
        if min(shape[1:]) > 3:
            add(nn.AvgPool2d((2, 1), stride=2))
        pool = nn.MaxPool2d(2, draw.choice([2, 3]), draw.choice([0, 1]), ceil_mode=draw.random() < 0.5)
        add(draw.choice([nn.ReLU(), nn.ReLU(), nn.LeakyReLU(2.0), ll.MaxMin(), pool if min(shape[1:]) > 1 else nn.ReLU()]))
    layers += [nn.Flatten(), nn.Linear(math.prod(shape), 2)]
    return filled(nn.Sequential(*layers), draw, draw.choice([0, 20])), start


@pytest.mark.parametrize(("build", "seed"), [(dense, s) for s in range(30)] + [(images, s) for s in range(12)])
def test_no_unit_leaves_its_sharpened_box_by_a_bit(
    build: Callable[[random.Random], tuple[nn.Module, tuple[int, ...]]], seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Boxes and rises against fractions at all kinks of a segment through the ball: scales of 2^-27 to 2^27, balls of 1e-14.

    Catches: a cost that is too small by 1e-13 of itself, lines of the wrong side, windows that are off by one, gaps over a
    ball that is too small, a reader of a region that is forgotten. Other tests allow 1e-12, and so miss the first.
    """
    draw = random.Random(seed)
    model, shape = build(draw)
    monkeypatch.setattr(relaxation, "SMALL", draw.choice([0.4, 5.0]))  # whole rows, or windows wherever there are any
    x = torch.tensor([draw.choice([draw.randint(0, 4) / 4, draw.random()]) for _ in range(math.prod(shape))], dtype=DOUBLE)
    x, eps = x.reshape(1, *shape), draw.choice([0.25, 1.0, 3.0, 1e-3, 1e-9, 1e-14])
    domain = draw.choice([None, None, (0.0, 1.0)])
    network = ll.lower(model, shape)
    trace, rises = bounded(network, x, eps, domain, draw.random() < 0.5)
    numbers = Exact(network)
    for _ in range(1 if shape == (1,) else 2):
        for middle, half in segments(x, into(steepest(network, x, draw), eps), domain):
            assert escapes(trace, rises, numbers.along(middle, half)) == 0


@pytest.mark.parametrize("method", ["lines", "auto"])
def test_radii_by_lines_hold_for_fractions(method: str) -> None:
    """Three inputs in one batch: within the radius that is proved the label leads everywhere on a segment, exactly.

    Catches: worst logits, errors of the center or domains that are put together wrongly behind sound lines.
    """
    positive = 0
    for seed in range(305, 309):
        draw = random.Random(seed)
        model, shape = dense(draw)
        x = torch.tensor([[draw.gauss(0, 1) for _ in range(shape[0])] for _ in range(3)], dtype=DOUBLE).clamp(-2, 2)
        y, domain = model(x).argmax(1), draw.choice([None, (-2.0, 2.0)])
        radii = ll.certified_radius(model, x, y, guarantee="deterministic", method=method, input_domain=domain)  # type: ignore[arg-type]
        network = ll.lower(model, shape)
        numbers = Exact(network)
        for one, label, radius in zip(x, y.tolist(), radii.tolist(), strict=True):
            if radius == 0:
                continue
            positive += 1
            for middle, half in segments(one, into(steepest(network, one[None], draw), radius), domain):
                logits = numbers.along(middle, half)[-1]
                assert all((logits[label] - logits[k]).min() > 0 for k in range(3) if k != label)
    assert positive > 8


def curved(draw: random.Random) -> tuple[nn.Module, Callable[[mpmath.mpf], mpmath.mpf]]:
    alpha, beta = draw.choice([0.0, 1e-8, 0.1, 3.0, 1e8]), draw.choice([1e-6, 0.01, 1.0, 20.0, 1e8])
    return draw.choice(
        [
            (nn.Tanh(), mpmath.tanh),
            (nn.Sigmoid(), lambda z: 1 / (1 + mpmath.exp(-z))),
            (nn.ELU(alpha), lambda z: z if z > 0 else alpha * mpmath.expm1(z)),
            (nn.Softplus(beta), lambda z: mpmath.log1p(mpmath.exp(beta * z)) / beta if beta * z < 1e4 else z),
            (nn.LeakyReLU(alpha), lambda z: z if z > 0 else alpha * z),
        ]
    )


def test_curves_stay_between_their_lines_to_the_last_bit() -> None:
    """Two curved layers of one input against 60 digits, at the ends, at kinks, and where slopes vanish.

    Weights of 1e-8 to 1e8, betas up to 1e8, slopes of 0 and 1e8, balls of 1e-14 to 1e6. Catches: a tangent on the wrong side
    of a curve, a slope or value whose rounding is not allowed for, a curve that ends within the box.
    """
    for seed in range(40):
        draw = random.Random(seed)
        act, phi = curved(draw)
        model = nn.Sequential(nn.Linear(1, 2), act, nn.Linear(2, 2), act, nn.Linear(2, 2)).double().requires_grad_(False)
        for p in model.parameters():
            for place in np.ndindex(*p.shape):
                p[place] = draw.gauss(0, 1) * 10.0 ** draw.choice([0, 0, 0, draw.randint(-8, 8)])
        x, eps = draw.gauss(0, 1), draw.choice([1e-14, 1e-3, 0.25, 1.0, 10.0, 1e6])
        trace, rises = bounded(ll.lower(model, (1,)), torch.tensor([[x]], dtype=DOUBLE), eps, None, draw.random() < 0.5)
        found = [model[k].state_dict() for k in (0, 2, 4)]
        layers = [(one["weight"].tolist(), one["bias"].tolist()) for one in found]
        with mpmath.workdps(60):
            ends = [mpmath.mpf(x) + s * mpmath.mpf(eps) for s in (-1, 1)]
            kinks = [(z - mpmath.mpf(b)) / row[0] for row, b in zip(*layers[0], strict=True) for z in (0, -1, 1, -36, 36)]
            points = [
                *ends,
                x,
                *(k for k in kinks if ends[0] <= k <= ends[1]),
                *(x + eps * mpmath.mpf(k) / 7 for k in range(-6, 7)),
            ]
            here = [mpmath.mpf(v) for v in trace.logits[0].tolist()]
            for point in points:
                values = [mpmath.mpf(point)]
                for depth, (weight, bias) in enumerate(layers):
                    before = [
                        sum(w * v for w, v in zip(row, values, strict=True)) + b for row, b in zip(weight, bias, strict=True)
                    ]
                    if depth < 2:
                        lower, upper = (end[0].tolist() for end in trace.boxes[depth])
                        assert all(low <= v <= high for low, v, high in zip(lower, before, upper, strict=True)), (seed, act)
                        values = [phi(v) for v in before]
                for i, j in ((0, 1), (1, 0)):
                    assert not (before[i] - before[j]) - (here[i] - here[j]) > float(rises[i, j]), (seed, act)


# Finds ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "opset"), [(np.float64, 10), (np.float16, 13)])
def test_a_clip_without_an_upper_end_has_the_default_one(kind: type, opset: int, tmp_path: Path) -> None:
    """Up to opset 10 `max` is 3.4e38 in every type, and since then the largest number of the type, 65504 in float16.

    clip(large x) / large, which is x / 2 in the module and at most 1/8 or 1/4 in the file, against 3/8: another class at x
    itself. In float64 the reference evaluator of ONNX says so too.
    """
    graph, large = Graph("batch", 1, kind=kind, opset=opset), 2.0**130 if kind is np.float64 else 2.0**15
    z = graph.add("MatMul", "x", graph.stored([[large]]))
    for _ in range(3 if kind is np.float16 else 0):
        z = graph.add("Add", z, z)  # 2^18 in the end
    z = graph.add("Clip", z, min=0.0) if opset < 11 else graph.add("Clip", z, graph.stored(0.0))
    small = 0.5 / large if kind is np.float64 else 2.0**-19
    model = graph.model(graph.add("Gemm", z, graph.stored([[small, 0.0]]), graph.stored([0.0, 0.375])), ("batch", 2))
    limit, factor = (np.finfo(np.float32).max, large) if kind is np.float64 else (np.finfo(np.float16).max, 8 * large)
    assert min(Fraction(factor), Fraction(float(limit))) * Fraction(small) < Fraction(3, 8)  # so the class at x = 1 is 1
    if kind is np.float64:
        assert graph.run(model, np.ones((1, 1))).argmax() == 1
    network = ll.load_onnx(written(model, tmp_path / "net.onnx"))
    x = torch.ones(1, 1, dtype=next(network.parameters()).dtype)
    found = ll.certify(network, x, torch.tensor([0]), 0.01, guarantee="deterministic")
    assert not found.certified.any()


class Mirror(nn.Module):
    """Left and right exchanged."""

    def forward(self, x: Tensor) -> Tensor:
        return x.flip(-1)


class MirrorOp(Diagonal):
    """As docs/adding_a_layer.md wants it: it derives from `Diagonal`, computes something else, and has no windows."""

    def __init__(self, shape: torch.Size):
        super().__init__(lambda dtype: torch.ones((), dtype=dtype), shape)
        self.windows = None

    def apply(self, v: Tensor) -> Tensor:
        return v.flip(-1)

    def adjoint(self, w: Tensor) -> Tensor:
        return w.flip(-1)

    def apply_abs(self, r: Tensor) -> Tensor:
        return r.flip(-1)

    def row_norms(self, cols: Tensor) -> Tensor:
        return cols.flip(-1)


@ll.register_layer(Mirror)
def _mirror(module: Mirror, in_shape: torch.Size, like: Tensor) -> Affine:
    return Affine(MirrorOp(in_shape))


def pointwise(bias: float) -> nn.Conv2d:
    layer = nn.Conv2d(1, 1, 1, dtype=DOUBLE).requires_grad_(False)
    layer.weight.fill_(1.0)
    layer.bias.fill_(bias)  # type: ignore[union-attr]
    return layer


def test_an_operator_that_derives_from_ours_keeps_no_way_back_of_theirs() -> None:
    """2 max(max(x_1, 0) - 1, 0), read at the other end of the row, against 1/4: lost at a distance of 1/8.

    With method="lines" the box of that unit is sharpened by what stands at the end that was not mirrored, which is dead.
    """
    head = nn.Linear(8, 2, dtype=DOUBLE).requires_grad_(False)
    head.weight.zero_()
    head.weight[1, 7] = 2.0
    head.bias.copy_(torch.tensor([0.25, 0.0]))
    model = nn.Sequential(pointwise(0.0), nn.ReLU(), Mirror(), pointwise(-1.0), nn.ReLU(), nn.Flatten(), head)
    x = torch.full((1, 1, 1, 8), -5.0, dtype=DOUBLE)
    x[..., 0] = 1.0
    other = x.clone()
    other[..., 0] = 1.25
    assert model(other).tolist() == [[0.25, 0.5]]  # all numbers are exact
    for method in ("lines", "auto"):
        found = ll.certify(model, x, torch.tensor([0]), 0.25, guarantee="deterministic", attack_steps=0, method=method)
        assert not found.certified.any()
        assert float(ll.certified_radius(model, x, torch.tensor([0]), guarantee="deterministic", method=method)) <= 0.125


class Arctan(nn.Module):
    def forward(self, z: Tensor) -> Tensor:
        return z.atan()


class ArctanRule(Increasing):
    """With what `Increasing` asks for: the function, and its largest slope on an interval."""

    def __call__(self, z: Tensor) -> Tensor:
        return z.atan()

    def slope(self, box: Box) -> Tensor:
        return 1 / (1 + torch.maximum(box.lower, -box.upper).clamp(min=0).square())


@ll.register_layer(Arctan)
def _arctan(module: Arctan, in_shape: torch.Size, like: Tensor) -> ArctanRule:
    return ArctanRule()


class Between(nn.Module):
    """atan(x) - x / 2 against 0.2."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.skip = (nn.Linear(1, n, dtype=DOUBLE).requires_grad_(False) for n in (1, 2, 2))
        self.act = Arctan()
        for layer, weight, bias in (
            (self.one, [1.0], [0.0]),
            (self.two, [1.0, 0.0], [0.0, 0.2]),
            (self.skip, [-0.5, 0.0], [0.0] * 2),
        ):
            layer.weight.copy_(torch.tensor(weight)[:, None])
            layer.bias.copy_(torch.tensor(bias, dtype=DOUBLE))

    def forward(self, x: Tensor) -> Tensor:
        return self.two(self.act(self.one(x))) + self.skip(x)


def test_an_increasing_activation_of_ones_own_is_not_taken_for_a_line() -> None:
    """At x = 2 class 1 leads, at 1.1 class 0 does: atan(1.1) - 0.55 is 0.28. Method "auto" certifies a ball of 1.

    The class asks for `slope` alone; `curves` came with the lines, and is empty where nobody says otherwise.
    """
    assert mpmath.atan("1.1") - mpmath.mpf("0.55") > mpmath.mpf("0.27")
    x, y = torch.tensor([[2.0]], dtype=DOUBLE), torch.tensor([1])
    found = ll.certify(Between().eval(), x, y, 1.0, guarantee="deterministic", attack_steps=0)
    assert not found.certified.any()


@pytest.mark.parametrize("count", [0, 2])
def test_inputs_that_are_all_wrong_have_the_radius_0(count: int) -> None:
    """No wrong certificate, but no answer either: torch.cat of nothing, with "auto" and "lines"; "local" says 0."""
    model = filled(nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 2)), random.Random(0), 0)
    x = torch.rand(count, 2, generator=torch.Generator().manual_seed(0), dtype=DOUBLE)
    assert ll.certified_radius(model, x, 1 - model(x).argmax(1)).tolist() == [0.0] * count
