"""What every norm rule promises, each against singular values with the inequality of its guarantee."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from locallip.norms import (
    CholeskyNorm,
    ExactNorm,
    Guarantee,
    LanczosNorm,
    LayerTooLarge,
    NormKey,
    NormRule,
    PowerNorm,
    RitzNorm,
    WarmStarts,
    matrix_norms,
)
from locallip.norms.definite import eigenvalue_bound
from locallip.norms.gram import Gram, Slabs, best_slabs
from locallip.norms.lanczos import Lanczos, gram_operator
from locallip.ops import Conv, Dense, Diagonal, LinearOp, Masked

from .cases import BATCH, LIKE, OPS, OpCase, Weights, conv, dense

KEY = NormKey(2, 0, "features.3")


def bases() -> list[OpCase]:
    """The operators of the table that are not masked yet."""
    return [case for case in OPS if not isinstance(case.build().op, Masked)]


MASKS = ("none", "bool", "fractional", "rows", "cols", "zero", "single", "some zero")


def mask(base: LinearOp, kind: str) -> Masked:
    """`base` under one kind of mask; all but "none" are one mask per sample."""
    w = Weights(5)
    rows, cols = w.mask(*base.out_shape), w.mask(*base.in_shape)
    if kind == "none":
        return Masked(base, None, None)
    if kind == "fractional":
        return Masked(base, w.mask(*base.out_shape, fractional=True), w.mask(*base.in_shape, fractional=True))
    if kind == "rows":
        return Masked(base, rows, None)
    if kind == "cols":
        return Masked(base, None, cols)
    if kind == "zero":
        return Masked(base, torch.zeros_like(rows), cols)
    if kind == "single":
        rows, cols = torch.zeros_like(rows), torch.zeros_like(cols)
        rows.flatten(1)[:, -1] = True
        cols.flatten(1)[:, -1] = True
        return Masked(base, rows, cols)
    if kind == "some zero":
        rows[0], cols[1] = False, False
    return Masked(base, rows, cols)


def masked_matrices(op: Masked) -> np.ndarray:
    """diag(rows) W diag(cols) of each sample in extended precision, (B, out, in)."""
    matrix = op.base.materialize(LIKE).detach().numpy().astype(np.longdouble)[None]
    if op.rows is not None:
        matrix = matrix * op.rows.flatten(1).double().numpy()[:, :, None]
    if op.cols is not None:
        matrix = matrix * op.cols.flatten(1).double().numpy()[:, None, :]
    return matrix


def true_norms(op: Masked) -> Tensor:
    """Singular values by SVD in float64."""
    return torch.linalg.matrix_norm(torch.from_numpy(masked_matrices(op).astype(np.float64)), ord=2)


def attained(op: Masked) -> np.ndarray:
    """||A u|| / ||u|| in extended precision for the top singular vector u: the norm is at least this, without doubt."""
    values = []
    for matrix in masked_matrices(op):
        _, _, right = np.linalg.svd(matrix.astype(np.float64))
        u = right[0].astype(np.longdouble)
        values.append(np.sqrt(((matrix @ u) ** 2).sum() / (u**2).sum()))
    return np.array(values)


def every(test: Callable[..., None]) -> Callable[..., None]:
    """Run a test for every operator under every mask."""
    operators = pytest.mark.parametrize("case", bases(), ids=lambda case: case.name)
    return operators(pytest.mark.parametrize("kind", MASKS)(test))


@every
def test_exact_is_the_svd(case: OpCase, kind: str) -> None:
    op = mask(case.build().op, kind)
    assert op.batch == (1 if kind == "none" else BATCH)
    torch.testing.assert_close(ExactNorm()(op, KEY, LIKE), true_norms(op), rtol=1e-12, atol=1e-13)


@every
def test_cholesky_is_never_below_and_tight(case: OpCase, kind: str) -> None:
    op = mask(case.build().op, kind)
    value, true = CholeskyNorm()(op, KEY, LIKE), true_norms(op)
    # The matrix of a composition is itself rounded when it is written out.
    slack = 0 if isinstance(op.base, (Dense, Conv)) else 1e-15
    assert (value.detach().numpy().astype(np.longdouble) >= attained(op) * (1 - slack)).all()
    assert (value >= true * (1 - 1e-13)).all()
    assert (value <= true * (1 + 1e-8) + 1e-30).all()


def every_image(test: Callable[..., None]) -> Callable[..., None]:
    """Run a test for every operator of which it is known what an output depends on."""
    cases = [case for case in bases() if best_slabs(case.build().op) is not None]
    assert {"conv1d", "conv2d", "conv3d", "batch norm after conv", "identity + conv"} <= {case.name for case in cases}
    operators = pytest.mark.parametrize("case", cases, ids=lambda case: case.name)
    return operators(pytest.mark.parametrize("kind", MASKS)(test))


def cut(op: LinearOp) -> Slabs:
    slabs = best_slabs(op)
    assert slabs is not None
    return slabs


@every_image
def test_blocks_make_up_the_gram_matrix(case: OpCase, kind: str) -> None:
    """What is left out is zero, and what is there is right: against the matrix written out."""
    op = mask(case.build().op, kind)
    slabs = cut(op)
    gram = Gram(op.select(slice(0, 1)), slabs, LIKE)
    found = torch.zeros(slabs.shape.numel(), slabs.shape.numel(), dtype=torch.float64)
    for j in range(gram.number):
        units = gram.units[j][0]
        found[units[:, None], units] = gram.diagonal(j)[0]
        below = gram.below(j) if j + 1 < gram.number else None
        if below is not None:
            found[gram.units[j + 1][0][:, None], units] = below[0]
            found[units[:, None], gram.units[j + 1][0]] = below[0].T
    matrix = op.select(slice(0, 1)).materialize(LIKE).detach()
    true = matrix @ matrix.T if slabs.output_side else matrix.T @ matrix
    torch.testing.assert_close(found, true, rtol=1e-13, atol=1e-14 * float(true.abs().max()))


@every_image
def test_cholesky_in_blocks_is_never_below_and_close(case: OpCase, kind: str) -> None:
    op = mask(case.build().op, kind)
    value, true = CholeskyNorm(whole=0)(op, KEY, LIKE), true_norms(op)
    assert (value.detach().numpy().astype(np.longdouble) >= attained(op) * (1 - 1e-15)).all()
    assert (value >= true * (1 - 1e-13)).all()
    assert (value <= true * (1 + 1e-3) + 1e-30).all()


@pytest.mark.parametrize("side", [True, False])
@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("thickness", [2, 3, 5, 40])
def test_any_slabs_that_are_thick_enough_prove_the_norm(side: bool, dim: int, thickness: int) -> None:
    op = mask(conv(Weights(4), (2, 9, 7), 3, (3, 3), (1, 1), [(1, 1), (0, 1)])[0], "bool").select(slice(0, 1))
    slabs = Slabs(side, op.out_shape if side else op.in_shape, (2, 2), dim, thickness)
    gram, true = Gram(op, slabs, LIKE), true_norms(op).detach()
    assert torch.isinf(eigenvalue_bound(gram, true**2 * (1 - 1e-9)))
    bound = eigenvalue_bound(gram, true**2 * (1 + 1e-9))
    assert true**2 <= bound.detach() <= true**2 * (1 + 1e-8)


def test_a_wrong_factor_proves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The factorization is not trusted: what it misses is added."""
    op = mask(conv(Weights(4), (2, 6, 6), 3, (3, 3), (1, 1), [(1, 1), (1, 1)])[0], "none")
    true = float(true_norms(op)[0])
    exact = torch.linalg.cholesky_ex

    def careless(matrix: Tensor) -> tuple[Tensor, Tensor]:
        lower, info = exact(matrix + 0.5 * true**2 * torch.eye(matrix.shape[1], dtype=matrix.dtype))
        return lower, torch.zeros_like(info)

    monkeypatch.setattr(torch.linalg, "cholesky_ex", careless)
    for share in (0.6, 0.9, 0.99):
        bound = eigenvalue_bound(Gram(op, cut(op), LIKE), torch.tensor([share * true**2], dtype=torch.float64))
        assert float(bound.detach()) >= true**2


@every
def test_lanczos_is_never_below_and_tight(case: OpCase, kind: str) -> None:
    op = mask(case.build().op, kind)
    value, true = LanczosNorm(1e-9, seed=0)(op, KEY, LIKE), true_norms(op)
    assert (value.detach().numpy().astype(np.longdouble) >= attained(op) * (1 - 1e-15)).all()
    assert (value <= true * 1.01 + 1e-30).all()


@every
def test_power_is_never_above(case: OpCase, kind: str) -> None:
    op = mask(case.build().op, kind)
    torch.manual_seed(0)
    true = true_norms(op)
    for steps in (1, 5):
        assert (PowerNorm(steps)(op, KEY, LIKE) <= true * (1 + 1e-9)).all()
    value = PowerNorm(500)(op, KEY, LIKE)
    assert (value <= true * (1 + 1e-9)).all()
    assert (value >= true * (1 - 1e-2)).all()


@every
def test_ritz_is_never_above_and_never_behind_power_iteration(case: OpCase, kind: str) -> None:
    op = mask(case.build().op, kind)
    true = true_norms(op)
    assert (RitzNorm(3, seed=0)(op, KEY, LIKE) <= true * (1 + 1e-9)).all()
    value = RitzNorm(500, seed=0)(op, KEY, LIKE)
    assert (value <= true * (1 + 1e-9)).all()
    assert (value >= true * (1 - 1e-9)).all()  # as many steps as dimensions: the whole space


def test_ritz_of_a_large_map_converges_where_power_iteration_creeps() -> None:
    """300 dimensions, above those that are kept orthogonal and computed in float64; a spectrum without gaps."""
    values = torch.linspace(0, 1, 300, dtype=torch.float64)
    op = Masked(Diagonal(lambda dtype: values.to(dtype), (300,)), None, None)
    power, ritz = (float(rule.norm(op, KEY, LIKE)) for rule in (PowerNorm(60, seed=1), RitzNorm(60, seed=1)))
    assert power < 1 - 1e-3
    assert 1 - 2e-4 < ritz <= 1 + 1e-6


RULES = {
    "ritz": lambda: RitzNorm(300, seed=0),
    "exact": ExactNorm,
    "power": lambda: PowerNorm(300, seed=0),
    "cholesky": CholeskyNorm,
    "lanczos": lambda: LanczosNorm(1e-9, seed=0),
}
rules = pytest.mark.parametrize("rule", RULES, indirect=True)
proven = pytest.mark.parametrize("rule", ["cholesky", "lanczos"], indirect=True)


@pytest.fixture
def rule(request: pytest.FixtureRequest) -> NormRule:
    """A rule made anew, so that no test depends on what another has drawn."""
    torch.manual_seed(0)
    return RULES[request.param]()


def test_guarantees_are_named() -> None:
    assert ExactNorm.guarantee is PowerNorm.guarantee is RitzNorm.guarantee is Guarantee.ESTIMATE
    assert LanczosNorm.guarantee is Guarantee.HIGH_PROBABILITY
    assert CholeskyNorm.guarantee is Guarantee.DETERMINISTIC
    assert Guarantee.parse("estimate") is Guarantee.ESTIMATE
    with pytest.raises(ValueError, match="high_probability"):
        Guarantee.parse("certain")


@rules
@pytest.mark.parametrize("kind", ["none", "bool", "fractional"])
def test_zero_weights_have_norm_zero(rule: NormRule, kind: str) -> None:
    for case in bases():
        built = case.build()
        if case.name == "identity + conv" or not built.weights.values:
            continue
        with torch.no_grad():
            for weight in built.weights.values:
                weight.zero_()
        assert rule(mask(built.op, kind), KEY, LIKE).tolist() == [0.0] * (1 if kind == "none" else BATCH)


@rules
def test_zero_masks_have_norm_zero(rule: NormRule) -> None:
    for case in bases():
        base = case.build().op
        assert rule(mask(base, "zero"), KEY, LIKE).tolist() == [0.0] * BATCH
        value = rule(mask(base, "some zero"), KEY, LIKE)
        assert value[:2].tolist() == [0.0, 0.0]


@rules
def test_one_unit(rule: NormRule) -> None:
    weight = torch.tensor([[-0.7]], dtype=torch.float64)
    assert rule(Masked(Dense(lambda: weight), None, None), KEY, LIKE).item() == pytest.approx(0.7, rel=1e-7)


@rules
def test_repeated_singular_values(rule: NormRule) -> None:
    """A Krylov space that is exhausted after one step."""
    orthogonal = torch.linalg.qr(torch.randn(12, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(0)))[0]
    value = rule(Masked(Dense(lambda: 3 * orthogonal), None, None), KEY, LIKE)
    assert value.item() == pytest.approx(3.0, rel=1e-7)


@proven
def test_a_hidden_direction_is_found(rule: NormRule) -> None:
    """One large singular value among thousands of equal ones, along a random direction."""
    generator = torch.Generator().manual_seed(1)
    direction = torch.nn.functional.normalize(torch.randn(400, dtype=torch.float64, generator=generator), dim=0)
    matrix = torch.eye(400, dtype=torch.float64) + 1e-3 * torch.outer(direction, direction)
    value = rule(Masked(Dense(lambda: matrix), None, None), KEY, LIKE).item()
    assert 1 + 1e-3 - 1e-15 <= value <= 1.01


@rules
def test_samples_do_not_touch_each_other(rule: NormRule) -> None:
    """The norm of a sample is the same, to the rule's precision, whatever its neighbours in the batch are."""
    base = conv(Weights(), (2, 5, 4), 3, (3, 2), (2, 1), [(1, 1), (0, 1)])[0]
    op = mask(base, "bool")
    together = rule(op, KEY, LIKE)
    alone = torch.cat([rule(op.select(slice(i, i + 1)), KEY, LIKE) for i in range(BATCH)])
    torch.testing.assert_close(together, alone, rtol=1e-2, atol=0.0)


@proven
@pytest.mark.parametrize(
    "base", ["dense", "conv2d", "conv2d depthwise disjoint", "batch norm after conv", "identity + conv"]
)
@pytest.mark.parametrize("kind", ["none", "bool"])
def test_extreme_scales_are_never_below(rule: NormRule, base: str, kind: str) -> None:
    """Weights whose squares vanish or overflow: the bound may be loose there, never too small."""
    for power in (-170, -150, -139, -100, *range(-86, -70), -40, 0, 40, 70, 75, 80, 85, 100, 139, 150, 170):
        built = next(case for case in OPS if case.name == base).build()
        with torch.no_grad():
            built.weights.values[0].mul_(10.0**power)
        true = true_norms(mask(built.op, kind))  # LAPACK scales, so these are right at every size
        value = rule(mask(built.op, kind), KEY, LIKE)
        assert (value >= true * (1 - 1e-13)).all(), f"weights times 1e{power}: {value.tolist()} below {true.tolist()}"


@proven
@pytest.mark.parametrize("side", ["rows", "cols", "both"])
def test_tiny_mask_weights_are_never_below(rule: NormRule, side: str) -> None:
    """Slopes of saturated units are this small: tanh at 200 has the weight 1e-86."""
    for name in ("dense", "conv2d", "conv2d depthwise disjoint"):
        base = next(case for case in OPS if case.name == name).build().op
        plain = true_norms(Masked(base, None, None))
        for power in (-300, -160, -100, *range(-86, -70), -40):
            rows = torch.full((1, *base.out_shape), 10.0**power, dtype=torch.float64) if side != "cols" else None
            cols = torch.full((1, *base.in_shape), 10.0**power, dtype=torch.float64) if side != "rows" else None
            true = plain * (10.0**power if rows is not None else 1) * (10.0**power if cols is not None else 1)
            value = rule(Masked(base, rows, cols), KEY, LIKE)
            assert (value >= true * (1 - 1e-13)).all(), f"{name}, weights 1e{power}: {value.item()} below {true.item()}"


@proven
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_weights_that_are_not_numbers_give_no_finite_bound(rule: NormRule, bad: float) -> None:
    for name in ("dense", "conv2d", "conv2d depthwise disjoint", "diagonal"):
        built = next(case for case in OPS if case.name == name).build()
        with torch.no_grad():
            built.weights.values[0].view(-1)[0] = bad
        assert not rule(Masked(built.op, None, None), KEY, LIKE).isfinite().any()


@proven
def test_float32_answers_are_never_below(rule: NormRule) -> None:
    """The last rounding, to the dtype asked for, must not undo the bound."""
    for seed in range(40):
        op = Masked(dense(Weights(seed), 6, 5)[0], None, None)
        assert rule(op, KEY, torch.zeros(1)).double().item() >= true_norms(op).item() * (1 - 1e-13)


@rules
def test_an_empty_batch_has_no_norms(rule: NormRule) -> None:
    base = dense(Weights(), 5, 7)[0]
    assert rule(Masked(base, torch.ones(0, 5), torch.ones(0, 7)), KEY, LIKE).shape == (0,)


def test_too_large_a_layer_is_named() -> None:
    base = dense(Weights(), 9, 8)[0]
    with pytest.raises(LayerTooLarge, match=r"features\.3.*high_probability"):
        CholeskyNorm(limit=7)(Masked(base, None, None), KEY, LIKE)
    assert CholeskyNorm(limit=8)(Masked(base, None, None), KEY, LIKE).isfinite().all()
    with pytest.raises(LayerTooLarge):
        CholeskyNorm(memory=8 * 9 * 8 // 2 - 1)(Masked(base, None, None), KEY, LIKE)


@pytest.mark.parametrize("probability", [0.0, 1.0, -0.1, math.nan])
def test_senseless_failure_probabilities_are_refused(probability: float) -> None:
    with pytest.raises(ValueError, match="failure probability"):
        LanczosNorm(probability)


def test_lanczos_is_reproducible_by_seed_and_split_by_memory() -> None:
    op = mask(conv(Weights(), (2, 6, 6), 3, (3, 3), (1, 1), [(1, 1), (1, 1)])[0], "bool")
    first, again = (LanczosNorm(1e-4, max_steps=6, seed=3)(op, KEY, LIKE) for _ in range(2))
    assert torch.equal(first, again)
    assert not torch.equal(first, LanczosNorm(1e-4, max_steps=6, seed=4)(op, KEY, LIKE))
    assert (LanczosNorm(1e-4, max_steps=6, seed=3, memory=1)(op, KEY, LIKE) >= true_norms(op)).all()


def test_a_sharpened_rule_draws_on_from_the_same_stream() -> None:
    """Masks may depend on what the first rule found, so its starts must not come again."""
    op = mask(conv(Weights(), (2, 6, 6), 3, (3, 3), (1, 1), [(1, 1), (1, 1)])[0], "bool")
    rule = LanczosNorm(1e-4, max_steps=6, seed=3)
    sharp = rule.sharpened(1e-9, 6)
    first, other = sharp(op, KEY, LIKE), rule(op, KEY, LIKE)
    assert torch.equal(first, LanczosNorm(1e-4, rtol=1e-9, max_steps=6, seed=3)(op, KEY, LIKE))
    assert not torch.equal(first, other)
    assert (rule.rtol, sharp.rtol) == (2e-3, 1e-9)


def test_lanczos_without_orthogonal_basis(monkeypatch: pytest.MonkeyPatch) -> None:
    """Large layers keep no basis; the same code path on a small one, far past where orthogonality is lost."""
    monkeypatch.setattr("locallip.norms.lanczos.ORTHOGONAL_LIMIT", 0)
    for name in ("conv2d of 6C2F", "conv2d groups", "dense tall", "identity + conv"):
        op = mask(next(case for case in OPS if case.name == name).build().op, "bool")
        for steps in (3, 10, 40, 300):
            value = LanczosNorm(1e-6, rtol=1e-12, max_steps=steps, seed=0)(op, KEY, LIKE)
            assert (value >= true_norms(op)).all()


# Power iteration and its saved vectors ---------------------------------------------------------------------------------


def test_saved_vectors_make_few_steps_enough() -> None:
    base = dense(Weights(3), 12, 15)[0]
    op = mask(base, "bool")
    starts, index = WarmStarts(10, dtype=torch.float64), torch.tensor([7, 0, 4])
    for _ in range(300):
        value = PowerNorm(1, starts, index)(op, KEY, LIKE)
    torch.testing.assert_close(value, true_norms(op), rtol=1e-6, atol=0.0)
    # The vectors belong to their samples: another order of the batch finds the same ones.
    order = torch.tensor([2, 0, 1])
    shuffled = PowerNorm(1, starts, index[order])(op.select(order), KEY, LIKE)
    torch.testing.assert_close(shuffled, value[order], rtol=1e-6, atol=0.0)
    assert starts.nbytes() == 10 * 15 * 8


def test_a_saved_vector_in_removed_columns_does_not_vanish() -> None:
    """The research code finds 0 here: its saved vector times the mask is 0 and stays so."""
    base = dense(Weights(4), 6, 8)[0]
    old, new = torch.zeros(1, 8, dtype=torch.bool), torch.zeros(1, 8, dtype=torch.bool)
    old[:, :4], new[:, 4:] = True, True
    starts, index = WarmStarts(1), torch.tensor([0])
    PowerNorm(50, starts, index)(Masked(base, None, old), KEY, LIKE)
    saved = starts.get(KEY, base.in_shape, index)
    assert not saved[:, 4:].any()
    op = Masked(base, None, new)
    torch.testing.assert_close(PowerNorm(500, starts, index)(op, KEY, LIKE), true_norms(op), rtol=1e-9, atol=0.0)


def test_a_saved_vector_survives_an_empty_mask() -> None:
    """An epoch in which nothing varies must not leave a zero behind, nor one whose rows sum to zero."""
    weight = torch.tensor([[1.0, -1.0, 0.0], [0.0, 2.0, -2.0]], dtype=torch.float64)
    base = Dense(lambda: weight)
    starts, index = WarmStarts(1), torch.tensor([0])
    nothing = Masked(base, None, torch.zeros(1, 3, dtype=torch.bool))
    assert PowerNorm(3, starts, index)(nothing, KEY, LIKE).item() == 0.0
    op = Masked(base, None, torch.ones(1, 3, dtype=torch.bool))
    torch.testing.assert_close(PowerNorm(500, starts, index)(op, KEY, LIKE), true_norms(op), rtol=1e-9, atol=0.0)


def test_saved_vectors_need_their_index() -> None:
    with pytest.raises(ValueError, match="index"):
        PowerNorm(1, WarmStarts(3))


@pytest.mark.parametrize("kind", ["none", "bool", "fractional"])
def test_gradient_of_power_is_that_of_the_norm(kind: str) -> None:
    built = next(case for case in OPS if case.name == "dense").build()
    op = mask(built.op, kind)
    weight = built.weights.values[0]
    torch.manual_seed(0)
    found = torch.autograd.grad(PowerNorm(2000)(op, KEY, LIKE).sum(), weight)[0]
    matrix = weight[None]
    if kind != "none":
        matrix = op.rows[:, :, None].double() * matrix * op.cols[:, None, :].double()  # type: ignore[index]
    expected = torch.autograd.grad(torch.linalg.svdvals(matrix)[:, 0].sum(), weight)[0]
    torch.testing.assert_close(found, expected, rtol=1e-7, atol=1e-9)


# The stated probability ------------------------------------------------------------------------------------------------

DRAWS, ROUND = 100_000, 5_000


def _spectrum(kind: str, rows: int, cols: int) -> Tensor:
    """A matrix whose largest singular value is hard to find in a few steps."""
    generator = torch.Generator().manual_seed(11)
    matrix = torch.randn(rows, cols, dtype=torch.float64, generator=generator)
    u, s, vh = torch.linalg.svd(matrix, full_matrices=False)
    if kind == "cluster":
        s = torch.linspace(1.0, 0.9, len(s), dtype=torch.float64)
    if kind == "one above":
        s = torch.cat([torch.tensor([1.05], dtype=torch.float64), torch.linspace(1.0, 0.0, len(s) - 1, dtype=torch.float64)])
    return u @ torch.diag(s) @ vh


@pytest.mark.parametrize(
    ("kind", "rows", "cols", "steps"),
    [
        ("random", 12, 16, 4),
        ("random", 30, 20, 8),
        ("cluster", 20, 30, 6),
        ("one above", 16, 24, 5),
        ("one above", 24, 24, 8),
    ],
)
def test_high_probability_holds_in_100_000_draws(kind: str, rows: int, cols: int, steps: int) -> None:
    """At failure probability 1e-4, at least 99.99 % of 100,000 draws lie above the norm."""
    matrix = _spectrum(kind, rows, cols)
    op = Masked(Dense(lambda: matrix), None, torch.ones(ROUND, cols, dtype=torch.bool))
    true = torch.linalg.matrix_norm(matrix, ord=2)
    rule = LanczosNorm(1e-4, rtol=1e-12, max_steps=steps, seed=17)
    values = torch.cat([rule.proven_norm(op, KEY, LIKE, torch.zeros_like(LIKE)) for _ in range(DRAWS // ROUND)])
    assert len(values) == DRAWS
    assert len(values.unique()) > 0.99 * DRAWS
    assert int((values < true).sum()) <= DRAWS * 1e-4
    assert values.median() < 3 * true
    # Without the inflation the same draws would fail nearly always, so the test can tell.
    gram, support = gram_operator(op, LIKE)
    start = torch.randn(support.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    process = Lanczos(gram, lambda: start, steps, orthogonalize=True)
    process.run(steps)
    assert (process.matrix().largest_eigenvalue().sqrt() < true * (1 - 1e-9)).double().mean() > 0.9


def test_a_large_failure_probability_does_fail() -> None:
    """With half a failure allowed some draws do fall below, and fewer than half: the probability enters the bound."""
    matrix = _spectrum("one above", 24, 24)
    op = Masked(Dense(lambda: matrix), None, torch.ones(ROUND, 24, dtype=torch.bool))
    true = torch.linalg.matrix_norm(matrix, ord=2)
    values = LanczosNorm(0.5, rtol=1e-12, max_steps=8, seed=17).proven_norm(op, KEY, LIKE, torch.zeros_like(LIKE))
    failures = int((values < true).sum())
    assert 0 < failures < ROUND / 2


@pytest.mark.parametrize("repeated", [True, False])
def test_an_exhausted_space_gives_the_norm_itself(repeated: bool) -> None:
    """Few kept columns or repeated singular values end the Krylov space early; a full basis is built all the same."""
    matrix = _spectrum("random", 9, 12)
    if repeated:
        u, _, vh = torch.linalg.svd(matrix, full_matrices=False)
        matrix = u @ torch.diag(torch.tensor([2.0] * 4 + [1.0] * 4 + [0.0], dtype=torch.float64)) @ vh
    generator = torch.Generator().manual_seed(3)
    rows = torch.rand(500, 9, generator=generator) < 0.4
    cols = torch.rand(500, 12, generator=generator) < 0.4
    op = Masked(Dense(lambda: matrix), rows, cols)
    value, true = LanczosNorm(1e-10, seed=5)(op, KEY, LIKE), true_norms(op)
    assert bool((value >= true).all())
    assert bool((value <= true * (1 + 1e-7) + 1e-12).all())


# Matrices that are written out ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(1, 1), (4, 9), (9, 4), (1, 30), (40, 60), (200, 150)])
@pytest.mark.parametrize("scale", [1.0, 1e-120, 1e-300, 1e120, 1e290])
def test_norms_of_matrices_are_proved_and_close(shape: tuple[int, int], scale: float) -> None:
    generator = torch.Generator().manual_seed(shape[0])
    matrix = torch.randn(3, *shape, dtype=torch.float64, generator=generator)
    matrix[1] = matrix[1].abs()
    matrix[2, :, 1:] *= 1e-9
    found = matrix_norms(matrix * scale)
    true = torch.linalg.svdvals(matrix)[:, 0]
    assert (found >= true * scale * (1 - 1e-14)).all()
    assert (found <= true * scale * (1 + 1e-6) + 1e-99).all()


def test_norms_of_matrices_at_the_edge() -> None:
    matrix = torch.zeros(5, 3, 4, dtype=torch.float64)
    matrix[1, 0, 0], matrix[2, 0, 0], matrix[3, 1, 1], matrix[4] = float("inf"), float("nan"), 1e-308, 1e308
    found = matrix_norms(matrix)
    assert found[0] == 0
    assert found[1:3].tolist() == [float("inf")] * 2
    assert 1e-308 <= float(found[3]) <= 1e-99
    assert float(found[4]) == float("inf")
    assert matrix_norms(torch.zeros(0, 3, 4)).shape == (0,)
    assert matrix_norms(torch.zeros(2, 0, 4)).tolist() == [0, 0]


def test_large_matrices_get_a_coarser_norm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("locallip.norms.matrices.LIMIT", 5)
    matrix = torch.randn(2, 6, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    found, true = matrix_norms(matrix), torch.linalg.svdvals(matrix)[:, 0]
    assert (found >= true).all()
    assert (found > 1.05 * true).any()
    assert (found <= matrix.flatten(1).norm(dim=1) * (1 + 1e-9)).all()
