"""Every way in which a proof was wrong once, found by attack and mended: each must stay mended."""

from __future__ import annotations

import math
from decimal import Decimal
from fractions import Fraction

import pytest
import torch
from torch import Tensor, nn

import locallip as ll
from locallip.activations import Box, Softplus
from locallip.certify.inputs import as_eps
from tests.test_attacker import PROOFS, linear, tensor, verdict

proofs = pytest.mark.parametrize("guarantee", PROOFS)


@proofs
def test_cancellation_inside_a_composed_operator(guarantee):
    """W2 W1 is 1e-15 although its factors are 1: what A v rounds to is measured by |W2||W1|."""
    a, c = 1.226705859381049, 0.9622950358343828
    for power in (20, 26, 38, 47, 50):
        b = a * (1 - 2.0**-power)
        model = nn.Sequential(linear([[c], [c]]), linear([[a, -b]]))
        true = float((Fraction(a) - Fraction(b)) * Fraction(c))
        assert ll.global_lipschitz(model, (1,), guarantee=guarantee) >= true
    tail = (nn.ReLU(), linear([[1.0]]), nn.ReLU(), linear([[1.0], [0.0]], [0.0, 0.9 * true]))
    assert verdict(nn.Sequential(*model, *tail), tensor([[0.0]]), 1, 1.0, guarantee) != "CERTIFIED"


@proofs
@pytest.mark.parametrize(("rows", "a", "k", "tiny"), [(100_000, 1 / 3, 3.0, 1e-13), (5000, 0.7, 3.0, 1e-14)])
def test_cancellation_before_many_outputs(guarantee, rows, a, k, tiny):
    """The adjoint sums over all outputs: its rounding grows with their number, not with that of the inputs."""
    b = (-a + tiny) / k
    each = abs(Fraction(a) + Fraction(k) * Fraction(b))
    first, second = linear([[1.0], [k]]), nn.Linear(2, rows, bias=False, dtype=torch.float64)
    with torch.no_grad():
        second.weight.copy_(torch.tensor([[a, b]], dtype=torch.float64).expand(rows, 2))
    bound = ll.global_lipschitz(nn.Sequential(first, second), (1,), guarantee=guarantee, seed=1)
    assert bound >= float(each) * math.sqrt(rows)
    head = nn.Linear(rows, 2, dtype=torch.float64)
    with torch.no_grad():
        head.weight.zero_()[0] = -2 / (rows * float(each))
        head.bias.copy_(tensor([1.0, 0.0]))
    model = nn.Sequential(first, second, nn.Hardtanh(0.0, 100 * float(each)), head)  # lead 1 - 2 x: the class changes at 0.5
    assert verdict(model, tensor([[0.0]]), 0, 0.9, guarantee) != "CERTIFIED"


class ThroughAlias(nn.Module):
    """Clips a view of z in place and then reads z."""

    def __init__(self, alias):
        super().__init__()
        self.alias, self.act = alias, nn.Hardtanh(-1e4, 1e4, inplace=True)
        self.first, self.head = linear([[1.0, 0.0], [0.0, 1.0]]), linear([[1.0, 0.0], [0.0, 0.0]], [0.0, 1.5e4])

    def forward(self, x: Tensor) -> Tensor:
        z = self.first(x)
        self.act(self.alias(z))
        return self.head(z)


ALIASES = {
    "view": lambda z: z.view(-1, 2),
    "flatten": lambda z: z.flatten(1),
    "contiguous": lambda z: z.contiguous(),
    "identity": nn.Identity(),
    "dropout": nn.Dropout().eval(),
}


@pytest.mark.parametrize("alias", ALIASES)
def test_in_place_layer_on_an_alias(alias):
    with pytest.raises(ll.UnsupportedLayer, match="overwrites"):
        ll.lower(ThroughAlias(ALIASES[alias]).eval(), (2,))


def test_in_place_layer_on_its_own_input_alone_is_fine():
    model = nn.Sequential(
        nn.Linear(4, 4), nn.Identity(), nn.ReLU(inplace=True), nn.Flatten(), nn.ReLU(inplace=True), nn.Linear(4, 2)
    )
    assert len(ll.lower(model, (4,)).stages) == 3


class Noisy(nn.Module):
    def __init__(self, change):
        super().__init__()
        self.layer, self.change = linear([[1.0, 0.0], [0.0, 1.0], [0.0, 0.0]], [0.0, 0.0, -1e9]), change

    def forward(self, x: Tensor) -> Tensor:
        return self.change(self.layer, x)


CHANGES = {
    "noise": lambda layer, x: layer(x) + torch.randn(3, dtype=torch.float64),
    "batch size": lambda layer, x: layer(x * (x.size(0) - 1)),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_large_logit_hides_no_difference(change):
    with pytest.raises(ll.UnsupportedLayer):
        ll.lower(Noisy(CHANGES[change]), (2,))


def test_computed_constants_are_refused():
    """A product of float32 buffers carries float32 rounding; a view of one does not."""

    class Scaled(nn.Module):
        def __init__(self, product: bool):
            super().__init__()
            self.product, self.layer = product, nn.Linear(4, 2)
            self.register_buffer("a", torch.rand(4))
            self.register_buffer("b", torch.rand(4))

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x * (self.a * self.b) if self.product else x * self.a.view(1, 4) - self.b[None])

    for seed in (0, 6, 31, 38):  # with some of these the rounding is too small to be seen in the outputs
        torch.manual_seed(seed)
        with pytest.raises(ll.UnsupportedLayer, match="computes"):
            ll.lower(Scaled(True), (4,))
        ll.lower(Scaled(False), (4,))


class Turned(nn.Module):
    """Has the attribute by which a compiled module is known, and another forward."""

    def __init__(self, inner: nn.Module):
        super().__init__()
        self._orig_mod = inner

    def forward(self, x: Tensor) -> Tensor:
        return -self._orig_mod(x)


class TurnedParallel(nn.DataParallel):
    def forward(self, x: Tensor) -> Tensor:
        return -self.module(x)


@pytest.mark.parametrize("wrapper", [Turned, TurnedParallel])
def test_a_wrapper_is_not_taken_for_what_it_wraps(wrapper):
    inner, x = linear([[1.0], [-1.0]]), tensor([[1.0]])
    try:
        found = verdict(wrapper(inner), x, 0, 0.1, "deterministic")
    except ll.UnsupportedLayer:
        return
    assert found == "MISCLASSIFIED"


def test_hooks_on_a_parallel_wrapper_are_refused():
    model = nn.DataParallel(linear([[1.0], [-1.0]]))
    model.register_forward_hook(lambda module, args, out: -out)
    with pytest.raises(ll.UnsupportedLayer, match="hooks"):
        ll.lower(model, (1,))


def test_compiled_and_parallel_models_are_unwrapped():
    inner = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    plain = ll.global_lipschitz(inner, (3,), guarantee="deterministic")
    for model in (torch.compile(inner), nn.DataParallel(inner)):
        assert ll.global_lipschitz(model, (3,), guarantee="deterministic") == plain


class CallsMore(nn.Linear):
    def _call_impl(self, x: Tensor) -> Tensor:
        return super()._call_impl(x).clamp(-1e4, 1e4)


def test_a_changed_call_is_refused():
    with pytest.raises(ll.UnsupportedLayer, match="replaced"):
        ll.lower(nn.Sequential(CallsMore(2, 2)), (2,))


def test_global_hooks_are_refused():
    handle = nn.modules.module.register_module_forward_hook(lambda module, args, out: out)
    try:
        with pytest.raises(ll.UnsupportedLayer, match="global"):
            ll.lower(nn.Sequential(nn.Linear(2, 2)), (2,))
    finally:
        handle.remove()


class Shaky(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight + 1e-5 * torch.randn_like(weight)


def test_a_parametrization_with_noise_is_refused():
    layer = nn.Linear(3, 2)
    nn.utils.parametrize.register_parametrization(layer, "weight", Shaky())
    with pytest.raises(ll.UnsupportedLayer, match="weight"):
        ll.lower(nn.Sequential(layer), (3,))


def amplifier() -> list[nn.Module]:
    """Multiplies by 1e406 in steps that are each in range."""
    return [layer for _ in range(7) for layer in (linear([[1e58]]), nn.ReLU())]


@proofs
@pytest.mark.parametrize(("bias", "weight"), [(1e-300, 1e-100), (5e-324, 0.4)])
def test_an_offset_that_underflows(guarantee, bias, weight):
    head = linear([[1.0], [0.0]], [0.0, 0.5])
    model = nn.Sequential(linear([[0.0]], [bias]), linear([[weight]]), nn.ReLU(), *amplifier(), head)
    assert verdict(model, tensor([[0.0]]), 1, 1e-9, guarantee) != "CERTIFIED"


@proofs
def test_a_batch_norm_factor_that_underflows(guarantee):
    norm = nn.BatchNorm1d(1, dtype=torch.float64).eval()
    with torch.no_grad():
        norm.running_var.fill_(1e30)
        norm.weight.fill_(1e-300)
        norm.bias.zero_()
    model = nn.Sequential(linear([[1.0]]), norm, nn.ReLU(), *amplifier(), linear([[1.0], [0.0]], [0.0, 0.5]))
    with pytest.raises(ValueError, match="Rescale"):
        verdict(model, tensor([[1.0]]), 1, 1.0, guarantee)


def test_denormal_radius_at_the_last_layer():
    r, mu = 2.6e-162, 1.55e-154
    d = r / mu / math.sqrt(2)
    model = linear([[0.0, 0.0], [d, d]], [0.75 * r * r / mu, 0.0])
    assert verdict(model, tensor([[0.0, 0.0]]), 0, r, "deterministic") != "CERTIFIED"


def test_softplus_image_holds_for_any_beta():
    for beta in (0.37, 1.0, 3.7, 11.3):
        z = torch.linspace(-600, 600, 4001, dtype=torch.float64) / beta
        image = Softplus(beta, 20.0).image(Box(z[None], z[None]))
        for value, low, high in zip(z.tolist(), image.lower[0].tolist(), image.upper[0].tolist(), strict=True):
            exact = _softplus(Decimal(beta), Decimal(value))
            assert Decimal(low) <= exact <= Decimal(high)


def _softplus(beta: Decimal, z: Decimal) -> Decimal:
    """To 28 digits: log1p for small arguments by its series."""
    power = (beta * z).exp()
    if power < Decimal("1e-9"):
        return (power - power**2 / 2 + power**3 / 3) / beta
    return (1 + power).ln() / beta


def test_the_domain_is_checked_in_float64():
    """float32(0.1) is above 0.1: ball and domain would not meet."""
    with pytest.raises(ValueError, match="input_domain"):
        ll.certify(nn.Linear(1, 2), torch.tensor([[0.1]]), torch.tensor([0]), 1e-12, input_domain=(0.0, 0.1))


def test_eps_is_never_rounded_down():
    exact = Fraction(36, 255)
    for eps in ("36/255", [Decimal("0.1411764705882352941176470588235294117647")], Fraction(36, 255)):
        assert Fraction(as_eps(eps, 1, torch.device("cpu")).item()) >= exact


def test_a_wide_input_needs_no_square_of_memory():
    """Two classes over 100,000 inputs: a matrix of 2 rows, proved without a unit matrix of 100,000."""
    model = nn.Linear(100_000, 2)
    bound = ll.global_lipschitz(model, (100_000,), guarantee="deterministic")
    assert bound == pytest.approx(torch.linalg.matrix_norm(model.weight.double(), ord=2).item(), rel=1e-9)
