"""One start vector per sample and layer, kept between epochs: u^l of Algorithm 1."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from locallip.norms.base import NormKey
from locallip.norms.rows import Rows

#: Stage and source: what tells the vectors of one norm from those of another.
Place = tuple[int, int]

#: Share of every direction that is added to a start, against a saved vector that lies wholly in columns removed today.
JITTER = 1e-3
#: Rows that are read from another dtype at a time.
SOME = 256


@dataclass(frozen=True)
class Drawn:
    """How first vectors are drawn: for so many samples `together`, of which `kept` are kept, from the number `first` on.

    Processes that keep the vectors of different samples so begin with those that one process would begin with.
    """

    together: int
    first: int
    kept: int


class WarmStarts:
    """Vectors of length 1 for `num_samples` samples, in a small dtype or in codes of one, made when a layer first asks.

    Each is kept as one row (see `Rows`). For a GPU that has no room, `pinned_for` that device keeps them in pinned host
    memory, all rows of a sample side by side in `whole`, from where they can be moved in one piece.
    """

    def __init__(
        self,
        num_samples: int,
        dtype: torch.dtype = torch.bfloat16,
        device: torch.device | str = "cpu",
        *,
        channels_last: bool = False,
        pinned_for: torch.device | None = None,
        seed: int = 0,
        drawn: Drawn | None = None,
    ):
        self.seed, self._drawn = seed, drawn or Drawn(num_samples, 0, num_samples)
        self.num_samples, self.device = num_samples, torch.device(device)
        self.layout, self._pinned_for = Rows(dtype, channels_last), pinned_for
        self.whole: Tensor | None = None
        self.columns: dict[Place, slice] = {}
        self.rows: dict[Place, Tensor] = {}
        self.shapes: dict[Place, torch.Size] = {}
        self._jitter: dict[Place, Tensor] = {}

    def prepare(self, shapes: Mapping[Place, torch.Size]) -> None:
        """Make the vectors of all layers now, at random; `shapes` are those of one sample."""
        if self._pinned_for is not None:
            end = 0
            for place, shape in shapes.items():
                width = self.layout.width(shape.numel())
                self.columns[place], end = slice(end, end + width), end + width
            self.whole = _pinned(torch.empty(self.num_samples, end, dtype=self.layout.dtype))
        for place, shape in shapes.items():
            self._make(place, shape)

    def _make(self, place: Place, shape: torch.Size) -> None:
        if place in self.rows:
            return
        layout, width = self.layout, self.layout.width(shape.numel())
        if self.whole is None:
            rows = torch.empty(self.num_samples, width, dtype=layout.dtype, device=self.device)
        else:
            rows = self.whole[:, self.columns[place]]
        where = self._pinned_for or self.device  # a GPU draws much faster than its host
        generator = torch.Generator(where).manual_seed(self.seed + 7919 * place[0] + place[1])
        for some in rows.split(max(1, self._drawn.kept)):
            if len(some) == self._drawn.together and where == self.device:
                layout.random(some, shape.numel(), generator)
                continue
            block = torch.empty(self._drawn.together, width, dtype=layout.dtype, device=where)
            layout.random(block, shape.numel(), generator)
            some.copy_(block[self._drawn.first : self._drawn.first + len(some)])
        self.rows[place], self.shapes[place] = rows, shape

    def get(self, key: NormKey, shape: torch.Size, index: Tensor) -> Tensor:
        """The vectors of the samples `index` (B,), (B, *shape)."""
        self._make(key[:2], shape)
        return self.layout.vectors(self.rows[key[:2]][index], shape)

    def put(self, key: NormKey, index: Tensor, u: Tensor) -> None:
        self.rows[key[:2]].index_copy_(0, index, self.layout.lay(u))

    def take(self, place: Place, index: Tensor, into: Tensor) -> Tensor:
        """The rows of the samples `index` (B,), copied to `into` (B, width)."""
        return torch.index_select(self.rows[place], 0, index, out=into)

    def put_back(self, place: Place, index: Tensor, new: Tensor) -> None:
        """Keep rows (B, width) as those of the samples `index` (B,)."""
        self.rows[place].index_copy_(0, index, new)

    def load(self, place: Place, saved: Tensor, channels_last: bool | None = None) -> None:
        """Take over the rows (N, width) of all samples, which may have been kept as another dtype.

        `channels_last` says in which order, that of a GPU or of a CPU; None for the same as here.
        """
        rows, shape = self.rows[place], self.shapes[place]
        theirs = Rows(saved.dtype, self.layout.channels_last if channels_last is None else channels_last)
        if theirs == self.layout:
            rows.copy_(saved)
            return
        for part, new in zip(rows.split(SOME), saved.split(SOME), strict=True):
            part.copy_(self.layout.lay(theirs.vectors(new, shape)))

    def jitter(self, key: NormKey, shape: torch.Size, like: Tensor) -> Tensor:
        """A little of every direction, (1, *shape), to be added to a start that today's mask may have made vanish."""
        if key[:2] not in self._jitter:
            self._jitter[key[:2]] = jitter(key[:2], shape).to(like.device, like.dtype)
        return self._jitter[key[:2]]

    def nbytes(self) -> int:
        return sum(v.numel() * v.element_size() for v in self.rows.values())


def jitter(place: Place, shape: torch.Size) -> Tensor:
    """The same noise of length JITTER for a layer in every run and on every device, (1, *shape) in float32."""
    noise = torch.randn(1, *shape, generator=torch.Generator().manual_seed(1000 * place[0] + place[1]), device="cpu")
    return JITTER * noise / noise.norm()


def _pinned(values: Tensor) -> Tensor:
    """The same memory, pinned where it is until nobody uses it: torch's own would round its size up to a power of two."""
    cuda, address = torch.cuda.cudart(), values.data_ptr()
    code = int(cuda.cudaHostRegister(address, values.nbytes, 0))
    if code:
        raise MemoryError(f"{values.nbytes / 1e9:.1f} GB of host memory cannot be pinned (CUDA error {code})")
    weakref.finalize(values, cuda.cudaHostUnregister, address)  # views of it keep it
    return values


class BatchStarts:
    """The vectors of one batch, taken out of WarmStarts: values in, values out, so that a step can be compiled.

    `vectors` (B, *shape), or rows (B, width) where a `layout` is given, are replaced by what power iteration ends with;
    `noise` (1, *shape) is the jitter.
    """

    def __init__(self, vectors: Mapping[Place, Tensor], noise: Mapping[Place, Tensor], layout: Rows | None = None):
        self.vectors, self.noise, self.layout = dict(vectors), noise, layout

    def get(self, key: NormKey, shape: torch.Size, index: Tensor) -> Tensor:
        found = self.vectors[key[:2]]
        return found if self.layout is None else self.layout.vectors(found, shape)

    def put(self, key: NormKey, index: Tensor, u: Tensor) -> None:
        place = key[:2]
        self.vectors[place] = u.to(self.vectors[place].dtype) if self.layout is None else self.layout.lay(u)

    def jitter(self, key: NormKey, shape: torch.Size, like: Tensor) -> Tensor:
        return self.noise[key[:2]]
