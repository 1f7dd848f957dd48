"""MNIST from its idx files, plain or .gz."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch

from locallip.data.download import MNIST as SOURCES
from locallip.data.download import fetch
from locallip.data.errors import REMEDY, MissingData, damaged
from locallip.data.files import Published, check_md5, data_root, nothing_found, read_at_most
from locallip.data.image_set import ImageSet, Split

CLASSES = tuple("0123456789")
SIDE = 28
FOLDERS = ("", "mnist", "MNIST/raw")
FILES: dict[Split, tuple[str, str]] = {
    "train": ("train-images-idx3-ubyte", "train-labels-idx1-ubyte"),
    "test": ("t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte"),
}
#: MD5 of the unpacked files, so that it does not matter how they were packed.
PUBLISHED: dict[str, Published] = {
    "train-images-idx3-ubyte": Published("6bbc9ace898e44ae57da46a324031adb", 60_000),
    "train-labels-idx1-ubyte": Published("a25bea736e30d166cdddb491f175f624", 60_000),
    "t10k-images-idx3-ubyte": Published("2646ac647ad5339dbf082846283269ea", 10_000),
    "t10k-labels-idx1-ubyte": Published("27ae3e4e09519cfbb04c329615203637", 10_000),
}


def load_mnist(
    split: Split,
    root: str | os.PathLike[str] | None = None,
    *,
    download: bool = False,
    _published: Mapping[str, Published] = PUBLISHED,
) -> ImageSet:
    """The 60,000 training or 10,000 test images, (N, 1, 28, 28) uint8, with labels 0 to 9."""
    folder = data_root(root, create=download)
    image_file, label_file = (_find(folder, name, download) for name in FILES[split])
    pixels = _read_idx(image_file, (_published[FILES[split][0]].count, SIDE, SIDE), _published[FILES[split][0]].md5)
    labels = _read_idx(label_file, (_published[FILES[split][1]].count,), _published[FILES[split][1]].md5)
    if len(labels) and labels.max() >= len(CLASSES):
        raise damaged(label_file, f"it holds the label {labels.max()}, beyond the {len(CLASSES)} classes")
    return ImageSet("mnist", split, torch.from_numpy(pixels).unsqueeze(1), torch.from_numpy(labels).long(), CLASSES)


def _find(root: Path, name: str, download: bool) -> Path:
    """The file called `name` or `name`.gz in any of the usual folders; fetched where it is in none and that was asked."""
    places = [root / folder / f"{name}{suffix}" for folder in FOLDERS for suffix in ("", ".gz")]
    for place in places:
        if place.is_file():
            return place
    if download:
        return fetch(SOURCES[name], root / "mnist")
    if any((place.parent / f"{other}{suffix}").is_file() for place in places for other in SOURCES for suffix in ("", ".gz")):
        raise MissingData(f"MNIST in {root} is incomplete: {name} (or {name}.gz) is missing; {REMEDY}")
    raise nothing_found(f"MNIST's {name} (or {name}.gz)", dict.fromkeys(place.parent for place in places))


def _read_idx(path: Path, shape: tuple[int, ...], md5: str) -> np.ndarray:
    """The unsigned bytes of an idx file: two zeros, type 8, number of axes, their lengths (big-endian), then the values."""
    start = 4 + 4 * len(shape)
    size = start + int(np.prod(shape))
    content = read_at_most(path, size)
    if len(content) < start or content[:3] != b"\0\0\x08":
        raise damaged(path, "it does not begin like an idx file of bytes")
    if content[3] != len(shape):
        raise damaged(path, f"it holds an array of {content[3]} axes, expected {len(shape)}")
    found = tuple(int(n) for n in np.frombuffer(content, ">u4", len(shape), 4))
    if found != shape:
        raise damaged(path, f"it says it holds an array of shape {found}, expected {shape}")
    if len(content) != size:
        raise damaged(path, f"it ends after {len(content):,} bytes, expected {size:,}")
    check_md5(path, content, md5)
    return np.frombuffer(bytearray(content), np.uint8, offset=start).reshape(shape)
