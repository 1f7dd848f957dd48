"""Certificates to be broken: what a certifier said, at the largest radii at which it said so."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from locallip.balls import L2, Ball, as_ball
from locallip.certify import Certificate

#: A certifier of one network, such as `Certifier`: x (B, *shape), labels (B,), radii (B,) to verdicts.
Issuer = Callable[[Tensor, Tensor, Tensor], Certificate]
#: Makes the certifier of a network; the audit also asks for those of networks that it derives from the given one.
IssuerOf = Callable[[nn.Module], Issuer]


@dataclass(frozen=True)
class Claims:
    """For all points within radius[i] of x[i], in the norm of `ball`, the class is y[i]; x (N, *shape), radius (N,) float64.

    `index` (N,) says which images of the data set these are.
    """

    x: Tensor
    y: Tensor
    radius: Tensor
    index: Tensor
    ball: Ball = L2

    def __len__(self) -> int:
        return len(self.x)

    def take(self, rows: Tensor) -> Claims:
        return Claims(self.x[rows], self.y[rows], self.radius[rows], self.index[rows], self.ball)


def claims_of(issue: Issuer, x: Tensor, y: Tensor, eps: Tensor, index: Tensor) -> Claims:
    """What is certified at just these radii."""
    found = issue(x, y, eps)
    certified = found.certified.to(x.device) & (eps > 0)
    return Claims(x, y, eps, index, as_ball(found.norm)).take(certified.nonzero()[:, 0])


def largest_claims(
    issue: Issuer,
    x: Tensor,
    y: Tensor,
    eps: Tensor,
    index: Tensor,
    probes: int = 8,
    say: Callable[[str], None] = lambda line: None,
) -> Claims:
    """For each image the largest of `probes` radii that is certified, first eps, then up by half, down by half, and between.

    The radius counts as asked for, not as the certificate repeats it. Images without any certificate are left out.
    """
    ball = L2
    low, high = torch.zeros_like(eps), torch.full_like(eps, float("inf"))
    for probe in range(probes):
        trial = torch.where(low > 0, 1.5 * low, torch.where(high < float("inf"), high / 2, eps))
        trial = torch.where((low > 0) & (high < float("inf")), (low + high) / 2, trial)
        found = issue(x, y, trial)
        certified, ball = found.certified.to(x.device), as_ball(found.norm)
        low, high = torch.where(certified, trial, low), torch.where(certified, high, trial)
        say(f"radius {probe + 1} of {probes}: {int((low > 0).sum())} of {len(x)} images certified so far")
    return Claims(x, y, low, index, ball).take((low > 0).nonzero()[:, 0])
