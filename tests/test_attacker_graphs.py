"""Attempts to have another function certified than the module computes: code that tracing or a comparison does not see."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize

import locallip as ll
from locallip.certify import Certifier, RadiusFinder


def linear(weight: list[list[float]], bias: list[float] | None = None, dtype: torch.dtype = torch.float64) -> nn.Linear:
    layer = nn.Linear(len(weight[0]), len(weight), bias=bias is not None, dtype=dtype)
    with torch.no_grad():
        layer.weight.copy_(torch.tensor(weight))
        if bias is not None:
            layer.bias.copy_(torch.tensor(bias))
    return layer


def tensor(values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


class Head(nn.Module):
    """A step and then logits (z_0, 150): the class is 0 where z_0 > 150."""

    def __init__(self, step: Callable[[Any, Tensor], Tensor]):
        super().__init__()
        self.step, self.head = step, linear([[1.0], [0.0]], [0.0, 150.0])
        self.a, self.b = nn.Parameter(tensor(1.0)), nn.Parameter(tensor(3.0))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.step(self, x))


# What random samples do not show -----------------------------------------------------------------------------------------
#
# The samples of the comparison are normal with deviations 0.1, 1 and 10: what happens beyond 100 they never see.


def added_in_place(m: Any, x: Tensor) -> Tensor:
    z = x * 1.0
    kept = z
    z -= 10 * F.relu(x - 100)
    return kept


def scaled_in_place(m: Any, x: Tensor) -> Tensor:
    z = F.relu(x - 100)
    kept = z.view(-1, 1)
    z *= -3
    return kept + F.hardtanh(x, 0.0, 100.0)


def divided_in_place(m: Any, x: Tensor) -> Tensor:
    z = F.relu(x - 100)
    kept = z
    z /= -3
    return kept + F.hardtanh(x, 0.0, 100.0)


def written_out(m: Any, x: Tensor) -> Tensor:
    z = F.relu(x - 100)
    torch.sub(z, z, alpha=5, out=z)
    return z + F.hardtanh(x, 0.0, 100.0)


def negated_out(m: Any, x: Tensor) -> Tensor:
    z = F.relu(x - 100)
    torch.neg(z, out=z)
    return z + F.hardtanh(x, 0.0, 100.0)


def clamps_tensors(m: Any, x: Tensor) -> Tensor:
    return x.clamp(-128, 127) if isinstance(x, Tensor) else x


def clamps_what_is_a_tensor(m: Any, x: Tensor) -> Tensor:
    return x.clamp(-128, 127) if torch.is_tensor(x) else x


def rescales_pixels(m: Any, x: Tensor) -> Tensor:
    if isinstance(x, Tensor) and x.max() > 99:
        x = x / 255
    return x


def another_number_for_tensors(m: Any, x: Tensor) -> Tensor:
    return F.hardtanh(x, -127.0, 127.0 if isinstance(x, Tensor) else 1e6)


def shifts_by_the_batch(m: Any, x: Tensor) -> Tensor:
    return x - F.relu(x - 50 * x.size(0))


def asks_for_gradients(m: Any, x: Tensor) -> Tensor:
    return x if torch.is_grad_enabled() else x.clamp(-128, 127)


def rounds_in_between(m: Any, x: Tensor) -> Tensor:
    return F.relu(x - (m.a / m.b).item())


def changes_what_is_stored(m: Any, x: Tensor) -> Tensor:
    m.table.mul_(1.0)
    return x * m.table


FUNCTIONS = [
    *(added_in_place, scaled_in_place, divided_in_place, written_out, negated_out, clamps_tensors, clamps_what_is_a_tensor),
    *(rescales_pixels, another_number_for_tensors, shifts_by_the_batch, asks_for_gradients, rounds_in_between),
    changes_what_is_stored,
]


@pytest.mark.parametrize("step", FUNCTIONS)
def test_code_that_samples_do_not_show_is_refused(step: Callable[[Any, Tensor], Tensor]) -> None:
    """All but the last two and the one of the batch were certified once as class 0 at 200, where they are class 1.

    Catches: `x += y` traced as `x + y`, `out=` that is not looked at, no comparison of operations, or one on a single batch.
    """
    model = Head(step)
    model.register_buffer("table", torch.ones(1, dtype=torch.float64))
    with pytest.raises(ll.UnsupportedLayer):
        ll.certify(model, tensor([[200.0]]), torch.tensor([0]), 1.0, guarantee="deterministic")


class Residual(nn.Module):
    """The block of residual networks as it is usually written."""

    def __init__(self, inference: bool):
        super().__init__()
        self.inference = inference
        self.one, self.two, self.act = nn.Conv2d(2, 2, 3, 1, 1), nn.Conv2d(2, 2, 3, 1, 1), nn.ReLU(inplace=True)
        self.norm, self.head = nn.BatchNorm2d(2), nn.Linear(2, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.act(self.norm(self.one(x)))
        identity = x
        out = self.act(self.norm(self.two(x)))
        out = self.norm(self.one(out))
        out += identity
        out = self.act(out)
        n = out.shape[0]
        n *= 1
        out = out - torch.tensor([0.1, 0.2]).view(1, 2, 1, 1)
        with torch.inference_mode(self.inference):
            return self.head(F.adaptive_avg_pool2d(out, 1).view(n, -1))


@pytest.mark.parametrize("inference", [False, True])
def test_usual_code_is_not_refused(inference: bool) -> None:
    """Inference mode, constants made in forward, sizes, `out += identity`, one in-place ReLU for all: people write that."""
    torch.manual_seed(0)
    model = Residual(inference).eval()
    network, x = ll.lower(model, (2, 4, 4)), torch.randn(3, 2, 4, 4)
    torch.testing.assert_close(network(x), model(x))


class Rounding(nn.Module):
    """Normalised layers, whose weights are rounded to 16 bits, and a difference that such rounding does not excuse."""

    def __init__(self, dtype: torch.dtype):
        super().__init__()
        layers = [parametrizations.weight_norm(linear([[w, 0.0], [0.0, w]], dtype=dtype)) for w in (1.0, 1.5)]
        self.shown, self.run = layers

    def forward(self, x: Tensor) -> Tensor:
        return self.run(x) if isinstance(x, Tensor) else self.shown(x)  # the same operations in both


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_rounding_of_normalised_weights_hides_no_difference(dtype: torch.dtype) -> None:
    """The comparison once allowed for 1000 roundings, which in 16 bits is 8 times the value.

    Catches: a tolerance that grows with the rounding of the dtype.
    """
    with pytest.raises(ll.UnsupportedLayer, match="does not compute"):
        ll.lower(Rounding(dtype), (2,))
    torch.manual_seed(0)
    plain = nn.Sequential(parametrizations.weight_norm(nn.Linear(3, 3, bias=False)).to(dtype), nn.ReLU())
    network, x = ll.lower(plain, (3,)), torch.randn(4, 3, dtype=torch.float64)
    assert torch.equal(network(x), F.relu(F.linear(x, plain[0].weight.double())))


def test_a_cache_of_weights_is_left_as_it_was() -> None:
    """Inside `parametrize.cached` the user's module would go on with weights of the comparison, in another dtype."""
    model = nn.Sequential(parametrizations.weight_norm(nn.Linear(3, 3)), nn.ReLU())
    with parametrize.cached():
        before = model(torch.ones(2, 3))
        ll.lower(model, (3,))
        assert model[0].weight.dtype == torch.float32
        assert torch.equal(model(torch.ones(2, 3)), before)


def test_a_parametrization_that_fails_is_named() -> None:
    """Torch has no orthogonal weights of this shape in 16 bits: the module itself could not run."""
    model = nn.Sequential(parametrizations.orthogonal(nn.Linear(4, 3)).half())
    with pytest.raises(ll.UnsupportedLayer, match=r"'0\.weight'"):
        ll.lower(model, (4,))


# What runs beside the graph ----------------------------------------------------------------------------------------------


class Steep(Tensor):
    """A stored tensor that gives F.linear another meaning, as tensors for quantized weights do."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.linear:
            plain = [a.as_subclass(Tensor) if isinstance(a, Tensor) else a for a in args]
            z = func(*plain, **(kwargs or {}))
            return z - 10 * F.relu(z - 100)
        return super().__torch_function__(func, types, args, kwargs or {})


def with_weight(change: Callable[[Tensor], Tensor]) -> nn.Module:
    model = nn.Sequential(linear([[1.0]]), nn.ReLU(), linear([[1.0], [0.0]], [0.0, 150.0]))
    model[0].weight = nn.Parameter(change(model[0].weight.detach()))
    return model


@pytest.mark.parametrize(
    "change", [lambda w: w.as_subclass(Steep), lambda w: w.to_sparse(), lambda w: w.to(torch.complex128)]
)
def test_weights_that_are_no_plain_tensors_are_refused(change: Callable[[Tensor], Tensor]) -> None:
    """Their norms are taken at small vectors, where they look like any other.

    Catches: weights that are taken as they come.
    """
    with pytest.raises(ll.UnsupportedLayer, match=r"'0\.weight' is not supported"):
        ll.certify(with_weight(change), tensor([[200.0]]), torch.tensor([0]), 1.0)


def test_a_sparse_input_is_refused_by_name() -> None:
    with pytest.raises(TypeError, match="to_dense"):
        ll.certify(with_weight(Tensor.clone), tensor([[200.0]]).to_sparse(), torch.tensor([0]), 1.0)


@pytest.mark.parametrize("place", ["torch.nn.functional.relu", "torch.nn.ReLU.forward"])
def test_replaced_parts_of_torch_are_refused(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches: rules that go by the type of a layer alone."""
    monkeypatch.setattr(place, lambda *args, **named: args[-1].clamp(0, 127))
    with pytest.raises(ll.UnsupportedLayer):
        ll.certify(with_weight(Tensor.clone), tensor([[200.0]]), torch.tensor([0]), 1.0)


def test_a_replaced_method_of_one_layer_is_refused() -> None:
    """Programs that make images without seams replace `_conv_forward` of every convolution they find."""
    layer = nn.Conv1d(1, 1, 1)
    layer._conv_forward = lambda x, weight, bias: F.conv1d(x, weight, bias).clamp(-127, 127)  # type: ignore[method-assign]
    with pytest.raises(ll.UnsupportedLayer, match="_conv_forward"):
        ll.lower(nn.Sequential(layer, nn.Flatten(), nn.Linear(4, 2)), (1, 4))


class InHalf(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return self.layer(x)


def test_autocast_inside_forward_is_refused() -> None:
    """In float64 it does nothing, so that no comparison of values shows it; in float32 the program keeps 8 bits."""
    with pytest.raises(ll.UnsupportedLayer, match="autocast"):
        ll.certify(InHalf(), torch.ones(1, 2), torch.tensor([0]), 0.1, deployed_dtype="float32")


# What changes behind a Certifier -----------------------------------------------------------------------------------------


class Plain(nn.Module):
    """A factor that is no buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.factor, self._power = torch.ones(2, dtype=torch.float64), 1.0
        self.first, self.last = linear([[1.0, 0.0], [0.0, 1.0]], [0.0, 0.5]), linear([[1.0, 0.0], [0.0, 1.0]])

    def forward(self, x: Tensor) -> Tensor:
        return self.last(F.relu(self.first(x) * self.factor * self._power))


def scale_factor(model: Plain) -> None:
    model.factor.mul_(1000)


def replace_factor(model: Plain) -> None:
    model.factor = 1000 * model.factor


def raise_power(model: Plain) -> None:
    model._power = 1000.0


def add_hook(model: Plain) -> None:
    model.first.register_forward_hook(lambda module, args, out: 1000 * out)


def replace_forward(model: Plain) -> None:
    model.first.forward = lambda x: 1000 * x  # type: ignore[method-assign, assignment]


@pytest.mark.parametrize("kind", [Certifier, RadiusFinder])
@pytest.mark.parametrize("change", [scale_factor, replace_factor, raise_power, add_hook, replace_forward])
def test_changes_of_what_is_not_registered_are_noticed(kind: Any, change: Callable[[Plain], None]) -> None:
    """Norms of the old factor met logits of the new one, and a ball in which class 0 wins was certified for class 1.

    Catches: a state of parameters, buffers and public numbers alone.
    """
    model = Plain()
    worker = kind(model, (2,), guarantee="deterministic")
    x, y = tensor([[0.0, 0.0]]), torch.tensor([1])
    ask = (lambda: worker(x, y, 0.4)) if kind is Certifier else (lambda: worker(x, y))
    ask()
    change(model)
    with pytest.raises(RuntimeError, match="has changed"):
        ask()


class Deep(nn.Module):
    """A chain of linear residual blocks with nothing between them."""

    def __init__(self, depth: int):
        super().__init__()
        self.layers, self.head = nn.ModuleList(nn.Linear(3, 3) for _ in range(depth)), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + 0.1 * layer(x)
        return self.head(x)


def test_a_long_linear_chain_takes_no_exponential_time() -> None:
    """Every block reads what is before it twice: written out, twenty of them are a million maps.

    Catches: sums of one branch that never end in a stage.
    """
    torch.manual_seed(0)
    model = Deep(40).double()
    matrix = torch.func.jacrev(model)(torch.zeros(3, dtype=torch.float64))
    found = ll.global_lipschitz(model, (3,), guarantee="deterministic")
    assert float(torch.linalg.matrix_norm(matrix.detach(), 2)) <= found < 1e3


# Random programs ---------------------------------------------------------------------------------------------------------


class Program(nn.Module):
    """A random program of layers, functions, arithmetic, stored tensors, reused layers and sums with earlier values."""

    def __init__(self, seed: int):
        super().__init__()
        self.random, self.layers, self.steps = random.Random(seed), nn.ModuleList(), []
        torch.manual_seed(seed)
        pick = self.random.choice
        self.shape: tuple[int, ...] = pick([(4,), (2, 3), (2, 5, 4), (1, 4, 6)])
        self.shapes = [self.shape]
        for _ in range(self.random.randint(4, 9)):
            pick([self._layer, self._layer, self._activation, self._activation, self._arithmetic, self._sum, self._stored])()
        size = math.prod(self.shapes[-1])
        self._add(nn.Flatten(), (size,))
        self._add(nn.Linear(size, 3), (3,))
        for layer in self.modules():
            if isinstance(layer, nn.modules.batchnorm._BatchNorm):
                assert layer.running_mean is not None
                assert layer.running_var is not None
                layer.running_mean.normal_()
                layer.running_var.uniform_(0.3, 2)

    def _add(self, layer: nn.Module, shape: tuple[int, ...]) -> None:
        self.layers.append(layer)
        index = len(self.layers) - 1
        self._step(lambda x, old: self.layers[index](x), shape)

    def _step(self, step: Callable[..., Tensor], shape: tuple[int, ...]) -> None:
        self.steps.append(step)
        self.shapes.append(shape)

    def _layer(self) -> None:
        pick, shape = self.random.choice, self.shapes[-1]
        if len(shape) < 3:
            layer: nn.Module = nn.Linear(shape[-1], shape[-1], bias=pick([True, False]))
            layer = pick([nn.Identity(), parametrizations.weight_norm, parametrizations.spectral_norm])(layer)
        else:
            groups, padding = pick([1, shape[0]]), pick([0, 1, (1, 0)])
            layer = pick(
                [
                    nn.Conv2d(shape[0], 2 * groups, pick([1, 2, 3]), pick([1, 2]), padding, pick([1, 2]), groups),
                    nn.Conv2d(shape[0], shape[0], (3, 2), padding="same").to(memory_format=torch.channels_last),
                    *(nn.BatchNorm2d(shape[0]), nn.MaxPool2d(2, 3, 1, ceil_mode=True), nn.MaxPool2d((1, 2))),
                    nn.AvgPool2d(2, 1, 1, count_include_pad=False),
                ]
            )
        layer.eval()
        try:
            out = tuple(layer(torch.zeros(1, *shape)).shape[1:])
        except RuntimeError:  # the image is too small
            return
        self._add(layer, out)
        if out == shape and self.random.random() < 0.3:  # the same weights once more
            self._step(self.steps[-1], out)

    def _activation(self) -> None:
        pick, shape = self.random.choice, self.shapes[-1]
        layers = [nn.ReLU(), nn.ReLU6(), nn.Hardtanh(-0.2, 0.6), nn.LeakyReLU(1.5), nn.ELU(2.0), nn.Tanh(), nn.Sigmoid()]
        layers += [nn.Softplus(2.0), ll.ReLUTheta(shape, 0.4), nn.ReLU(inplace=True)]
        layers += [ll.MaxMin(), ll.ClippedMaxMin((shape[0] // 2, *shape[1:]), 0.3, -0.1)] if shape[0] % 2 == 0 else []
        functions = [
            lambda x, old: F.hardtanh(x, max_val=0.4, min_val=-0.3),
            lambda x, old: F.softplus(x, threshold=30, beta=0.5),
            lambda x, old: F.elu(x, alpha=0.4),
            lambda x, old: F.relu(x, True),
            lambda x, old: x.tanh(),
        ]
        if pick([True, False]):
            self._add(pick(layers), shape)
        else:
            self._step(pick(functions), shape)

    def _arithmetic(self) -> None:
        number = self.random.choice([2, -1.5, 0.3, 3])
        steps: list[Callable[..., Tensor]] = [
            *(lambda x, old: x * number - 1, lambda x, old: number - x, lambda x, old: x / number, lambda x, old: -x),
            *(lambda x, old: x.add(number, alpha=2), lambda x, old: torch.sub(x, number, alpha=-0.5)),
            *(lambda x, old: x.clone().mul_(number).add_(1), lambda x, old: torch.neg(x).sub(0.2).unsqueeze(1).squeeze(1)),
        ]
        self._step(self.random.choice(steps), self.shapes[-1])

    def _sum(self) -> None:
        shape = self.shapes[-1]
        at = self.random.choice([i for i, other in enumerate(self.shapes) if other == shape])

        def in_place(x: Tensor, old: list[Tensor]) -> Tensor:
            z = x * 0.5
            z += old[at]
            return z

        steps: list[Callable[..., Tensor]] = [
            *(lambda x, old: x + old[at], lambda x, old: old[at] - x, lambda x, old: torch.add(x, old[at], alpha=0.3)),
            *(in_place, lambda x, old: torch.sub(x, other=old[at], alpha=-0.7)),
        ]
        self._step(self.random.choice(steps), shape)

    def _stored(self) -> None:
        shape, name = self.shapes[-1], f"stored{len(self.steps)}"
        values = torch.randn([self.random.choice([1, n]) for n in shape])
        value = values.to(self.random.choice([torch.float32, torch.float16, torch.int64, torch.bool]))
        self.register_buffer(name, value, persistent=self.random.random() < 0.5)
        steps: list[Callable[..., Tensor]] = [
            *(lambda x, old: x + getattr(self, name), lambda x, old: getattr(self, name)[None] * x),
            lambda x, old: getattr(self, name) + 0.5 * x,
        ]
        self._step(self.random.choice(steps), shape)

    def forward(self, x: Tensor) -> Tensor:
        values = [x]
        for step in self.steps:
            values.append(step(values[-1], values))
        return values[-1]


def climb(network: Callable[[Tensor], Tensor], x: Tensor, y: int, eps: float, steps: int = 25) -> float:
    """The largest lead of another class over y that steepest ascent finds in the ball."""
    moves = torch.randn(12, *x.shape[1:], dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    best = -math.inf
    for i in range(steps):
        length = moves.flatten(1).norm(dim=1).clamp(min=eps) / (eps * (1 - 1e-12))
        moves = (moves / length.reshape(-1, *[1] * (x.dim() - 1))).detach().requires_grad_()
        logits = network(x + moves)
        leads = (logits - logits[:, y : y + 1]).index_fill(1, torch.tensor([y]), -math.inf).amax(1)
        best = max(best, float(leads.detach().max()))
        (grad,) = torch.autograd.grad(leads.sum(), moves)
        size = grad.flatten(1).norm(dim=1).clamp(min=1e-300).reshape(-1, *[1] * (x.dim() - 1))
        moves = moves.detach() + grad / size * eps * (0.5 if i < 15 else 0.1)
    return best


@pytest.mark.parametrize("part", range(4))
def test_random_programs(part: int) -> None:
    """Lowered, a program computes what it computes itself, and no search gets past what is proved of it."""
    proved, refused = 0, []
    for seed in range(4 * part, 4 * part + 4):
        model = Program(seed).eval()
        try:
            network = ll.lower(model, model.shape)
        except ll.UnsupportedLayer as refusal:
            refused.append(str(refusal))
            continue
        spread = torch.tensor([0.1, 1.0, 30.0, 1000.0]).repeat(16).reshape(-1, *[1] * len(model.shape))
        x = spread * torch.randn(64, *model.shape)
        theirs, ours = model(x.clone()).double(), network(x.double())
        assert torch.allclose(theirs, ours, rtol=1e-3, atol=1e-4 * float(ours.detach().abs().max()))
        x = x[1:2].double()
        y = network(x).argmax(1)
        radius = float(ll.certified_radius(model, x, y, guarantee="deterministic")[0])
        for eps in (radius, 1.3 * radius):
            found = ll.certify(model, x, y, eps, guarantee="deterministic", attack_steps=0)
            if bool(found.certified[0]) and 0 < eps < 1e6:
                proved += 1
                assert climb(network, x, int(y), eps) <= -float(found.margin[0]) * (1 - 1e-9)
    assert proved >= 3
    assert len(refused) <= 2
    assert all("overwrites" in why for why in refused)  # an in-place layer on a value that is read again
