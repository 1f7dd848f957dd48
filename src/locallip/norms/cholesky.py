"""A proof of the norm: no eigenvalue of A A^T (or A^T A, whichever is cheaper) is above t^2, by a Cholesky factorization.

Layers of moderate size are written out as matrices; larger maps between images have Gram matrices in blocks (gram.py). The
factorization is checked block by block (definite.py), and the roundings of forming A and its Gram matrix are bounded and
added to t^2.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from locallip.norms.base import Guarantee, NormKey, ProvenRule
from locallip.norms.definite import Blocks, eigenvalue_bound
from locallip.norms.gram import Gram, Slabs, best_slabs, factorization_cost
from locallip.norms.lanczos import Lanczos, LanczosNorm
from locallip.ops import LinearOp, Masked
from locallip.rounding import gamma, up

_INFLATIONS = (1e-13, 1e-11, 1e-9, 1e-7, 1e-5, 1e-3, 1e-1, 1.0)
#: A guess by Lanczos is an upper bound but for bad luck, so hardly any of these are tried.
_LOOSER = (0.0, 1e-6, 1e-4, 1e-3, 1e-2, 1e-1, 1.0)
#: Where blocks are factorized, Lanczos says how large the norm is, to this tolerance: nothing rests on it but tightness.
GUESS_FAILURE, GUESS_RTOL, GUESS_STEPS = 1e-6, 5e-4, 800
#: A local norm closer than this to the one over all inputs is not worth a factorization.
WORTH = 2e-3


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
        if matrix.shape[0] > matrix.shape[1]:
            matrix, absolute, first, second = matrix.T, absolute.T, op.cols, op.rows
        else:
            first, second = op.rows, op.cols
        entry_error = gamma(op.roundings + 4, like.dtype)
        values = []
        for i in range(op.batch):
            weighed = _weigh(matrix, first, second, i)
            size = up(_weigh(absolute, first, second, i), 8 + op.fan_in).norm()
            values.append(_proven_norm(weighed, size, entry_error))
        return torch.stack(values)

    def _in_blocks(self, op: Masked, slabs: Slabs, key: NormKey, like: Tensor, coarse: Tensor) -> Tensor:
        # Entries of the Gram matrix are off by at most gamma (|A| |A|^T), and `coarse` is at least the norm of |A|.
        gram_error = up(gamma(2 * op.roundings + 16, like.dtype) * up(coarse.double().square())).expand(op.batch)
        # Its random numbers are always the same ones, so that a proof does not depend on those before it.
        rule = LanczosNorm(GUESS_FAILURE, GUESS_RTOL, GUESS_STEPS, seed=1000 * key.stage + key.source)
        guess = rule.proven_norm(op, key, like, coarse).expand(op.batch)
        cap = self._caps[key].double() if key in self._caps else like.new_full((1,), float("inf"))
        pays = (guess < cap * (1 - WORTH)).tolist()
        values = [cap[0]] * op.batch
        for i in range(op.batch):
            if pays[i]:
                gram = Gram(op.select(slice(i, i + 1)), slabs, like)
                values[i] = up(up(_eigenvalue(gram, up(guess[i].square()), _LOOSER) + gram_error[i]).sqrt())
        return torch.stack(values)


def _weigh(matrix: Tensor, rows: Tensor | None, cols: Tensor | None, sample: int) -> Tensor:
    """diag(rows) M diag(cols) of one sample with the removed rows and columns left out."""
    if rows is not None:
        weight = rows[sample].flatten().to(matrix.dtype)
        matrix = matrix[weight != 0] * weight[weight != 0, None]
    if cols is not None:
        weight = cols[sample].flatten().to(matrix.dtype)
        matrix = matrix[:, weight != 0] * weight[weight != 0]
    return matrix


def _proven_norm(matrix: Tensor, frobenius: Tensor, entry_error: float) -> Tensor:
    """A proved upper bound of ||A||, where |A - matrix| <= entry_error |A| or so and `frobenius` bounds || |A| ||_F."""
    p, contraction = matrix.shape
    if p == 0 or contraction == 0 or not bool(frobenius > torch.finfo(matrix.dtype).tiny):
        return torch.zeros_like(frobenius)
    gram = matrix @ matrix.T
    gram_error = (gamma(contraction + 2, gram.dtype) + 3 * entry_error) * up(frobenius.square(), matrix.numel() + 64)
    bound = _eigenvalue(_One(gram), _largest_eigenvalue(gram), _INFLATIONS)
    return up((bound + gram_error).sqrt())


class _One(NamedTuple):
    """A matrix as a single block; only its lower triangle counts."""

    matrix: Tensor
    number: int = 1

    def diagonal(self, j: int) -> Tensor:
        return self.matrix.tril() + self.matrix.tril(-1).T

    def below(self, j: int) -> None:
        return None


def _eigenvalue(gram: Blocks, guess: Tensor, inflations: tuple[float, ...]) -> Tensor:
    """A proved upper bound of the largest eigenvalue; infinite where all inflations of the guess were too small."""
    if gram.number == 0:
        return torch.zeros_like(guess)
    for inflation in inflations:
        bound = eigenvalue_bound(gram, up(guess * (1 + inflation)))
        if bound is not None:
            return bound
    return torch.full_like(guess, float("inf"))


def _largest_eigenvalue(gram: Tensor) -> Tensor:
    """A guess for t^2; nothing rests on it but tightness."""
    if not bool(torch.isfinite(gram).all()):
        return torch.full_like(gram[0, 0], float("nan"))
    if len(gram) <= 128:
        return torch.linalg.eigvalsh(gram)[-1].clamp(min=0)
    generator = torch.Generator(gram.device).manual_seed(0)

    def noise() -> Tensor:
        return torch.randn(1, len(gram), dtype=gram.dtype, device=gram.device, generator=generator)

    process = Lanczos(lambda q: q @ gram, noise, 200, orthogonalize=True)
    process.run(min(200, len(gram)))
    return process.matrix().largest_eigenvalue()[0].clamp(min=0)
