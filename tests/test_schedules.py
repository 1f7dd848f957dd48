"""Learning rate, radius and lambda over a run: the paper's formulas, and what holds for every valid recipe."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from locallip.training.recipe import Recipe, find, names
from locallip.training.schedules import Setting, grown, learning_rate, setting


def recipe(**fields):
    base = {"name": "t", "data": "embedded", "architecture": "small", "method": "local-b", "eps": "0.5", "eps_train": 0.6}
    return Recipe(**{**base, "epochs": 10.0, **fields})


@st.composite
def recipes(draw):
    """Any recipe whose schedule fields `check` lets through, its corners included."""
    epochs = draw(st.floats(1e-3, 1000.0))
    ramp = draw(st.sampled_from([0.0, epochs]) | st.floats(0.0, epochs))
    rate = draw(st.floats(1e-6, 10.0))
    return recipe(
        epochs=epochs,
        ramp_epochs=ramp,
        warmup_epochs=draw(st.sampled_from([0.0, ramp]) | st.floats(0.0, ramp)),
        decay_epoch=draw(st.sampled_from([0.0, epochs]) | st.floats(0.0, epochs)),
        decay=draw(st.sampled_from(["linear", "exponential"])),
        learning_rate=rate,
        end_learning_rate=draw(st.just(rate) | st.floats(1e-12, rate)),
        eps_train=draw(st.floats(0.0, 10.0)),
        mix_target=draw(st.floats(0.0, 1.0)),
    )


shares = st.floats(0.0, 1.0)


@pytest.mark.parametrize("t", [0, 1, 200, 399, 400, 401, 799, 800])
def test_the_papers_formulas(t):
    """LR, eps and lambda as printed, for the numbers of its table: T = 800, m = n = 400."""
    paper = recipe(
        epochs=800, ramp_epochs=400, decay_epoch=400, learning_rate=1e-3, end_learning_rate=1e-6, eps_train=0.1551
    )
    rate = 1e-3 if t <= 400 else 1e-3 * (1e-6 / 1e-3) ** ((t - 400) / 400)
    share = t / 400 if t <= 400 else 1.0
    assert setting(paper, t) == pytest.approx(Setting(rate, share * 0.1551, share))


@pytest.mark.parametrize(
    ("epoch", "share"),
    [(0, 0.0), (1.999, 0.0), (2, 0.0), (2.5, 0.125), (4, 0.5), (6, 1.0), (6.001, 1.0), (10, 1.0), (99, 1.0)],
)
def test_the_ramp_begins_behind_the_warm_up_and_ends_with_the_ramp_epochs(epoch, share):
    assert grown(recipe(warmup_epochs=2.0, ramp_epochs=6.0), epoch) == pytest.approx(share)


def test_without_a_ramp_the_targets_hold_from_the_first_step():
    assert setting(recipe(mix_target=0.7), 0.0)[1:] == (0.6, 0.7)


@pytest.mark.parametrize("epoch", [0.0, 1.0, 2.999])
def test_a_ramp_that_is_all_warm_up_jumps_at_its_end(epoch):
    """warmup_epochs = ramp_epochs is a valid recipe: nothing before, everything after."""
    sudden = recipe(warmup_epochs=3.0, ramp_epochs=3.0)
    assert grown(sudden, epoch) == 0.0
    assert grown(sudden, 3.0) == 1.0


@pytest.mark.parametrize("decay", ["linear", "exponential"])
def test_the_rate_stays_until_the_decay_and_reaches_its_end_with_the_last_epoch(decay):
    falling = recipe(decay=decay, decay_epoch=4.0, learning_rate=1e-2, end_learning_rate=1e-4)
    assert [learning_rate(falling, t) for t in (0.0, 3.9, 4.0)] == [1e-2] * 3
    assert learning_rate(falling, 10.0) == pytest.approx(1e-4)
    middle = {"linear": (1e-2 + 1e-4) / 2, "exponential": 1e-3}[decay]
    assert learning_rate(falling, 7.0) == pytest.approx(middle)


@pytest.mark.parametrize("decay", ["linear", "exponential"])
def test_a_decay_that_begins_with_the_last_epoch_never_begins(decay):
    assert learning_rate(recipe(decay=decay, decay_epoch=10.0), 10.0) == 1e-3


@given(recipes(), shares)
def test_nothing_ever_goes_beyond_its_target(r, share):
    at = setting(r, share * r.epochs)
    assert 0.0 <= at.eps <= r.eps_train
    assert 0.0 <= at.mix <= r.mix_target
    assert r.end_learning_rate * (1 - 1e-9) <= at.learning_rate <= r.learning_rate * (1 + 1e-9)
    assert all(math.isfinite(value) for value in at)


@given(recipes(), shares, shares)
def test_radius_and_lambda_only_grow_and_the_rate_only_falls(r, one, other):
    early, late = (setting(r, share * r.epochs) for share in sorted((one, other)))
    assert early.eps <= late.eps
    assert early.mix <= late.mix
    assert late.learning_rate <= early.learning_rate * (1 + 1e-9)


@given(recipes(), shares)
def test_no_jumps_but_where_the_recipe_asks_for_one(r, share):
    """A step of a 10,000th of a ramp or a decay moves each value by about so much of its way."""
    t = share * r.epochs
    ramp, fall = r.ramp_epochs - r.warmup_epochs, r.epochs - r.decay_epoch
    if ramp > 1e-6 * r.epochs:
        before, after = setting(r, t), setting(r, t + 1e-4 * ramp)
        assert after.eps - before.eps <= 1.01e-4 * r.eps_train + 1e-8
        assert after.mix - before.mix <= 1.01e-4 * r.mix_target + 1e-8
    if fall > 1e-6 * r.epochs:
        before, after = (learning_rate(r, min(t + way, r.epochs)) for way in (0.0, 1e-4 * fall))
        if r.decay == "linear":  # equal pieces of the way, which near the end are large beside what is left
            assert before - after <= 1.01e-4 * (r.learning_rate - r.end_learning_rate) + 1e-9 * before
        else:
            assert before - after <= before * 1e-2


@pytest.mark.parametrize("name", names())
def test_every_recipe_reaches_its_targets_before_it_ends(name):
    r = find(name)
    assert setting(r, r.epochs)[1:] == (r.eps_train, r.mix_target)
    assert learning_rate(r, r.epochs) == pytest.approx(r.end_learning_rate)
