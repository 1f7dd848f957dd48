"""Certified radii: closed forms, attacks at the radius, the proof behind each of them, curves, and radii in rows."""

from __future__ import annotations

import copy
import csv
import dataclasses
import json
import re
import shutil
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import locallip as ll
from locallip import cli
from locallip.attacks import pgd_l2
from locallip.certify import RadiusFinder
from locallip.certify.crossing import Crossing
from locallip.certify.prover import Margin, Prover
from locallip.certify.radius import LARGEST, PROOFS
from locallip.data import ImageSet
from locallip.norms import Guarantee, PowerNorm
from locallip.proofs import Job, Row, WrongRows, certify_images, read_rows, verify_rows
from locallip.proofs.rows import FIELDS, append_rows
from locallip.proofs.settings import about_file, read_about
from locallip.proofs.summary import describe, summarize
from tests.random_networks import random_network

EVERY = [guarantee.value for guarantee in Guarantee]
PROVED = ["high_probability", "deterministic"]
KINDS = [("dense", "relu"), ("convolutional", "relu"), ("pre_activation", "maxmin"), ("dense", "tanh")]


def drawn(kind: tuple[str, str], seed: int, count: int = 4) -> tuple[nn.Module, Tensor, Tensor]:
    model, shape = random_network(*kind, seed, 1.0)
    x = torch.rand(count, *shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return model.double(), x, model.double()(x).argmax(1)


@pytest.mark.parametrize("guarantee", EVERY)
@pytest.mark.parametrize("layers", [1, 3])
def test_linear_networks_have_their_exact_radius(guarantee, layers):
    """Half a per cent below min_i (z_y - z_i) / ||w_y - w_i||, and never above it."""
    torch.manual_seed(layers)
    widths = [12, *[9] * (layers - 1), 4]
    model = nn.Sequential(*(nn.Linear(a, b) for a, b in pairwise(widths))).double()
    x = torch.randn(8, 12, dtype=torch.float64)
    y = model(x).argmax(1)
    weight = torch.eye(12, dtype=torch.float64)
    for layer in model:
        weight = layer.weight @ weight
    gap = (model(x).gather(1, y[:, None]) - model(x)) / (weight[y][:, None] - weight[None]).norm(dim=2)
    exact = gap.nan_to_num(float("inf")).amin(1).detach()
    radii = ll.certified_radius(model, x, y, guarantee=guarantee, seed=0)
    assert bool((radii <= exact).all())
    assert bool((radii >= 0.995 * exact).all())


@pytest.mark.parametrize("guarantee", PROVED)
@pytest.mark.parametrize("kind", KINDS)
def test_no_attack_succeeds_at_the_radius_and_certify_proves_it_again(kind, guarantee):
    for seed in range(2):
        model, x, y = drawn(kind, seed)
        radii = ll.certified_radius(model, x, y, guarantee=guarantee, seed=seed)
        assert bool((radii > 0).all())
        found = ll.certify(model, x, y, radii * (1 if guarantee == "deterministic" else 0.99), guarantee=guarantee)
        assert bool(found.certified.all())
        network = ll.lower(model, x.shape[1:])
        for start in range(5):
            generator = torch.Generator().manual_seed(start)
            points = pgd_l2(network, x, y, radii, steps=30, generator=generator)
            assert model(points).argmax(1).tolist() == y.tolist()


@pytest.mark.parametrize("kind", KINDS)
def test_radii_reach_what_a_fine_bisection_of_proofs_reaches(kind):
    """Within one per cent of the largest eps at which the deterministic margin is positive."""
    model, x, y = drawn(kind, 5)
    prover = Prover(model, x.shape[1:], "deterministic", method="local")
    low = torch.zeros(len(x), dtype=torch.float64)
    high = torch.full_like(low, 8.0)
    for _ in range(25):
        middle = (low + high) / 2
        holds = prover.margin(x, y, middle).worst > 0
        low, high = torch.where(holds, middle, low), torch.where(holds, high, middle)
    for guarantee in PROVED:
        radii = ll.certified_radius(model, x, y, guarantee=guarantee, seed=0, method="local")
        assert bool((radii >= 0.99 * low).all()), (radii / low).tolist()
        assert bool((ll.certified_radius(model, x, y, guarantee=guarantee, seed=0) >= 0.99 * low).all())


class Recorded(Prover):
    """A prover that keeps what it was asked and what it found; its copies share the record."""

    def __init__(self, *args: Any, **options: Any):
        super().__init__(*args, **options)
        self.asked: list[tuple[Guarantee, str, Tensor, float, bool]] = []

    def margin(self, x: Tensor, y: Tensor, eps: Tensor, **options: Any) -> Margin:
        found = super().margin(x, y, eps, **options)
        for sample, radius, worst in zip(x, eps.tolist(), found.worst.tolist(), strict=True):
            self.asked.append((self.guarantee, options["local"], sample, radius, worst > 0))
        return found


@pytest.mark.parametrize("guarantee", PROVED)
@pytest.mark.parametrize("liar", [False, True])
def test_every_radius_has_its_own_proof_and_there_are_not_too_many(guarantee, liar):
    """Also where the guide is far off: one power step makes every norm too small."""
    for kind in KINDS:
        model, x, y = drawn(kind, 2)
        prover = Recorded(model, x.shape[1:], guarantee, probes=PROOFS, seed=1)
        finder = RadiusFinder(model, x.shape[1:], guarantee=guarantee, seed=1, batch_size=4, prover=prover)
        assert finder.guide.rule is not prover.rule
        if liar:
            finder.guide.rule = PowerNorm(1, seed=3)
        radii = finder(x, y)
        for sample, radius in zip(x, radii.tolist(), strict=True):
            own = [(local, eps, won) for kind_, local, other, eps, won in prover.asked
                   if kind_ is prover.guarantee and torch.equal(other, sample)]  # fmt: skip
            assert any(eps == radius and won for _, eps, won in own)
            assert sum(local == "all" for local, _, _ in own) <= PROOFS
            assert sum(local == "none" for local, _, _ in own) <= 25


def test_few_proofs_are_enough_for_most():
    proofs = 0
    for seed in range(6):
        model, x, y = drawn(("convolutional", "relu"), seed)
        prover = Recorded(model, x.shape[1:], "high_probability", probes=PROOFS, seed=1, method="local")
        RadiusFinder(model, x.shape[1:], prover=prover, seed=1, method="local")(x, y)
        proofs += sum(kind is prover.guarantee and local == "all" for kind, local, *_ in prover.asked)
    assert proofs <= 2 * 36


@pytest.mark.parametrize("guarantee", EVERY)
def test_wrong_tied_and_not_finite_inputs_have_radius_zero(guarantee):
    model, x, y = drawn(("dense", "relu"), 1, count=5)
    last = model.get_submodule("4")
    y[0] = (y[0] + 1) % 3
    x[1, 0], x[2, 0] = float("nan"), float("inf")
    radii = ll.certified_radius(model, x, y, guarantee=guarantee, seed=0)
    assert radii[:3].tolist() == [0.0] * 3
    assert bool((radii[3:] > 0).all())
    with torch.no_grad():
        last.weight[1:], last.bias[1:] = last.weight[0].clone(), last.bias[0].clone()
    assert ll.certified_radius(model, x[3:], y[3:], guarantee=guarantee, seed=0).tolist() == [0.0] * 2


@pytest.mark.parametrize("guarantee", EVERY)
def test_where_nothing_takes_the_label_away_radii_are_large_and_finite(guarantee):
    constant = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 3))
    with torch.no_grad():
        constant[2].weight.zero_()
        constant[2].bias.copy_(torch.tensor([0.0, 1.0, 0.0]))
    x, y = torch.rand(2, 4), torch.tensor([1, 0])
    radii = ll.certified_radius(constant, x, y, guarantee=guarantee, seed=0)
    assert 1e6 < float(radii[0]) <= LARGEST
    assert float(radii[1]) == 0
    inside = ll.certified_radius(constant, x, y, guarantee=guarantee, seed=0, input_domain=(0.0, 1.0))
    assert float(inside[0]) == pytest.approx(2.0)  # the diagonal of [0, 1]^4


def test_saturated_units_hold_the_label_at_any_distance():
    """tanh cannot leave [-1, 1], so the lead of 5 is never lost: the search ends all the same."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Tanh(), nn.Linear(2, 2))
    with torch.no_grad():
        model[2].weight.copy_(torch.tensor([[1.0, 0.0], [0.0, 1.0]]))
        model[2].bias.copy_(torch.tensor([5.0, 0.0]))
    radius = float(ll.certified_radius(model, torch.zeros(1, 2), torch.tensor([0]), guarantee="deterministic")[0])
    assert 100 < radius < float("inf")


@pytest.mark.parametrize("guarantee", PROVED)
def test_what_is_in_the_batch_does_not_matter(guarantee):
    model, x, y = drawn(("convolutional", "relu"), 4, count=4)
    how = {
        "guarantee": guarantee,
        "method": "local",
    }  # a search for slopes ends elsewhere where norms are a little different
    whole = ll.certified_radius(model, x, y, seed=0, **how)
    one = torch.cat([ll.certified_radius(model, x[i : i + 1], y[i : i + 1], **how) for i in range(len(x))])
    small = ll.certified_radius(model, x, y, seed=0, batch_size=2, **how)
    torch.testing.assert_close(one, whole, rtol=0.02, atol=0)
    torch.testing.assert_close(small, whole, rtol=0.02, atol=0)
    assert ll.certified_radius(model, x[:0], y[:0], guarantee=guarantee).shape == (0,)


def test_a_finder_repeats_itself_and_keeps_what_is_known():
    model, x, y = drawn(("convolutional", "relu"), 4, count=6)
    finder = RadiusFinder(model, x.shape[1:])
    found = []
    for _ in range(2):
        finder.seed_again(7)
        found.append(finder(x, y))
    assert torch.equal(*found)
    known = found[0] * torch.tensor([2.0, 0.5, 1.0, 0.0, 3.0, 0.1]).double()
    assert bool((finder(x, y, least=known) >= known).all())
    assert bool((finder(x, y, below=found[0] / 2) < found[0] / 2).all())
    assert bool((finder(x, y, below=found[0] / 2) >= found[0] * 0.499).all())
    with torch.no_grad():
        next(model.parameters()).mul_(2)
    with pytest.raises(RuntimeError, match="has changed"):
        finder(x, y)


def test_the_guide_draws_other_numbers_than_the_proofs():
    model, x, _ = drawn(("dense", "relu"), 0)
    finder = RadiusFinder(model, x.shape[1:], seed=5)
    finder.seed_again(5)
    like = torch.ones(1, dtype=torch.float64)
    assert not torch.equal(finder.guide.rule._noise((1, 50), like), finder.prover.rule._noise((1, 50), like))


@pytest.mark.parametrize("power", [0.7, 1.0, 2.0, 3.5])
def test_brackets_close_in_few_probes(power):
    """A margin 3 - 3 (eps / r)^power, with a jump and a little too much near 0, and one that is never used up."""
    roots = torch.tensor([1e-9, 0.3, 1.0, 70.0, float("inf")], dtype=torch.float64)
    count = 0

    def probe(index: Tensor, eps: Tensor) -> Tensor:
        nonlocal count
        count += len(index)
        share = eps / roots[index]
        return 3 - 3 * share**power - 0.2 * (share > 0.9) * share + 0.2 * (share >= 1) + 1e-9 * (share < 1e-4)

    found = Crossing(torch.full((5,), 3.0).double(), torch.full((5,), 1e3).double())
    found.search(probe, torch.arange(5), torch.full((5,), 0.1).double(), 1e-3, 60)
    assert found.low[4] == 1e3
    assert bool((found.high - found.low)[:4].le(1e-3 * found.high[:4]).all())
    edge = probe(torch.arange(4), found.low[:4]), probe(torch.arange(4), found.high[:4])
    assert bool((edge[0] > 0).all() and (edge[1] <= 0).all())
    assert count <= 5 * 16


# Curves and rows ----------------------------------------------------------------------------------------------------------


def test_one_pass_over_the_radii_gives_the_curve():
    radii = torch.tensor([0.0, 0.5, 1.0, 0.25])
    assert float(ll.certified_accuracy(radii, "1/2")) == 0.5
    assert float(ll.certified_accuracy(radii, 0)) == 0.75  # nothing is proved of the first one
    assert ll.certified_accuracy(radii, [0.25, 0.2500001, 1.0, 1.1]).tolist() == [0.75, 0.5, 0.25, 0.0]
    assert ll.certified_accuracy(radii, torch.tensor([0.1])).shape == (1,)
    assert float(ll.certified_accuracy(radii[:0], 0.1)) == 0.0
    for bad in (float("nan"), float("inf"), -1.0):
        with pytest.raises(ValueError, match="radii must be finite"):
            ll.certified_accuracy(torch.tensor([bad]), 0.1)
    with pytest.raises(ValueError, match="eps must be finite"):
        ll.certified_accuracy(radii, -0.1)


EPS = "0.15"
COUNT = 24


@pytest.fixture(scope="module")
def images() -> ImageSet:
    generator = torch.Generator().manual_seed(0)
    pixels = torch.randint(0, 256, (COUNT, 1, 5, 5), generator=generator, dtype=torch.uint8)
    labels = model_of_rows()(pixels.float() / 255).argmax(1)
    labels[::6] = (labels[::6] + 1) % 3  # some are wrong
    return ImageSet("drawn", "test", pixels, labels, ("a", "b", "c"))


def model_of_rows() -> nn.Module:
    return random_network("convolutional", "relu", 3, 1.0)[0].float()


@pytest.fixture(scope="module")
def model() -> nn.Module:
    return model_of_rows()


def job(out: Path | None = None, **changes: object) -> Job:
    base = Job("mine", EPS, limit=COUNT, batch_size=3, seed=3, out=out, radii=True, method="local")
    return dataclasses.replace(base, **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize("guarantee", list(Guarantee))
def test_rows_have_radii_that_agree_with_their_verdicts(model, images, guarantee):
    rows, settings, summary = certify_images(job(guarantee=guarantee), model, images)
    plain, plain_settings, plain_summary = certify_images(job(guarantee=guarantee, radii=False), model, images)
    assert [row.verdict for row in rows] == [row.verdict for row in plain]
    assert {row.verdict for row in rows} >= {"CERTIFIED", "MISCLASSIFIED"}
    assert any(row.verdict in ("UNKNOWN", "ATTACKED") and row.radius for row in rows)
    for row in rows:
        assert row.radius is not None
        assert (row.radius >= row.eps) == (row.verdict == "CERTIFIED")
        assert (row.radius == 0) == (row.verdict == "MISCLASSIFIED")
    assert all(row.radius is None for row in plain)
    assert settings.radii
    assert not plain_settings.radii
    curve = dict(zip(*summary["curve"].values(), strict=True))
    assert curve[settings.radius] == summary["certified"]
    assert curve[0.0] == summary["correct"]
    assert list(curve.values()) == sorted(curve.values(), reverse=True)
    assert summary["failure_prob_of_all"] == pytest.approx(COUNT * 1e-9 if settings.failure_prob else 0)
    shown = describe(summary, guarantee)
    assert "radius: median" in shown
    others = [float(eps) for eps in re.findall(r"% {2}at eps (\S+)", shown)]
    assert others == [float(f"{settings.radius * part:.4g}") for part in (0.2, 0.6, 1.4, 1.8)]  # eps itself stands above
    assert "curve" not in plain_summary
    assert "radius" not in describe(plain_summary, guarantee)


@pytest.mark.parametrize("suffix", [".jsonl", ".csv"])
def test_a_run_with_radii_goes_on_to_the_same_rows(model, images, tmp_path, suffix):
    whole, cut = tmp_path / f"whole{suffix}", tmp_path / f"cut{suffix}"
    rows, *_ = certify_images(job(whole), model, images)
    assert read_rows(whole) == rows
    content = whole.read_bytes()
    cut.write_bytes(content[: int(0.7 * len(content))])
    about_file(cut).write_bytes(about_file(whole).read_bytes())
    with pytest.raises(WrongRows, match="radii was True and is False"):
        certify_images(job(cut, resume=True, radii=False), model, images)
    again, *_ = certify_images(job(cut, resume=True, seed=None), model, images)
    assert [dataclasses.replace(row, seconds=0) for row in again] == [dataclasses.replace(row, seconds=0) for row in rows]


@pytest.mark.parametrize("suffix", [".jsonl", ".csv"])
def test_rows_from_before_there_were_radii_are_read_and_gone_on_with(model, images, tmp_path, suffix):
    out = tmp_path / f"rows{suffix}"
    rows, *_ = certify_images(job(out, radii=False), model, images)
    old = [{k: v for k, v in dataclasses.asdict(row).items() if k not in ("radius", "norm")} for row in rows[:8]]
    if suffix == ".csv":
        with open(out, "w", newline="") as file:
            table = csv.DictWriter(file, FIELDS[:-2], lineterminator="\n")
            table.writeheader()
            table.writerows(old)
    else:
        out.write_text("".join(json.dumps(row) + "\n" for row in old))
    about = json.loads(about_file(out).read_text())
    del about["settings"]["radii"]
    about_file(out).write_text(json.dumps({**about, "summary": None}))
    assert read_rows(out) == rows[:8]
    assert not read_about(out)[0].radii
    again, *_ = certify_images(job(out, resume=True, radii=False), model, images)
    assert [row.verdict for row in again] == [row.verdict for row in read_rows(out)] == [row.verdict for row in rows]
    assert verify_rows(out, model, images, sample=3) == []


@pytest.fixture(scope="module")
def rows_with_radii(model, images, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("radii")
    certify_images(job(folder / "rows.jsonl"), copy.deepcopy(model), images)
    return folder


def test_verify_confirms_radii(model, images, rows_with_radii):
    assert verify_rows(rows_with_radii / "rows.jsonl", model, images, sample=COUNT) == []


@pytest.mark.parametrize(
    ("verdict", "radius", "told"),
    [
        ("CERTIFIED", lambda row: 1.1 * row.radius, "its radius is said to be"),
        ("CERTIFIED", lambda row: 0.9 * row.eps, "with a certified radius of"),
        ("UNKNOWN", lambda row: row.eps, "with a certified radius of"),
        ("UNKNOWN", lambda row: min(1.1 * row.radius, row.eps * 0.9999), "its radius is said to be"),
        ("MISCLASSIFIED", lambda row: 1e-3, "with a certified radius of"),
        ("CERTIFIED", lambda row: None, "its radius is None, and the run was with radii"),
    ],
)
def test_verify_finds_a_forged_radius(model, images, rows_with_radii, tmp_path, verdict, radius, told):
    out = tmp_path / "rows.jsonl"
    shutil.copy(rows_with_radii / "rows.json", tmp_path / "rows.json")
    rows = read_rows(rows_with_radii / "rows.jsonl")
    victim = min((row for row in rows if row.verdict == verdict), key=lambda row: row.radius or 0)
    new: list[Row] = [dataclasses.replace(row, radius=radius(row)) if row is victim else row for row in rows]
    append_rows(out, new)
    about = json.loads(about_file(out).read_text())
    about_file(out).write_text(json.dumps({**about, "summary": summarize(new)}))
    faults = verify_rows(out, model, images, sample=COUNT)
    assert len(faults) == 1
    assert told in faults[0]
    assert faults[0].startswith(f"row {victim.index}:")


def test_the_command_prints_radii(capsys, tmp_path):
    model = ll.build_model("small", (1, 28, 28), 10, "relu")
    about = {"architecture": "small", "activation": "relu", "input_shape": [1, 28, 28], "classes": 10}
    ll.save_model(tmp_path / "mine.safetensors", model, about)
    options = [
        "certify",
        str(tmp_path / "mine.safetensors"),
        "--data",
        "embedded",
        "--eps",
        "0.01",
        "--limit",
        "6",
        "--radius",
    ]
    assert cli.main([*options, "--out", str(tmp_path / "rows.csv")]) == 0
    assert "radius: median" in capsys.readouterr().out
    assert all(row.radius is not None for row in read_rows(tmp_path / "rows.csv"))
    assert cli.main([*options, "--failure-prob", "1e-15"]) == 2
    assert "at least 2e-15 with --radius" in capsys.readouterr().err
