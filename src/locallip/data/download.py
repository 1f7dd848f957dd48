"""Fetching a data set from its official place, only when asked: checked by MD5 before it gets its name."""

from __future__ import annotations

import hashlib
import http.client
import os
import sys
import tempfile
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from locallip.data.errors import MissingData

CHUNK = 1 << 20
TIMEOUT = 60.0


@dataclass(frozen=True)
class Source:
    """An official file: its address and the MD5 and size it was published with."""

    url: str
    md5: str
    size: int

    @property
    def name(self) -> str:
        return self.url.rsplit("/", 1)[-1]


_MNIST = "https://storage.googleapis.com/cvdf-datasets/mnist/"

MNIST: dict[str, Source] = {
    "train-images-idx3-ubyte": Source(f"{_MNIST}train-images-idx3-ubyte.gz", "f68b3c2dcbeaaa9fbdd348bbdeb94873", 9_912_422),
    "train-labels-idx1-ubyte": Source(f"{_MNIST}train-labels-idx1-ubyte.gz", "d53e105ee54ea40749a09fcbcd1e9432", 28_881),
    "t10k-images-idx3-ubyte": Source(f"{_MNIST}t10k-images-idx3-ubyte.gz", "9fb629c4189551a2d022fa330f9573f3", 1_648_877),
    "t10k-labels-idx1-ubyte": Source(f"{_MNIST}t10k-labels-idx1-ubyte.gz", "ec29112dd5afa0611ce80d1b7f02629c", 4_542),
}
CIFAR10 = Source("https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz", "c32a1d4ab5d03f1284b67883e8d87530", 170_052_171)
TINY_IMAGENET = Source("https://cs231n.stanford.edu/tiny-imagenet-200.zip", "90528d7ca1a48142e341f4ef8d21d0de", 248_100_043)


def fetch(source: Source, folder: Path) -> Path:
    """Fetch one file into `folder`, which is made if need be, and return its path.

    The bytes are written under a temporary name beside it; the file gets its own name only when size and MD5 are right,
    so a broken transfer, a full disk or a kill leaves nothing that looks like data.
    """
    target = folder / source.name
    print(f"fetching {source.url} ({source.size / 1e6:.1f} MB)", file=sys.stderr)
    temporary: Path | None = None
    try:
        folder.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(prefix=f".{source.name}.", suffix=".part", dir=folder)
        temporary = Path(name)
        with os.fdopen(handle, "wb") as file:
            found = _receive(source, file)
            file.flush()
            os.fsync(file.fileno())
        if found != source.md5:
            raise MissingData(f"{source.url} gave a file with MD5 {found}, expected {source.md5}; try again later")
        temporary.chmod(0o644)
        os.replace(temporary, target)
    except (OSError, http.client.HTTPException) as error:
        raise MissingData(f"{source.url} could not be fetched to {target} ({error})") from error
    finally:
        if temporary is not None:
            temporary.unlink(missing_ok=True)
    return target


def _receive(source: Source, file: BinaryIO) -> str:
    """Write what the address gives, never more than its published size, and return the MD5 of it."""
    digest, left = hashlib.md5(usedforsecurity=False), source.size
    request = urllib.request.Request(source.url, headers={"User-Agent": "locallip"})
    with urllib.request.urlopen(request, timeout=TIMEOUT) as response:
        while chunk := response.read(CHUNK):
            left -= len(chunk)
            if left < 0:
                raise MissingData(f"{source.url} gave more than the expected {source.size:,} bytes; try again later")
            digest.update(chunk)
            file.write(chunk)
    if left > 0:
        raise MissingData(f"{source.url} broke off {left:,} bytes before the end; try again")
    return digest.hexdigest()
