"""What a report is made of: the files of a run, its certificates, and what was explored, read and checked."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from locallip import paper
from locallip.balls import L2
from locallip.certify.prover import fingerprint
from locallip.data import ImageSet
from locallip.norms import Guarantee
from locallip.proofs.rows import Row, WrongRows, read_rows
from locallip.proofs.run import data_checksum
from locallip.proofs.settings import Settings, radius_of, read_about, same_structure, structure_of
from locallip.results import read_result
from locallip.training.recipe import find, names
from locallip.training.run_folder import RunFolder
from locallip.zoo import MODEL_FILE, WrongModel, load_model, model_cards

EXPLORED = "explorer.json"
RESULT, CONFIG, METRICS = "result.json", "config.json", "metrics.jsonl"


class WrongRun(ValueError):
    """Something that is no run, or files of it that are damaged or of another one; the message is for the user."""


@dataclass(frozen=True)
class Certified:
    """Rows of `locallip certify` and what they were asked for."""

    settings: Settings
    rows: Sequence[Row]


@dataclass(frozen=True)
class Run:
    """One network: how it was trained, what it reached, what is certified of it; whatever is not there is empty."""

    name: str
    recipe: Mapping[str, Any]
    metrics: Sequence[Mapping[str, Any]]
    evaluation: Mapping[str, Any]
    training: Mapping[str, Any]
    hardware: str
    certified: Sequence[Certified] = ()
    explored: Mapping[str, Any] = field(default_factory=dict)

    @property
    def eps(self) -> str:
        return str(self.recipe.get("eps") or self.evaluation.get("eps") or "")

    @property
    def proofs(self) -> Certified | None:
        """The certificates to show: of test images before training ones, of most images, with radii before those without."""
        proved = [c for c in self.certified if c.settings.guarantee != "estimate" and c.rows]  # none yet prove nothing
        return max(proved, key=lambda c: (c.settings.split == "test", len(c.rows), c.settings.radii), default=None)

    def rows_about(self, images: ImageSet, eps: str, guarantee: str) -> Sequence[Row]:
        """Rows whose verdicts hold for these images at just this eps, and under no weaker guarantee; none where none do."""
        order = [member.value for member in Guarantee]
        fitting = [
            found
            for found in self.certified
            if found.settings.radius == radius_of(eps)
            and found.settings.norm == L2.norm  # as all that is explored
            and order.index(found.settings.guarantee) >= max(order.index(guarantee), 1)  # an estimate is no proof
            and found.settings.images <= len(images)
            and found.settings.data_sha256 == data_checksum(images.take(torch.arange(found.settings.images)))
        ]
        return max(fitting, key=lambda c: (len(c.rows), c.settings.radii)).rows if fitting else ()

    @property
    def paper(self) -> paper.Row | None:
        """The paper's row that the recipe stands for."""
        name = str(self.recipe.get("name", "")).removeprefix("fast-")
        rows = (*paper.ROBUST, *paper.INITIALISATION, *paper.SPARSITY, *paper.ADVERSARIAL)
        return next((row for row in rows if row.recipe == name), None)


def read_run(name: str, rows: Sequence[Path] = ()) -> Run:
    """A run folder, or the name of a network that comes with the package, with certificates from `rows` beside its own."""
    cards = {card.name: card for card in model_cards()}
    path = Path(name)
    if name in cards:
        card = cards[name]
        known = {"name": card.recipe, "eps": card.evaluation.get("eps"), "data": _data_of(card.recipe)}
        run = Run(name, known, (), card.evaluation, card.training, card.hardware)
        return _with_certificates(run, name, list(rows), list(rows))
    if not path.is_dir():
        raise WrongRun(
            f"{name} is no run folder and no network that comes with the package: name a folder that `locallip train --out` "
            "wrote, or a name from `locallip models`"
        )
    run = _from_folder(path)
    found = [file for file in sorted(path.glob("*.jsonl")) if file.name != METRICS and _is_about_rows(file)]
    run = _with_certificates(run, name, [*found, *rows], list(rows))
    return _with_explored(run, path / EXPLORED)


def _from_folder(path: Path) -> Run:
    if not (path / CONFIG).is_file():
        raise WrongRun(f"the folder {path} holds no {CONFIG}: it is not a run of `locallip train`")
    recipe = _json(path / CONFIG)
    metrics = RunFolder(path).metrics()
    values = _json(path / RESULT) if (path / RESULT).is_file() else {}
    # Still in training, trained without an evaluation, or with a result of weights that are no longer there.
    if not values.get("evaluation") or not _is_of(values, path / MODEL_FILE):
        training, about = values.get("training"), values.get("about")
        hardware = str(about.get("hardware", "")) if isinstance(about, dict) else ""
        return Run(path.name, recipe, metrics, {}, training if isinstance(training, dict) else {}, hardware)
    result = read_result(path / RESULT)
    return Run(path.name, recipe, metrics, result.evaluation, result.training, str(result.about["hardware"]))


def _is_of(values: Mapping[str, Any], weights: Path) -> bool:
    """Whether a result was measured with these weights, as far as both say."""
    model = values.get("model")
    noted = model.get("sha256") if isinstance(model, dict) else None
    if noted is None or not weights.is_file():
        return True
    return bool(noted == hashlib.sha256(weights.read_bytes()).hexdigest())


def _with_certificates(run: Run, name: str, files: Sequence[Path], asked: Sequence[Path]) -> Run:
    """The run with those files that are about its network; one that nobody asked for by name and fits not is passed over."""
    if not files:
        return run
    try:
        model = load_model(name)
    except WrongModel:
        if not asked:
            return run
        raise
    certified, print_of, structure = [], fingerprint(model), structure_of(model)
    for file in files:
        settings, _ = read_about(file)
        if settings.fingerprint != print_of or not same_structure(settings.structure, structure):
            continue
        found = read_rows(file, whole=False)
        if len(found) > settings.images or [row.index for row in found] != list(range(len(found))):
            raise WrongRows(f"{file} does not hold the rows that its settings speak of: `locallip verify` says more")
        certified.append(Certified(settings, found))
    return replace(run, certified=certified)


def check_used(rows: Sequence[Path], runs: Sequence[Run]) -> None:
    """Every file of rows must be about one of the networks."""
    used = [certified.settings for run in runs for certified in run.certified]
    for file in rows:
        settings, _ = read_about(file)
        if settings not in used:
            raise WrongRun(
                f"{file} is about a network with the fingerprint {settings.fingerprint[:12]}..., which is none of those "
                "in this report"
            )


def _with_explored(run: Run, path: Path) -> Run:
    if not path.is_file():
        return run
    values = _json(path)
    if not {"fingerprint", "network", "steps"} <= set(values):
        raise WrongRun(f"{path} does not hold what `locallip report --explore` writes: remove it, and explore again")
    try:
        model = load_model(path.parent)
        # Of weights from before it is as good as none, and so it is without a structure: from when verdicts at any eps were
        # taken for those at this one.
        if values["fingerprint"] != fingerprint(model) or values.get("structure") != structure_of(model):
            return run
    except WrongModel:
        return run
    return replace(run, explored=values)


def _is_about_rows(path: Path) -> bool:
    """Whether settings of `locallip certify` stand beside a file; rows of attacks have others."""
    try:
        read_about(path)
    except WrongRows:
        return False
    return True


def _json(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise WrongRun(f"cannot read {path}: {error.strerror or error}") from None
    except (ValueError, RecursionError) as error:
        raise WrongRun(f"{path} is damaged: {error}") from None
    if not isinstance(values, dict):
        raise WrongRun(f"{path} is damaged: it holds no object")
    return values


def _data_of(recipe: str) -> str | None:
    return find(recipe).data if recipe in names() else None
