"""The embedded part of MNIST: all 10,000 test images and the first 10,000 training images (see MNIST.md)."""

from __future__ import annotations

import hashlib
import lzma
from pathlib import Path
from typing import get_args

import numpy as np
import torch
from torch import Tensor

from locallip.data.errors import DamagedData
from locallip.data.image_set import Split

COUNT, SHAPE = 10_000, (1, 28, 28)

#: SHA-256 of the unpacked bytes of each file: images, one byte per pixel and row by row, then one byte per label.
SHA256: dict[Split, str] = {
    "train": "2e49afdffc567fd5f9f306a04e2bafced2432146ae04f4b9a58b25505ba05b2e",
    "test": "c3f9adf9c66efb572b1f9326c3a511b45910c7173b97be66ceceeeeaef6b802b",
}


def load_embedded(split: Split = "train", folder: Path | None = None) -> tuple[Tensor, Tensor]:
    """Images (10000, 1, 28, 28) uint8 and labels (10000,) int64 of the "train" or the "test" split.

    Pixels are 0 (background) to 255; `pixels` makes numbers in [0, 1] of them. `folder` looks for the files elsewhere.
    """
    if split not in get_args(Split):
        raise ValueError(f"unknown split {split!r}; choose one of {', '.join(map(repr, get_args(Split)))}")
    path = (folder or Path(__file__).parent) / f"mnist_{split}.xz"
    values = np.frombuffer(bytearray(_unpacked(path, SHA256[split])), dtype=np.uint8)
    pixels = COUNT * 28 * 28
    images = torch.from_numpy(values[:pixels]).reshape(COUNT, *SHAPE)
    return images, torch.from_numpy(values[pixels:]).long()


def _unpacked(path: Path, sha256: str) -> bytes:
    """The bytes inside an .xz file, once their checksum is seen to be right."""
    try:
        content = lzma.decompress(path.read_bytes())
    except FileNotFoundError:
        raise DamagedData(f"{path} is missing; install locallip again") from None
    except (lzma.LZMAError, EOFError, OSError) as error:
        raise DamagedData(f"{path} cannot be unpacked ({error}); install locallip again") from error
    found = hashlib.sha256(content).hexdigest()
    if found != sha256:
        raise DamagedData(f"{path} is damaged: SHA-256 {found}, expected {sha256}; install locallip again")
    return content
