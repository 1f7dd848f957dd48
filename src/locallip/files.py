"""Files that are whole or not there, whenever the machine stops."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

try:
    import fcntl
except ImportError:  # not on Windows, where two processes in one place are not noticed
    fcntl = None  # type: ignore[assignment]

PART = ".part"  # files of this suffix are unfinished and may be deleted


class InUse(Exception):
    """Another process holds the lock."""


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold the lock that this file stands for; it is made where it is missing, and stays."""
    with open(path, "a") as file:
        if fcntl is not None:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise InUse(str(path)) from None
        yield


def write_atomically(path: Path, data: bytes) -> None:
    """Write a file so that a crash leaves the old one or the new one, never a part."""
    half = path.with_name(f".{path.name}.{os.getpid()}{PART}")
    try:
        with open(half, "wb") as file:
            file.write(data)
            sync(file)
        rename(half, path)
    except BaseException:
        with suppress(OSError):
            half.unlink()
        raise


def check_writable(path: Path) -> None:
    """Raise OSError where no file can be made beside `path`, before somebody waits for what shall be in it."""
    trial = path.with_name(f".{path.name}.{os.getpid()}{PART}")
    with open(trial, "wb"):
        pass
    trial.unlink()


def rename(half: Path, path: Path) -> None:
    """Put a finished file in its place, for good."""
    os.replace(half, path)
    _sync_folder(path.parent)


def sync(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())


def _sync_folder(folder: Path) -> None:
    """Make renames in a folder last through a power cut, where the system offers it."""
    if os.name == "nt":
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
