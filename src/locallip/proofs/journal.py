"""Rows that grow on disk a chunk at a time: one writer, nothing is overwritten, and a run that was stopped goes on."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol, TypeVar

from locallip.files import InUse, locked
from locallip.proofs.rows import FORMATS, WrongRows, append_rows, replace_rows
from locallip.proofs.settings import AnySettings, about_file, differences, write_about

Say = Callable[[str], None]
R = TypeVar("R")


class Seeded(AnySettings, Protocol):
    """Settings that note where the random draws began."""

    @property
    def seed(self) -> int: ...


S = TypeVar("S", bound=Seeded)


@contextmanager
def writing(out: Path | None, say: Say) -> Iterator[None]:
    """Be the only one who writes these rows; what goes wrong with the file, and how to go on, is told."""
    if out is None:
        yield
        return
    about_file(out)  # refuses other endings
    if not out.parent.is_dir():
        raise WrongRows(f"--out {out}: there is no folder {out.parent}")
    if out.is_dir():
        raise WrongRows(f"--out {out} is a folder: name a file in it")
    try:
        with locked(out.with_name(f".{out.name}.lock")):
            yield
    except InUse:
        raise WrongRows(f"{out} is in use by another process that is writing it") from None
    except KeyboardInterrupt:
        if out.exists():
            say(f"the rows so far are in {out}: the same command with --resume goes on")
        raise
    except BrokenPipeError:  # that of what we say, not of the rows
        raise
    except OSError as error:
        there = out.exists() or any(out.parent.glob(f".{out.stem}.*.process-*"))  # shared.py
        kept = "; the rows so far are kept: go on with --resume" if there else ""
        raise WrongRows(f"{out} cannot be written: {error.strerror or error}{kept}") from None


def continued(out: Path | None, resume: bool, read: Callable[[Path], S]) -> S | None:
    """The settings of the run that is to go on; None for a new one."""
    if out is None or not (out.exists() or about_file(out).exists()):
        return None
    for other in (out.with_suffix(suffix) for suffix in FORMATS):
        if other.exists() and not out.exists():
            raise WrongRows(f"{about_file(out)} is about {other.name}: name another --out than {out.name}")
    if not resume:
        raise WrongRows(f"{out} or {about_file(out).name} is there already: go on with --resume, or name another --out")
    return read(out)


def seed_of(asked: int | None, known: Seeded | None) -> int:
    """The seed asked for, else that of the run that goes on, else a new one from the operating system."""
    if asked is not None:
        return asked
    return secrets.randbits(62) if known is None else known.seed


def begin(
    out: Path | None,
    settings: S,
    known: S | None,
    chunks: Iterable[slice],
    read: Callable[[Path], list[R]],
    faults: Callable[[list[R]], Sequence[str]],
) -> list[R]:
    """The rows that are there already, whole chunks of them; a new run writes its settings."""
    if out is None:
        return []
    if known is None:
        write_about(out, settings, None)
        return []
    wrong = differences(settings, known)
    if wrong:
        raise WrongRows(f"{out} is of another run: {', '.join(wrong)}")
    rows = read(out) if out.exists() else []
    found = faults(rows)
    if found:
        raise WrongRows(f"{out} cannot be gone on with: {found[0]}")
    whole = max((chunk.stop for chunk in chunks if chunk.stop <= len(rows)), default=0)
    if out.exists():
        replace_rows(out, rows[:whole])
    return rows[:whole]


def grow(
    out: Path | None,
    rows: list[R],
    chunks: Sequence[slice],
    work: Callable[[slice], list[R]],
    told: Callable[[list[R]], str],
    say: Say,
    known: Mapping[int, list[R]] | None = None,
) -> None:
    """Add the rows of the chunks that are missing, and say after each how far that is; `known` ones are not worked on."""
    start, worked, count = time.perf_counter(), 0, max((chunk.stop for chunk in chunks), default=0)
    for chunk in chunks:
        if chunk.start < len(rows):
            continue
        found = None if known is None else known.get(chunk.start)
        new = work(chunk) if found is None else found
        rows += new
        if out is not None:
            append_rows(out, new)
        worked += 0 if found else len(new)
        left = (time.perf_counter() - start) / max(worked, 1) * (count - len(rows))
        say(f"{len(rows)} of {count} images, {told(rows)}, {left:.0f} s left")


def chunks_of(count: int, size: int) -> list[slice]:
    return [slice(first, min(first + size, count)) for first in range(0, count, size)]
