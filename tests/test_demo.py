"""A tiny demo: what it prints, that a seed repeats it, and that its numbers agree with the certificate."""

import io
import re
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import replace

import pytest
import torch

from locallip import Verdict
from locallip.demo import draw, run


def tiny(seed, page=None):
    """The rows and the printed text of one epoch on 256 images, 20 test images certified."""
    with redirect_stdout(io.StringIO()) as text, redirect_stderr(text):  # progress goes to stderr
        rows = run(eps=0.3, epochs=1, seed=seed, limit=20, images=256, page=page)
    return rows, text.getvalue()


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    return tmp_path_factory.mktemp("demo") / "page.html"


@pytest.fixture(scope="module")
def first(page):
    return tiny(0, page)


def test_prints_what_the_certificate_says(first):
    rows, text = first
    verdicts = [row.verdict for row in rows]
    assert len(verdicts) == 20
    assert {row.guarantee for row in rows} == {"high_probability"}
    for part in ("eps = 0.3", "first 20 test images", "high_probability", "1e-09", "Lipschitz bound     global"):
        assert part in text
    shown = {name: float(re.search(rf"{name} accuracy +([\d.]+)%", text)[1]) for name in ("clean", "attacked", "certified")}
    wrong = verdicts.count(Verdict.MISCLASSIFIED)
    assert shown["clean"] == pytest.approx(100 - 5 * wrong)
    assert shown["attacked"] == pytest.approx(100 - 5 * (wrong + verdicts.count(Verdict.ATTACKED)))
    assert shown["certified"] == pytest.approx(5 * verdicts.count(Verdict.CERTIFIED))
    assert "\x1b" not in text  # no colours where there is no terminal


def test_draws_every_kind_of_verdict_that_occurred(first):
    rows, text = first
    for verdict in {row.verdict for row in rows}:
        assert str(verdict) in text


def test_training_speaks_of_estimates_only(first):
    training = first[1].split("Certifying")[0]
    assert "estimate" in training
    assert "certif" not in training


def test_same_seed_same_result_and_the_random_state_of_the_caller_stays(first):
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    again, text = tiny(0)
    assert torch.equal(torch.rand(3), expected)
    assert [replace(row, seconds=0.0) for row in again] == [replace(row, seconds=0.0) for row in first[0]]
    before = first[1].split("\nReport\n")[0]
    assert text.split("\nWhat next")[0].count("\n") == before.count("\n")


def test_other_seed_other_network(first):
    assert tiny(1)[0][0].global_lipschitz != first[0][0].global_lipschitz


def test_ends_with_a_report_and_says_where_it_is(first, page):
    assert str(page) in first[1]
    text = page.read_text()
    assert "16 images to explore" in first[1]
    for row in first[0][:8]:  # half of the explored images are the first ones
        assert f'"index":{row.index},"label":{row.label},"prediction":{row.prediction},' in text


def test_drawing_shows_two_pixels_per_character():
    image = torch.zeros(28, 28)
    image[4, 4] = image[5, 5] = image[4, 6] = image[5, 6] = 1
    lines = draw(image)
    assert len(lines) == 10
    assert lines[0][:4] in {"▀▄█ ", "'.# "}
    assert all(line == " " * 20 for line in lines[1:])
