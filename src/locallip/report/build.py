"""A report from runs: cards with the main figures, the sections, and the explorer's values."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import locallip
from locallip import paper
from locallip.files import write_atomically
from locallip.report.converged import convergence
from locallip.report.page import Card, Page, render
from locallip.report.proved import certificates
from locallip.report.runs import Run, WrongRun
from locallip.report.trained import training

#: What one report may weigh, so that it can be sent and opened everywhere.
LARGEST = 5_000_000


def write_report(runs: Sequence[Run], out: Path) -> str:
    """Write the page of these runs and say what is in it, in a line."""
    page = page_of(runs)
    if not page.sections and page.explorer is None:
        raise WrongRun(f"nothing is known of {', '.join(run.name for run in runs)} yet: has the training begun?")
    text = render(page).encode()
    if len(text) > LARGEST:
        raise WrongRun(
            f"the report would have {len(text) / 1e6:.1f} MB, more than {LARGEST / 1e6:.0f}: explore fewer images"
        )
    write_atomically(out, text)
    figures = sum(len(section.figures) for section in page.sections)
    images = sum(len(network["images"]) for network in (page.explorer or {"networks": []})["networks"])
    return f"{figures} figures, {images} images to explore, {len(text) / 1e6:.1f} MB"


def page_of(runs: Sequence[Run]) -> Page:
    """Everything that is known of these runs, as a page."""
    sections = [section for section in (certificates(runs), training(runs), convergence(runs)) if section is not None]
    title = runs[0].name if len(runs) == 1 else f"{len(runs)} networks: " + ", ".join(run.name for run in runs)
    made = f"locallip {locallip.__version__}, {datetime.now(UTC):%Y-%m-%d %H:%M} UTC"
    return Page(title, made, [card_of(run) for run in runs], sections, explorer_of(runs))


def explorer_of(runs: Sequence[Run]) -> dict[str, Any] | None:
    networks = [{**run.explored["network"], "name": run.name} for run in runs if run.explored]
    return {"networks": networks} if networks else None


def card_of(run: Run) -> Card:
    data = paper.DATA.get(str(run.recipe.get("data", "")), (str(run.recipe.get("data", "")), ""))[0]
    epochs = run.training.get("epochs") or (run.metrics[-1].get("epoch") if run.metrics else None)
    words = [data, f"eps {run.eps}" if run.eps else "", f"{epochs:g} epochs" if epochs else "", run.hardware]
    figures = _of_rows(run) if run.proofs is not None else _of_evaluation(run)
    if not figures and run.metrics:
        figures = [("epoch", f"{run.metrics[-1].get('epoch', 0):g}", "training has not been evaluated yet")]
    return Card(run.name, ", ".join(word for word in words if word), figures)


def _of_rows(run: Run) -> list[tuple[str, str, str]]:
    found = run.proofs
    assert found is not None
    count, verdicts = len(found.rows), [row.verdict for row in found.rows]
    wrong, attacked, certified = (verdicts.count(name) for name in ("MISCLASSIFIED", "ATTACKED", "CERTIFIED"))
    guarantee = found.settings.guarantee.replace("_", " ")
    chance = f", {found.settings.failure_prob:g} an image" if found.settings.failure_prob else ""
    which = "test" if found.settings.split == "test" else "training"
    shown = [("clean", _per_cent(count - wrong, count), f"right on {count} {which} images")]
    if found.settings.attack_steps:
        shown.append(("attacked", _per_cent(count - wrong - attacked, count), f"PGD, {found.settings.attack_steps} steps"))
    return [
        *shown,
        (
            "certified",
            _per_cent(certified, count),
            f"eps {found.settings.shown_eps}, {guarantee}{chance}",
        ),
    ]


def _of_evaluation(run: Run) -> list[tuple[str, str, str]]:
    found, shown = run.evaluation, []
    notes = {
        "clean": f"right on {found.get('images', '')} test images",
        "pgd": f"PGD, {found.get('pgd_steps', '')} steps",
        "certified": str(found.get("guarantee", "")).replace("_", " "),
    }
    for key, word in (("clean", "clean"), ("pgd", "attacked"), ("certified", "certified")):
        if isinstance(found.get(key), (int, float)):
            shown.append((word, f"{found[key]:.1f} %", notes[key]))
    return shown


def _per_cent(part: int, whole: int) -> str:
    return f"{100 * part / max(whole, 1):.1f} %"
