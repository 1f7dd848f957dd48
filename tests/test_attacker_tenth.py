"""A tenth round of attempts: many classes, degenerate norms, odd domains, extreme bends, printed figures, moving x."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from fractions import Fraction
from itertools import pairwise
from typing import Any

import mpmath  # type: ignore[import-untyped]
import pytest
import torch
from torch import Tensor, nn

import locallip as ll
from locallip.certify import Certifier, RadiusFinder
from locallip.data import ImageSet
from locallip.norms import Guarantee
from locallip.proofs import Job, certify_images
from locallip.proofs.run import data_checksum
from locallip.proofs.summary import describe
from locallip.report.explore import Explorer
from locallip.training.evaluate import evaluate

DOUBLE = torch.float64
PROOFS = ("deterministic", "high_probability")


def linear(weight: Sequence[Sequence[float]] | Tensor, bias: Sequence[float] | Tensor) -> nn.Linear:
    """A layer with just these numbers."""
    weight, bias = torch.as_tensor(weight, dtype=DOUBLE), torch.as_tensor(bias, dtype=DOUBLE)
    layer = nn.Linear(weight.shape[1], weight.shape[0], dtype=DOUBLE).requires_grad_(False)
    layer.weight.copy_(weight)
    layer.bias.copy_(bias)
    return layer


def not_below(value: Fraction) -> float:
    """The smallest float64 that is at least this."""
    near = float(value)
    return near if Fraction(near) >= value else math.nextafter(near, math.inf)


def broken_at(first: nn.Linear, last: nn.Linear, x: float, y: int) -> Fraction | None:
    """The distance at which y stops to lead in last(relu(first(x))), one input, exactly; None where it never does."""
    w, b = ([Fraction(v) for v in t.flatten().tolist()] for t in (first.weight, first.bias))
    rows, offsets = [[Fraction(v) for v in row] for row in last.weight.tolist()], [Fraction(v) for v in last.bias.tolist()]
    kinks = sorted({-q / p for p, q in zip(w, b, strict=True) if p} | {Fraction(x)})
    ends = [kinks[0] - 10**6, *kinks, kinks[-1] + 10**6]

    def leads(at: Fraction) -> list[Fraction]:
        z = [max(p * at + q, Fraction(0)) for p, q in zip(w, b, strict=True)]
        logits = [sum(p * v for p, v in zip(row, z, strict=True)) + c for row, c in zip(rows, offsets, strict=True)]
        return [logits[y] - value for k, value in enumerate(logits) if k != y]

    found = []
    for left, right in pairwise(ends):
        for a, c in zip(leads(left), leads(right), strict=True):
            if a <= 0 or c <= 0:  # linear in between
                zero = left if a == c else left + (right - left) * a / (a - c)
                found += [abs(p - Fraction(x)) for p in (zero, left if a <= 0 else right) if left <= p <= right]
    return min(found, default=None)


@pytest.mark.parametrize(("classes", "seed"), [(200, 0), (1000, 1)])
def test_one_of_many_classes_comes_up_behind_a_kink(classes: int, seed: int) -> None:
    """All classes but some lose by far; where the first of them overtakes is known as a fraction, behind kinks or not.

    Catches: classes that are left out or mixed up where pairs of sample and class are pulled back, with labels that differ.
    """
    draw = torch.Generator().manual_seed(seed)
    first = linear(torch.randint(-3, 4, (6, 1), generator=draw), torch.randint(-4, 5, (6,), generator=draw) / 2)
    last = linear(torch.randint(-4, 5, (classes, 6), generator=draw), torch.randint(-40, 5, (classes,), generator=draw))
    net, x = nn.Sequential(first, nn.ReLU(), last), torch.linspace(-2, 2, 3, dtype=DOUBLE)[:, None]
    y = net(x).argmax(1)
    exact = [broken_at(first, last, float(p), int(label)) for p, label in zip(x, y, strict=True)]
    open_ones = [k for k, radius in enumerate(exact) if radius]  # others tie, or nothing ever overtakes
    radii = [not_below(exact[k]) for k in open_ones]  # type: ignore[arg-type]
    assert not ll.certify(net, x[open_ones], y[open_ones], radii, guarantee="deterministic", attack_steps=0).certified.any()
    found = ll.certified_radius(net, x, y, guarantee="deterministic").tolist()
    assert all(exact[k] is None or Fraction(found[k]) < exact[k] or found[k] == 0 for k in range(len(x)))  # type: ignore
    assert sum(found[k] > 0 for k in open_ones) > len(open_ones) / 2


@pytest.mark.parametrize("guarantee", PROOFS)
def test_norms_of_tiny_nearly_equal_and_vanishing_matrices(guarantee: str) -> None:
    """Diagonals, whose norms are known: 1 to 3 units, equal but for 1e-9 or 1e-13, one that is all, none, 300 units.

    Catches: a Krylov space that is taken for exhausted, and a rest of it that is forgotten.
    """
    spectra = [
        [1.0],
        [0.0],
        [3.0, 3.0],
        [1.0, 1 - 1e-9],
        [1.0, 1 - 1e-13, 0.0],
        [1e-55, 1e-57],
        [0.0, 0.0, 7.0],
        [1e59, 1.0],
    ]
    spectra += [[1.0, *[1 - gap] * 40] for gap in (1e-4, 1e-9, 1e-12)]
    spectra += [
        [2.0, *[1.0] * 299],
        [1 + 1e-7, *[1.0] * 299],
        [*[1.0] * 300],
        [1.0, *torch.linspace(0, 0.999, 299).tolist()],
    ]
    for values in spectra:
        net = linear(torch.diag(torch.tensor(values, dtype=DOUBLE)), [0.0] * len(values))
        for seed in range(2):
            bound = ll.global_lipschitz(net, (len(values),), guarantee=guarantee, failure_prob=1e-15, seed=seed)
            assert max(values) <= bound <= 1.02 * max(values) + 1e-99, values


@pytest.mark.parametrize("values", [[1.0, 0.5], [1.0, 0.9, 0.8], [1.0, *[0.9] * 20], [4.0, *[1.0] * 270]], ids=len)
def test_failures_are_as_rare_as_is_said_for_starts_that_hardly_see_the_top(values: list[float]) -> None:
    """A failure probability of one half, through the front door. Catches: shares of it that are given out twice."""
    net = linear(torch.diag(torch.tensor(values, dtype=DOUBLE)), [0.0] * len(values))
    bounds = [ll.global_lipschitz(net, (len(values),), failure_prob=0.5, seed=seed) for seed in range(12)]
    assert sum(bound < max(values) for bound in bounds) <= 6


@pytest.mark.parametrize("guarantee", PROOFS)
@pytest.mark.parametrize("domain", [(-math.inf, 0.5), (0.25, math.inf), (-math.inf, math.inf), (0.25, 0.5)])
def test_a_domain_that_ends_on_one_side_or_nowhere(guarantee: str, domain: tuple[float, float]) -> None:
    """Pixels on the border go one way only, so the worst point of ball and domain, and the radius with it, are known.

    Catches: infinite ends that become NaN or drop the ball, and a radius that is cut off at an infinite diagonal.
    """
    low, high = domain
    x = torch.tensor([[min(max(0.25, low), high), min(max(0.5, low), high)]], dtype=DOUBLE)
    net = linear([[3.0, 4.0], [0.0, 0.0]], [1.0, 0.0])  # class 0 leads by 1 + 3 a + 4 b, and loses by going down
    lead = 1 + 3 * Fraction(float(x[0, 0])) + 4 * Fraction(float(x[0, 1]))
    radius = float(ll.certified_radius(net, x, torch.tensor([0]), guarantee=guarantee, input_domain=domain))
    if low == -math.inf:  # all of the ball that matters is in the domain
        assert 0.99 * float(lead / 5) < radius < lead / 5
        beyond = not_below(lead / 5)
        assert not ll.certify(net, x, torch.tensor([0]), beyond, guarantee=guarantee, input_domain=domain).certified.any()
    else:  # never lost inside the domain
        assert ll.certify(net, x, torch.tensor([0]), 100, guarantee=guarantee, input_domain=domain).certified.all()


@pytest.mark.parametrize(
    "domain",
    [
        *((0.5, 0.25), (0.3, 0.3), (0.6, 1.0), (math.nan, 1), (0,), 1),
        *((torch.zeros(3), torch.ones(3)), (torch.zeros(2), 1 - 1j)),
    ],
)
def test_domains_that_are_none(domain: object) -> None:
    """Turned round, empty, without x, not a number, of another shape. Catches: any of them taken for a smaller ball."""
    net, x = linear([[1.0, 1.0], [0.0, 0.0]], [1.0, 0.0]), torch.full((1, 2), 0.5, dtype=DOUBLE)
    with pytest.raises((ValueError, TypeError)):
        ll.certify(net, x, torch.tensor([0]), 1, input_domain=domain)  # type: ignore[arg-type]
    with pytest.raises((ValueError, TypeError)):
        ll.certified_radius(net, x, torch.tensor([0]), input_domain=domain)  # type: ignore[arg-type]


Real = Callable[[Any], Any]
CURVES: list[tuple[nn.Module, Real]] = [
    (nn.Tanh(), mpmath.tanh),
    (nn.Sigmoid(), lambda z: 1 / (1 + mpmath.exp(-z))),
    (nn.ELU(1e10), lambda z: z if z > 0 else mpmath.mpf(1e10) * mpmath.expm1(z)),
    (nn.ELU(1e-8), lambda z: z if z > 0 else mpmath.mpf(1e-8) * mpmath.expm1(z)),
    (nn.Softplus(1e-3), lambda z: mpmath.log1p(mpmath.exp(mpmath.mpf(1e-3) * z)) / mpmath.mpf(1e-3)),
    (nn.Softplus(1e4, 500), lambda z: mpmath.log1p(mpmath.exp(1e4 * z)) / 1e4),
    (nn.LeakyReLU(1e6), lambda z: z if z > 0 else 1e6 * z),
    (nn.Hardtanh(-math.inf, 0.7), lambda z: min(z, mpmath.mpf(0.7))),
    (nn.Hardtanh(0.3, 1e9 + 1), lambda z: min(max(z, mpmath.mpf(0.3)), mpmath.mpf(1e9 + 1))),
]


@pytest.mark.parametrize(("layer", "curve"), CURVES, ids=[repr(layer) for layer, _ in CURVES])
@pytest.mark.parametrize(("at", "step"), [(-30.0, 3.0), (0.7 - 3e-10, 1e-9)])
def test_bends_at_far_and_at_tiny_inputs(layer: nn.Module, curve: Real, at: float, step: float) -> None:
    """phi(w x) against its own value at a distance: with 60 digits the class changes there, so no proof reaches it.

    Catches: values, slopes and boxes that are off where a bend is nearly flat, very steep, or in the middle of a kink.
    """
    x, away = torch.tensor([[at]], dtype=DOUBLE), mpmath.mpf(step)
    with mpmath.workdps(60):
        for sign in (-1, 1):
            value = curve(at + sign * away)
            bias = float(value)
            bias = bias if sign * bias <= sign * value else math.nextafter(bias, -sign * math.inf)  # just reached
            net = nn.Sequential(linear([[1.0]], [0.0]), layer, linear([[-sign], [0.0]], [sign * bias, 0.0]))
            found = ll.certify(net, x, torch.tensor([0]), step, guarantee="deterministic", attack_steps=0, method="local")
            assert not found.certified.any()
        bound = mpmath.mpf(float(ll.local_lipschitz(net, x, step, guarantee="deterministic")))
        for a, b in ((0.999, 1), (-1, -0.999), (-1, 1), (0, 1e-3)):
            run = abs(curve(at + b * away) - curve(at + a * away))
            assert run <= bound * (b - a) * step * (1 + mpmath.mpf(10) ** -12)


@pytest.mark.parametrize("guarantee", PROOFS)
def test_slope_of_an_elu_whose_alpha_makes_up_for_what_vanishes(guarantee: str) -> None:
    """alpha e^z with alpha = 1e306 was 2e-18 at -745.6, where e^z is rounded to 0: the local bound said 2e-30."""
    x = torch.tensor([[-745.6]]).double()

    def net(alpha: float) -> nn.Module:
        return nn.Sequential(linear([[1.0]], [0.0]), nn.ELU(alpha), linear([[1.0]], [0.0]))

    with pytest.raises(ll.UnsupportedLayer, match="alpha <= 1e100"):
        ll.local_lipschitz(net(1e306), x, 0.05, guarantee=guarantee)
    with mpmath.workdps(60):
        slope = mpmath.mpf(1e100) * mpmath.exp(mpmath.mpf(float(x)))
        assert float(ll.local_lipschitz(net(1e100), x, 0.05, guarantee=guarantee)) >= slope


@pytest.mark.parametrize(
    "pool",
    [
        nn.MaxPool2d(2, 2, 1),
        nn.MaxPool2d(2, 3, 1, ceil_mode=True),
        nn.MaxPool2d((2, 1), (3, 2), (1, 0), ceil_mode=True),
        nn.MaxPool2d(3, 4, 1, ceil_mode=True),
        nn.MaxPool2d((1, 4), (1, 5), (0, 2)),
    ],
    ids=repr,
)
def test_windows_that_begin_outside_and_end_outside(pool: nn.MaxPool2d) -> None:
    """Raising one pixel of one window changes the class at a distance that is known; pixels in no window change nothing.

    Catches: a pixel that is counted to the neighbouring window, or to none.
    """
    x = torch.zeros(1, 1, 5, 6, dtype=DOUBLE)
    for place in (0, pool(x).numel() - 1):
        row = torch.zeros(2, pool(x).numel(), dtype=DOUBLE)
        row[1, place] = 1
        net = nn.Sequential(pool, nn.Flatten(), linear(row, [0.5, 0.0]))
        radius = float(ll.certified_radius(net, x, torch.tensor([0]), guarantee="deterministic"))
        assert 0.4 < radius < 0.5
        assert not ll.certify(net, x, torch.tensor([0]), 0.5, guarantee="deterministic").certified.any()
        changed = [bool(net(x + e.reshape(x.shape)).argmax(1)) for e in 0.51 * torch.eye(30, dtype=DOUBLE)]
        assert any(changed)
        assert float(ll.local_lipschitz(net, x, 1.0, guarantee="deterministic")) >= 1


def stepping(tops: Sequence[float]) -> tuple[nn.Module, ImageSet]:
    """Images e_1, e_2, ... of label 0, which leads by so much at each: logits are w . x, with `tops` for w, and 0."""
    images = 255 * torch.eye(len(tops)).to(torch.uint8).reshape(len(tops), 1, 1, -1)
    net = nn.Sequential(nn.Flatten(), linear([list(tops), [0.0] * len(tops)], [0.0, 0.0]))
    return net, ImageSet("embedded", "test", images, torch.zeros(len(tops), dtype=torch.long), ("a", "b"))


def test_figures_of_an_evaluation_and_of_an_explorer_hold_at_just_that_eps() -> None:
    """w . x with x_k = e_k is w_k, lost at a distance of w_k / |w|: eps is that of the third image, exactly or rounded up.

    Catches: `certified` of `evaluate`, verdicts, radii and margins of the explorer that no proof at that very eps is behind.
    """
    tops = [1.0, 2.0, 3.0, 4.0, 6.0, -1.0]
    net, images = stepping(tops)
    norm2 = sum(Fraction(t) ** 2 for t in tops)  # 67
    eps = next(v for v in (math.nextafter(3 / math.sqrt(67), s) for s in (0, 1)) if Fraction(v) ** 2 * norm2 >= 9)
    found = evaluate(net, images, eps, pgd_steps=1, power_steps=20, failure_prob=1e-9)
    assert found["first"]["certified"] == 2
    for guarantee in PROOFS:
        values = Explorer(net, images, repr(eps), guarantee, radii=True).run(range(len(tops)), {})["network"]
        for top, image in zip(tops, values["images"], strict=True):
            assert (image["verdict"] == "CERTIFIED") == (top > 3)
            assert image["radius"] is None or (top > 0 and Fraction(image["radius"]) ** 2 * norm2 < Fraction(top) ** 2)
            for radius, margin in zip(values["grid"], image["margin"], strict=True):
                assert margin <= 0 or margin + radius * math.sqrt(67) <= top + 1e-6


def test_rows_that_share_a_run_share_its_chance_of_failure() -> None:
    """Three images with radii at 0.4 each are wrong with a chance of at most 1. Catches: chances that do not add up."""
    net, images = stepping([1.0, 2.0, 3.0])
    rows, settings, summary = certify_images(Job("it", "0.1", failure_prob=0.4, radii=True), net, images)
    assert settings.failure_prob == 0.4
    assert summary["failure_prob_of_all"] == 1.0
    norm2 = Fraction(14)
    assert all(Fraction(row.radius or 0) ** 2 * norm2 < (row.index + 1) ** 2 for row in rows)
    shares = dict(zip(summary["curve"]["eps"], summary["curve"]["certified"], strict=True))
    for eps, share in shares.items():
        assert share <= 100 * sum(Fraction(eps) ** 2 * norm2 < (k + 1) ** 2 for k in range(3)) / 3


def test_radius_that_people_read_is_proved() -> None:
    """The class changes at 0.29999999999998, eps is 0.29999999999995, and "radius: median 0.3" is said of a proof.

    `shown` promises never to be above the number itself. The row has the right number.
    """
    net = nn.Sequential(nn.Flatten(), linear([[-1.0], [0.0]], [0.29999999999998, 0.0]))
    images = ImageSet("embedded", "test", torch.zeros(1, 1, 1, 1, dtype=torch.uint8), torch.zeros(1).long(), ("a", "b"))
    job = Job("it", "0.29999999999995", guarantee=Guarantee.DETERMINISTIC, radii=True)
    rows, _, summary = certify_images(job, net, images)
    assert rows[0].verdict == "CERTIFIED"
    assert Fraction(rows[0].radius or 0) < Fraction(0.29999999999998)
    said = describe(summary, Guarantee.DETERMINISTIC).split("radius: median ")[1].split(",")[0]
    assert Fraction(said) < Fraction(0.29999999999998)


def test_radii_with_odd_limits_that_a_caller_gives() -> None:
    """`least` and `below` of a finder: nothing above what is broken, whatever is below, at, or beyond that.

    Catches: limits of one image that reach another, and proofs that are skipped because of them.
    """
    net = linear([[-1.0, 0.0], [0.0, 0.0]], [1.0, 0.0])  # lost at a distance of 1 - a
    x = torch.tensor([[0.0, 5.0], [0.5, 5.0], [0.75, 0.0], [2.0, 0.0]], dtype=DOUBLE)
    finder = RadiusFinder(net, (2,), guarantee="deterministic")
    for below in (1e-300, 0.25, 0.5, 1.0, math.inf):
        limits = torch.full((4,), below, dtype=DOUBLE)
        radii = finder(x, torch.zeros(4).long(), below=limits).tolist()
        assert all(r < min(below, room) or r == 0 for r, room in zip(radii, (1, 0.5, 0.25, 0), strict=True))


@pytest.mark.parametrize("deployed", [None, "float32"])
def test_shared_layers_on_both_branches_of_a_sum(deployed: str | None) -> None:
    """One ReLU and one map used three times, x + f(x) and f(f(x)): the exact lead along the line through the center.

    Catches: a stage whose second use is taken for the first, at its box or at its slope.
    """

    class Net(nn.Module):
        def __init__(self, draw: random.Random):
            super().__init__()
            self.map = linear([[draw.randint(-2, 2)]], [draw.randint(-2, 2)])
            self.relu = nn.ReLU()
            self.head = linear([[draw.randint(-2, 2)], [draw.randint(-2, 2)]], [draw.randint(0, 3), 0])

        def forward(self, x: Tensor) -> Tensor:
            once = self.relu(self.map(x))
            return self.head(self.relu(self.map(once) + x) - self.relu(self.map(self.relu(once - x))) + once)

    draw, seen = random.Random(0), 0
    for _ in range(3):
        net = Net(draw)
        grid = torch.arange(-64, 65, dtype=DOUBLE)[:, None] / 16  # all numbers on the way are dyadic and exact
        lead = (net(grid)[:, 0] - net(grid)[:, 1]).tolist()
        for center in (40, 77):
            y = int(lead[center] < 0)
            lost = [abs(k - center) / 16 for k, value in enumerate(lead) if (value if y == 0 else -value) <= 0]
            if not lost or min(lost) == 0:
                continue
            x, label = grid[center : center + 1], torch.tensor([y])
            found = ll.certify(net, x, label, min(lost), guarantee="deterministic", attack_steps=0, deployed_dtype=deployed)
            assert not found.certified.any()
            seen += 1
    assert seen > 1


def falling() -> nn.Module:
    """Class 0 leads by 1 - x for x between 0 and 10, through a ReLU: norms over all inputs prove less than slopes do."""
    return nn.Sequential(linear([[1.0], [1.0]], [0.0, -10.0]), nn.ReLU(), linear([[-1.0, 1.0], [0.0, 0.0]], [1.0, 0.0]))


@pytest.mark.parametrize("guarantee", PROOFS)
def test_x_whose_memory_goes_on_with_other_inputs_during_the_call(guarantee: str) -> None:
    """A loader fills the same buffer again, in a thread or where one is told of the progress: 0.9, then -5, then 0.95.

    -5 is what is certified within 0.5. Neither the x that was handed over is robust there (1 - 1.4 < 0) nor the one that is
    in its place afterwards. x in float32 is copied on its way to float64, and nothing happens. So it is with models: what is
    changed and not put back must be noticed, or not matter.
    """
    net, x, eps = falling(), torch.tensor([[0.9]], dtype=DOUBLE), 0.5
    handed, following = x.clone(), iter([-5.0, 0.95])
    certifier = Certifier(net, (1,), guarantee=guarantee, attack_steps=0)

    def told(undecided: int) -> None:
        x.fill_(next(following, 0.95))

    certifier.watch = told
    try:
        certified = certifier(x, torch.tensor([0]), eps).certified
    except RuntimeError:
        return
    assert float(x) == 0.95
    for center in (handed, x):
        assert Fraction(1) - (Fraction(float(center)) + Fraction(2, 5)) < 0  # class 1 is ahead within 0.4
    assert not certified.any()


def test_images_whose_memory_goes_on_with_others_between_chunks() -> None:
    """250/255 leads by 5/255, and its row says CERTIFIED within 1/2 beside a checksum of just that image."""
    net = nn.Sequential(nn.Flatten(), linear([[-1.0], [0.0]], [1.0, 0.0]))
    pixels = torch.full((2, 1, 1, 1), 250, dtype=torch.uint8)
    images = ImageSet("embedded", "test", pixels, torch.zeros(2, dtype=torch.long), ("a", "b"))
    handed = images.take(torch.arange(2))
    job = Job("it", "1/2", guarantee=Guarantee.DETERMINISTIC, chunk=1, attack_steps=0)

    def say(line: str) -> None:
        pixels.zero_()

    rows, settings, _ = certify_images(job, net, images, say)
    assert settings.data_sha256 == data_checksum(handed)
    assert [row.verdict for row in rows] == ["UNKNOWN", "UNKNOWN"]
