"""A set of labelled images in memory, and a part of it held out for choices."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

Split = Literal["train", "test"]


@dataclass(frozen=True, eq=False)
class ImageSet:
    """Labelled images of one split of a data set, all of one size, in memory.

    Args:
        name: The data set, as `load_images` knows it.
        split: "train", "test", or "validation" for what `hold_out` took from the training images.
        images: (N, C, H, W) uint8, 0 to 255; `pixels` makes numbers in [0, 1] of them.
        labels: (N,) int64, positions in `classes`.
        classes: Their names.
    """

    name: str
    split: str
    images: Tensor
    labels: Tensor
    classes: tuple[str, ...]

    def __post_init__(self) -> None:
        if self.images.ndim != 4 or self.images.dtype != torch.uint8:
            raise ValueError(f"images are (N, C, H, W) uint8, got {tuple(self.images.shape)} {self.images.dtype}")
        self._check_labels()

    def _check_labels(self) -> None:
        if self.labels.shape != self.images.shape[:1] or self.labels.dtype != torch.int64:
            expected = f"({len(self.images)},) int64"
            raise ValueError(f"labels are {expected} for these images, got {tuple(self.labels.shape)} {self.labels.dtype}")
        if len(self) and not (self.labels.min() >= 0 and self.labels.max() < len(self.classes)):
            raise ValueError(
                f"labels run from {self.labels.min()} to {self.labels.max()} but there are {len(self.classes)} classes"
            )

    def __len__(self) -> int:
        return len(self.images)

    def __repr__(self) -> str:
        return f"ImageSet({self.name}, {self.split}: {tuple(self.images.shape)}, {len(self.classes)} classes)"

    @property
    def shape(self) -> tuple[int, ...]:
        """Channels, height and width of one image."""
        return tuple(self.images.shape[1:])

    def take(self, index: Tensor, split: str | None = None) -> ImageSet:
        """The images at these positions, as a set of its own."""
        return replace(self, images=self.images[index], labels=self.labels[index], split=split or self.split)


#: Bytes of images that a checksum looks at.
LARGEST_CHECKED = 2**31


def checksum(images: Tensor, labels: Tensor, classes: Sequence[str] = ()) -> str:
    """SHA-256 of shape, classes, labels and images; where these are more than two gigabytes, of so many, drawn at random."""
    digest = hashlib.sha256(json.dumps([tuple(images.shape), tuple(classes)]).encode())
    digest.update(labels.cpu().contiguous().numpy().data)
    count = max(1, len(images) * LARGEST_CHECKED // max(1, images.nbytes))
    if count < len(images):
        some = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))[:count].sort().values
        images = images[some]
    digest.update(images.cpu().contiguous().numpy().data)
    return digest.hexdigest()


def pixels(images: Tensor, device: torch.device | str | None = None) -> Tensor:
    """images / 255 in float32, on `device`, for uint8 images, others as they are: the points that certificates are about.

    The division is the CPU's: on a GPU torch multiplies by 1/255, which moves some numbers by a unit in the last place, and
    a certificate is about one point.
    """
    points = images.cpu().float() / 255 if images.dtype == torch.uint8 else images
    return points.to(images.device if device is None else device)


def hold_out(images: ImageSet, count: int, seed: int = 0) -> tuple[ImageSet, ImageSet]:
    """Split off `count` images, as evenly over the classes as they allow, and return the rest and the part held out.

    Class sizes of the held-out part differ by at most one, except where a class has too few images. Both parts keep
    the order of the images; the same seed gives the same parts.
    """
    if not 0 <= count < max(len(images), 1):
        raise ValueError(f"cannot hold out {count} of {len(images)} images: at least one has to remain")
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(seed))
    # The r-th image of each class, in random order, is drawn in round r; within a round the random order decides.
    labels = images.labels.cpu()[order]
    rounds = torch.empty_like(labels)
    for label in range(len(images.classes)):
        members = labels == label
        rounds[members] = torch.arange(int(members.sum()))
    drawn = order[torch.argsort(rounds, stable=True)[:count]]
    held = torch.zeros(len(images), dtype=torch.bool)
    held[drawn] = True
    return images.take((~held).nonzero()[:, 0]), images.take(held.nonzero()[:, 0], "validation")
