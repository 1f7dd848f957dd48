"""An eighth round of attempts: layers that do more, workers that are handed on, switches between calls, known starts."""

import copy
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from fractions import Fraction
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

import locallip as ll
from locallip.activations import clip
from locallip.attacks import pgd_l2
from locallip.bounds import margin
from locallip.certify import Certifier, RadiusFinder
from locallip.certify.prover import Prover, fingerprint
from locallip.certify.radius import PROOFS as PROBES
from locallip.data import ImageSet, load_embedded, pixels
from locallip.network import rules
from locallip.network.checks import _FUNCTIONS
from locallip.network.rules import MODULE_RULES, _methods, module_rule
from locallip.report.explore import PROOF_SEED, Explorer
from locallip.zoo import WrongModel

DOUBLE = torch.float64
PROOFS = ["deterministic", "high_probability"]


def linear(weight: Any, bias: Any) -> nn.Linear:
    """A float64 layer with these weights."""
    weight, bias = (torch.as_tensor(values, dtype=DOUBLE) for values in (weight, bias))
    layer = nn.Linear(weight.shape[1], weight.shape[0], dtype=DOUBLE)
    with torch.no_grad():
        layer.weight.copy_(weight)
        layer.bias.copy_(bias)
    return layer


def exact(layer: nn.Linear, z: list[Fraction]) -> list[Fraction]:
    rows = zip(layer.weight.tolist(), layer.bias.tolist(), strict=True)
    return [sum((Fraction(w) * t for w, t in zip(row, z, strict=True)), Fraction(bias)) for row, bias in rows]


def loses(model: nn.Sequential, point: list[Fraction], label: int) -> bool:
    """Whether the label is not ahead at a point, with fractions, in a network of linear layers and ReLU."""
    z = point
    for layer in model:
        z = exact(layer, z) if isinstance(layer, nn.Linear) else [max(t, Fraction(0)) for t in z]
    return z[label] <= max(value for k, value in enumerate(z) if k != label)


def chain(weight: float) -> nn.Sequential:
    """Two classes of one number: max(0, weight x), and 1."""
    return nn.Sequential(linear([[weight]], [0.0]), nn.ReLU(), linear([[1.0], [0.0]], [0.0, 1.0]))


# Another function than the module's ------------------------------------------------------------------------------------


class FlattenClipped(nn.Flatten):
    """Flatten, and keep outliers out."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).clamp(-100, 100)


class UnflattenClipped(nn.Unflatten):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.clamp(-100, 100))


@pytest.mark.parametrize("layer", [FlattenClipped(), UnflattenClipped(1, (1, 1))], ids=["flatten", "unflatten"])
def test_layers_that_reshape_and_do_more(layer: nn.Module) -> None:
    """A subclass of Flatten with a forward of its own was taken for Flatten: 200 was certified as class 0, and is class 1.

    Catches: a look at the class alone, without one at forward; samples of the comparison end at 40.
    """
    model, x = nn.Sequential(layer, nn.Flatten(), linear([[1.0], [0.0]], [0.0, 150.0])), torch.full((1, 1), 200.0).double()
    assert model(x).tolist() == [[100.0, 150.0]]  # without rounding
    with pytest.raises(ll.UnsupportedLayer, match="clamp"):
        ll.certify(model, x, torch.tensor([0]), 1.0)


@pytest.mark.parametrize("kind", MODULE_RULES, ids=lambda kind: kind.__name__)
def test_a_class_with_any_method_of_its_own_is_another_layer(kind: type[nn.Module]) -> None:
    """Such as a batch norm whose `_check_input_dim` changes x. How a class is made and shown does not matter.

    Catches: a look at forward alone.
    """

    def like(*names: str) -> type[nn.Module]:
        return type("Own", (kind,), {name: lambda self, *rest: rest[0] for name in names})

    def known(made: type[nn.Module]) -> bool:
        return module_rule(made.__new__(made)) is not None

    assert known(like("__init__", "extra_repr", "something_new"))
    assert [name for name in _methods(kind) if known(like(name))] == []
    assert {"forward", "__call__", "__getattr__", "__getattribute__"} <= _methods(kind).keys()
    mixed = type("Mixed", (type("Mixin", (nn.Module,), {"__getattr__": lambda self, name: 0.0}), kind), {})
    assert not known(mixed)


class Shifted(nn.BatchNorm1d):
    def _check_input_dim(self, input: Tensor) -> None:
        input.data.clamp_(-100, 100)


def test_a_batch_norm_that_changes_what_it_looks_at_is_refused() -> None:
    model = nn.Sequential(Shifted(1), nn.Linear(1, 2)).eval()
    with pytest.raises(ll.UnsupportedLayer, match=r"at '0\."):
        ll.certify(model, torch.zeros(1, 1), torch.tensor([0]), 1.0)


def test_a_layer_that_is_said_to_be_compiled_is_refused() -> None:
    """torch calls `_compiled_call_impl` in place of forward, where there is one, and `module.compile()` leaves one.

    Catches: a list of what may be replaced that leaves it out.
    """
    model, x = nn.Sequential(linear([[1.0], [0.0]], [0.0, 150.0])), torch.full((1, 1), 200.0).double()
    object.__setattr__(model[0], "_compiled_call_impl", lambda z: nn.functional.linear(z.clamp(-100, 100), model[0].weight))
    with pytest.raises(ll.UnsupportedLayer, match=r"Linear at '0' .* compiled"):
        ll.certify(model, x, torch.tensor([0]), 1.0)


class Calls(nn.Module):
    """Logits (z, 150) of z = step(x)."""

    def __init__(self, step: Callable[[Tensor], Tensor]):
        super().__init__()
        self.step, self.head = step, linear([[1.0], [0.0]], [0.0, 150.0])

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.step(x))


@pytest.mark.parametrize("name", ["relu", "clone", "contiguous"])
def test_replaced_methods_of_tensors_are_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As test_replaced_parts_of_torch_are_refused, for what is called as a method and known by its name.

    Catches: a look at functions and layers alone.
    """
    monkeypatch.setattr(Tensor, name, lambda z: torch.clamp(z, 0 if name == "relu" else -100, 100))
    model, x = Calls(lambda z: getattr(z, name)()), torch.full((1, 1), 200.0).double()
    assert model(x).tolist() == [[100.0, 150.0]]
    with pytest.raises(ll.UnsupportedLayer, match=rf"{name} was replaced"):
        ll.certify(model, x, torch.tensor([0]), 1.0, guarantee="deterministic", attack_steps=0)


def test_all_methods_that_are_known_by_name_are_looked_at() -> None:
    known = {*rules.FUNCTION_RULES, *rules.RESHAPES, *rules.VIEWS, *rules.ADDITIONS, *rules.SUBTRACTIONS, *rules.PRODUCTS}
    names = {name for name in known | {*rules.QUOTIENTS, *rules.NEGATIONS} if isinstance(name, str)}
    assert names <= {name for space, name, _ in _FUNCTIONS if space is Tensor}


# Workers that are handed on --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("guarantee", PROOFS)
def test_bounds_from_before_a_change_give_no_radii(guarantee: str) -> None:
    """`prover=` takes the bounds of a Certifier; those from before a step of training meet the weights from behind it.

    Catches: a RadiusFinder that takes any prover for one of its model as it is now.
    """
    model, zero, label = chain(0.01), torch.zeros(1, 1, dtype=DOUBLE), torch.tensor([1])
    prover = Prover(model, (1,), guarantee, probes=PROBES)
    with torch.no_grad():
        model[0].weight.fill_(100.0)  # type: ignore[union-attr, operator]
    assert loses(model, [Fraction(1, 50)], 1)
    with pytest.raises(RuntimeError, match="has changed"):  # the radius was 99.99
        RadiusFinder(model, (1,), guarantee=guarantee, prover=prover)(zero, label)


def test_estimates_give_no_deterministic_radii() -> None:
    """The prover of an estimate, handed on to a RadiusFinder that is asked for a proof.

    Catches: `guarantee` (and `deployed_dtype`, `failure_prob`, `method`) without a look at those of `prover`.
    """
    n = 8
    stretch = torch.diag(torch.tensor([2.0] + [1.0] * (n - 1), dtype=DOUBLE))
    last = torch.zeros(2, n, dtype=DOUBLE)
    last[0, 0] = 1.0
    model = nn.Sequential(linear(stretch, [100.0] * n), nn.ReLU(), linear(last, [-98.0, 0.0]))
    estimate = Certifier(model, (n,), guarantee="estimate", power_steps=1, seed=0)
    assert loses(model, [Fraction(-1)] + [Fraction(0)] * (n - 1), 0)
    with pytest.raises(ValueError, match="another guarantee"):  # the radius was 1.4 or so
        RadiusFinder(model, (n,), guarantee="deterministic", prover=estimate.prover, seed=0)


OTHER: dict[str, Any] = {
    "failure_prob": 1e-12,
    "method": "local",
    "deployed_dtype": "float32",
    "guarantee": "high_probability",
    "device": torch.device("meta"),
}


def test_provers_with_other_promises_are_refused() -> None:
    """One argument at a time; a copy of the model, which may go another way; too few probes for the proofs of a radius."""
    model = chain(0.01)
    prover = Prover(model, (1,), "deterministic")
    assert RadiusFinder(model, (1,), guarantee="deterministic", prover=prover).prover is prover
    for name, value in OTHER.items():
        with pytest.raises(ValueError, match=f"another {name}"):
            RadiusFinder(model, (1,), prover=prover, **{"guarantee": "deterministic", name: value})
    with pytest.raises(ValueError, match="another model"):
        RadiusFinder(copy.deepcopy(model), (1,), guarantee="deterministic", prover=prover)
    with pytest.raises(ValueError, match="5 probes; radii need 6"):
        RadiusFinder(model, (1,), prover=Certifier(model, (1,)).prover)


@pytest.mark.parametrize("kind", [Certifier, RadiusFinder])
def test_weights_that_change_during_a_call_are_seen_after_it(kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another thread trains on, or what the caller is told of the progress moves a weight; it is put back by nobody.

    Catches: a look before the call alone.
    """
    model, zero, label = chain(0.01), torch.zeros(1, 1, dtype=DOUBLE), torch.tensor([1])
    worker, margin_of = kind(model, (1,), guarantee="deterministic"), Prover.margin

    def moved(*args: Any, **options: Any) -> Any:
        with torch.no_grad():
            model[0].weight.fill_(100.0)  # type: ignore[union-attr, operator]
        return margin_of(*args, **options)

    monkeypatch.setattr(Prover, "margin", moved)
    with pytest.raises(RuntimeError, match="has changed"):
        worker(zero, label, *([0.01] if kind is Certifier else []))


class Same(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight * 1.0


def test_a_certificate_names_the_weights_that_it_is_about() -> None:
    """A step of an optimizer inside `parametrize.cached`, as torch's own documentation shows the context, and then a proof:
    it was about the weights from before the step, and its fingerprint that of those behind it, where class 0 wins.

    Catches: a fingerprint of what is stored beside a proof of what was kept.
    """
    model, zero, label = chain(0.01), torch.zeros(1, 1, dtype=DOUBLE), torch.tensor([1])
    parametrize.register_parametrization(model[0], "weight", Same())
    certifier = Certifier(model, (1,), guarantee="deterministic")
    with parametrize.cached():
        model(zero)
        with torch.no_grad():
            model[0].parametrizations.weight.original.fill_(100.0)  # type: ignore[union-attr]
        for prove in (certifier, partial(ll.certify, model, guarantee="deterministic")):
            with pytest.raises(RuntimeError, match="cached"):
                prove(zero, label, 1.0)
    assert int(model(zero + 1).argmax()) == 0
    found = ll.certify(model, zero, label, 1.0, guarantee="deterministic")
    assert not found.certified.any()
    assert found.fingerprint == fingerprint(model) != certifier.fingerprint


class Cap(nn.Module):
    """A layer of a user with a rule of its own, which keeps its threshold in some object."""

    def __init__(self, kept: Any, read: Callable[[Any], float]):
        super().__init__()
        self._kept, self.read = kept, read

    @property
    def high(self) -> float:
        return float(self.read(self._kept))

    def forward(self, z: Tensor) -> Tensor:
        return nn.functional.hardtanh(z, 0.0, self.high)


KEPT: dict[str, tuple[Callable[[], Any], Callable[[Any], float], Callable[[Any], None]]] = {
    "object": (lambda: SimpleNamespace(high=1.0), lambda kept: kept.high, lambda kept: setattr(kept, "high", 100.0)),
    "array": (lambda: np.ones(1), lambda kept: kept[0], lambda kept: kept.fill(100.0)),
    "private list": (lambda: [1.0], lambda kept: kept[0], lambda kept: kept.__setitem__(0, 100.0)),
}


@pytest.mark.parametrize("kind", [Certifier, RadiusFinder])
@pytest.mark.parametrize("name", KEPT)
def test_settings_of_registered_layers_count_wherever_they_are(kind: Any, name: str) -> None:
    """A threshold of 1 in a config object, an array or a private list becomes 100; the rule was not asked again, and the old
    function was certified: 10 was inside the radius, where class 0 wins.

    Catches: a state of plain numbers, and of lists without an underscore, in place of lowering again.
    """
    make, read, change = KEPT[name]
    kept, zero, label = make(), torch.zeros(1, 1, dtype=DOUBLE), torch.tensor([1])
    ll.register_layer(Cap)(lambda module, in_shape, like: clip(0.0, module.high))
    try:
        model = nn.Sequential(linear([[1.0]], [0.0]), Cap(kept, read), linear([[1.0], [0.0]], [0.0, 2.0]))
        worker = kind(model, (1,), guarantee="deterministic")
        worker(zero, label, *([10.0] if kind is Certifier else []))
        change(kept)
        assert int(model(zero + 10).argmax()) == 0  # 10 against 2, without rounding
        with pytest.raises(RuntimeError, match="has changed"):
            worker(zero, label, *([10.0] if kind is Certifier else []))
    finally:
        del MODULE_RULES[Cap]


def test_a_network_is_not_stored_as_another_that_noise_does_not_tell_apart(tmp_path: Path) -> None:
    """`save_model` compared the network and its record on two samples that are always the same. A unit that is on for both
    and off for an image tells LeakyReLU from ReLU nowhere else: class 7 was certified of the file, and the network says 3.

    Catches: a comparison of values alone.
    """
    image = pixels(load_embedded("test")[0][:1])
    noise = 10 * torch.randn(2, 1, 28, 28, generator=torch.Generator().manual_seed(0))
    torch.manual_seed(0)
    model = ll.build_model("small", (1, 28, 28), 10, "relu").eval()
    with torch.no_grad():
        own, seen = model[:5](image)[0].double(), torch.linalg.qr(model[:5](noise).T.double()).Q
        apart = own - seen @ (seen.T @ own)
        for layer in (model[5], model[7]):
            layer.weight.zero_(), layer.bias.zero_()  # type: ignore[union-attr, operator]
        model[5].weight[0], model[5].bias[0] = -2000 * apart / (apart @ own), 1000.0  # type: ignore[union-attr, index]
        model[7].weight[3, 0], model[7].bias[7] = -1.0, 100.0  # type: ignore[union-attr, index]
    model[6] = nn.LeakyReLU(0.5)
    about = {"architecture": "small", "activation": "relu", "input_shape": [1, 28, 28], "classes": 10}
    assert int(model(image).argmax()) == 3
    with pytest.raises(WrongModel, match="something else"):
        ll.save_model(tmp_path / "model.safetensors", model, about)
    model[6] = nn.ReLU()
    for dtype in (None, torch.float16):
        ll.save_model(tmp_path / "model.safetensors", model, about, dtype)
    assert int(ll.load_model(tmp_path / "model.safetensors")(image).argmax()) == 7


# Switches --------------------------------------------------------------------------------------------------------------

#: A bias of 1e-310 is 1e-10 behind the last map, against 5e-11 + x: class 0 wins everywhere in the ball. The layer is so
#: wide that torch shares it among its threads, and the bias is in the part of the last of them.
FLUSHED = """
import sys
import torch
from torch import nn
import locallip as ll
from locallip.certify import Certifier

when, guarantee = sys.argv[1:]
units = 100_000 if when == "between" else 400_000
first, last = nn.Linear(1, units, dtype=torch.float64), nn.Linear(units, 2, dtype=torch.float64)
with torch.no_grad():
    for tensor in (*first.parameters(), *last.parameters()):
        tensor.zero_()
    first.weight[0, 0], first.bias[-1] = 1.0, 1e-310
    last.weight[0, -1], last.weight[1, 0], last.bias[1] = 1e300, 1.0, 5e-11
model = nn.Sequential(first, nn.ReLU(), last)
x, y, options = torch.zeros(1, 1, dtype=torch.float64), torch.tensor([1]), {"guarantee": guarantee, "attack_steps": 0}

def work(threads):
    torch.set_num_threads(threads)
    torch.full((2**21,), 1.0, dtype=torch.float64).mul(2)

if when == "between":
    certifier = Certifier(model, (1,), **options)
else:
    work(4)
if not torch.set_flush_denormal(True):
    print("cannot flush")
    sys.exit()
work(2 if when == "between" else 12)
try:
    found = certifier(x, y, 1e-12) if when == "between" else ll.certify(model, x, y, 1e-12, **options)
except (RuntimeError, ValueError) as error:
    print("refused", str(error).split("(")[0])
else:
    print("certified" if found.certified.any() else "unknown")
"""


@pytest.mark.parametrize(("when", "guarantee"), [("between", "deterministic"), ("before", "high_probability")])
def test_threads_that_flush_small_numbers(when: str, guarantee: str) -> None:
    """torch's own threads take 1e-310 for 0 where they were begun under `set_flush_denormal`, a switch of each thread. Where
    it is set between two calls of a Certifier nobody looked; before `certify` four threads were looked at, of twelve.

    Catches: `check_small_numbers` once per prover, and with too few numbers for all threads.
    """
    ran = subprocess.run([sys.executable, "-c", FLUSHED, when, guarantee], capture_output=True, text=True, timeout=120)
    if "cannot flush" in ran.stdout:
        pytest.skip("this processor cannot flush small numbers")
    assert ran.stdout.startswith("refused small numbers"), ran.stdout + ran.stderr


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextmanager
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


SWITCHES: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "float64": lambda: default_dtype(DOUBLE),
    "float16": lambda: default_dtype(torch.float16),
    "bfloat16": lambda: default_dtype(torch.bfloat16),
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "inference": torch.inference_mode,
    "deterministic": deterministic,
    "no mkldnn": lambda: torch.backends.mkldnn.flags(enabled=False),
}


def everything() -> nn.Sequential:
    torch.manual_seed(0)
    first = (nn.Conv2d(1, 4, 3, 2, 1), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(4, 4, 3, 1, 1))
    second = (nn.Hardtanh(-0.3, 0.7), nn.Flatten(), nn.Linear(16, 8), ll.MaxMin(), nn.Linear(8, 5))
    return nn.Sequential(*first, *second).eval()


IMAGES = torch.rand(2, 1, 8, 8, generator=torch.Generator().manual_seed(5)), torch.tensor([0, 0])
OPTIONS: dict[str, Any] = {"guarantee": "deterministic", "deployed_dtype": "float32", "input_domain": (0.0, 1.0)}


def proved(model: nn.Module) -> tuple[ll.Certificate, Tensor]:
    """A certificate of two images, and their radii."""
    options = OPTIONS | {"method": "local"}
    return ll.certify(model, *IMAGES, "1/50", **OPTIONS), ll.certified_radius(model, *IMAGES, seed=3, **options)


@cache
def without_switches() -> tuple[ll.Certificate, Tensor]:
    return proved(everything())


@pytest.mark.parametrize("name", SWITCHES)
def test_switches_change_no_proof(name: str) -> None:
    """Margins, bounds and radii to the last bit, but for other arithmetic of the search. (Under short default dtypes radii
    were often 0.)

    Catches: tensors of the default dtype in a proof, and layers that run under the caller's settings.
    """
    model = everything()
    with SWITCHES[name]():
        found, radii = proved(model)
    plain, expected = without_switches()
    assert torch.equal(plain.margin, found.margin)
    assert torch.equal(plain.lipschitz, found.lipschitz)
    torch.testing.assert_close(radii, expected, rtol=1e-2, atol=0)
    assert float(expected.min()) > 0


def test_without_values_nothing_is_certified() -> None:
    """New tensors of the device "meta" have none, and errors came from deep inside torch."""
    with torch.device("meta"), pytest.raises(RuntimeError, match="meta"):
        ll.certify(everything(), *IMAGES, 0.1)


# Random numbers that are known -----------------------------------------------------------------------------------------


def against(seed: int, n: int, gap: float) -> tuple[Tensor, Tensor]:
    """A matrix (n, n) with the norm 1 + gap in a direction that the first start of a seed does not see, and 1 elsewhere."""
    start = np.random.Generator(np.random.PCG64(seed)).standard_normal((1, n))[0]
    drawn = np.random.default_rng(5)
    basis, _ = np.linalg.qr(np.column_stack([start, drawn.standard_normal((n, n - 1))]))
    top = basis[:, 1]
    for _ in range(3):
        top = top - start * (start @ top) / (start @ start)
        top = top / np.linalg.norm(top)
    turn, _ = np.linalg.qr(drawn.standard_normal((n - 1, n - 1)))
    rest = np.column_stack([basis[:, 0], basis[:, 2:]]) @ turn
    matrix = (rest * np.linspace(0, 1, n - 1)) @ rest.T + (1 + gap) * np.outer(top, top)
    return torch.from_numpy(matrix), torch.from_numpy(top)


def test_weights_that_know_the_starts_of_a_report() -> None:
    """`locallip report --explore` drew with seed 0 unless told otherwise, and everybody knows that one: weights that were
    made for it got "CERTIFIED" under high_probability. `certify` draws a seed that nobody knows, and says UNKNOWN.

    Catches: a default seed behind a proof that rests on random numbers.
    """
    n, gap = 256, 1e-3
    matrix, top = against(PROOF_SEED, n, gap)
    bias = float(-1e6 * top.sum()) + 1e4 * (1 + gap) * (1 - gap / 4)
    model = nn.Sequential(linear(matrix, [100.0] * n), nn.ReLU(), linear(torch.stack([1e4 * top, 0 * top]), [bias, 0.0]))
    point = [-Fraction(t) for t in (top * (1 - 1e-9)).tolist()]
    assert sum(t * t for t in point) <= 1
    assert loses(model, point, 0)
    zero = torch.zeros(1, 1, 16, 16)
    whole = nn.Sequential(nn.Flatten(), *model)
    assert not ll.certify(whole, zero, torch.tensor([0]), 1.0).certified.any()
    images = ImageSet("embedded", "test", zero.to(torch.uint8), torch.tensor([0]), ("one", "two"))
    told = Explorer(whole, images, "1", seed=0).run([0], {})["network"]
    assert (told["proof_seed"], told["images"][0]["verdict"]) == (str(PROOF_SEED), "CERTIFIED")  # the attack works
    drawn = Explorer(whole, images, "1").run([0], {})["network"]
    assert drawn["proof_seed"] != told["proof_seed"]
    assert drawn["images"][0]["verdict"] != "CERTIFIED"
    assert (drawn["images"][0]["radius"] or 0.0) < 1


# Many classes, memory, numbers, odd layers -----------------------------------------------------------------------------


@pytest.mark.parametrize(("guarantee", "at_once"), [("deterministic", 300), ("high_probability", 2**28)])
def test_many_classes_in_parts(guarantee: str, at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """300 classes, of which the nearest is any: the radius of a linear classifier is the least lead over ||w_y - w_i||.

    Catches: a part of the classes that is left out or compared with another label's rows.
    """
    monkeypatch.setattr(margin, "AT_ONCE", at_once)
    torch.manual_seed(1)
    model, x = linear(torch.randn(300, 6), torch.randn(300)), torch.randn(2, 6, dtype=DOUBLE)
    y = model(x).argmax(1)
    radii = ll.certified_radius(model, x, y, guarantee=guarantee)
    for sample, label, radius in zip(x.tolist(), y.tolist(), radii.tolist(), strict=True):
        logits, rows = exact(model, [Fraction(t) for t in sample]), model.weight.tolist()
        squares = [sum((Fraction(a) - Fraction(b)) ** 2 for a, b in zip(row, rows[label], strict=True)) for row in rows]
        gaps = [(logits[label] - z) ** 2 / s for z, s in zip(logits, squares, strict=True) if s]
        assert Fraction(radius) ** 2 < min(gaps) < Fraction(radius * 1.001) ** 2


def strided(tensor: Tensor) -> Tensor:
    room = torch.zeros(*tensor.shape[:-1], 2 * tensor.shape[-1], dtype=tensor.dtype)
    room[..., ::2] = tensor
    return room[..., ::2]


def turned(tensor: Tensor) -> Tensor:
    return tensor.flip(0).mT.contiguous().mT.flip(0)


@pytest.mark.parametrize("layout", [strided, turned, lambda t: t.clone()], ids=["strided", "turned", "cloned"])
@pytest.mark.parametrize("shared", [False, True])
def test_memory_does_not_matter(layout: Callable[[Tensor], Tensor], shared: bool) -> None:
    """Weights with gaps, turned, expanded, or of two layers at once; inputs of the same kind, or in the memory of a weight.

    Catches: numbers that are read in the order of memory, or written to.
    """
    torch.manual_seed(2)
    model = nn.Sequential(linear(torch.randn(6, 6), torch.zeros(6)), nn.ReLU(), linear(torch.randn(6, 6), [0.1] * 6))
    weight, x = model[0].weight.detach().clone(), model[2].weight.detach().clone()  # type: ignore[union-attr, operator]
    y = model(x).argmax(1)
    other = nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 6))
    other[0].weight, other[0].bias = nn.Parameter(layout(weight)), nn.Parameter(torch.zeros(1, dtype=DOUBLE).expand(6))
    other[2].weight, other[2].bias = nn.Parameter(layout(x)), nn.Parameter(torch.full((1,), 0.1, dtype=DOUBLE).expand(6))
    inputs = other[2].weight.detach() if shared else layout(x)
    for guarantee in PROOFS:
        options: dict[str, Any] = {"guarantee": guarantee, "seed": 1}
        one, two = ll.certify(model, x, y, 0.03, **options), ll.certify(other, inputs, y, 0.03, **options)
        assert one.verdicts == two.verdicts
        assert torch.allclose(one.margin, two.margin, rtol=1e-9, equal_nan=True)
    assert torch.equal(inputs, x)


@pytest.mark.parametrize("eps", [5e-324, "1e-400", torch.tensor(5e-324, dtype=DOUBLE), "1/1" + "0" * 400])
def test_a_radius_below_all_numbers_is_not_none(eps: Any) -> None:
    """At the threshold itself the class is lost by any step: 0 is a tie, and what is left of eps counts.

    Catches: a radius that is rounded to 0.
    """
    model = linear([[1e300], [0.0]], [0.0, 1e-30])
    x = torch.zeros(1, 1, dtype=DOUBLE)
    found = ll.certify(model, x, torch.tensor([1], dtype=torch.uint8), eps, guarantee="deterministic", attack_steps=0)
    assert float(found.eps) > 0
    assert not ll.certify(linear([[1.0], [0.0]], [0.0, 0.0]), x, torch.tensor([1]), eps, attack_steps=0).certified.any()


@pytest.mark.parametrize("eps", [[float("nan")], torch.tensor([float("nan")]), torch.tensor([-1]), torch.tensor([1, 2])])
def test_radii_that_are_none_are_refused(eps: Any) -> None:
    with pytest.raises(ValueError, match="eps"):
        ll.certify(chain(1.0), torch.zeros(1, 1, dtype=DOUBLE), torch.tensor([1]), eps)


class Twice(nn.Module):
    """z + z, z - z / 3, and the same layer twice."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = nn.Conv2d(2, 2, 3, padding=1), nn.Linear(72, 4)

    def forward(self, x: Tensor) -> Tensor:
        z = nn.functional.leaky_relu(self.layer(x), negative_slope=1.5)
        z = nn.functional.elu(self.layer(z + z) - z / 3, alpha=2.5)
        return self.head((z + z).flatten(1))


def tiny_variance() -> nn.BatchNorm2d:
    norm = nn.BatchNorm2d(4, eps=1e-30)
    with torch.no_grad():
        norm.running_var.copy_(torch.tensor([1e-20, 1e-3, 1.0, 1e9]))  # type: ignore[union-attr]
        norm.weight.copy_(torch.tensor([1e-10, -0.1, 0.0, 1e4]))
    return norm


ODD: dict[str, Callable[[], nn.Module]] = {
    "groups": lambda: nn.Sequential(nn.Conv2d(2, 6, (2, 3), (1, 2), (1, 3), (2, 1), 2), nn.Tanh(), nn.Flatten()),
    "average": lambda: nn.Sequential(nn.AvgPool2d(3, 2, 1, True, False), nn.Conv2d(2, 3, 1), nn.ReLU6(), nn.Flatten()),
    "divisor": lambda: nn.Sequential(nn.AvgPool2d(2, 1, 1, divisor_override=-3), nn.Sigmoid(), nn.Flatten()),
    "maximum": lambda: nn.Sequential(nn.Conv2d(2, 4, 2), nn.MaxPool2d(2, 3, 1, ceil_mode=True), nn.ELU(0.3), nn.Flatten()),
    "variance": lambda: nn.Sequential(nn.Conv2d(2, 4, 3), tiny_variance(), nn.Softplus(7.0, 25.0), nn.Flatten()),
    "same": lambda: nn.Sequential(nn.Conv2d(2, 2, 4, padding="same"), nn.Hardtanh(0.1, 0.2), nn.Dropout(1.0), nn.Flatten()),
    "steep": lambda: nn.Sequential(nn.Flatten(), nn.Linear(72, 9), nn.LeakyReLU(3.0), nn.Linear(9, 9), nn.LeakyReLU(0.0)),
}


def odd(name: str) -> nn.Module:
    torch.manual_seed(4)
    if name == "twice":
        return Twice().eval().double()
    body = ODD[name]().eval().double()
    return nn.Sequential(body, nn.Linear(body(torch.zeros(1, 2, 6, 6, dtype=DOUBLE)).shape[1], 4, dtype=DOUBLE)).eval()


@pytest.mark.parametrize(("name", "guarantee"), [(name, PROOFS[k % 2]) for k, name in enumerate([*ODD, "twice"])])
def test_no_search_gets_past_the_radii_of_odd_layers(name: str, guarantee: str) -> None:
    """Poolings with half windows and negative divisors, kernels that are not square, statistics of 1e-20, slopes above 1,
    sums of a value with itself. Catches: a rule that holds for usual settings alone.
    """
    model, x = odd(name), torch.rand(2, 2, 6, 6, dtype=DOUBLE)
    y = model(x).argmax(1)
    for domain in (None, (0.0, 1.0)):
        radii = ll.certified_radius(model, x, y, guarantee=guarantee, input_domain=domain)
        assert (radii > 0).all()
        for start in range(2):
            generator = torch.Generator().manual_seed(start)
            found = pgd_l2(model, x, y, radii, steps=30, input_domain=domain, generator=generator)
            assert ((found - x).flatten(1).norm(dim=1) <= radii * (1 + 1e-9)).all()
            assert torch.equal(model(found).argmax(1), y)


def test_one_number_with_a_gap_behind_it() -> None:
    """A stored tensor of one number that is a part of a larger one; it was "stride(-1) must be 1 to view Double as Byte"."""
    model = chain(1.0)
    model[0].weight = nn.Parameter(torch.ones(1, 4, dtype=DOUBLE)[:, ::2][:, :1])  # type: ignore[union-attr]
    assert ll.certify(model, torch.zeros(1, 1, dtype=DOUBLE), torch.tensor([1]), 0.5).certified.all()


def test_pixels_are_divided_by_255_and_rounded_once() -> None:
    """Of the 256 numbers, those that a GPU makes by multiplying with 1/255 are others in part (tests/test_cuda.py).

    Catches: a product with a rounded reciprocal.
    """
    for value, found in enumerate(pixels(torch.arange(256, dtype=torch.uint8)).tolist()):
        beside = [Fraction(float(np.nextafter(np.float32(found), np.float32(end)))) for end in (-1, 2)]
        off, *others = (abs(number - Fraction(value, 255)) for number in (Fraction(found), *beside))
        assert off <= min(others)
