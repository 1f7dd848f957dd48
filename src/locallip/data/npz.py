"""Images and labels from an .npz file, as numpy.savez writes it; nothing is unpickled."""

from __future__ import annotations

import io
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from locallip.data.errors import DamagedData

#: More than this is not read into memory at once.
MOST_BYTES = 2**34


def read_npz(path: Path, shape: Sequence[int] | None = None) -> tuple[Tensor, Tensor]:
    """Images and labels of a file that `numpy.savez` wrote; where a `shape` is given, the images must have it."""
    with _reported(path), zipfile.ZipFile(path) as archive:
        images, labels = _array(archive, path, "images"), _labels(archive, path)
    if shape is not None and images.shape[1:] != tuple(shape):
        found, hint = sizes(images.shape[1:]), _turned(images, shape)
        raise DamagedData(f"{path}: its images are {found}, and the network takes {sizes(shape)}{hint}")
    return _pixels(images, path), labels


def labels_of_npz(path: Path) -> Tensor:
    """The labels alone, for which nothing else is unpacked."""
    with _reported(path), zipfile.ZipFile(path) as archive:
        return _labels(archive, path)


@contextmanager
def _reported(path: Path) -> Iterator[None]:
    """What is wrong with a file, in words."""
    try:
        yield
    except DamagedData:
        raise
    except Exception as error:  # zipfile, its four ways of packing and numpy have no common class for a broken file
        raise DamagedData(
            f"{path} cannot be read as .npz ({type(error).__name__}: {error}); write it with "
            "numpy.savez(path, images=..., labels=...)"
        ) from None


def _labels(archive: zipfile.ZipFile, path: Path) -> Tensor:
    labels = _array(archive, path, "labels")
    if labels.dtype.kind not in "iu" or labels.ndim != 1:
        raise DamagedData(f"{path}: labels are {labels.dtype} of shape {labels.shape}, expected whole numbers of shape (N,)")
    # Far beyond any number of classes, and within int64, which uint64 need not be.
    return torch.from_numpy(np.clip(labels, -1, 2**31).astype(np.int64))


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


def sizes(shape: Sequence[int]) -> str:
    return " x ".join(map(str, shape))
