"""How much a floating-point result may be off: the constants behind every outward rounding.

A sum of n products, in any order, with or without fused multiply-add, is off by at most gamma(n) times the sum of the
absolute values (Higham, Accuracy and Stability of Numerical Algorithms, 2002, section 3.1). `torch.finfo.eps` is twice
the unit roundoff, so every constant here has a factor of two to spare.
"""

from __future__ import annotations

import torch
from torch import Tensor


def gamma(n: int, dtype: torch.dtype) -> float:
    """gamma_n = n u / (1 - n u), with u taken twice too large; inf where the bound says nothing any more."""
    nu = n * torch.finfo(dtype).eps
    return nu / (1 - nu) if nu < 0.5 else float("inf")


def root(squares: Tensor) -> Tensor:
    """The square root of numbers >= 0, with derivative 0 at 0 in place of infinity; NaN stays NaN."""
    zero = squares == 0
    return torch.where(zero, squares, torch.where(zero, 1.0, squares).sqrt())


def up(value: Tensor, roundings: int = 8) -> Tensor:
    """A number at least as large as the non-negative value that `roundings` roundings may have made too small.

    Zero stays zero: sums and products of numbers that are 0 or at least FLOOR are only 0 when they are exactly so.
    """
    info = torch.finfo(value.dtype)
    return torch.where(value == 0, value, value * (1 + roundings * info.eps) + info.tiny)


def raised(value: Tensor, roundings: int = 8) -> Tensor:
    """As `up`, for values of either sign, where none of the roundings was of a larger number."""
    info = torch.finfo(value.dtype)
    return value + (roundings * info.eps * value.abs() + info.tiny)


#: Widths and errors that are not zero are at least this in outward rounding, so that no product with weights underflows.
FLOOR = 1e-100


def floored(value: Tensor, present: Tensor) -> Tensor:
    """`value` >= 0, raised to FLOOR where `present`: the quantity behind it is not exactly zero."""
    return torch.where(present | (value > 0), value.clamp(min=FLOOR), value)
