"""Pixels that took long to unpack, kept beside their source for the next time and mapped into memory then."""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import BinaryIO

import numpy as np
import torch
from torch import Tensor

from locallip.files import PART, InUse, locked, rename, sync, write_atomically

#: Seconds between two words on how far it is.
PATIENCE = 5.0
_PIECE = 2**26


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
    images = partial(_in_order, unpack, count, threads)
    with suppress(OSError), _unfinished(path) as half:  # a full disk, or a folder that is not ours to write to
        pixels = _room(half, (count, *shape))
        _fill(pixels, images(), say, f", once and for all in {path}")
        pixels.flush()
        return torch.from_numpy(_put_in_place(half, path, source))
    # In doubt from the beginning: what a disk has refused may be lost.
    plain = np.empty((count, *shape), dtype=np.uint8)
    _fill(plain, images(), say, "")
    return torch.from_numpy(plain)


def _fill(pixels: np.ndarray, images: Iterator[np.ndarray], say: Callable[[str], None], where: str) -> None:
    last = time.perf_counter()
    for index, image in enumerate(images):
        pixels[index] = image
        if time.perf_counter() - last > PATIENCE:
            last = time.perf_counter()
            say(f"unpacked {index + 1:,} of {len(pixels):,} images{where}")


@contextmanager
def _unfinished(path: Path) -> Iterator[Path]:
    """A new file beside `path` that nobody else writes to, removed in the end if it is still there.

    Gigabytes that somebody left who was killed are removed before: nobody holds their lock any more.
    """
    for left in path.parent.glob(f".*{path.suffix}.*{PART}"):
        with suppress(InUse, OSError), locked(left):
            left.unlink()
    half = path.with_name(f".{path.name}.{secrets.token_hex(8)}{PART}")
    try:
        with locked(half):
            yield half
    except InUse as error:  # taken for left over before it was locked
        raise OSError(str(error)) from None
    finally:
        half.unlink(missing_ok=True)


def _room(half: Path, shape: tuple[int, ...]) -> np.memmap:
    """Memory for the pixels that is all there in a file: a disk that became full later would end the process."""
    pixels = np.lib.format.open_memmap(half, mode="w+", dtype=np.uint8, shape=shape)
    if not hasattr(os, "posix_fallocate"):
        raise OSError("no room can be made in files here")
    with open(half, "rb+") as file:
        os.posix_fallocate(file.fileno(), 0, half.stat().st_size)
    return pixels


def _in_order(unpack: Callable[[int], np.ndarray], count: int, threads: int) -> Iterator[np.ndarray]:
    """The images one after the other, some of them unpacked together."""
    if threads == 1:
        yield from map(unpack, range(count))
        return
    with ThreadPoolExecutor(threads) as pool:
        running: deque[Future[np.ndarray]] = deque()
        try:
            for index in range(count):
                running.append(pool.submit(unpack, index))
                if len(running) > 2 * threads:  # or all of them would wait in memory for the one that writes
                    yield running.popleft().result()
            while running:
                yield running.popleft().result()
        finally:
            for future in running:
                future.cancel()


def _put_in_place(half: Path, path: Path, source: str) -> np.ndarray:
    """Pixels first, then what they are of: between the two an old entry meets new pixels, and their checksum says so."""
    with open(half, "rb+") as file:
        sync(file)
        about = {"source": source, "sha256": checksum(file)}
        mapped = _mapped(file)
    rename(half, path)
    with suppress(OSError):
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


def _about(path: Path) -> Path:
    return path.with_suffix(".json")


def checksum(file: BinaryIO) -> str:
    """SHA-256 of a whole file."""
    file.seek(0)
    digest = hashlib.sha256()
    while piece := file.read(_PIECE):
        digest.update(piece)
    return digest.hexdigest()
