"""Linear maps without bias, as objects: apply, adjoint, absolute value, row norms.

An operator reads its parameters through at every call and copies nothing, so it follows training, and it computes in
the dtype of the vector it is given: float32 weights applied to a float64 vector are converted exactly.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from locallip.ops.patch import Patch
from locallip.ops.window import Windows, composed_windows, joined_windows, point_windows


class LinearOp(ABC):
    """A bias-free linear map W from tensors of `in_shape` to tensors of `out_shape` (shapes without batch)."""

    in_shape: torch.Size
    out_shape: torch.Size
    #: No input feeds two outputs: rows have disjoint supports, so they are orthogonal under any column mask.
    disjoint_rows: bool = False
    #: Every row has at most one entry that is not zero (identity, diagonal, reshape).
    single_entry_rows: bool = False
    #: Largest number of roundings behind one output or one entry of the matrix; enters the error bound gamma_n.
    fan_in: int = 1
    #: Computes in the dtype of what it is given; a certificate may rest on no other.
    exact: bool = True
    #: How many maps it is made of.
    pieces: int = 1
    #: For maps between images, (channels, *spatial): what an output depends on; None where that is not known.
    windows: Windows | None = None

    def __init_subclass__(cls) -> None:
        """A class that derives from one of ours and computes something else does not inherit its `adjoint_abs`.

        Wherever it has the methods from: its own, or those of another class that stands before ours.
        """
        super().__init_subclass__()
        owners = [
            next(c for c in cls.__mro__ if name in vars(c)) for name in ("adjoint_abs", "apply", "adjoint", "apply_abs")
        ]
        place, *others = map(cls.__mro__.index, owners)
        if min(others) < place:
            cls.adjoint_abs = LinearOp.adjoint_abs  # type: ignore[method-assign]

    @property
    def fan_out(self) -> int:
        """As `fan_in`, for the adjoint: at most one product per output, and what is behind each entry."""
        return self.fan_in if self.disjoint_rows else self.fan_in + self.out_shape.numel()

    @property
    def roundings(self) -> int:
        """Behind one entry of W v or of W^T w."""
        return max(self.fan_in, self.fan_out)

    @abstractmethod
    def apply(self, v: Tensor) -> Tensor:
        """W v, (B, *in_shape) -> (B, *out_shape)."""

    @abstractmethod
    def adjoint(self, w: Tensor) -> Tensor:
        """W^T w, (B, *out_shape) -> (B, *in_shape); exactly the transpose."""

    def adjoint_patch(self, w: Patch) -> Patch | None:
        """W^T w for rows that are zero outside a window; None where what it gives is not known to be so."""
        return None

    @abstractmethod
    def apply_abs(self, r: Tensor) -> Tensor:
        """|W| r or larger, for r >= 0, (B, *in_shape) -> (B, *out_shape)."""

    def adjoint_abs(self, w: Tensor) -> Tensor:
        """|W|^T w or larger, for w >= 0, (B, *out_shape) -> (B, *in_shape); by the whole matrix, where nothing is better."""
        columns = _images_of_units(lambda units: self.apply_abs(units).flatten(1) @ w.flatten(1).T, self.in_shape, w)
        return columns.T.reshape(-1, *self.in_shape)

    @abstractmethod
    def row_norms(self, cols: Tensor) -> Tensor:
        """||e_i^T W diag(cols)|| or larger for every output i, (B, *in_shape) -> (B, *out_shape)."""

    @abstractmethod
    def smallest(self) -> float:
        """log10 of the smallest product of non-zero entries along the map, or less: how near it comes to underflow."""

    def materialize(self, like: Tensor) -> Tensor:
        """The matrix, (out_numel, in_numel), in the dtype and on the device of `like`."""
        if self.out_shape.numel() < self.in_shape.numel():
            return _images_of_units(self.adjoint, self.out_shape, like)
        return _images_of_units(self.apply, self.in_shape, like).T

    def materialize_abs(self, like: Tensor) -> Tensor:
        """|W| or larger, entry by entry, (out_numel, in_numel)."""
        return self.materialize(like).abs()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({tuple(self.in_shape)} -> {tuple(self.out_shape)})"


class Identity(LinearOp):
    """v -> v."""

    disjoint_rows = True
    single_entry_rows = True
    fan_in = 0

    def __init__(self, shape: Sequence[int]):
        self.in_shape = self.out_shape = torch.Size(shape)
        self.windows = point_windows(shape)

    def apply(self, v: Tensor) -> Tensor:
        return v

    def adjoint(self, w: Tensor) -> Tensor:
        return w

    def adjoint_patch(self, w: Patch) -> Patch:
        return w

    def apply_abs(self, r: Tensor) -> Tensor:
        return r

    def adjoint_abs(self, w: Tensor) -> Tensor:
        return w

    def row_norms(self, cols: Tensor) -> Tensor:
        return cols

    def smallest(self) -> float:
        return 0.0


class Compose(LinearOp):
    """v -> outer(inner(v))."""

    def __init__(self, outer: LinearOp, inner: LinearOp):
        if outer.in_shape != inner.out_shape:
            raise ValueError(f"cannot compose {outer!r} after {inner!r}: the shapes between them differ")
        self.outer, self.inner = outer, inner
        self.in_shape, self.out_shape = inner.in_shape, outer.out_shape
        self.disjoint_rows = outer.disjoint_rows and inner.disjoint_rows
        self.single_entry_rows = outer.single_entry_rows and inner.single_entry_rows
        self.fan_in = outer.fan_in + inner.fan_in + 1
        self.pieces = outer.pieces + inner.pieces
        self.exact = outer.exact and inner.exact
        self.windows = composed_windows(outer.windows, inner.windows)

    @property
    def fan_out(self) -> int:
        return self.outer.fan_out + self.inner.fan_out + 1

    def apply(self, v: Tensor) -> Tensor:
        return self.outer.apply(self.inner.apply(v))

    def adjoint(self, w: Tensor) -> Tensor:
        return self.inner.adjoint(self.outer.adjoint(w))

    def adjoint_patch(self, w: Patch) -> Patch | None:
        between = self.outer.adjoint_patch(w)
        return None if between is None else self.inner.adjoint_patch(between.inside(self.inner.out_shape))

    def apply_abs(self, r: Tensor) -> Tensor:
        return self.outer.apply_abs(self.inner.apply_abs(r))

    def adjoint_abs(self, w: Tensor) -> Tensor:
        return self.inner.adjoint_abs(self.outer.adjoint_abs(w))

    def row_norms(self, cols: Tensor) -> Tensor:
        """Exact when the inner rows are orthogonal or the outer rows single entries; the triangle inequality else."""
        inner = self.inner.row_norms(cols)
        if self.outer.single_entry_rows or self.inner.disjoint_rows:
            return self.outer.row_norms(inner)
        return self.outer.apply_abs(inner)

    def materialize_abs(self, like: Tensor) -> Tensor:
        return _images_of_units(self.apply_abs, self.in_shape, like).T

    def smallest(self) -> float:
        return self.outer.smallest() + self.inner.smallest()


class Sum(LinearOp):
    """v -> sum of the parts' images: a residual block z + conv(z) is Sum(Identity, Conv)."""

    def __init__(self, parts: Sequence[LinearOp]):
        if len({(part.in_shape, part.out_shape) for part in parts}) != 1:
            raise ValueError(f"cannot add {list(parts)!r}: their shapes differ")
        self.parts = tuple(parts)
        self.in_shape, self.out_shape = parts[0].in_shape, parts[0].out_shape
        self.fan_in = max(part.fan_in for part in parts) + len(parts)
        self.pieces = sum(part.pieces for part in parts)
        self.exact = all(part.exact for part in parts)
        self.windows = joined_windows([part.windows for part in parts])

    @property
    def fan_out(self) -> int:
        return max(part.fan_out for part in self.parts) + len(self.parts)

    def apply(self, v: Tensor) -> Tensor:
        return total([part.apply(v) for part in self.parts])

    def adjoint(self, w: Tensor) -> Tensor:
        return total([part.adjoint(w) for part in self.parts])

    def apply_abs(self, r: Tensor) -> Tensor:
        return total([part.apply_abs(r) for part in self.parts])

    def adjoint_abs(self, w: Tensor) -> Tensor:
        return total([part.adjoint_abs(w) for part in self.parts])

    def row_norms(self, cols: Tensor) -> Tensor:
        return total([part.row_norms(cols) for part in self.parts])

    def materialize_abs(self, like: Tensor) -> Tensor:
        return total([part.materialize_abs(like) for part in self.parts])

    def smallest(self) -> float:
        return min(part.smallest() for part in self.parts)


class Masked(LinearOp):
    """diag(rows) W diag(cols), one pair of weights per sample: I_V^l W^l I_V^{l-1} of eq:local_lip.

    `rows` is (B, *out_shape) and `cols` (B, *in_shape), both >= 0; 0 removes, 1 keeps, and anything else is the square
    root of a slope bound. `None` stands for all ones.
    """

    def __init__(self, base: LinearOp, rows: Tensor | None, cols: Tensor | None):
        self.base, self.rows, self.cols = base, rows, cols
        self.in_shape, self.out_shape = base.in_shape, base.out_shape
        self.disjoint_rows, self.single_entry_rows = base.disjoint_rows, base.single_entry_rows
        self.fan_in = base.fan_in + 2
        self.exact = base.exact
        self.windows = base.windows

    @property
    def fan_out(self) -> int:
        return self.base.fan_out + 2

    def apply(self, v: Tensor) -> Tensor:
        return _weigh(self.base.apply(_weigh(v, self.cols)), self.rows)

    def adjoint(self, w: Tensor) -> Tensor:
        return _weigh(self.base.adjoint(_weigh(w, self.rows)), self.cols)

    def apply_abs(self, r: Tensor) -> Tensor:
        return _weigh(self.base.apply_abs(_weigh(r, self.cols)), self.rows)

    def adjoint_abs(self, w: Tensor) -> Tensor:
        return _weigh(self.base.adjoint_abs(_weigh(w, self.rows)), self.cols)

    def row_norms(self, cols: Tensor) -> Tensor:
        return _weigh(self.base.row_norms(_weigh(cols, self.cols)), self.rows)

    def smallest(self) -> float:
        weights = [w for w in (self.rows, self.cols) if w is not None]
        return self.base.smallest() + sum(smallest_entry(w.double()) for w in weights)

    @property
    def batch(self) -> int:
        """Samples that this operator is different for; 1 without masks."""
        sizes = [len(weights) for weights in (self.rows, self.cols) if weights is not None]
        return max(sizes) if sizes else 1

    def select(self, index: Tensor | slice) -> Masked:
        """The same map for some samples of the batch."""
        rows = None if self.rows is None else self.rows[index]
        cols = None if self.cols is None else self.cols[index]
        return Masked(self.base, rows, cols)


def compose(outer: LinearOp, inner: LinearOp) -> LinearOp:
    """outer after inner, with identities left out."""
    if isinstance(outer, Identity):
        return inner
    if isinstance(inner, Identity):
        return outer
    return Compose(outer, inner)


def _images_of_units(apply: Callable[[Tensor], Tensor], shape: torch.Size, like: Tensor) -> Tensor:
    """The image of every unit vector, one per row, in blocks so that the unit vectors themselves fit into memory."""
    n = shape.numel()
    block = max(1, 2**24 // n)
    images = []
    for start in range(0, n, block):
        units = torch.zeros(min(block, n - start), n, dtype=like.dtype, device=like.device)
        units.diagonal(start).fill_(1)
        images.append(apply(units.reshape(-1, *shape)).flatten(1))
    return torch.cat(images)


def smallest_entry(values: Tensor) -> float:
    """log10 of the smallest absolute value that is not zero, at most 0."""
    size = values.detach().abs()
    least = float(torch.where(size > 0, size.double(), 1.0).min()) if size.numel() else 1.0
    return min(0.0, math.log10(least)) if math.isfinite(least) else 0.0


def total(values: Sequence[Tensor]) -> Tensor:
    """The sum of a list of tensors that is not empty, without a first addition to zero."""
    result = values[0]
    for value in values[1:]:
        result = result + value
    return result


def _weigh(v: Tensor, weights: Tensor | None) -> Tensor:
    return v if weights is None else v * weights.to(v.dtype)
