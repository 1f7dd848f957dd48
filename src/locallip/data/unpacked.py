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
from typing import BinaryIO

import numpy as np
import torch
from torch import Tensor

from locallip.files import PART, rename, sync, write_atomically

#: Seconds between two words on how far it is.
PATIENCE = 5.0
_PIECE = 2**26
_TOGETHER = 1024


def recalled(path: Path, source: str) -> Tensor | None:
    """The images (N, C, H, W) kept in `path`, if they are whole and came from `source`.

    What is mapped can be changed without a trace in the file.
    """
    try:
        about = json.loads(_about(path).read_text(encoding="utf-8"))
        with open(path, "rb") as file:  # the same one is looked at and mapped, whatever takes its place meanwhile
            if about["source"] != source or about["sha256"] != checksum(file):
                return None
            return torch.from_numpy(_mapped(file))
    except Exception:  # numpy has no common class for what a file may hold in its place
        return None


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

    `source` is a checksum of what the images come from, `unpack(i)` gives the i-th. They go straight into the file, so that
    more than fit the memory can be unpacked. Where nothing can be written, they are unpacked every time. Threads pay where
    images are large; small ones are mostly Python's work.
    """
    found = recalled(path, source)
    if found is not None and found.shape == (count, *shape):
        return found
    half = path.with_name(f".{path.name}.{os.getpid()}{PART}")
    try:
        pixels = _room(half, (count, *shape))
        where = f", once and for all in {path}" if isinstance(pixels, np.memmap) else ""
        last = time.perf_counter()
        for index, image in enumerate(_in_order(unpack, count, threads)):
            pixels[index] = image
            if time.perf_counter() - last > PATIENCE:
                last = time.perf_counter()
                say(f"unpacked {index + 1:,} of {count:,} images{where}")
        if isinstance(pixels, np.memmap):
            pixels.flush()
            with suppress(OSError):  # such as a folder that is gone
                pixels = _put_in_place(half, path, source)
        return torch.from_numpy(np.asarray(pixels))
    finally:
        with suppress(OSError):
            half.unlink(missing_ok=True)


def _room(half: Path, shape: tuple[int, ...]) -> np.ndarray:
    """Memory for the pixels: of a file with all of its room, or where there is none, of the process."""
    try:
        for left in half.parent.glob(f"{half.name.rpartition('.')[0].rpartition('.')[0]}.*{PART}"):
            if not _lives(left.name.split(".")[-2]):  # a gigabyte of one that was killed
                left.unlink(missing_ok=True)
        pixels = np.lib.format.open_memmap(half, mode="w+", dtype=np.uint8, shape=shape)
        with open(half, "rb+") as file:  # a disk that becomes full later would end the process
            os.posix_fallocate(file.fileno(), 0, half.stat().st_size)
        return pixels
    except (OSError, AttributeError):  # a full disk, a folder that is not ours to write to, or a system without that
        with suppress(OSError):
            half.unlink(missing_ok=True)
        return np.empty(shape, dtype=np.uint8)


def _in_order(unpack: Callable[[int], np.ndarray], count: int, threads: int) -> Iterator[np.ndarray]:
    """The images one after the other, some of them unpacked together."""
    if threads == 1:
        yield from map(unpack, range(count))
        return
    with ThreadPoolExecutor(threads) as pool:
        for first in range(0, count, _TOGETHER):  # or all of them would wait in memory for the one that writes
            yield from pool.map(unpack, range(first, min(first + _TOGETHER, count)))


def _put_in_place(half: Path, path: Path, source: str) -> np.ndarray:
    """Pixels first, then what they are of: between the two an old entry meets new pixels, and their checksum says so."""
    with open(half, "rb+") as file:
        sync(file)
        about = {"source": source, "sha256": checksum(file)}
        mapped = _mapped(file)
    rename(half, path)
    write_atomically(_about(path), json.dumps(about).encode())
    return mapped


def _mapped(file: BinaryIO) -> np.ndarray:
    """The array in an .npy file, mapped so that changes stay in memory; nothing is unpickled."""
    file.seek(0)
    if np.lib.format.read_magic(file) != (1, 0):
        raise ValueError("another version")
    shape, by_columns, dtype = np.lib.format.read_array_header_1_0(file)
    if by_columns or dtype != np.uint8 or len(shape) != 4:
        raise ValueError("no images")
    return np.memmap(file, dtype=np.uint8, mode="c", offset=file.tell(), shape=shape)


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


def checksum(file: BinaryIO) -> str:
    """SHA-256 of a whole file."""
    file.seek(0)
    digest = hashlib.sha256()
    while piece := file.read(_PIECE):
        digest.update(piece)
    return digest.hexdigest()
