"""The deterministic norm of large maps between images: never below the norm, close above it, and used by `certify`."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import locallip as ll
from locallip.certify.prover import Prover
from locallip.norms import CholeskyNorm, ExactNorm, NormKey
from locallip.norms.definite import eigenvalue_bound
from locallip.ops import Compose, Conv, Diagonal, Identity, LinearOp, Masked, Sum

KEY = NormKey(0, 0, "0")
LIKE = torch.zeros(1, dtype=torch.float64)


@st.composite
def convolutions(draw: st.DrawFn) -> Conv:
    """One or two dimensions, any stride, padding, dilation and groups, weights of any usual size, some of them 0."""
    dims, groups = draw(st.integers(1, 2)), draw(st.integers(1, 2))
    numbers = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    kernel = [draw(st.integers(1, 4)) for _ in range(dims)]
    dilation = [draw(st.integers(1, 2)) for _ in range(dims)]
    padding = [(draw(st.integers(0, 3)), draw(st.integers(0, 3))) for _ in range(dims)]
    size = [
        draw(st.integers(max(1, d * (k - 1) + 1 - sum(p)), 9)) for k, d, p in zip(kernel, dilation, padding, strict=True)
    ]
    stride = [draw(st.integers(1, 3)) for _ in range(dims)]
    weight = torch.randn(groups * draw(st.integers(1, 3)), draw(st.integers(1, 2)), *kernel, generator=numbers)
    weight = weight * (torch.rand(weight.shape, generator=numbers) < draw(st.sampled_from([0.3, 1.0])))
    weight = weight * 10.0 ** draw(st.integers(-6, 6))
    return Conv(lambda: weight, (groups * weight.shape[1], *size), stride, padding, dilation, groups)


@st.composite
def maps(draw: st.DrawFn) -> LinearOp:
    """A convolution, alone or as I + conv, conv after a factor, or a factor after conv."""
    base = draw(convolutions())
    kind = draw(st.sampled_from(["plain", "plain", "residual", "scaled", "factors before"]))
    factors = torch.linspace(-2, 3, 50, dtype=torch.float64)
    if kind == "residual" and base.in_shape == base.out_shape:
        return Sum([Identity(base.in_shape), base])
    if kind == "scaled":
        channel = factors[: base.out_shape[0]].reshape(-1, *[1] * (len(base.out_shape) - 1))
        return Compose(Diagonal(lambda dtype: channel.to(dtype), base.out_shape), base)
    if kind == "factors before":
        channel = factors[: base.in_shape[0]].reshape(-1, *[1] * (len(base.in_shape) - 1))
        return Compose(base, Diagonal(lambda dtype: channel.to(dtype), base.in_shape))
    return base


@st.composite
def masked_maps(draw: st.DrawFn) -> Masked:
    base = draw(maps())
    numbers = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))

    def weights(shape: torch.Size) -> Tensor | None:
        kind = draw(st.sampled_from(["none", "all", "some", "few", "slopes"]))
        values = torch.rand(2, *shape, generator=numbers, dtype=torch.float64)
        return {"none": None, "all": values >= 0, "some": values < 0.6, "few": values < 0.1, "slopes": values}[kind]

    return Masked(base, weights(base.out_shape), weights(base.in_shape))


def extended(op: Masked) -> np.ndarray:
    """||A u|| / ||u|| of each sample in extended precision for the top singular vector u: surely at most the norm."""
    matrix = op.base.materialize(LIKE).detach().numpy().astype(np.longdouble)[None]
    for weights, shape in ((op.rows, (-1, op.out_shape.numel(), 1)), (op.cols, (-1, 1, op.in_shape.numel()))):
        if weights is not None:
            matrix = matrix * weights.double().numpy().reshape(shape)
    tops = [np.linalg.svd(m.astype(np.float64))[2][0].astype(np.longdouble) for m in matrix]
    return np.array([np.sqrt(((m @ u) ** 2).sum() / (u**2).sum()) for m, u in zip(matrix, tops, strict=True)])


@settings(max_examples=600, derandomize=True)
@given(op=masked_maps(), whole=st.sampled_from([0, 0, 512]))
def test_never_below_the_norm_in_extended_precision_and_close_to_it(op: Masked, whole: int) -> None:
    value = CholeskyNorm(whole=whole)(op, KEY, LIKE).detach().numpy().astype(np.longdouble)
    true = extended(op)
    assert (value >= true * (1 - 1e-15)).all()
    assert (value <= true * 1.01 + 1e-90).all()


class Split:
    """A matrix in two blocks."""

    number = 2

    def __init__(self, matrix: Tensor, at: int):
        self.matrix, self.parts = matrix, (slice(0, at), slice(at, None))

    def diagonal(self, j: int) -> Tensor:
        return self.matrix[None, self.parts[j], self.parts[j]]

    def below(self, j: int) -> Tensor:
        return self.matrix[None, self.parts[1], self.parts[0]]


def is_definite(t: float, matrix: Tensor) -> bool:
    """Is t I - matrix positive definite? Elimination in whole fractions, without any rounding."""
    rows = [[Fraction(-float(entry)) for entry in row] for row in matrix]
    for i in range(len(rows)):
        rows[i][i] += Fraction(t)
    for i, pivot in enumerate(rows):
        if pivot[i] <= 0:
            return False
        for row in rows[i + 1 :]:
            share = row[i] / pivot[i]
            row[i:] = [a - share * b for a, b in zip(row[i:], pivot[i:], strict=True)]
    return True


def test_what_rounding_lets_through_is_added():
    """Factorizations succeed for some shifts just below the largest eigenvalue; the bound is not below it for all that."""
    fooled = 0
    for seed in range(200):
        numbers = torch.Generator().manual_seed(seed)
        factor = torch.randint(-9, 10, (10, 15), generator=numbers).double()
        matrix = factor @ factor.T  # whole numbers, so exact
        near = torch.linalg.eigvalsh(matrix)[-1]
        for ulps in range(-2, 8):
            t = near * (1 - ulps * 2.0**-53)
            bound = eigenvalue_bound(Split(matrix, 4), t[None])
            if bool(bound.isfinite()) and not is_definite(float(t), matrix):
                fooled += 1
                assert is_definite(float(bound), matrix)
    assert fooled > 2, "no shift below the eigenvalue passed, so nothing was tested"


def image_network(size: int, seed: int = 0) -> nn.Module:
    """Convolutions that are proved in blocks, for images 3 x size x size."""
    torch.manual_seed(seed)
    width = 8 * (size // 2) ** 2
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1), nn.ReLU(),
        nn.Conv2d(8, 8, 4, stride=2, padding=1), nn.ReLU(), nn.Flatten(),
        nn.Linear(width, 24), nn.ReLU(), nn.Linear(24, 5),
    ).eval()  # fmt: skip


def test_certify_proves_large_convolutions():
    """28 x 28 images, 6,272 units between convolutions: as many as with high probability, and no bound is below an SVD's."""
    model = image_network(28)
    x = torch.rand(24, 3, 28, 28)
    y = model(x).argmax(1)
    eps = torch.logspace(-2.5, 0, 24, dtype=torch.float64)
    proved = ll.certify(model, x, y, eps, guarantee="deterministic", attack_steps=5, seed=0)
    likely = ll.certify(model, x, y, eps, attack_steps=5, seed=0)
    assert proved.guarantee is ll.Guarantee.DETERMINISTIC
    assert proved.failure_prob == 0.0
    assert 3 <= int(proved.certified.sum()) < 24
    assert abs(int(proved.certified.sum()) - int(likely.certified.sum())) <= 1
    assert bool((proved.margin[proved.certified] > 0).all())


def test_local_norms_of_large_convolutions_are_norms():
    model = image_network(12, 1)
    prover = Prover(model, (3, 12, 12), "deterministic")
    x, eps = torch.rand(2, 3, 12, 12, dtype=torch.float64), torch.tensor([0.01, 0.05], dtype=torch.float64)
    trace = prover.trace(x, eps)
    smaller = 0
    for index, stage in enumerate(prover.network.stages[:3]):
        ((source, op),) = stage.terms.items()
        key = next(key for key in trace.norms if key.stage == index)
        outputs = trace.regions[source].outputs
        true = ExactNorm()(Masked(op, trace.varying[index].inputs, outputs), key, eps)
        assert bool((trace.norms[key] >= true * (1 - 1e-12)).all())
        assert bool((trace.norms[key] <= true * 1.003).all())
        smaller += int((trace.norms[key] < prover.ceiling.norms[key]).sum())
    assert smaller > 0, "no local norm was proved below the one over all inputs"


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_numbers_that_are_not_finite_prove_nothing(bad: float):
    weight = torch.randn(4, 4, 3, 3)
    weight[1, 2, 0, 0] = bad
    op = Masked(Conv(lambda: weight, (4, 20, 20), (1, 1), [(1, 1), (1, 1)], (1, 1)), None, None)
    assert not CholeskyNorm()(op, KEY, LIKE).isfinite().any()
