"""One tiny demo: what it prints, that a seed repeats it, and that its numbers agree with the certificate."""

import re

import pytest
import torch

from locallip import Guarantee, Verdict
from locallip.demo import draw, run


def tiny(seed=0):
    return run(eps=0.3, epochs=1, seed=seed, limit=20, images=256)


@pytest.fixture(scope="module")
def repeated():
    return tiny(), tiny()


def test_prints_what_the_certificate_says(capsys):
    certificate = tiny()
    text = capsys.readouterr().out
    verdicts = certificate.verdicts
    assert len(verdicts) == 20
    assert certificate.guarantee is Guarantee.HIGH_PROBABILITY
    assert "eps = 0.3" in text
    assert "high_probability" in text
    assert "1e-09" in text
    shown = {name: float(re.search(rf"{name} accuracy +([\d.]+)%", text)[1]) for name in ("clean", "attacked", "certified")}
    lost = verdicts.count(Verdict.MISCLASSIFIED)
    assert shown["clean"] == pytest.approx(100 - 5 * lost)
    assert shown["attacked"] == pytest.approx(100 - 5 * (lost + verdicts.count(Verdict.ATTACKED)))
    assert shown["certified"] == pytest.approx(5 * int(certificate.certified.sum()))
    assert "\x1b" not in text  # no colours in a pipe


def test_training_speaks_of_estimates_only(capsys):
    tiny()
    training = capsys.readouterr().out.split("Certifying")[0]
    assert "estimate" in training
    assert "certif" not in training


def test_same_seed_same_result(repeated):
    first, second = repeated
    assert first.fingerprint == second.fingerprint
    assert first.verdicts == second.verdicts
    assert torch.equal(first.lipschitz.nan_to_num(), second.lipschitz.nan_to_num())


def test_other_seed_other_network(repeated):
    assert tiny(seed=1).fingerprint != repeated[0].fingerprint


def test_leaves_the_random_state_of_the_caller_alone():
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    tiny()
    assert torch.equal(torch.rand(3), expected)


def test_drawing_shows_two_pixels_per_character():
    image = torch.zeros(28, 28)
    image[4, 4] = image[5, 5] = image[4, 6] = image[5, 6] = 1
    lines = draw(image)
    assert len(lines) == 10
    assert lines[0][:4] in {"▀▄█ ", "'.# "}
    assert all(line == " " * 20 for line in lines[1:])
