"""One start vector per sample and layer, kept between epochs: u^l of Algorithm 1."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from locallip.norms.base import NormKey

#: Stage and source: what tells the vectors of one norm from those of another.
Place = tuple[int, int]

#: Share of every direction that is added to a start, against a saved vector that lies wholly in columns removed today.
JITTER = 1e-3


class WarmStarts:
    """Vectors of length 1 for `num_samples` samples, in a small dtype, made when a layer first asks.

    Each is kept as one row of numbers, in the order in which `channels_last` images lie in memory where that is asked
    for. On the CPU beside a GPU the rows lie in pinned memory, and `take` and `put_back` move one batch at a time.
    """

    def __init__(
        self,
        num_samples: int,
        dtype: torch.dtype = torch.bfloat16,
        device: torch.device | str = "cpu",
        *,
        channels_last: bool = False,
        pinned: bool = False,
        seed: int = 0,
    ):
        self.seed = seed
        self.num_samples, self.dtype, self.device = num_samples, dtype, torch.device(device)
        self.channels_last, self.pinned = channels_last, pinned
        self.rows: dict[Place, Tensor] = {}
        self.shapes: dict[Place, torch.Size] = {}
        self._jitter: dict[Place, Tensor] = {}

    def prepare(self, shapes: Mapping[Place, torch.Size]) -> None:
        """Make the vectors of all layers now, at random; `shapes` are those of one sample."""
        for place, shape in shapes.items():
            self._make(place, shape)

    def _make(self, place: Place, shape: torch.Size) -> None:
        if place in self.rows:
            return
        rows = torch.empty(self.num_samples, shape.numel(), dtype=self.dtype, device=self.device, pin_memory=self.pinned)
        generator = torch.Generator(self.device).manual_seed(self.seed + 7919 * place[0] + place[1])
        rows.normal_(std=shape.numel() ** -0.5, generator=generator)
        self.rows[place], self.shapes[place] = rows, shape

    def get(self, key: NormKey, shape: torch.Size, index: Tensor) -> Tensor:
        """The vectors of the samples `index` (B,), (B, *shape)."""
        self._make(key[:2], shape)
        return self._shaped(self.rows[key[:2]][index], shape)

    def put(self, key: NormKey, index: Tensor, u: Tensor) -> None:
        self.rows[key[:2]].index_copy_(0, index, self._flat(u).to(self.dtype))

    def take(self, place: Place, index: Tensor, into: Tensor) -> Tensor:
        """The vectors of the samples `index` (B,), (B, *shape); `into` (B, numel) is where their numbers go."""
        rows = self.rows[place]
        if rows.device == into.device:
            torch.index_select(rows, 0, index, out=into)
        else:
            into.copy_(rows.index_select(0, index.to(rows.device)), non_blocking=True)
        return self._shaped(into, self.shapes[place])

    def put_back(self, place: Place, index: Tensor, u: Tensor) -> None:
        rows = self.rows[place]
        rows.index_copy_(0, index.to(rows.device), self._flat(u).to(rows.device, self.dtype))

    def jitter(self, key: NormKey, shape: torch.Size, like: Tensor) -> Tensor:
        """A little of every direction, (1, *shape), to be added to a start that today's mask may have made vanish."""
        if key[:2] not in self._jitter:
            self._jitter[key[:2]] = jitter(key[:2], shape).to(like.device, like.dtype)
        return self._jitter[key[:2]]

    def _shaped(self, rows: Tensor, shape: torch.Size) -> Tensor:
        if self.channels_last and len(shape) == 3:
            channels, height, width = shape
            return rows.view(-1, height, width, channels).permute(0, 3, 1, 2)
        return rows.view(-1, *shape)

    def _flat(self, u: Tensor) -> Tensor:
        if self.channels_last and u.dim() == 4:
            u = u.permute(0, 2, 3, 1)
        return u.reshape(len(u), -1)

    def nbytes(self) -> int:
        return sum(v.numel() * v.element_size() for v in self.rows.values())


def jitter(place: Place, shape: torch.Size) -> Tensor:
    """The same noise of length JITTER for a layer in every run and on every device, (1, *shape) in float32."""
    noise = torch.randn(1, *shape, generator=torch.Generator().manual_seed(1000 * place[0] + place[1]))
    return JITTER * noise / noise.norm()


class BatchStarts:
    """The vectors of one batch, taken out of WarmStarts: values in, values out, so that a step can be compiled.

    `vectors` (B, *shape) are replaced by what power iteration ends with; `noise` (1, *shape) is the jitter.
    """

    def __init__(self, vectors: Mapping[Place, Tensor], noise: Mapping[Place, Tensor]):
        self.vectors, self.noise = dict(vectors), noise

    def get(self, key: NormKey, shape: torch.Size, index: Tensor) -> Tensor:
        return self.vectors[key[:2]]

    def put(self, key: NormKey, index: Tensor, u: Tensor) -> None:
        self.vectors[key[:2]] = u.to(self.vectors[key[:2]].dtype)

    def jitter(self, key: NormKey, shape: torch.Size, like: Tensor) -> Tensor:
        return self.noise[key[:2]]
