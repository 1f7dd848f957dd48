"""Checks of the checks: the library is broken on purpose, and the audit or an exact computation must notice.

Every test first shows that the library as it is passes.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable
from fractions import Fraction

import pytest
import torch
from torch import Tensor, nn

import locallip as ll
from locallip.activations import Clip, Varying
from locallip.audit import Auditor, Claims, largest_claims
from locallip.bounds import margin
from locallip.certify import cascade
from locallip.norms import PowerNorm
from locallip.norms.base import ProvenRule
from locallip.ops import Conv, Dense
from locallip.rounding import gamma, up
from tests.audited import certifier_of, convolutional, everything, images, linear_claims, logistic
from tests.test_attacker import PROOFS, linear, tensor, verdict

proofs = pytest.mark.parametrize("guarantee", PROOFS)


def issued(model: nn.Module, x: Tensor, y: Tensor, eps: float, probes: int = 1, guarantee: str = "deterministic") -> Claims:
    """What the library certifies, broken or not."""
    radii = torch.full((len(x),), eps, dtype=torch.float64)
    return largest_claims(certifier_of(guarantee)(model), x, y, radii, torch.arange(len(x)), probes)


def broken(model: nn.Module, claims: Claims, kind: str = "attack") -> int:
    """How many of 300 attempts or so break a claim."""
    found = Auditor(model, lambda model: everything, attempts=1000, steps=20).run(claims, [kind]).kinds[kind]
    assert found.within_rounding == 0 or found.broken > 0
    return found.broken


def without_rounding(patch: pytest.MonkeyPatch) -> None:
    """No allowance for rounding anywhere."""
    for name, module in list(sys.modules.items()):
        if name.startswith("locallip"):
            if getattr(module, "gamma", None) is gamma:
                patch.setattr(module, "gamma", lambda n, dtype: 0.0)
            if getattr(module, "up", None) is up:
                patch.setattr(module, "up", lambda value, roundings=8: value)


@proofs
def test_without_rounding_a_wrong_class_is_certified(guarantee: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """1e16 + 1 - 1e16 is 1, and 0 in float64 if added up in this order: then 0.5 seems to be larger."""
    orders = list(itertools.permutations([1e16, 1.0, -1e16]))
    models = [linear([list(order), [0.0] * 3], [0.0, 0.5]) for order in orders]
    assert all(sum(map(Fraction, order)) == 1 for order in orders)  # so that class 0 leads by 0.5

    def wrong() -> list[bool]:
        return [verdict(model, tensor([[1.0, 1.0, 1.0]]), 1, 1e-18, guarantee) == "CERTIFIED" for model in models]

    assert not any(wrong())
    without_rounding(monkeypatch)
    assert any(wrong())


@proofs
def test_without_rounding_a_norm_is_too_small(guarantee: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """W2 W1 cancels to a number that float64 has few digits of."""
    pairs = [(1.226705859381049 * (1 + k / 97), 0.9622950358343828 / (1 + k / 89)) for k in range(20)]
    models = [nn.Sequential(linear([[c], [c]]), linear([[a, -a * (1 - 2.0**-47)]])) for a, c in pairs]
    exact = [
        abs(sum(Fraction(w) * Fraction(c) for w in model[1].weight[0].tolist()))
        for model, (_, c) in zip(models, pairs, strict=True)
    ]

    def too_small() -> list[bool]:
        bounds = [ll.global_lipschitz(model, (1,), guarantee=guarantee, seed=1) for model in models]
        return [Fraction(bound) < true for bound, true in zip(bounds, exact, strict=True)]

    assert not any(too_small())
    without_rounding(monkeypatch)
    assert any(too_small())


def near_the_boundary(model: nn.Module, count: int) -> Tensor:
    """Points between images of different classes where these are nearly even, (count, 1, 28, 28)."""
    x, _ = images(2 * count)
    first, second = x[:count], x[count:]
    exact, low, high = model.double(), torch.zeros(count, dtype=torch.float64), torch.ones(count, dtype=torch.float64)
    classes = exact(first).argmax(1)
    for _ in range(18):
        middle = ((low + high) / 2).reshape(-1, 1, 1, 1)
        same = exact(first + middle * (second - first)).argmax(1) == classes
        low, high = torch.where(same, middle.flatten(), low), torch.where(same, high, middle.flatten())
    model.float()
    return first + low.reshape(-1, 1, 1, 1) * (second - first)


def ten_bits(value: Tensor) -> Tensor:
    """Rounded as tensor cores round what they multiply in TF32: 10 bits behind the point."""
    mantissa, exponent = torch.frexp(value)
    return torch.ldexp((mantissa * 2.0**11).round() / 2.0**11, exponent)


def in_tf32(apply: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def rounded(op: Dense | Conv, v: Tensor) -> Tensor:
        weight = op.weight
        op.weight = lambda: ten_bits(weight().double())
        try:
            return apply(op, ten_bits(v))
        finally:
            op.weight = weight

    return rounded


@pytest.mark.parametrize("build", [logistic, convolutional])
def test_tf32_is_found(build: Callable[[], nn.Module], monkeypatch: pytest.MonkeyPatch) -> None:
    """Certificates at points near the boundary, for each of the ten classes that a point might be said to have.

    Lowering compares the network with the module and refuses; where that is left out as well, the audit finds it.
    """
    model = build()
    points = near_the_boundary(model, 12)
    x, y = points.repeat(10, 1, 1, 1), torch.arange(10).repeat_interleave(12)
    right = issued(model, x, y, 1e-7)
    assert len(right) > 0
    assert broken(model, right) == 0
    with monkeypatch.context() as patch:
        for kind in (Dense, Conv):
            patch.setattr(kind, "apply", in_tf32(kind.apply))
        with pytest.raises(ll.UnsupportedLayer, match="does not compute"):
            issued(model, x, y, 1e-7)
        patch.setattr(sys.modules["locallip.network.lower"], "check_same_function", lambda *args: None)
        wrong = issued(model, x, y, 1e-7)
    assert broken(model, wrong) > 0


def aligned() -> nn.Module:
    """The lead falls fastest where the first layer stretches most: 2 - u^T W x for its top singular vector u."""
    generator = torch.Generator().manual_seed(5)
    weight = torch.randn(24, 24, generator=generator, dtype=torch.float64)
    u = torch.linalg.svd(weight)[0][:, 0]
    model = nn.Sequential(nn.Linear(24, 24), nn.ReLU(), nn.Linear(24, 2)).double()
    with torch.no_grad():
        model[0].weight.copy_(weight)
        model[0].bias.fill_(20.0)  # all units stay active
        model[2].weight.zero_()[1] = u
        model[2].bias.copy_(torch.stack([2 + 20 * u.sum(), u.new_zeros(())]))
    return model


@proofs
def test_power_iteration_in_place_of_the_proof_is_found(guarantee: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, x, y = aligned(), torch.zeros(1, 24, dtype=torch.float64), torch.tensor([0])
    radius = 2 / float(torch.linalg.matrix_norm(model[0].weight.detach(), 2))
    right = issued(model, x, y, 0.9 * radius, 12, guarantee)
    assert 0.99 * radius < float(right.radius) < radius  # tight, so that a smaller norm must show
    assert broken(model, right) == 0
    with monkeypatch.context() as patch:
        patch.setattr(ProvenRule, "norm", lambda self, op, key, like: PowerNorm(4, seed=1).norm(op, key, like))
        wrong = issued(model, x, y, 0.9 * radius, 12, guarantee)
    for kind in ("attack", "boundary", "rounding"):
        assert broken(model, wrong, kind) > 0


def evenly(units: int) -> nn.Module:
    """The lead 1 - sum of x over units that are all active: every single one counts as much as the others."""
    model = nn.Sequential(nn.Linear(units, units), nn.ReLU(), nn.Linear(units, 2)).double()
    with torch.no_grad():
        model[0].weight.copy_(torch.eye(units))
        model[0].bias.fill_(2.0)
        model[2].weight.copy_(torch.stack([torch.zeros(units), torch.ones(units)]))
        model[2].bias.copy_(torch.tensor([1.0 + 2.0 * units, 0.0]))
    return model


def one_unit_fewer(varying: Callable[[Clip, object], Varying]) -> Callable[[Clip, object], Varying]:
    def dropped(self: Clip, box: object) -> Varying:
        mask = varying(self, box).inputs.clone()
        mask.flatten(1)[:, 3] = False
        return Varying(mask, mask)

    return dropped


@proofs
def test_a_mask_that_drops_a_unit_is_found(guarantee: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, x, y = evenly(16), torch.zeros(1, 16, dtype=torch.float64), torch.tensor([0])
    right = issued(model, x, y, 0.2, 12, guarantee)
    assert 0.24 < float(right.radius) < 0.25  # 1 / sqrt(16)
    assert broken(model, right) == 0
    with monkeypatch.context() as patch:
        patch.setattr(Clip, "varying", one_unit_fewer(Clip.varying))
        wrong = issued(model, x, y, 0.2, 12, guarantee)
    for kind in ("attack", "boundary", "rounding"):
        assert broken(model, wrong, kind) > 0


def test_a_dual_value_that_is_a_millionth_low_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    model, exact = linear_claims()
    right = issued(model, exact.x, exact.y, 0.1, 45)
    assert bool((right.radius > exact.radius * (1 - 1e-9)).all())
    assert broken(model, right) == 0
    support = margin.support
    with monkeypatch.context() as patch:
        patch.setattr(margin, "support", lambda *args, **options: support(*args, **options) * (1 - 1e-6))
        wrong = issued(model, exact.x, exact.y, 0.1, 45)
    assert broken(model, wrong) > 0
    assert broken(model, wrong, "rounding") > 0


def test_a_radius_that_is_rounded_down_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """0.141 in place of 36/255, where the class changes between the two."""
    eps = float(cascade.as_eps("36/255", 1, torch.device("cpu")))
    model = linear([[-1.0, 0.0], [0.0, 0.0]], [0.1411, 0.0])
    model, x, y = nn.Sequential(model), torch.zeros(1, 2, dtype=torch.float64), torch.tensor([0])
    assert len(issued(model, x, y, eps)) == 0
    monkeypatch.setattr(cascade, "as_eps", lambda *args: torch.tensor([0.141], dtype=torch.float64))
    wrong = issued(model, x, y, eps)
    for kind in ("attack", "boundary", "rounding"):
        assert broken(model, wrong, kind) > 0


def test_a_check_of_the_clean_class_that_is_left_out_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A certifier that proves the lead of a class but confuses which: labels of the next class are certified."""
    model, exact = linear_claims()
    labels = cascade.as_labels
    monkeypatch.setattr(cascade, "as_labels", lambda y, *rest: labels(exact.y, *rest))
    wrong = issued(model, exact.x, (exact.y + 1) % 4, 0.01)
    assert len(wrong) > 0
    assert broken(model, wrong, "random") > 0
