"""Images of the user's own: an .npz file with images and labels, or a folder with one folder of PNG files per class."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from locallip.data.errors import DamagedData, MissingData
from locallip.data.files import read_at_most
from locallip.data.image_file import MOST_BYTES_PER_FILE, class_folders, in_turns, is_plain, png
from locallip.data.image_set import ImageSet
from locallip.data.images import READERS
from locallip.data.npz import read_npz, sizes
from locallip.data.pillow import pillow


@dataclass(frozen=True, eq=False)
class OwnImages(ImageSet):
    """Images in the shape that a network takes, (N, *shape), as uint8 from 0 to 255 or as float32 in [0, 1]."""

    def __post_init__(self) -> None:
        if self.images.ndim < 2 or self.images.dtype not in (torch.uint8, torch.float32):
            raise ValueError(f"images are (N, ...) uint8 or float32, got {tuple(self.images.shape)} {self.images.dtype}")
        self._check_labels()


def load_own(path: Path, shape: Sequence[int], classes: int) -> OwnImages:
    """The images of an .npz file or of a folder, for a network that takes samples of `shape` and tells `classes` apart.

    Classes are called by their numbers. Floats are rounded to float32, and it is that point that certificates are about.

    Raises:
        MissingData: There is nothing of that name, or Pillow is missing.
        DamagedData: Images or labels do not fit the network or are not what they should be; the message says what.
    """
    if not path.exists():
        raise MissingData(f"{path}: there is no such .npz file or folder of images")
    images, labels = _folder(path, shape, classes) if path.is_dir() else read_npz(path, shape)
    if len(images) != len(labels) or not len(images):
        raise DamagedData(f"{path} holds {len(images)} images and {len(labels)} labels: expected as many, and at least one")
    low, high = int(labels.min()), int(labels.max())
    if low < 0 or high >= classes:
        raise DamagedData(f"{path}: labels run from {low} to {high}, and the network tells {classes} classes apart, from 0")
    name = path.name or path.resolve().name
    names = tuple(str(number) for number in range(classes))
    # A name of a data set would stand for that when the rows are verified.
    return OwnImages(f"./{name}" if name in READERS else name, "test", images, labels, names)


def _folder(path: Path, shape: Sequence[int], classes: int) -> tuple[Tensor, Tensor]:
    if len(shape) != 3 or shape[0] not in (1, 3):
        raise DamagedData(
            f"{path}: the network takes {sizes(shape)}, and files are images of 1 or 3 channels: use an .npz file"
        )
    reader = pillow(f"{path} is a folder of image files")
    found = _classes(path, classes)
    by_class = [sorted(entry for entry in folder.iterdir() if not entry.name.startswith(".")) for _, folder in found]
    images, labels = [], []
    for number, file in in_turns(by_class):
        images.append(_decoded(file, shape, reader))
        labels.append(min(found[number][0], 2**31))  # far beyond any number of classes, and within int64
    stacked = np.stack(images) if images else np.empty((0, *shape), np.uint8)
    return torch.from_numpy(stacked), torch.tensor(labels, dtype=torch.int64)


def _classes(path: Path, classes: int) -> list[tuple[int, Path]]:
    """The folder of each class: called by its number, or all of them by names, which are numbered in alphabetical order."""
    entries = class_folders(path)
    if all(entry.name.isascii() and entry.name.isdigit() for entry in entries):
        numbered = sorted((int(entry.name), entry) for entry in entries)
        if len({number for number, _ in numbered}) != len(numbered):
            raise DamagedData(f"{path}: two of its folders stand for one class")
        return numbered
    if len(entries) != classes:
        raise DamagedData(
            f"{path} has {len(entries)} folders, and the network tells {classes} classes apart: call folders by the numbers "
            "of their classes, from 0, or have one for each"
        )
    return list(enumerate(entries))


def _decoded(file: Path, shape: Sequence[int], reader: Any) -> np.ndarray:
    """One PNG file as (C, H, W) bytes; no number is changed: grey becomes three equal channels, and never the other way."""
    channels, height, width = shape
    if file.suffix.lower() != ".png" or not file.is_file():
        raise DamagedData(f"{file}: only .png files are read; use an .npz file for others")
    content = read_at_most(file, MOST_BYTES_PER_FILE)
    try:
        image = png(content, reader)
    except Exception as error:  # Pillow has no common class for what a broken file may cause
        raise DamagedData(f"{file} cannot be read as PNG ({error})") from None
    if image.size != (width, height):
        raise DamagedData(f"{file} is {image.width} x {image.height} pixels, and the network takes {width} x {height}")
    plain = is_plain(image)
    fits = plain and image.mode in (("L", "1") if channels == 1 else ("RGB", "L", "P", "1"))
    if not fits:
        wanted = "grey ones of 8 bits" if channels == 1 else "RGB or grey ones of 8 bits"
        raise DamagedData(
            f"{file} is of the kind {image.mode!r}{'' if plain else ', transparent or animated'}: only {wanted} are read"
        )
    pixels = np.asarray(image.convert("L" if channels == 1 else "RGB"))
    return pixels.reshape(height, width, channels).transpose(2, 0, 1)
