"""Images of the user's own: an .npz file with images and labels, or a folder with one folder of PNG files per class."""

from __future__ import annotations

import io
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from locallip.data.errors import DamagedData, MissingData
from locallip.data.files import read_at_most
from locallip.data.image_set import ImageSet
from locallip.data.images import READERS
from locallip.data.pillow import pillow
from locallip.data.png import check_png

#: More than this is not read into memory at once.
MOST_BYTES = 2**34
MOST_BYTES_PER_FILE = 2**26
#: The last chunk of a PNG file: no bytes, its name, its checksum.
_END = b"\0\0\0\0IEND\xaeB`\x82"


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
    images, labels = _folder(path, shape, classes) if path.is_dir() else _npz(path, shape)
    if len(images) != len(labels) or not len(images):
        raise DamagedData(f"{path} holds {len(images)} images and {len(labels)} labels: expected as many, and at least one")
    low, high = int(labels.min()), int(labels.max())
    if low < 0 or high >= classes:
        raise DamagedData(f"{path}: labels run from {low} to {high}, and the network tells {classes} classes apart, from 0")
    name = path.name or path.resolve().name
    names = tuple(str(number) for number in range(classes))
    # A name of a data set would stand for that when the rows are verified.
    return OwnImages(f"./{name}" if name in READERS else name, "test", images, labels, names)


# An .npz file ----------------------------------------------------------------------------------------------------------


def _npz(path: Path, shape: Sequence[int]) -> tuple[Tensor, Tensor]:
    try:
        with zipfile.ZipFile(path) as archive:
            images = _array(archive, path, "images")
            labels = _array(archive, path, "labels")
    except DamagedData:
        raise
    except Exception as error:  # zipfile, its four ways of packing and numpy have no common class for a broken file
        raise DamagedData(
            f"{path} cannot be read as .npz ({type(error).__name__}: {error}); write it with "
            "numpy.savez(path, images=..., labels=...)"
        ) from None
    if images.shape[1:] != tuple(shape):
        found, hint = _sizes(images.shape[1:]), _turned(images, shape)
        raise DamagedData(f"{path}: its images are {found}, and the network takes {_sizes(shape)}{hint}")
    if labels.dtype.kind not in "iu" or labels.ndim != 1:
        raise DamagedData(f"{path}: labels are {labels.dtype} of shape {labels.shape}, expected whole numbers of shape (N,)")
    # Far beyond any number of classes, and within int64, which uint64 need not be.
    return _pixels(images, path), torch.from_numpy(np.clip(labels, -1, 2**31).astype(np.int64))


def _array(archive: zipfile.ZipFile, path: Path, name: str) -> np.ndarray:
    """One array of the file, without ever unpickling; its size is known before it is unpacked."""
    try:
        info = archive.getinfo(f"{name}.npy")
    except KeyError:
        raise DamagedData(f"{path} has no array {name!r}; write it with numpy.savez(path, images=..., labels=...)") from None
    if info.file_size > MOST_BYTES:
        raise DamagedData(f"{path}: {name} has {info.file_size:,} bytes, more than {MOST_BYTES:,}: use several files")
    with archive.open(info) as file:
        array = np.lib.format.read_array(io.BytesIO(file.read(info.file_size)), allow_pickle=False)
    if array.ndim < 1:
        raise DamagedData(f"{path}: {name} is a single number")
    return array


def _pixels(images: np.ndarray, path: Path) -> Tensor:
    if images.dtype == np.uint8:
        return torch.from_numpy(np.ascontiguousarray(images))
    if images.dtype.kind != "f":
        raise DamagedData(f"{path}: images are {images.dtype}, expected uint8 from 0 to 255, or floats in [0, 1]")
    if not np.isfinite(images).all():
        raise DamagedData(f"{path}: images hold NaN or infinite values")
    if images.size and (images.min() < 0 or images.max() > 1):
        low, high = float(images.min()), float(images.max())  # whole: 1.0000001 is no 1
        raise DamagedData(
            f"{path}: images run from {low!r} to {high!r}, expected floats in [0, 1], or uint8 from 0 to 255; what "
            "the network does to pixels beyond that, such as subtracting a mean, belongs into its file"
        )
    return torch.from_numpy(np.array(images, dtype=np.float32, order="C"))


def _turned(images: np.ndarray, shape: Sequence[int]) -> str:
    """A hint, where it looks as if channels stood last."""
    if images.ndim == 4 and (images.shape[3], *images.shape[1:3]) == tuple(shape):
        return ": use images.transpose(0, 3, 1, 2)"
    return ""


# A folder --------------------------------------------------------------------------------------------------------------


def _folder(path: Path, shape: Sequence[int], classes: int) -> tuple[Tensor, Tensor]:
    if len(shape) != 3 or shape[0] not in (1, 3):
        raise DamagedData(
            f"{path}: the network takes {_sizes(shape)}, and files are images of 1 or 3 channels: use an .npz file"
        )
    reader = pillow(f"{path} is a folder of image files")
    images, labels = [], []
    for label, folder in _classes(path, classes):
        for file in sorted(entry for entry in folder.iterdir() if not entry.name.startswith(".")):
            images.append(_decoded(file, shape, reader))
            labels.append(min(label, 2**31))  # far beyond any number of classes, and within int64
    stacked = np.stack(images) if images else np.empty((0, *shape), np.uint8)
    return torch.from_numpy(stacked), torch.tensor(labels, dtype=torch.int64)


def _classes(path: Path, classes: int) -> list[tuple[int, Path]]:
    """The folder of each class: called by its number, or all of them by names, which are numbered in alphabetical order."""
    entries = sorted(entry for entry in path.iterdir() if not entry.name.startswith("."))
    stray = next((entry for entry in entries if not entry.is_dir()), None)
    if stray is not None or not entries:
        what = f"{stray.name!r} is a file" if stray is not None else "it is empty"
        raise DamagedData(f"{path}: expected one folder per class and nothing else, and {what}")
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
    if not content.endswith(_END):  # Pillow does not ask for it
        raise DamagedData(f"{file} does not end like a PNG file: it is cut short")
    try:
        colours = check_png(content, MOST_BYTES_PER_FILE)
        with reader.open(io.BytesIO(content), formats=("PNG",)) as image:
            size, mode = image.size, image.mode  # known from the header: a huge image is not unpacked
            plain = not image.info.keys() & {"transparency"} and getattr(image, "n_frames", 1) == 1
            fits = plain and mode in (("L", "1") if channels == 1 else ("RGB", "L", "P", "1"))
            if mode == "P" and colours is not None and size == (width, height) and np.asarray(image).max() >= colours:
                raise ValueError(f"a pixel has a colour that its palette of {colours} lacks")
            if size == (width, height) and fits:
                pixels = np.asarray(image.convert("L" if channels == 1 else "RGB"))
    except Exception as error:  # Pillow has no common class for what a broken file may cause
        raise DamagedData(f"{file} cannot be read as PNG ({error})") from None
    if size != (width, height):
        raise DamagedData(f"{file} is {size[0]} x {size[1]} pixels, and the network takes {width} x {height}")
    if not fits:
        wanted = "grey ones of 8 bits" if channels == 1 else "RGB or grey ones of 8 bits"
        raise DamagedData(
            f"{file} is of the kind {mode!r}{'' if plain else ', transparent or animated'}: only {wanted} are read"
        )
    return pixels.reshape(height, width, channels).transpose(2, 0, 1)


def _sizes(shape: Sequence[int]) -> str:
    return " x ".join(map(str, shape))
