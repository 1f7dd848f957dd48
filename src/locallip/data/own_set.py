"""A data set of the user's own to train on: training and test images, each as a folder with one folder of files per class
or as an .npz file."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from locallip.data.errors import DamagedData, MissingData
from locallip.data.files import data_root, read_at_most
from locallip.data.image_file import MOST_BYTES_PER_FILE, class_folders, is_plain, jpeg, png
from locallip.data.image_set import ImageSet, Split
from locallip.data.npz import labels_of_npz, read_npz
from locallip.data.pillow import pillow
from locallip.data.unpacked import kept

NAME = "own"
#: What the folder or file of each split may be called; the first that is there counts.
CALLED: dict[Split, tuple[str, ...]] = {"train": ("train",), "test": ("test", "val", "validation")}
ENDINGS = (".png", ".jpg", ".jpeg")
MOST_CLASSES = 100_000
#: So many of the training images, evenly spread, say whether all are grey.
LOOKED_AT = 100
_GREY, _COLOURED = ("1", "L"), ("P", "RGB", "CMYK", "YCbCr")


def load_own_set(
    split: Split,
    root: str | os.PathLike[str] | None = None,
    *,
    download: bool = False,
    say: Callable[[str], None] = lambda line: None,
    side: int = 0,
) -> ImageSet:
    """The images in the folder or .npz file `root`/train, or `root`/test, /val or /validation, as (N, C, H, W) uint8.

    Files are PNG or JPEG. With a `side` they are cropped to a square in their middle and resized to it; with 0 all must be
    of one size. They are unpacked once, and kept in an .npy file beside their folder; where that cannot be written, every
    time. One channel where the training images are grey, else three. Classes are the folders of the training images: in
    alphabetical order, or where all are called by numbers in that of these.
    """
    if download:
        raise MissingData("images of your own are fetched from nowhere: leave out --download, or name a data set")
    folder = data_root(root, remedy="name the folder with train/ and test/ in it with --data-root DIR")
    place = _place(folder, split)
    training = _try_place(folder, "train") or place
    if place.suffix != training.suffix:
        raise DamagedData(f"{place} and {training}: expected two folders, or two .npz files")
    if place.suffix:
        return _from_npz(place, training, split, side)
    reader = pillow(f"{place} is a folder of image files")
    found = _listed(place)
    known = found if training == place else _listed(training)
    numbers = {name: number for number, name in enumerate(known.classes)}
    if all(map(_is_number, known.classes)) and [int(name) for name in known.classes] != list(range(len(numbers))):
        raise DamagedData(f"{training}: folders that are called by numbers must be those from 0 to {len(numbers) - 1}")
    strange = next((name for name in found.classes if name not in numbers), None)
    if strange is not None:
        raise DamagedData(f"{place / strange}: there is no class of that name in {training}")
    grey = _are_grey(known.files, reader)
    shape = _shape(found.files, grey, side, reader)
    images = kept(
        folder / f"{place.name}-{side or 'whole'}.npy",
        _fingerprint(found, grey, side, reader),
        len(found.files),
        shape,
        lambda index: _decoded(found.files[index], shape, side, reader),
        say,
        threads=os.cpu_count() or 1,
    )
    labels = torch.tensor([numbers[name] for name in found.names], dtype=torch.int64)
    return ImageSet(NAME, split, images, labels, known.classes)


def _place(folder: Path, split: Split) -> Path:
    found = _try_place(folder, split)
    if found is None:
        names = " or ".join(f"{name}/" for name in CALLED[split])
        raise MissingData(
            f"{folder} has no {split} images of your own: expected {names} with a folder of PNG or JPEG files per class, "
            f"or {CALLED[split][0]}.npz; name the folder around it with --data-root DIR"
        )
    return found


def _try_place(folder: Path, split: Split) -> Path | None:
    for name in CALLED[split]:
        if (folder / name).is_dir():
            return folder / name
        if (folder / f"{name}.npz").is_file():
            return folder / f"{name}.npz"
    return None


# Folders ---------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Listed:
    """The files of a split, class by class; `names` has the class of each file, `classes` all of them in their order."""

    classes: tuple[str, ...]
    files: list[Path]
    names: list[str]
    marks: list[str]


def _listed(source: Path) -> _Listed:
    folders = {folder.name: folder for folder in class_folders(source)}
    if all(map(_is_number, folders)):
        folders = dict(sorted(folders.items(), key=lambda item: int(item[0])))
    files, names, marks = [], [], []
    for name, folder in folders.items():
        with os.scandir(folder) as entries:
            there = sorted((entry for entry in entries if not entry.name.startswith(".")), key=lambda entry: entry.name)
        for entry in there:
            if not entry.is_file() or Path(entry.name).suffix.lower() not in ENDINGS:
                raise DamagedData(f"{entry.path}: only {', '.join(ENDINGS)} files are read; remove it, or convert it")
            about = entry.stat()
            files.append(Path(entry.path))
            names.append(name)
            marks.append(f"{name}/{entry.name} {about.st_size} {about.st_mtime_ns}")
    if not files:
        raise DamagedData(f"{source}: there is no image in its folders")
    return _Listed(tuple(folders), files, names, marks)


def _is_number(name: str) -> bool:
    return name.isascii() and name.isdigit()


def _are_grey(files: Sequence[Path], reader: Any) -> bool:
    """Whether the headers of some images say so; what is wrong with a file is said when it is read."""
    some = files[:: -(-len(files) // LOOKED_AT)]
    return all(_header(file, reader).mode in _GREY for file in some)


def _shape(files: Sequence[Path], grey: bool, side: int, reader: Any) -> tuple[int, int, int]:
    """Channels, height and width: those of the first image where nothing is resized."""
    width, height = (side, side) if side else _header(files[0], reader).size
    return 1 if grey else 3, height, width


def _header(file: Path, reader: Any) -> Any:
    try:
        with reader.open(file, formats=("PNG", "JPEG")) as image:  # reads no pixels
            return image
    except Exception as error:  # Pillow has no common class for what a broken file may cause
        raise DamagedData(f"{file} cannot be read as an image ({error})") from None


def _fingerprint(found: _Listed, grey: bool, side: int, reader: Any) -> str:
    """Of all that the pixels depend on; another version of Pillow may round differently when it resizes."""
    about = [*found.marks, f"{grey} {side} {reader.__version__}"]
    return hashlib.sha256("\n".join(about).encode("utf-8", "surrogateescape")).hexdigest()


def _decoded(file: Path, shape: tuple[int, int, int], side: int, reader: Any) -> np.ndarray:
    """One file as (C, H, W) bytes."""
    channels, height, width = shape
    content = read_at_most(file, MOST_BYTES_PER_FILE)
    try:
        # Some files of large data sets are of the other kind than their names say.
        image = (png if content.startswith(b"\x89PNG") else jpeg)(content, reader)
    except Exception as error:  # as above
        raise DamagedData(f"{file} cannot be read ({error}); remove it, or put a whole one there") from None
    if not is_plain(image) or image.mode not in (_GREY if channels == 1 else (*_GREY, *_COLOURED)):
        why = "transparent or animated" if not is_plain(image) else f"of the kind {image.mode!r}"
        wanted = "grey ones, as the first training images are" if channels == 1 else "opaque ones of 8 bits a channel"
        raise DamagedData(f"{file} is {why}: only {wanted}, are read")
    image = image.convert("L" if channels == 1 else "RGB")
    if side:
        image = _fitted(image, side, reader)
    if image.size != (width, height):
        raise DamagedData(
            f"{file} is {image.width} x {image.height} pixels, and the first image {width} x {height}: say with --side, "
            "or with side in the recipe, to how many pixels all are to be resized"
        )
    return np.asarray(image).reshape(height, width, channels).transpose(2, 0, 1)


def _fitted(image: Any, side: int, reader: Any) -> Any:
    """The square in the middle, resized; an image of that size stays as it is."""
    if image.size == (side, side):
        return image
    least = min(image.size)
    left, top = (image.width - least) // 2, (image.height - least) // 2
    # Cut out first: resizing with a box would look at pixels around it.
    square = image.crop((left, top, left + least, top + least))
    return square.resize((side, side), reader.Resampling.BICUBIC)


# An .npz file ----------------------------------------------------------------------------------------------------------


def _from_npz(place: Path, training: Path, split: Split, side: int) -> ImageSet:
    images, labels = read_npz(place)
    if images.dtype != torch.uint8 or images.ndim != 4:
        raise DamagedData(
            f"{place}: images are {tuple(images.shape)} {images.dtype}, expected uint8 of shape (N, channels, height, width)"
        )
    if side and images.shape[2:] != (side, side):
        raise DamagedData(
            f"{place}: images are {images.shape[3]} x {images.shape[2]} pixels, and those of .npz files are not resized: "
            f"leave side = {side} out"
        )
    if len(images) != len(labels) or not len(images) or int(labels.min()) < 0:
        raise DamagedData(
            f"{place} holds {len(images)} images and {len(labels)} labels: expected as many, at least one, and labels from 0"
        )
    known = labels if place == training else labels_of_npz(training)
    highest = int(known.max()) if len(known) else -1
    if highest >= MOST_CLASSES or int(labels.max()) > highest:
        raise DamagedData(f"{place}: labels run up to {int(labels.max())}, and those of {training} up to {highest}")
    return ImageSet(NAME, split, images, labels, tuple(str(number) for number in range(highest + 1)))
