"""Batches of training images: on the device where they fit, from pinned memory where not; crops and mirror images."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from locallip.processes import ALONE
from locallip.training.recipe import Augment, Recipe, WrongRecipe
from locallip.training.share import Share, share_of


@dataclass(frozen=True)
class Batch:
    """x (B, C, H, W) float32 in [0, 1], y (B,) int64, index (B,) int64 of the samples.

    `here` is the index in host memory, and `coming` that of the next batch, where it is known and has other samples.
    """

    x: Tensor
    y: Tensor
    index: Tensor
    here: Tensor | None = None
    coming: Tensor | None = None


class Images:
    """Training images (N, C, H, W) uint8 with labels (N,), kept as rows of pixels with a margin of zeros for crops.

    `resident` keeps them on the device; otherwise they stay in the host's memory, pinned, and each batch is copied.
    """

    def __init__(self, images: Tensor, labels: Tensor, margin: int, device: torch.device, *, resident: bool = True):
        self.count, channels, self.height, self.width = images.shape
        self.margin, self.device = margin, device
        home = device if resident else torch.device("cpu")
        wide = torch.zeros(self.count, self.height + 2 * margin, self.width + 2 * margin, channels, dtype=torch.uint8)
        wide[:, margin : margin + self.height, margin : margin + self.width] = images.permute(0, 2, 3, 1)
        self.pixels, self.labels = wide.to(home), labels.to(home)
        if not resident and device.type == "cuda":
            self.pixels, self.labels = self.pixels.pin_memory(), self.labels.pin_memory()
        self.home = home

    def batch(self, index: Tensor, shifts: Tensor) -> Batch:
        """The samples `index` (B,), cropped and mirrored by their rows of `shifts` (B, 3): top, left, mirrored."""
        index, shifts = index.to(self.home), shifts.to(self.home)
        top, left, mirrored = shifts[:, 0], shifts[:, 1], shifts[:, 2].bool()
        rows = top[:, None] + torch.arange(self.height, device=self.home)
        across = torch.arange(self.width, device=self.home)
        columns = left[:, None] + torch.where(mirrored[:, None], across.flip(0), across)
        pixels = self.pixels[index[:, None, None], rows[:, :, None], columns[:, None, :]]  # (B, H, W, C)
        pixels, y, index = (values.to(self.device, non_blocking=True) for values in (pixels, self.labels[index], index))
        x = pixels.permute(0, 3, 1, 2).float() / 255  # channels last in memory, as GPUs like it
        return Batch(x if self.device.type == "cuda" else x.contiguous(), y, index)


class Epoch:
    """The order of the samples in one epoch and how each is changed; all of it follows from the seed and the epoch.

    A batch takes one sample of each of its places (see `Share`), in an order that is drawn for every place by itself. Every
    batch is full: a place without a sample for the last one takes that of the first once more. Draws are made on the CPU, so
    they are the same on every device, and for all places, so they are the same for any number of processes.
    """

    def __init__(self, count: int, recipe: Recipe, margin: int, epoch: int, share: Share | None = None):
        generator = torch.Generator().manual_seed(recipe.seed * 1_000_003 + epoch)
        share = share or share_of(recipe.batch, count, ALONE)
        steps, mine = steps_per_epoch(count, share.batch), slice(share.first, share.first + share.part)
        keys = torch.rand(steps, share.batch, generator=generator, dtype=torch.float64)
        keys.view(-1)[count:] = 2.0  # no such sample: behind all others
        order = keys.argsort(0)
        order[-1] = torch.where(order[-1] * share.batch + torch.arange(share.batch) < count, order[-1], order[0])
        shifts = _draw_shifts(steps * share.batch, recipe.augment, margin, generator).view(steps, share.batch, 3)
        self.batch = share.part
        self.order = (order[:, mine] * share.part + torch.arange(share.part)).flatten()
        self.shifts = shifts[:, mine].reshape(-1, 3)

    def __len__(self) -> int:
        return len(self.order) // self.batch

    def batches(self, images: Images, first: int = 0) -> Iterator[Batch]:
        """The batches from number `first` on; `images` are those of this process's samples."""
        order, shifts = self.order.to(images.home), self.shifts.to(images.home)
        pairs = list(zip(order.split(self.batch), shifts.split(self.batch), strict=True))
        here = self.order.split(self.batch)
        coming = [*here[1:-1], None, None]  # the last batch may have samples of one before
        for number, (index, shift) in enumerate(pairs[first:], start=first):
            yield replace(images.batch(index, shift), here=here[number], coming=coming[number])


def _draw_shifts(count: int, augment: Augment, margin: int, generator: torch.Generator) -> Tensor:
    """(count, 3) int64: top, left, mirrored; the middle of the margin, not mirrored, where nothing is drawn."""
    shifts = torch.tensor([margin, margin, 0]).repeat(count, 1)
    if augment != "none":
        shifts[:, :2] = torch.randint(0, 2 * margin + 1, (count, 2), generator=generator)
    if augment == "crop_flip":
        shifts[:, 2] = torch.randint(0, 2, (count,), generator=generator)
    return shifts


def margin_of(recipe: Recipe, height: int) -> int:
    """Pixels of zeros around an image from which crops are taken: the recipe's, or an eighth of the height (CIFAR-10: 4)."""
    if recipe.crop_margin >= height:
        raise WrongRecipe(
            f"crop_margin = {recipe.crop_margin}: the images are {height} pixels high, so that a crop could miss one"
        )
    return 0 if recipe.augment == "none" else recipe.crop_margin or height // 8


def steps_per_epoch(count: int, batch: int) -> int:
    return -(-count // min(batch, count))
