"""A third attempt: switches of torch that change small numbers, constants that vanish, models that change unseen."""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import locallip as ll
from locallip.certify import Certifier, RadiusFinder
from locallip.network import UnsupportedLayer
from tests.test_attacker import linear, tensor

GUARANTEES = ["deterministic", "high_probability"]


@pytest.fixture
def flushing() -> Iterator[None]:
    """Numbers below 2e-308 are taken for 0, as some do to train faster on a CPU."""
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor cannot flush small numbers")
    try:
        yield
    finally:
        torch.set_flush_denormal(False)


@pytest.mark.parametrize("guarantee", GUARANTEES)
def test_small_numbers_count_where_torch_flushes_them(guarantee: str, flushing: None) -> None:
    """A bias of 1e-310 is 1e-10 behind the last map, and class 0 wins everywhere.

    Catches: exact_arithmetic without small_numbers_kept.
    """
    first = linear([[0.0], [1.0]], [1e-310, 0.0])
    model = nn.Sequential(first, nn.ReLU(), linear([[1e300, 0.0], [0.0, 1.0]], [0.0, 5e-11]))
    for eps in (0.0, 1e-12):
        found = ll.certify(model, tensor([[0.0]]), torch.tensor([1]), eps, guarantee=guarantee, attack_steps=0)
        assert not found.certified.any()
    assert torch.tensor(1e-300, dtype=torch.float64).mul(1e-10).item() == 0  # the caller's setting is back


def test_weights_that_flushing_hides_are_refused(flushing: None) -> None:
    """Catches: check_scale outside exact_arithmetic, which takes 1e-310 for a weight of 0."""
    model = nn.Sequential(linear([[1e-310], [0.0]]), linear([[1e300, 0.0], [0.0, 1.0]], [0.0, 5e-11]))
    with pytest.raises(ValueError, match="multiply to about"):
        ll.certify(model, tensor([[1.0]]), torch.tensor([1]), 0.0)


def test_float32_inputs_and_radii_that_flushing_hides(flushing: None) -> None:
    """1e-40 becomes 0 on the way to float64. Catches: as_batch and as_eps without small_numbers_kept."""
    model = nn.Sequential(linear([[1e40], [0.0]], [0.0, 0.5]))
    small, nothing = torch.tensor([[71362]], dtype=torch.int32).view(torch.float32), torch.zeros(1, 1)  # 1e-40, unrounded
    for x, eps in ((small, 0.0), (small, 1e-60), (nothing, small[0]), (nothing, 1e-40)):
        found = ll.certify(model, x, torch.tensor([1]), eps, guarantee="deterministic", attack_steps=0)
        assert not found.certified.any()
    assert ll.certify(model, nothing, torch.tensor([1]), 1e-41, guarantee="deterministic").certified.all()


class Shifted(nn.Module):
    """logits (large * (w x + alpha * shift), 0) + bias."""

    def __init__(self, alpha: float, shift: float, large: float, bias: list[float]):
        super().__init__()
        self.alpha, self.large = alpha, large
        self.register_buffer("shift", tensor([shift, 0.0]))
        self.register_buffer("weight", tensor([0.0, 1.0]))
        self.register_buffer("bias", tensor(bias))

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(torch.add(x * self.weight, self.shift, alpha=self.alpha)) * self.large + self.bias


def test_a_constant_that_alpha_makes_vanish_is_refused() -> None:
    """1e-170 times 1e-170 is 0 in float64, and 1e-40 behind the last factor: class 0 leads, and class 1 was certified.

    Catches: rules.shift that multiplies two stored numbers unseen.
    """
    bias = 5e-41
    assert Fraction(1e-170) ** 2 * Fraction(1e300) > Fraction(bias)
    model = Shifted(1e-170, 1e-170, 1e300, [0.0, bias])
    with pytest.raises(UnsupportedLayer, match="vanishes"):
        ll.certify(model, tensor([[0.0, -1.0]]), torch.tensor([1]), 0.1, guarantee="deterministic")
    kept = Shifted(-0.5, 1.0, 1.0, [0.0, 0.5])
    assert ll.certify(kept, tensor([[0.0, -1.0]]), torch.tensor([1]), 0.1, guarantee="deterministic").certified.all()


class Scaled(nn.Module):
    """A factor that is a buffer and not saved."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("factor", torch.ones(2, dtype=torch.float64), persistent=False)
        self.first, self.last = linear([[1.0, 0.0], [0.0, 1.0]], [0.0, 0.5]), linear([[1.0, 0.0], [0.0, 1.0]])

    def forward(self, x: Tensor) -> Tensor:
        return self.last(F.relu(self.first(x) * self.factor))


def test_a_buffer_that_is_not_saved_changes_the_model() -> None:
    """With the norms of the old factor and the logits of the new one, a ball in which class 0 wins was certified.

    Catches: a fingerprint of the saved tensors alone.
    """
    model = Scaled()
    certifier = Certifier(model, (2,), guarantee="deterministic")
    model.factor.mul_(1000)  # type: ignore[operator, union-attr]
    assert model(tensor([[0.28, -0.28]])).argmax().item() == 0
    with pytest.raises(RuntimeError, match="changed"):
        certifier(tensor([[0.0, 0.0]]), torch.tensor([1]), 0.4)


@pytest.mark.parametrize(("threshold", "kept"), [(20.0, True), (80.0, True), (1000.0, False)])
def test_softplus_that_float32_cannot_hold(threshold: float, kept: bool) -> None:
    """e^100 is infinite in float32, and so is Softplus(100) with a threshold beyond it.

    Catches: deployed_error that takes every Softplus for rounded.
    """
    model = nn.Sequential(nn.Softplus(threshold=threshold), linear([[1.0], [0.0]], [0.0, 200.0]).float())
    x = torch.tensor([[100.0]])
    assert (model(x).argmax(1).item() == 1 and bool(torch.isfinite(model(x)).all())) is kept
    found = ll.certify(model, x, torch.tensor([1]), 0.1, guarantee="deterministic", deployed_dtype="float32")
    assert found.certified.tolist() == [kept]
    assert ll.certify(model, x, torch.tensor([1]), 0.1, guarantee="deterministic").certified.all()


@pytest.mark.parametrize("kind", [Certifier, RadiusFinder])
def test_a_number_of_a_layer_that_changes_behind_its_norms_is_noticed(kind) -> None:
    """Without plain attributes in `state_of`, norms of eps = 1 would meet centers of eps = 1e-6."""
    model = nn.Sequential(nn.BatchNorm1d(2, eps=1.0, affine=False), nn.Linear(2, 2, bias=False)).double().eval()
    with torch.no_grad():
        model[0].running_var.zero_()
        model[1].weight.copy_(torch.eye(2))
    x, y = torch.tensor([[1.0, 0.0]]).double(), torch.tensor([0])
    worker = kind(model, (2,), guarantee="deterministic")
    ask = (lambda: worker(x, y, 0.4)) if kind is Certifier else (lambda: worker(x, y))
    ask()
    model[0].eps = 1e-6
    with pytest.raises(RuntimeError, match="has changed"):
        ask()
