"""Verdicts give up early what will hardly be shown: that only ever loses a certificate, and never one of the local bound."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

import locallip as ll
from locallip.bounds import Trace, margin, worst_logits
from locallip.bounds.pullback import Pullback, Wanted
from locallip.certify import Certifier, guesses
from locallip.certify.prover import Prover, lead
from locallip.data import load_images, pixels
from tests.random_networks import random_network

KINDS = [("dense", "relu"), ("convolutional", "relu"), ("pre_activation", "maxmin"), ("convolutional", "tanh")]


def traced(kind: tuple[str, str], seed: int, count: int = 6) -> tuple[Prover, Trace, Tensor]:
    """Balls on which some samples are shown and some are not."""
    model, shape = random_network(*kind, seed, 1.0)
    x = torch.rand(count, *shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    model = model.double()
    y = model(x).argmax(1)
    prover = Prover(model, shape, "deterministic")
    radii = ll.certified_radius(model, x, y, guarantee="deterministic", method="local")
    return prover, prover.trace(x, radii * torch.linspace(0.9, 1.6, count, dtype=torch.float64)), y


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("small", [0, margin.SMALL])
def test_haste_shows_nothing_that_patience_does_not(
    small: int, kind: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches: a sample that is taken for shown while classes of it were not looked at; logits of another sample."""
    monkeypatch.setattr(margin, "SMALL", small)
    shown, kept = 0, 0
    for seed in range(3):
        prover, trace, y = traced(kind, seed)
        patient = worst_logits(prover.network, trace, y, outward=True).worst
        hasty = worst_logits(prover.network, trace, y, outward=True, wanted=torch.zeros(len(y)).double()).worst
        full, fast = lead(patient, y) > 0, lead(hasty, y) > 0
        assert bool((full | ~fast).all())
        # What is shown is bounded about as tightly: a search rounds otherwise in other company.
        assert torch.allclose(hasty[fast], patient[fast], rtol=0.05, atol=0.05)
        shown, kept = shown + int(full.sum()), kept + int(fast.sum())
    assert kept == shown if small else kept > 0


@pytest.mark.parametrize("kind", KINDS)
def test_some_samples_of_a_trace_are_bounded_as_in_the_whole(kind: tuple[str, str]) -> None:
    """In as many samples as the network has inputs, so that a tensor that is not about samples would be cut as well."""
    for seed in range(2):
        count = math.prod(random_network(*kind, seed, 1.0)[1])
        prover, trace, y = traced(kind, seed, min(count, 48))
        some = torch.arange(len(y)).flip(0)[::3]
        rival = trace.logits.scatter(1, y[:, None], -float("inf")).argmax(1)
        for depth in (1, None):
            whole = Pullback(prover.network, trace, depth)(some, rival[some], y[some], 3)
            part = Pullback(prover.network, trace.of(some), depth)(torch.arange(len(some)), rival[some], y[some], 3)
            assert torch.allclose(whole, part, rtol=1e-6)


def test_rows_that_are_given_up_are_those_that_are_far() -> None:
    """Half of the pairs ask for more than any slopes give, the others for what the whole search gives."""
    prover, trace, y = traced(("convolutional", "relu"), 1)
    rival = trace.logits.scatter(1, y[:, None], -float("inf")).argmax(1)
    rows, way = torch.arange(len(y)), Pullback(prover.network, trace)
    found, plain = way(rows, rival, y, 20), worst_logits(prover.network, trace, y, outward=True, slope_steps=0).worst
    rise = (plain - trace.logits).gather(1, rival[:, None])[:, 0]
    below = torch.where(rows % 2 == 0, found - 1.0 * rise, found + 0.01 * rise)
    hasty = way(rows, rival, y, 20, Wanted(below, rise))
    assert torch.isinf(hasty[::2]).all()
    assert torch.allclose(hasty[1::2], found[1::2], rtol=1e-3)


def certified(network: str, method: str, count: int = 8) -> Tensor:
    model, digits = ll.load_model(network), load_images("embedded", "test")
    x, y = pixels(digits.images[:count]), digits.labels[:count]
    certifier = Certifier(model, x.shape[1:], method=method, attack_steps=0, seed=0)  # type: ignore[arg-type]
    return certifier(x, y, "1.58").certified


def test_auto_certifies_real_images_that_the_local_bound_certifies() -> None:
    local, hasty, patient = (certified("mnist-4c3f-local-g", method) for method in ("local", "auto", "thorough"))
    assert bool((hasty | ~local).all())
    assert bool((patient | ~hasty).all())
    assert 0 < int(local.sum()) < len(local)


def test_what_lines_do_not_prove_is_left_to_norms() -> None:
    """Inputs that lines suit and do not decide go on to the local bound, so that none of its certificates is lost."""
    for seed in range(6):
        model, shape = random_network("dense", "relu", seed, 1.0)
        x = torch.rand(6, *shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        y = model.double()(x).argmax(1)
        radii = ll.certified_radius(model, x, y, guarantee="deterministic", method="local") * 0.999
        found = ll.certify(model, x, y, radii, guarantee="deterministic", attack_steps=0)
        assert bool(found.certified.all())


def test_thorough_certifies_what_auto_gives_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """With thresholds that give up everything that is open, auto is left with plain bounds and thorough is not."""
    monkeypatch.setattr(margin, "SMALL", 0)
    monkeypatch.setattr(guesses, "SMALL", 0)
    monkeypatch.setattr(margin, "FAR", -1.0)
    monkeypatch.setattr(margin, "FAR_BEHIND", -1.0)
    counts = {"auto": 0, "thorough": 0}
    for seed in range(4):
        model, shape = random_network("dense", "relu", seed, 1.0)
        x = torch.rand(6, *shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        y = model.double()(x).argmax(1)
        radii = ll.certified_radius(model, x, y, guarantee="deterministic", method="local") * 1.2
        for method in counts:
            found = ll.certify(model, x, y, radii, guarantee="deterministic", attack_steps=0, method=method)  # type: ignore[arg-type]
            counts[method] += int(found.certified.sum())
    assert counts["auto"] < counts["thorough"]
