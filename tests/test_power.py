"""Power iteration: below the norm, at least as good as plain steps, and the same in 16 bits but for rounding."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import locallip as ll
from locallip.bounds import global_bound, propagate
from locallip.network import in_precision
from locallip.norms import BatchStarts, CholeskyNorm, LanczosNorm, NormKey, PowerNorm, ProbedNorm
from locallip.norms.probed import DEGREE, NEAR_THE_TOP, near_the_top
from locallip.ops import Cast, Conv, Dense, Masked, compose

KEY = NormKey(0, 0, "layer")


def random_operator(seed, decay):
    """A 24 x 30 matrix with singular values decay^k, masked for three samples, and its norms by SVD (3,)."""
    generator = torch.Generator().manual_seed(seed)
    left, _ = torch.linalg.qr(torch.randn(24, 24, generator=generator, dtype=torch.float64))
    right, _ = torch.linalg.qr(torch.randn(30, 24, generator=generator, dtype=torch.float64))
    weight = left @ torch.diag(decay ** torch.arange(24.0, dtype=torch.float64)) @ right.T
    rows = torch.rand(3, 24, generator=generator) > 0.3
    cols = torch.rand(3, 30, generator=generator) > 0.3
    norms = torch.linalg.matrix_norm(rows[:, :, None] * weight * cols[:, None, :], ord=2)
    return weight, Masked(Dense(lambda: weight), rows, cols), norms


def plain(weight, op, start, steps):
    """||A^T v|| / ||v|| after `steps` steps as the paper prints them."""
    a = op.rows[:, :, None] * weight * op.cols[:, None, :]
    u = start * op.cols
    for _ in range(steps):
        v = torch.einsum("bij,bj->bi", a, u)
        u = torch.einsum("bij,bi->bj", a, v)
        sigma = u.norm(dim=1) / v.norm(dim=1)
    return sigma


class Given:
    """Start vectors handed over, in place of saved ones."""

    def __init__(self, start):
        self.start = start

    def get(self, key, shape, index):
        return self.start

    def jitter(self, key, shape, like):
        return torch.zeros_like(self.start[:1])

    def put(self, key, index, u):
        self.after = u


@settings(max_examples=60)
@given(st.integers(0, 10**6), st.sampled_from([1.0, 0.999, 0.97, 0.8, 0.3]), st.integers(1, 6))
def test_never_above_the_norm_and_never_behind_plain_steps(seed, decay, steps):
    weight, op, norms = random_operator(seed, decay)
    start = torch.randn(3, 30, dtype=torch.float64, generator=torch.Generator().manual_seed(seed + 1))
    starts = Given(start)
    sigma = PowerNorm(steps, starts, torch.arange(3))(op, KEY, norms)
    assert (sigma <= norms * (1 + 1e-12)).all()
    # The best vector of a plane that holds the plain step's vector is at least as good before the last product; the last
    # product can only bring both nearer, at rates that differ a little.
    assert (sigma >= plain(weight, op, start, steps) * (1 - 2e-2)).all()
    torch.testing.assert_close(starts.after.norm(dim=1), torch.ones(3, dtype=torch.float64))


def test_two_products_get_further_than_two_plain_steps_in_a_flat_spectrum():
    ours, theirs = [], []
    for seed in range(40):
        weight, op, norms = random_operator(seed, 0.95)
        start = torch.randn(3, 30, dtype=torch.float64, generator=torch.Generator().manual_seed(seed + 1))
        ours.append((PowerNorm(2, Given(start), torch.arange(3))(op, KEY, norms) / norms).mean())
        theirs.append((plain(weight, op, start, 2) / norms).mean())
    assert torch.stack(ours).mean() > torch.stack(theirs).mean() + 0.003


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sixteen_bits_lose_only_rounding(dtype):
    generator = torch.Generator().manual_seed(3)
    weight = torch.randn(16, 8, 3, 3, generator=generator) / 8
    conv = Conv(lambda: weight, (8, 12, 12), (1, 1), ((1, 1), (1, 1)), (1, 1))
    rows = torch.rand(4, 16, 12, 12, generator=generator) > 0.4
    start = torch.randn(4, 8, 12, 12, generator=generator)
    fine = PowerNorm(6, Given(start), torch.arange(4))(Masked(conv, rows, None), KEY, torch.ones(4))
    rough = PowerNorm(6, Given(start), torch.arange(4))(Masked(Cast(conv, dtype), rows, None), KEY, torch.ones(4))
    assert rough.dtype == torch.float32
    torch.testing.assert_close(rough, fine, rtol=1e-2, atol=0)


def test_a_zero_operator_has_norm_zero():
    op = Masked(Dense(lambda: torch.randn(5, 4)), torch.zeros(2, 5, dtype=torch.bool), None)
    assert PowerNorm(3, seed=0)(op, KEY, torch.ones(2)).tolist() == [0.0, 0.0]


@pytest.fixture
def sixteen_bits():
    model = nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 2)).eval()
    return in_precision(ll.lower(model, (6,)), torch.bfloat16)


def test_no_proof_rests_on_sixteen_bits(sixteen_bits):
    x, eps = torch.rand(2, 6, dtype=torch.float64), torch.full((2,), 0.1, dtype=torch.float64)
    for attempt in (
        lambda: propagate(sixteen_bits, x, eps, PowerNorm(3), outward=True),
        lambda: global_bound(sixteen_bits, PowerNorm(3), x, outward=True),
        lambda: propagate(sixteen_bits, x, eps, LanczosNorm(1e-9)),
        lambda: propagate(sixteen_bits, x, eps, CholeskyNorm()),
    ):
        with pytest.raises(ValueError, match="16 bits"):
            attempt()


def test_what_is_made_of_sixteen_bit_maps_is_not_exact():
    rough = Cast(Dense(lambda: torch.eye(3)), torch.bfloat16)
    assert not rough.exact
    assert not compose(Dense(lambda: torch.eye(3)), rough).exact
    assert not Masked(rough, None, None).exact
    assert Masked(Dense(lambda: torch.eye(3)), None, None).exact


# ------------------------------------------------------------------------------------------------------------ probes


def flat_layer(seed, values):
    """A matrix 30 x 30 with the singular values given and zeros, and its singular vectors."""
    generator = torch.Generator().manual_seed(seed)
    left, right = (torch.linalg.qr(torch.randn(30, 30, generator=generator, dtype=torch.float64))[0] for _ in range(2))
    singular = torch.zeros(30, dtype=torch.float64)
    singular[: len(values)] = torch.tensor(values, dtype=torch.float64)
    return (left @ torch.diag(singular) @ right.T).requires_grad_(), left, right


def pushed(weight, left, right, probes):
    """Value of the norm, and its gradient in the basis of singular vectors: how far it pushes each singular value."""
    generator = torch.Generator().manual_seed(7)
    one, start = torch.zeros(1, dtype=torch.long), torch.randn(1, 30, generator=generator, dtype=torch.float64)
    noise = {(0, 0): torch.zeros(1, 30, dtype=torch.float64)}
    rule = PowerNorm(40, BatchStarts({(0, 0): start / start.norm()}, noise), one)
    if probes:
        fresh = torch.randn(probes, 30, generator=generator, dtype=torch.float64)
        rule = ProbedNorm(rule, {(0, 0): fresh}, noise)
    norm = rule(Masked(Dense(lambda: weight), None, None), KEY, torch.ones(1, dtype=torch.float64))
    (gradient,) = torch.autograd.grad(norm.sum(), weight)
    return norm.detach(), left.T @ gradient @ right


@pytest.mark.parametrize("seed", range(5))
def test_probes_push_all_singular_values_near_the_largest_and_leave_the_value(seed):
    weight, left, right = flat_layer(seed, [1.0, 0.999, 0.998, 0.997, 0.3, 0.2])
    plain, by_one = pushed(weight, left, right, 0)
    probed, by_many = pushed(weight, left, right, 64)
    assert torch.equal(probed, plain)
    assert probed.shape == (1,)
    assert torch.linalg.matrix_rank(by_one) == 1
    assert torch.linalg.matrix_rank(by_many, atol=0.05) == 4
    assert (by_many.diagonal()[:4] > 0.1).all()
    assert (by_many.diagonal()[4:].abs() < 1e-3).all()
    assert float(by_many.trace()) == pytest.approx(1.0, abs=0.05)  # as steep as the norm itself, whoever shares it


def test_probes_follow_a_single_large_value_as_the_norm_does():
    weight, left, right = flat_layer(3, [1.0, 0.2, 0.1])
    _, by_many = pushed(weight, left, right, 8)
    assert float(by_many[0, 0]) == pytest.approx(1.0, abs=1e-3)


def test_the_filter_is_the_chebyshev_polynomial_of_the_singular_values():
    values = [1.0, 0.999, 0.97, 0.95, 0.9, 0.7, 0.3]
    weight, _, right = flat_layer(4, values)
    start = torch.randn(5, 30, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    with torch.no_grad():
        mixed = near_the_top(Masked(Dense(lambda: weight), None, None), start, torch.ones(1, dtype=torch.float64))
    singular = np.zeros(30)
    singular[: len(values)] = values
    gain = np.polynomial.chebyshev.chebval(2 * (singular / NEAR_THE_TOP) ** 2 - 1, [0] * DEGREE + [1])
    expected = (start @ right) * torch.from_numpy(gain)
    assert torch.allclose(mixed @ right, expected / expected.norm(dim=1, keepdim=True), atol=1e-10)
    assert gain[0] > 80
    assert abs(gain[3:]).max() <= 1 + 1e-9


@pytest.mark.parametrize("scale", [0.0, 1e-30, 1e-12, 1e12])
@pytest.mark.parametrize("known", [1.0, 0.15], ids=["norm known", "norm far too small"])
def test_the_filter_stays_finite_whatever_the_size(scale, known):
    weight = (flat_layer(5, [1.0, 0.98, 0.5])[0] * scale).float().detach()
    norm = torch.linalg.matrix_norm(weight, 2).reshape(1) * known
    mixed = near_the_top(Masked(Dense(lambda: weight), None, None), torch.randn(4, 30), norm)
    assert torch.allclose(mixed.norm(dim=1), torch.ones(4), atol=1e-4)
