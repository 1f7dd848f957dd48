"""A fourteenth round of attempts: VNN-LIB files that say two things, boxes at the end of float64, Jacobians that vanish."""

from __future__ import annotations

import math
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import locallip as ll
from locallip.bounds import jacobian as jacobian_module
from locallip.certify.prover import Prover
from locallip.network import Affine
from locallip.ops import Dense, Diagonal, LinearOp
from locallip.vnnlib import Decider, WrongSpec
from locallip.vnnlib.deciding import outer_box
from locallip.vnnlib.spec import parsed
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
