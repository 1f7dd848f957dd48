"""The largest eigenvalue of tridiagonal matrices and the growth of their determinant above it, against dense solvers."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from locallip.norms.tridiagonal import POINTS, Tridiagonal


def dense(matrix: Tridiagonal) -> torch.Tensor:
    return torch.diag_embed(matrix.alpha) + torch.diag_embed(matrix.beta, 1) + torch.diag_embed(matrix.beta, -1)


def random_matrices(batch: int, size: int, seed: int, scale: float = 1.0) -> Tridiagonal:
    generator = torch.Generator().manual_seed(seed)
    alpha = torch.rand(batch, size, dtype=torch.float64, generator=generator)
    beta = torch.rand(batch, size - 1, dtype=torch.float64, generator=generator)
    return Tridiagonal(scale * alpha, scale * beta)


@given(st.integers(1, 5), st.integers(1, 60), st.integers(0, 10**6), st.sampled_from([-110, -3, 0, 110]))
def test_the_largest_eigenvalue_is_that_of_a_dense_solver(batch: int, size: int, seed: int, exponent: int) -> None:
    matrix = random_matrices(batch, size, seed, 10.0**exponent)
    true = torch.linalg.eigvalsh(dense(matrix))[:, -1]
    found = matrix.largest_eigenvalue()
    assert bool((found >= true * (1 - 1e-13)).all())
    torch.testing.assert_close(found, true, rtol=1e-9, atol=0)


@given(size=st.integers(1, 60), seed=st.integers(0, 10**6), value=st.floats(-200, 60))
def test_the_determinant_passes_its_value_just_below_what_is_found(size: int, seed: int, value: float) -> None:
    """log det at the point found is at least the value, and below it at a point with 0.1 % less of the gap."""
    matrix = random_matrices(3, size, seed)
    ritz = torch.linalg.eigvalsh(dense(matrix))
    log_value = torch.full((3,), value, dtype=torch.float64)
    top = matrix.largest_eigenvalue()
    found = matrix.passes(top, log_value)
    assert bool((found > top).all())
    assert bool(((found[:, None] - ritz).log().sum(1) >= log_value - 1e-3).all())
    gap = found - top
    less = (top + 0.999 * gap)[:, None] - ritz
    resolved = gap > 1e-8 * top
    assert bool((less.log().sum(1) <= log_value)[resolved].all())
    assert bool((gap[~resolved] <= 1e-8 * top[~resolved]).all())


def test_the_determinant_is_the_product_of_the_distances_to_the_eigenvalues() -> None:
    matrix = random_matrices(4, 30, 1)
    ritz = torch.linalg.eigvalsh(dense(matrix))
    mu = ritz[:, -1:] + torch.tensor([-0.1, 0.01, 1.0, 30.0], dtype=torch.float64)
    found = matrix.log_determinant(mu)
    assert bool((found[:, 0] == -math.inf).all())
    expected = (mu[:, 1:, None] - ritz[:, None]).log().sum(2)
    torch.testing.assert_close(found[:, 1:], expected, rtol=1e-9, atol=1e-9)


def test_many_matrices_are_worked_on_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    matrix = random_matrices(7, 20, 3)
    whole = matrix.largest_eigenvalue()
    monkeypatch.setattr("locallip.norms.tridiagonal._PIVOTS", 2 * 20 * POINTS)
    assert torch.equal(matrix.largest_eigenvalue(), whole)


def test_zero_matrices_have_eigenvalue_and_bound_zero() -> None:
    zero = Tridiagonal(torch.zeros(2, 4, dtype=torch.float64), torch.zeros(2, 3, dtype=torch.float64))
    top = zero.largest_eigenvalue()
    assert bool((top == 0).all())
    assert bool((zero.passes(top, torch.full((2,), -math.inf, dtype=torch.float64)) == 0).all())


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("where", ["alpha", "beta"])
def test_what_is_not_finite_is_nan_and_touches_no_other(bad: float, where: str) -> None:
    matrix = random_matrices(3, 6, 5)
    whole = matrix.largest_eigenvalue()
    getattr(matrix, where)[1, 2] = bad
    found = matrix.largest_eigenvalue()
    assert bool(found[1].isnan())
    assert torch.equal(found[[0, 2]], whole[[0, 2]])
    assert bool(matrix.passes(whole, torch.zeros(3, dtype=torch.float64))[1].isnan())


def test_a_value_that_is_no_number_bounds_nothing() -> None:
    matrix = random_matrices(3, 6, 5)
    values = torch.tensor([0.0, math.nan, math.inf], dtype=torch.float64)
    found = matrix.passes(matrix.largest_eigenvalue(), values)
    assert bool(found[0].isfinite())
    assert bool(found[1].isnan())
    assert float(found[2]) == math.inf
