"""Pixels that took long to unpack, kept beside their source for the next time and mapped into memory then."""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from locallip.files import PART, rename, sync, write_atomically

#: Seconds between two words on how far it is.
PATIENCE = 5.0
_PIECE = 2**26
_TOGETHER = 1024


def kept(
    path: Path,
    source: str,
    count: int,
    shape: Sequence[int],
    unpack: Callable[[int], np.ndarray],
    say: Callable[[str], None],
    threads: int = 1,
) -> Tensor:
    """Images (count, *shape) uint8: those kept in `path` if they came from `source`, else unpacked one by one and kept.

    `source` is a checksum of what the images come from, `unpack(i)` gives the i-th. Where nothing can be written, the
    images are unpacked every time. What is mapped can be changed without a trace in the file. Threads pay where images are
    large; small ones are mostly Python's work.
    """
    found = _read(path, source, (count, *shape))
    if found is not None:
        return found
    pixels = np.empty((count, *shape), dtype=np.uint8)
    last = time.perf_counter()
    for index, image in enumerate(_in_order(unpack, count, threads)):
        pixels[index] = image
        if time.perf_counter() - last > PATIENCE:
            last = time.perf_counter()
            say(f"unpacked {index + 1:,} of {count:,} images, once and for all in {path}")
    with suppress(OSError):  # a full disk, or a folder that is not ours to write to
        _write(path, source, pixels)
    return torch.from_numpy(pixels)


def _in_order(unpack: Callable[[int], np.ndarray], count: int, threads: int) -> Iterator[np.ndarray]:
    """The images one after the other, some of them unpacked together."""
    if threads == 1:
        yield from map(unpack, range(count))
        return
    with ThreadPoolExecutor(threads) as pool:
        for first in range(0, count, _TOGETHER):  # or all of them would wait in memory for the one that writes
            yield from pool.map(unpack, range(first, min(first + _TOGETHER, count)))


def _write(path: Path, source: str, pixels: np.ndarray) -> None:
    """Pixels first, then what they are of: between the two an old entry meets new pixels, and their checksum says so."""
    half = path.with_name(f".{path.name}.{os.getpid()}{PART}")
    for left in path.parent.glob(f".{path.name}.*{PART}"):
        if not _lives(left.name.split(".")[-2]):  # a gigabyte of one that was killed
            left.unlink(missing_ok=True)
    try:
        with open(half, "wb") as file:
            np.save(file, pixels)
            sync(file)
        about = {"source": source, "sha256": _checksum(half)}
        rename(half, path)
        write_atomically(_about(path), json.dumps(about).encode())
    finally:
        half.unlink(missing_ok=True)


def _lives(process: str) -> bool:
    """Whether a process of this number works here; one of another machine that does not only loses what is kept."""
    try:
        os.kill(int(process), 0)
    except ProcessLookupError:
        return False
    except (OSError, ValueError, OverflowError):
        return True
    return True


def _about(path: Path) -> Path:
    return path.with_suffix(".json")


def _read(path: Path, source: str, shape: tuple[int, ...]) -> Tensor | None:
    """What is kept, if it is whole and of this source."""
    try:
        about = json.loads(_about(path).read_text(encoding="utf-8"))
        if about["source"] != source or about["sha256"] != _checksum(path):
            return None
        pixels = np.load(path, mmap_mode="c")
    except Exception:  # numpy has no common class for what a file may hold in its place
        return None
    if not isinstance(pixels, np.ndarray):
        return None
    return torch.from_numpy(pixels) if pixels.shape == shape and pixels.dtype == np.uint8 else None


def _checksum(path: Path) -> str:
    digest = hashlib.sha256()
    for piece in _pieces(path):
        digest.update(piece)
    return digest.hexdigest()


def _pieces(path: Path) -> Iterator[bytes]:
    with open(path, "rb") as file:
        while piece := file.read(_PIECE):
            yield piece
