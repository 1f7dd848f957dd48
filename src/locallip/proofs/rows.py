"""One row per image, as JSON lines or CSV, written a chunk at a time, so that a run that is stopped keeps what it had."""

from __future__ import annotations

import csv
import dataclasses
import io
import json
import math
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from locallip.balls import L2, NORMS
from locallip.certify import Verdict
from locallip.files import write_atomically
from locallip.norms import Guarantee

FORMATS = (".jsonl", ".csv")


class WrongRows(ValueError):
    """Rows, or what is known about them, that are missing, damaged or of another run; the message is for the user."""


@dataclass(frozen=True)
class Row:
    """What became of one image.

    `decided_by` is the check that gave the verdict, `margin` the proved lead of the label and `lipschitz` the local bound
    behind it, None where that check computed none. `seconds` is the mean over the chunk that the image was in. `radius` is
    certified too, and None where radii were not asked for. `norm` is that of the ball, "2" or "inf". Rows from before there
    were radii or norms lack them.
    """

    index: int
    label: int
    prediction: int | None
    verdict: str
    decided_by: str
    guarantee: str
    failure_prob: float
    eps: float
    margin: float | None
    lipschitz: float | None
    global_lipschitz: float | None
    seconds: float
    radius: float | None = None
    norm: str = L2.norm


FIELDS = tuple(field.name for field in dataclasses.fields(Row))
#: Those of all rows, and of rows from before there were norms, and radii.
_KNOWN_FIELDS = (FIELDS, FIELDS[:-1], FIELDS[:-2])


def append_rows(path: Path, rows: Iterable[Any]) -> None:
    """Add rows at the end of the file, for good."""
    text = io.StringIO(newline="")
    _write(text, rows, path.suffix, header=not path.exists())
    with open(path, "ab") as file:
        file.write(text.getvalue().encode())
        file.flush()
        os.fsync(file.fileno())


def replace_rows(path: Path, rows: Iterable[Any]) -> None:
    """Write the file anew with just these rows."""
    text = io.StringIO(newline="")
    _write(text, rows, path.suffix, header=True)
    write_atomically(path, text.getvalue().encode())


def _write(text: io.StringIO, rows: Iterable[Any], suffix: str, header: bool) -> None:
    if suffix == ".csv":
        table = csv.DictWriter(text, FIELDS, lineterminator="\n")
        if header:
            table.writeheader()
        table.writerows(dataclasses.asdict(row) for row in rows)
    else:
        text.writelines(json.dumps(dataclasses.asdict(row), allow_nan=False) + "\n" for row in rows)


def read_rows(path: Path, *, whole: bool = True) -> list[Row]:
    """All rows of a file; without `whole`, those before a last line that a crash has cut off."""
    lines = read_lines(path, whole)
    if path.suffix == ".csv" and lines:
        if lines[0] not in [",".join(names) for names in _KNOWN_FIELDS]:
            raise WrongRows(f"{path} begins with {lines[0][:80]!r}, not with the names of the columns")
        try:
            ended = (f"{line}\n" for line in lines)  # where a quoted word goes over two lines, it is no word of ours
            values = list(csv.DictReader(ended))
        except csv.Error as error:
            raise WrongRows(f"{path} is not valid CSV: {error}") from None
        return [_row(value, f"{path}, line {number}", text=True) for number, value in enumerate(values, start=2)]
    return [_row(parsed(line, f"{path}, line {n}"), f"{path}, line {n}") for n, line in enumerate(lines, start=1)]


def read_lines(path: Path, whole: bool) -> list[str]:
    """The lines of a file with rows."""
    if path.suffix not in FORMATS:
        raise WrongRows(f"{path}: rows are kept in files that end in {' or '.join(FORMATS)}")
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except OSError as error:
        raise WrongRows(f"cannot read {path}: {error.strerror or error}") from None
    except UnicodeDecodeError:
        raise WrongRows(f"{path} is not text: it holds no rows") from None
    cut_off = lines.pop()  # nothing, where the file ends with the end of a line
    if cut_off and whole:
        raise WrongRows(f"{path} ends in the middle of line {len(lines) + 1}")
    return lines


def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A field that is there twice says one thing to us and perhaps another to somebody else."""
    values = dict(pairs)
    if len(values) < len(pairs):
        raise ValueError("a field is there twice")
    return values


def parsed(line: str, where: str) -> Mapping[str, Any]:
    """The fields of a line of JSON."""
    try:
        value = json.loads(line, object_pairs_hook=once)
    except (ValueError, RecursionError) as error:
        raise WrongRows(f"{where} is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise WrongRows(f"{where} is no row: {line[:80]!r}")
    return value


#: Python's own reading also takes 1_0, blanks and the digits of other scripts.
_NUMBER = re.compile(r"[-+0-9.eE]+")
_KINDS: dict[str, type] = {
    "index": int,
    "label": int,
    "prediction": int,
    "verdict": str,
    "decided_by": str,
    "guarantee": str,
    "norm": str,
}
_WORDS: Mapping[str, Sequence[str]] = {
    "verdict": list(Verdict),
    "guarantee": [member.value for member in Guarantee],
    "norm": NORMS,
}
_MAY_LACK = ("prediction", "margin", "lipschitz", "global_lipschitz", "radius")


def _row(values: Mapping[str, Any], where: str, text: bool = False) -> Row:
    if set(values) not in [set(names) for names in _KNOWN_FIELDS]:
        raise WrongRows(f"{where} has the fields {named(values)}; expected {', '.join(FIELDS)}")
    values = {"norm": L2.norm, **values}
    row = Row(**{name: value_of(name, values.get(name), where, _KINDS, _MAY_LACK, text) for name in FIELDS})
    for name, known in _WORDS.items():
        if getattr(row, name) not in known:
            raise WrongRows(f"{where}: unknown {name} {getattr(row, name)[:60]!r}")
    return row


def named(fields: Iterable[object]) -> str:
    """Names that may be anybody's, without what a terminal would obey."""
    return ", ".join(repr(str(name))[1:-1][:60] for name in fields)


def value_of(
    name: str, value: Any, where: str, kinds: Mapping[str, type], may_lack: Sequence[str], text: bool = False
) -> Any:
    """The value of a field, of its kind or float; `text` where a number is still to be read."""
    kind = kinds.get(name, float)
    if value is None or (text and value == ""):
        if name in may_lack:
            return None
        raise WrongRows(f"{where}: {name} is missing")
    written = text and (kind is str or _NUMBER.fullmatch(value) is not None)
    right = written or type(value) is kind or (kind is float and type(value) is int)
    try:
        if right and (kind is not float or math.isfinite(float(value))):
            return kind(value)
    except (ValueError, OverflowError):
        pass
    raise WrongRows(f"{where}: {name} = {str(value)[:60]!r} is not what it should be") from None
