"""Rows that several processes write together: each takes the next chunk and keeps its rows in a file of its own.

The file of all rows holds those of the first images, as that of one process does. What processes had done beyond them when
a run broke off is in their own files, hidden beside it, and is found again by any number of processes.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol, TypeVar

from locallip.processes import Processes
from locallip.proofs.journal import Say
from locallip.proofs.rows import WrongRows, append_rows, replace_rows


class Numbered(Protocol):
    @property
    def index(self) -> int: ...


R = TypeVar("R", bound=Numbered)


def own_file(out: Path, rank: int, mark: str) -> Path:
    """Where process number `rank` keeps rows until all are there; `mark` is of the run, whose rows alone are taken over."""
    return out.with_name(f".{out.stem}.{mark}.process-{rank}{out.suffix}")


def own_files(out: Path, mark: str = r"[0-9a-f]{16}") -> list[Path]:
    """Those of a run, or of all runs to this file."""
    name = re.compile(rf"\.{re.escape(out.stem)}\.{mark}\.process-\d+{re.escape(out.suffix)}")
    return sorted(path for path in out.parent.iterdir() if name.fullmatch(path.name))


def recovered(
    out: Path | None,
    mark: str,
    chunks: Sequence[slice],
    read: Callable[[Path], list[R]],
    faults: Callable[[list[R]], Sequence[str]],
) -> dict[int, list[R]]:
    """Whole chunks from the processes' own files, by their first image; what is damaged or of another run is left out.

    Afterwards one file holds all of them: the others may end in half a row, behind which nothing can be added.
    """
    if out is None or not own_files(out, mark):
        return {}
    rows: dict[int, R] = {}
    for path in own_files(out, mark):
        try:
            rows |= {row.index: row for row in read(path)}
        except WrongRows:
            continue  # it is worked on again
    found = {}
    for chunk in chunks:
        numbers = range(chunk.start, chunk.stop)
        if all(i in rows for i in numbers) and not faults([rows[i] for i in numbers]):
            found[chunk.start] = [rows[i] for i in numbers]
    whole = own_file(out, 0, mark)
    replace_rows(whole, [row for some in found.values() for row in some])
    for path in own_files(out, mark):
        if path != whole:
            path.unlink()
    return found


def forget(out: Path | None) -> None:
    """Remove the processes' own files, once all rows are in one."""
    for path in [] if out is None else own_files(out):
        path.unlink(missing_ok=True)


def grow_together(
    together: Processes,
    out: Path | None,
    mark: str,
    rows: list[R],
    chunks: Sequence[slice],
    work: Callable[[slice], list[R]],
    say: Say,
    known: Mapping[int, list[R]],
) -> list[R]:
    """All rows, in the first process: those that were there, and those of the chunks that the processes took one by one."""
    here = together.from_first(([chunk for chunk in chunks if chunk.start < len(rows)], known))
    done = {chunk.start for chunk in here[0]} | set(here[1])
    missing = [chunk for chunk in chunks if chunk.start not in done]
    start, count = time.perf_counter(), sum(chunk.stop - chunk.start for chunk in missing)
    mine: list[R] = []
    while (number := together.counted("chunks taken") - 1) < len(missing):
        new = work(missing[number])
        mine += new
        if out is not None:
            append_rows(own_file(out, together.rank, mark), new)
        ready = together.counted("images done", len(new))
        left = (time.perf_counter() - start) / ready * (count - ready)
        say(f"{ready} of {count} images in {together.size} processes, {left:.0f} s left")
    together.wait_for_long("processes at the end")  # a chunk may take hours
    everybody = together.all_gathered(mine)
    if not together.first:
        return []
    merged = {row.index: row for some in (rows, *known.values(), *everybody) for row in some}
    if sorted(merged) != list(range(max((chunk.stop for chunk in chunks), default=0))):
        raise WrongRows("some rows are missing or there are too many: this is a fault in locallip, please report it")
    return [merged[i] for i in sorted(merged)]
