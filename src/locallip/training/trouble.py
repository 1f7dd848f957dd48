"""The first step that went wrong, noted where it happens, so that no step waits to be looked at."""

from __future__ import annotations

import torch
from torch import Tensor

from locallip.processes import Processes


class Trouble:
    """The first step whose loss or figures were not finite, found on the device and read once an epoch."""

    def __init__(self, device: torch.device):
        self.step = torch.full((), -1.0, device=device)
        self.shown: Tensor | None = None

    def watch(self, loss: Tensor, shown: Tensor, step: Tensor) -> None:
        if self.shown is None:
            self.shown = torch.zeros_like(shown)
        fine = torch.isfinite(loss)
        first = ~fine & (self.step < 0)
        self.shown.copy_(torch.where(first, shown, self.shown))
        self.step.copy_(torch.where(first, step, self.step))

    def merge(self, together: Processes) -> None:
        """Take over what went wrong first, in any process."""
        if together.size == 1:
            return
        found = together.all_gathered((float(self.step), None if self.shown is None else self.shown.cpu()))
        step, shown = min((one for one in found if one[0] >= 0), key=lambda one: one[0], default=(-1.0, None))
        self.step.fill_(step)
        if shown is not None and self.shown is not None:
            self.shown.copy_(shown)
