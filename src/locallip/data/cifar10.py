"""CIFAR-10 from any of its published layouts: binary or python batches, as folders or as the archives they came in."""

from __future__ import annotations

import os
import tarfile
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from locallip.data.download import CIFAR10 as SOURCE
from locallip.data.download import fetch
from locallip.data.errors import REMEDY, MissingData, damaged
from locallip.data.files import Published, check_file_md5, check_md5, data_root, nothing_found, read_at_most
from locallip.data.image_set import ImageSet, Split
from locallip.data.plain_pickle import NotPlain, as_array, read_plain

CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
SHAPE, PIXELS = (3, 32, 32), 3072
FOLDERS = ("", "cifar10", "CIFAR10", "cifar-10")
BATCHES: dict[Split, tuple[str, ...]] = {
    "train": ("data_batch_1", "data_batch_2", "data_batch_3", "data_batch_4", "data_batch_5"),
    "test": ("test_batch",),
}
PUBLISHED: dict[str, Published] = {
    "data_batch_1.bin": Published("5dd7e06a14cb22eb9f671a540d1b7c25", 10_000),
    "data_batch_2.bin": Published("5ea93a67294ea407fff1d09f752e9692", 10_000),
    "data_batch_3.bin": Published("942cd6a4bcdd0dd3c604fbe906cb4421", 10_000),
    "data_batch_4.bin": Published("ae636b3ba5c66a11e91e8cb52e771fcb", 10_000),
    "data_batch_5.bin": Published("53f37980c15c3d472c316c40844f3f0d", 10_000),
    "test_batch.bin": Published("803d5f7f4d78ea53de84dbe85f74fb6d", 10_000),
    "data_batch_1": Published("c99cafc152244af753f735de768cd75f", 10_000),
    "data_batch_2": Published("d4bba439e000b95fd0a9bffe97cbabec", 10_000),
    "data_batch_3": Published("54ebc095f3ab1f0389bbae665268c751", 10_000),
    "data_batch_4": Published("634d18415352ddfa80567beed471001a", 10_000),
    "data_batch_5": Published("482c414d41f54cd18b22e5b47cb7c3cb", 10_000),
    "test_batch": Published("40351d587109b95175f43aff81a1287e", 10_000),
    "cifar-10-binary.tar.gz": Published(SOURCE.md5),
    "cifar-10-python.tar.gz": Published("c58f30108f718f92721af3b95e74349a"),
}

#: Pixels (n, 3072) and labels (n,) of one batch.
Batch = tuple[np.ndarray, np.ndarray]


def _parse_binary(path: object, content: bytes, count: int) -> Batch:
    """Records of one label byte and 3,072 pixel bytes."""
    if len(content) != count * (1 + PIXELS):
        raise damaged(path, f"it holds {len(content):,} bytes, expected {count * (1 + PIXELS):,}")
    records = np.frombuffer(content, np.uint8).reshape(count, 1 + PIXELS)
    return records[:, 1:], records[:, 0]


def _parse_python(path: object, content: bytes, count: int) -> Batch:
    """A pickled dictionary with an array `data` and a list `labels`, read as data and not executed."""
    try:
        batch = read_plain(content)
        if not isinstance(batch, dict) or not {"data", "labels"} <= batch.keys():
            raise NotPlain("it holds no dictionary with `data` and `labels`")
        pixels, labels = as_array(batch["data"]), batch["labels"]
    except NotPlain as error:
        raise damaged(path, str(error)) from error
    if not isinstance(labels, list) or not all(type(label) is int and 0 <= label < 256 for label in labels):
        raise damaged(path, "its labels are no list of small numbers")
    if pixels.shape != (count, PIXELS) or len(labels) != count:
        raise damaged(
            path, f"it holds {pixels.shape} pixels and {len(labels)} labels, expected {(count, PIXELS)} and {count}"
        )
    return pixels, np.array(labels, np.uint8)


@dataclass(frozen=True)
class _Layout:
    """One way in which the six batches are published."""

    folder: str
    archive: str
    suffix: str
    parse: Callable[[object, bytes, int], Batch]
    #: More bytes a file than the pixels and labels themselves: a python batch holds the images' names too.
    extra: int

    def limit(self, count: int) -> int:
        return count * (1 + PIXELS) + self.extra


LAYOUTS = (
    _Layout("cifar-10-batches-bin", "cifar-10-binary.tar.gz", ".bin", _parse_binary, 0),
    _Layout("cifar-10-batches-py", "cifar-10-python.tar.gz", "", _parse_python, 4_000_000),
)


def load_cifar10(
    split: Split,
    root: str | os.PathLike[str] | None = None,
    *,
    download: bool = False,
    _published: Mapping[str, Published] = PUBLISHED,
) -> ImageSet:
    """The 50,000 training or 10,000 test images, (N, 3, 32, 32) uint8 in RGB, with labels 0 to 9."""
    layout, place = _find(data_root(root, create=download), split, download)
    names = [f"{batch}{layout.suffix}" for batch in BATCHES[split]]
    if place.is_dir():
        contents = [read_at_most(place / name, layout.limit(_published[name].count)) for name in names]
    else:
        check_file_md5(place, _published[layout.archive].md5)
        limits = {name: layout.limit(_published[name].count) for name in names}
        contents = _read_archive(place, layout.folder, limits)
    pixels, labels = [], []
    for name, content in zip(names, contents, strict=True):
        batch = _checked(layout, place / name, content, _published[name])
        pixels.append(batch[0])
        labels.append(batch[1])
    images = torch.from_numpy(np.concatenate(pixels).reshape(-1, *SHAPE))
    return ImageSet("cifar10", split, images, torch.from_numpy(np.concatenate(labels)).long(), CLASSES)


def _checked(layout: _Layout, path: Path, content: bytes, published: Published) -> Batch:
    """One batch, once its bytes are the published ones and its labels are labels."""
    if layout.suffix:  # a wrong length says more than a wrong checksum; a pickle is not looked into before its checksum
        layout.parse(path, content, published.count)
    check_md5(path, content, published.md5)
    pixels, labels = layout.parse(path, content, published.count)
    if len(labels) and labels.max() >= len(CLASSES):
        raise damaged(path, f"it holds the label {labels.max()}, beyond the {len(CLASSES)} classes")
    return pixels, labels


def _find(root: Path, split: Split, download: bool) -> tuple[_Layout, Path]:
    """The first layout that is complete: folders before archives, since those need no unpacking."""
    bases = [root / folder for folder in FOLDERS]
    folders = [(layout, base / layout.folder) for base in bases for layout in LAYOUTS]
    folders += [(layout, root) for layout in LAYOUTS]  # the root may itself be the folder of the batches
    partial = ""
    for layout, folder in folders:
        missing = [
            f"{batch}{layout.suffix}" for batch in BATCHES[split] if not (folder / f"{batch}{layout.suffix}").is_file()
        ]
        if not missing:
            return layout, folder
        if (folder != root and folder.is_dir()) or len(missing) < len(BATCHES[split]):
            partial = partial or f"CIFAR-10 in {folder} is incomplete: {', '.join(missing)} missing; {REMEDY}"
    archives = [(layout, base / layout.archive) for base in bases for layout in LAYOUTS]
    for layout, archive in archives:
        if archive.is_file():
            return layout, archive
    if download:
        return LAYOUTS[0], fetch(SOURCE, root)
    if partial:
        raise MissingData(partial)
    names: Sequence[str] = [name for layout in LAYOUTS for name in (layout.folder, layout.archive)]
    raise nothing_found("CIFAR-10", [f"{', '.join(names)} in {root}"])


def _read_archive(path: Path, folder: str, limits: Mapping[str, int]) -> list[bytes]:
    """The bytes of these files of a .tar.gz; nothing is written to the disk."""
    found: dict[str, bytes] = {}
    try:
        with tarfile.open(path, "r|gz") as archive:
            for member in archive:
                folder_name, _, name = member.name.rpartition("/")
                if folder_name != folder or name not in limits or not member.isreg():
                    continue
                if member.size > limits[name]:
                    raise damaged(path / member.name, f"it holds {member.size:,} bytes, expected at most {limits[name]:,}")
                file = archive.extractfile(member)
                found[name] = file.read() if file else b""
                if len(found) == len(limits):
                    break
    except (tarfile.TarError, EOFError, zlib.error, OSError) as error:
        raise damaged(path, f"it cannot be unpacked ({error})") from error
    missing = [name for name in limits if name not in found]
    if missing:
        raise damaged(path, f"{', '.join(missing)} missing in it")
    return [found[name] for name in limits]
