"""A data set of the user's own to train on: training and test images, each as a folder with one folder of files per class
or as an .npz file."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from locallip.data.errors import DamagedData, MissingData
from locallip.data.files import data_root, read_at_most
from locallip.data.image_file import class_folders, image_of, in_turns, is_plain
from locallip.data.image_set import ImageSet, Split
from locallip.data.npz import labels_of_npz, read_npz
from locallip.data.pillow import pillow, versions
from locallip.data.unpacked import kept, recalled

NAME = "own"
#: What the folder or file of each split may be called; the first that is there counts.
CALLED: dict[Split, tuple[str, ...]] = {"train": ("train",), "test": ("test", "val", "validation")}
ENDINGS = (".png", ".jpg", ".jpeg")
#: As many as a network can be recorded with.
MOST_CLASSES = 2**16
LARGEST_SIDE = 10_000
#: A file, and its pixels, may have so many bytes: 89 million pixels in colour.
MOST_BYTES = 2**28
#: From so many pixels on an image is worth a thread of its own.
LARGE = 128 * 128
#: Another one where the same files are to be unpacked into other pixels.
VERSION = 1
REMEDY = "name the folder with train/ and test/ in it with --data-root DIR"
_GREY, _COLOURED = ("1", "L"), ("P", "RGB", "CMYK", "YCbCr")


class Like(NamedTuple):
    """What images must be like: channels, height and width, and the classes by their numbers."""

    shape: Sequence[int]
    classes: Sequence[str]


def load_own_set(
    split: Split,
    root: str | os.PathLike[str] | None = None,
    *,
    download: bool = False,
    say: Callable[[str], None] = lambda line: None,
    side: int = 0,
    like: Like | None = None,
) -> ImageSet:
    """The images in the folder or .npz file `root`/train, or `root`/test, /val or /validation, as (N, C, H, W) uint8.

    Files are PNG or JPEG. With a `side` they are cropped to a square in their middle and resized to it; with 0 all must be
    of one size. They are unpacked once, and kept in a hidden file in `root`; where that cannot be written, every time.
    Images of a folder come in turns, the first of every class before the second of any.

    `like` is what a network takes, or what the training images are. Without it images have one channel where all training
    images are grey, else three, and classes are the folders of these: in alphabetical order, or all by numbers from 0.
    """
    if download:
        raise MissingData("images of your own are fetched from nowhere: leave out --download, or name a data set")
    _check_wish(side, like)
    folder = data_root(root, remedy=REMEDY)
    training = _try_place(folder, "train")
    place = training if split == "train" else _try_place(folder, split, like=training)
    if place is None:
        raise _nothing(folder, split)
    if training is not None and training.suffix != place.suffix:
        raise DamagedData(f"{training} and {place}: expected two folders, or two .npz files")
    if place.suffix:
        return _from_npz(place, training or place, split, side, like)
    if like is not None and like.shape[0] not in (1, 3):
        raise DamagedData(
            f"{place}: the network takes {like.shape[0]} channels, and files are images of 1 or 3: use .npz files"
        )
    reader = pillow(f"{place} is a folder of image files")
    found = _listed(place, numbered=like is None and training in (None, place))
    if like is None and training is not None and training != place:
        known = _listed(training, numbered=True)
        like = Like((_channels(known.files, reader), *_size(found.files, side, reader)), known.classes)
    classes = tuple(found.classes if like is None else like.classes)
    _check_classes(place, found, classes)
    images = _images(folder / f".locallip-{place.name}-{side or 'whole'}.npy", found, side, like, reader, say)
    numbers = {name: number for number, name in enumerate(classes)}
    labels = torch.tensor([numbers[name] for name in found.names], dtype=torch.int64)
    return ImageSet(NAME, split, images, labels, classes)


def _check_wish(side: int, like: Like | None) -> None:
    if not 0 <= side <= LARGEST_SIDE:
        raise ValueError(f"side = {side}: expected a number of pixels from 0 to {LARGEST_SIDE:,}")
    if like is not None and len(like.shape) != 3:
        raise DamagedData(
            f"the network takes inputs of shape {tuple(like.shape)}, and images have channels, height and width"
        )


def _try_place(folder: Path, split: Split, like: Path | None = None) -> Path | None:
    """The folder or .npz file of a split: of several one with labels, and of the kind of `like`."""
    places = [folder / f"{name}{ending}" for name in CALLED[split] for ending in ("", ".npz")]
    there = [place for place in places if (place.is_file() if place.suffix else place.is_dir())]
    fit = [place for place in there if place.suffix or any(child.is_dir() for child in place.iterdir())]
    same = [place for place in fit if like is not None and place.suffix == like.suffix]
    return next(iter(same or fit or there), None)


def _nothing(folder: Path, split: Split) -> MissingData:
    names = " or ".join(f"{name}/" for name in CALLED[split])
    return MissingData(
        f"{folder} has no {split} images of your own: expected {names} with a folder of PNG or JPEG files per class, or "
        f"{CALLED[split][0]}.npz; name the folder around it with --data-root DIR"
    )


# Folders ---------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Listed:
    """The files of a split in turns; `names` has the class of each file, `classes` all folders in their order.

    `marks` change when a file does, or another one takes its place.
    """

    classes: tuple[str, ...]
    files: list[Path]
    names: list[str]
    marks: list[str]


def _listed(source: Path, numbered: bool) -> _Listed:
    """The files of a folder; `numbered` says that its folders are all the classes there are."""
    classes = _in_order(source, [folder.name for folder in class_folders(source)], numbered)
    by_class = [_files(source / name) for name in classes]
    empty = next((name for name, files in zip(classes, by_class, strict=True) if not files), None)
    if numbered and empty is not None:
        raise DamagedData(f"{source / empty} holds no image: remove that folder, or put some into it")
    files, names, marks = [], [], []
    for number, entry in in_turns(by_class):
        about, name = entry.stat(), classes[number]
        files.append(Path(entry.path))
        names.append(name)
        found = (about.st_size, about.st_mtime_ns, about.st_ctime_ns, about.st_ino)
        marks.append(" ".join([f"{name}/{entry.name}", *map(str, found)]))
    if not files:
        raise DamagedData(f"{source}: there is no image in its folders")
    return _Listed(classes, files, names, marks)


def _in_order(source: Path, names: list[str], numbered: bool) -> tuple[str, ...]:
    """The folders in alphabetical order, or where they are called by numbers in that of these, which must be all."""
    numbers = [name for name in names if name.isascii() and name.isdigit()]
    ordered = sorted(names, key=int if len(numbers) == len(names) else str)
    if numbered and numbers and (len(numbers) < len(names) or list(map(int, ordered)) != list(range(len(names)))):
        raise DamagedData(f"{source}: folders that are called by numbers must be those from 0 on, and no others among them")
    return tuple(ordered)


def _files(folder: Path) -> list[os.DirEntry[str]]:
    with os.scandir(folder) as entries:
        files = sorted((entry for entry in entries if not entry.name.startswith(".")), key=lambda entry: entry.name)
    for entry in files:
        if not entry.is_file():
            raise DamagedData(f"{entry.path} is no file: expected {', '.join(ENDINGS)} files and nothing else")
        if Path(entry.name).suffix.lower() not in ENDINGS:
            raise DamagedData(f"{entry.path}: only {', '.join(ENDINGS)} files are read; remove it, or convert it")
    return files


def _check_classes(place: Path, found: _Listed, classes: tuple[str, ...]) -> None:
    if not 2 <= len(classes) <= MOST_CLASSES:
        raise DamagedData(f"{place}: there must be from 2 to {MOST_CLASSES:,} classes, and there are {len(classes):,}")
    known = set(classes)
    strange = next((name for name in found.classes if name not in known), None)
    if strange is not None:
        some = ", ".join(map(repr, classes[:5])) + (", ..." if len(classes) > 5 else "")
        raise DamagedData(f"{place}: there is no class {strange!r} among those trained on, which are {some}")


def _images(path: Path, found: _Listed, side: int, like: Like | None, reader: Any, say: Callable[[str], None]) -> Tensor:
    """Pixels of all files, kept in `path`."""
    size = _size(found.files, side, reader)
    if like is not None and tuple(like.shape[1:]) != size:
        sizes = [f"{width} x {height}" for height, width in (size, like.shape[1:])]
        raise DamagedData(f"{found.files[0]} is {sizes[0]} pixels, and images to train on or of this network are {sizes[1]}")
    if like is None:  # what was read with one channel is all grey, and not looked through again
        known = recalled(path, _fingerprint(found, (1, *size), reader))
        if known is not None and len(known) == len(found.files):
            return known
    shape = (like.shape[0] if like else _channels(found.files, reader), *size)
    width, height = _header(found.files[0], reader).size

    def unpack(index: int) -> np.ndarray:
        return _decoded(found.files[index], shape, side, reader)

    threads = _cores() if width * height >= LARGE else 1
    try:
        return kept(path, _fingerprint(found, shape, reader), len(found.files), shape, unpack, say, threads)
    except MemoryError:
        raise DamagedData(
            f"{path.parent}: {len(found.files):,} images of {shape[2]} x {shape[1]} pixels have room neither on the disk "
            "nor in memory: resize them to fewer pixels with --side"
        ) from None


def _fingerprint(found: _Listed, shape: tuple[int, ...], reader: Any) -> str:
    """Of all that the pixels depend on."""
    about = [*found.marks, f"{VERSION} {shape} {versions(reader)}"]
    return hashlib.sha256("\n".join(about).encode("utf-8", "surrogateescape")).hexdigest()


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _channels(files: Sequence[Path], reader: Any) -> int:
    """1 where the headers of all images say that they are grey."""
    return 1 if all(_header(file, reader).mode in _GREY for file in files) else 3


def _size(files: Sequence[Path], side: int, reader: Any) -> tuple[int, int]:
    """Height and width: those of the first image where nothing is resized."""
    if side:
        return side, side
    width, height = _header(files[0], reader).size
    return height, width


def _header(file: Path, reader: Any) -> Any:
    try:
        with reader.open(file, formats=("PNG", "JPEG")) as image:  # reads no pixels
            return image
    except Exception as error:  # Pillow has no common class for what a broken file may cause
        raise _broken(file, error) from None


def _broken(file: Path, error: Exception) -> DamagedData:
    return DamagedData(f"{file} cannot be read ({error}); remove it, or put a whole one there")


def _decoded(file: Path, shape: Sequence[int], side: int, reader: Any) -> np.ndarray:
    """One file as (C, H, W) bytes."""
    channels, height, width = shape
    content = read_at_most(file, MOST_BYTES, remedy="then begin again")
    try:
        # Some files of large data sets are of the other kind than their names say.
        image = image_of(content, reader, MOST_BYTES)
    except Exception as error:  # as above
        raise _broken(file, error) from None
    if not is_plain(image) or image.mode not in (_GREY if channels == 1 else (*_GREY, *_COLOURED)):
        why = "transparent or animated" if not is_plain(image) else f"of the kind {image.mode!r}"
        wanted = "grey ones, as the training images are," if channels == 1 else "opaque ones of 8 bits a channel"
        raise DamagedData(f"{file} is {why}: only {wanted} are read")
    image = image.convert("L" if channels == 1 else "RGB")
    if side:
        image = _fitted(image, side, reader)
    if image.size != (width, height):
        raise DamagedData(
            f"{file} is {image.width} x {image.height} pixels, and the first image {width} x {height}: train with --side, "
            "or with side in the recipe, which says to how many pixels all are to be resized"
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


def _from_npz(place: Path, training: Path, split: Split, side: int, like: Like | None) -> ImageSet:
    images, labels = read_npz(place, None if like is None else like.shape)
    if images.dtype != torch.uint8 or images.ndim != 4 or not images[:1].numel():
        raise DamagedData(
            f"{place}: images are {tuple(images.shape)} {images.dtype}, expected uint8 of shape (N, channels, height, width)"
        )
    if images.shape[1] > 4 >= images.shape[3]:
        raise DamagedData(f"{place}: channels seem to stand last in {tuple(images.shape)}: use images.transpose(0, 3, 1, 2)")
    if side and images.shape[2:] != (side, side):
        raise DamagedData(
            f"{place}: images are {images.shape[3]} x {images.shape[2]} pixels, and those of .npz files are not resized: "
            f"leave side = {side} out"
        )
    if len(images) != len(labels) or int(labels.min()) < 0:
        raise DamagedData(
            f"{place} holds {len(images)} images and {len(labels)} labels: expected as many, and labels from 0"
        )
    classes = tuple(like.classes) if like else _numbers(training, labels if place == training else labels_of_npz(training))
    if int(labels.max()) >= len(classes):
        raise DamagedData(f"{place}: labels run up to {int(labels.max())}, and those trained on up to {len(classes) - 1}")
    return ImageSet(NAME, split, images, labels, classes)


def _numbers(training: Path, labels: Tensor) -> tuple[str, ...]:
    """The classes that labels stand for."""
    count = int(labels.max()) + 1 if len(labels) else 0
    if not 2 <= count <= MOST_CLASSES:
        raise DamagedData(
            f"{training}: labels must run up to at least 1 and at most {MOST_CLASSES - 1:,}, not to {count - 1:,}"
        )
    return tuple(map(str, range(count)))
