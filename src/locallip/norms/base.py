"""What a spectral norm rests on, and what every rule has in common."""

from __future__ import annotations

from abc import ABC, abstractmethod
from enum import Enum
from typing import NamedTuple

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
        if op.disjoint_rows:
            return orthogonal_rows_norm(op, like)
        return self.norm(op, key, like)

    @abstractmethod
    def norm(self, op: Masked, key: NormKey, like: Tensor) -> Tensor: ...


class ProvenRule(NormRule):
    """A rule whose value stands in a certificate: extreme magnitudes are caught before squaring them hides them."""

    def norm(self, op: Masked, key: NormKey, like: Tensor) -> Tensor:
        with torch.no_grad():
            largest_row_sum = up(op.apply_abs(ones_into(op, like)).flatten(1).amax(1), 8 + op.fan_in)
            coarse = up(largest_row_sum * op.out_shape.numel() ** 0.5)  # ||A||_2 <= sqrt(rows) ||A||_inf
            value = self.proven_norm(op, key, like)
            value = torch.where(value.isnan(), float("inf"), value)
            ordinary = (largest_row_sum > 1e-140) & (largest_row_sum < 1e140)
            value = torch.where(ordinary, torch.minimum(value, coarse), coarse)
            return torch.where(coarse.isnan(), float("inf"), value)

    @abstractmethod
    def proven_norm(self, op: Masked, key: NormKey, like: Tensor) -> Tensor: ...


def ones_into(op: Masked, like: Tensor) -> Tensor:
    """The vector of ones in the operator's input space, (B, *in_shape)."""
    return torch.ones(op.batch, *op.in_shape, dtype=like.dtype, device=like.device)


def orthogonal_rows_norm(op: Masked, like: Tensor) -> Tensor:
    """The norm of a map whose rows have disjoint supports is its largest row norm."""
    return up(op.row_norms(ones_into(op, like)).flatten(1).amax(1), 8 + op.fan_in)
