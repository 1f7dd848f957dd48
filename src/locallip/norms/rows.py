"""How start vectors lie in memory between epochs: rows of numbers, or of codes of 8 or 4 bits for each number."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

#: Codes of 8 bits lie in int8, two of 4 bits in a uint8; all other types hold the numbers themselves.
EIGHT_BITS, FOUR_BITS = torch.int8, torch.uint8
#: The largest code, which stands for the largest number of a vector.
_TOP = {EIGHT_BITS: 127, FOUR_BITS: 7}


@dataclass(frozen=True)
class Rows:
    """Vectors (B, *shape) as rows (B, width) of `dtype`, images in the order of `channels_last` memory where asked for.

    A code c stands for c |c|, times a factor that its vector shares: small numbers are kept better than in equal steps.
    The factor is not kept, as a start has length 1. With 8 bits a vector is read within about 1 % of what was kept, with 4
    within 20 %; the norm that a power step finds from there suffers by the square of that.
    """

    dtype: torch.dtype
    channels_last: bool = False

    @property
    def coded(self) -> bool:
        return self.dtype in _TOP

    def width(self, numel: int) -> int:
        """Entries of a row that holds `numel` numbers."""
        return (numel + 1) // 2 if self.dtype == FOUR_BITS else numel

    def nbytes(self, numel: int) -> int:
        return self.width(numel) * self.dtype.itemsize

    def lay(self, u: Tensor) -> Tensor:
        """The rows (B, width) of vectors u (B, *shape)."""
        if self.channels_last and u.dim() == 4:
            u = u.permute(0, 2, 3, 1)
        flat = u.reshape(len(u), -1)
        if not self.coded:
            return flat.to(self.dtype)
        flat = flat.float()
        largest = flat.abs().amax(1, keepdim=True).clamp(min=torch.finfo(torch.float32).tiny)
        codes = ((flat.abs() / largest).sqrt() * _TOP[self.dtype]).round() * flat.sign()
        return codes.to(EIGHT_BITS) if self.dtype == EIGHT_BITS else _in_pairs(codes)

    def vectors(self, rows: Tensor, shape: torch.Size) -> Tensor:
        """The vectors (B, *shape) of rows (B, width), of length 1 where they are coded; a view where they are not."""
        if self.coded:
            codes = rows.float() if self.dtype == EIGHT_BITS else _apart(rows)[:, : shape.numel()]
            flat = codes * codes.abs()
            rows = flat / flat.norm(dim=1, keepdim=True).clamp(min=1.0)
        if self.channels_last and len(shape) == 3:
            channels, height, width = shape
            return rows.view(-1, height, width, channels).permute(0, 3, 1, 2)
        return rows.view(-1, *shape)

    def random(self, rows: Tensor, numel: int, generator: torch.Generator) -> None:
        """Fill rows with random directions, of length 1 in the mean where they are not coded."""
        if self.dtype == EIGHT_BITS:
            rows.random_(-127, 128, generator=generator)
        elif self.dtype == FOUR_BITS:
            rows.random_(0, 256, generator=generator)
        else:
            rows.normal_(std=numel**-0.5, generator=generator)


def _in_pairs(codes: Tensor) -> Tensor:
    """Codes -7 ... 7 (B, n) in bytes (B, (n + 1) // 2): the first half in the lower four bits, the second in the upper."""
    codes = torch.nn.functional.pad(codes + 8, (0, codes.shape[1] % 2), value=8).to(FOUR_BITS)
    low, high = codes.chunk(2, 1)
    return low | (high << 4)


def _apart(pairs: Tensor) -> Tensor:
    return torch.cat([pairs & 15, pairs >> 4], 1).float() - 8
