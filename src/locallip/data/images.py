"""The registry of data sets: one call gives the images of any of them."""

from __future__ import annotations

import difflib
import os
from collections.abc import Callable
from typing import Literal, get_args

from locallip.data.cifar10 import load_cifar10
from locallip.data.embedded import load_embedded
from locallip.data.errors import REMEDY, MissingData
from locallip.data.image_set import ImageSet, Split, hold_out
from locallip.data.mnist import CLASSES as DIGITS
from locallip.data.mnist import load_mnist
from locallip.data.own_set import REMEDY as OWN_REMEDY
from locallip.data.own_set import Like, load_own_set
from locallip.data.tiny_imagenet import load_tiny_imagenet

__all__ = ["READERS", "DataName", "ImageSet", "Split", "hold_out", "load_images"]

DataName = Literal["embedded", "mnist", "cifar10", "tiny-imagenet", "own"]
Root = str | os.PathLike[str] | None


def _embedded(split: Split, root: Root = None, *, download: bool = False) -> ImageSet:
    """The part of MNIST inside the package, which needs neither a root nor a download."""
    images, labels = load_embedded(split)
    return ImageSet("embedded", split, images, labels, DIGITS)


#: Reader of each data set, called as reader(split, root, download=...).
READERS: dict[str, Callable[..., ImageSet]] = {
    "embedded": _embedded,
    "mnist": load_mnist,
    "cifar10": load_cifar10,
    "tiny-imagenet": load_tiny_imagenet,
    "own": load_own_set,
}


def load_images(
    name: str,
    split: str,
    root: Root = None,
    *,
    download: bool = False,
    say: Callable[[str], None] = lambda line: None,
    side: int = 0,
    like: Like | None = None,
) -> ImageSet:
    """The "train" or "test" images of a data set, checked against what was published.

    Args:
        name: "embedded" (part of MNIST, inside the package), "mnist", "cifar10", "tiny-imagenet", or "own": images in the
            folders `root`/train and `root`/test with a folder per class in each, or in train.npz and test.npz there.
        split: "train" or "test"; for Tiny-ImageNet, whose test labels are secret, "test" means its validation images.
        root: Folder of the data sets; by default the environment variable LOCALLIP_DATA, else ./data.
        download: Fetch what is missing from its official place.
        say: Told how far it is where that takes long: JPEG files are unpacked when they are first read.
        side: Of "own" images: their middle is cut out and resized to so many pixels a side; 0 leaves them as they are.
        like: Of "own" images: the shape and the classes that they must have, those trained on.

    Raises:
        MissingData: Files are not there, or could not be fetched.
        DamagedData: A file does not hold what was published; it is named.
    """
    if name not in READERS:
        near = difflib.get_close_matches(str(name), READERS, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"unknown data set {name!r}: choose one of {', '.join(READERS)}{hint}")
    if split not in get_args(Split):
        raise ValueError(f"unknown split {split!r}; choose one of {', '.join(map(repr, get_args(Split)))}")
    if side and name != "own":
        raise ValueError(f"side = {side}: only images of your own are resized, those of {name} stay as they were published")
    try:
        more: dict[str, object] = {"say": say} if name in ("tiny-imagenet", "own") else {}
        more |= {"side": side, "like": like} if name == "own" else {}
        return READERS[name](split, root, download=download, **more)
    except OSError as error:  # such as a folder without permission to look into it
        raise MissingData(f"{name} cannot be read ({error}); {OWN_REMEDY if name == 'own' else REMEDY}") from error
