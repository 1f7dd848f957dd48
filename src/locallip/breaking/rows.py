"""One row per attacked image, as JSON lines, and the settings beside them; both can be read to go on."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from locallip.balls import L2, said
from locallip.data import ImageSet
from locallip.proofs import WrongRows
from locallip.proofs.check import out_of_order
from locallip.proofs.rows import named, parsed, read_lines, value_of
from locallip.proofs.settings import (
    COMMON,
    Checks,
    about_file,
    check_values,
    is_bool,
    is_norm,
    is_whole,
    radius_of,
    read_values,
)


@dataclass(frozen=True)
class AttackRow:
    """What became of one image.

    `prediction` is the class at the image itself, None for a tie. `broken`: the label was right there and is lost at a point
    of the ball; `by` is the attack that found it, `distance` how long its perturbation is, in the norm of the attack.
    """

    index: int
    label: int
    prediction: int | None
    broken: bool
    by: str | None
    distance: float | None

    @property
    def stands(self) -> bool:
        """Right, and not broken."""
        return self.prediction == self.label and not self.broken


@dataclass(frozen=True)
class AttackSettings:
    """Enough for a third party to repeat it; `pixels`: the points of the attack stay in [0, 1]."""

    model: str
    fingerprint: str
    data: str
    split: str
    images: int
    data_sha256: str
    eps: str
    attack: str
    steps: int
    restarts: int
    pixels: bool
    batch_size: int
    seed: int
    hardware: str
    environment: dict[str, Any]
    norm: str = L2.norm

    @property
    def radius(self) -> float:
        """eps as a number, never below it."""
        return radius_of(self.eps)

    @property
    def shown_eps(self) -> str:
        """eps for people, with its norm where that is not l2."""
        return self.eps + said(self.norm)


_CHECKS: Checks = {
    **COMMON,
    "attack": lambda value: value in ("pgd", "apgd", "strong", "autoattack"),
    "steps": is_whole(1),
    "restarts": is_whole(1),
    "pixels": is_bool,
    "norm": is_norm,
}
FIELDS = tuple(field.name for field in fields(AttackRow))
_KINDS = {"index": int, "label": int, "prediction": int, "broken": bool, "by": str}
_MAY_LACK = ("prediction", "by", "distance")


def read_settings(path: Path) -> AttackSettings:
    """The settings beside the rows of an attack."""
    values, _ = read_values(path)
    if "attack" not in values:
        raise WrongRows(f"{path} is not of `locallip attack`: name another --out")
    values = {"norm": L2.norm, **values}  # older files do not say
    check_values(values, _CHECKS, about_file(path))
    return AttackSettings(**{name: values[name] for name in _CHECKS})


def read_attack_rows(path: Path) -> list[AttackRow]:
    """The rows of an attack, those before a last line that a crash has cut off."""
    return [
        _row(parsed(line, f"{path}, line {n}"), f"{path}, line {n}") for n, line in enumerate(read_lines(path, False), 1)
    ]


def _row(values: Mapping[str, Any], where: str) -> AttackRow:
    if set(values) != set(FIELDS):
        raise WrongRows(f"{where} has the fields {named(values)}; expected {', '.join(FIELDS)}")
    return AttackRow(**{name: value_of(name, values[name], where, _KINDS, _MAY_LACK) for name in FIELDS})


def contradictions(rows: Sequence[AttackRow], settings: AttackSettings, images: ImageSet) -> list[str]:
    """What is wrong with rows that should be the first ones of an attack, one sentence each."""
    labels = images.labels.tolist()
    return out_of_order(rows, images) or [
        f"row {row.index}: {fault}" for row in rows for fault in _faults(row, settings.radius, labels[row.index])
    ]


def _faults(row: AttackRow, radius: float, label: int) -> Iterator[str]:
    if row.label != label:
        yield f"its label is {row.label}, and that of the image {label}"
    if row.broken and row.prediction != row.label:
        yield f"it is broken with prediction {row.prediction} and label {row.label}"
    if {row.broken} != {row.by is not None, row.distance is not None}:
        yield f"broken is {row.broken}, by {row.by} at the distance {row.distance}"
    if row.distance is not None and not 0 <= row.distance <= radius * (1 + 1e-9):
        yield f"it is broken at the distance {row.distance} in a ball of radius {radius}"
