"""A tiny demo: what it prints, that a seed repeats it, and that its numbers agree with the certificate."""

import io
import re
from contextlib import redirect_stderr, redirect_stdout

import pytest
import torch

from locallip import Guarantee, Verdict
from locallip.demo import draw, run


def tiny(seed):
    """The certificate and the printed text of one epoch on 256 images, 20 test images certified."""
    with redirect_stdout(io.StringIO()) as text, redirect_stderr(text):  # progress goes to stderr
        certificate = run(eps=0.3, epochs=1, seed=seed, limit=20, images=256)
    return certificate, text.getvalue()


@pytest.fixture(scope="module")
def first():
    return tiny(seed=0)


def test_prints_what_the_certificate_says(first):
    certificate, text = first
    verdicts = certificate.verdicts
    assert len(verdicts) == 20
    assert certificate.guarantee is Guarantee.HIGH_PROBABILITY
    for part in ("eps = 0.3", "first 20 test images", "high_probability", "1e-09", "Lipschitz bound     global"):
        assert part in text
    shown = {name: float(re.search(rf"{name} accuracy +([\d.]+)%", text)[1]) for name in ("clean", "attacked", "certified")}
    wrong = verdicts.count(Verdict.MISCLASSIFIED)
    assert shown["clean"] == pytest.approx(100 - 5 * wrong)
    assert shown["attacked"] == pytest.approx(100 - 5 * (wrong + verdicts.count(Verdict.ATTACKED)))
    assert shown["certified"] == pytest.approx(5 * int(certificate.certified.sum()))
    assert "\x1b" not in text  # no colours where there is no terminal


def test_draws_every_kind_of_verdict_that_occurred(first):
    certificate, text = first
    for verdict in set(certificate.verdicts):
        assert str(verdict) in text


def test_training_speaks_of_estimates_only(first):
    training = first[1].split("Certifying")[0]
    assert "estimate" in training
    assert "certif" not in training


def test_same_seed_same_result_and_the_random_state_of_the_caller_stays(first):
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    again, text = tiny(seed=0)
    assert torch.equal(torch.rand(3), expected)
    assert again.fingerprint == first[0].fingerprint
    assert again.verdicts == first[0].verdicts
    assert torch.equal(again.lipschitz.nan_to_num(), first[0].lipschitz.nan_to_num())
    assert text.count("\n") == first[1].count("\n")


def test_other_seed_other_network(first):
    assert tiny(seed=1)[0].fingerprint != first[0].fingerprint


def test_drawing_shows_two_pixels_per_character():
    image = torch.zeros(28, 28)
    image[4, 4] = image[5, 5] = image[4, 6] = image[5, 6] = 1
    lines = draw(image)
    assert len(lines) == 10
    assert lines[0][:4] in {"▀▄█ ", "'.# "}
    assert all(line == " " * 20 for line in lines[1:])
