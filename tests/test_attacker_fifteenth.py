"""A fifteenth round of attempts: curves on parts, every statement of a trace in 200 digits, and norms that are counted."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from fractions import Fraction
from typing import Any

import mpmath  # type: ignore[import-untyped]
import pytest
import torch
from torch import Tensor, nn

import locallip as ll
from locallip import activations as act
from locallip.balls import INF, L2, Domain
from locallip.bounds import Trace, global_bound, jacobian_bounds, multiplier_bounds, propagate, worst_logits
from locallip.bounds.branching import Branching, CutWay, Parts, bends_of
from locallip.bounds.curved import Curved
from locallip.certify import Certifier, RadiusFinder, guesses
from locallip.certify.prover import Margin, Prover
from locallip.network import Network, PassThrough
from locallip.norms import CholeskyNorm, Guarantee, LanczosNorm, NormKey
from locallip.norms.base import Noise
from locallip.ops import Masked
from locallip.vnnlib.deciding import Decider
from locallip.vnnlib.spec import Spec
from tests.test_branching import part_of, traced

DOUBLE = torch.float64
Number = Any  # mpmath's
Phi = Callable[[Number], Number]


@pytest.fixture(autouse=True)
def digits() -> Iterator[None]:
    with mpmath.workdps(200):
        yield


# Layers in many digits ---------------------------------------------------------------------------------------------------


def curve(draw: random.Random) -> nn.Module:
    """Slopes of 0, 1 and more, alphas and betas far from 1."""
    return draw.choice(
        [
            nn.Tanh(),
            nn.Sigmoid(),
            nn.LeakyReLU(draw.choice([0.0, 1e-300, 0.01, 0.5, 1.0, 1.5, 1e8])),
            nn.ELU(draw.choice([0.0, 1e-300, 1e-20, 0.3, 1.0, 3.0, 100.0, 1e30])),
            nn.Softplus(draw.choice([1.0, 0.01, 1e-6, 30.0, 1e6, 1e-30]), draw.choice([20, 50])),
        ]
    )


def of_unit(activation: object) -> Phi:
    """An increasing activation, of torch or of ours, as the mathematical function."""
    if isinstance(activation, (act.LeakyReLU, nn.LeakyReLU)):
        return lambda z: z if z > 0 else mpmath.mpf(activation.negative_slope) * z
    if isinstance(activation, (act.ELU, nn.ELU)):
        return lambda z: z if z > 0 else mpmath.mpf(activation.alpha) * mpmath.expm1(z)
    if isinstance(activation, (act.Softplus, nn.Softplus)):
        beta = mpmath.mpf(activation.beta)
        return lambda z: max(z, mpmath.mpf(0)) + mpmath.log1p(mpmath.exp(-abs(beta * z))) / beta
    if isinstance(activation, (act.Tanh, nn.Tanh)):
        return lambda z: mpmath.tanh(z)
    assert isinstance(activation, (act.Sigmoid, nn.Sigmoid))
    return lambda z: 1 / (1 + mpmath.exp(-z))


def listed(value: Tensor | float, shape: Sequence[int]) -> list[Number]:
    """A threshold of every unit."""
    return many(torch.as_tensor(value, dtype=DOUBLE).expand(*shape))


def many(values: Tensor) -> list[Number]:
    return [mpmath.mpf(v) for v in values.flatten().tolist()]


def behind(activation: act.Activation | None, z: list[Number], shape: torch.Size) -> list[Number]:
    """What an activation makes of the flat values of one sample."""
    if activation is None or isinstance(activation, PassThrough):
        return z
    if isinstance(activation, act.Clip):
        low, high = (listed(end, shape) for end in activation.thresholds(DOUBLE))
        return [min(max(v, a), b) for v, a, b in zip(z, low, high, strict=True)]
    if isinstance(activation, act.SortPairs):
        half = len(z) // 2
        upper, lower = (listed(end, (shape[0] // 2, *shape[1:])) for end in activation.thresholds(DOUBLE))
        pairs = list(zip(z[:half], z[half:], strict=True))
        top = [min(max(pair), end) for pair, end in zip(pairs, upper, strict=True)]
        return top + [max(min(pair), end) for pair, end in zip(pairs, lower, strict=True)]
    if isinstance(activation, act.MaxPool2d):
        out = activation.out_shape(shape)
        window = activation.to_inputs(torch.arange(out.numel()).reshape(1, *out)).flatten().tolist()
        seen = activation.used(torch.zeros(1)).expand(shape).flatten().tolist()
        groups: list[list[Number]] = [[] for _ in range(out.numel())]
        for place, value, used in zip(window, z, seen, strict=True):
            groups[place].extend([value] if used else [])
        return [max(group) for group in groups]
    return list(map(of_unit(activation), z))


class Exact:
    """A lowered network in many digits; all entries of its maps must be exact in float64."""

    def __init__(self, network: Network, like: Tensor):
        self.network = network
        self.maps = [
            {k: [many(row) for row in op.materialize(like)] for k, op in stage.terms.items()} for stage in network.stages
        ]
        self.offsets = [many(torch.as_tensor(stage.offset(like)).expand(1, *stage.linear_shape)) for stage in network.stages]

    def __call__(self, x: list[Number]) -> tuple[list[list[Number]], list[list[Number]]]:
        """What every region holds, and what stands before every activation."""
        regions, before = [x], []
        for stage, maps, offset in zip(self.network.stages, self.maps, self.offsets, strict=True):
            z = offset
            for source, rows in maps.items():
                terms = (mpmath.fdot(row, regions[source]) for row in rows)
                z = [a + b for a, b in zip(z, terms, strict=True)]
            before.append(z)
            regions.append(behind(stage.activation, z, stage.linear_shape))
        return regions, before


def numbers(draw: random.Random, shape: Sequence[int]) -> Tensor:
    """Plain numbers, dyadic ones that tie, and powers of two over a wide range."""
    kind, size = draw.randrange(3), math.prod(shape)
    plain = [draw.gauss(0, 1) for _ in range(size)]
    drawn = [v if kind == 0 else round(4 * v) / 4 if kind == 1 else v * 2.0 ** draw.randint(-20, 20) for v in plain]
    return torch.tensor(drawn, dtype=DOUBLE).reshape(tuple(shape))


def filled(model: nn.Module, draw: random.Random) -> nn.Module:
    """Some layers 1e-12 to 1e8 times as large as the others."""
    model = model.double().requires_grad_(False)
    far = draw.random() < 0.3
    for p in model.parameters():
        p.copy_(numbers(draw, p.shape) * (10.0 ** draw.randint(-12, 8) if far else 1.0))
    return model


def length(values: Sequence[Number]) -> Number:
    return mpmath.sqrt(mpmath.fsum(v * v for v in values))


def apart(one: Sequence[Number], other: Sequence[Number]) -> list[Number]:
    return [a - b for a, b in zip(one, other, strict=True)]


# Curves on parts of the ball ---------------------------------------------------------------------------------------------


def at_its_end(seed: int) -> tuple[float, Number]:
    """A part of one curved unit, and how far the bound of the part is above what its best point reaches, by both sizes.

    With the pull that takes all of the weight, nothing but rounding lies between the two.
    """
    draw = random.Random(seed)
    model = nn.Sequential(nn.Linear(1, 1), curve(draw), nn.Linear(1, 2)).double().requires_grad_(False)
    gain = draw.choice([1.0, -1.0]) * 10.0 ** draw.choice([0, draw.uniform(-20, 20)])
    model[0].weight.fill_(draw.choice([1.0, -1.0]) * 10.0 ** draw.choice([0, 0, draw.uniform(-6, 6)]))
    model[0].bias.fill_(draw.choice([0.0, draw.gauss(0, 1), draw.gauss(0, 30), draw.gauss(0, 1e6)]))
    model[2].weight.copy_(torch.tensor([[0.0], [gain]], dtype=DOUBLE))
    x, radius = torch.tensor([[draw.choice([0.0, draw.gauss(0, 1)])]], dtype=DOUBLE), 10.0 ** draw.uniform(-12, 5)
    network, trace = traced(model, x, radius)
    found = Branching(network, trace, 0)
    (bend,) = bends_of(found.pullback)
    if not len(found.units[0]) or not isinstance(bend, Curved):
        return 0.0, mpmath.mpf(0)
    places = bend.points[:, 0, 0].tolist()
    order = sorted(range(len(places)), key=places.__getitem__)
    first, last = (order[i] for i in sorted((draw.randrange(len(order)), draw.randrange(len(order)))))
    none, slope = [torch.zeros(1, 1)], draw.choice([bend.low, bend.high, draw.random() * bend.high])
    ends = ([torch.tensor([[place]], dtype=torch.int8)] for place in (first, last))
    parts = Parts(torch.tensor([1]), *ends, none, none, torch.zeros(1), torch.ones(1), torch.full((1, 3), -1))
    way = CutWay(found.pullback, found.units, parts, 0, DOUBLE, outward=True)
    (slope,) = way.kept([slope])
    bound = float(way.bound([slope, -gain * slope]))
    unit, center = of_unit(model[1]), mpmath.mpf(trace.regions[-1].center.item())
    weight, middle = mpmath.mpf(model[0].weight.item()), mpmath.mpf(model[0].bias.item())
    middle += weight * mpmath.mpf(x.item())
    reached = [mpmath.mpf(places[place]) for place in (first, last)]
    rises = [gain * (unit(y) - center) for y in reached if abs(y - middle) <= abs(weight) * radius]
    return bound, max(rises, default=-mpmath.inf)


def test_the_end_of_a_part_of_a_curve_does_not_exceed_its_bound_by_a_bit() -> None:
    """The center far outside the part, saturated, steep and flat curves, boxes of 1e-12 to 1e11: the bound is what the best
    end of the part reaches, and the rounding of that.

    Catches: values of the activation taken for exact, slopes from the center taken for those of the part.
    """
    close = 0
    for seed in range(300):
        bound, rise = at_its_end(seed)
        if math.isfinite(bound):
            assert mpmath.mpf(bound) >= rise, seed
            close += bool(rise and mpmath.mpf(bound) - rise < 1e-9 * abs(rise))
    assert close > 20


def wild(tensors: list[Tensor], draw: random.Random) -> list[Tensor]:
    """Some of them 1e-200 to 1e30 times what they were."""
    return [v * draw.choice([1.0, 1.0, 0.0, -1.0, 1e-200, 10.0 ** draw.uniform(-30, 30)]) for v in tensors]


@pytest.mark.parametrize("seed", range(0, 60, 10))
def test_no_part_of_curved_layers_is_exceeded_whatever_the_slopes_and_pulls(seed: int) -> None:
    """As for kinks (thirteenth round), with one or two curved layers in 200 digits, parts that hold the point and not c.

    Catches: the cost of a pull with the wrong sign, remainders of a part that are measured from its own end.
    """
    for number in range(seed, seed + 10):
        draw, generator = random.Random(number), torch.Generator().manual_seed(number)
        inputs, width, deep = draw.choice([1, 2]), draw.choice([1, 2, 3]), draw.random() < 0.6
        hidden = [nn.Linear(width, width), curve(draw)] if deep else []
        model = filled(nn.Sequential(nn.Linear(inputs, width), curve(draw), *hidden, nn.Linear(width, 3)), draw)
        radius = draw.choice([1e4, 30.0, 3.0, 1.0, 1e-3, 1e-9, 1e-14])
        x = torch.tensor([[draw.choice([draw.randint(0, 4) / 4, draw.random()]) for _ in range(inputs)]], dtype=DOUBLE)
        network, trace = traced(model, x, radius, draw.choice([None, "boxes"]))
        label = draw.randrange(3)
        found, exact = Branching(network, trace, label), Exact(network, x)
        middle = exact.maps[-1][len(network.stages) - 1], exact.offsets[-1], many(trace.regions[-1].center)
        logits = [mpmath.fdot(row, middle[2]) + b for row, b in zip(middle[0], middle[1], strict=True)]
        for _ in range(4):
            move = torch.randn(x.shape, generator=generator, dtype=DOUBLE)
            point = x + move * radius / move.norm() * draw.choice([1 - 1e-12, draw.random()])
            before = exact(many(point))[1]
            stages = sorted(found.pullback.stages, reverse=True)
            runs = [
                torch.tensor([float(v) for v in apart(before[k - 1], many(trace.before[k - 1].center))], dtype=DOUBLE)
                for k in stages
            ]
            other = (label + draw.choice([1, 2])) % 3
            parts, plain = part_of(found, runs, label, other, generator)
            if not all(holds(found, parts, place, before[k - 1]) for place, k in enumerate(stages)):
                continue
            with torch.no_grad():
                bound = float(
                    CutWay(found.pullback, found.units, parts, label, DOUBLE, outward=True).bound(wild(plain, draw))
                )
            rises = apart(before[-1], logits)
            assert not math.isfinite(bound) or mpmath.mpf(bound) >= rises[other] - rises[label], number


def holds(found: Branching, parts: Parts, place: int, before: list[Number]) -> bool:
    """Whether a part holds these values; runs that were rounded may leave it by a bit."""
    bend, units = bends_of(found.pullback)[place], found.units[place]
    assert isinstance(bend, Curved)
    points = bend.points[:, 0, units]
    ends = (points.gather(0, which[place].long()) for which in (parts.first, parts.last))
    low, high = (many(end) for end in ends)
    return all(a <= before[u] <= b for u, a, b in zip(units.tolist(), low, high, strict=True))


# Every statement of a trace ----------------------------------------------------------------------------------------------


def any_activation(draw: random.Random, shape: tuple[int, ...]) -> nn.Module:
    half = (shape[0] // 2, *shape[1:])
    kinked = [
        nn.ReLU(),
        nn.Hardtanh(-0.5, 0.3),
        ll.MaxMin(),
        ll.ReLUTheta(shape),
        ll.ClippedMaxMin(half, draw.choice([0.5, -0.5, 0.0]), draw.choice([-0.5, 0.25, 0.0])),
    ]
    return draw.choice([*kinked, curve(draw), curve(draw)])


class Skips(nn.Module):
    """Dense layers: a plain chain, a sum that several layers read, or one hidden layer."""

    def __init__(self, inputs: int, width: int, draw: random.Random):
        super().__init__()
        self.first, self.last, self.kind = nn.Linear(inputs, width), nn.Linear(width, 3), draw.randrange(3)
        self.middle = nn.ModuleList(nn.Linear(width, width) for _ in range(2))
        self.acts = nn.ModuleList(any_activation(draw, (width,)) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        z = self.acts[0](self.first(x))
        if self.kind == 0:
            return self.last(self.acts[2](self.middle[1](self.acts[1](self.middle[0](z)))))
        if self.kind == 1:
            z = z + self.acts[1](self.middle[0](z))
            return self.last(self.acts[2](self.middle[1](z)) - z)
        return self.last(z)


def images(draw: random.Random) -> nn.Module:
    """Two convolutions on 4 x 4 pixels, perhaps with max pooling between them."""
    convolution = nn.Conv2d(1, 2, draw.choice([1, 2, 3]), draw.choice([1, 2]), draw.choice([0, 1]))
    shape = convolution(torch.zeros(1, 1, 4, 4)).shape[1:]
    layers = [convolution, any_activation(draw, tuple(shape))]
    if min(shape[1:]) >= 2 and draw.random() < 0.6:
        layers.append(nn.MaxPool2d(2, draw.choice([2, 3]), draw.choice([0, 1]), ceil_mode=draw.random() < 0.5))
    layers.append(nn.Conv2d(2, 2, draw.choice([1, 2, 3]), padding=1))
    shape = nn.Sequential(*layers[:1], *layers[2:])(torch.zeros(1, 1, 4, 4)).shape[1:]
    return nn.Sequential(*layers, any_activation(draw, tuple(shape)), nn.Flatten(), nn.Linear(shape.numel(), 3))


def points(draw: random.Random, exact: Exact, x: list[Number], eps: Number, is_box: bool) -> list[list[Number]]:
    """Corners of the box or points of the sphere, and the two that move a unit of the first layer most."""
    row = draw.choice(exact.maps[0][0])
    directions = [[mpmath.mpf(draw.gauss(0, 1)) for _ in x] for _ in range(2)] + [row, [-w for w in row]]
    found = []
    for d in directions:
        size, shorter = length(d), 1 - mpmath.mpf(10) ** -150
        if size:
            move = [eps * mpmath.sign(v) for v in d] if is_box else [eps * shorter * v / size for v in d]
            found.append([a + b for a, b in zip(x, move, strict=True)])
    return found


def broken(seed: int, mutate: Callable[[Trace], Trace] = lambda trace: trace) -> list[str]:
    """What a trace says of a random network that is not so in many digits."""
    draw = random.Random(seed)
    torch.manual_seed(seed)
    inputs = draw.choice([1, 2, 3])
    model, shape = (
        (images(draw), (1, 4, 4)) if draw.random() < 0.4 else (Skips(inputs, draw.choice([2, 4]), draw), (inputs,))
    )
    model = filled(model, draw)
    size = math.prod(shape)
    x = torch.tensor([draw.choice([draw.randint(0, 4) / 4, draw.random()]) for _ in range(size)], dtype=DOUBLE)
    x, eps = x.reshape(1, *shape), torch.tensor([10.0 ** draw.uniform(-14, 1)], dtype=DOUBLE)
    ball, relax = draw.choice([L2, INF]), draw.choice([None, "lines", "boxes", "slopes"])
    sides = x[0] - draw.choice([0, 1]) * torch.rand(shape, dtype=DOUBLE), x[0] + torch.rand(shape, dtype=DOUBLE)
    domain: Domain = draw.choice([None, (0.0, 1.0), sides])
    network, norm, label = ll.lower(model, shape), CholeskyNorm(), draw.randrange(3)
    with torch.no_grad():
        ceiling = global_bound(network, norm, eps, outward=True)
        options: dict[str, Any] = {"ceiling": ceiling, "outward": True, "relax": relax, "ball": ball, "input_domain": domain}
        trace = mutate(propagate(network, x, eps, norm, **options))
        worst = many(
            worst_logits(network, trace, torch.tensor([label]), outward=True, depth=draw.choice([None, 1, 2])).worst
        )
        ways = [jacobian_bounds(network, trace, [way]) for way in ("absolute", "intervals", "middle")]  # type: ignore[list-item]
        slopes = many(torch.cat([*ways, multiplier_bounds(network, trace), trace.lipschitz]))
    exact = Exact(network, x)
    low, high = ([-mpmath.inf] * size, [mpmath.inf] * size) if domain is None else (listed(end, shape) for end in domain)
    here = many(x)
    base, others = exact(here), []
    for point in points(draw, exact, here, mpmath.mpf(eps.item()), ball.is_box):
        inside = [min(max(v, a), b) for v, a, b in zip(point, low, high, strict=True)]
        others.append((inside, *exact(inside)))
    found = wrong_centers(trace, base[1])
    for i, (point, regions, before) in enumerate(others):
        found += outside(trace, before) + too_far(trace, apart_each(regions, base[0]))
        gain = [v - before[-1][label] for v in before[-1]]
        found += ["a worst logit" for v, w in zip(gain, worst, strict=True) if v > w - worst[label]]
        near, near_before = (here, base[1]) if i == 0 else (others[i - 1][0], others[i - 1][2])
        rise, run = length(apart(before[-1], near_before[-1])), length(apart(point, near))
        found += ["a Lipschitz constant" for slope in slopes if rise > slope * run]
    return found


def apart_each(one: list[list[Number]], other: list[list[Number]]) -> list[list[Number]]:
    return [apart(a, b) for a, b in zip(one, other, strict=True)]


def wrong_centers(trace: Trace, before: list[list[Number]]) -> list[str]:
    assert trace.logits_error is not None
    said = [*((known.center, known.error) for known in trace.before), (trace.logits, trace.logits_error)]
    off = [(length_of, many(error)) for (c, error), z in zip(said, before, strict=True) for length_of in [apart(z, many(c))]]
    return ["a center" for away, error in off for v, e in zip(away, error, strict=True) if abs(v) > e]


def outside(trace: Trace, before: list[list[Number]]) -> list[str]:
    assert trace.logits_box is not None
    boxes = [*(known.box for known in trace.before), trace.logits_box]
    sides = [(z, many(box.lower), many(box.upper)) for z, box in zip(before, boxes, strict=True)]
    return ["a box" for z, low, high in sides for v, a, b in zip(z, low, high, strict=True) if v < a or v > b]


def too_far(trace: Trace, moved: list[list[Number]]) -> list[str]:
    """Units that moved though they are said not to, and regions that moved further than their radius."""
    found = []
    for region, change in zip(trace.regions, moved, strict=False):
        ones = torch.ones_like(region.center) if region.outputs is None else region.outputs.double()
        weights = many(ones)
        found += ["a mask" for v, w in zip(change, weights, strict=True) if v and not w]
        scaled = [v / w for v, w in zip(change, weights, strict=True) if w]
        found += ["a radius"] if length(scaled) > mpmath.mpf(region.radius.item()) else []
    return found


@pytest.mark.parametrize("part", range(6))
def test_all_that_a_trace_says_holds_in_many_digits(part: int) -> None:
    """Centers, boxes, masks, radii, worst logits and Lipschitz constants of dense layers with skips, convolutions and max
    pooling, in both balls, with domains and lines; layers 1e-12 to 1e8 times as large as others.

    Catches: rounding that is not allowed for anywhere on the way, and boxes or radii of the wrong ball.
    """
    for seed in range(20 * part, 20 * part + 20):
        assert not broken(seed), seed


def test_a_trace_that_says_too_much_is_found() -> None:
    """The same with centers, boxes and radii that are too sharp by very little."""

    def sharper(trace: Trace) -> Trace:
        regions = tuple(replace(region, radius=region.radius * (1 - 1e-12)) for region in trace.regions)
        return replace(trace, regions=regions)

    assert "a radius" in itertools.chain.from_iterable(broken(seed, sharper) for seed in range(40))


# Norms that are counted --------------------------------------------------------------------------------------------------


class Branches(nn.Module):
    """Convolutions around which values go twice, behind them dense layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(1, 2, 3, padding=1), nn.Conv2d(2, 2, 3, padding=1)
        self.third, self.last = nn.Linear(18, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        z = torch.relu(self.first(x))
        z = torch.relu(z + self.second(z))
        z = z + torch.relu(self.second(z))
        return self.last(torch.relu(self.third(z.flatten(1))))


def give_nothing_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """All tries are made, and those with norms of single inputs just fail; a guide sees what it would."""

    def failed(self: Prover, found: Margin) -> Margin:
        return found if self.guarantee is Guarantee.ESTIMATE else found._replace(worst=torch.full_like(found.worst, -1e-12))

    margin, margins, by_branches = Prover.margin, Prover.margins, Prover.branched

    def of(self: Prover, *args: Any, **options: Any) -> Margin:
        found = margin(self, *args, **options)
        return found if options["local"] == "none" else failed(self, found)

    monkeypatch.setattr(Prover, "margin", of)
    monkeypatch.setattr(Prover, "margins", lambda self, *a, **b: tuple(failed(self, v) for v in margins(self, *a, **b)))
    monkeypatch.setattr(Prover, "branched", lambda self, *a, **b: failed(self, by_branches(self, *a, **b)))
    for name in ("bendable", "may_prove", "is_near"):
        monkeypatch.setattr(guesses, name, lambda prover, x, *a, **b: torch.ones(len(x), dtype=torch.bool))
    monkeypatch.setattr(guesses, "within_reach", lambda ahead, worst: torch.ones(len(ahead), dtype=torch.bool))


@pytest.mark.parametrize("method", ["auto", "thorough", "local", "lines"])
@pytest.mark.parametrize("seconds", [0.0, 0.02])
def test_no_more_norms_are_taken_than_the_chance_of_failure_is_divided_by(
    method: Any, seconds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every norm that a verdict or a radius of one input touches, those over all inputs included, each with its own share.

    Catches: a check or a radius more than `probes` says, norms that are taken twice where the share is for one.
    """
    if seconds and method == "local":
        pytest.skip("branch and bound is no part of the local bound")
    give_nothing_up(monkeypatch)
    taken: list[float] = []
    proved = LanczosNorm.proven_norm

    def counted(self: LanczosNorm, op: Masked, key: NormKey, like: Tensor, coarse: Tensor) -> Tensor:
        taken.append(self.failure_prob)
        return proved(self, op, key, like, coarse)

    monkeypatch.setattr(LanczosNorm, "proven_norm", counted)
    torch.manual_seed(0)
    model, chance = Branches().double().requires_grad_(False), 1e-6
    x = torch.randn(1, 1, 3, 3, dtype=DOUBLE)
    y, options = model(x).argmax(1), {"method": method, "branch_seconds": seconds, "failure_prob": chance}
    finder = RadiusFinder(model, x.shape[1:], **options)
    radius = float(finder(x, y))
    guide = finder.guide.rule.failure_prob  # type: ignore[attr-defined]
    assert sum(share for share in taken if share != guide) <= chance * (1 + 1e-9)
    taken.clear()
    certifier = Certifier(model, x.shape[1:], attack_steps=0, **options)
    assert certifier(x, y, 3 * radius).verdicts == [ll.Verdict.UNKNOWN]
    assert (0.0 if method == "lines" else 0.7 if method != "local" else 0.3) * chance < sum(taken) <= chance * (1 + 1e-9)
    taken.clear()
    ll.local_lipschitz(model, x, 0.3, failure_prob=chance)
    assert 0.9 * chance < sum(taken) <= chance * (1 + 1e-9)


@pytest.mark.parametrize("what", ["verdict", "radius", "question"])
def test_no_start_serves_twice_where_a_seed_does(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """`locallip certify --vnnlib` drew the bound over all inputs and every answer with one seed, so the first starts of
    local norms were the numbers of those norms that their masks rest on, against "every norm draws a fresh start".

    Catches: `seed_again` with the seed that a Certifier or a RadiusFinder was made with.
    """
    drawn: list[float] = []
    draw = Noise.__call__

    def kept(self: Noise, shape: Sequence[int], like: Tensor) -> Tensor:
        found = draw(self, shape, like)
        drawn.extend(found.flatten().tolist())
        return found

    monkeypatch.setattr(Noise, "__call__", kept)
    torch.manual_seed(0)
    layers = nn.Linear(3, 6), nn.ReLU(), nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 2)
    model, x = nn.Sequential(*layers).double().requires_grad_(False), torch.rand(1, 3, dtype=DOUBLE)
    y = model(x).argmax(1)
    radius = float(ll.certified_radius(model, x, y, guarantee="deterministic"))
    drawn.clear()
    if what == "question":
        certifier = Decider(model, (3,), 2, torch.device("cpu"), seed=5)
        lower, upper = (tuple(Fraction(v) + side * Fraction(1.1 * radius) for v in x[0].tolist()) for side in (-1, 1))
        spec = Spec(lower, upper, 2, int(y), (1 - int(y),))
        certifier._of(spec)
    else:
        certifier = (Certifier if what == "verdict" else RadiusFinder)(model, (3,), seed=5)
        certifier.seed_again(5)
    before = set(drawn)
    drawn.clear()
    if what == "question":
        certifier(spec, attack_steps=0, seed=5)
    else:
        certifier(x, y, *([1.1 * radius] if what == "verdict" else []))
    assert before
    assert drawn
    assert not before & set(drawn)


# Through the front door --------------------------------------------------------------------------------------------------


def kinked_or_curved(draw: random.Random) -> nn.Module:
    ends = draw.choice([(-1.0, 1.0), (-0.5, 0.25), (-math.inf, 0.5), (0.0625, 0.3125)])
    return draw.choice([nn.ReLU(), nn.Hardtanh(*ends), curve(draw), curve(draw)])


@pytest.mark.parametrize("seed", range(0, 60, 10))
def test_radii_margins_and_slopes_of_one_number_hold_in_many_digits(seed: int) -> None:
    """Weights of 16, 32 and 64 bits, every method, both balls (which are the same here), domains, branches and the float32
    program: the label leads at the ends and between, by the margin that is said.
    """
    for number in range(seed, seed + 10):
        draw = random.Random(number)
        width, hidden = draw.choice([1, 2, 3]), []
        if draw.random() < 0.5:
            hidden = [nn.Linear(width, width), kinked_or_curved(draw)]
        model = nn.Sequential(nn.Linear(1, width), kinked_or_curved(draw), *hidden, nn.Linear(width, 2))
        for p in model.requires_grad_(False).parameters():
            p.copy_(numbers(draw, p.shape).clamp(-6e4, 6e4))
        model = model.to(draw.choice([DOUBLE, DOUBLE, torch.float32, torch.float16, torch.bfloat16]))
        x = torch.tensor([[draw.choice([draw.randint(0, 4) / 4, draw.random()])]]).double()
        network = ll.lower(model, (1,))
        exact = Exact(network, x)
        logits = exact(many(x))[0][-1]
        label = int(logits[1] > logits[0])
        domain = draw.choice([None, (0.0, 1.0), (x[0] - draw.choice([0.0, 1e-3]), x[0] + draw.random())])
        method = draw.choice(["auto", "thorough", "local", "lines"])
        options: dict[str, Any] = {
            "guarantee": draw.choice(["deterministic", "high_probability"]),
            "norm": draw.choice(["2", "inf"]),
            "method": method,
            "input_domain": domain,
            "branch_seconds": 0.0 if method == "local" else draw.choice([0.0, 0.1]),
            "deployed_dtype": "float32" if next(model.parameters()).dtype == torch.float32 else None,
        }
        y = torch.tensor([label])
        radius = float(ll.certified_radius(model, x, y, **options))
        eps = radius * draw.choice([1.0, 1.1, 2.0])
        found = ll.certify(model, x, y, eps, attack_steps=0, **options)
        lipschitz = float(ll.local_lipschitz(model, x, eps, guarantee=options["guarantee"], input_domain=domain))
        low, high = (-mpmath.inf, mpmath.inf) if domain is None else (mpmath.mpf(float(end)) for end in domain)
        here, last = mpmath.mpf(x.item()), None
        for share in (-1, 1, *(draw.uniform(-1, 1) for _ in range(8))):
            for reach, claimed in ((radius, 0.0), (eps, float(found.margin))):
                point = min(max(here + mpmath.mpf(share) * reach, low), high)
                values = exact([point])[0][-1]
                lead = values[label] - values[1 - label]
                assert lead > 0 or claimed or not radius, number
                assert not math.isfinite(claimed) or lead >= claimed, number
                if last is not None and last[0] != point:
                    rise = length(apart(values, last[1]))
                    assert rise <= mpmath.mpf(lipschitz) * abs(point - last[0]), number
                last = point, values
