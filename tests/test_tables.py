"""The tables: every figure of the paper is there, results land beside their row, and a bad file is named."""

from __future__ import annotations

import copy
import json
import re
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from locallip import documents, listing, paper, tables
from locallip.proofs import WrongRows
from locallip.results import WrongResult, read_result
from locallip.training.recipe import find, names

BEGIN, END = (marker.format("results") for marker in (documents.BEGIN, documents.END))
RESULT: dict[str, Any] = {
    "about": {"command": "locallip train", "hardware": "One GPU", "seed": 0, "wall_seconds": 500.0},
    "recipe": asdict(find("cifar10-6c2f-local-b")),
    "training": {"seconds": 462.0, "epochs": 800, "seconds_per_epoch": 0.5775, "peak_memory_gb": 14.25, "validation": None},
    "evaluation": {
        "split": "test",
        "images": 10_000,
        "eps": "36/255",
        "clean": 71.23,
        "pgd": 65.17,
        "pgd_steps": 100,
        "estimate": 54.91,
        "power_steps": 200,
        "certified": 54.72,
        "guarantee": "high_probability",
        "failure_prob": 1e-9,
        "global_certified": 51.0,
        "global_lipschitz": 7.94,
        "local_lipschitz": 6.53,
    },
    "model": {"sha256": "0" * 64, "parameters": 2_250_000, "dtype": "float32"},
}


def written(folder: Path, file: str = "run.json", **changes: dict[str, Any]) -> Path:
    """A result file with `changes` by section."""
    values = copy.deepcopy(RESULT)
    for section, fields in changes.items():
        values[section].update(fields)
    folder.mkdir(exist_ok=True, parents=True)
    (folder / file).write_text(json.dumps(values))
    return folder / file


def cells(text: str, section: str, run: str) -> list[list[str]]:
    """The rows of a section whose run begins with this recipe's name, as cells."""
    body = text.split(f"## {section}", 1)[1].split("\n## ", 1)[0]
    rows = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in body.splitlines() if line.startswith("|")]
    return [row for row in rows if any(re.match(f"`{re.escape(run)}`", cell) for cell in row)]


def test_without_results_the_papers_figures_stand_beside_dashes(tmp_path: Path):
    text = tables.table(tmp_path)
    for row in paper.ROBUST:
        figures = f"| {row.method} | {row.network} | {row.clean:.1f} | {row.pgd:.1f} | {row.certified:.1f} |"
        assert figures in text
    (row,) = cells(text, "Certified training", "cifar10-6c2f-local-b")
    assert row[:5] == ["Local-Lip-B", "6C2F", "70.7", "64.8", "54.3"]
    assert row[6:] == ["—"] * 7
    assert "| CIFAR-10 | 6C2F | Local-Lip | 69.8 | `cifar10-6c2f-local-b` | — | — | — |" in text
    assert "Other runs" not in text


def test_every_row_of_a_table_has_as_many_cells_as_its_head(tmp_path: Path):
    written(tmp_path)
    width = None
    for line in tables.table(tmp_path).splitlines():
        if not line.startswith("|"):
            width = None
            continue
        count = len(re.findall(r"(?<!\\)\|", line))
        assert width in (None, count), line
        width = count


def test_a_result_stands_beside_its_row_in_every_table_that_has_it(tmp_path: Path):
    written(tmp_path / "runs")
    (tmp_path / "speed.json").write_text('{"not": "a run"}')  # beside the folder `runs`, so none of our business
    text = tables.table(tmp_path)
    ours = ["`cifar10-6c2f-local-b`", "71.23", "65.17", "54.91", "54.72", "7.7 min", "800", "One GPU"]
    for section in ("Certified training", "Where power iteration starts"):
        (row,) = cells(text, section, "cifar10-6c2f-local-b")
        assert row[5:] == ours
    (row,) = cells(text, "Training time", "cifar10-6c2f-local-b")
    assert row == ["CIFAR-10", "6C2F", "Local-Lip", "69.8", ours[0], "0.578", "14.2 GB", "One GPU"]
    (row,) = cells(text, "Adversarial training", "cifar10-6c2f-local-b")
    assert row[6:] == [ours[0], "7.94", "6.53", *ours[1:5]]


def test_seeds_and_the_fast_run_are_rows_of_their_own_below(tmp_path: Path):
    written(tmp_path, "c.json", recipe={"name": "fast-cifar10-6c2f-local-b"}, evaluation={"clean": 70.0})
    written(tmp_path, "b.json", recipe={"seed": 1}, evaluation={"clean": 70.5})
    written(tmp_path, "a.json")
    lines = tables.table(tmp_path).splitlines()
    first = next(i for i, line in enumerate(lines) if line.startswith("| Local-Lip-B | 6C2F"))
    assert "| `cifar10-6c2f-local-b` | 71.23 |" in lines[first]
    assert lines[first + 1].startswith("|  |  |  |  |  | `cifar10-6c2f-local-b`, seed 1 | 70.50 |")
    assert lines[first + 2].startswith("|  |  |  |  |  | `fast-cifar10-6c2f-local-b`")
    assert "| 70.00 |" in lines[first + 2]


def test_a_fast_run_without_the_full_one_leaves_that_visibly_empty(tmp_path: Path):
    written(tmp_path, recipe={"name": "fast-cifar10-6c2f-local-b"})
    (full,) = cells(tables.table(tmp_path), "Certified training", "cifar10-6c2f-local-b")
    assert full[6:] == ["—"] * 7


def test_a_run_says_where_it_is_other_than_its_recipe_or_the_protocol(tmp_path: Path):
    changed = {"split": "validation", "images": 500, "pgd_steps": 20, "guarantee": "deterministic", "eps": "0.141"}
    written(tmp_path, recipe={"epochs": 60, "eps": "0.141"}, evaluation=changed)
    (row,) = cells(tables.table(tmp_path), "Certified training", "cifar10-6c2f-local-b")
    assert row[5] == "`cifar10-6c2f-local-b`, eps = 0.141, epochs = 60, 500 validation images"
    assert row[7] == "65.17 (20 steps)"
    assert row[9] == "54.72 (deterministic)"


def test_a_greater_chance_of_failure_is_named(tmp_path: Path):
    written(tmp_path, evaluation={"failure_prob": 0.5})
    (row,) = cells(tables.table(tmp_path), "Certified training", "cifar10-6c2f-local-b")
    assert row[9] == "54.72 (failure probability 0.5 an image)"


@pytest.mark.parametrize(
    ("evaluation", "told"),
    [
        ({"eps": "2"}, "evaluation.eps = '2' is not recipe.eps = '36/255'"),
        ({"first": {"images": 200, "clean": 1, "certified": 300}}, "certified <= clean <= images"),
        ({"first": {"images": 200, "clean": True, "certified": 0}}, "in whole numbers"),
        ({"first": 3}, "in whole numbers"),
    ],
)
def test_an_evaluation_that_contradicts_its_run_is_refused(tmp_path: Path, evaluation: dict, told: str):
    written(tmp_path, evaluation=evaluation)
    with pytest.raises(WrongResult, match=re.escape(told)):
        tables.table(tmp_path)


def test_what_a_run_left_out_is_a_dash(tmp_path: Path):
    nothing = dict.fromkeys(
        ("pgd", "pgd_steps", "estimate", "certified", "guarantee", "global_lipschitz", "local_lipschitz")
    )
    written(tmp_path, training={"seconds_per_epoch": None, "seconds": 59.6, "peak_memory_gb": None}, evaluation=nothing)
    text = tables.table(tmp_path)
    (row,) = cells(text, "Certified training", "cifar10-6c2f-local-b")
    assert row[6:11] == ["71.23", "—", "—", "—", "60 s"]
    assert cells(text, "Training time", "cifar10-6c2f-local-b")[0][5:7] == ["—", "—"]


def test_a_run_of_no_row_is_shown_all_the_same(tmp_path: Path):
    written(tmp_path, recipe={"name": "mine", "data": "embedded", "eps": "0.5"}, evaluation={"images": 500, "eps": "0.5"})
    (row,) = cells(tables.table(tmp_path), "Other runs", "mine")
    assert row[:3] == ["embedded, eps = 0.5", "`mine`, 500 test images", "71.23"]


@pytest.mark.parametrize("content", ["", "{", "[]", "3", '{"about": {}}', '{"settings": {"batch": 64}}', "\x00"])
def test_a_damaged_or_foreign_file_is_named(tmp_path: Path, content: str):
    written(tmp_path, "good.json")
    (tmp_path / "odd.json").write_text(content)
    with pytest.raises(WrongResult, match=r"odd\.json"):
        tables.table(tmp_path)


@pytest.mark.parametrize(
    ("section", "field", "value"),
    [
        ("evaluation", "clean", None),
        ("evaluation", "clean", 101),
        ("evaluation", "clean", float("nan")),
        ("evaluation", "certified", "54.3"),
        ("evaluation", "certified", True),
        ("evaluation", "images", -1),
        ("evaluation", "images", 0),
        ("evaluation", "global_certified", "99"),
        ("evaluation", "proof_seed", -1),
        ("evaluation", "proof_seed", 1.5),
        ("evaluation", "proof_seed", 2**64),
        ("evaluation", "global_certified", float("nan")),
        ("training", "peak_memory_gb", "much"),
        ("training", "peak_memory_gb", -3),
        ("training", "others_gb", []),
        ("recipe", "seed", 0.5),
        ("about", "hardware", "GPU \ud800"),
        ("evaluation", "images", 99.5),
        ("training", "seconds", None),
        ("recipe", "name", ""),
        ("recipe", "seed", "0"),
        ("about", "hardware", 7),
        ("model", "sha256", None),
    ],
)
def test_a_wrong_value_is_named_with_its_file(tmp_path: Path, section: str, field: str, value: object):
    path = written(tmp_path, **{section: {field: value}})
    with pytest.raises(WrongResult, match=rf"run\.json: {section}\.{field} = "):
        read_result(path)


@pytest.mark.parametrize(
    "wrong",
    [
        {"certified": 65.18},
        {"pgd": 71.24},
        {"certified": 80.0, "pgd": None},
        {"estimate": 65.18},
        {"global_certified": 54.73},
    ],
    ids=str,
)
def test_figures_that_contradict_each_other_are_refused(tmp_path: Path, wrong: dict[str, Any]):
    with pytest.raises(WrongResult, match=r"run\.json: evaluation\.\w+ = [\d.]+ is above evaluation"):
        read_result(written(tmp_path, evaluation=wrong))


@pytest.mark.parametrize(("figure", "needed"), [("pgd", "pgd_steps"), ("certified", "guarantee")])
def test_a_figure_without_what_it_means_is_refused(tmp_path: Path, figure: str, needed: str):
    with pytest.raises(WrongResult, match=rf"run\.json: evaluation\.{needed} is null, and {figure} = "):
        read_result(written(tmp_path, evaluation={needed: None}))


def test_a_run_from_before_a_field_existed_means_its_default(tmp_path: Path):
    shipped = asdict(find("fast-cifar10-6c2f-local-b"))
    assert shipped.pop("intervals") is False
    written(tmp_path, recipe=shipped)
    assert "`fast-cifar10-6c2f-local-b`, intervals = True" in tables.readme_table(tmp_path)


def test_a_field_that_is_missing_is_named(tmp_path: Path):
    values = copy.deepcopy(RESULT)
    del values["evaluation"]["estimate"]
    (tmp_path / "run.json").write_text(json.dumps(values))
    with pytest.raises(WrongResult, match=r"run\.json: evaluation\.estimate is missing"):
        tables.table(tmp_path)


def test_a_folder_that_is_not_there_is_an_error(tmp_path: Path):
    with pytest.raises(WrongResult, match=r"there is no folder .*absent"):
        tables.table(tmp_path / "absent")


def test_the_short_table_has_only_rows_with_a_result_and_the_papers_figures_beside_them(tmp_path: Path):
    written(
        tmp_path,
        "fast.json",
        recipe={"name": "fast-cifar10-6c2f-local-b"},
        evaluation={"certified": None, "guarantee": None},
    )
    written(tmp_path, "seed.json", recipe={"seed": 1})
    written(tmp_path, "full.json")
    written(tmp_path, "mine.json", recipe={"name": "mine"})
    head, _, *rows = [
        [cell.strip() for cell in line[1:-1].split(" | ")] for line in tables.readme_table(tmp_path).splitlines()
    ]
    assert all(len(row) == len(head) for row in rows)
    left = ["CIFAR-10, 36/255", "6C2F, Local-Lip-B", "70.7 / 64.8 / 54.3"]
    assert rows[0] == [*left, "71.23 / 65.17 / 54.91", "54.72", "7.7 min, One GPU", "`cifar10-6c2f-local-b`"]
    assert rows[1][:3] == ["", "", ""]
    assert rows[1][-1] == "`cifar10-6c2f-local-b`, seed 1"
    assert rows[2][-1].startswith("`fast-cifar10-6c2f-local-b`")
    assert rows[2][4] == "—"
    assert len(rows) == 3  # the row stands in three tables of the paper, and here once; `mine` in none


def test_our_row_for_a_weight_of_the_sparsity_loss_stands_beside_the_papers(tmp_path: Path):
    """That for 0.01 has the recipe of another table in the paper, and a schedule of its own here."""
    name = "fast-tiny-imagenet-8c2f-local-b-sparsity-0.01"
    bounds = {"global_lipschitz": 32.36, "local_lipschitz": 26.37, "global_certified": 19.04}
    written(tmp_path, recipe={"name": name, "data": "tiny-imagenet"}, evaluation=bounds)
    (row,) = [line for line in tables.readme_table(tmp_path).splitlines() if name in line]
    assert row.startswith(
        "| Tiny-ImageNet, 36/255 | 8C2F, Sparsity 0.01 | 30.8 / 28.4 / 20.7 | 71.23 / 65.17 / 54.91 | 54.72 |"
    )
    (row,) = [line for line in tables.reproducing(tmp_path).splitlines() if line.startswith("| Sparsity 0.01 |")]
    assert row == f"| Sparsity 0.01 | 54.72 | 19.04 | 32.4 | 26.4 | `{name}`{row.rpartition('`')[2]}"


@pytest.mark.parametrize(("others", "shared"), [(0.7, False), (30.0, True), (None, False)])
def test_a_time_measured_beside_other_work_says_so(tmp_path: Path, others: object, shared: bool):
    written(tmp_path, training={"others_gb": others})
    for text in (tables.table(tmp_path), tables.readme_table(tmp_path)):
        assert ("One GPU, shared with other work" in text) == shared


def test_a_text_of_a_result_file_stays_inside_its_cell(tmp_path: Path):
    written(tmp_path, about={"hardware": "One\n| GPU <img src=x>"})
    for text in (tables.table(tmp_path), tables.readme_table(tmp_path)):
        (line,) = [line for line in text.splitlines() if "71.23" in line][:1]
        assert "One \\| GPU &lt;img src=x>" in line


def test_the_short_table_without_results_says_so(tmp_path: Path):
    assert "|" not in tables.readme_table(tmp_path)


def test_a_document_is_filled_between_its_markers_and_nowhere_else(tmp_path: Path):
    written(tmp_path / "results")
    document = tmp_path / "PAGE.md"
    document.write_text(f"before\n\n{BEGIN}\nold\n{END}\n\nbehind\n")
    for _ in range(2):  # the second time changes nothing
        assert documents.main([str(document)]) == 0
        table = tables.readme_table(tmp_path / "results")
        assert document.read_text() == f"before\n\n{BEGIN}\n{table}\n{END}\n\nbehind\n"
    assert documents.main([str(document), str(tmp_path)]) == 0
    assert "No row" in document.read_text()


@pytest.mark.parametrize("text", ["", "{0}\n", "{1}\n{0}\n", "{0}\n{1}\n{0}\n{1}\n"])
def test_a_document_without_its_two_markers_is_left_alone(tmp_path: Path, capsys, text: str):
    document, content = tmp_path / "PAGE.md", text.format(BEGIN, END)
    document.write_text(content)
    (tmp_path / "results").mkdir()
    assert documents.main([str(document)]) == 1
    assert "PAGE.md: there must be one" in capsys.readouterr().err
    assert document.read_text() == content


@pytest.mark.parametrize(("args", "code"), [([], 2), (["--help"], 2), (["a", "b", "c"], 2), (["absent.md"], 1)])
def test_a_wrong_call_of_the_rewriter_is_explained(tmp_path: Path, capsys, monkeypatch, args: list[str], code: int):
    monkeypatch.chdir(tmp_path)
    assert documents.main(args) == code
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_the_list_of_recipes_has_one_aligned_line_each():
    lines = listing.recipe_list().splitlines()
    assert [line.split()[0] for line in lines] == names()
    assert len({line.index("eps ") for line in lines}) == 1
    (line,) = [line for line in lines if line.startswith("mnist-4c3f-bcp ")]
    assert line.endswith(find("mnist-4c3f-bcp").about)


SETTINGS: dict[str, Any] = {
    "model": "mine", "fingerprint": "f" * 64, "data": "mnist", "split": "test", "images": 50, "data_sha256": "0" * 64,
    "eps": "1.58", "guarantee": "deterministic", "failure_prob": 0.0, "attack_steps": 20, "power_steps": 100,
    "batch_size": 32, "seed": 1, "hardware": "One GPU", "environment": {"date": "2026-01-01"}, "method": "local",
}  # fmt: skip
SUMMARY = {"images": 50, "correct": 96.0, "certified": 54.0}
RUN = {"images": 50, "seconds": 7.4, "others_gb": 0.0}


def certificate(folder: Path, file: str, summary: Any = SUMMARY, run: Any = RUN, **changes: Any) -> Path:
    """What stands beside the rows of `locallip certify`."""
    (folder / "certificates").mkdir(parents=True, exist_ok=True)
    path = folder / "certificates" / file
    path.write_text(json.dumps({"settings": {**SETTINGS, **changes}, "summary": summary, "run": run}))
    return path


def test_certificates_of_one_network_stand_side_by_side(tmp_path: Path):
    certificate(tmp_path, "a.json")
    certificate(tmp_path, "b.json", {**SUMMARY, "certified": 58.0}, {**RUN, "others_gb": 40.0}, method="auto")
    certificate(tmp_path, "c.json", {**SUMMARY, "certified": 56.0}, guarantee="estimate")
    certificate(tmp_path, "d.json", {**SUMMARY, "certified": 1.0}, guarantee="estimate", environment={"date": "2025-01-01"})
    certificate(tmp_path, "e.json", None, guarantee="high_probability", failure_prob=1e-9)  # a run that has not ended
    certificate(tmp_path, "f.json", eps="1/2")
    first, second = tables.certificates_table(tmp_path).splitlines()[2:]
    cells = ["`mine`", "1.58", "50 of mnist, test", "96.00", "56.00 (7 s)", "—", "54.00 (7 s)", "—", "58.00 (7 s, shared)"]
    assert first.strip("| ").split(" | ") == [*cells, "One GPU"]
    assert second.startswith("| `mine` | 1/2 |")
    assert "54.00 (7 s)" in tables.table(tmp_path)
    assert tables.certificates_table(tmp_path / "nothing") is None


@pytest.mark.parametrize(
    "wrong", [{"run": {"seconds": "long"}}, {"run": 3}, {"summary": {"images": 50}}, {"guarantee": "hope"}], ids=str
)
def test_a_damaged_certificate_is_named(tmp_path: Path, wrong: dict[str, Any]):
    certificate(tmp_path, "bad.json", **wrong)
    with pytest.raises(WrongRows, match=r"bad\.json"):
        tables.certificates_table(tmp_path)


def test_audits_stand_below_each_other_and_a_damaged_one_is_named(tmp_path: Path):
    assert tables.audits_table(tmp_path) is None
    path = tmp_path / "audits" / "a.json"
    path.parent.mkdir()
    settings = {"model": "mine", "images": 300, "data": "mnist", "split": "test", "certificates": 7, "hardware": "One GPU"}
    report = {"tried": 100_000, "broken": 2, "closest_lead": 0.25, "nearest_boundary": None}
    values = {"settings": settings | {"radii": [0.5, 1.25], "guarantee": "high_probability"}, "report": report}
    path.write_text(json.dumps(values))
    cells = ["`mine`", "300 of mnist, test", "7 (high probability)", "0.5 to 1.2", "100,000", "2", "25 %", "—", "One GPU"]
    assert tables.audits_table(tmp_path).splitlines()[2].strip("| ").split(" | ") == cells
    path.write_text(json.dumps({"settings": settings, "report": report}))  # without radii
    with pytest.raises(ValueError, match=r"a\.json is no report"):
        tables.audits_table(tmp_path)


def test_both_parts_of_a_document_are_filled(tmp_path: Path):
    certificate(tmp_path / "results", "a.json")
    written(tmp_path / "results" / "runs")
    begin, end = (marker.format("certificates") for marker in (documents.BEGIN, documents.END))
    document = tmp_path / "PAGE.md"
    document.write_text(f"{BEGIN}\n{END}\nbetween\n{begin}\nold\n{end}\n")
    assert documents.main([str(document)]) == 0
    text = document.read_text()
    assert f"{begin}\n{tables.certificates_table(tmp_path / 'results')}\n{end}\n" in text
    assert "between" in text
    assert "old" not in text


def test_the_paper_row_by_row_has_a_command_for_every_recipe(tmp_path: Path):
    written(tmp_path)
    text = tables.reproducing(tmp_path)
    rows = (*paper.ROBUST, *paper.INITIALISATION, *paper.SPARSITY, *paper.ADVERSARIAL)
    assert all(f"`locallip train {row.recipe}`" in text for row in rows if row.recipe)
    assert text.count("| no recipe |") == sum(row.recipe is None for row in rows)
    found = [line.strip("| ").split(" | ") for line in text.splitlines() if "`locallip train cifar10-6c2f-local-b`" in line]
    ours = ["`locallip train cifar10-6c2f-local-b`", "71.23 / 65.17 / 54.91", "54.72", "7.7 min (800 epochs), One GPU"]
    assert [row[2:] for row in found] == [ours] * 3  # it stands in three tables of the paper
    assert found[0][:2] == ["Local-Lip-B, 6C2F", "70.7 / 64.8 / 54.3"]
    (waiting,) = [line for line in text.splitlines() if "`locallip train mnist-4c3f-bcp`" in line and "not run" in line]
    assert waiting.endswith("| — | — | not run (300 epochs) |")
    assert "| CIFAR-10 | 6C2F | Local-Lip | 69.8 | `cifar10-6c2f-local-b` | 0.578 |" in text


def test_the_paper_row_by_row_says_where_a_run_is_another(tmp_path: Path):
    written(tmp_path, recipe={"epochs": 60, "seed": 3}, evaluation={"images": 500})
    text = tables.reproducing(tmp_path)
    assert "| `locallip train cifar10-6c2f-local-b --seed 3`, epochs = 60, 500 test images |" in text


def test_parts_of_the_bound_stand_below_each_other_and_a_damaged_file_is_named(tmp_path: Path):
    assert tables.tightness_tables(tmp_path) == "Nothing has been measured yet."
    row = {"row": "all parts", "certified": 55.44, "margin": 1.2591, "lipschitz": 11.159, "seconds": 7.26}
    network = {"network": "mine", "eps": "1/2", "clean": 68.8, "rows": [row]}
    values = {"about": {"hardware": "One GPU"}, "settings": {"images": 500, "layers": "all"}, "networks": [network]}
    path = tmp_path / "tightness-cuda.json"
    path.write_text(json.dumps(values))
    title, _, head, _, line = tables.tightness_tables(tmp_path).splitlines()
    assert title == "**mine**, eps 1/2, 500 images (68.8 % right), local norms of all layers, One GPU"
    assert head == "| Bound | Certified, % | Mean margin | Mean local bound | Seconds |"
    assert line == "| all parts | 55.4 | 1.259 | 11.16 | 7.3 |"
    for broken in ("[]", "{", json.dumps(values | {"networks": [{**network, "clean": "most"}]})):
        path.write_text(broken)
        with pytest.raises(WrongResult, match=r"tightness-cuda\.json is not a result"):
            tables.tightness_tables(tmp_path)


def test_lipschitz_bounds_are_shown_by_network_and_radius(tmp_path):
    assert tables.lipschitz_tables(tmp_path) == "Nothing has been measured yet."
    row = {"network": "one", "images": 9, "bound": "product", "boxes": "sharpened", "mean": 12.345, "seconds": 2.25}
    values = {"about": {"hardware": "a CPU"}, "threads": 1, "rows": [{**row, "eps": "0.3"}, {**row, "eps": "1", "mean": 99}]}
    (tmp_path / "lipschitz_bounds-here.json").write_text(json.dumps(values))
    shown = tables.lipschitz_tables(tmp_path)
    assert shown.startswith("**one**, eps 0.3, 9 images, a CPU")
    assert "| product | sharpened | 12.3 | 2.25 |" in shown
    assert "**one**, eps 1, 9 images, a CPU" in shown
    (tmp_path / "lipschitz_bounds-here.json").write_text(json.dumps({**values, "rows": [{"network": "one"}]}))
    with pytest.raises(WrongResult, match="not a result of benchmarks/lipschitz_bounds"):
        tables.lipschitz_tables(tmp_path)


def test_bounds_are_shown_by_network_with_what_was_measured(tmp_path):
    assert tables.bounds_tables(tmp_path) == "Nothing has been measured yet."
    rows = [
        {"network": "one", "images": 9, "bound": "lines", "by": "locallip", "median": 0.12345, "seconds": 2.25},
        {"network": "one", "images": 9, "eps": "0.3", "bound": "auto", "by": "locallip", "certified": 0.5, "seconds": 1.0},
    ]
    values = {"about": {"hardware": "a CPU"}, "threads": 1, "rows": rows}
    (tmp_path / "bounds-here.json").write_text(json.dumps(values))
    shown = tables.bounds_tables(tmp_path)
    assert shown.startswith("**one**, 9 images, a CPU")
    assert "| lines | locallip | 0.123 | 2.25 |" in shown
    assert "| Bound at eps 0.3 |" in shown
    assert "| auto | locallip | 50.0 | 1.00 |" in shown
    (tmp_path / "bounds-here.json").write_text(json.dumps({**values, "rows": [{"network": "one"}]}))
    with pytest.raises(WrongResult, match="not a result of benchmarks/bounds"):
        tables.bounds_tables(tmp_path)
