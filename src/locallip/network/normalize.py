"""Input normalisation as a layer, so that eps always means the space of the raw input."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn


class Normalize(nn.Module):
    """(x - mean) / std, one mean and one std per channel (dimension 1 of the batch)."""

    mean: Tensor
    std: Tensor

    def __init__(self, mean: float | Sequence[float], std: float | Sequence[float]):
        super().__init__()
        self.register_buffer("mean", torch.as_tensor(mean, dtype=torch.get_default_dtype()).reshape(-1))
        self.register_buffer("std", torch.as_tensor(std, dtype=torch.get_default_dtype()).reshape(-1))
        if self.mean.shape != self.std.shape:
            raise ValueError(f"Normalize needs as many means as stds, got {len(self.mean)} and {len(self.std)}")
        if not bool((self.std > 0).all()):
            raise ValueError(f"Normalize needs std > 0, got {std}")

    def forward(self, x: Tensor) -> Tensor:
        shape = (-1, *[1] * (x.dim() - 2))
        return (x - self.mean.reshape(shape)) / self.std.reshape(shape)

    def extra_repr(self) -> str:
        return f"mean={self.mean.tolist()}, std={self.std.tolist()}"
