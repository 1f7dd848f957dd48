"""Adversaries: what tries to break a classifier, and with it a certificate."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor


def pgd_l2(
    logits: Callable[[Tensor], Tensor],
    x: Tensor,
    y: Tensor,
    eps: Tensor,
    *,
    steps: int = 20,
    step_share: float = 0.25,
    input_domain: tuple[float, float] | None = None,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Projected gradient ascent on the cross entropy in the l2 ball, steps of `step_share` * eps (Madry et al. 2018).

    x (B, *shape), y (B,), eps (B,). Returns for every sample the point of its path where the margin of the label is
    smallest, (B, *shape); points stay inside the ball and the domain.
    """
    reach = eps.reshape(-1, *[1] * (x.dim() - 1))
    delta = torch.randn(x.shape, dtype=x.dtype, device=x.device, generator=generator)
    point = _project(x, delta * reach, reach, input_domain)
    best, best_margin = x.clone(), torch.full_like(eps, float("inf"))
    for step in range(steps + 1):
        with torch.enable_grad():
            point.requires_grad_()
            output = logits(point)
            loss = F.cross_entropy(output, y, reduction="sum")
            (slope,) = torch.autograd.grad(loss, point)
        point = point.detach()
        lead = margins(output.detach(), y)
        better = lead < best_margin
        best_margin = torch.where(better, lead, best_margin)
        best = torch.where(better.reshape(reach.shape), point, best)
        if step < steps:
            length = slope.flatten(1).norm(dim=1).clamp(min=torch.finfo(x.dtype).tiny).reshape(reach.shape)
            point = _project(x, point + step_share * reach * slope / length - x, reach, input_domain)
    return best


def margins(logits: Tensor, y: Tensor) -> Tensor:
    """z_y - max_{i != y} z_i, (B,): negative where the label loses."""
    label = F.one_hot(y, logits.shape[1]).bool()
    return logits.gather(1, y[:, None])[:, 0] - logits.masked_fill(label, -float("inf")).amax(1)


def _project(x: Tensor, delta: Tensor, reach: Tensor, domain: tuple[float, float] | None) -> Tensor:
    """x + delta, back in the ball and then in the domain (a box that holds x, so the ball is not left again)."""
    length = delta.flatten(1).norm(dim=1).clamp(min=torch.finfo(x.dtype).tiny).reshape(reach.shape)
    point = x + delta * (reach * (1 - 1e-6) / length).clamp(max=1)
    return point if domain is None else point.clamp(*domain)
