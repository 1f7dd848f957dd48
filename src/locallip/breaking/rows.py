"""One row per attacked image, as JSON lines, and the settings beside them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from locallip.files import check_writable, write_atomically
from locallip.proofs import WrongRows


@dataclass(frozen=True)
class AttackRow:
    """What became of one image.

    `prediction` is the class at the image itself, None for a tie. `broken`: the label was right there and is lost at a point
    of the ball; `by` is the attack that found it, `distance` the l2 norm of its perturbation.
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


def check_out(path: Path) -> None:
    """Refuse a place that rows cannot be written to, before there are any."""
    if path.suffix != ".jsonl":
        raise WrongRows(f"--out {path}: rows of an attack are kept in a file that ends in .jsonl")
    if not path.parent.is_dir():
        raise WrongRows(f"--out {path}: there is no folder {path.parent}")
    for there in (path, path.with_suffix(".json")):
        if there.exists():
            raise WrongRows(f"{there} is there already: name another --out")
    try:
        check_writable(path)
    except OSError as error:
        raise WrongRows(f"--out {path} cannot be written: {error.strerror or error}") from None


def write_rows(path: Path, rows: Sequence[AttackRow], settings: AttackSettings, summary: Mapping[str, Any]) -> None:
    """The rows, and settings and summary in .json beside them."""
    lines = "".join(json.dumps(asdict(row), allow_nan=False) + "\n" for row in rows)
    about = json.dumps({"settings": asdict(settings), "summary": dict(summary)}, indent=1, allow_nan=False) + "\n"
    write_atomically(path, lines.encode())
    write_atomically(path.with_suffix(".json"), about.encode())
