"""The report: charts draw what they are given, runs are read or refused, and what the explorer shows holds."""

from __future__ import annotations

import base64
import csv
import io
import itertools
import json
import math
import re
import time
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import locallip as ll
from locallip import cli
from locallip.certify.prover import fingerprint
from locallip.data import ImageSet, load_images
from locallip.ops import Dense, Masked
from locallip.proofs import Job, certify_images
from locallip.proofs.rows import Row, WrongRows, append_rows
from locallip.proofs.settings import Settings, structure_of, write_about
from locallip.report import charts, steps
from locallip.report.build import page_of, write_report
from locallip.report.explore import GRID, Explorer, _verdict, chosen
from locallip.report.nearest import nearest
from locallip.report.proved import RADII, certificates
from locallip.report.runs import EXPLORED, Certified, Run, WrongRun, read_run
from locallip.training.recipe import find

EPS = "0.5"


class Tiny(nn.Sequential):
    """A small network on images of 1 x 8 x 8, with every kind of map the explorer draws."""

    def __init__(self) -> None:
        torch.manual_seed(3)
        super().__init__(nn.Conv2d(1, 4, 3, 2, 1), nn.ReLU(), nn.Flatten(), nn.Linear(64, 12), ll.MaxMin(), nn.Linear(12, 3))


def pictures(count: int = 40) -> ImageSet:
    numbers = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (count, 1, 8, 8), generator=numbers, dtype=torch.uint8)
    with torch.no_grad():
        labels = Tiny()(images.float() / 255).argmax(1)
    labels[::7] = (labels[::7] + 1) % 3  # some are wrong
    return ImageSet("embedded", "test", images, labels, ("one", "two", "three"))


@pytest.fixture(scope="module")
def explored() -> dict:
    return Explorer(Tiny().eval(), pictures(), EPS, "deterministic", "all").run(range(6), {})


def decoded(text: str, kind: type) -> np.ndarray:
    return np.frombuffer(base64.b64decode(text), kind)


def test_the_intervals_of_logits_hold_everything_that_is_found_in_the_ball(explored):
    model, images, network = Tiny().double(), pictures(), explored["network"]
    numbers = torch.Generator().manual_seed(1)
    for image in network["images"]:
        x = (images.images[image["index"]].float() / 255).double()
        for e, radius in enumerate(network["grid"]):
            delta = torch.randn(64, 1, 8, 8, generator=numbers, dtype=torch.float64)
            delta = radius * delta / delta.flatten(1).norm(dim=1).reshape(-1, 1, 1, 1)
            with torch.no_grad():
                logits = model(x + delta)
            lower, upper = torch.tensor(image["lower"][e]), torch.tensor(image["upper"][e])
            assert bool(((logits >= lower) & (logits <= upper)).all())
            if image["margin"][e] > 0:
                assert bool((logits.argmax(1) == image["label"]).all())


def test_an_attack_succeeds_beyond_the_certified_radius_and_where_it_is_said_to(explored):
    model, images = Tiny().double(), pictures()
    found = [image for image in explored["network"]["images"] if image["adversary"]]
    assert len(found) >= 3
    for image in found:
        assert image["attacked"] > (image["radius"] or 0.0)
        x = (images.images[image["index"]].float() / 255).double()
        code = torch.from_numpy(decoded(image["adversary"]["difference"], np.int8).copy()).reshape(1, 8, 8)
        difference = code.double() * image["adversary"]["scale"] / 127
        assert float(difference.norm()) == pytest.approx(image["attacked"], rel=0.02)
        with torch.no_grad():
            assert int(model((x + 1.02 * difference)[None]).argmax()) == image["adversary"]["class"] != image["label"]


def test_maps_add_up_to_the_units_that_vary(explored):
    network = explored["network"]
    assert [layer["map"] for layer in network["layers"]] == [[4, 4], [3, 4]]
    for image in network["images"]:
        assert all(a[0] <= b[0] for a, b in itertools.pairwise(image["varying"]))  # a larger ball lets more units change
        assert image["varying"][0][0] < image["varying"][-1][0]
        values = decoded(image["maps"], np.uint8).astype(float)
        first, second = values[: len(GRID) * 16].reshape(len(GRID), 16), values[len(GRID) * 16 :].reshape(len(GRID), 12)
        for e in range(len(GRID)):
            assert first[e].sum() / 255 * 4 == pytest.approx(image["varying"][e][0], abs=0.1)
            assert second[e].sum() / 255 == image["varying"][e][1]


def test_what_is_shown_is_the_image_and_its_verdict(explored):
    images = pictures()
    for image in explored["network"]["images"]:
        assert (decoded(image["pixels"], np.uint8) == images.images[image["index"]].numpy().ravel()).all()
        right = image["prediction"] == image["label"]
        assert (image["verdict"] == "MISCLASSIFIED") == (not right)
        if image["verdict"] == "CERTIFIED":
            assert image["margin"][GRID.index(1.0)] > 0
    assert {image["verdict"] for image in explored["network"]["images"]} > {"MISCLASSIFIED"}


def test_local_bounds_are_never_above_those_over_all_inputs(explored):
    over_all = explored["network"]["global_lipschitz"]
    for image in explored["network"]["images"]:
        for row in image["lipschitz"]:
            assert all(a <= b * (1 + 1e-6) + 1e-4 for a, b in zip(row, over_all, strict=True))


def test_verdicts_and_radii_of_certificates_come_first():
    model, images = Tiny().eval(), pictures()
    rows, *_ = certify_images(Job("tiny", EPS, radii=True, seed=1, limit=8), model, images)
    found = Explorer(model, images, EPS).run([0, 5], {row.index: row for row in rows})
    for image in found["network"]["images"]:
        row = rows[image["index"]]
        assert (image["verdict"], image["decided_by"], image["radius"]) == (row.verdict, row.decided_by, row.radius)


def test_a_radius_of_the_grid_says_so_and_a_searched_one_is_no_smaller(explored):
    tried = explored["network"]["images"][:3]
    searched = Explorer(Tiny().eval(), pictures(), EPS, "deterministic", "all", radii=True).run(range(3), {})["network"][
        "images"
    ]
    for coarse, fine in zip(tried, searched, strict=True):
        assert coarse["tried"] == (coarse["radius"] is not None)
        assert not fine["tried"]
        assert (fine["radius"] or 0.0) >= (coarse["radius"] or 0.0)
        assert fine["adversary"] is None or fine["attacked"] > fine["radius"]
    assert any((fine["radius"] or 0.0) > (coarse["radius"] or 0.0) for coarse, fine in zip(tried, searched, strict=True))


def test_a_radius_just_below_eps_certifies_nothing_at_eps():
    """What is shown has nine digits; a proof at eps needs all of them."""
    grid = torch.tensor(GRID, dtype=torch.float64) * (36 / 255)
    image = {"prediction": 1, "label": 1, "margin": [0.1] * 3 + [-0.1] * (len(GRID) - 3), "attacked": None}
    eps = float(grid[GRID.index(1.0)])
    assert _verdict(image, grid, None, math.nextafter(eps, 0.0))["verdict"] == "UNKNOWN"
    assert _verdict(image, grid, None, eps)["verdict"] == "CERTIFIED"
    assert _verdict({**image, "prediction": 0}, grid, None, eps)["verdict"] == "MISCLASSIFIED"


@pytest.mark.parametrize(("search", "known"), [(0.3, 0.2), (None, 0.2), (0.1, 0.1)])
def test_an_attack_of_the_certificates_is_known_to_the_explorer(search, known):
    """Its own search may miss at eps what the attack before the proof found there."""
    grid = torch.tensor(GRID, dtype=torch.float64) * 0.2
    image = {"prediction": 1, "label": 1, "margin": [0.1] + [-0.1] * (len(GRID) - 1), "attacked": search}
    row = Row(0, 1, 1, "ATTACKED", "attack", "deterministic", 0.0, 0.2, None, None, None, 0.0)
    assert _verdict(image, grid, row, None)["attacked"] == pytest.approx(known, abs=1e-5)
    open_row = replace(row, verdict="UNKNOWN", decided_by="nothing")
    assert _verdict(image, grid, open_row, None)["attacked"] == search


def test_no_attack_is_drawn_where_none_was_tried(explored):
    """The attack of certificates is known at eps alone: a line from 0 to there would cross what is proved."""
    proved = Row(0, 0, 0, "CERTIFIED", "c", "deterministic", 0.0, 0.5, 0.1, 1.0, 1.0, 0.0, 0.6)
    rows = [proved, replace(proved, index=1, verdict="ATTACKED", radius=0.2)]
    settings = Settings("m", "f", "mnist", "test", 2, "d", "0.5", "deterministic", 0.0, 20, 100, 4, 0, "cpu", {}, True)
    run = Run("mine", {}, (), {}, {}, "", (Certified(settings, rows),), {})
    figure = next(f for f in certificates([run]).figures if f.id == "over-eps")
    assert [line for line in figure.csv.splitlines() if "attacked" in line] == ["mine: attacked at eps,0.5,50.0"]


def test_an_estimate_is_not_called_certified_in_any_figure(explored):
    network = {**explored["network"], "guarantee": "estimate"}
    run = Run("mine", {}, (), {}, {}, "", (), {"network": network, "steps": {}})
    text = "".join(figure.csv + figure.svg for figure in certificates([run]).figures)
    assert "estimated (no proof), from 6 images" in text
    assert "certified" not in text


def test_half_of_the_chosen_images_are_the_first_ones_and_no_verdict_is_left_out():
    def row(index: int, verdict: str) -> Row:
        return Row(index, 0, 0, verdict, "attack", "deterministic", 0.0, 0.5, None, None, None, 0.0)

    verdicts = ["CERTIFIED"] * 50 + ["ATTACKED", "UNKNOWN", "MISCLASSIFIED"] * 2
    rows = [row(index, verdict) for index, verdict in enumerate(verdicts)]
    places = chosen(10, 100, rows)
    assert places[:5] == [0, 1, 2, 3, 4]
    assert {verdicts[place] for place in places} == set(verdicts)
    assert len(set(places)) == 10
    assert chosen(100, 100, rows) == list(range(56))
    assert chosen(3, 2, []) == [0, 1]


def test_the_nearest_adversary_of_a_linear_network_is_at_its_margin():
    model = nn.Linear(2, 2).double()
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[1.0, 0.0], [0.0, 1.0]]))
        model.bias.zero_()
    x, y = torch.tensor([[1.0, 0.0], [0.0, 3.0]]).double(), torch.tensor([0, 1])
    found = nearest(model, x, y, 10.0, 0)
    assert found.distance.tolist() == pytest.approx([1 / math.sqrt(2), 3 / math.sqrt(2)], rel=0.02)
    assert nearest(model, x, y, 0.1, 0).distance.tolist() == [math.inf, math.inf]


def test_steps_until_convergence_follow_the_gap_of_the_spectrum():
    counts = {}
    for gap in (0.5, 0.9):
        weight = torch.diag(torch.tensor([1.0, gap, *[0.1] * 30]))
        op, start = Masked(Dense(lambda w=weight: w), None, None), torch.ones(1, 32)
        counts[gap] = int(steps._power(op, start)), int(steps._lanczos(op, start))
    # The angle shrinks by gap^2 a step and moves by 1e-3 at last: log(1e-3) / log(gap^2), give or take the start.
    assert counts[0.5][0] == pytest.approx(math.log(1e-3) / math.log(0.25), abs=2)
    assert counts[0.9][0] == pytest.approx(math.log(1e-3 / 0.2) / math.log(0.81), abs=5)
    assert counts[0.9][1] < counts[0.9][0]
    assert all(lanczos <= 4 for _, lanczos in counts.values())  # three different values: three steps


def heights(svg: str) -> list[float]:
    return [float(found) for found in re.findall(r'<rect[^>]*height="([\d.]+)"', svg)]


def test_bars_are_as_high_as_their_values():
    svg = charts.bar_chart(["a", "b", "c"], [("x", [10.0, 20.0, math.nan])], "y", top=40)
    first, second = heights(svg)
    assert second == pytest.approx(2 * first, rel=1e-3)
    assert first == pytest.approx((charts.HEIGHT - charts.BOTTOM - charts.TOP) / 4, rel=1e-3)


def test_lines_pass_through_their_points_and_break_where_there_is_none():
    svg = charts.line_chart([charts.Line("l", [0, 1, 2, 3, 4], [0, 10, math.nan, 5, 10])], "x", "y", top=10)
    path = re.search(r'<path class="line s0"[^>]* d="([^"]+)"', svg)[1]
    assert path.count("M") == 2
    points = [tuple(map(float, p.split())) for p in re.split("[ML]", path)[1:]]
    bottom, top = charts.HEIGHT - charts.BOTTOM, points[1][1]
    assert points[0] == (charts.LEFT, bottom)
    assert points[2][1] == pytest.approx((bottom + top) / 2)
    assert points[3] == (charts.WIDTH - charts.RIGHT, top)


def test_names_in_charts_stay_text():
    name = '<script>alert("&")</script>'
    bars = charts.bar_chart([name], [(name, [1.0]), ("b", [2.0])], name)
    lines = charts.panels([(name, [charts.Line(name, [0, 1], [1, 2])])], name, name)
    for svg in (bars, lines, charts.shares([(name, [(name, 100.0)])])):
        assert "<script" not in svg
        assert "&lt;script&gt;" in svg


@pytest.mark.parametrize(
    ("low", "high", "log", "expected"),
    [(0, 100, False, [0, 20, 40, 60, 80, 100]), (0, 1.05, False, [0, 0.5, 1]), (1, 100, True, [1, 2, 5, 10, 20, 50, 100])],
)
def test_ticks_are_round(low, high, log, expected):
    found = charts.Axis(low, high, 0, 1, log).ticks()
    assert found == pytest.approx(expected) or (not log and set(map(float, expected)) <= {round(t, 9) for t in found})


def settings_of(folder: Path, model: nn.Module, images: ImageSet, **options: object) -> Path:
    out = folder / "rows.jsonl"
    certify_images(Job("run", EPS, seed=1, out=out, **options), model, images)
    return out


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory) -> Path:
    """A run of two epochs on the embedded digits with certificates of its images."""
    folder = tmp_path_factory.mktemp("runs") / "mine"
    out = str(folder)
    assert cli.main(["train", "demo", "--epochs", "2", "--images", "256", "--limit", "16", "--out", out]) == 0
    rows = str(folder / "rows.jsonl")
    assert cli.main(["certify", out, "--data", "embedded", "--limit", "24", "--out", rows, "--radius"]) == 0
    return folder


def test_the_command_writes_one_page_with_all_that_is_known(run_folder, tmp_path, capsys):
    out = tmp_path / "page.html"
    assert cli.main(["report", str(run_folder), "-o", str(out), "--explore", "4"]) == 0
    said = capsys.readouterr()
    assert "4 images to explore" in said.out
    text = out.read_text()
    for part in (
        "accuracies",
        "over-eps",
        "cascade",
        "certified-radii",
        "classes-0",
        "lipschitz",
        "loss",
        "layers-0",
        "steps-0",
    ):
        assert f'id="{part}"' in text or f"id={part}" in text, part
    assert (run_folder / EXPLORED).is_file()
    assert cli.main(["report", str(run_folder), "-o", str(out)]) == 0  # what was explored is kept
    assert "4 images to explore" in capsys.readouterr().out


def test_figures_hold_the_numbers_of_their_files(run_folder):
    run = read_run(str(run_folder))
    page = page_of([run])
    figures = {figure.id: list(csv.reader(io.StringIO(figure.csv))) for s in page.sections for figure in s.figures}
    rows = run.proofs.rows
    cascade = {check: float(share) for _, check, share in figures["cascade"][1:]}
    assert sum(cascade.values()) == pytest.approx(100)
    for check, share in cascade.items():
        assert share == pytest.approx(100 * sum(row.decided_by == check for row in rows) / len(rows))
    curve = [(float(r), float(share)) for name, r, share in figures["over-eps"][1:] if "certified (24" in name]
    assert len(curve) == RADII
    for radius, share in curve:
        proved = sum((row.radius or 0.0) >= radius > 0 or (radius == 0 and (row.radius or 0.0) > 0) for row in rows)
        assert share == pytest.approx(100 * proved / len(rows))
    metrics = run.metrics[-1]
    last = {name: float(y) for name, x, y in figures["lipschitz"][1:] if float(x) == metrics["epoch"]}
    assert last == {"global": metrics["global_bound"], "local": metrics["local_bound"]}
    accuracies = {kind: float(value) for name, kind, value in figures["accuracies"][1:] if name == run.name}
    assert accuracies["certified"] == run.evaluation["certified"]
    card = {label: value for label, value, _ in page.cards[0].figures}
    assert card["certified"] == f"{100 * sum(row.verdict == 'CERTIFIED' for row in rows) / len(rows):.1f} %"


def test_ten_thousand_certificates_make_a_page_in_seconds(run_folder, tmp_path):
    run = read_run(str(run_folder))
    numbers = np.random.default_rng(0)
    many = [
        replace(run.proofs.rows[0], index=n, label=n % 10, radius=float(r)) for n, r in enumerate(numbers.random(10_000))
    ]
    folder = tmp_path / "many"
    folder.mkdir()
    for name in ("config.json", "metrics.jsonl", "model.safetensors", "result.json"):
        (folder / name).write_bytes((run_folder / name).read_bytes())
    append_rows(folder / "rows.jsonl", many)
    settings = replace(run.proofs.settings, images=10_000)
    write_about(folder / "rows.jsonl", settings, None)
    begin = time.perf_counter()
    assert cli.main(["report", str(folder), "-o", str(tmp_path / "page.html")]) == 0
    assert time.perf_counter() - begin < 20
    assert (tmp_path / "page.html").stat().st_size < 5_000_000


def test_several_runs_stand_side_by_side(run_folder, tmp_path):
    runs = [read_run(str(run_folder)), read_run("mnist-4c3f-local-g")]
    assert runs[1].paper is not None
    page = page_of(runs)
    assert [card.name for card in page.cards] == ["mine", "mnist-4c3f-local-g"]
    assert "2 networks" in page.title
    figure = certificates(runs[1:]).figures[0]
    assert f'"mnist-4c3f-local-g, paper",PGD,{runs[1].paper.pgd}' in figure.csv
    assert figure.svg.count('<line class="paper"') == 3 + 1  # clean, PGD and estimate, and the legend


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["nowhere"], "is no run folder"),
        ([], "RUNS is missing: run folders, or names from `locallip models`"),
        (["{run}", "{run}"], "named twice"),
        (["{run}", "--out", "page.txt"], "ends in .html"),
        (["{run}", "--out", "{tmp}/absent/page.html"], "there is no folder"),
        (["{run}", "--explore", "-1"], "at least 0"),
        (["{tmp}"], "holds no config.json"),
        (["mnist-4c3f-local-b", "--rows", "{run}/rows.jsonl"], "which is none of those"),
    ],
)
def test_what_is_wrong_is_said_in_a_line(run_folder, tmp_path, capsys, args, said):
    words = [word.format(run=run_folder, tmp=tmp_path) for word in args]
    assert cli.main(["report", *words]) in (1, 2)
    error = capsys.readouterr().err
    assert said in error
    assert "Traceback" not in error


def test_rows_with_a_gap_are_refused(run_folder, tmp_path):
    folder = tmp_path / "gap"
    folder.mkdir()
    for name in ("config.json", "model.safetensors", "rows.json"):
        (folder / name).write_bytes((run_folder / name).read_bytes())
    lines = (run_folder / "rows.jsonl").read_text().splitlines(keepends=True)
    (folder / "rows.jsonl").write_text("".join(lines[:3] + lines[4:]))
    with pytest.raises(WrongRows, match="does not hold the rows"):
        read_run(str(folder))


def test_damaged_files_are_named(run_folder, tmp_path):
    folder = tmp_path / "damaged"
    folder.mkdir()
    (folder / "config.json").write_text("{")
    with pytest.raises(WrongRun, match=r"config\.json is damaged"):
        read_run(str(folder))
    (folder / "config.json").write_text(json.dumps(asdict(find("demo"))))
    (folder / EXPLORED).write_text("{}")
    with pytest.raises(WrongRun, match="explore again"):
        read_run(str(folder))


def test_what_was_explored_of_other_weights_is_left_out(run_folder, tmp_path):
    folder = tmp_path / "old"
    folder.mkdir()
    for name in ("config.json", "model.safetensors"):
        (folder / name).write_bytes((run_folder / name).read_bytes())
    values = {"fingerprint": "0" * 64, "network": {"images": []}, "steps": {}}
    (folder / EXPLORED).write_text(json.dumps(values))
    assert read_run(str(folder)).explored == {}
    model = ll.load_model(folder)
    (folder / EXPLORED).write_text(json.dumps(values | {"fingerprint": fingerprint(model)}))
    assert read_run(str(folder)).explored == {}  # from before a structure was noted
    fitting = {"fingerprint": fingerprint(model), "structure": structure_of(model)}
    (folder / EXPLORED).write_text(json.dumps(values | fitting))
    assert read_run(str(folder)).explored["steps"] == {}


def test_what_was_measured_with_other_weights_is_left_out(run_folder, tmp_path):
    """A better network copied into the folder of a run has not reached what that run reached."""
    folder = tmp_path / "copied"
    folder.mkdir()
    for name in ("config.json", "metrics.jsonl", "model.safetensors", "result.json"):
        (folder / name).write_bytes((run_folder / name).read_bytes())
    assert read_run(str(folder)).evaluation["certified"] is not None
    about = {"architecture": "small", "activation": "relu", "input_shape": [1, 28, 28], "classes": 10}
    ll.save_model(folder / "model.safetensors", ll.build_model("small", (1, 28, 28), 10, "relu"), about)
    assert read_run(str(folder)).evaluation == {}


def test_a_run_of_which_nothing_is_known_makes_no_page(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(asdict(find("demo"))))
    with pytest.raises(WrongRun, match="nothing is known"):
        write_report([read_run(str(tmp_path))], tmp_path / "page.html")


def test_the_embedded_images_can_be_explored_without_any_file():
    assert load_images("embedded", "test").shape == (1, 28, 28)
