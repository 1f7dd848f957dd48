"""One start vector per sample and layer, kept between epochs: u^l of Algorithm 1."""

from __future__ import annotations

import torch
from torch import Tensor

from locallip.norms.base import NormKey


class WarmStarts:
    """Vectors for `num_samples` samples, in a small dtype, made when a layer first asks; the only mutable object here."""

    def __init__(self, num_samples: int, dtype: torch.dtype = torch.bfloat16, device: torch.device | str = "cpu"):
        self.num_samples, self.dtype, self.device = num_samples, dtype, torch.device(device)
        self.vectors: dict[tuple[int, int], Tensor] = {}
        self._jitter: dict[tuple[int, int], Tensor] = {}

    def get(self, key: NormKey, shape: torch.Size, index: Tensor) -> Tensor:
        """The vectors of the samples `index` (B,), (B, *shape)."""
        stored = self.vectors.get(key[:2])
        if stored is None:
            stored = torch.randn(self.num_samples, *shape, dtype=self.dtype, device=self.device)
            self.vectors[key[:2]] = stored
        return stored[index]

    def jitter(self, key: NormKey, shape: torch.Size, like: Tensor) -> Tensor:
        """A little of every direction, (1, *shape), to be added to a start that today's mask may have made vanish."""
        if key[:2] not in self._jitter:
            noise = torch.randn(1, *shape, device=like.device)
            self._jitter[key[:2]] = (1e-3 * noise / noise.norm()).to(like.dtype)
        return self._jitter[key[:2]]

    def put(self, key: NormKey, index: Tensor, u: Tensor) -> None:
        self.vectors[key[:2]].index_copy_(0, index, u.to(self.dtype))

    def nbytes(self) -> int:
        return sum(v.numel() * v.element_size() for v in self.vectors.values())
