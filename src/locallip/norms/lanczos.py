"""Lanczos from a random start: an upper bound of the norm that fails with a stated probability.

For a start b, uniform on the unit sphere of R^n, k steps on A^T A give a Krylov space with largest Ritz value theta. Two
bounds on the largest eigenvalue lambda follow, each allowed half of the failure probability delta, the smaller counts:

- Kuczynski and Wozniakowski (1992): P(lambda > theta / (1 - e)) <= 1.648 sqrt(n) exp(-sqrt(e) (2k - 1)). It holds
  whatever the spectrum, and is known before the first step; looking at it after several k costs a union bound.
- van Dorsselaer, Hochstenbach and van der Vorst (2000): with p the characteristic polynomial of the tridiagonal matrix,
  p(A^T A) b = beta_1 ... beta_k q_{k+1}, so |p(lambda)| |<b, v>| <= beta_1 ... beta_k for the top eigenvector v. As
  P(|<b, v>| < t) <= t sqrt(2n / pi), lambda is at most the largest root of |p(mu)| = beta_1 ... beta_k / t with
  probability 1 - t sqrt(2n / pi). One event covers every k, so the steps may stop when the bound is tight.

Where k reaches the dimension of the space, with a basis kept orthogonal, theta is the eigenvalue itself. A saved vector
would void both, so each call draws its own.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable

import torch
from torch import Tensor

from locallip.norms.base import Guarantee, Noise, NormKey, ProvenRule
from locallip.norms.tridiagonal import Tridiagonal
from locallip.ops import Masked
from locallip.rounding import gamma, up

#: Covers the rounding of the Lanczos recurrence in float64: relative, on the eigenvalue.
ROUNDING = 1e-8
#: Spaces up to this dimension get a fully orthogonal basis, larger ones only the three-term recurrence.
ORTHOGONAL_LIMIT = 256


class LanczosNorm(ProvenRule):
    """At least the norm, except with probability `failure_prob` per call and sample; HIGH_PROBABILITY.

    Stops when the bound is within `rtol` of its own lower bound, or after `max_steps`. `seed=None` draws from the
    operating system: weights chosen by somebody who knows the seed are outside the guarantee.
    """

    guarantee = Guarantee.HIGH_PROBABILITY

    def __init__(
        self,
        failure_prob: float,
        rtol: float = 2e-3,
        max_steps: int = 300,
        seed: int | None = None,
        memory: int = 2**30,
    ):
        if not 0 < failure_prob < 1:
            raise ValueError(f"the failure probability must lie between 0 and 1, got {failure_prob}")
        self.failure_prob, self.rtol, self.max_steps, self.memory = failure_prob, rtol, max_steps, memory
        self._noise = Noise(seed)

    def sharpened(self, rtol: float, max_steps: int) -> LanczosNorm:
        """The same rule to another tolerance; both draw from one stream, so that no start is used twice."""
        rule = copy.copy(self)
        rule.rtol, rule.max_steps = rtol, max_steps
        return rule

    def proven_norm(self, op: Masked, key: NormKey, like: Tensor, coarse: Tensor) -> Tensor:
        _, bound = self.bracket(op, like)
        # With A v and A^T w off by E v and F^T w, both norms <= gamma || |A| ||, the norm is at most the computed one plus
        # (1 + sqrt(2)) of that.
        lost = 4 * gamma(op.roundings + 16, torch.float64) * coarse.double()
        return up((bound + lost).to(like.dtype), 2)

    def bracket(self, op: Masked, like: Tensor) -> tuple[Tensor, Tensor]:
        """The norm found and its upper bound, each (B,) in float64, but for what the products with A are off."""
        n = min(op.in_shape.numel(), op.out_shape.numel())
        per_sample = 8 * n * (4 + (min(self.max_steps, n) if n <= ORTHOGONAL_LIMIT else 0))
        chunk = max(1, self.memory // per_sample)
        parts = [self._bracket(op.select(slice(i, i + chunk)), n, like) for i in range(0, op.batch, chunk)]
        return torch.cat([low for low, _ in parts]), torch.cat([high for _, high in parts])

    def _bracket(self, op: Masked, n: int, like: Tensor) -> tuple[Tensor, Tensor]:
        gram, support = gram_operator(op, like)
        # Without a complete basis more steps than dimensions still sharpen the bound.
        last = min(self.max_steps, n) if n <= ORTHOGONAL_LIMIT else self.max_steps
        checkpoints = _checkpoints(last)
        process = Lanczos(
            gram, lambda: self._noise(support.shape, like.double()) * support, last, orthogonalize=n <= ORTHOGONAL_LIMIT
        )
        for steps in checkpoints:
            process.run(steps)
            theta, bound = self._upper(process, n, looks=len(checkpoints))
            if process.orthogonal:
                bound = torch.where(support.sum(1) <= steps, theta, bound)
            if bool(((bound <= theta * (1 + self.rtol) ** 2) | bound.isnan()).all()):
                break
        return theta.sqrt(), (bound * (1 + ROUNDING)).sqrt()

    def _upper(self, process: Lanczos, n: int, looks: int) -> tuple[Tensor, Tensor]:
        """The largest Ritz value and the upper bound of the eigenvalue, each (B,); `looks` times it may be asked for."""
        matrix = process.matrix()
        theta = matrix.largest_eigenvalue().clamp(min=0)
        half = self.failure_prob / 2
        # The first bound holds for a number of steps fixed beforehand: its share is split over all looks.
        excess = (math.log(1.648 * math.sqrt(n) * looks / half) / (2 * process.steps - 1)) ** 2
        prior = theta / (1 - excess) if excess < 1 else torch.full_like(theta, float("inf"))
        smallest_overlap = half * math.sqrt(math.pi / (2 * n))
        floor = 4 * torch.finfo(torch.float64).eps * theta[:, None]
        log_product = torch.maximum(process.beta, floor).log().sum(1) - math.log(smallest_overlap)
        posterior = torch.minimum(prior, matrix.passes(theta, log_product))
        # Behind a restart the coefficients no longer belong to the first start alone, which the second bound is about.
        return theta, torch.where(process.restarted, prior, posterior)


class Lanczos:
    """The Lanczos process for a batch of symmetric maps; `noise()` gives random vectors (B, n) of the space.

    `orthogonalize` keeps the whole basis orthogonal to working precision, at the price of storing it, and starts afresh in
    its complement where the Krylov space is exhausted, so that after n steps the basis is complete. Without it the computed
    coefficients are those of an exact process on a larger matrix with eigenvalues in tiny intervals around the true ones and
    the same weights of the start vector (Greenbaum 1989), so both bounds above still apply.
    """

    def __init__(
        self, gram: Callable[[Tensor], Tensor], noise: Callable[[], Tensor], max_steps: int, *, orthogonalize: bool
    ):
        self.gram, self.noise, self.steps, self.orthogonal = gram, noise, 0, orthogonalize
        start = noise()
        batch, n = start.shape
        self._basis = start.new_zeros(batch, max_steps, n) if orthogonalize else None
        self._alpha = start.new_zeros(batch, max_steps)
        self._beta = start.new_zeros(batch, max_steps)
        self._last, self._next = torch.zeros_like(start), _unit_rows(start)
        self.restarted = torch.zeros(batch, dtype=torch.bool, device=start.device)

    def run(self, steps: int) -> None:
        """Go on until `steps` steps are done."""
        for k in range(self.steps, steps):
            w = self.gram(self._next)
            if k:
                w = w - self._beta[:, k - 1, None] * self._last
            self._alpha[:, k] = (w * self._next).sum(1)
            w = w - self._alpha[:, k, None] * self._next
            if self._basis is not None:
                self._basis[:, k] = self._next
                w = self._restart(_complement(w, self._basis[:, : k + 1]), k)
            else:
                self._beta[:, k] = w.norm(dim=1)
            self._last, self._next = self._next, _unit_rows(w)
        self.steps = steps

    def _restart(self, w: Tensor, k: int) -> Tensor:
        """w where it leads out of the space so far; a random vector of the complement, uncoupled, where it does not."""
        assert self._basis is not None
        length = w.norm(dim=1)
        done = length <= 1e-10 * self._alpha[:, : k + 1].abs().amax(1)
        self._beta[:, k] = torch.where(done, 0.0, length)
        if not bool(done.any()):
            return w
        self.restarted = self.restarted | done
        fresh = _complement(self.noise(), self._basis[:, : k + 1])
        nothing_left = fresh.norm(dim=1) <= 1e-8
        return torch.where(done[:, None], fresh.masked_fill(nothing_left[:, None], 0.0), w)

    @property
    def beta(self) -> Tensor:
        return self._beta[:, : self.steps]

    def matrix(self) -> Tridiagonal:
        """What A^T A is in the basis so far; its eigenvalues are the Ritz values."""
        return Tridiagonal(self._alpha[:, : self.steps].double(), self._beta[:, : self.steps - 1].double())


def gram_operator(op: Masked, like: Tensor) -> tuple[Callable[[Tensor], Tensor], Tensor]:
    """A^T A or A A^T, whichever is smaller, on flat float64 vectors (B, n), and the support of its start vectors."""
    narrow_input = op.in_shape.numel() <= op.out_shape.numel()
    shape, weights = (op.in_shape, op.cols) if narrow_input else (op.out_shape, op.rows)
    if weights is None:
        support = torch.ones(op.batch, shape.numel(), dtype=torch.bool, device=like.device)
    else:
        support = weights.flatten(1) > 0

    def gram(q: Tensor) -> Tensor:
        v = q.reshape(-1, *shape)
        return (op.adjoint(op.apply(v)) if narrow_input else op.apply(op.adjoint(v))).flatten(1)

    return gram, support


def _complement(w: Tensor, basis: Tensor) -> Tensor:
    """w (B, n) without its components along the rows of basis (B, k, n); twice is enough for working precision."""
    for _ in range(2):
        w = w - torch.bmm(basis.transpose(1, 2), torch.bmm(basis, w[:, :, None]))[:, :, 0]
    return w


def _checkpoints(last: int) -> list[int]:
    """Steps after which the bound is looked at: about every half more."""
    steps, k = [], 8
    while k < last:
        steps.append(k)
        k = k * 3 // 2
    return [*steps, last]


def _unit_rows(w: Tensor) -> Tensor:
    return w / w.norm(dim=1, keepdim=True).clamp(min=torch.finfo(w.dtype).tiny)
