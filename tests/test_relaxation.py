"""Linear relaxation: nothing found in the ball leaves the boxes and bounds that lines give, and they are close."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import locallip as ll
from locallip.bounds import CeilingNorm, GlobalBound, Trace, global_bound, propagate, relaxation, worst_logits
from locallip.bounds import lines as lines_module
from locallip.certify import Certifier
from locallip.network import Network
from locallip.norms import CholeskyNorm
from tests.random_networks import ACTIVATIONS, BODIES, random_network

DOUBLE = torch.float64
#: Every body with every activation, three times with LOCALLIP_THOROUGH=1: over two hundred networks.
KINDS = [(body, name, seed) for body in BODIES for name in ACTIVATIONS for seed in range(3)]
KINDS = KINDS if os.environ.get("LOCALLIP_THOROUGH") else [kind for i, kind in enumerate(KINDS) if i // 3 % 3 == kind[2]]


def traced(
    network: Network,
    x: Tensor,
    radius: float,
    relax: str | None = "boxes",
    domain: tuple[float, float] | None = None,
    limit: float = 1e9,
) -> tuple[Trace, GlobalBound]:
    eps = torch.full((len(x),), radius, dtype=DOUBLE)
    with torch.no_grad():
        ceiling = global_bound(network, CholeskyNorm(), eps, outward=True)
        options = {"ceiling": ceiling, "outward": True, "relax": relax, "input_domain": domain, "limit": limit}
        return propagate(network, x, eps, CeilingNorm(ceiling), **options), ceiling  # type: ignore[arg-type]


def before_activations(network: Network, x: Tensor) -> list[Tensor]:
    """The pre-activation of every stage, the logits last."""
    values, found = [x], []
    for stage in network.stages:
        found.append(stage.linear(values))
        values.append(found[-1] if stage.activation is None else stage.activation(found[-1]))
    return found


def into(move: Tensor, radius: float, domain: tuple[float, float] | None = None, x: Tensor | None = None) -> Tensor:
    size = move.flatten(1).norm(dim=1).clamp(min=1e-300).reshape(-1, *[1] * (move.dim() - 1))
    move = move * (radius / size).clamp(max=1) * (1 - 1e-12)
    return move if domain is None or x is None else (x + move).clamp(*domain) - x


def searched(network: Network, x: Tensor, radius: float, domain: tuple[float, float] | None = None) -> list[Tensor]:
    """Points of the ball: random ones on its surface, and those where ascent takes random units up or down."""
    generator = torch.Generator().manual_seed(0)
    draw = lambda: torch.randn(x.shape, generator=generator, dtype=DOUBLE)  # noqa: E731
    found = [x + into(1e9 * draw(), radius, domain, x) for _ in range(6)]
    sizes = [stage.linear_shape.numel() for stage in network.stages]
    for stage, size in list(enumerate(sizes)) * 3:
        unit = torch.randint(size, (len(x),), generator=generator)
        sign = 1 - 2 * torch.randint(2, (len(x),), generator=generator)
        move = into(draw(), radius, domain, x)
        for _ in range(6):
            move.requires_grad_()
            value = before_activations(network, x + move)[stage].flatten(1).gather(1, unit[:, None])[:, 0]
            (grad,) = torch.autograd.grad((sign * value).sum(), move)
            step = grad / grad.flatten(1).norm(dim=1).clamp(min=1e-300).reshape(-1, *[1] * (x.dim() - 1))
            move = into(move.detach() + radius * step, radius, domain, x)
        found.append(x + move)
    return found


def escapes(network: Network, trace: Trace, x: Tensor, points: list[Tensor]) -> int:
    """How many units and differences of logits are seen outside what was said of them."""
    count, logits = 0, trace.logits
    assert trace.relaxation is not None
    assert trace.logits_error is not None
    assert trace.logits_box is not None
    y = logits.argmax(1)
    eye = torch.eye(logits.shape[1], dtype=DOUBLE)
    g = eye[None] - eye[y][:, None]
    with torch.no_grad():
        rises = trace.relaxation.rises(network.stages[-1], logits, trace.logits_error, trace.logits_box, g)
        for point in points:
            *before, found = before_activations(network, point)
            for values, box in zip(before, trace.boxes, strict=True):
                slack = 1e-12 * (1 + values.abs().amax())
                count += int(((values < box.lower - slack) | (values > box.upper + slack)).sum())
            risen = torch.bmm(g, (found - logits)[..., None])[..., 0]
            count += int((risen > rises + 1e-12 * (1 + found.abs().amax())).sum())
    return count


@pytest.mark.parametrize(("body", "activation", "seed"), KINDS)
def test_nothing_in_the_ball_leaves_its_box(body: str, activation: str, seed: int) -> None:
    model, shape = random_network(body, activation, seed, 1.5)
    network = ll.lower(model, shape)
    x = torch.rand(2, *shape, generator=torch.Generator().manual_seed(seed), dtype=DOUBLE)
    radius, domain = (0.05, 0.3, 1.5)[seed], (None, (0.0, 1.0))[seed % 2]
    trace, _ = traced(network, x, radius, domain=domain)
    assert escapes(network, trace, x, searched(network, x, radius, domain)) == 0


def dense(seed: int = 0) -> tuple[nn.Module, Network, Tensor]:
    model, shape = random_network("dense", "relu", seed, 1.5)
    return model, ll.lower(model, shape), torch.rand(4, *shape, generator=torch.Generator().manual_seed(9), dtype=DOUBLE)


def slope_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """The line above is as steep as it was found, but the gap is that of one that is less steep."""
    old = lines_module._lines

    def wrong(bend: object) -> lines_module.Lines:
        found = old(bend)  # type: ignore[arg-type]
        return replace(found, above=found.above._replace(slope=0.5 * found.above.slope))

    monkeypatch.setattr(lines_module, "_lines", wrong)


def signs_exchanged(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gaps below where those above belong."""
    old = lines_module.gaps
    monkeypatch.setattr(lines_module, "gaps", lambda g, below, above, radius: old(g, above, below, radius))


def unit_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    """Units that may bend are taken for straight ones."""
    old = lines_module._lines

    def wrong(bend: object) -> lines_module.Lines:
        found = old(bend)  # type: ignore[arg-type]
        bent = found.above.size.clone()
        bent[:, ::2] = 0
        return replace(found, above=found.above._replace(size=bent))

    monkeypatch.setattr(lines_module, "_lines", wrong)


def ball_too_small(monkeypatch: pytest.MonkeyPatch) -> None:
    """The units are said to move half as far as they do."""
    old = lines_module._lines

    def wrong(bend: object) -> lines_module.Lines:
        found = old(bend)  # type: ignore[arg-type]
        assert found.radius is not None
        return replace(found, radius=found.radius / 8)

    monkeypatch.setattr(lines_module, "_lines", wrong)


@pytest.mark.parametrize("mutation", [slope_off, signs_exchanged, unit_dropped, ball_too_small])
def test_wrong_lines_let_something_escape(mutation: Callable[[pytest.MonkeyPatch], None]) -> None:
    """So the search of the test above can fail."""
    found = 0
    with pytest.MonkeyPatch.context() as patch:
        mutation(patch)
        for seed in range(6):
            _, network, x = dense(seed)
            for radius in (0.1, 0.4):
                trace, _ = traced(network, x, radius)
                found += escapes(network, trace, x, searched(network, x, radius))
    assert found > 0


class Images(nn.Module):
    """Convolutions of every kind, a mean over windows, normalization and batch norm before dense layers."""

    def __init__(self, bias: bool):
        super().__init__()
        self.body = nn.Sequential(
            *(ll.Normalize([0.3, 0.2], [0.5, 0.7]), nn.Conv2d(2, 6, 3, padding=1, bias=bias), nn.ReLU()),
            *(nn.Conv2d(6, 4, 4, stride=2, padding=1, groups=2), nn.BatchNorm2d(4), nn.Hardtanh(-0.5, 0.6)),
            *(
                nn.Conv2d(4, 5, 2, dilation=2),
                nn.Tanh(),
                nn.AvgPool2d(2, stride=1, padding=1),
                nn.Conv2d(5, 6, 1),
                nn.ReLU(),
            ),
            *(nn.Flatten(), nn.LazyLinear(8), nn.ReLU(), nn.Linear(8, 3)),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x)


@pytest.mark.parametrize("domain", [None, (0.0, 1.0)])
def test_windows_give_what_whole_rows_give(domain: tuple[float, float] | None, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model = Images(bias=True).double().eval()
    model(torch.zeros(1, 2, 14, 12, dtype=DOUBLE))
    network = ll.lower(model, (2, 14, 12))
    x = torch.rand(2, 2, 14, 12, dtype=DOUBLE)
    found, used = {}, []
    old = relaxation.Relaxation._by_patches
    monkeypatch.setattr(relaxation.Relaxation, "_by_patches", lambda *all: used.append(1) or old(*all))
    for small in (0.0, 2.0):
        monkeypatch.setattr(relaxation, "SMALL", small)
        found[small] = traced(network, x, 0.4, domain=domain)[0]
        assert bool(used) == (small > 0)
    for one, other in zip(found[0.0].boxes, found[2.0].boxes, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)
    assert escapes(network, found[2.0], x, searched(network, x, 0.4, domain)) == 0


def test_parts_of_rows_give_what_all_give(monkeypatch: pytest.MonkeyPatch) -> None:
    """However few numbers may be looked at together."""
    torch.manual_seed(0)
    model = Images(bias=False).double().eval()
    model(torch.zeros(1, 2, 8, 8, dtype=DOUBLE))
    network, x = ll.lower(model, (2, 8, 8)), torch.rand(3, 2, 8, 8, dtype=DOUBLE)
    whole, _ = traced(network, x, 0.4)
    monkeypatch.setattr(relaxation, "TOGETHER", {"cpu": 64})
    parts, _ = traced(network, x, 0.4)
    for one, other in zip(whole.boxes, parts.boxes, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


def test_limit_leaves_boxes_as_they_were() -> None:
    """Whose cost is beyond it, sample by sample."""
    _, network, x = dense()
    plain, _ = traced(network, x, 0.3, relax="lines")
    sharp, _ = traced(network, x, 0.3, relax="boxes")
    assert any(bool((a.upper > b.upper).any()) for a, b in zip(plain.boxes, sharp.boxes, strict=True))
    for a, b in zip(plain.boxes, sharp.boxes, strict=True):
        assert bool((a.upper >= b.upper).all())
        assert bool((a.lower <= b.lower).all())
    left, _ = traced(network, x, 0.3, relax="boxes", limit=0.0)
    assert all(torch.equal(a.upper, b.upper) for a, b in zip(plain.boxes, left.boxes, strict=True))


@given(
    weights=st.lists(st.integers(-8, 8), min_size=12, max_size=12),
    biases=st.lists(st.integers(-8, 8), min_size=5, max_size=5),
    radius=st.sampled_from([0.25, 1.0, 3.0]),
)
def test_exact_rise_of_one_input(weights: list[int], biases: list[int], radius: float) -> None:
    """One input, small integers: the largest difference of logits is at a kink or an end, known as a fraction."""
    first, second, last = nn.Linear(1, 3).double(), nn.Linear(3, 2).double(), nn.Linear(2, 2).double()
    with torch.no_grad():
        first.weight.copy_(torch.tensor(weights[:3], dtype=DOUBLE)[:, None] / 4)
        first.bias.copy_(torch.tensor(biases[:3], dtype=DOUBLE) / 4)
        second.weight.copy_(torch.tensor(weights[3:9], dtype=DOUBLE).reshape(2, 3) / 4)
        second.bias.copy_(torch.tensor(biases[3:], dtype=DOUBLE) / 4)
        last.weight.copy_(torch.tensor([[0.0, 0.0], [1.0, -0.5]], dtype=DOUBLE) * (1 + abs(weights[9])))
        last.bias.copy_(torch.tensor([1.0, 0.0], dtype=DOUBLE))
    network = ll.lower(nn.Sequential(first, nn.ReLU(), second, nn.ReLU(), last), (1,))
    x, y = torch.zeros(1, 1, dtype=DOUBLE), torch.tensor([0])
    trace, _ = traced(network, x, radius)
    with torch.no_grad():
        worst = worst_logits(network, trace, y, outward=True, slope_steps=0).worst[0]
    fraction = lambda tensor: [[Fraction(v) for v in row] for row in tensor.detach().reshape(len(tensor), -1).tolist()]  # noqa: E731
    w1, b1, w2, b2, w3 = (fraction(t) for t in (first.weight, first.bias, second.weight, second.bias, last.weight))

    def hidden(t: Fraction) -> list[Fraction]:
        h = [max(Fraction(0), w[0] * t + b[0]) for w, b in zip(w1, b1, strict=True)]
        return [sum(w * v for w, v in zip(row, h, strict=True)) + b[0] for row, b in zip(w2, b2, strict=True)]

    ends = [Fraction(-radius), Fraction(radius)]
    kinks = sorted({*ends, *(t for w, b in zip(w1, b1, strict=True) if w[0] and abs(t := -b[0] / w[0]) <= radius)})
    every = set(kinks)
    for a, b in pairwise(kinks):  # between two kinks the second layer is linear
        for low, high in zip(hidden(a), hidden(b), strict=True):
            if low * high < 0:
                every.add(a - low * (b - a) / (high - low))
    exact = max(sum(w * max(Fraction(0), v) for w, v in zip(w3[1], hidden(t), strict=True)) for t in every) - 1
    assert Fraction(float(worst[1])) - Fraction(float(worst[0])) >= exact


@pytest.mark.parametrize("method", ["auto", "lines"])
def test_lines_prove_more_than_norms_on_a_network_that_was_not_trained_for_them(method: str) -> None:
    """And never less: what norms decide, `auto` decides too."""
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(20, 40), nn.ReLU(), nn.Linear(40, 30), nn.ReLU(), nn.Linear(30, 4)).eval()
    x = torch.randn(24, 20)
    y = model(x).argmax(1)
    local = ll.certified_radius(model, x, y, method="local", guarantee="deterministic")
    found = ll.certified_radius(model, x, y, method=method, guarantee="deterministic")  # type: ignore[arg-type]
    assert float(found.median()) > 1.2 * float(local.median())
    if method == "auto":
        assert bool((found >= local * 0.99).all())
    eps = float(found.median())
    certificate = Certifier(model, (20,), method=method, guarantee="deterministic")(x, y, eps)  # type: ignore[arg-type]
    assert int(certificate.certified.sum()) >= 11
    assert any("lines" in check for check in certificate.decided_by)


@pytest.mark.parametrize("radius", [1e12, 1e200, float("inf"), float("nan")])
def test_a_ball_in_which_nothing_is_known(radius: float) -> None:
    """It is no error, what is not a number sharpens nothing, and no class is shown to stay below the label."""
    _, network, x = dense()
    trace, _ = traced(network, x, radius)
    with torch.no_grad():
        worst = worst_logits(network, trace, trace.logits.argmax(1), outward=True).worst
    lead = worst.gather(1, trace.logits.argmax(1)[:, None]) - worst
    assert not bool((lead.sort(1).values[:, 1] > 0).any())
