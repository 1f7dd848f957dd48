"""Reading files that may be missing, cut short, too long or wrong: each of these ends in an error that names the file."""

from __future__ import annotations

import gzip
import hashlib
import os
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, cast

from locallip.data.errors import REMEDY, MissingData, damaged

#: Names the data root when none is given.
VARIABLE = "LOCALLIP_DATA"


@dataclass(frozen=True)
class Published:
    """What a file holds as its authors published it: the MD5 of its (unpacked) bytes and how many images."""

    md5: str
    count: int = 0


def data_root(root: str | os.PathLike[str] | None, *, create: bool = False, remedy: str = REMEDY) -> Path:
    """The folder of the user's data sets: `root`, else the environment variable LOCALLIP_DATA, else ./data."""
    path = Path(root or os.environ.get(VARIABLE) or "data").expanduser()
    try:
        if create:
            path.mkdir(parents=True, exist_ok=True)
        is_folder, exists = path.is_dir(), path.exists()
    except OSError as error:
        raise MissingData(f"the data root {path} cannot be used ({error.strerror or error}); {remedy}") from error
    if not is_folder:
        what = "is a file, not a folder" if exists else "does not exist"
        raise MissingData(f"the data root {path} {what}; {remedy}")
    return path


def nothing_found(title: str, places: Iterable[object]) -> MissingData:
    """The error for a data set of which no file was found."""
    return MissingData(f"{title} was not found, looked for {', '.join(map(str, places))}; {REMEDY}")


def read_at_most(path: Path, limit: int, remedy: str = REMEDY) -> bytes:
    """The (unpacked) bytes of a plain or .gz file; one with more than `limit` is refused without reading it all."""
    try:
        with open(path, "rb") as raw:
            file = cast(BinaryIO, gzip.GzipFile(fileobj=raw)) if path.suffix == ".gz" else raw
            content = file.read(limit + 1)
    except FileNotFoundError:
        raise MissingData(f"{path} is missing; {remedy}") from None
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise damaged(path, f"it cannot be unpacked ({error})", remedy) from error
    except OSError as error:
        raise MissingData(f"{path} cannot be read ({error.strerror or error}); {remedy}") from error
    if len(content) > limit:
        raise damaged(path, f"it holds more than the expected {limit:,} bytes", remedy)
    return content


def check_md5(path: object, content: bytes, expected: str) -> None:
    """Refuse bytes that are not the published ones."""
    found = hashlib.md5(content, usedforsecurity=False).hexdigest()
    if found != expected:
        raise damaged(path, f"MD5 {found}, expected {expected}")


def check_file_md5(path: Path, expected: str) -> None:
    """Refuse a large file that is not the published one, without holding it in memory."""
    try:
        with open(path, "rb") as file:
            found = hashlib.file_digest(file, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()
    except OSError as error:
        raise MissingData(f"{path} cannot be read ({error.strerror or error}); {REMEDY}") from error
    if found != expected:
        raise damaged(path, f"MD5 {found}, expected {expected}")
