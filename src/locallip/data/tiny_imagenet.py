"""Tiny-ImageNet from its folder of JPEG files, or from the .zip it is published in; Pillow reads the JPEGs."""

from __future__ import annotations

import hashlib
import io
import os
import zipfile
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

from locallip.data.download import TINY_IMAGENET as SOURCE
from locallip.data.download import fetch
from locallip.data.errors import REMEDY, MissingData, damaged
from locallip.data.files import check_file_md5, data_root, nothing_found, read_at_most
from locallip.data.image_set import ImageSet, Split
from locallip.data.pillow import pillow
from locallip.data.unpacked import kept

FOLDER = "tiny-imagenet-200"
SIDE = 64
MOST_BYTES = 1_000_000


@dataclass(frozen=True)
class Counts:
    """How much was published: the files themselves have no published checksums, the archive has."""

    classes: int = 200
    train: int = 500
    test: int = 50
    zip_md5: str = SOURCE.md5


class _Files(Protocol):
    """Where the files lie: a folder or an archive; names are relative, with slashes."""

    #: Beside what images that were unpacked once are kept.
    place: Path

    def path(self, name: str) -> object: ...
    def read(self, name: str) -> bytes: ...
    def listing(self, folder: str) -> list[str]: ...
    def mark(self, name: str) -> str: ...


class _Folder:
    """The files of a folder on the disk."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.place = folder.absolute() if folder.name not in ("", "..") else folder.resolve()  # which has a name

    def path(self, name: str) -> Path:
        return self.folder / name

    def read(self, name: str) -> bytes:
        return read_at_most(self.folder / name, MOST_BYTES)

    def listing(self, folder: str) -> list[str]:
        path = self.folder / folder
        if not path.is_dir():
            raise MissingData(f"the folder {path} is missing; {REMEDY}")
        return sorted(entry.name for entry in os.scandir(path) if entry.is_file())

    def mark(self, name: str) -> str:
        """What changes when the file does: its size and time."""
        found = (self.folder / name).stat()
        return f"{name} {found.st_size} {found.st_mtime_ns}"


class _Archive:
    """The files of the published .zip, read in place."""

    def __init__(self, path: Path, md5: str) -> None:
        check_file_md5(path, md5)
        self.file = self.place = path
        self.md5 = md5
        try:
            self.zip = zipfile.ZipFile(path)
        except (zipfile.BadZipFile, OSError) as error:
            raise damaged(path, f"it cannot be unpacked ({error})") from error
        self.names: dict[str, list[str]] = {}
        for entry in self.zip.namelist():
            folder, _, name = entry.rpartition("/")
            self.names.setdefault(folder, []).append(name)

    def path(self, name: str) -> Path:
        return self.file / FOLDER / name

    def read(self, name: str) -> bytes:
        try:
            if self.zip.getinfo(f"{FOLDER}/{name}").file_size > MOST_BYTES:
                raise damaged(self.path(name), f"it holds more than the expected {MOST_BYTES:,} bytes")
            return self.zip.read(f"{FOLDER}/{name}")
        except KeyError:
            raise damaged(self.file, f"{name} is missing in it") from None
        except (zipfile.BadZipFile, OSError) as error:
            raise damaged(self.path(name), f"it cannot be unpacked ({error})") from error

    def listing(self, folder: str) -> list[str]:
        return sorted(name for name in self.names.get(f"{FOLDER}/{folder}", []) if name)

    def mark(self, name: str) -> str:
        return f"{name} {self.md5}"


def load_tiny_imagenet(
    split: Split,
    root: str | os.PathLike[str] | None = None,
    *,
    download: bool = False,
    say: Callable[[str], None] = lambda line: None,
    _counts: Counts = Counts(),
) -> ImageSet:
    """The 100,000 training images or, as "test", the 10,000 validation images, (N, 3, 64, 64) uint8 in RGB.

    They are unpacked once, and kept in a file beside the folder or the archive; where that cannot be written, every time.
    Classes are the WordNet numbers in alphabetical order, as a reader of image folders would number them. Validation
    images stand for the test: the labels of the test images are not public, and the paper's figures are on these.
    """
    reader = pillow("Tiny-ImageNet is made of JPEG files")
    files = _find(data_root(root, create=download), download, _counts)
    classes = tuple(sorted(files.read("wnids.txt").decode("ascii", "replace").split()))
    if len(set(classes)) != _counts.classes:
        raise damaged(files.path("wnids.txt"), f"it names {len(set(classes))} classes, expected {_counts.classes}")
    if len(classes) > len(set(classes)):  # its images would be there twice, with two labels
        raise damaged(files.path("wnids.txt"), "it names a class twice")
    if split == "train":
        names, labels = _training(files, classes, _counts.train)
    else:
        names, labels = _validation(files, classes, _counts.test)

    def unpack(index: int) -> np.ndarray:
        return _decode(files.path(names[index]), files.read(names[index]), reader)

    source = hashlib.sha256("\n".join(files.mark(name) for name in names).encode()).hexdigest()
    beside = files.place.with_name(f"{files.place.stem}-{split}.npy")
    images = kept(beside, source, len(names), (3, SIDE, SIDE), unpack, say)
    return ImageSet("tiny-imagenet", split, images, torch.tensor(labels, dtype=torch.int64), classes)


def _find(root: Path, download: bool, counts: Counts) -> _Files:
    """The folder or the archive, the first that is there; a folder before an archive."""
    bases = [root, root / "tiny-imagenet"]
    folders = [*(base / FOLDER for base in bases), *bases]
    for folder in folders:
        if (folder / "wnids.txt").is_file():
            return _Folder(folder)
    archives = [base / SOURCE.name for base in bases]
    for archive in archives:
        if archive.is_file():
            return _Archive(archive, counts.zip_md5)
    if download:
        return _Archive(fetch(SOURCE, root), counts.zip_md5)
    if folders[0].is_dir():
        raise MissingData(f"Tiny-ImageNet in {folders[0]} is incomplete: wnids.txt is missing; {REMEDY}")
    raise nothing_found("Tiny-ImageNet", [*(folder / "wnids.txt" for folder in folders[:2]), *archives])


def _training(files: _Files, classes: Sequence[str], count: int) -> tuple[list[str], list[int]]:
    """Names and labels of the training images, class by class."""
    names, labels = [], []
    for label, wnid in enumerate(classes):
        folder = f"train/{wnid}/images"
        listing = [name for name in files.listing(folder) if name.endswith(".JPEG")]
        if len(listing) != count:
            raise damaged(files.path(folder), f"it holds {len(listing)} images, expected {count}")
        strange = next((name for name in listing if not name.startswith(f"{wnid}_")), None)
        if strange:
            raise damaged(files.path(f"{folder}/{strange}"), f"it is in the folder of {wnid} but not named after it")
        names += [f"{folder}/{name}" for name in listing]
        labels += [label] * count
    return names, labels


def _validation(files: _Files, classes: Sequence[str], count: int) -> tuple[list[str], list[int]]:
    """Names and labels of the validation images, in the order of their list."""
    table = "val/val_annotations.txt"
    numbers = {wnid: label for label, wnid in enumerate(classes)}
    there = {name for name in files.listing("val/images") if name.endswith(".JPEG")}
    labels: dict[str, int] = {}
    for number, line in enumerate(files.read(table).decode("ascii", "replace").splitlines(), 1):
        name, wnid = [*line.split("\t"), "", ""][:2]
        if wnid not in numbers or name in labels:
            raise damaged(files.path(table), f"line {number} is not a new image with one of the classes: {line[:80]!r}")
        if name not in there:  # also keeps a name such as ../x from leaving the folder
            raise damaged(files.path("val/images"), f"{name!r} is missing in it")
        labels[name] = numbers[wnid]
    sizes = Counter(labels.values())
    wrong = next((wnid for wnid, label in numbers.items() if sizes[label] != count), None)
    if wrong:
        raise damaged(files.path(table), f"it gives {wrong} {sizes[numbers[wrong]]} images, expected {count}")
    return [f"val/images/{name}" for name in labels], list(labels.values())


def _decode(path: object, content: bytes, reader: Any) -> np.ndarray:
    """One JPEG file as (3, 64, 64) bytes; grey images become RGB."""
    # Pillow fills up an image that lacks its end without a word, so the end mark is looked for first.
    if content[:2] != b"\xff\xd8" or content[-2:] != b"\xff\xd9":
        raise damaged(path, "it does not begin and end like a JPEG file")
    try:
        with reader.open(io.BytesIO(content), formats=("JPEG",)) as image:
            size = image.size  # known from the header: a huge image is not unpacked
            pixels = np.asarray(image.convert("RGB")) if size == (SIDE, SIDE) else None
    except Exception as error:  # Pillow has no common class for what a broken file may cause
        raise damaged(path, f"it cannot be read as JPEG ({error})") from error
    if pixels is None:
        raise damaged(path, f"it is {size[0]} x {size[1]} pixels, expected {SIDE} x {SIDE}")
    return pixels.transpose(2, 0, 1)
