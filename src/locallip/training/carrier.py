"""Vectors that live in host memory, on their way to the GPU and back while it computes on another batch."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from locallip.norms.starts import Place, WarmStarts


class Carrier:
    """Moves the rows of one batch at a time between pinned memory and the GPU, each sample's in one piece.

    Rows come in on one stream and go out on another, so that both directions of the bus are busy beside the GPU itself. What
    is fetched ahead must not be part of the batch before it, whose new rows are not there yet.
    """

    def __init__(self, starts: WarmStarts, batch: int, device: torch.device):
        self.starts = starts
        assert starts.whole is not None
        width = starts.whole.shape[1]
        self._coming, self._going = (torch.empty(batch, width, dtype=starts.whole.dtype, device=device) for _ in range(2))
        self._ins, self._outs = list(self._coming.unbind()), list(self._going.unbind())
        self._reads, self._writes = torch.cuda.Stream(device), torch.cuda.Stream(device)
        self._fetched: Tensor | None = None

    def fetch(self, index: Tensor) -> None:
        """Begin to bring the rows of the samples `index` (B,), which lies in host memory."""
        self._reads.wait_stream(torch.cuda.current_stream())  # until what was fetched before has been taken
        self._reads.wait_stream(self._writes)
        with torch.cuda.stream(self._reads):
            torch._foreach_copy_(self._ins, self._rows(index), non_blocking=True)
        self._fetched = index

    def take(self, index: Tensor, into: Mapping[Place, Tensor]) -> None:
        """Copy the rows of the samples `index` to `into`, each (B, width), as soon as they are there."""
        if self._fetched is None or not torch.equal(self._fetched, index):
            self.fetch(index)
        torch.cuda.current_stream().wait_stream(self._reads)
        for place, rows in into.items():
            rows.copy_(self._coming[:, self.starts.columns[place]])
        self._fetched = None

    def put_back(self, index: Tensor, new: Mapping[Place, Tensor]) -> None:
        """Begin to keep rows, each (B, width), as those of the samples `index`."""
        here = torch.cuda.current_stream()
        here.wait_stream(self._writes)  # until those before have left
        for place, rows in new.items():
            self._going[:, self.starts.columns[place]].copy_(rows)
        self._writes.wait_stream(here)
        with torch.cuda.stream(self._writes):
            torch._foreach_copy_(self._rows(index), self._outs, non_blocking=True)

    def settle(self) -> None:
        """Wait until all rows are in host memory."""
        self._writes.synchronize()

    def _rows(self, index: Tensor) -> list[Tensor]:
        whole = self.starts.whole
        assert whole is not None
        return [whole[i] for i in index.tolist()]
