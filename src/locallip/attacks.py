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
    target: Tensor | None = None,
) -> Tensor:
    """Projected gradient ascent on the cross entropy in the l2 ball, steps of `step_share` * eps (Madry et al. 2018).

    x (B, *shape), y (B,), eps (B,). Returns for every sample the point of its path where the margin of the label is
    smallest, (B, *shape); points stay inside the ball and the domain. `target` (B, C) are probabilities to climb away
    from instead of the labels, as TRADES does.
    """
    reach = eps.reshape(-1, *[1] * (x.dim() - 1))
    point = _random_start(x, reach, input_domain, generator)
    best, best_margin = x.clone(), torch.full_like(eps, float("inf"))
    for step in range(steps + 1):
        lead, slope = _lead_and_slope(logits, point, y, target)
        better = lead < best_margin
        best_margin = torch.where(better, lead, best_margin)
        best = torch.where(better.reshape(reach.shape), point, best)
        if step < steps:
            point = _ascend(x, point, slope, reach, step_share, input_domain)
    return best


def withstands(
    logits: Callable[[Tensor], Tensor],
    x: Tensor,
    y: Tensor,
    eps: Tensor,
    *,
    steps: int = 100,
    step_share: float = 0.25,
    input_domain: tuple[float, float] | None = None,
    generator: torch.Generator | None = None,
    batch_size: int = 500,
    pack_every: int = 20,
    progress: Callable[[int, int], None] | None = None,
) -> Tensor:
    """Which samples keep their label on the whole path of `pgd_l2`, (B,) bool; a margin of 0 or NaN counts as lost.

    x (B, *shape), y (B,), eps (B,), B of any size. After every `pack_every` steps the samples that lost their label are
    dropped and the others packed into full batches, which go on from the points where they stand. `progress` is called
    before each batch of these steps with the points attacked so far and their number, if all went on to the end.
    """
    total, done = len(x) * (steps + 1), 0
    reach = eps.reshape(-1, *[1] * (x.dim() - 1))
    point = _random_start(x, reach, input_domain, generator)
    alive = torch.arange(len(x), device=x.device)
    for first in range(0, steps + 1, pack_every):
        kept = torch.ones(len(alive), dtype=torch.bool, device=x.device)
        for begin in range(0, len(alive), batch_size):
            part = slice(begin, begin + batch_size)
            if progress is not None:
                progress(done, total)
            for _ in range(min(pack_every, steps + 1 - first)):
                lead, slope = _lead_and_slope(logits, point[part], y[part])
                kept[part] &= lead > 0
                point[part] = _ascend(x[part], point[part], slope, reach[part], step_share, input_domain)
            done += len(y[part]) * min(pack_every, steps + 1 - first)
        total = done + int(kept.sum()) * max(0, steps + 1 - first - pack_every)
        alive, x, y, reach, point = (values[kept] for values in (alive, x, y, reach, point))
    survived = torch.zeros(len(eps), dtype=torch.bool, device=x.device)
    survived[alive] = True
    return survived


def _random_start(x: Tensor, reach: Tensor, domain: tuple[float, float] | None, generator: torch.Generator | None) -> Tensor:
    # A generator of the CPU gives the same start on every device.
    place = x.device if generator is None else generator.device
    delta = torch.randn(x.shape, dtype=x.dtype, device=place, generator=generator).to(x.device)
    return _project(x, delta * reach, reach, domain)


def _lead_and_slope(
    logits: Callable[[Tensor], Tensor], point: Tensor, y: Tensor, target: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The margin of the label at each point, (B,), and the gradient of the cross entropy, (B, *shape)."""
    with torch.enable_grad():
        point = point.detach().requires_grad_()
        output = logits(point)
        loss = F.cross_entropy(output, y if target is None else target, reduction="sum")
        (slope,) = torch.autograd.grad(loss, point)
    return margins(output.detach(), y), slope


def _ascend(
    x: Tensor, point: Tensor, slope: Tensor, reach: Tensor, share: float, domain: tuple[float, float] | None
) -> Tensor:
    length = slope.flatten(1).norm(dim=1).clamp(min=torch.finfo(x.dtype).tiny).reshape(reach.shape)
    return _project(x, point + share * reach * slope / length - x, reach, domain)


def margins(logits: Tensor, y: Tensor) -> Tensor:
    """z_y - max_{i != y} z_i, (B,): negative where the label loses."""
    label = F.one_hot(y, logits.shape[1]).bool()
    return logits.gather(1, y[:, None])[:, 0] - logits.masked_fill(label, -float("inf")).amax(1)


def _project(x: Tensor, delta: Tensor, reach: Tensor, domain: tuple[float, float] | None) -> Tensor:
    """x + delta, back in the ball and then in the domain (a box that holds x, so the ball is not left again)."""
    length = delta.flatten(1).norm(dim=1).clamp(min=torch.finfo(x.dtype).tiny).reshape(reach.shape)
    point = x + delta * (reach * (1 - 1e-6) / length).clamp(max=1)
    return point if domain is None else point.clamp(*domain)
