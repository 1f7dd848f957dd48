"""l-infinity in rows and commands: certify, verify, resume, attack and report go by the norm that was asked for."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
from torch import nn

import locallip as ll
from locallip.breaking import AttackJob, attack_images
from locallip.data import ImageSet, load_images
from locallip.proofs import Job, WrongRows, certify_images, read_rows, verify_rows
from locallip.proofs.settings import read_about
from locallip.report.proved import certificates
from locallip.report.runs import Certified, Run
from locallip.zoo import load_model
from tests.small_network import stored_network

COUNT, EPS = 10, "0.02"
#: Images with radii, which take longer.
FEW = 3


@pytest.fixture(scope="module")
def network_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return stored_network(tmp_path_factory.mktemp("network"), steps=100)


@pytest.fixture(scope="module")
def model(network_file: Path) -> nn.Module:
    return load_model(network_file)


@pytest.fixture(scope="module")
def images() -> ImageSet:
    return load_images("embedded", "test")


@pytest.fixture(scope="module")
def rows_file(model: nn.Module, images: ImageSet, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("rows") / "rows.jsonl"
    certify_images(job(out, radii=True, limit=FEW), model, images)
    return out


def job(out: Path | None = None, **changes: object) -> Job:
    return dataclasses.replace(Job("mine", EPS, limit=COUNT, batch_size=4, seed=3, out=out, norm="inf"), **changes)  # type: ignore[arg-type]


def copied(rows_file: Path, folder: Path) -> Path:
    for path in (rows_file, rows_file.with_suffix(".json")):
        (folder / path.name).write_text(path.read_text())
    return folder / rows_file.name


def test_rows_say_what_certify_says_and_name_their_norm(model, images, rows_file):
    rows, settings, summary = certify_images(job(), model, images)
    x, y = images.images[:COUNT].float() / 255, images.labels[:COUNT]
    found = ll.certify(model, x, y, EPS, norm="inf", seed=11)
    assert [row.verdict for row in rows] == [str(verdict) for verdict in found.verdicts]
    assert {row.norm for row in rows} == {settings.norm} == {"inf"}
    assert summary["norm"] == "inf"
    assert {row.verdict for row in rows} >= {"CERTIFIED", "MISCLASSIFIED"}
    radii = ll.certified_radius(model, x[:FEW], y[:FEW], norm="inf", seed=5).tolist()
    assert [row.radius for row in read_rows(rows_file)] == pytest.approx(radii, rel=0.03)


@pytest.mark.parametrize("suffix", [".jsonl", ".csv"])
def test_rows_of_either_format_come_out_again(model, images, tmp_path, suffix):
    out = tmp_path / f"rows{suffix}"
    certify_images(job(out), model, images)
    assert verify_rows(out, model, images, sample=COUNT) == []


def test_radii_come_out_again(model, images, rows_file):
    assert verify_rows(rows_file, model, images, sample=COUNT) == []


def test_rows_of_l_infinity_that_are_passed_off_as_another_norm_do_not_verify(model, images, rows_file, tmp_path):
    """l2 rows called l-infinity: their larger balls are not proved."""
    out = tmp_path / "rows.jsonl"
    rows, *_ = certify_images(job(out, norm="2", eps="0.3"), model, images)
    assert any(row.verdict == "CERTIFIED" for row in rows)
    text = out.read_text().replace('"norm": "2"', '"norm": "inf"')
    out.write_text(text)
    about = json.loads(out.with_suffix(".json").read_text())
    assert "norm" not in about["summary"]
    faults = verify_rows(out, model, images, sample=COUNT)
    assert any("its ball is of the norm inf, and the run's of 2" in fault for fault in faults)
    about["settings"]["norm"] = about["summary"]["norm"] = "inf"
    out.with_suffix(".json").write_text(json.dumps(about))
    faults = verify_rows(out, model, images, sample=COUNT)
    assert any("the verdict is" in fault for fault in faults)


def test_a_run_goes_on_in_its_own_norm_alone(model, images, rows_file, tmp_path):
    out = copied(rows_file, tmp_path)
    with pytest.raises(WrongRows, match="norm was 'inf' and is '2'"):
        certify_images(job(out, norm="2", radii=True, limit=FEW, resume=True), model, images)
    whole = read_rows(out)
    out.write_text("".join(out.read_text().splitlines(keepends=True)[:1]))
    rows, *_ = certify_images(job(out, radii=True, limit=FEW, resume=True), model, images)
    assert [dataclasses.replace(row, seconds=0) for row in rows] == [dataclasses.replace(row, seconds=0) for row in whole]


@pytest.mark.parametrize("norm", ["1", 2, None, "Inf"])
def test_settings_with_another_norm_are_refused(model, images, rows_file, tmp_path, norm):
    out = copied(rows_file, tmp_path)
    about = json.loads(out.with_suffix(".json").read_text())
    about["settings"]["norm"] = norm
    out.with_suffix(".json").write_text(json.dumps(about))
    with pytest.raises(WrongRows, match="the setting norm = "):
        read_about(out)


def test_rows_from_before_there_were_norms_are_of_l2(model, images, tmp_path):
    out = tmp_path / "rows.jsonl"
    certify_images(job(out, norm="2", eps="0.3"), model, images)
    out.write_text(out.read_text().replace(', "norm": "2"', ""))
    about = json.loads(out.with_suffix(".json").read_text())
    del about["settings"]["norm"]
    out.with_suffix(".json").write_text(json.dumps(about))
    assert {row.norm for row in read_rows(out)} == {"2"}
    assert verify_rows(out, model, images, sample=3) == []


def test_the_commands_in_l_infinity(command, network_file, tmp_path):
    rows, attacked = tmp_path / "rows.jsonl", tmp_path / "attacked.jsonl"
    about = ["--data", "embedded", "--limit", COUNT, "--norm", "inf"]
    code, out, _ = command("certify", network_file, *about, "--eps", EPS, "--seed", 1, "--out", rows)
    assert code == 0
    assert f"% of {COUNT} images in l-infinity" in out
    code, out, _ = command("verify", rows, "--model", network_file, "--sample", 3)
    assert code == 0
    assert f"eps {EPS} in l-infinity" in out
    strike = ["attack", network_file, *about, "--attack", "apgd", "--steps", 10, "--certified", rows]
    code, out, _ = command(*strike, "--eps", EPS, "--out", attacked, "--seed", 0)
    assert code == 0
    assert "that are certified in rows.jsonl, none was broken" in out
    for row in map(json.loads, attacked.read_text().splitlines()):
        assert row["distance"] is None or row["distance"] <= float(EPS)
    assert json.loads(attacked.with_suffix(".json").read_text())["settings"]["norm"] == "inf"
    code, _, err = command(*strike[:6], "--eps", EPS, "--certified", rows)
    assert code == 2
    assert "is about l-infinity balls, not l2 ones: attack with --norm inf" in err


def test_l_infinity_wants_a_radius(command):
    code, _, err = command("certify", "mnist-4c3f-local-g", "--data", "embedded", "--norm", "inf")
    assert code == 2
    assert "--norm inf: say with --eps how large the balls are" in err
    code, _, err = command("certify", "mnist-4c3f-local-g", "--data", "embedded", "--norm", "1")
    assert code == 2
    assert "--norm 1: choose one of 2, inf" in err


def test_attacks_break_more_in_the_larger_ball(model, images):
    """The l-infinity ball holds the l2 ball of its radius, and its corners are far outside."""
    broken = {}
    for norm in ("2", "inf"):
        strike = AttackJob("mine", "0.1", norm, kind="pgd", steps=10, limit=COUNT, batch_size=COUNT, seed=0)
        rows = attack_images(strike, model, images).rows
        broken[norm] = sum(row.broken for row in rows)
        assert all(row.distance <= 0.1 for row in rows if row.distance is not None)
    assert broken["inf"] > broken["2"]


def test_figures_say_which_norm_their_radii_count_in(model, images, rows_file):
    found = Certified(read_about(rows_file)[0], read_rows(rows_file))
    run = Run("mine", {}, (), {}, {}, "", (found,))
    section = certificates([run])
    assert section is not None
    text = " ".join(str(figure) for figure in section.figures)
    assert "eps (l-infinity)" in text
    assert "certified radius (l-infinity)" in text
    assert f"at eps {EPS} in l-infinity" in text
    assert run.rows_about(images, EPS, "high_probability") == ()  # what is explored is in l2
