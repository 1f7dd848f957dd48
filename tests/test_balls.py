"""What a ball of each norm is, and every bound over l-infinity balls against exact values and against attacks."""

from __future__ import annotations

import itertools
import math
import sys
from fractions import Fraction

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import locallip as ll
from locallip import balls
from locallip.attacks import apgd_l2, apgd_targets, margins, pgd_attack, pgd_l2, strong_attack, withstands
from locallip.balls import INF, L2, as_ball, box_of, outside, within
from locallip.bounds import propagate
from locallip.certify.prover import Prover
from locallip.norms import ExactNorm
from tests.random_networks import ACTIVATIONS, BODIES, random_network

BOTH = pytest.mark.parametrize("ball", [L2, INF], ids=["l2", "inf"])
GUARANTEES = ("deterministic", "high_probability", "estimate")


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def linear(weight: list[list[float]], bias: list[float]) -> nn.Linear:
    layer = nn.Linear(len(weight[0]), len(weight), dtype=torch.float64)
    with torch.no_grad():
        layer.weight.copy_(torch.tensor(weight, dtype=torch.float64))
        layer.bias.copy_(torch.tensor(bias, dtype=torch.float64))
    return layer


def random_layer(inputs: int = 7, classes: int = 4, seed: int = 0) -> nn.Linear:
    torch.manual_seed(seed)
    return nn.Linear(inputs, classes, dtype=torch.float64)


def l1_distances(layer: nn.Linear, x: Tensor, y: Tensor) -> Tensor:
    """The exact l-infinity distance of each x to where another class wins, (B,): the lead over the l1 norm of rows."""
    logits, weight = layer(x), layer.weight
    leads = logits.gather(1, y[:, None]) - logits
    sizes = (weight[y][:, None] - weight[None]).abs().sum(2)
    return torch.where(sizes > 0, leads / sizes, math.inf).amin(1).detach()


# The ball itself.


@pytest.mark.parametrize("given_", ["inf", math.inf, INF])
def test_infinity_is_read_in_every_spelling(given_) -> None:
    assert as_ball(given_) is INF


@pytest.mark.parametrize("given_", ["2", 2, 2.0, L2])
def test_two_is_read_in_every_spelling(given_) -> None:
    assert as_ball(given_) is L2


@pytest.mark.parametrize("given_", ["1", 1, 0, True, "l2", "nan", math.nan, -math.inf, None, [2]])
def test_other_norms_are_refused_by_name(given_) -> None:
    with pytest.raises(ValueError, match="norm must be '2' or 'inf', got"):
        ll.certified_radius(random_layer(), torch.zeros(1, 7), torch.zeros(1, dtype=torch.long), norm=given_)


@BOTH
@given(seed=st.integers(0, 10**6), reach=st.sampled_from([1e-9, 0.1, 3.0]), boxed=st.booleans())
def test_what_is_drawn_stepped_and_projected_stays_inside(ball, seed: int, reach: float, boxed: bool) -> None:
    x = torch.rand(3, 2, 4, generator=seeded(seed), dtype=torch.float64)
    eps, domain = torch.full((3,), reach, dtype=torch.float64), (0.0, 1.0) if boxed else None
    far = 100 * torch.randn(x.shape, generator=seeded(seed + 1), dtype=torch.float64)
    shaped = balls.reach_of(x, eps)
    for point in (ball.random_start(x, shaped, domain, seeded(seed)), ball.project(x, far, shaped, domain)):
        assert bool((ball.length(point - x) <= eps).all())
        assert not bool(outside(point, domain).any())
    step = ball.steepest(far)
    assert torch.allclose(ball.length(step), torch.ones_like(eps))
    # No other point of the unit ball rises more along `far`.
    others = ball.shortened(far * torch.rand(x.shape, generator=seeded(seed), dtype=torch.float64), torch.ones_like(shaped))
    assert bool(((far * (step - others)).flatten(1).sum(1) >= 0).all())


def test_starts_fill_the_cube_and_not_only_its_surface() -> None:
    x = torch.zeros(200, 5)
    start = INF.random_start(x, torch.ones(200, 1), None, seeded())
    length = start.abs().amax(1)
    assert float(length.min()) < 0.6
    assert 0.95 < float(length.max()) <= 1
    assert bool((start.abs().mean(0) > 0.4).all())


@BOTH
def test_gradients_that_overflow_vanish_or_are_nan_make_no_step_leave_the_ball(ball) -> None:
    slope = torch.tensor(
        [[math.nan, 1.0], [math.inf, 0.0], [0.0, 0.0], [1e-300, 1e300], [1e300, 1e300]], dtype=torch.float64
    )
    step = ball.steepest(slope)
    assert bool(torch.isfinite(step).all())
    assert bool((ball.length(step) <= 1 + 1e-12).all())


@given(
    count=st.integers(1, 40),
    eps=st.sampled_from([0.0, 1e-300, 1e-9, 2 / 255, 0.1, 7.0, 1e200]),
    scale=st.sampled_from([0.0, 1.0, 1e6]),
    boxed=st.booleans(),
    seed=st.integers(0, 10**6),
)
def test_the_l2_ball_around_an_l_infinity_ball_holds_its_corners(count, eps, scale, boxed, seed) -> None:
    """Exactly, in fractions: the furthest corner inside the domain is no further away than the radius."""
    x = scale * torch.rand(1, count, generator=seeded(seed), dtype=torch.float64)
    domain = (0.0, scale + 0.01) if boxed else None
    radii = torch.tensor([eps], dtype=torch.float64)
    box = box_of(x, radii, domain, True)
    radius, square = INF.l2_radius(x, radii, box, True), Fraction(0)
    for i in range(count):
        at = Fraction(float(x[0, i]))
        ends = [at - Fraction(eps), at + Fraction(eps)]
        if domain is not None:
            ends = [min(max(end, Fraction(domain[0])), Fraction(domain[1])) for end in ends]
        square += max(abs(end - at) for end in ends) ** 2
        assert Fraction(float(box[0][0, i])) <= ends[0]
        assert ends[1] <= Fraction(float(box[1][0, i]))
    assert Fraction(float(radius)) ** 2 >= square
    assert float(radius) <= eps * math.sqrt(count) * (1 + 1e-12) + 1e-99
    assert (float(radius) == 0) == (eps == 0)


def test_the_l2_ball_is_smaller_where_the_domain_cuts_the_cube() -> None:
    x, eps = torch.zeros(1, 4, dtype=torch.float64), torch.ones(1, dtype=torch.float64)
    for domain, expected in ((None, 2.0), ((0.0, 0.5), 1.0)):
        radius = INF.l2_radius(x, eps, box_of(x, eps, domain, True), True)
        assert float(radius) == pytest.approx(expected, rel=1e-12)


@BOTH
def test_the_diameter_of_a_domain(ball) -> None:
    x = torch.zeros(1, 3, 3)
    low, high = torch.zeros(3, 3), torch.arange(9.0).reshape(3, 3)
    assert ball.diameter((0.0, 1.0), x) == pytest.approx(3.0 if ball is L2 else 1.0)
    assert ball.diameter((low, high), x) == pytest.approx(float(high.norm()) if ball is L2 else 8.0)
    assert ball.diameter(None, x) == math.inf


# Bounds over l-infinity balls against exact values.


@pytest.mark.parametrize("guarantee", GUARANTEES)
@pytest.mark.parametrize("method", ["local", "lines", "auto"])
def test_linear_networks_are_certified_up_to_their_exact_distance(guarantee: str, method: str) -> None:
    layer = random_layer()
    x = torch.randn(6, 7, generator=seeded(), dtype=torch.float64)
    y = layer(x).argmax(1)
    exact = l1_distances(layer, x, y)
    found = ll.certified_radius(layer, x, y, norm="inf", guarantee=guarantee, method=method, seed=0)
    assert bool((found <= exact * (1 + 1e-12)).all())
    assert bool((found >= exact * (0.99 if guarantee == "estimate" else 0.995)).all())
    for share, expected in ((0.9999, True), (1.0001, False)):
        verdicts = ll.certify(layer, x, y, share * exact, norm=math.inf, guarantee=guarantee, method=method, seed=0)
        assert verdicts.certified.tolist() == [expected] * 6
        assert verdicts.norm == "inf"


@given(seed=st.integers(0, 10**6), eps=st.sampled_from([1e-3, 0.1, 2.0]), boxed=st.booleans())
def test_margins_of_linear_networks_are_exact_and_never_above_fractions(seed: int, eps: float, boxed: bool) -> None:
    """min over the box of F_y - F_i in fractions, which neither rounding nor the domain may exceed."""
    layer = random_layer(5, 3, seed)
    x = torch.rand(1, 5, generator=seeded(seed), dtype=torch.float64)
    domain, radii = ((0.0, 1.0) if boxed else None), torch.tensor([eps], dtype=torch.float64)
    y = torch.tensor([seed % 3])
    found = Prover(layer, (5,), "deterministic", norm="inf").margin(x, y, radii, domain=domain)
    rows = [[Fraction(v) for v in row] for row in layer.weight.tolist()]
    offsets, at = [Fraction(v) for v in layer.bias.tolist()], [Fraction(v) for v in x[0].tolist()]
    least = []
    for i in range(3):
        if i == int(y):
            continue
        value = offsets[int(y)] - offsets[i]
        for j, c in enumerate(at):
            low, high = c - Fraction(eps), c + Fraction(eps)
            if domain is not None:
                low, high = max(low, Fraction(0)), min(high, Fraction(1))
            slope = rows[int(y)][j] - rows[i][j]
            value += min(slope * low, slope * high)
        least.append(value)
    exact = min(least)
    assert Fraction(float(found.worst)) <= exact
    assert float(found.worst) == pytest.approx(float(exact), abs=1e-11)


def test_huge_and_tiny_terms_round_to_the_safe_side() -> None:
    """1e16 + 1 - 1e16: the lead over the box is lost in rounding, and then nothing is certified."""
    layer = linear([[1e16, 1.0, -1e16], [0.0, 0.0, 0.0]], [0.0, 0.9999])
    x, y = torch.ones(1, 3, dtype=torch.float64), torch.tensor([0])
    for guarantee in ("deterministic", "high_probability"):
        found = ll.certify(layer, x, y, 1e-30, norm="inf", guarantee=guarantee, attack_steps=0, seed=0)
        assert found.verdicts == [ll.Verdict.UNKNOWN]


@pytest.mark.parametrize("domain", [None, (0.0, 1.0), "box"])
def test_boxes_of_the_first_layer_are_those_of_interval_arithmetic(domain) -> None:
    """All corners of the cube, enumerated: the box holds every value, and its ends are reached."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3)).double()
    x, eps = torch.rand(2, 6, dtype=torch.float64), torch.tensor([0.3, 0.05], dtype=torch.float64)
    if domain == "box":
        domain = x.amin(0) - 0.1 * torch.rand(6), x.amax(0) + 0.02
    network = ll.lower(model, (6,))
    trace = propagate(network, x, eps, ExactNorm(), input_domain=domain, ball=INF, outward=True)
    signs = torch.tensor(list(itertools.product([-1.0, 1.0], repeat=6)), dtype=torch.float64)
    corners = within((x[None] + eps[:, None] * signs[:, None]).flatten(0, 1), domain)
    values = model[0](corners).reshape(64, 2, 5)
    box = trace.boxes[0]
    assert bool((box.lower <= values).all())
    assert bool((values <= box.upper).all())
    assert torch.allclose(box.lower, values.amin(0), atol=1e-12)
    assert torch.allclose(box.upper, values.amax(0), atol=1e-12)


def test_a_domain_of_tensors_is_a_box_of_its_own() -> None:
    """Half widths that differ: a large eps, and the domain is the box that counts."""
    layer = random_layer(5, 3)
    low, high = torch.tensor([0.0, -1.0, 0.5, 2.0, 0.0]).double(), torch.tensor([0.1, 1.0, 0.5, 2.2, 0.7]).double()
    x = torch.lerp(low, high, 0.5)[None]
    y = layer(x).argmax(1)
    found = Prover(layer, (5,), "deterministic", norm="inf").margin(x, y, torch.tensor([5.0]).double(), domain=(low, high))
    corners = torch.tensor([list(c) for c in itertools.product(*zip(low.tolist(), high.tolist(), strict=True))]).double()
    exact = margins(layer(corners), y.expand(len(corners))).min().detach()
    assert float(found.worst) == pytest.approx(float(exact), abs=1e-12)


@pytest.mark.parametrize(
    ("domain", "message"),
    [
        ((torch.zeros(5), torch.ones(4)), "of one shape"),
        ((torch.zeros(5), torch.ones(5, dtype=torch.long)), "floating-point"),
        ((torch.zeros(5), -torch.ones(5)), "low <= high"),
        ((torch.zeros(5), torch.full((5,), math.nan)), "no NaN"),
        ((torch.zeros(4), torch.ones(4)), "ends of shape"),
        ((torch.full((5,), 0.5), torch.ones(5)), "x leaves the box input_domain"),
    ],
)
def test_boxes_that_make_no_sense_are_refused(domain, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ll.certify(random_layer(5), torch.zeros(1, 5), torch.tensor([0]), 0.1, norm="inf", input_domain=domain)


# Bounds over l-infinity balls against attacks.


def attacked_from_everywhere(model: nn.Module, x: Tensor, y: Tensor, eps: Tensor, domain) -> Tensor:
    """The smallest margin that corners, random points and ascent find in the balls, (B,)."""
    least = margins(model(x), y)
    for start in range(2):
        settings_ = {"ball": INF, "input_domain": domain, "generator": seeded(start)}
        for search in (pgd_l2, apgd_l2):
            found = search(model, x, y, eps, steps=10, **settings_)
            assert bool((INF.length(found - x) <= eps * (1 + 1e-12)).all())
            least = torch.minimum(least, margins(model(found), y))
    for _ in range(20):
        signs = torch.randn(x.shape, dtype=x.dtype).sign()
        corner = within(x + balls.reach_of(x, eps) * signs, domain)
        least = torch.minimum(least, margins(model(corner), y))
    return least.detach()


@pytest.mark.parametrize("activation", ACTIVATIONS)
@given(
    body=st.sampled_from(list(BODIES)),
    seed=st.integers(0, 10**6),
    gain=st.sampled_from([0.5, 1.0, 2.0]),
    eps=st.sampled_from([1e-3, 0.02, 0.3]),
    method=st.sampled_from(["local", "lines", "auto"]),
    guarantee=st.sampled_from(GUARANTEES[:2]),
    boxed=st.booleans(),
)
@settings(max_examples=8, derandomize=True, suppress_health_check=list(HealthCheck))
def test_nothing_found_in_the_ball_is_below_the_proved_margin(
    activation, body, seed, gain, eps, method, guarantee, boxed
) -> None:
    torch.manual_seed(seed)
    model, shape = random_network(body, activation, seed, gain)
    x, domain = torch.rand(2, *shape, dtype=torch.float64), (0.0, 1.0) if boxed else None
    y, radii = model(x).argmax(1), torch.full((2,), eps, dtype=torch.float64)
    prover = Prover(model, shape, guarantee, method=method, norm="inf", seed=0)
    local, relax = ("none", "boxes") if method == "lines" else ("all", "boxes" if method == "auto" else None)
    proved = prover.margin(x, y, radii, local=local, relax=relax, domain=domain).worst
    least = attacked_from_everywhere(model, x, y, radii, domain)
    assert bool((proved <= least + 1e-9 * (1 + least.abs())).all())


def test_radii_of_a_relu_network_stay_below_what_attacks_need() -> None:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(12, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4)).double()
    x = torch.rand(10, 12, dtype=torch.float64)
    y = model(x).argmax(1)
    by = {name: ll.certified_radius(model, x, y, norm="inf", method=name, seed=0) for name in ("local", "lines", "auto")}
    for found in by.values():
        assert not bool((attacked_from_everywhere(model, x, y, found, None) < 0).any())
    assert bool((by["auto"] >= by["lines"] * 0.98).all())
    l2 = ll.certified_radius(model, x, y, seed=0)
    assert bool((by["auto"] >= 0.98 * l2 / 12**0.5).all())  # the cube lies in that ball
    branched = ll.certify(model, x, y, 1.1 * by["auto"], norm="inf", seed=0, branch_seconds=0.5)
    for i in branched.certified.nonzero()[:, 0].tolist():
        some = slice(i, i + 1)
        assert float(attacked_from_everywhere(model, x[some], y[some], 1.1 * by["auto"][some], None)) > 0


def test_the_float32_program_is_covered_in_l_infinity_too() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3))
    x = torch.rand(6, 8)
    y = model(x).argmax(1)
    plain, deployed = (
        ll.certified_radius(model, x, y, norm="inf", seed=0, deployed_dtype=dtype) for dtype in (None, "float32")
    )
    assert bool((deployed <= plain * 1.01).all())
    assert bool((deployed > 0).all())
    found = pgd_l2(model, x, y, deployed.float() * (1 - 1e-6), ball=INF, steps=30, generator=seeded())
    assert bool((margins(model(found), y) > 0).all())


# The library broken on purpose.


def test_forgetting_the_root_of_n_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """With an l2 ball of radius eps in place of eps sqrt(n) the exact distance of a linear network would be passed."""
    layer = random_layer(9, 3)
    x = torch.randn(4, 9, generator=seeded(), dtype=torch.float64)
    y = layer(x).argmax(1)
    above = 1.5 * l1_distances(layer, x, y)
    options = {"norm": "inf", "attack_steps": 0, "seed": 0}
    assert not bool(ll.certify(layer, x, y, above, **options).certified.any())
    monkeypatch.setattr(balls._Inf, "l2_radius", lambda self, x, eps, box, outward: eps)
    assert bool(ll.certify(layer, x, y, above, **options).certified.all())


def test_forgetting_that_a_cube_is_no_ball_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Taken for a ball alone, without its box, a cube loses tightness and nothing else: that is seen as well."""
    layer = random_layer(9, 3)
    x = torch.randn(4, 9, generator=seeded(), dtype=torch.float64)
    y = layer(x).argmax(1)
    exact = l1_distances(layer, x, y)
    assert bool((ll.certified_radius(layer, x, y, norm="inf", seed=0) > 0.99 * exact).all())
    monkeypatch.setattr(
        sys.modules["locallip.bounds.propagate"], "box_of", lambda x, eps, domain, outward: (x - 1e9, x + 1e9)
    )
    assert not bool((ll.certified_radius(layer, x, y, norm="inf", seed=0) > 0.99 * exact).any())


# Attacks.


@pytest.mark.parametrize("name", ["pgd", "pgd_attack", "apgd", "apgd_targets", "strong"])
def test_attacks_break_linear_networks_just_beyond_their_distance(name: str) -> None:
    layer = random_layer(classes=2)
    x = torch.randn(12, 7, generator=seeded(), dtype=torch.float64)
    y = layer(x).argmax(1)
    exact = l1_distances(layer, x, y)
    searches = {
        "pgd": pgd_l2,
        "pgd_attack": pgd_attack,
        "apgd": apgd_l2,
        "apgd_targets": apgd_targets,
        "strong": lambda *args, **more: strong_attack(*args, **more).points,
    }
    for share, falls in ((1.02, True), (0.98, False)):
        found = searches[name](layer, x, y, share * exact, steps=40, ball=INF, generator=seeded())
        assert bool((INF.length(found - x) <= share * exact).all())
        assert (margins(layer(found), y) < 0).tolist() == [falls] * 12
    stands = withstands(layer, x, y, 0.98 * exact, steps=20, ball=INF, generator=seeded())
    assert bool(stands.all())
    assert not bool(withstands(layer, x, y, 1.02 * exact, steps=20, ball=INF, generator=seeded()).any())


def test_attacked_inputs_of_certify_lie_in_the_cube_and_beyond_its_l2_ball() -> None:
    """Just beyond the exact distance every input falls, to points that no l2 ball of that radius holds."""
    layer = random_layer(classes=2)
    x = torch.randn(6, 7, generator=seeded(), dtype=torch.float64)
    y = layer(x).argmax(1)
    eps = 1.05 * l1_distances(layer, x, y)
    found = ll.certify(layer, x, y, eps, norm="inf", seed=0)
    assert found.verdicts == [ll.Verdict.ATTACKED] * 6
    assert bool(ll.certify(layer, x, y, eps, seed=0).certified.all())
