"""A fourteenth round of attempts: VNN-LIB files that say two things, boxes at the end of float64, Jacobians that vanish."""

from __future__ import annotations

import math
import random
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import locallip as ll
from locallip.activations import Box, Unitwise, Varying
from locallip.answering import _told
from locallip.arithmetic import exact_arithmetic
from locallip.bounds import jacobian as jacobian_module
from locallip.bounds import pullback, worst_logits
from locallip.certify.prover import Prover
from locallip.network import Affine
from locallip.ops import Dense, Diagonal, LinearOp
from locallip.vnnlib import Answer, Decider, WrongSpec
from locallip.vnnlib.deciding import outer_box
from locallip.vnnlib.spec import parsed
from tests import test_attacker as first
from tests.onnx_graphs import Graph, written
from tests.test_vnnlib import box, declared, reached

DOUBLE = torch.float64
LARGEST = "1.7976931348623157e308"


def linear(weight: list[list[float]]) -> nn.Linear:
    """A float64 layer with these weights and no bias."""
    layer = nn.Linear(len(weight[0]), len(weight), bias=False, dtype=DOUBLE).requires_grad_(False)
    layer.weight.copy_(torch.tensor(weight, dtype=DOUBLE))
    return layer


# VNN-LIB ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("end", ["\n", "\r", "\r\n"])
def test_a_comment_ends_with_its_line_whatever_ends_that(end: str) -> None:
    """Class 2 is ahead everywhere, and the comment in front of it ended with a carriage return, as SMT-LIB allows.

    Up to here the rest of the assertion was part of the comment, class 2 was not asked about, and the answer was unsat.
    """
    text = declared(1, 3) + box([(0, 1)]) + f"(assert (or (>= Y_1 Y_0) ; one{end} (>= Y_2 Y_0)\n))"
    spec = parsed(text)
    assert spec.rivals == (1, 2)
    layer = linear([[0.0], [-1.0], [0.0]])
    layer.bias = nn.Parameter(torch.tensor([1.0, 0.0, 2.0], dtype=DOUBLE), requires_grad=False)
    assert Decider(layer, (1,), 3, torch.device("cpu"), seed=0)(spec, attack_steps=0, seed=0).result == "sat"


@pytest.mark.parametrize("end", ["\v", "\f", "\x1c", "\x1d", "\x1e", "\x85", "\u2028", "\u2029"])
def test_ends_of_lines_for_other_readers_are_refused(end: str) -> None:
    """Python's splitlines ends a line there, SMT-LIB does not: such a file says two things to two readers."""
    text = declared(1, 3) + box([(0, 1)]) + f"(assert (or (>= Y_1 Y_0) ; one{end} (>= Y_2 Y_0)\n))"
    with pytest.raises(WrongSpec, match=rf"line 7: the character U\+{ord(end):04X} is not understood"):
        parsed(text)


@pytest.mark.parametrize("number", ["1.7976931348623158e308", "-1.7976931348623158e308", "1" + "7" * 309])
def test_numbers_that_are_infinite_when_rounded_outward_are_refused(number: str) -> None:
    """To the nearest they are the largest number of float64; the box went to infinity, and ended in a traceback."""
    with pytest.raises(WrongSpec, match=r"line 5: .* is beyond what float64 can hold"):
        parsed(declared(2, 2) + f"(assert (<= X_0 {number}))")


@pytest.mark.parametrize("guarantee", ["deterministic", "high_probability"])
@pytest.mark.parametrize("method", ["auto", "local", "lines"])
@pytest.mark.parametrize("ends", [(f"-{LARGEST}", LARGEST), (0, LARGEST), (LARGEST, LARGEST), ("1e200", "1e200")])
def test_boxes_as_large_as_float64_are_answered(guarantee: str, method: str, ends: tuple[str, str]) -> None:
    """The half width overflows when it is rounded up. Class 0 is ahead for all inputs, so anything but sat is right."""
    spec = parsed(declared(2, 2) + box([ends, (0, 1)]) + reached(0, [1]))
    low, high = outer_box(spec)
    assert all(map(math.isfinite, low + high))
    model = nn.Sequential(linear([[1.0, 2.0], [-1.0, 0.5]]), nn.Hardtanh(), nn.Linear(2, 2, dtype=DOUBLE))
    with torch.no_grad():
        model[2].weight.fill_(0.25)
        model[2].bias.copy_(torch.tensor([5.0, 0.0]))
    decider = Decider(model, (2,), 2, torch.device("cpu"), seed=0, guarantee=guarantee, method=method)
    found = decider(spec, attack_steps=3, seed=0)
    assert found.result in ("unsat", "unknown")


def test_outputs_before_a_softmax_are_not_called_those_of_the_file(tmp_path: Path, command) -> None:
    """A witness names Y_0, and the file's Y_0 is a probability, which 3.7 is not."""
    graph = Graph(1, 4)
    model = graph.model(graph.add("Softmax", graph.add("Gemm", "x", graph.weight(4, 3), graph.stored([0.0, 3.0, 5.0]))))
    path, spec = written(model, tmp_path / "net.onnx"), tmp_path / "a.vnnlib"
    spec.write_text(declared(4, 3) + box([(0, "0.1")] * 4) + reached(0, [1, 2]))
    code, out, _ = command("certify", path, "--vnnlib", spec)
    assert code == 0
    assert out.startswith("sat\n")
    assert out.splitlines()[-1].endswith("outputs are those before the Softmax at the end")
    outputs = graph.run(model, np.zeros((1, 4)))
    assert abs(float(outputs.sum()) - 1) < 1e-6


# Jacobians -------------------------------------------------------------------------------------------------------------


def rows_of(model: nn.Module, way: type[jacobian_module.Middle]) -> jacobian_module.Middle:
    shape = torch.Size([model[0].in_features])  # type: ignore[index, union-attr]
    prover = Prover(model, shape, "deterministic")
    trace = prover.trace(torch.ones(1, *shape, dtype=DOUBLE), torch.full((1,), 0.1, dtype=DOUBLE))
    return way(jacobian_module.known(prover.network, trace, slice(0, 1)))


@pytest.mark.parametrize("size", [1e-100, 1e-80, 1e-40, 1.0])
def test_what_rounding_takes_from_tiny_rows_is_counted(size: float) -> None:
    """1e16 + 1 - 1e16 in units of 1e-163, whose squares are 0 in float64: nothing was counted of what the sum loses."""
    layer = linear([[1e-63 * w] * 2 for w in (1.0, 1e-16, -1.0)])
    middle = rows_of(nn.Sequential(layer, nn.ReLU(), linear([[1.0, 1.0, 1.0], [0.0, 0.0, 0.0]])), jacobian_module.Middle)
    op, g = middle.known.network.stages[0].terms[0], torch.full((1, 1, 3), size, dtype=DOUBLE)
    with torch.no_grad():
        rows, lost = middle.pulled(g, op, 0)
    exact = sum((Fraction(size) * Fraction(float(w)) for w in layer.weight[:, 0]), Fraction(0))
    assert 2 * (exact - Fraction(float(rows[0, 0, 0]))) ** 2 <= Fraction(float(lost)) ** 2


@pytest.mark.parametrize("activation", [nn.Tanh(), nn.ReLU(), ll.MaxMin(), nn.LeakyReLU(1e-200)])
def test_slopes_and_rows_whose_product_vanishes_are_counted(activation: nn.Module) -> None:
    """Rows of 1e-300 behind an activation that bends: g (D - M) is 0 in float64, and was taken for exactly 0."""
    middle = rows_of(nn.Sequential(linear([[1.0], [-9.0]]), activation, linear([[1.0, 1.0]])), jacobian_module.Middle)
    (step,) = middle.known.slopes[1] or ()
    with torch.no_grad():
        _, cost = middle.bent(torch.full((1, 1, 2), 5e-324, dtype=DOUBLE), step, 1)
    assert float(cost) > 0
    with torch.no_grad():
        _, cost = middle.bent(torch.zeros(1, 1, 2, dtype=DOUBLE), step, 1)
    assert float(cost) == 0


class Flipped:
    """Methods that turn the order round; no operator itself."""

    def apply(self, v: Tensor) -> Tensor:
        return super().apply(v).flip(-1)  # type: ignore[misc]

    def adjoint(self, w: Tensor) -> Tensor:
        return super().adjoint(w.flip(-1))  # type: ignore[misc]

    def apply_abs(self, r: Tensor) -> Tensor:
        return super().apply_abs(r).flip(-1)  # type: ignore[misc]

    def row_norms(self, cols: Tensor) -> Tensor:
        return super().row_norms(cols).flip(-1)  # type: ignore[misc]


class FlippedDense(Flipped, Dense):
    """Dense with its outputs turned round, by a class that stands before it."""


class FlippedDiagonal(Flipped, Diagonal):
    """As FlippedDense; nothing but the order of its bases says that it computes something else."""


class Later(FlippedDense):
    """Derives from it and changes nothing."""


class Again(Dense):
    """Changes what is kept of another class, and has a way back of its own."""

    def apply_abs(self, r: Tensor) -> Tensor:
        return 2 * super().apply_abs(r)

    def adjoint_abs(self, w: Tensor) -> Tensor:
        return 3 * super().adjoint_abs(w)


def test_methods_from_another_base_class_do_not_leave_the_way_back_of_ours() -> None:
    """docs/adding_a_layer.md: what changes `apply` does not inherit `adjoint_abs`. It did, where a mixin had the change."""
    torch.manual_seed(0)
    weight = torch.randn(3, 3, dtype=DOUBLE)
    for op in (FlippedDense(lambda: weight), Later(lambda: weight), FlippedDiagonal(lambda dtype: weight[0], (3,))):
        like, w = torch.zeros(1, dtype=DOUBLE), torch.rand(4, 3, dtype=DOUBLE)
        expected = w @ op.materialize(like).abs()
        torch.testing.assert_close(op.adjoint_abs(w), expected)
    ones = torch.ones(1, 3, dtype=DOUBLE)
    torch.testing.assert_close(Again(lambda: weight).adjoint_abs(ones), 3 * ones @ weight.abs())
    assert "adjoint_abs" not in vars(Dense(lambda: weight))
    assert Dense.adjoint_abs is not LinearOp.adjoint_abs


class Turned(nn.Linear):
    """A layer of one's own, whose operator takes its methods from a mixin."""

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.weight).flip(-1)


@ll.register_layer(Turned)
def _turned(module: Turned, in_shape: torch.Size, like: Tensor) -> Affine:
    return Affine(FlippedDense(lambda: module.weight))


def test_a_turned_layer_of_ones_own_has_no_slope_above_its_bound() -> None:
    """J = (0, 8, 0) W: with the way back of the plain layer its rounding and its intervals were those of (1, 0, 0) W."""
    torch.manual_seed(0)
    first = Turned(3, 3, bias=False, dtype=DOUBLE)
    with torch.no_grad():
        first.weight.copy_(torch.diag(torch.tensor([1.0, 1e-3, 100.0])))
    model = nn.Sequential(first, nn.LeakyReLU(0.5), linear([[1.0, 0.0, 0.0], [0.0, 0.0, 0.0]]))
    x = torch.zeros(1, 3, dtype=DOUBLE)
    true = float(torch.autograd.functional.jacobian(lambda z: model(z), x + 1e-3)[0, :, 0].norm())
    assert true == pytest.approx(100.0)
    for way in ("jacobian", "auto"):
        assert float(ll.local_lipschitz(model, x, 0.1, method=way, guarantee="deterministic")) >= true  # type: ignore[arg-type]


def test_a_bound_that_overflows_is_infinite() -> None:
    """The slope is 1e400; the bound by the Jacobian was the largest number of float64, 1.8e308."""
    model = nn.Sequential(linear([[1e200], [-1e200]]), nn.Hardtanh(), linear([[1e200, 0.0], [0.0, 1e200]]))
    for way in ("product", "jacobian", "auto"):
        found = ll.local_lipschitz(model, torch.zeros(2, 1, dtype=DOUBLE), 1e-200, method=way, guarantee="deterministic")  # type: ignore[arg-type]
        assert found.tolist() == [math.inf, math.inf]


# Wild networks of one input, against their exact pieces -----------------------------------------------------------------


def wild_layers(draw: random.Random, classes: int) -> list[nn.Module]:
    """Scales of 2^-300 to 2^830 in one network, sums of 1e16 + 1 - 1e16, thresholds that tie."""
    kind, layers, last, width = draw.choice([0, 0, 1, 2]), list[nn.Module](), 1, draw.choice([2, 4])
    scales = ((1.0, 1e8, 1e-8), (1.0, 2.0**250, 2.0**-250, 2.0**100), (2.0**830, 2.0**-300, 1e150, 1.0))[kind]
    for out in [width] * draw.choice([1, 2, 3]) + [classes]:
        scale, shift = draw.choice(scales), draw.choice([0.0, 1.0, 1e15, 1e-300])
        weight = [
            [first._number(draw, scale) * draw.choice([1, 1, 1, 1e16, -1e16]) for _ in range(last)] for _ in range(out)
        ]
        layers += [first.linear(weight, [first._number(draw, shift) for _ in range(out)]), first._activation(draw, width)]
        last = out
    return layers[:-1]


def wild_prover(draw: random.Random, layers: list[nn.Module], **options: Any) -> Prover | None:
    """None for networks that are refused: weights near underflow, values that are not finite."""
    try:
        return Prover(nn.Sequential(*layers), (1,), draw.choice(["deterministic", "high_probability"]), seed=0, **options)
    except ValueError:
        return None


@pytest.mark.parametrize("seed", range(25))
def test_no_piece_is_steeper_than_any_way_says(seed: int) -> None:
    """Boxes as they are and sharpened, balls of 0 to 1e10: every bound is at least the steepest exact slope, or infinite."""
    draw = random.Random(seed)
    layers = wild_layers(draw, draw.choice([2, 3]))
    x, eps = draw.choice([0.0, 1.0, 1e8, 1e-300]), draw.choice([1e-300, 1e-12, 1e-3, 1.0, 1e10])
    prover = wild_prover(draw, layers)
    if prover is None:
        return
    steepest = first.Pieces(Fraction(x) - Fraction(eps), Fraction(x) + Fraction(eps), layers).steepest_squared()
    for relax in (None, "boxes", "slopes"):
        trace = prover.trace(first.tensor([[x]]), first.tensor([eps]), relax=relax)  # type: ignore[arg-type]
        with exact_arithmetic():
            for way in ("absolute", "intervals", "middle"):
                bound = float(jacobian_module.jacobian_bounds(prover.network, trace, (way,)))  # type: ignore[arg-type]
                assert math.isinf(bound) or Fraction(bound) ** 2 >= steepest


@pytest.mark.parametrize("seed", range(12))
def test_what_is_given_up_early_is_no_wrong_bound(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Verdicts alone, in batches with NaN, ties and other radii, in small parts: no class rises above its worst logit."""
    draw = random.Random(seed)
    monkeypatch.setattr("locallip.bounds.margin.SMALL", draw.choice([0, 0, 2**14]))
    monkeypatch.setattr("locallip.bounds.margin.AT_ONCE", draw.choice([1, 30, 2**28]))
    monkeypatch.setitem(pullback.TOGETHER, "cpu", draw.choice([1, 50, 2**23]))
    count, classes = draw.choice([1, 4, 5]), draw.choice([2, 3, 5])
    layers = wild_layers(draw, classes)
    prover = wild_prover(draw, layers, deployed_dtype=draw.choice([None, "float32"]), norm=draw.choice(["2", "inf"]))
    if prover is None:
        return
    x = [draw.choice([0.0, 1.0, draw.gauss(0, 1), 1e8, math.nan]) for _ in range(count)]
    eps, y = [draw.choice([1e-6, 0.1, 1.0, 10.0]) for _ in x], torch.tensor([draw.randrange(classes) for _ in x])
    for relax in (None, "boxes", "slopes"):
        trace = prover.trace(first.tensor([[v] for v in x]), first.tensor(eps), relax=relax)  # type: ignore[arg-type]
        wanted = prover.wanted(trace, y) if draw.random() < 0.7 else torch.zeros(count, dtype=DOUBLE)
        with exact_arithmetic():
            worst = worst_logits(prover.network, trace, y, outward=True, slope_steps=5, wanted=wanted).worst
        for i in range(count):
            if math.isnan(x[i]):
                assert not torch.isfinite(worst[i]).all()
                continue
            pieces = first.Pieces(Fraction(x[i]) - Fraction(eps[i]), Fraction(x[i]) + Fraction(eps[i]), layers)
            for rival in range(classes):
                said = float(worst[i, rival]), float(worst[i, y[i]])
                if rival != int(y[i]) and all(map(math.isfinite, said)):
                    assert Fraction(said[0]) - Fraction(said[1]) >= highest(pieces, rival, int(y[i]))


def highest(pieces: first.Pieces, rival: int, label: int) -> Fraction:
    """The largest lead of the rival over the label."""
    parts = zip(pieces.cuts, pieces.cuts[1:], pieces.lines, strict=False)
    return max(first._at(first._minus(z[rival], z[label]), end) for *ends, z in parts for end in ends)


# Layers of one's own ---------------------------------------------------------------------------------------------------


class Folded(nn.Module):
    """|z|."""

    def forward(self, z: Tensor) -> Tensor:
        return z.abs()


class FoldedRule(Unitwise):
    """Every unit varies, which needs no batch: the first dimension is 1, or missing."""

    masks: tuple[int, ...] = (1, 4)

    def __call__(self, z: Tensor) -> Tensor:
        return z.abs()

    def image(self, box: Box) -> Box:
        ends = torch.minimum(box.lower.abs(), box.upper.abs()), torch.maximum(box.lower.abs(), box.upper.abs())
        return Box(torch.where((box.lower <= 0) & (box.upper >= 0), 0.0, ends[0]), ends[1])

    def varying(self, box: Box) -> Varying:
        ones = torch.ones(self.masks, dtype=torch.bool)
        return Varying(ones, ones)


@ll.register_layer(Folded)
def _folded(module: Folded, in_shape: torch.Size, like: Tensor) -> FoldedRule:
    return FoldedRule()


@pytest.mark.parametrize("masks", [(1, 4), (4,), (), (3, 4)])
def test_masks_for_all_samples_or_without_any(masks: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """Four units and a batch of four, so that units could be taken for samples. Each of these ended in an error of torch."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), Folded(), nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 3)).double()
    x = torch.randn(4, 4, dtype=DOUBLE)
    expected = [ll.certified_radius(model, row[None], model(row[None]).argmax(1), guarantee="deterministic") for row in x]
    monkeypatch.setattr(FoldedRule, "masks", masks)
    if masks != (1, 4):
        with pytest.raises(ValueError, match="'varying' of the activation behind '1' gives masks of shape"):
            ll.certified_radius(model, x, model(x).argmax(1))
        return
    found = ll.certified_radius(model, x, model(x).argmax(1), guarantee="deterministic")
    torch.testing.assert_close(found, torch.cat(expected), rtol=0.05, atol=0)
    bounds = ll.local_lipschitz(model, x, 0.1, guarantee="deterministic")
    for point, bound in zip(x, bounds, strict=True):
        jacobian = torch.autograd.functional.jacobian(model, point)
        assert float(torch.linalg.matrix_norm(jacobian, ord=2)) <= float(bound)


# What is printed -------------------------------------------------------------------------------------------------------


def test_a_lead_that_is_told_is_proved_and_a_name_makes_no_line() -> None:
    """0.123456 was "at least 0.1235", and a file called "a\\nunsat" had a second answer."""
    found = Answer("unsat", "lines", 0.123456, 1.0)
    told = _told(Path("a\nunsat.vnnlib"), found, {"guarantee": "deterministic"}, "")
    assert told == "unsat\n; a?unsat.vnnlib: by lines, guarantee deterministic, the label's lead at least 0.1234, 1.0 s"
    unknown = _told(Path("b"), Answer("unknown", "nothing", -0.123456, 1.0), {"guarantee": "deterministic"}, "")
    assert "at least -0.1235" in unknown
