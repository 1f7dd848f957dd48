"""The dual of the worst logit against a general solver, and the order of its three forms."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import minimize
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import locallip as ll
from locallip.bounds import global_bound, margin, propagate, support, worst_logits
from locallip.norms import CholeskyNorm, ExactNorm
from tests.random_networks import BODIES, random_network


def solve(direction: np.ndarray, lower: np.ndarray, upper: np.ndarray, radius: float) -> float:
    """max d.t over the box cut with the ball, by sequential quadratic programming from a feasible start."""
    result = minimize(
        lambda t: -direction @ t,
        np.zeros_like(direction),
        jac=lambda t: -direction,
        bounds=list(zip(lower, upper, strict=True)),
        constraints=[{"type": "ineq", "fun": lambda t: radius**2 - t @ t, "jac": lambda t: -2 * t}],
        method="SLSQP",
        options={"maxiter": 500, "ftol": 1e-14},
    )
    feasible = np.clip(result.x, lower, upper)
    return float(direction @ feasible * min(1.0, radius / max(np.linalg.norm(feasible), 1e-300)))


@given(seed=st.integers(0, 10**6), size=st.integers(1, 12), share=st.sampled_from([0.05, 0.3, 0.7, 1.0, 3.0]))
@settings(max_examples=300, derandomize=True)
def test_support_is_the_optimum_and_never_below_it(seed, size, share):
    rng = np.random.default_rng(seed)
    direction = rng.normal(size=size) * (rng.random(size) < 0.8)
    lower, upper = -rng.random(size) * (rng.random(size) < 0.8), rng.random(size) * (rng.random(size) < 0.8)
    radius = share * float(np.linalg.norm(np.maximum(-lower, upper))) + 1e-3
    found = solve(direction, lower, upper, radius)
    tensors = [torch.from_numpy(v)[None, None] for v in (direction, lower, upper)]
    value = support(*tensors, torch.tensor([[radius]], dtype=torch.float64)).item()
    assert value >= found - 1e-9
    assert value <= found + 1e-6


@pytest.mark.parametrize("steps", [0, 1, 3])
def test_fewer_steps_are_looser_never_wrong(steps):
    generator = torch.Generator().manual_seed(0)
    direction = torch.randn(50, 4, 20, generator=generator, dtype=torch.float64)
    lower = -torch.rand(50, 1, 20, generator=generator, dtype=torch.float64)
    upper = torch.rand(50, 1, 20, generator=generator, dtype=torch.float64)
    radius = torch.rand(50, 1, generator=generator, dtype=torch.float64) * 3
    best = support(direction, lower, upper, radius, steps=60)
    rough = support(direction, lower, upper, radius, steps=steps)
    assert bool((rough >= best - 1e-12).all())
    assert bool((rough > best + 1e-6).any()) or steps == 3


def test_support_of_nothing_is_nothing():
    zero = torch.zeros(1, 1, 3, dtype=torch.float64)
    ones = torch.ones(1, 1, 3, dtype=torch.float64)
    radius = torch.ones(1, 1, dtype=torch.float64)
    for value in (
        support(zero, -ones, ones, radius),
        support(ones, zero, zero, radius),
        support(ones, -ones, ones, 0 * radius),
    ):
        assert 0 <= value.item() <= 1e-15


def test_gradient_of_support_is_that_of_the_optimum():
    generator = torch.Generator().manual_seed(1)
    direction = torch.randn(1, 2, 6, generator=generator, dtype=torch.float64, requires_grad=True)
    lower = (-torch.rand(1, 1, 6, generator=generator, dtype=torch.float64)).requires_grad_()
    upper = torch.rand(1, 1, 6, generator=generator, dtype=torch.float64).requires_grad_()
    radius = torch.full((1, 1), 0.8, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(support, (direction, lower, upper, radius), atol=1e-6)


@pytest.mark.parametrize("body", BODIES)
def test_box_and_ball_is_tighter_than_ball_is_tighter_than_lmt(body):
    strict = False
    for seed in range(6):
        model, shape = random_network(body, "relu_theta", seed, 1.0)
        network = ll.lower(model, shape)
        x = torch.randn(4, *shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
        eps = torch.full((4,), 0.1, dtype=torch.float64)
        with torch.no_grad():
            y = model(x).argmax(1)
            trace = propagate(network, x, eps, ExactNorm(), ceiling=global_bound(network, ExactNorm(), eps))
            box_ball, ball, lmt = (worst_logits(network, trace, y, form=form).worst for form in ("box_ball", "ball", "lmt"))
        assert bool((box_ball <= ball + 1e-12).all())
        assert bool((ball <= lmt + 1e-12).all())
        strict |= bool((box_ball < ball - 1e-9).any())
    assert strict


def test_worst_logits_of_a_linear_network_are_exact():
    """Over a ball alone the rise of class i over y is eps ||w_i - w_y||."""
    torch.manual_seed(0)
    model = nn.Linear(5, 3).double()
    network = ll.lower(model, (5,))
    x, y, eps = torch.randn(2, 5, dtype=torch.float64), torch.tensor([0, 2]), torch.tensor([0.3, 0.7], dtype=torch.float64)
    with torch.no_grad():
        trace = propagate(network, x, eps, CholeskyNorm())
        worst = worst_logits(network, trace, y, form="ball")
        rise = eps[:, None] * (model.weight[None] - model.weight[y][:, None]).norm(dim=2)
        torch.testing.assert_close(worst.worst, model(x) + rise)
        torch.testing.assert_close(worst.clean, model(x))


@pytest.mark.parametrize("form", ["box_ball", "box", "ball"])
@pytest.mark.parametrize("outward", [False, True])
def test_many_classes_in_parts_give_the_same_logits_and_gradients(monkeypatch, form, outward):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 37)).double()
    x, y = torch.randn(5, 6, dtype=torch.float64), torch.tensor([0, 36, 5, 12, 20])
    network, eps = ll.lower(model, (6,)), torch.full((5,), 0.3, dtype=torch.float64)
    found = []
    for at_once in (margin.AT_ONCE, 5 * 16 * 4, 1):  # all at once, four classes, one
        monkeypatch.setattr(margin, "AT_ONCE", at_once)
        model.zero_grad()
        ceiling = global_bound(network, ExactNorm(), eps)
        trace = propagate(network, x, eps, ExactNorm(), ceiling=ceiling, outward=outward)
        worst = worst_logits(network, trace, y, form=form, outward=outward, slope_steps=0).worst
        if not outward:
            worst.square().sum().backward()
        found.append([worst.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)])
    for other in found[1:]:
        assert len(other) == len(found[0])
        for ours, theirs in zip(other, found[0], strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
    assert len(found[0]) == (1 if outward else 5)


def test_many_classes_need_bounded_memory(monkeypatch):
    """The largest tensor on the way has as many numbers as are allowed, not classes times units times samples."""
    monkeypatch.setattr(margin, "AT_ONCE", 20_000)
    largest = 0

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            nonlocal largest
            out = func(*args, **(kwargs or {}))
            sizes = [t.numel() for t in tree_leaves(out) if isinstance(t, torch.Tensor) and t._base is None]
            largest = max([largest, *sizes])
            return out

    model = nn.Sequential(nn.Linear(6, 100), nn.ReLU(), nn.Linear(100, 150))
    x, y = torch.randn(8, 6), torch.arange(8)
    network, eps = ll.lower(model, (6,)), torch.full((8,), 0.3)
    trace = propagate(network, x, eps, ExactNorm(), ceiling=global_bound(network, ExactNorm(), eps))
    with Watch():
        worst_logits(network, trace, y).worst.sum().backward()
    assert 10_000 < largest <= 150 * 150 < 8 * 100 * 150  # the identity from which the rows come is the largest
