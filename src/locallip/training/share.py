"""Which samples are whose where several processes train one network."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from locallip.processes import Processes
from locallip.training.recipe import WrongRecipe


@dataclass(frozen=True)
class Share:
    """One process's part of every batch: the samples i with i mod `batch` in [first, first + part).

    Sample i always stands at the place i mod batch of its batch, so that it stays with one process, whose memory holds its
    vectors, and each batch takes equally many samples of every process. The batches themselves do not depend on the
    number of processes.
    """

    batch: int
    first: int
    part: int

    def count(self, total: int) -> int:
        """How many of `total` samples are here."""
        whole, rest = divmod(total, self.batch)
        return whole * self.part + min(max(rest - self.first, 0), self.part)

    def samples(self, total: int) -> Tensor:
        """Which ones, in the order in which this process numbers them, (count,)."""
        everywhere = torch.arange(total)
        place = everywhere % self.batch - self.first
        return everywhere[(place >= 0) & (place < self.part)]


def share_of(batch: int, total: int, together: Processes) -> Share:
    """The share of this process; a batch must divide evenly."""
    what, batch = (f"batch = {batch}", batch) if batch <= total else (f"images = {total}, less than a batch,", total)
    if batch % together.size:
        fitting = next(n for n in range(together.size, 0, -1) if batch % n == 0)
        raise WrongRecipe(
            f"{what} does not divide among {together.size} processes: make it a multiple of {together.size}, or "
            f"start {fitting}"
        )
    part = batch // together.size
    return Share(batch, together.rank * part, part)
