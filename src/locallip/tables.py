"""The paper's tables beside our results, in Markdown."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from locallip import paper
from locallip.audit.table import HEAD as AUDIT_HEAD
from locallip.audit.table import audit_rows
from locallip.balls import L2, said
from locallip.norms import Guarantee
from locallip.proofs.settings import Settings, radius_of
from locallip.proofs.table import FAILURE_PROB, HEAD, certificate_rows, read_certificates
from locallip.results import Result, WrongResult, read_results
from locallip.training import recipe as recipes

EMPTY = "—"
FAST = "fast-"

NOTE = """Accuracies are per cent of the test images, ours after the last epoch. The paper's certified accuracy of Lipschitz
methods rests on power iteration, which approaches a norm from below, so it is an estimate. Ours is given both ways: as that
estimate, and certified with norms that hold with high probability. A run beginning with `fast-` is our own schedule for the
row above it. An em dash stands where nothing has been run or printed."""

_PAPER = ("Paper: clean", "Paper: PGD", "Paper: certified (estimate)")
_OURS = ("Run", "Clean", "PGD-100", "Estimate", "Certified (high probability)", "Training time", "Epochs", "Hardware")
_IN_PAPER, _IN_OURS = "Paper: clean / PGD / certified (estimate)", "Ours: clean / PGD-100 / estimate by power iteration"

#: Where there is no file to show.
NOTHING = "Nothing has been measured yet."


def table(results: Path) -> str:
    """The paper's tables beside ours in Markdown, from the result files in `results` (or its folder `runs`)."""
    runs = read_results(results)
    sections = [
        ("Certified training (the paper's Table 2)", _robust(runs)),
        ("Where power iteration starts (CIFAR-10, 6C2F)", _accuracies(paper.INITIALISATION, runs)),
        ("Weight of the sparsity loss (Tiny-ImageNet, 8C2F)", _accuracies(paper.SPARSITY, runs)),
        ("Training time", _times(runs)),
        ("Adversarial training (CIFAR-10, 6C2F)", _adversarial(runs)),
    ]
    certificates = certificates_table(results)
    if certificates is not None:
        sections.append(("Certificates of whole test sets", certificates))
    others = [run for run in runs if run.name.removeprefix(FAST) not in _in_tables()]
    if others:
        sections.append(("Other runs", markdown(("Data", *_OURS), [[_shown(run), *_ours(run)] for run in others])))
    return "\n\n".join([NOTE, *(f"## {title}\n\n{body}" for title, body in sections)]) + "\n"


def readme_table(results: Path) -> str:
    """A short table in Markdown: the paper's rows that have a result, each once, with our figures beside the paper's."""
    runs = read_results(results)
    lines: dict[tuple[str, str | None], list[list[str]]] = {}  # as some stand in several of the paper's tables
    for row in (*paper.ROBUST, *paper.INITIALISATION, *paper.SPARSITY, *paper.ADVERSARIAL):
        if row.recipe is None or (row.recipe, row.fast) in lines:
            continue
        title, eps = paper.DATA[row.data]
        figures = " / ".join(_printed(value) for value in (row.clean, row.pgd, row.certified))
        left = [f"{title}, {eps}", f"{row.network}, {row.method}", figures]
        done = [run for run in _runs_of(row.recipe, runs, row.fast) if isinstance(run, Result)]
        lines[row.recipe, row.fast] = _beside(left, [_briefly(run) for run in done])
    head = ("Data, eps", "Network", _IN_PAPER, _IN_OURS, "Certified", "Training", "Run")
    found = [line for beside in lines.values() for line in beside]
    return markdown(head, found) if found else "No row has been run yet."


def certificates_table(results: Path) -> str | None:
    """Certified accuracy by guarantee, from what `locallip certify` wrote to the folder `certificates` of `results`."""
    lines = certificate_rows(read_certificates(results / "certificates"))
    return markdown(HEAD, lines) if lines else None


def audits_table(results: Path) -> str | None:
    """What was tried on certificates, from what `locallip audit` wrote to the folder `audits` of `results`."""
    lines = audit_rows(results / "audits")
    return markdown(AUDIT_HEAD, lines) if lines else None


def reproducing(results: Path) -> str:
    """The paper row by row in Markdown: the command, the paper's figures, ours and the time."""
    runs = read_results(results)
    sections = [
        (f"Table 2: {title}, eps = {eps}", _commands([row for row in paper.ROBUST if row.data == data], runs))
        for data, (title, eps) in paper.DATA.items()
    ]
    sections += [
        ("Where power iteration starts: CIFAR-10, 6C2F", _commands(paper.INITIALISATION, runs)),
        ("Weight of the sparsity loss: Tiny-ImageNet, 8C2F", _commands(paper.SPARSITY, runs)),
        ("What that weight does to the bounds", _weights(runs)),
        ("Adversarial training: CIFAR-10, 6C2F", _commands(paper.ADVERSARIAL, runs)),
        ("Its Lipschitz bounds", _lipschitz(runs)),
        ("Training time of an epoch", _times(runs)),
    ]
    return "\n\n".join(f"### {title}\n\n{body}" for title, body in sections)


def _commands(rows: Iterable[paper.Row], runs: Sequence[Result]) -> str:
    """A row of the paper with the command that stands for it, and ours below each other."""
    lines: list[list[str]] = []
    for row in rows:
        left = [f"{row.method}, {row.network}", " / ".join(_printed(value) for value in (row.clean, row.pgd, row.certified))]
        lines += _beside(left, [_commanded(run) for run in _runs_of(row.recipe, runs, row.fast)])
    return markdown(("Row", _IN_PAPER, "Command", _IN_OURS, "Certified", "Training time, hardware"), lines)


def _commanded(run: Result | str) -> list[str]:
    """Our cells of `_commands`; whatever makes a run another than its recipe stands behind the command."""
    if run == EMPTY:
        return ["no recipe", EMPTY, EMPTY, EMPTY]
    if isinstance(run, str):
        return [_code(f"locallip train {run}"), EMPTY, EMPTY, f"not run ({recipes.find(run).epochs:g} epochs)"]
    _, clean, pgd, estimate, certified, seconds, epochs, hardware = _ours(run)
    seed = f" --seed {run.seed}" if run.seed else ""
    command = ", ".join([_code(f"locallip train {run.name}{seed}"), *_remarks(run)])
    return [command, f"{clean} / {pgd} / {estimate}", certified, f"{seconds} ({epochs} epochs), {hardware}"]


def tightness_tables(results: Path) -> str:
    """What each part of the bound adds, from the files tightness-*.json that benchmarks/tightness.py wrote to `results`."""
    parts = []
    for path in sorted(results.glob("tightness-*.json")):
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
            about, settings = values["about"], values["settings"]
            norms = "all layers" if settings["layers"] == "all" else "dense layers"
            for network in values["networks"]:
                title = (
                    f"**{network['network']}**, eps {network['eps']}, {settings['images']} images "
                    f"({network['clean']:.1f} % right), local norms of {norms}, {about['hardware']}"
                )
                parts += [title, markdown(_TIGHTNESS, [_tightness_cells(row) for row in network["rows"]])]
        except (ValueError, TypeError, KeyError) as error:
            raise WrongResult(f"{path} is not a result of benchmarks/tightness.py: {error!r}") from None
    return "\n\n".join(parts) or NOTHING


_TIGHTNESS = ("Bound", "Certified, %", "Mean margin", "Mean local bound", "Seconds")


def _tightness_cells(row: Mapping[str, Any]) -> list[str]:
    figures = (f"{row['certified']:.1f}", f"{row['margin']:.3f}", f"{row['lipschitz']:.2f}", f"{row['seconds']:.1f}")
    return [str(row["row"]), *figures]


def bounds_tables(results: Path) -> str:
    """Radii, and shares certified at one radius, by one bound after the other, from what benchmarks/bounds.py wrote."""
    parts = []
    for path in sorted(results.glob("bounds-*.json")):
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
            for name in dict.fromkeys(row["network"] for row in values["rows"]):
                rows = [row for row in values["rows"] if row["network"] == name]
                title = f"**{name}**, {rows[0]['images']} images, {values['about']['hardware']}"
                norm = said(str(rows[0].get("norm", L2.norm)))  # older files do not say
                radii, counted = ([row for row in rows if kind in row] for kind in ("median", "certified"))
                parts.append(title)
                if radii:
                    parts.append(
                        _bounds_table("Bound", f"Median radius{norm}", [f"{row['median']:.3g}" for row in radii], radii)
                    )
                if counted:
                    shares = [f"{100 * row['certified']:.1f}" for row in counted]
                    parts.append(_bounds_table(f"Bound at eps {counted[0]['eps']}{norm}", "Certified, %", shares, counted))
        except (ValueError, TypeError, KeyError) as error:
            raise WrongResult(f"{path} is not a result of benchmarks/bounds.py: {error!r}") from None
    return "\n\n".join(parts) or NOTHING


def _bounds_table(bound: str, figure: str, figures: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> str:
    pairs = zip(rows, figures, strict=True)
    cells = [[str(row["bound"]), str(row["by"]), shown, f"{row['seconds']:.2f}"] for row, shown in pairs]
    return markdown((bound, "By", figure, "Seconds"), cells)


def lipschitz_tables(results: Path) -> str:
    """Lipschitz bounds on the same balls by one method after the other, from what benchmarks/lipschitz_bounds.py wrote."""
    parts = []
    for path in sorted(results.glob("lipschitz_bounds-*.json")):
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
            for name, eps in dict.fromkeys((row["network"], row["eps"]) for row in values["rows"]):
                rows = [row for row in values["rows"] if (row["network"], row["eps"]) == (name, eps)]
                parts.append(f"**{name}**, eps {eps}, {rows[0]['images']} images, {values['about']['hardware']}")
                cells = [[row["bound"], row["boxes"], f"{row['mean']:.3g}", f"{row['seconds']:.2f}"] for row in rows]
                parts.append(markdown(("Bound", "Boxes", "Mean", "Seconds"), cells))
        except (ValueError, TypeError, KeyError) as error:
            raise WrongResult(f"{path} is not a result of benchmarks/lipschitz_bounds.py: {error!r}") from None
    return "\n\n".join(parts) or NOTHING


def later_table(results: Path) -> str:
    """What others reach with larger networks, beside the best of our own certificates."""
    ours = read_certificates(results / "certificates")
    lines = []
    for row in paper.LATER:
        title, eps = paper.DATA[row.data]
        found = [
            a for a in ours if _is_whole(a.settings, row.data, eps) and a.settings.guarantee != Guarantee.ESTIMATE.value
        ]
        best = max(found, key=lambda about: about.summary["certified"], default=None)
        lines.append([f"{title}, {eps}", row.network, _printed(row.clean), _printed(row.certified), row.source])
        if best is not None:
            figures = [figure(best.summary[key]) for key in ("correct", "certified")]
            proof = f"ours, {best.settings.guarantee.replace('_', ' ')}"
            lines.append(["", f"`{best.settings.model}`", *figures, proof])
    return markdown(("Data, eps", "Network", "Clean", "Certified", "Source"), lines)


def _is_whole(settings: Settings, data: str, eps: str) -> bool:
    """Whether certificates are about the whole test set at just this eps: fewer images, or a smaller ball, prove less."""
    whole = settings.split == "test" and settings.images == paper.TEST_IMAGES.get(data)
    return settings.data == data and whole and settings.radius == radius_of(eps)


def _briefly(run: Result) -> list[str]:
    """Our cells of `readme_table`."""
    name, clean, pgd, estimate, certified, seconds, _, hardware = _ours(run)
    return [f"{clean} / {pgd} / {estimate}", certified, f"{seconds}, {hardware}", name]


def _robust(runs: Sequence[Result]) -> str:
    parts = []
    for data, (title, eps) in paper.DATA.items():
        rows = [row for row in paper.ROBUST if row.data == data]
        parts.append(f"### {title}, eps = {eps}\n\n{_accuracies(rows, runs)}")
    return "\n\n".join(parts)


def _accuracies(rows: Iterable[paper.Row], runs: Sequence[Result]) -> str:
    lines: list[list[str]] = []
    for row in rows:
        left = [row.method, row.network, *(_printed(value) for value in (row.clean, row.pgd, row.certified))]
        lines += _beside(left, [_ours(run) for run in _runs_of(row.recipe, runs, row.fast)])
    return markdown(("Method", "Network", *_PAPER, *_OURS), lines)


def _times(runs: Sequence[Result]) -> str:
    lines: list[list[str]] = []
    for time in paper.TIMES:
        left = [paper.DATA[time.data][0], time.network, time.method, _printed(time.seconds)]
        lines += _beside(left, [_our_time(run) for run in _runs_of(time.recipe, runs)])
    paper_time = "Paper: s an epoch (one V100; four for Tiny-ImageNet)"
    return markdown(("Data", "Network", "Method", paper_time, "Run", "Ours: s an epoch", "Peak memory", "Hardware"), lines)


def _adversarial(runs: Sequence[Result]) -> str:
    lines: list[list[str]] = []
    for row in paper.ADVERSARIAL:
        bounds = [f"{value:.3g}" for value in paper.LIPSCHITZ[row.method]]
        left = [row.method, *bounds, *(_printed(value) for value in (row.clean, row.pgd, row.certified))]
        ours = []
        for run in _runs_of(row.recipe, runs):
            name, clean, pgd, estimate, certified, *_ = _ours(run)
            ours.append([name, *_our_bounds(run), clean, pgd, estimate, certified])
        lines += _beside(left, ours)
    lipschitz = ("Paper: global bound", "Paper: local bound")
    ours_head = ("Run", "Global bound", "Local bound", *_OURS[1:5])
    return markdown(("Method", *lipschitz, *_PAPER, *ours_head), lines)


def _lipschitz(runs: Sequence[Result]) -> str:
    lines: list[list[str]] = []
    for row in paper.ADVERSARIAL:
        left = [row.method, *(f"{value:.3g}" for value in paper.LIPSCHITZ[row.method])]
        lines += _beside(left, [[_ours(run)[0], *_our_bounds(run)] for run in _runs_of(row.recipe, runs)])
    return markdown(("Method", "Paper: global bound", "Paper: local bound", "Run", "Global bound", "Local bound"), lines)


def _weights(runs: Sequence[Result]) -> str:
    """How much of what a sparsity loss leaves is certified without its local part, and the bounds of either kind."""
    lines: list[list[str]] = []
    for row in paper.SPARSITY:
        for run in _runs_of(row.recipe, runs, row.fast):
            if isinstance(run, Result):
                alone = [figure(run.evaluation[key]) for key in ("certified", "global_certified")]
                lines.append([row.method, *alone, *_our_bounds(run), _label(run)])
    head = ("Row", "Certified", "By the global bound alone", "Global bound", "Local bound", "Run")
    return markdown(head, lines) if lines else NOTHING


def _beside(left: list[str], rights: list[list[str]]) -> list[list[str]]:
    """The paper's row with our first run beside it, and every further run below with nothing on the left."""
    return [[*(left if i == 0 else [""] * len(left)), *right] for i, right in enumerate(rights)]


def _runs_of(recipe: str | None, runs: Sequence[Result], fast: str | None = None) -> list[Result | str]:
    """The runs of a recipe by seed, then those of its fast form; the bare name stands for a recipe without any."""
    if recipe is None:
        return [EMPTY]
    found: list[Result | str] = []
    for name in (recipe, fast or FAST + recipe):
        ours = sorted((run for run in runs if run.name == name), key=lambda run: (run.seed, run.path.name))
        found += ours or ([name] if name == recipe or name in recipes.names() else [])
    return found


def _in_tables() -> set[str]:
    rows: list[paper.Row | paper.Time] = [*paper.ROBUST, *paper.INITIALISATION, *paper.SPARSITY]
    rows += [*paper.ADVERSARIAL, *paper.TIMES]
    fast = {row.fast.removeprefix(FAST) for row in paper.SPARSITY if row.fast is not None}
    return fast | {row.recipe for row in rows if row.recipe is not None}


def _ours(run: Result | str) -> list[str]:
    """The cells of _OURS."""
    if isinstance(run, str):
        return [_code(run), *[EMPTY] * (len(_OURS) - 1)]
    found = run.evaluation
    pgd, certified = figure(found["pgd"]), figure(found["certified"])
    if found["pgd"] is not None and found["pgd_steps"] != 100:
        pgd += f" ({found['pgd_steps']} steps)"
    if found["certified"] is not None and found["guarantee"] != Guarantee.HIGH_PROBABILITY.value:
        certified += f" ({found['guarantee']})"
    elif found["certified"] is not None and found.get("failure_prob", FAILURE_PROB) != FAILURE_PROB:
        certified += f" (failure probability {found['failure_prob']} an image)"
    time = duration(run.training["seconds"])
    figures = [figure(found["clean"]), pgd, figure(found["estimate"]), certified]
    return [_label(run), *figures, time, f"{run.training['epochs']:g}", _hardware(run)]


def _hardware(run: Result) -> str:
    """Where it ran; a time measured beside other work is longer than that of the run alone."""
    shared = (run.training.get("others_gb") or 0.0) > 2
    return str(run.about["hardware"]) + (", shared with other work" if shared else "")


def _our_time(run: Result | str) -> list[str]:
    if isinstance(run, str):
        return [_code(run), EMPTY, EMPTY, EMPTY]
    seconds, memory = run.training["seconds_per_epoch"], run.training.get("peak_memory_gb")
    shown = [EMPTY if seconds is None else f"{seconds:.3g}", EMPTY if memory is None else f"{memory:.1f} GB"]
    return [_label(run), *shown, _hardware(run)]


def _our_bounds(run: Result | str) -> list[str]:
    if isinstance(run, str):
        return [EMPTY, EMPTY]
    values = (run.evaluation["global_lipschitz"], run.evaluation["local_lipschitz"])
    return [EMPTY if value is None else f"{value:.3g}" for value in values]


def _label(run: Result) -> str:
    """The recipe's name and whatever makes this run another than the recipe says."""
    words = [_code(run.name)]
    if run.seed:
        words.append(f"seed {run.seed}")
    return ", ".join([*words, *_remarks(run)])


def _remarks(run: Result) -> list[str]:
    """Fields that are not the recipe's, and images that are not the whole test set."""
    words = _changes(run)
    if run.evaluation["split"] != "test" or run.evaluation["images"] != paper.TEST_IMAGES.get(run.recipe["data"]):
        words.append(f"{run.evaluation['images']} {run.evaluation['split']} images")
    return words


def _changes(run: Result) -> list[str]:
    if run.name not in recipes.names():
        return []
    shipped = dataclasses.asdict(recipes.find(run.name))
    # A file from before a field existed means its default.
    ran = (recipes.defaults() if "method" in run.recipe else {}) | dict(run.recipe)
    compared = [key for key in shipped if key not in ("name", "about", "seed") and key in ran]
    return [f"{key} = {ran[key]}" for key in compared if ran[key] != shipped[key]]


def _shown(run: Result) -> str:
    title, _ = paper.DATA.get(run.recipe["data"], (run.recipe["data"], ""))
    return f"{title}, eps = {run.recipe['eps']}"


def _code(name: str) -> str:
    return name if name == EMPTY else f"`{name}`"


def _printed(value: float | None) -> str:
    """A figure with the paper's decimals."""
    if value is None:
        return EMPTY
    return f"{value:.1f}" if round(value, 1) == value else f"{value:.2f}"


def figure(value: float | None) -> str:
    """Two decimals."""
    return EMPTY if value is None else f"{value:.2f}"


def duration(seconds: float) -> str:
    """In the unit that people would use."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.1f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def markdown(head: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    rows = [head, ["---"] * len(head), *lines]
    return "\n".join("| " + " | ".join(_in_markdown(cell) for cell in row) + " |" for row in rows)


def _in_markdown(cell: str) -> str:
    """One line of plain text, whatever a result file holds."""
    return " ".join(cell.split()).replace("|", "\\|").replace("<", "&lt;")
