"""The l2 ball that an attack may not leave, and the margin that it wants to lose."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

Domain = tuple[float, float] | None
#: By so much points stay away from the edge of the ball, which covers the rounding of x + delta unless eps is tiny.
SHRINK = 1e-6


def reach_of(x: Tensor, eps: Tensor) -> Tensor:
    """eps (B,) in the dtype of x and with as many dimensions, (B, 1, ..., 1)."""
    return eps.to(x.dtype).reshape(-1, *[1] * (x.dim() - 1))


def random_start(x: Tensor, reach: Tensor, domain: Domain, generator: torch.Generator | None) -> Tensor:
    # A generator of the CPU gives the same start on every device.
    place = x.device if generator is None else generator.device
    delta = torch.randn(x.shape, dtype=x.dtype, device=place, generator=generator).to(x.device)
    return project(x, delta * reach, reach, domain)


def project(x: Tensor, delta: Tensor, reach: Tensor, domain: Domain) -> Tensor:
    """x + delta, back in the ball and then in the domain (a box that holds x, so the ball is not left again)."""
    length = delta.flatten(1).norm(dim=1).clamp(min=torch.finfo(x.dtype).tiny).reshape(reach.shape)
    point = x + delta * (reach * (1 - SHRINK) / length).clamp(max=1)
    return point if domain is None else point.clamp(*domain)


def margins(logits: Tensor, y: Tensor) -> Tensor:
    """z_y - max_{i != y} z_i, (B,): negative where the label loses."""
    label = F.one_hot(y, logits.shape[1]).bool()
    return logits.gather(1, y[:, None])[:, 0] - logits.masked_fill(label, -float("inf")).amax(1)
