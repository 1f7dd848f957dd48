"""TensorBoard's view of a run, where TensorBoard is installed."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any


class Board:
    """Writes the figures of every epoch to the run folder; does nothing without TensorBoard."""

    def __init__(self, path: Path):
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            self._writer: Any = None
        else:
            self._writer = SummaryWriter(str(path / "tensorboard"))

    def add(self, row: dict[str, Any]) -> None:
        if self._writer is None:
            return
        for name, value in row.items():
            if isinstance(value, float) and math.isfinite(value):
                self._writer.add_scalar(name, value, row["step"])
        self._writer.flush()
