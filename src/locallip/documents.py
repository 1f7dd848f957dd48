"""The generated parts of documents: each is filled from result files, and a test compares.

python -m locallip.documents README.md                   fills the parts that show results, from results/ beside the document
python -m locallip.documents docs/auditing.md results    the same from the result files in a folder
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from locallip import costs, tables
from locallip.files import write_atomically
from locallip.proofs import WrongRows
from locallip.results import WrongResult

#: What encloses a generated part of a document, by the name of the part.
BEGIN, END = "<!-- {}:begin -->", "<!-- {}:end -->"

#: The generated parts of documents by name, each from the files in a folder of results.
PARTS: dict[str, Callable[[Path], str]] = {
    "results": tables.readme_table,
    "later": tables.later_table,
    "reproducing": tables.reproducing,
    "tightness": tables.tightness_tables,
    "auto costs": costs.auto_costs,
    "bounds": tables.bounds_tables,
    "lipschitz": tables.lipschitz_tables,
    "certificates": lambda results: tables.certificates_table(results) or "No certificates have been issued yet.",
    "speeds": costs.speeds,
    "ranks": costs.ranks,
    "restarts": costs.restarts,
    "exponents": costs.exponents,
    "lines": costs.lines,
    "imagenet": costs.imagenet,
    "audits": lambda results: tables.audits_table(results) or "No network has been audited yet.",
}


def filled(text: str, table: str, part: str = "results") -> str:
    """A document with `table` between the two markers of a part, each on a line of its own."""
    begin, end = BEGIN.format(part), END.format(part)
    if text.count(begin) != 1 or text.count(end) != 1 or text.index(begin) > text.index(end):
        raise ValueError(f"there must be one {begin} and behind it one {end}")
    before, rest = text.split(begin)
    return f"{before}{begin}\n{table}\n{end}{rest.split(end)[1]}"


def filled_from(text: str, results: Path) -> str:
    """A document with all its generated parts from the files in `results`."""
    parts = [part for part in PARTS if BEGIN.format(part) in text or END.format(part) in text]
    for part in parts or PARTS:
        text = filled(text, PARTS[part](results), part)
    return text


def main(argv: Sequence[str]) -> int:
    """Fill a document; the exit code is 0, 1 where that failed and 2 where it was called wrongly."""
    if len(argv) not in (1, 2) or argv[0].startswith("-"):
        print("usage: python -m locallip.documents DOCUMENT [RESULTS]", file=sys.stderr)
        return 2
    document = Path(argv[0])
    try:
        results = Path(argv[1]) if len(argv) == 2 else document.parent / "results"
        text = filled_from(document.read_text(encoding="utf-8"), results)
        write_atomically(document, text.encode())
    except (WrongResult, WrongRows, OSError) as error:
        print(f"locallip: {error}", file=sys.stderr)
        return 1
    except ValueError as error:
        print(f"locallip: {document}: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
