"""Result files: what one training run reached, as the command wrote it, read back and checked."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any


class WrongResult(ValueError):
    """A result file that is damaged or not one; the message names the file and is for the user."""


@dataclass(frozen=True)
class Result:
    """One run: accuracies in `evaluation` are in per cent, times in seconds."""

    path: Path
    about: Mapping[str, Any]
    recipe: Mapping[str, Any]
    training: Mapping[str, Any]
    evaluation: Mapping[str, Any]
    model: Mapping[str, Any]

    @property
    def name(self) -> str:
        return str(self.recipe["name"])

    @property
    def seed(self) -> int:
        return int(self.recipe["seed"])


#: Section -> field -> what it must hold; "?" allows null, for what a run left out.
_FIELDS: dict[str, dict[str, str]] = {
    "about": {"hardware": "text"},
    "recipe": {"name": "text", "data": "text", "eps": "text", "seed": "whole"},
    "training": {"seconds": "number", "epochs": "number", "seconds_per_epoch": "number?"},
    "evaluation": {
        "split": "text",
        "images": "whole",
        "clean": "accuracy",
        "pgd": "accuracy?",
        "pgd_steps": "number?",
        "estimate": "accuracy?",
        "certified": "accuracy?",
        "guarantee": "text?",
        "global_lipschitz": "number?",
        "local_lipschitz": "number?",
    },
    "model": {"sha256": "text"},
}
#: Those that older files do not have.
_NEWER: dict[str, dict[str, str]] = {
    "training": {"peak_memory_gb": "number?", "others_gb": "number?"},
    "evaluation": {"global_certified": "accuracy?", "proof_seed": "seed?"},
}
_EXPECTED = {
    "text": "text",
    "number": "a number from 0",
    "whole": "a whole number from 0",
    "accuracy": "a number from 0 to 100",
    "seed": "a whole number of at most 64 bits",
}
#: What a figure says nothing without.
_NEEDS = {"pgd": "pgd_steps", "certified": "guarantee"}


def read_result(path: Path) -> Result:
    """The run in a result file, or an error that names the file and what is wrong in it."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise WrongResult(f"cannot read {path}: {error.strerror or error}") from None
    except (ValueError, RecursionError) as error:
        raise WrongResult(f"{path} is not valid JSON: {error}") from None
    if not isinstance(values, dict):
        raise WrongResult(f"{path} is not a result of `locallip train`: it holds no sections")
    for section in _FIELDS:
        held = values.get(section)
        if not isinstance(held, dict):
            raise WrongResult(f"{path} is not a result of `locallip train`: section {section!r} is missing")
        if section == "evaluation":
            check_evaluation(held, f"{path}: {section}")
        else:
            _check_fields(held, section, f"{path}: {section}")
    measured, meant = values["evaluation"].get("eps"), values["recipe"]["eps"]
    if measured is not None and measured != meant:
        raise WrongResult(f"{path}: evaluation.eps = {measured!r} is not recipe.eps = {meant!r}, which the run was for")
    return Result(path, *(values[section] for section in ("about", "recipe", "training", "evaluation", "model")))


def read_results(folder: Path) -> list[Result]:
    """Every run in `folder`, or in `folder`/runs where that is a folder; nothing is skipped."""
    if not folder.is_dir():
        raise WrongResult(f"there is no folder {folder} with results; name it with --results DIR")
    runs = folder / "runs"
    return [read_result(path) for path in sorted((runs if runs.is_dir() else folder).glob("*.json"))]


def _check_fields(held: Mapping[str, Any], section: str, where: str) -> None:
    newer = {field: kind for field, kind in _NEWER.get(section, {}).items() if field in held}
    for field, kind in (_FIELDS[section] | newer).items():
        _check(held, field, kind, f"{where}.{field}")


def _check(held: Mapping[str, Any], field: str, kind: str, where: str) -> None:
    if field not in held:
        raise WrongResult(f"{where} is missing")
    value, least = held[field], kind.rstrip("?")
    if value is None and kind.endswith("?"):
        return
    if least == "text":
        right = isinstance(value, str) and bool(value) and not any("\ud800" <= letter <= "\udfff" for letter in value)
    elif least == "seed":
        right = type(value) is int and 0 <= value < 2**64
    else:
        right = isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value < 1e15
        right = right and (least != "accuracy" or value <= 100) and (least != "whole" or value == int(value))
    if not right:
        raise WrongResult(f"{where} = {value!r}: expected {_EXPECTED[least]}")


def check_evaluation(evaluation: object, where: str) -> None:
    """Refuse figures that are not of one network: what is certified cannot be attacked, what is attacked counts as clean."""
    if not isinstance(evaluation, dict):
        raise WrongResult(f"{where} = {evaluation!r}: expected figures by name")
    _check_fields(evaluation, "evaluation", where)
    for figure, needed in _NEEDS.items():
        if evaluation[figure] is not None and evaluation[needed] is None:
            raise WrongResult(f"{where}.{needed} is null, and {figure} = {evaluation[figure]} means nothing without it")
    if evaluation["images"] < 1:
        raise WrongResult(f"{where}.images = {evaluation['images']}: expected a whole number from 1")
    first = evaluation.get("first")
    if first is not None and not _in_order(first):
        raise WrongResult(f"{where}.first = {first!r}: expected certified <= clean <= images, in whole numbers")
    for chain in (("global_certified", "certified", "pgd", "clean"), ("estimate", "pgd", "clean")):
        known = [(name, evaluation[name]) for name in chain if evaluation.get(name) is not None]
        for (low, less), (high, more) in pairwise(known):
            if less > more + 1e-9:
                raise WrongResult(f"{where}.{low} = {less} is above evaluation.{high} = {more}, which cannot be")


def _in_order(first: object) -> bool:
    """Counts among the first images."""
    if not isinstance(first, dict):
        return False
    counts: list[Any] = [first.get(name) for name in ("certified", "clean", "images")]
    return all(type(count) is int and count >= 0 for count in counts) and counts == sorted(counts)
