"""Every bound against what a search in the ball finds, on random networks of every supported kind."""

from __future__ import annotations

import os

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

import locallip as ll
from locallip.activations import Box
from locallip.bounds import global_bound, jacobian_bounds, propagate, worst_logits
from locallip.norms import CholeskyNorm, ExactNorm, PowerNorm
from tests.random_networks import ACTIVATIONS, BODIES, random_network

KINDS = [(body, activation) for body in BODIES for activation in ACTIVATIONS]
SAMPLES, STARTS, STEPS = 2, 16, 8


def search(objective, x: Tensor, eps: Tensor) -> Tensor:
    """Points in the ball around each x that make `objective` large, (STARTS, B, *shape): ascent from many starts."""
    reach = eps.reshape(-1, *[1] * (x.dim() - 1))
    points = x + reach * _in_unit_ball(x)
    for _ in range(STEPS):
        points = points.detach().requires_grad_()
        (slope,) = torch.autograd.grad(objective(points).sum(), points)
        length = slope.flatten(2).norm(dim=2).clamp(min=1e-300).reshape(STARTS, *reach.shape)
        moved = points.detach() + 0.4 * reach * slope / length - x
        size = moved.flatten(2).norm(dim=2).clamp(min=1e-300).reshape(STARTS, *reach.shape)
        points = x + moved * (reach / size).clamp(max=1)
    return points.detach()


def _in_unit_ball(x: Tensor) -> Tensor:
    direction = torch.randn(STARTS, *x.shape, dtype=x.dtype)
    return direction / direction.flatten(2).norm(dim=2).reshape(STARTS, len(x), *[1] * (x.dim() - 1))


def through(function, points: Tensor) -> Tensor:
    """`function` on (STARTS, B, *shape) at once."""
    value = function(points.flatten(0, 1))
    return value.reshape(*points.shape[:2], *value.shape[1:])


def stage_values(network: ll.Network, x: Tensor) -> tuple[list[Tensor], list[Tensor]]:
    """Pre-activations of all stages but the last, and outputs of all sources, on a batch."""
    before, values = [], [x]
    for stage in network.stages[:-1]:
        before.append(stage.linear(values))
        values.append(stage.activation(before[-1]))
    return before, values


def draw_inputs(shape: tuple[int, ...], seed: int) -> Tensor:
    return torch.randn(SAMPLES, *shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


networks = {
    "kind": st.sampled_from(KINDS),
    "seed": st.integers(0, 10**6),
    "gain": st.sampled_from([0.5, 1.0, 3.0]),
    "radius": st.sampled_from([1e-3, 0.05, 0.3, 2.0]),
}
#: Networks a test: all that the bars ask for with LOCALLIP_THOROUGH=1, a fifth of them otherwise.
MANY = 200 if os.environ.get("LOCALLIP_THOROUGH") else 40
thorough = settings(max_examples=MANY, derandomize=True, suppress_health_check=list(HealthCheck))


@pytest.mark.parametrize("activation", ACTIVATIONS)
@given(box_radii=st.sampled_from(["local", "global"]), **{**networks, "kind": st.sampled_from(list(BODIES))})
@thorough
def test_nothing_found_in_the_ball_exceeds_boxes_balls_logits_or_lipschitz(activation, box_radii, kind, seed, gain, radius):
    """Many networks of every activation, their bodies drawn from all kinds."""
    torch.manual_seed(seed)
    model, shape = random_network(kind, activation, seed, gain)
    x, eps = draw_inputs(shape, seed), torch.full((SAMPLES,), radius, dtype=torch.float64)
    network = ll.lower(model, shape)
    rule = CholeskyNorm()
    with torch.no_grad():
        ceiling = global_bound(network, rule, eps, outward=True)
        trace = propagate(network, x, eps, rule, ceiling=ceiling, box_radii=box_radii, outward=True)
        bound = torch.minimum(trace.lipschitz, jacobian_bounds(network, trace))
        y = model(x).argmax(1)
        worst = {
            form: worst_logits(network, trace, y, form=form, outward=True).worst for form in ("box_ball", "ball", "lmt")
        }

    own = y.reshape(1, -1, 1).expand(STARTS, -1, 1)
    target = torch.randint(0, 3, (STARTS, SAMPLES, 1))

    def lead(points: Tensor) -> Tensor:
        logits = through(model, points)
        return logits.gather(2, target) - logits.gather(2, own)

    rivals = search(lead, x, eps)
    far = search(lambda p: (through(model, p) - model(x)).flatten(2).norm(dim=2), x, eps)
    with torch.no_grad():
        for points in (rivals, far):
            _no_margin_is_exceeded(model, points, worst, y)
            _no_region_is_left(network, points, x, trace)
            _no_slope_is_exceeded(model, points, bound)
    assert bool((trace.lipschitz <= ceiling.total * (1 + 1e-12)).all())


def _no_margin_is_exceeded(model, points: Tensor, worst: dict[str, Tensor], y: Tensor) -> None:
    logits = through(model, points)
    lead = logits - logits.gather(2, y.reshape(1, -1, 1).expand(STARTS, -1, 1))
    for form, values in worst.items():
        bound = values - values.gather(1, y[:, None])
        others = torch.arange(lead.shape[2]) != y[:, None]
        assert bool((lead <= bound)[:, others].all()), form


def _no_region_is_left(network: ll.Network, points: Tensor, x: Tensor, trace) -> None:
    before, values = stage_values(network, points.flatten(0, 1))
    _, centers = stage_values(network, x)
    for z, box in zip(before, trace.boxes, strict=True):
        _inside(z.reshape(STARTS, *box.lower.shape), box)
    for z, center, region in zip(values, centers, trace.regions, strict=True):
        z = z.reshape(STARTS, *center.shape)
        _inside(z, region.box)
        moved = z - center
        if region.outputs is not None:
            weight = region.outputs.to(z.dtype)
            assert bool((moved[:, weight == 0].abs() <= 1e-12).all())
            moved = torch.where(weight == 0, 0.0, moved / weight.clamp(min=1e-300))
        assert bool((moved.flatten(2).norm(dim=2) <= region.radius * (1 + 1e-9) + 1e-12).all())


def _inside(z: Tensor, box: Box) -> None:
    slack = 1e-12 * (1 + z.abs())
    assert bool(((z >= box.lower - slack) & (z <= box.upper + slack)).all())


def _no_slope_is_exceeded(model, points: Tensor, lipschitz: Tensor) -> None:
    """Difference quotients between points of the ball, near and far, and the Jacobian's norm along the way."""
    logits = through(model, points)
    for shift in (1, STARTS // 2):
        near = points.roll(shift, 0)
        rise = (logits - logits.roll(shift, 0)).flatten(2).norm(dim=2)
        run = (points - near).flatten(2).norm(dim=2)
        # A difference of logits is itself only good to rounding.
        assert bool((rise <= lipschitz * run * (1 + 1e-9) + 1e-12 * (1 + logits.abs().amax())).all())
    jacobian = torch.func.vmap(torch.func.jacrev(lambda p: model(p[None])[0]))(points[0])
    norms = torch.linalg.matrix_norm(jacobian.flatten(2), ord=2)
    assert bool((norms <= lipschitz * (1 + 1e-9)).all())


@given(**networks)
@settings(thorough, max_examples=MANY // 2)
def test_smaller_eps_never_gives_a_larger_bound_and_local_never_exceeds_global(kind, seed, gain, radius):
    model, shape = random_network(*kind, seed, gain)
    x = draw_inputs(shape, seed)
    total = ll.global_lipschitz(model, shape, guarantee="deterministic")
    bounds = [
        ll.local_lipschitz(model, x, share * radius, method="product", guarantee="deterministic")
        for share in (0, 0.1, 0.5, 1)
    ]
    for smaller, larger in zip(bounds, [*bounds[1:], torch.full_like(bounds[0], total)], strict=True):
        assert bool((smaller <= larger * (1 + 1e-9)).all())


@given(**networks)
@settings(thorough, max_examples=MANY // 2)
def test_the_guarantees_are_ordered(kind, seed, gain, radius):
    """estimate <= the exact product <= deterministic, and high probability is an upper bound close to it."""
    model, shape = random_network(*kind, seed, gain)
    x, eps = draw_inputs(shape, seed), torch.full((SAMPLES,), radius, dtype=torch.float64)
    torch.manual_seed(seed)
    estimate = ll.local_lipschitz(model, x, eps, method="product", guarantee="estimate", power_steps=20)
    likely = ll.local_lipschitz(model, x, eps, method="product", guarantee="high_probability", seed=seed)
    proved = ll.local_lipschitz(model, x, eps, method="product", guarantee="deterministic")
    network = ll.lower(model, shape)
    with torch.no_grad():
        oracle = propagate(network, x, eps, ExactNorm(), ceiling=global_bound(network, ExactNorm(), eps)).lipschitz
    assert bool((estimate <= proved * (1 + 1e-9)).all())
    assert bool((oracle <= proved * (1 + 1e-9)).all())
    assert bool((proved <= likely * (1 + 1e-6)).all())


@given(**networks)
@settings(thorough, max_examples=MANY // 2)
def test_no_certified_input_is_broken_by_search(kind, seed, gain, radius):
    certify_and_attack(kind, seed, gain, "local")


@given(**networks)
@settings(thorough, max_examples=MANY // 3)
def test_no_input_certified_with_slopes_is_broken_by_search(kind, seed, gain, radius):
    certify_and_attack(kind, seed, gain, "auto")


def certify_and_attack(kind, seed, gain, method):
    """Certify at a radius close to what can be certified, then attack exactly there."""
    torch.manual_seed(seed)
    model, shape = random_network(*kind, seed, gain)
    x = draw_inputs(shape, seed)
    y = model(x).argmax(1)
    radii = ll.certified_radius(model, x, y, seed=seed, method=method)
    # Norms found from other random starts may be looser by 0.2 per cent each; norms by factorization are the tightest. The
    # search for slopes may end elsewhere at another radius, so that a proof found at one need not be found at a smaller one.
    for share, guarantee in ((0.98, "high_probability"), (0.999999, "deterministic")) if method == "local" else ():
        found = ll.certify(model, x, y, radii * share, guarantee=guarantee, seed=seed, method=method)
        assert bool(found.certified[radii > 0].all())
    own = y.reshape(1, -1, 1).expand(STARTS, -1, 1)

    def rival(points: Tensor) -> Tensor:
        logits = through(model, points)
        return (logits - logits.gather(2, own)).scatter(2, own, -1e9).amax(2)

    points = search(rival, x, radii)
    with torch.no_grad():
        assert bool((rival(points) < 0)[:, radii > 0].all())


def test_power_iteration_stays_an_estimate():
    """With too few steps the estimate lies below the norm: the reason why it never stands in a certificate."""
    model, shape = random_network("convolutional", "relu", 0, 1.0)
    network = ll.lower(model, shape)
    like = torch.ones(1, dtype=torch.float64)
    torch.manual_seed(0)
    with torch.no_grad():
        rough = global_bound(network, PowerNorm(1), like).total
        exact = global_bound(network, ExactNorm(), like).total
    assert float(rough) < 0.99 * float(exact)
