"""Rows of certificates: what `locallip certify` writes, a stopped run goes on from, and `locallip verify` repeats."""

from __future__ import annotations

import copy
import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from scipy.stats import binomtest
from torch import nn

import locallip as ll
from locallip import cli
from locallip.certify import Certifier
from locallip.data import ImageSet, load_images
from locallip.files import locked
from locallip.norms import Guarantee
from locallip.proofs import Job, Row, WrongRows, certify_images, read_rows, verify_rows
from locallip.proofs.rows import append_rows
from locallip.proofs.settings import about_file, read_about
from locallip.proofs.summary import describe, summarize, wilson
from locallip.zoo import load_model
from tests.small_network import stored_network

COUNT = 32
EPS = "0.3"


@pytest.fixture(scope="module")
def network_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return stored_network(tmp_path_factory.mktemp("network"), steps=100)


@pytest.fixture(scope="module")
def model(network_file: Path) -> nn.Module:
    return load_model(network_file)


@pytest.fixture(scope="module")
def images() -> ImageSet:
    return load_images("embedded", "test")


def job(out: Path | None = None, **changes: object) -> Job:
    return dataclasses.replace(Job("mine", EPS, limit=COUNT, batch_size=4, seed=3, out=out, method="local"), **changes)  # type: ignore[arg-type]


def without_times(rows: list[Row]) -> list[Row]:
    return [dataclasses.replace(row, seconds=0.0) for row in rows]


@pytest.mark.parametrize("guarantee", list(Guarantee))
def test_rows_say_what_certify_says(model, images, guarantee):
    rows, settings, summary = certify_images(job(guarantee=guarantee), model, images)
    x, y = images.images[:COUNT].float() / 255, images.labels[:COUNT]
    found = ll.certify(model, x, y, EPS, guarantee=guarantee, seed=11, method="local")
    assert [row.verdict for row in rows] == [str(verdict) for verdict in found.verdicts]
    assert [row.label for row in rows] == y.tolist()
    assert [row.prediction for row in rows] == model(x).argmax(1).tolist()
    assert {row.verdict for row in rows} >= {"CERTIFIED", "MISCLASSIFIED"}
    assert summary["certified"] == 100 * int(found.certified.sum()) / COUNT
    assert summary["correct"] == 100 * int((model(x).argmax(1) == y).sum()) / COUNT
    assert sum(summary["verdicts"].values()) == sum(summary["decided_by"].values()) == COUNT
    risk = 1e-9 if guarantee is Guarantee.HIGH_PROBABILITY else 0.0
    assert summary["failure_prob_of_all"] == pytest.approx(COUNT * risk)
    assert settings.fingerprint == found.fingerprint
    word = "estimated robust (no proof)" if guarantee is Guarantee.ESTIMATE else "certified"
    assert f"{word} {summary['certified']:.2f} % of {COUNT} images" in describe(summary, guarantee)


@pytest.mark.parametrize("guarantee", [Guarantee.HIGH_PROBABILITY, Guarantee.DETERMINISTIC])
@pytest.mark.parametrize("suffix", [".jsonl", ".csv"])
def test_a_run_cut_off_anywhere_goes_on_to_the_same_rows(model, images, tmp_path, suffix, guarantee):
    whole, cut = tmp_path / f"whole{suffix}", tmp_path / f"cut{suffix}"
    rows, *_ = certify_images(job(whole, guarantee=guarantee), model, images)
    assert read_rows(whole) == rows
    content = whole.read_bytes()
    for share in (0.0, 0.3, 0.77, 1.0):
        cut.write_bytes(content[: int(share * len(content))])
        if share == 0.0:
            cut.unlink()
        about_file(cut).write_bytes(about_file(whole).read_bytes())
        again, *_ = certify_images(job(cut, resume=True, seed=None, guarantee=guarantee), model, images)
        assert without_times(again) == without_times(rows) == without_times(read_rows(cut))


def test_rows_that_are_there_are_never_overwritten(model, images, tmp_path):
    out = tmp_path / "rows.jsonl"
    certify_images(job(out, limit=4), model, images)
    before = out.read_bytes()
    with pytest.raises(WrongRows, match=r"there already: go on with --resume, or name another --out"):
        certify_images(job(out, limit=4), model, images)
    with pytest.raises(WrongRows, match=r"eps was '0.3' and is '0.31'"):
        certify_images(job(out, limit=4, resume=True, eps="0.31"), model, images)
    with pytest.raises(WrongRows, match="seed was 3 and is 4"):
        certify_images(job(out, limit=4, resume=True, seed=4), model, images)
    with pytest.raises(WrongRows, match="fingerprint was"):
        certify_images(job(out, limit=4, resume=True), slightly_other(model), images)
    with pytest.raises(WrongRows, match=r"rows\.json is about rows\.jsonl: name another --out than rows\.csv"):
        certify_images(job(tmp_path / "rows.csv", limit=4, resume=True), model, images)
    assert out.read_bytes() == before


def slightly_other(model: nn.Module) -> nn.Module:
    other = copy.deepcopy(model)
    with torch.no_grad():
        other.get_submodule("7").bias.add_(1e-3)
    return other


def test_both_formats_hold_the_same(model, images, tmp_path):
    rows, *_ = certify_images(job(limit=8), model, images)
    for suffix in (".jsonl", ".csv"):
        append_rows(tmp_path / f"rows{suffix}", rows[:5])
        append_rows(tmp_path / f"rows{suffix}", rows[5:])
        assert read_rows(tmp_path / f"rows{suffix}") == rows


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ("{", "line 1 is not valid JSON"),
        ("[1]", "line 1 is no row"),
        ('{"index": 0}', "line 1 has the fields index; expected index, label"),
        ("\xff", "line 1 is not valid JSON"),
        ('{"verdict": "CERTIFIED", "verdict": "UNKNOWN"}', "line 1 is not valid JSON: a field is there twice"),
    ],
)
def test_what_is_no_row_is_named(tmp_path, content, told):
    path = tmp_path / "rows.jsonl"
    path.write_text(content + "\n")
    with pytest.raises(WrongRows, match=told):
        read_rows(path)


@pytest.mark.parametrize(
    ("field", "value"),
    [("index", "0"), ("verdict", "PROVED"), ("label", None), ("eps", True), ("margin", "much"), ("failure_prob", None)],
)
def test_a_wrong_value_is_named(model, images, tmp_path, field, value):
    path = tmp_path / "rows.jsonl"
    certify_images(job(path, limit=4), model, images)
    lines = path.read_text().splitlines()
    lines[2] = json.dumps({**json.loads(lines[2]), field: value})
    path.write_text("\n".join(lines) + "\n")
    with pytest.raises(WrongRows, match=r"rows.jsonl, line 3: .*(verdict|" + field + ")"):
        read_rows(path)


def test_verify_confirms_what_was_written(model, images, tmp_path):
    out = tmp_path / "rows.jsonl"
    certify_images(job(out), model, images)
    assert verify_rows(out, model, images, sample=COUNT) == []
    assert json.loads(about_file(out).read_text())["summary"]["images"] == COUNT


def forged(rows: list[Row], out: Path, which: Callable[[Row], bool], **changes: object) -> None:
    """The same rows with some fields of some of them changed, and the summary that fits them."""
    new = [dataclasses.replace(row, **changes) if which(row) else row for row in rows]  # type: ignore[arg-type]
    out.unlink()
    append_rows(out, new)
    about = json.loads(about_file(out).read_text())
    about_file(out).write_text(json.dumps({**about, "summary": summarize(new)}))


@pytest.mark.parametrize(
    ("verdict", "changes", "told"),
    [
        ("UNKNOWN", {"verdict": "CERTIFIED"}, "'nothing' does not make anything CERTIFIED"),
        ("UNKNOWN", {"verdict": "CERTIFIED", "decided_by": "local bound"}, "CERTIFIED with a margin of"),
        ("UNKNOWN", {"verdict": "CERTIFIED", "decided_by": "local bound", "margin": 0.1}, "the verdict is UNKNOWN"),
        ("CERTIFIED", {"label": 11}, "its label is 11"),
        ("CERTIFIED", {"prediction": 11}, "it is CERTIFIED with prediction 11"),
        ("CERTIFIED", {"prediction": None}, "it is CERTIFIED with prediction None"),
        ("UNKNOWN", {"prediction": None}, "the prediction is"),
        ("CERTIFIED", {"eps": 5.0}, "its eps is 5.0, and that of the run 0.3"),
        ("CERTIFIED", {"guarantee": "deterministic", "failure_prob": 0.0}, "it claims deterministic"),
        ("CERTIFIED", {"failure_prob": 1e-12}, "with failure probability 1e-12"),
        ("CERTIFIED", {"margin": 1e6}, "margin and bound are"),
        ("CERTIFIED", {"lipschitz": 1e-9}, "margin and bound are"),
        ("CERTIFIED", {"lipschitz": 1e9}, "CERTIFIED with a margin of"),
        ("CERTIFIED", {"global_lipschitz": 1e9}, "the bound over all inputs is"),
        ("CERTIFIED", {"decided_by": "magic"}, "'magic' does not make anything"),
        ("CERTIFIED", {"decided_by": "slopes"}, "decided by 'slopes', which the run left out"),
        ("CERTIFIED", {"seconds": -1.0}, "it took -1.0 seconds"),
        ("UNKNOWN", {"margin": 1.0, "lipschitz": 0.1}, "it is UNKNOWN with a margin of 1.0"),
        ("CERTIFIED", {"verdict": "ATTACKED", "decided_by": "attack"}, "it is ATTACKED with a margin of"),
        (
            "CERTIFIED",
            {"verdict": "ATTACKED", "decided_by": "attack", "margin": None, "lipschitz": None},
            "it is said to be ATTACKED, and CERTIFIED",
        ),
    ],
)
def test_verify_finds_what_was_forged(model, images, certified_rows, tmp_path, verdict, changes, told):
    out = tmp_path / "rows.jsonl"
    for name in ("rows.jsonl", "rows.json"):
        shutil.copy(certified_rows / name, tmp_path / name)
    rows = read_rows(out)
    index = next(row.index for row in rows if row.verdict == verdict)
    forged(rows, out, lambda row: row.index == index, **changes)
    faults = verify_rows(out, model, images, sample=COUNT)
    assert faults
    assert told in faults[0]


@pytest.mark.parametrize(
    ("was", "changes", "told"),
    [
        (("CERTIFIED", "global bound"), {"decided_by": "local bound", "margin": 1e6, "lipschitz": 0.0}, "it is proved by"),
        (("CERTIFIED", "local bound"), {"decided_by": "global bound", "margin": 1e6, "lipschitz": 1e-9}, "it is proved by"),
        (("UNKNOWN", "nothing"), {"verdict": "ATTACKED", "decided_by": "attack"}, "it is said to be ATTACKED, and UNKNOWN"),
    ],
)
def test_verify_finds_one_row_that_names_another_check(model, images, tmp_path, was, changes, told):
    """Numbers that are not of the check that a row names, and an attack that there never was."""
    out = tmp_path / "rows.jsonl"
    rows, *_ = certify_images(job(out, limit=8, eps="0.2"), model, images)
    index = next(row.index for row in rows if (row.verdict, row.decided_by) == was)
    forged(rows, out, lambda row: row.index == index, **changes)
    faults = verify_rows(out, model, images, sample=8)
    assert len(faults) == 1
    assert f"row {index}: {told}" in faults[0]


def test_an_attack_that_the_run_left_out_breaks_nothing(model, images, tmp_path):
    out = tmp_path / "rows.jsonl"
    rows, *_ = certify_images(job(out, limit=4, eps="1.5", attack_steps=0), model, images)
    forged(rows, out, lambda row: row.verdict == "UNKNOWN", verdict="ATTACKED", decided_by="attack")
    assert "decided by 'attack', which the run left out" in verify_rows(out, model, images)[0]


def test_rows_of_a_network_whose_bound_overflows_are_confirmed(model, images, tmp_path):
    huge = copy.deepcopy(model)
    with torch.no_grad():
        for value in huge.parameters():
            value.mul_(1e37)
    out = tmp_path / "rows.jsonl"
    rows, *_ = certify_images(job(out, limit=3, guarantee=Guarantee.ESTIMATE), huge, images)
    assert {row.global_lipschitz for row in rows} == {None}
    assert "CERTIFIED" not in {row.verdict for row in rows}
    assert verify_rows(out, huge, images) == []


@pytest.fixture(scope="module")
def certified_rows(model, images, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("rows")
    rows, *_ = certify_images(job(folder / "rows.jsonl"), model, images)
    assert {row.verdict for row in rows} >= {"CERTIFIED", "UNKNOWN", "MISCLASSIFIED"}
    return folder


def test_verify_wants_all_rows_and_their_own_summary(model, images, certified_rows, tmp_path):
    out = tmp_path / "rows.jsonl"
    rows = read_rows(certified_rows / "rows.jsonl")
    about = json.loads((certified_rows / "rows.json").read_text())
    for kept, told in ((rows[:-1], "there are 31 rows for 32 images"), (rows[1:], "not those of the images 0, 1, 2")):
        out.unlink(missing_ok=True)
        append_rows(out, kept)
        about_file(out).write_text(json.dumps(about))
        assert told in verify_rows(out, model, images)[0]
    out.unlink()
    append_rows(out, rows)
    for summary in (None, {**about["summary"], "certified": 100.0}):
        about_file(out).write_text(json.dumps({**about, "summary": summary}))
        assert verify_rows(out, model, images) == ["the summary is not that of these rows"]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("model", 5), ("images", "x"), ("images", -5), ("guarantee", "sure"), ("guarantee", [1]), ("failure_prob", 2),
        ("failure_prob", "x"), ("failure_prob", 0.0), ("attack_steps", -1), ("power_steps", 0), ("eps", [0.1]),
        ("eps", None), ("eps", "0"), ("eps", "x"), ("data", ["a"]), ("split", "xx"), ("seed", 1.5), ("seed", 2**70),
        ("seed", None), ("eps", "1e999999999"),
    ],
)  # fmt: skip
def test_settings_that_are_not_what_they_should_be_are_named(certified_rows, tmp_path, name, value):
    out = tmp_path / "rows.jsonl"
    about = json.loads((certified_rows / "rows.json").read_text())
    about_file(out).write_text(json.dumps({**about, "settings": {**about["settings"], name: value}}))
    with pytest.raises(WrongRows, match=r"rows\.json: .*" + name):
        read_about(out)
    del about["settings"][name]
    about_file(out).write_text(json.dumps(about))
    with pytest.raises(WrongRows, match=f"the setting {name} is missing"):
        read_about(out)


def test_two_runs_do_not_write_one_file(model, images, tmp_path):
    out = tmp_path / "rows.jsonl"
    with locked(tmp_path / ".rows.jsonl.lock"), pytest.raises(WrongRows, match="in use by another process"):
        certify_images(job(out), model, images)
    assert not out.exists()


def test_a_certifier_refuses_weights_that_have_changed(model, images):
    own = copy.deepcopy(model)
    certifier = Certifier(own, images.shape, guarantee="deterministic", attack_steps=0)
    with torch.no_grad():
        own.get_submodule("7").weight.mul_(50)
    with pytest.raises(RuntimeError, match="has changed"):
        certifier(images.images[:1].float() / 255, images.labels[:1], 0.1)


def test_two_classes_that_tie_above_the_label_are_no_contradiction(model, images, tmp_path):
    """No class is surely ahead, and the label is surely behind: MISCLASSIFIED without a prediction."""
    tied = copy.deepcopy(model)
    last = tied.get_submodule("7")
    with torch.no_grad():
        last.weight[8:] = 0.0
        last.bias[8:] = 1000.0
    out = tmp_path / "rows.jsonl"
    rows, *_ = certify_images(job(out, limit=7), tied, images)
    assert all(row.prediction is None for row in rows)
    assert {row.verdict for row in rows} == {"MISCLASSIFIED"}
    assert certify_images(job(out, limit=7, resume=True), tied, images)[0] == rows
    assert verify_rows(out, tied, images, sample=7) == []


def test_verify_refuses_other_weights_and_other_images(model, images, tmp_path):
    out = tmp_path / "rows.jsonl"
    certify_images(job(out, limit=4), model, images)
    with pytest.raises(WrongRows, match="other weights"):
        verify_rows(out, slightly_other(model), images)
    with pytest.raises(WrongRows, match="other images"):
        verify_rows(out, model, load_images("embedded", "train"))


NO_ROOM = (
    torch.OutOfMemoryError("no room"),
    RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 59515008 bytes"),
)


def test_a_device_without_room_gets_smaller_batches_and_the_same_verdicts(model, images, monkeypatch):
    plain = certify_images(job(guarantee=Guarantee.DETERMINISTIC), model, images)[0]
    whole = Certifier.__call__
    sizes = []

    def cramped(self, x, y, eps):
        sizes.append(self.batch_size)
        if self.batch_size > 1:
            raise NO_ROOM[self.batch_size // 4]
        return whole(self, x, y, eps)

    monkeypatch.setattr(Certifier, "__call__", cramped)
    rows = certify_images(job(guarantee=Guarantee.DETERMINISTIC), model, images)[0]
    assert [(row.verdict, row.decided_by) for row in rows] == [(row.verdict, row.decided_by) for row in plain]
    assert sizes[:3] == [4, 2, 1]


@pytest.mark.parametrize(("part", "count"), [(0, 1), (0, 50), (50, 50), (3, 1000), (5559, 10_000)])
def test_the_interval_is_wilsons(part, count):
    known = binomtest(part, count).proportion_ci(0.95, method="wilson")
    assert wilson(part, count) == pytest.approx((known.low, known.high), abs=1e-6)


def test_chances_add_up_alike_in_every_python():
    """The sum of floats is another one since Python 3.12, and a summary must be that of its rows on both."""
    row = Row(0, 1, 1, "UNKNOWN", "nothing", "high_probability", 1e-9, 0.3, None, None, None, 0.1)
    assert summarize([row] * 10)["failure_prob_of_all"] == 1e-8


def test_no_rows_come_to_nothing():
    assert summarize([])["certified"] == 0.0
    assert wilson(0, 0) == (0.0, 1.0)


# The commands ------------------------------------------------------------------------------------------------------------


def called(capsys: pytest.CaptureFixture[str], *args: object) -> tuple[int, str, str]:
    code = cli.main([str(arg) for arg in args])
    found = capsys.readouterr()
    return code, found.out, found.err


def test_the_commands_certify_and_verify(network_file, tmp_path, capsys):
    out = tmp_path / "rows.csv"
    options = ("--data", "embedded", "--eps", EPS, "--limit", 12, "--batch", 4)
    code, said, _ = called(capsys, "certify", network_file, *options, "--out", out)
    assert code == 0
    assert "of 12 images" in said
    assert f"rows in {out}" in said
    code, said, _ = called(capsys, "certify", network_file, *options, "--json")
    assert code == 0
    assert json.loads(said)["summary"]["images"] == 12
    code, said, _ = called(capsys, "verify", out, "--model", network_file, "--sample", 12)
    assert code == 0
    assert said == (
        "12 rows fit their settings, weights, images and summary; 12 of them came out again "
        f"(eps {EPS}, guarantee high_probability)\n"
    )
    assert read_about(out)[0].eps == EPS


def test_a_shipped_network_knows_its_data_and_radius(tmp_path, capsys):
    code, _, said = called(capsys, "certify", "mnist-4c3f-local-g", "--data-root", tmp_path)
    assert code == 2
    assert "t10k-images" in said
    assert "--download" in said
    assert "--download" in help_of(capsys, "certify")
    assert "--download" in help_of(capsys, "verify")


def help_of(capsys: pytest.CaptureFixture[str], command: str) -> str:
    with pytest.raises(SystemExit):
        cli.main([command, "--help"])
    return capsys.readouterr().out


@pytest.mark.parametrize(
    ("args", "told"),
    [
        (["--eps", EPS], "does not say what it was trained on: name it with --data and --eps"),
        (["--data", "embedded", "--eps", "x"], "--eps: "),
        (["--data", "embedded", "--eps", "0"], "--eps must be a positive number"),
        (["--data", "numbers", "--eps", EPS], "--data numbers: choose one of embedded"),
        (["--data", "embedded", "--eps", EPS, "--limit", "0"], "--limit must be at least 1"),
        (["--data", "embedded", "--eps", EPS, "--failure-prob", "2"], "--failure-prob must lie between"),
        (["--data", "embedded", "--eps", EPS, "--resume"], "name them with --out"),
        (
            ["--data", "embedded", "--eps", EPS, "--out", "rows.txt", "--limit", "1"],
            "rows are kept in files that end in .jsonl or .csv",
        ),
        (
            ["--data", "embedded", "--eps", EPS, "--out", "nowhere/rows.csv", "--limit", "1"],
            "--out nowhere/rows.csv: there is no folder nowhere",
        ),
        (
            ["--data", "embedded", "--eps", EPS, "--limit", "1", "--out", "x" * 246 + ".csv"],
            "cannot be written: File name too",
        ),
        (["--data", "embedded", "--eps", "1e999999999"], "--eps: eps '1e999999999' is beyond what float64 can hold"),
        (["--data", "embedded", "--eps", "1e-999999999"], "--eps: eps '1e-999999999' is beyond what float64 can hold"),
        (["--data", "embedded", "--eps", "1" * 2000], "is too long for a number"),
        (["--data", "embedded", "--eps", ""], "--eps: eps '' is neither a number"),
        (["--data", "", "--eps", EPS], "--data '': choose one of embedded"),
        (["--data", "embedded", "--eps", EPS, "--attack-steps", "10000000"], "--attack-steps must be at most 1000000"),
    ],
)
def test_what_makes_no_sense_is_said_in_a_sentence(network_file, capsys, args, told):
    code, _, said = called(capsys, "certify", network_file, *args)
    assert code == 2
    assert told in said
    assert said.count("\n") == 1


def test_images_of_another_size_are_refused(capsys, tmp_path):
    code, _, said = called(capsys, "certify", "cifar10-6c2f-local-b", "--data", "embedded", "--eps", EPS)
    assert code == 2
    assert "takes images of 3 x 32 x 32, those of embedded are 1 x 28 x 28" in said


def test_a_foreign_file_is_refused_by_name(capsys, tmp_path):
    path = tmp_path / "model.pt"
    torch.save({"weights": torch.ones(1)}, path)
    code, _, said = called(capsys, "certify", path, "--data", "embedded", "--eps", EPS)
    assert code == 2
    assert "model.pt" in said
    code, _, said = called(capsys, "verify", tmp_path / "rows.jsonl")
    assert code == 2
    assert "rows.json" in said


@pytest.mark.parametrize(("option", "told"), [("--eps", "--eps: eps ''"), ("--data", "--data ''")])
def test_an_empty_option_is_not_one_that_was_left_out(capsys, option, told):
    """As a script passes it whose variable is not set: never something else than what was asked for."""
    code, _, said = called(capsys, "certify", "mnist-4c3f-local-g", option, "", "--limit", 1)
    assert code == 2
    assert told in said


def test_a_run_folder_is_called_by_its_name_from_inside_too(network_file, tmp_path, capsys, monkeypatch):
    folder = tmp_path / "mine"
    folder.mkdir()
    shutil.copy(network_file, folder / "model.safetensors")
    monkeypatch.chdir(folder)
    options = ("--data", "embedded", "--eps", EPS, "--limit", 1, "--out", "rows.jsonl")
    assert called(capsys, "certify", ".", *options)[0] == 0
    assert read_about(Path("rows.jsonl"))[0].model == "mine"
    assert called(capsys, "verify", "rows.jsonl", "--model", ".")[0] == 0
    assert called(capsys, "verify", "rows.jsonl")[0] == 0  # rows in the folder of their run
    away = tmp_path / "away"
    away.mkdir()
    for name in ("rows.jsonl", "rows.json"):
        shutil.copy(folder / name, away / name)
    code, _, said = called(capsys, "verify", away / "rows.jsonl")
    assert code == 2
    assert "rows.jsonl is about 'mine': say where that is with --model" in said
    code, _, said = called(capsys, "verify", "nothing.jsonl")
    assert (code, said) == (2, "locallip: there is no nothing.jsonl\n")


def test_no_room_for_one_image_is_said_in_a_sentence(network_file, capsys, monkeypatch):
    def cramped(self, x, y, eps):
        raise NO_ROOM[1]

    monkeypatch.setattr(Certifier, "__call__", cramped)
    code, _, said = called(capsys, "certify", network_file, "--data", "embedded", "--eps", EPS, "--limit", 1)
    assert code == 3
    assert "too little memory: try a smaller --batch" in said


def test_rows_about_unknown_data_are_named(certified_rows, tmp_path, capsys):
    about = json.loads((certified_rows / "rows.json").read_text())
    (tmp_path / "rows.json").write_text(json.dumps({**about, "settings": {**about["settings"], "data": "numbers"}}))
    code, _, said = called(capsys, "verify", tmp_path / "rows.jsonl")
    assert code == 2
    assert "rows.json: there is no data set 'numbers'" in said


def test_the_same_weights_in_another_network_are_another_network(model, images, tmp_path):
    """An activation without weights of its own leaves no trace in the fingerprint of the weights."""
    other = ll.build_model("small", (1, 28, 28), 10, "maxmin")
    other.load_state_dict(model.state_dict())
    out = tmp_path / "rows.jsonl"
    certify_images(job(out, limit=4), model, images)
    with pytest.raises(WrongRows, match="another structure"):
        certify_images(job(out, limit=4, resume=True), other, images)
    with pytest.raises(WrongRows, match="another network"):
        verify_rows(out, other, images, sample=2)
    assert len(certify_images(job(out, limit=4, resume=True), model, images)[0]) == 4


def test_rows_of_another_version_are_not_continued(model, images, tmp_path):
    """Its certificates may have had a fault that was mended since."""
    out = tmp_path / "rows.jsonl"
    certify_images(job(out, limit=4), model, images)
    about = out.with_suffix(".json")
    values = json.loads(about.read_text())
    values["settings"]["environment"]["locallip"] = "0.0.1"
    about.write_text(json.dumps(values))
    with pytest.raises(WrongRows, match=r"locallip was '0\.0\.1'"):
        certify_images(job(out, limit=4, resume=True), model, images)
