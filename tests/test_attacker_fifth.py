"""Attempts on the state behind a Certifier, on code as people write it, and on certificates that are nearly tight."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from fractions import Fraction
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrize

import locallip as ll
from locallip.certify import Certifier, RadiusFinder
from locallip.network import Affine
from locallip.network.rules import MODULE_RULES
from locallip.norms import CholeskyNorm, LanczosNorm, NormKey
from locallip.ops import Diagonal, Masked

DOUBLE = torch.float64


def linear(weight: list[list[float]], bias: list[float]) -> nn.Linear:
    layer = nn.Linear(len(weight[0]), len(weight), dtype=DOUBLE)
    with torch.no_grad():
        layer.weight.copy_(torch.tensor(weight))
        layer.bias.copy_(torch.tensor(bias))
    return layer


# Images of another size --------------------------------------------------------------------------------------------------


class Rows(nn.Module):
    """Sums along rows, without a bias, which would show the size of its image."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.head = nn.Conv2d(1, 1, (1, 3), padding=(0, 1), bias=False, dtype=DOUBLE), nn.Linear(24, 2).double()
        with torch.no_grad():
            self.conv.weight.fill_(1)
            self.head.weight.copy_(torch.tensor([[1.0], [0.0]]))
            self.head.bias.copy_(torch.tensor([0.0, 60.0]))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.relu(self.conv(x)).flatten(1))


@pytest.mark.parametrize("guarantee", ["deterministic", "high_probability"])
def test_images_on_their_side_are_refused(guarantee: str) -> None:
    """A column of 24 pixels has rows of one, where the layer has norm 1; on a row of 24 pixels it has norm 3.

    With norms of the one, class 0 was certified on a ball around the other in which class 1 wins.
    Catches: norms over all inputs of one size that meet images of another.
    """
    model, x, y = Rows(), torch.ones(1, 1, 1, 24, dtype=DOUBLE), torch.tensor([0])
    assert int(model(x * (1 - 0.99 / 24**0.5)).argmax()) == 1
    assert not bool(ll.certify(model, x, y, 1.0, guarantee=guarantee).certified[0])
    with pytest.raises(ValueError, match="samples of shape"):
        Certifier(model, (1, 24, 1), guarantee=guarantee, method="local")(x, y, 1.0)
    with pytest.raises(ValueError, match="samples of shape"):
        RadiusFinder(model, (1, 24, 1), guarantee=guarantee)(x, y)


# What changes behind a Certifier -----------------------------------------------------------------------------------------

FACTOR = {"of all": 1.0}


class Mask(nn.Module):
    """The mask of a pruned layer, which is no buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.mask = torch.tensor([[0.0, 0.0], [0.0, 1.0]], dtype=DOUBLE)

    def forward(self, weight: Tensor) -> Tensor:
        return weight * self.mask


class Kept(nn.Module):
    """Numbers and functions in places where nobody looks for them, and values that are kept for later."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = linear([[100.0, 0.0], [0.0, 1.0]], [0.0, 0.5]), linear([[1.0, 0.0], [0.0, 1.0]], [0.0, 0.0])
        parametrize.register_parametrization(self.first, "weight", Mask())
        self.factors, self.settings, self.act = [1.0], {"factor": 1.0}, F.relu
        self.tables = [torch.ones(2, dtype=DOUBLE)]
        self.features: Any = None

    def forward(self, x: Tensor) -> Tensor:
        self.features = self.act(self.first(x) * self.factors[0] * self.tables[0])
        return self.last(self.features * self.settings["factor"] * FACTOR["of all"])


def mask_of(model: Kept) -> Any:
    return model.first.parametrizations.weight[0]  # type: ignore[union-attr, index]


def mask_in_place(model: Kept) -> None:
    mask_of(model).mask.fill_(1)


def mask_anew(model: Kept) -> None:
    mask_of(model).mask = torch.ones(2, 2, dtype=DOUBLE)


def in_a_list(model: Kept) -> None:
    model.factors[0] = 100.0


def in_a_dictionary(model: Kept) -> None:
    model.settings["factor"] = 100.0


def another_function(model: Kept) -> None:
    model.act = torch.tanh


def another_tensor(model: Kept) -> None:
    model.tables[0] = 100 * model.tables[0]


def outside(model: Kept) -> None:
    FACTOR["of all"] = 100.0


@pytest.mark.parametrize("kind", [Certifier, RadiusFinder])
@pytest.mark.parametrize(
    "change", [mask_in_place, mask_anew, in_a_list, in_a_dictionary, another_function, another_tensor, outside]
)
def test_changes_anywhere_are_noticed(kind: Any, change: Callable[[Kept], None], monkeypatch: pytest.MonkeyPatch) -> None:
    """With the mask gone, norms of the pruned layer met the whole one, and class 1 was certified where class 0 wins.

    The others had the network certified that was there before.
    Catches: a state without what parametrizations make, or without what forward does now.
    """
    monkeypatch.setitem(FACTOR, "of all", 1.0)
    model = Kept()
    worker = kind(model, (2,), guarantee="deterministic", method="local")
    x, y = torch.zeros(1, 2, dtype=DOUBLE), torch.tensor([1])
    ask = (lambda: worker(x, y, 0.2)) if kind is Certifier else (lambda: worker(x, y))
    ask()
    model(x + 1)  # running it changes nothing that counts
    ask()
    change(model)
    with pytest.raises(RuntimeError, match="has changed"):
        ask()


class Scaled(nn.Module):
    """A layer of a user with a rule of its own, which reads a list when it is needed."""

    def __init__(self) -> None:
        super().__init__()
        self.factors = [1.0]

    def forward(self, x: Tensor) -> Tensor:
        return x * self.factors[0]


def test_lists_of_registered_layers_count() -> None:
    """Norms with the old factor would meet logits with the new one.

    Catches: a state without lists where nothing is traced.
    """

    @ll.register_layer(Scaled)
    def rule(module: Scaled, in_shape: torch.Size, like: Tensor) -> Affine:
        return Affine(Diagonal(lambda dtype: torch.tensor(module.factors[0], dtype=dtype), in_shape))

    layer, x, y = Scaled(), torch.zeros(1, 2, dtype=DOUBLE), torch.tensor([1])
    try:
        certifier = Certifier(nn.Sequential(linear([[1.0, 0.0], [0.0, 1.0]], [0.0, 0.5]), layer), (2,))
        assert bool(certifier(x, y, 0.2).certified[0])
        layer.factors[0] = -1.0
        with pytest.raises(RuntimeError, match="has changed"):
            certifier(x, y, 0.2)
    finally:
        del MODULE_RULES[Scaled]


def test_lowering_leaves_the_module_as_it_was() -> None:
    """What forward keeps while it is traced is a stand-in, which the module went on with.

    Catches: attributes that are not put back.
    """
    model = Kept()
    ll.lower(model, (2,))
    assert model.features is None
    caching = Caching()
    with pytest.raises(ll.UnsupportedLayer):
        ll.lower(caching, (2,))
    assert torch.isfinite(caching(torch.ones(1, 2))).all()


class Caching(nn.Module):
    """Computes its weight at the first call and keeps it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.weight: Any = None

    def forward(self, x: Tensor) -> Tensor:
        if self.weight is None:
            self.weight = self.layer.weight / 2
        return F.linear(x, self.weight)


@pytest.mark.parametrize("domain", [(0, Fraction(1, 3)), ("0", "1"), (0.0, 10**400), 1.0, (0.0, 1.0, 2.0)])
def test_domains_that_no_float_holds_are_refused(domain: Any) -> None:
    """Rounded, 1/3 would leave a part of the domain out."""
    model = nn.Sequential(nn.Linear(2, 2))
    with pytest.raises(ValueError, match="input_domain"):
        ll.certify(model, torch.zeros(1, 2), torch.tensor([0]), 0.1, input_domain=domain)
    with pytest.raises(ValueError, match="input_domain"):
        ll.local_lipschitz(model, torch.zeros(1, 2), 0.1, input_domain=domain)


# Code as people write it -------------------------------------------------------------------------------------------------


class Code(nn.Module):
    """A step in front of a head; what it needs is stored beside it."""

    def __init__(self, step: Callable[[Any, Tensor], Tensor]):
        super().__init__()
        torch.manual_seed(0)
        self.step, self.act, self.kept, self.weight = step, nn.ReLU(inplace=True), nn.Identity(), nn.Parameter(torch.ones(4))
        self.register_buffer("row", torch.randn(4))
        self.register_buffer("table", torch.randn(100, 4))
        self.register_buffer("whole", torch.tensor([1, 2, 3, 4]))
        self.register_buffer("chosen", torch.tensor([True, False, True, False]))
        self.coefficients = [1.0, 2.0, -3.0]
        with torch.no_grad():
            self.head = nn.Linear(step(self, torch.randn(2, 4)).flatten(1).shape[1], 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.step(self, x).flatten(1))


def late(x: Tensor) -> Tensor:
    """What samples of the comparison do not see."""
    return F.relu(x - 80)


def in_place(z: Tensor, change: Callable[[Tensor], Any], given: Callable[[Tensor], Tensor] = lambda z: z) -> Tensor:
    """`change` runs on z, and what `given` made of it before is returned."""
    kept = given(z)
    change(kept)
    return z


def chunked(x: Tensor) -> Tensor:
    z = x * 1.0
    first, _ = z.chunk(2, 1)
    first.relu_()
    return z


def added(z: Tensor, y: Tensor) -> Tensor:
    z += y
    return z


ACCEPTED: list[Callable[[Any, Tensor], Tensor]] = [
    lambda m, x: added(x * 1.0, late(x)),
    lambda m, x: (x * 2).add_(late(x), alpha=-3),
    lambda m, x: torch.add(x, late(x), alpha=-3),
    lambda m, x: m.act(x - 1),
    lambda m, x: sum([F.relu(x), late(x), x]),  # type: ignore[return-value]
    lambda m, x: sum(-F.relu(x - 40 * k) * m.coefficients[k] for k in range(3)),  # type: ignore[return-value]
    lambda m, x: torch.ones(4) * 3 - late(x),
    lambda m, x: m.row.sub(x, alpha=2),
    lambda m, x: torch.multiply(torch.true_divide(x, 3), m.whole),
    lambda m, x: x * m.chosen + m.row[None].expand(1, 4),
    lambda m, x: x * x.shape[-1] ** -0.5,
    lambda m, x: F.hardtanh(x, max_val=90, min_val=-80),
    lambda m, x: F.linear(x, m.table[[1, 0]], m.row[:2]),
    lambda m, x: F.conv1d(x.unsqueeze(1), m.table[:3, None, :2], padding="same"),
    lambda m, x: F.avg_pool2d(x.view(-1, 1, 2, 2), 2, 1, 1, False, True, 3),
    lambda m, x: F.avg_pool2d(x.view(-1, 1, 2, 2), (2, 1), (1, 2), (1, 0), ceil_mode=True, count_include_pad=False),
    lambda m, x: F.max_pool2d(x.view(-1, 1, 2, 2), 2, 2, 1, 1, True),
    lambda m, x: F.adaptive_avg_pool2d(x.view(-1, 1, 2, 2), (1, None)),
]
REFUSED: list[Callable[[Any, Tensor], Tensor]] = [
    lambda m, x: in_place(x * 1.0, lambda z: z.sub_(5 * late(x)), lambda z: F.dropout(z, 0.5, False)),
    lambda m, x: in_place(x * 1.0, lambda z: z.sub_(5 * late(x)), lambda z: z.contiguous()),
    lambda m, x: in_place(x * 1.0, lambda z: z.sub_(5 * late(x)), m.kept),
    lambda m, x: in_place(x - 80, lambda z: F.relu(z, True)),
    lambda m, x: in_place(x - 80, lambda z: F.hardtanh(z, 0.0, 9.0, True)),
    lambda m, x: in_place(x - 80, lambda z: m.act(z), lambda z: z.view(-1, 2, 2)),
    lambda m, x: in_place(x * 1.0, lambda z: z.clamp_(-80, 80), lambda z: z.data),
    lambda m, x: in_place(x * 1.0, lambda z: z.clamp_(-80, 80), lambda z: z.detach()),
    lambda m, x: in_place(x * 1.0, lambda z: z.clamp_(-80, 80), lambda z: z.narrow(1, 0, 2)),
    lambda m, x: chunked(x),
    lambda m, x: torch.where(m.chosen, x, -x),
    lambda m, x: x + m.table[: x.size(0)],
    lambda m, x: x / x.numel(),
    lambda m, x: F.hardtanh(x, -80.0 * x.numel(), 80.0 * x.numel()),
    lambda m, x: F.leaky_relu(x, -1.0),
    lambda m, x: torch.div(x, 1.0, rounding_mode="trunc"),
    lambda m, x: x.squeeze(),
    lambda m, x: F.adaptive_avg_pool1d(x, 2),  # takes the batch for channels
    lambda m, x: F.avg_pool1d(x, 2),
    lambda m, x: F.pad(x, (1, 1), value=80.0),
]


@pytest.mark.parametrize("number", range(len(ACCEPTED)))
def test_code_that_is_accepted_computes_the_same_far_away(number: int) -> None:
    """In-place sums, numbers from sizes, constants on either side, poolings of every setting, at inputs up to 1e5."""
    model = Code(ACCEPTED[number]).eval()
    network = ll.lower(model, (4,))
    for batch in (1, 2, 5, 64):
        x = torch.randn(batch, 4) * torch.tensor([1.0, 100.0, 1e3, 1e5])[torch.arange(batch) % 4, None]
        ours = network(x.double())
        assert torch.allclose(model(x.clone()).double(), ours, rtol=1e-4, atol=1e-5 * float(ours.detach().abs().max()))


@pytest.mark.parametrize("number", range(len(REFUSED)))
def test_code_that_means_something_else_is_refused(number: int) -> None:
    """Aliases that are written to, values of the batch, and what is not linear; a pooling of two dimensions once crashed."""
    with pytest.raises(ll.UnsupportedLayer):
        ll.lower(Code(REFUSED[number]).eval(), (4,))


# Nearly tight certificates against exact arithmetic ------------------------------------------------------------------------

Line = tuple[Fraction, Fraction]  # a + b t
Piece = tuple[Fraction, Fraction, list[Line]]  # from t to t: a line for every unit


class Net(nn.Module):
    """A random network of piecewise linear layers and residual sums on at most three inputs."""

    def __init__(self, seed: int):
        super().__init__()
        self.random = pick = random.Random(seed)
        torch.manual_seed(seed)
        self.inputs, self.width = pick.choice([1, 1, 2, 3]), pick.choice([2, 4])
        self.kind = pick.choice(["normal", "whole", "identity"])
        steps: list[nn.Module] = [self._linear(self.inputs, self.width)]
        for _ in range(pick.randint(1, 3)):
            steps += pick.choice([[self._act()], [self._linear(self.width, self.width)], [Residual(self)]])
        self.steps = nn.Sequential(*steps, self._linear(self.width, 3))

    def _linear(self, inputs: int, outputs: int) -> nn.Linear:
        layer = nn.Linear(inputs, outputs, dtype=DOUBLE)
        weight = {
            "normal": torch.randn(outputs, inputs),
            "whole": torch.randint(-2, 3, (outputs, inputs)),
            "identity": torch.eye(outputs, inputs),
        }[self.kind]
        with torch.no_grad():
            layer.weight.copy_(weight)
            layer.bias.copy_(torch.randint(-2, 3, (outputs,)) / 2)
        return layer

    def _act(self) -> nn.Module:
        half = (self.width // 2,)
        layers = [nn.ReLU(), nn.Hardtanh(-0.3, 0.7), nn.LeakyReLU(0.1), nn.LeakyReLU(1.5), ll.ReLUTheta((self.width,), 0.6)]
        layers += [ll.MaxMin(), ll.ClippedMaxMin(half, 0.5, -0.2), ll.ClippedMaxMin(half, -0.3, 0.2)]
        return self.random.choice(layers).double()

    def forward(self, x: Tensor) -> Tensor:
        return self.steps(x)


class Residual(nn.Module):
    def __init__(self, net: Net):
        super().__init__()
        self.layer, self.act = net._linear(net.width, net.width), net._act()

    def forward(self, x: Tensor) -> Tensor:
        z = self.act(self.layer(x))
        z += x
        return z


def exact(values: Tensor) -> list[Fraction]:
    return [Fraction(v) for v in values.detach().tolist()]


def split(pieces: list[Piece], zeros: Callable[[list[Line]], list[Line]]) -> list[Piece]:
    """Pieces cut where one of these lines crosses zero."""
    found = []
    for low, high, units in pieces:
        cuts = {-a / b for a, b in zeros(units) if b != 0 and low < -a / b < high}
        points = sorted({low, high, *cuts})
        found += [(p, q, units) for p, q in pairwise(points)]
    return found


def through_linear(layer: nn.Linear, pieces: list[Piece]) -> list[Piece]:
    rows, bias = [exact(row) for row in layer.weight], exact(layer.bias)

    def image(units: list[Line]) -> list[Line]:
        dots = [[sum((w * u[k] for w, u in zip(row, units, strict=True)), Fraction(0)) for k in (0, 1)] for row in rows]
        return [(a + shift, b) for (a, b), shift in zip(dots, bias, strict=True)]

    return [(p, q, image(units)) for p, q, units in pieces]


def clipped(pieces: list[Piece], ends: list[tuple[Fraction | None, Fraction | None]]) -> list[Piece]:
    def zeros(units: list[Line]) -> list[Line]:
        return [(a - end, b) for (a, b), pair in zip(units, ends, strict=True) for end in pair if end is not None]

    def image(line: Line, low: Fraction | None, high: Fraction | None, t: Fraction) -> Line:
        value = line[0] + line[1] * t
        if high is not None and value > high:
            return high, Fraction(0)
        return (low, Fraction(0)) if low is not None and value < low else line

    parts = split(pieces, zeros)
    return [(p, q, [image(u, *e, (p + q) / 2) for u, e in zip(units, ends, strict=True)]) for p, q, units in parts]


def sorted_pairs(pieces: list[Piece]) -> list[Piece]:
    def halves(units: list[Line]) -> list[tuple[Line, Line]]:
        return list(zip(units[: len(units) // 2], units[len(units) // 2 :], strict=True))

    found = []
    for p, q, units in split(pieces, lambda units: [(u[0] - v[0], u[1] - v[1]) for u, v in halves(units)]):
        t = (p + q) / 2
        pairs = [sorted(pair, key=lambda line: line[0] + line[1] * t, reverse=True) for pair in halves(units)]
        found.append((p, q, [pair[0] for pair in pairs] + [pair[1] for pair in pairs]))
    return found


def through(layer: Any, pieces: list[Piece]) -> list[Piece]:
    """The layer along a segment, in exact arithmetic."""
    width = len(pieces[0][2])
    if isinstance(layer, nn.Linear):
        return through_linear(layer, pieces)
    if isinstance(layer, Residual):
        inner = through(layer.act, through(layer.layer, pieces))
        found = []
        for p, q, units in inner:  # which are cuts of the pieces before
            before = next(old for low, high, old in pieces if low <= p and q <= high)
            found.append((p, q, [(a + c, b + d) for (a, b), (c, d) in zip(units, before, strict=True)]))
        return found
    if isinstance(layer, nn.LeakyReLU):
        slope, parts = Fraction(layer.negative_slope), split(pieces, lambda units: units)
        signs = [[a + b * (p + q) / 2 >= 0 for a, b in units] for p, q, units in parts]
        return [
            (p, q, [u if up else (u[0] * slope, u[1] * slope) for u, up in zip(units, ups, strict=True)])
            for (p, q, units), ups in zip(parts, signs, strict=True)
        ]
    if isinstance(layer, (ll.MaxMin, ll.ClippedMaxMin)):
        pieces = sorted_pairs(pieces)
        if isinstance(layer, ll.MaxMin):
            return pieces
        return clipped(pieces, [(None, a) for a in exact(layer.upper)] + [(b, None) for b in exact(layer.lower)])
    if isinstance(layer, ll.ReLUTheta):
        return clipped(pieces, [(Fraction(0), theta) for theta in exact(layer.theta)])
    if isinstance(layer, nn.Hardtanh):
        return clipped(pieces, [(Fraction(layer.min_val), Fraction(layer.max_val))] * width)
    assert isinstance(layer, nn.ReLU)
    return clipped(pieces, [(Fraction(0), None)] * width)


def least_lead(net: Net, x: Tensor, move: list[Fraction], y: int) -> Fraction:
    """The least lead of y over the other classes on x + t move, -1 <= t <= 1, in exact arithmetic."""
    pieces: list[Piece] = [(Fraction(-1), Fraction(1), list(zip(exact(x), move, strict=True)))]
    for layer in net.steps:
        pieces = through(layer, pieces)
    leads = [
        (units[y][0] - units[i][0]) + (units[y][1] - units[i][1]) * t
        for p, q, units in pieces
        for t in (p, q)
        for i in range(3)
        if i != y
    ]
    return min(leads)


def largest_certified(certifier: Certifier, x: Tensor, y: Tensor, radius: float) -> tuple[float, float]:
    """The largest eps that is found to be certified, to nine digits, and the margin there."""
    low, high, best = radius * 0.999, radius * 1.5, (0.0, 0.0)
    for _ in range(4):
        eps = torch.linspace(low, high, 16, dtype=DOUBLE)
        found = certifier(x.repeat(16, 1), y.repeat(16), eps)
        if not bool(found.certified.any()):
            return best
        k = int(found.certified.nonzero().max())
        best = float(eps[k]), float(found.margin[k])
        low, high = float(eps[k]), float(eps[min(k + 1, 15)])
    return best


@pytest.mark.parametrize("seeds", [(1, 8, 9, 14), (15, 19, 20, 21), (11, 22, 25, 27)])
def test_no_point_of_a_line_gets_past_a_certificate(seeds: tuple[int, ...]) -> None:
    """Along lines through the center, all of them for one input, the least lead is computed with fractions.

    Catches: margins without their rounding, and any box, mask or slope that leaves something out.
    """
    proved = tight = 0
    for seed in seeds:
        net = Net(seed).eval()
        method = ("auto", "local")[seed % 2]
        torch.manual_seed(seed)
        x = (torch.rand(1, net.inputs, dtype=DOUBLE) * 8).round() / 4 - 1
        certifier = Certifier(net, (net.inputs,), guarantee="deterministic", method=method, attack_steps=0)  # type: ignore[arg-type]
        y = net(x).argmax(1)
        finder = RadiusFinder(net, (net.inputs,), guarantee="deterministic", method=method)  # type: ignore[arg-type]
        radius = float(finder(x, y)[0])
        eps, margin = largest_certified(certifier, x, y, radius) if 0 < radius < 1e6 else (0.0, 0.0)
        if eps == 0:
            continue
        proved += 1
        others = [torch.randn(net.inputs, dtype=DOUBLE) for _ in range(2)]
        moves = [steepest(certifier.prover.network, x, int(y), eps), *others]
        for move in moves[: 1 if net.inputs == 1 else 3]:
            direction = exact(move)
            length = Fraction(math.sqrt(sum(d * d for d in direction))) * (1 + Fraction(1, 2**50))
            step = [d * Fraction(eps) / length for d in direction] if net.inputs > 1 else [Fraction(eps)]
            assert sum(d * d for d in step) <= Fraction(eps) ** 2
            lead = least_lead(net, x[0], step, int(y))
            assert lead > 0
            assert lead >= Fraction(margin)
            tight += lead - Fraction(margin) < Fraction(1, 10**9)
    assert proved == 4
    assert tight >= 2  # where a margin that is too large by little would be noticed


def steepest(net: Callable[[Tensor], Tensor], x: Tensor, y: int, eps: float) -> Tensor:
    """A direction in which y loses much of its lead inside the ball, (inputs,)."""
    moves = torch.randn(8, x.shape[1], dtype=DOUBLE)
    for _ in range(15):
        moves = (moves / moves.norm(dim=1, keepdim=True) * eps).detach().requires_grad_()
        logits = net(x + moves)
        leads = (logits - logits[:, y : y + 1]).index_fill(1, torch.tensor([y]), -math.inf).amax(1)
        (grad,) = torch.autograd.grad(leads.sum(), moves)
        best = moves.detach()[int(leads.argmax())]
        moves = moves.detach() + 0.3 * eps * grad / grad.norm(dim=1, keepdim=True).clamp(min=1e-300)
    return best


# Norms of odd convolutions -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(6))
def test_norms_of_odd_convolutions_in_blocks(seed: int) -> None:
    """Strides, dilations, paddings beyond the kernel, groups, poolings with half windows and sums, masked at random."""
    pick = random.Random(seed)
    torch.manual_seed(seed)
    layers: list[nn.Module] = []
    channels = inputs = pick.choice([1, 2])
    for _ in range(pick.randint(1, 2)):
        groups = pick.choice([1, channels])
        kernel, stride = (pick.randint(1, 3), pick.randint(1, 3)), (pick.choice([1, 2]), pick.choice([1, 3]))
        padding = (pick.randint(0, 5), pick.randint(0, 3))
        layers.append(nn.Conv2d(channels, 2 * groups, kernel, stride, padding, pick.choice([1, 2]), groups))
        channels = 2 * groups
    layers.append(nn.AvgPool2d(2, 1, 1, ceil_mode=True, count_include_pad=False))
    op = ll.lower(nn.Sequential(*layers).double().eval(), (inputs, 13, 12)).stages[-1].terms[0]
    like, key = torch.ones(1, dtype=DOUBLE), NormKey(0, 0, "odd")
    rows, cols = torch.rand(3, *op.out_shape, dtype=DOUBLE), torch.rand(3, *op.in_shape, dtype=DOUBLE) < 0.7
    matrix = op.materialize(like).detach()
    whole = matrix * rows.flatten(1)[:, :, None] * cols.flatten(1)[:, None].double()
    true = torch.linalg.matrix_norm(whole, 2)
    for rule in (CholeskyNorm(whole=4), CholeskyNorm(), LanczosNorm(1e-9, seed=seed)):
        found = rule(Masked(op, rows, cols), key, like)
        assert bool((found >= true * (1 - 1e-14)).all())
        assert bool((found <= true * 1.01).all())
