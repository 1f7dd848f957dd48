"""A proof of the norm: no eigenvalue of A A^T (or A^T A, whichever is cheaper) is above t^2, by a Cholesky factorization.

Layers of moderate size are written out as matrices; larger maps between images have Gram matrices in blocks (gram.py). The
factorization is checked block by block (definite.py), and the roundings of forming A and its Gram matrix are bounded and
added to t^2.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from locallip.norms.base import Guarantee, NormKey, ProvenRule
from locallip.norms.definite import eigenvalue_bound
from locallip.norms.gram import Gram, Slabs, best_slabs, factorization_cost
from locallip.norms.lanczos import Lanczos, LanczosNorm
from locallip.ops import LinearOp, Masked
from locallip.room import free_bytes
from locallip.rounding import gamma, up

#: What is added to a guess of t^2, the least that was enough counts: one from a nearly complete basis is close to rounding.
_INFLATIONS = (1e-12, 1e-10, 1e-8, 1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1, 1.0)
_LOOSER = (1e-5, 1e-4, 1e-3, 1e-2, 1e-1, 1.0)
#: Where blocks are factorized, Lanczos says how large the norm is: once its upper bound, which may fail so often, is within
#: this tolerance, the norm that it has found is much closer. Nothing rests on it but tightness.
GUESS_FAILURE, GUESS_RTOL, GUESS_STEPS = 1e-6, 2e-4, 1500
#: A local norm closer than this to the one over all inputs is not worth a factorization.
WORTH = 3e-4
#: Up to this size a CPU computes all eigenvalues sooner than Lanczos finds the largest.
EIGENVALUES_LIMIT = 128
#: Steps of Lanczos for the guess of a layer that is written out.
WHOLE_STEPS = 200


class LayerTooLarge(ValueError):
    """A layer whose factorization would not fit; the message names it and the alternative."""


class CholeskyNorm(ProvenRule):
    """At least the norm, always; DETERMINISTIC. For layers whose blocks have at most `limit` units.

    A layer that is written out is one block, with the units of its smaller side; one between images with more than `whole`
    units has blocks of a few rows of the image, where that is cheaper.
    """

    guarantee = Guarantee.DETERMINISTIC

    def __init__(self, limit: int = 4096, whole: int = 512, memory: int = 2**30):
        self.limit, self.whole, self.memory = limit, whole, memory
        self._caps: Mapping[NormKey, Tensor] = {}

    def capped(self, caps: Mapping[NormKey, Tensor]) -> CholeskyNorm:
        """The same rule beside proved norms over all inputs, (1,) each: dear proofs are only tried well below them."""
        rule = copy.copy(self)
        rule._caps = caps
        return rule

    def check_size(self, op: LinearOp, key: NormKey) -> None:
        """Raises LayerTooLarge where no proof fits."""
        self._slabs(op, key)

    def _slabs(self, op: LinearOp, key: NormKey) -> Slabs | None:
        """How the layer is cut; None where it is written out whole."""
        rows, cols = op.out_shape.numel(), op.in_shape.numel()
        small = min(rows, cols)
        fits = small <= self.limit and 8 * rows * cols <= 2 * self.memory
        slabs = best_slabs(op)
        if slabs is not None and self._fits(slabs):
            pays = small > self.whole and slabs.cost < factorization_cost(1, small)
            if pays or not fits:
                return slabs
        if not fits:
            raise LayerTooLarge(
                f"the layer '{key.name}' maps {cols} units to {rows}: too large for a deterministic proof (its smaller "
                f"side, or the rows of an image that a convolution connects, may have {self.limit} units); "
                f"use guarantee='high_probability'"
            )
        return None

    def _fits(self, slabs: Slabs) -> bool:
        return slabs.units <= self.limit and 8 * slabs.colors * slabs.shape.numel() <= 2 * self.memory

    def proven_norm(self, op: Masked, key: NormKey, like: Tensor, coarse: Tensor) -> Tensor:
        slabs = self._slabs(op, key)
        values = self._whole(op, like.double()) if slabs is None else self._in_blocks(op, slabs, key, like.double(), coarse)
        return up(values.to(like.dtype), 2)

    def _whole(self, op: Masked, like: Tensor) -> Tensor:
        matrix, absolute = op.base.materialize(like), op.base.materialize_abs(like)
        rows, cols = op.rows, op.cols
        if matrix.shape[0] > matrix.shape[1]:
            matrix, absolute, rows, cols = matrix.T, absolute.T, op.cols, op.rows
        entry_error = gamma(op.roundings + 4, like.dtype)
        p, q = matrix.shape
        values = []
        for part in self._parts(op.batch, 8 * p * (3 * q + 10 * p + WHOLE_STEPS), like.device):
            chosen = [None if weights is None else weights[part] for weights in (rows, cols)]
            size = up(_weigh(absolute, *chosen), 8 + op.fan_in).flatten(1).norm(dim=1)
            values.append(proven_norms(_weigh(matrix, *chosen), size, entry_error))
        return torch.cat(values)

    def _in_blocks(self, op: Masked, slabs: Slabs, key: NormKey, like: Tensor, coarse: Tensor) -> Tensor:
        # Entries of the Gram matrix are off by at most gamma (|A| |A|^T), and `coarse` is at least the norm of |A|.
        gram_error = up(gamma(2 * op.roundings + 16, like.dtype) * up(coarse.double().square())).expand(op.batch)
        # Its random numbers are always the same ones, so that a proof does not depend on those before it.
        rule = LanczosNorm(GUESS_FAILURE, GUESS_RTOL, GUESS_STEPS, seed=1000 * key.stage + key.source)
        guess = rule.bracket(op, like)[0].expand(op.batch)
        cap = self._caps[key].double() if key in self._caps else like.new_full((1,), float("inf"))
        values = cap.repeat(op.batch)
        pays = (guess < cap * (1 - WORTH)).nonzero()[:, 0]
        for part in self._parts(len(pays), 8 * (slabs.colors * slabs.shape.numel() + 16 * slabs.units**2), like.device):
            index = pays[part]
            gram = Gram(op.select(index), slabs, like)
            eigenvalue = _eigenvalue(gram, up(guess[index].square()), _LOOSER)
            values[index] = up(up(eigenvalue + gram_error[index]).sqrt())
        return values

    def _parts(self, count: int, bytes_each: int, device: torch.device) -> Iterator[slice]:
        """So many samples at a time as there is room for."""
        memory = self.memory * (16 if device.type == "cuda" else 1)
        while memory > self.memory and memory > free_bytes(device) / 2:
            memory //= 2
        size = max(1, memory // bytes_each)
        return (slice(first, min(first + size, count)) for first in range(0, count, size))


def _weigh(matrix: Tensor, rows: Tensor | None, cols: Tensor | None) -> Tensor:
    """diag(rows) M diag(cols) of every sample, the rows and columns that are removed left out or zero, (B, p, q)."""
    weighed = matrix[None]
    if cols is not None:
        index, weight = _kept(cols.flatten(1), matrix)
        weighed = matrix.T[index].mT * weight[:, None, :]
    if rows is not None:
        index, weight = _kept(rows.flatten(1), matrix)
        samples = torch.arange(len(index), device=matrix.device)[:, None] if cols is not None else torch.zeros_like(index)
        weighed = weighed[samples, index] * weight[:, :, None]
    return weighed


def _kept(weights: Tensor, like: Tensor) -> tuple[Tensor, Tensor]:
    """The places of what is not zero in `weights` (B, n), first in each row, and their weights, 0 behind the last."""
    width = int((weights != 0).sum(1).max())
    index = (weights != 0).byte().argsort(dim=1, descending=True, stable=True)[:, :width]
    return index, weights.to(like.dtype).gather(1, index)


def proven_norms(matrix: Tensor, frobenius: Tensor, entry_error: float) -> Tensor:
    """Proved upper bounds of ||A|| (B,), where |A - matrix| <= entry_error |A| or so and `frobenius` bounds || |A| ||_F."""
    _, p, contraction = matrix.shape
    if p == 0 or contraction == 0:
        return torch.zeros_like(frobenius)
    gram = torch.bmm(matrix, matrix.mT)
    gram_error = (gamma(contraction + 2, gram.dtype) + 3 * entry_error) * up(frobenius.square(), p * contraction + 64)
    bound = _eigenvalue(_One(gram), _largest_eigenvalue(gram), _INFLATIONS)
    return torch.where(frobenius <= torch.finfo(matrix.dtype).tiny, 0.0, up((bound + gram_error).sqrt()))


class _One(NamedTuple):
    """Matrices (B, p, p) as a single block each; only their lower triangles count."""

    matrix: Tensor
    number: int = 1

    def select(self, index: Tensor) -> _One:
        return _One(self.matrix[index])

    def diagonal(self, j: int) -> Tensor:
        return self.matrix.tril() + self.matrix.tril(-1).mT

    def below(self, j: int) -> None:
        return None


def _eigenvalue(gram: _One | Gram, guess: Tensor, inflations: tuple[float, ...]) -> Tensor:
    """Proved upper bounds of the largest eigenvalues (B,); inf where all inflations of the guess were too small."""
    if gram.number == 0:
        return torch.zeros_like(guess)
    bound = torch.full_like(guess, float("inf"))
    left = torch.arange(len(guess), device=guess.device)
    for inflation in inflations:
        bound[left] = eigenvalue_bound(gram.select(left), up(guess[left] * (1 + inflation)))
        left = left[torch.isinf(bound[left])]
        if not len(left):
            break
    return bound


def _largest_eigenvalue(gram: Tensor) -> Tensor:
    """Guesses of t^2 for matrices (B, p, p); nothing rests on them but tightness."""
    if gram.shape[1] <= EIGENVALUES_LIMIT and gram.device.type == "cpu":
        finite = torch.isfinite(gram).flatten(1).all(1)
        values = torch.linalg.eigvalsh(torch.where(finite[:, None, None], gram, 0.0))[:, -1].clamp(min=0)
        return torch.where(finite, values, float("nan"))
    generator = torch.Generator(gram.device).manual_seed(0)
    steps = min(WHOLE_STEPS, gram.shape[1])

    def noise() -> Tensor:
        return torch.randn(gram.shape[:2], dtype=gram.dtype, device=gram.device, generator=generator)

    process = Lanczos(lambda q: torch.bmm(q[:, None], gram)[:, 0], noise, steps, orthogonalize=True)
    process.run(steps)
    return process.matrix().largest_eigenvalue().clamp(min=0)
