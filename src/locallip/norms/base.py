"""What a spectral norm rests on, and what every rule has in common."""

from __future__ import annotations

import secrets
from abc import ABC, abstractmethod
from collections.abc import Sequence
from enum import Enum
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from locallip.ops import Masked
from locallip.rounding import up


class Guarantee(Enum):
    """How far a bound can be trusted, from least to most."""

    ESTIMATE = "estimate"
    HIGH_PROBABILITY = "high_probability"
    DETERMINISTIC = "deterministic"

    @classmethod
    def parse(cls, value: str | Guarantee) -> Guarantee:
        try:
            return cls(value)
        except ValueError:
            known = ", ".join(repr(member.value) for member in cls)
            raise ValueError(f"unknown guarantee {value!r}; choose one of {known}") from None


class NormKey(NamedTuple):
    """Which norm of a network: the term `source` of stage number `stage`, with the stage's name for messages."""

    stage: int
    source: int
    name: str


class NormRule(ABC):
    """A spectral norm per sample: ||diag(rows) W diag(cols)||, (B,)."""

    guarantee: Guarantee

    def __call__(self, op: Masked, key: NormKey, like: Tensor) -> Tensor:
        """(B,), in the dtype and on the device of `like`; B is 1 for an operator without masks."""
        if op.batch == 0:
            return like.new_zeros(0)
        if op.disjoint_rows:
            return orthogonal_rows_norm(op, like)
        return self.norm(op, key, like)

    @abstractmethod
    def norm(self, op: Masked, key: NormKey, like: Tensor) -> Tensor: ...


class ProvenRule(NormRule):
    """A rule whose value stands in a certificate: extreme magnitudes are caught before squaring them hides them."""

    def norm(self, op: Masked, key: NormKey, like: Tensor) -> Tensor:
        if not op.exact:
            raise ValueError(f"'{key.name}' computes in 16 bits (in_precision), which no proven norm may rest on")
        with torch.no_grad():
            largest_row_sum = up(op.apply_abs(ones_into(op, like)).flatten(1).amax(1), 8 + op.fan_in)
            coarse = up(largest_row_sum * op.out_shape.numel() ** 0.5)  # ||A||_2 <= sqrt(rows) ||A||_inf
            value = self.proven_norm(op, key, like, coarse)
            value = torch.where(value.isnan(), float("inf"), value)
            ordinary = (largest_row_sum > 1e-60) & (largest_row_sum < 1e60)
            value = torch.where(ordinary, torch.minimum(value, coarse), coarse)
            return torch.where(coarse.isnan(), float("inf"), value)

    @abstractmethod
    def proven_norm(self, op: Masked, key: NormKey, like: Tensor, coarse: Tensor) -> Tensor:
        """The bound, (B,); `coarse` (B,) is at least the norm of |A|, which the rounding of A v is measured by."""


class Noise:
    """Normal random numbers from a generator of one's own; `seed=None` takes the seed from the operating system.

    All 64 bits of a seed count. Torch's generator of the CPU takes the lower 32 alone, and one matrix of n columns can be
    built against n - 1 of its streams: of 2^32 that is far more than a failure probability of 1e-9 allows.
    """

    def __init__(self, seed: int | None):
        self._seed = seed
        self._of_cpu: np.random.Generator | None = None
        self._of_devices: dict[torch.device, torch.Generator] = {}

    def __call__(self, shape: Sequence[int], like: Tensor) -> Tensor:
        # Generators are made here and not above: a compiled training step makes rules that never draw.
        if self._seed is None:
            self._seed = secrets.randbits(64)
        seed, device = self._seed % 2**64, like.device
        if device.type == "cpu":
            self._of_cpu = self._of_cpu or np.random.Generator(np.random.PCG64(seed))
            return torch.from_numpy(self._of_cpu.standard_normal(tuple(shape))).to(like.dtype)
        if device not in self._of_devices:
            self._of_devices[device] = torch.Generator(device).manual_seed(seed)
        return torch.randn(shape, dtype=like.dtype, device=device, generator=self._of_devices[device])


def ones_into(op: Masked, like: Tensor) -> Tensor:
    """The vector of ones in the operator's input space, (B, *in_shape)."""
    return torch.ones(op.batch, *op.in_shape, dtype=like.dtype, device=like.device)


def orthogonal_rows_norm(op: Masked, like: Tensor) -> Tensor:
    """The norm of a map whose rows have disjoint supports is its largest row norm."""
    ones = ones_into(op, like)
    value = op.row_norms(ones).flatten(1).amax(1)
    with torch.no_grad():  # where squares vanish or overflow, the sum of a row's absolute values stands in for its norm
        sums = op.apply_abs(ones).flatten(1).amax(1)
    ordinary = (sums > 1e-100) & (sums < 1e100) if like.dtype == torch.float64 else torch.ones_like(sums, dtype=torch.bool)
    return up(torch.where(ordinary, value, sums), 8 + op.fan_in)
