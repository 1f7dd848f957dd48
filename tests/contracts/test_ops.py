"""What every linear operator promises, for each row of the table of operators."""

from __future__ import annotations

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from locallip.ops import Compose, Conv, Dense, Identity, LinearOp, Masked, Reshape, Sum, compose

from .cases import BATCH, LIKE, OPS, Built, OpCase, Weights, conv, dense, matrices

ops = pytest.mark.parametrize("case", OPS, ids=lambda case: case.name)


def vectors(shape: torch.Size, seed: int = 1) -> Tensor:
    return torch.randn(BATCH, *shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def times(matrix: Tensor, v: Tensor) -> Tensor:
    """The product of each sample's matrix and vector, (BATCH, out)."""
    return torch.einsum("boi,bi->bo", matrix, v.flatten(1))


def column_weights(shape: torch.Size) -> list[Tensor]:
    """All ones, random with zeros, booleans as numbers, all zeros; each (BATCH, *shape)."""
    draws = vectors(shape, 7)
    return [torch.ones_like(draws), draws.clamp(min=0), (draws > 0).double(), torch.zeros_like(draws)]


def assert_close(a: Tensor, b: Tensor, tolerance: float = 1e-12) -> None:
    torch.testing.assert_close(a.detach(), b.detach(), rtol=tolerance, atol=tolerance)


def check_adjoint(op: LinearOp) -> None:
    v, w = vectors(op.in_shape), vectors(op.out_shape, 2)
    left = (op.apply(v) * w).flatten(1).sum(1)
    right = (v * op.adjoint(w)).flatten(1).sum(1)
    assert_close(left, right)


def check_row_norms(op: LinearOp, matrix: Tensor, exact: bool) -> None:
    for cols in column_weights(op.in_shape):
        true = (matrix * cols.flatten(1)[:, None, :]).norm(dim=2)
        found = op.row_norms(cols).flatten(1)
        assert found.shape == true.shape
        assert (found >= true * (1 - 1e-12)).all()
        if exact:
            assert_close(found, true, 1e-9)


def check_supports(op: LinearOp, matrix: Tensor) -> None:
    """The flags may be False without need, but never True without reason."""
    entries = matrix != 0
    if op.disjoint_rows:
        assert entries.sum(1).max() <= 1
    if op.single_entry_rows:
        assert entries.sum(2).max() <= 1
    if op.windows is not None:
        assert not (entries & ~within_windows(op)).any()


def within_windows(op: LinearOp) -> Tensor:
    """Which entries of the matrix the windows allow, (out, in)."""
    assert op.windows is not None
    allowed = torch.ones(op.out_shape.numel(), op.in_shape.numel(), dtype=torch.bool)
    for dim, window in enumerate(op.windows, start=1):
        begin = coordinate(op.out_shape, dim)[:, None] * window.stride - window.before
        place = coordinate(op.in_shape, dim)
        allowed &= (place >= begin) & (place <= begin + window.before + window.after)
    return allowed


def coordinate(shape: torch.Size, dim: int) -> Tensor:
    """That of every unit along one dimension, (n,)."""
    view = [-1 if d == dim else 1 for d in range(len(shape))]
    return torch.arange(shape[dim]).reshape(view).expand(shape).flatten()


@ops
def test_shapes(case: OpCase) -> None:
    op = case.build().op
    v, w = vectors(op.in_shape), vectors(op.out_shape)
    assert op.apply(v).shape == op.apply_abs(v.abs()).shape == op.row_norms(v.abs()).shape == w.shape
    assert op.adjoint(w).shape == v.shape
    assert op.apply(v).dtype == op.adjoint(w).dtype == torch.float64


@ops
def test_adjoint_is_the_transpose(case: OpCase) -> None:
    check_adjoint(case.build().op)


@ops
def test_adjoint_matrix_is_the_transposed_matrix(case: OpCase) -> None:
    op = case.build().op
    w = vectors(op.out_shape)
    assert_close(op.adjoint(w).flatten(1), times(matrices(op).transpose(1, 2), w))


@ops
def test_linear(case: OpCase) -> None:
    op = case.build().op
    a, b = vectors(op.in_shape, 3), vectors(op.in_shape, 4)
    assert_close(op.apply(2.5 * a - b), 2.5 * op.apply(a) - op.apply(b))
    assert not op.apply(torch.zeros_like(a)).any()


@ops
def test_apply_is_the_matrix(case: OpCase) -> None:
    op = case.build().op
    v = vectors(op.in_shape)
    assert_close(op.apply(v).flatten(1), times(matrices(op), v))


@pytest.mark.parametrize("case", [c for c in OPS if c.build().reference is not None], ids=lambda case: case.name)
def test_same_as_the_layer_of_torch(case: OpCase) -> None:
    built = case.build()
    assert built.reference is not None
    v = vectors(built.op.in_shape)
    assert_close(built.op.apply(v), built.reference(v))
    columns = torch.eye(built.op.in_shape.numel(), dtype=torch.float64).reshape(-1, *built.op.in_shape)
    assert_close(built.op.materialize(LIKE), built.reference(columns).flatten(1).T)


@ops
def test_apply_abs_covers_the_absolute_matrix(case: OpCase) -> None:
    op = case.build().op
    matrix = matrices(op)
    for r in column_weights(op.in_shape):
        true, found = times(matrix.abs(), r), op.apply_abs(r).flatten(1)
        assert (found >= true * (1 - 1e-12)).all()
        if case.exact:
            assert_close(found, true)


@ops
def test_adjoint_abs_covers_the_absolute_transpose(case: OpCase) -> None:
    op = case.build().op
    matrix = matrices(op)
    generic = LinearOp.adjoint_abs
    for r in column_weights(op.out_shape):
        true, found = times(matrix.abs().mT, r), op.adjoint_abs(r).flatten(1)
        assert (found >= true * (1 - 1e-12)).all()
        if case.exact:
            assert_close(found, true)
        if not isinstance(op, Masked):  # whose matrix is another for every sample
            assert_close(generic(op, r).flatten(1), found)


class Turned(Conv):
    """A convolution of the image turned round, by a class that says nothing of `adjoint_abs`."""

    def apply(self, v: Tensor) -> Tensor:
        return super().apply(v.flip(-1))

    def adjoint(self, w: Tensor) -> Tensor:
        return super().adjoint(w).flip(-1)

    def apply_abs(self, r: Tensor) -> Tensor:
        return super().apply_abs(r.flip(-1))


def test_what_computes_something_else_inherits_no_adjoint_abs() -> None:
    op = Turned(Weights().new(2, 1, 3), (1, 8), (2,), [(0, 1)], (1,))
    w = vectors(op.out_shape).abs()
    matrix = op.materialize(LIKE).abs().expand(BATCH, -1, -1)
    assert_close(op.adjoint_abs(w).flatten(1), times(matrix.mT, w))


@ops
def test_materialize_abs_covers_every_entry(case: OpCase) -> None:
    op = case.build().op
    base = getattr(op, "base", op)  # masks are per sample, so a masked operator has no one matrix
    matrix, absolute = base.materialize(LIKE), base.materialize_abs(LIKE)
    assert (absolute >= matrix.abs() * (1 - 1e-12)).all()


@ops
def test_row_norms_cover_the_rows(case: OpCase) -> None:
    op = case.build().op
    check_row_norms(op, matrices(op), case.exact)


@ops
def test_flags_of_the_rows_hold(case: OpCase) -> None:
    op = case.build().op
    check_supports(op, matrices(op))


def test_flags_are_set_where_bounds_live_on_them() -> None:
    by_name = {case.name: case.build().op for case in OPS}
    for name in ("pool disjoint", "pool gaps", "conv2d depthwise disjoint", "conv2d patches", "diagonal", "flatten"):
        assert by_name[name].disjoint_rows, name
    for name in ("pool overlapping", "conv2d depthwise twice", "conv2d dilated past its stride", "dense", "identity + conv"):
        assert not by_name[name].disjoint_rows, name


@ops
def test_float32_weights_are_converted_exactly(case: OpCase) -> None:
    narrow, wide = case.build(dtype=torch.float32).op, case.build(dtype=torch.float64).op
    v, w = vectors(wide.in_shape), vectors(wide.out_shape)
    assert torch.equal(narrow.apply(v), wide.apply(v))
    assert torch.equal(narrow.adjoint(w), wide.adjoint(w))
    assert torch.equal(narrow.apply_abs(v.abs()), wide.apply_abs(v.abs()))
    assert torch.equal(narrow.adjoint_abs(w.abs()), wide.adjoint_abs(w.abs()))
    assert torch.equal(narrow.row_norms(v.abs()), wide.row_norms(v.abs()))


weighted = pytest.mark.parametrize("case", [c for c in OPS if c.build().weights.values], ids=lambda case: case.name)


@weighted
def test_weights_are_read_through(case: OpCase) -> None:
    """An operator follows its weights: zeroing them all leaves only what an identity beside them does."""
    built = case.build()
    v = vectors(built.op.in_shape)
    before = built.op.apply(v)
    with torch.no_grad():
        for weight in built.weights.values:
            weight.zero_()
    assert not torch.equal(built.op.apply(v), before)


@weighted
def test_gradients_reach_every_weight(case: OpCase) -> None:
    built = case.build()
    v, w = vectors(built.op.in_shape), vectors(built.op.out_shape)
    for value in (built.op.apply(v), built.op.adjoint(w), built.op.apply_abs(v.abs()), built.op.row_norms(v.abs() + 1)):
        gradients = torch.autograd.grad(value.square().sum(), built.weights.values)
        assert all(g.isfinite().all() and g.any() for g in gradients)


@pytest.mark.parametrize("name", ["dense", "conv2d asymmetric and stride", "batch norm after conv", "weighed conv"])
def test_gradients_are_right(name: str) -> None:
    built = next(case for case in OPS if case.name == name).build()
    v, w = vectors(built.op.in_shape)[:1], vectors(built.op.out_shape)[:1]
    if hasattr(built.op, "select"):
        built.op = built.op.select(slice(0, 1))

    def values(*weights: Tensor) -> tuple[Tensor, ...]:
        built.weights.values[:] = weights
        return built.op.apply(v), built.op.adjoint(w), built.op.apply_abs(v.abs()), built.op.row_norms(v.abs() + 0.1)

    assert torch.autograd.gradcheck(values, tuple(built.weights.values))


@weighted
def test_gradients_are_finite_under_any_mask(case: OpCase) -> None:
    """A row without varying inputs has norm 0, where a square root has no derivative: training must not see NaN."""
    built = case.build()
    for cols in column_weights(built.op.in_shape):
        gradients = torch.autograd.grad(built.op.row_norms(cols).sum(), built.weights.values, allow_unused=True)
        assert all(g is None or bool(g.isfinite().all()) for g in gradients)


# Geometries drawn at random --------------------------------------------------------------------------------------------


@st.composite
def convolutions(draw: st.DrawFn) -> Built:
    dims = draw(st.integers(1, 2))
    groups, group_channels, group_out = (draw(st.integers(1, 2)) for _ in range(3))
    kernel = [draw(st.integers(1, 4)) for _ in range(dims)]
    stride = [draw(st.integers(1, 5)) for _ in range(dims)]
    dilation = [draw(st.integers(1, 3)) for _ in range(dims)]
    padding = [(draw(st.integers(0, 5)), draw(st.integers(0, 5))) for _ in range(dims)]
    if draw(st.booleans()):
        padding = [(a, a) for a, _ in padding]
    sizes = [draw(st.integers(1, 8)) for _ in range(dims)]
    assume(all(n + a + b > d * (k - 1) for n, (a, b), d, k in zip(sizes, padding, dilation, kernel, strict=True)))
    weights = Weights(draw(st.integers(0, 99)))
    op, reference = conv(
        weights, (groups * group_channels, *sizes), groups * group_out, kernel, stride, padding, dilation, groups
    )
    return Built(op, weights, reference)


@settings(max_examples=150, derandomize=True)
@given(convolutions())
def test_any_convolution(built: Built) -> None:
    op = built.op
    assert built.reference is not None
    v = vectors(op.in_shape)
    assert_close(op.apply(v), built.reference(v))
    check_adjoint(op)
    matrix = matrices(op)
    check_row_norms(op, matrix, exact=True)
    check_supports(op, matrix)


# What is refused -------------------------------------------------------------------------------------------------------


def test_shapes_that_do_not_fit_are_refused() -> None:
    w = Weights()
    with pytest.raises(ValueError, match="compose"):
        Compose(dense(w, 3, 4)[0], dense(w, 5, 4)[0])
    with pytest.raises(ValueError, match="add"):
        Sum([Identity((3,)), dense(w, 3, 4)[0]])
    with pytest.raises(ValueError, match="reshape"):
        Reshape((2, 3), (5,))


def test_compose_leaves_identities_out() -> None:
    op = Dense(Weights().new(3, 3))
    assert compose(Identity((3,)), op) is op
    assert compose(op, Identity((3,))) is op
    assert isinstance(compose(op, op), Compose)
