"""Projected gradient ascent in a ball (Madry et al. 2018)."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from locallip.attacks.lead import margins
from locallip.attacks.packs import Part, Progress, State, in_packs
from locallip.balls import L2, Ball, Domain, reach_of

__all__ = ["margins", "pgd_attack", "pgd_l2", "withstands"]


def pgd_l2(
    logits: Callable[[Tensor], Tensor],
    x: Tensor,
    y: Tensor,
    eps: Tensor,
    *,
    steps: int = 20,
    step_share: float = 0.25,
    input_domain: Domain = None,
    ball: Ball = L2,
    generator: torch.Generator | None = None,
    target: Tensor | None = None,
) -> Tensor:
    """Projected gradient ascent on the cross entropy in the ball, steps of `step_share` * eps (Madry et al. 2018).

    x (B, *shape), y (B,), eps (B,). Returns for every sample the point of its path where the margin of the label is
    smallest, (B, *shape); points stay inside the ball and the domain. `target` (B, C) are probabilities to climb away
    from instead of the labels, as TRADES does.
    """
    reach = eps.reshape(-1, *[1] * (x.dim() - 1))
    point = ball.random_start(x, reach, input_domain, generator)
    best, best_margin = x.clone(), torch.full_like(eps, float("inf"))
    for step in range(steps + 1):
        lead, slope = _lead_and_slope(logits, point, y, target)
        better = lead < best_margin
        best_margin = torch.where(better, lead, best_margin)
        best = torch.where(better.reshape(reach.shape), point, best)
        if step < steps:
            point = _ascend(x, point, slope, reach, step_share, input_domain, ball)
    return best


def withstands(
    logits: Callable[[Tensor], Tensor],
    x: Tensor,
    y: Tensor,
    eps: Tensor,
    *,
    steps: int = 100,
    step_share: float = 0.25,
    input_domain: Domain = None,
    ball: Ball = L2,
    generator: torch.Generator | None = None,
    batch_size: int = 500,
    pack_every: int = 20,
    progress: Progress | None = None,
) -> Tensor:
    """Which samples keep their label on the whole path of `pgd_l2`, (B,) bool; a margin of 0 or NaN counts as lost.

    x (B, *shape), y (B,), eps (B,), B of any size. After every `pack_every` steps the samples that lost their label are
    dropped and the others packed into full batches, which go on from the points where they stand. `progress` is called
    before each batch of these steps with the points attacked so far and their number, if all went on to the end.
    """

    def watched(state: State, points: int) -> State:
        x, y, reach, point, lost = (state[name] for name in ("x", "y", "reach", "point", "lost"))
        for _ in range(points):
            lead, slope = _lead_and_slope(logits, point, y)
            lost = lost | ~(lead > 0)
            point = _ascend(x, point, slope, reach, step_share, input_domain, ball)
        return {"point": point, "lost": lost}

    reach = reach_of(x, eps)
    start = ball.random_start(x, reach, input_domain, generator)
    state = {"x": x, "y": y, "reach": reach, "point": start, "lost": torch.zeros_like(y, dtype=torch.bool)}
    return ~in_packs(state, _parts(steps, pack_every, watched), batch_size, progress)["lost"]


def pgd_attack(
    logits: Callable[[Tensor], Tensor],
    x: Tensor,
    y: Tensor,
    eps: Tensor,
    *,
    steps: int = 100,
    step_share: float = 0.25,
    input_domain: Domain = None,
    ball: Ball = L2,
    generator: torch.Generator | None = None,
    batch_size: int = 500,
    pack_every: int = 20,
    progress: Progress | None = None,
) -> Tensor:
    """`pgd_l2` for any number of samples: (B, *shape), the points with the smallest margin; who has fallen is dropped.

    The paths are those of `pgd_l2`, up to the end of the `pack_every` steps in which the label is lost.
    """

    def searched(state: State, points: int) -> State:
        x, y, reach, point, found, least = (state[name] for name in ("x", "y", "reach", "point", "found", "least"))
        for _ in range(points):
            lead, slope = _lead_and_slope(logits, point, y)
            better = lead < least
            least = torch.where(better, lead, least)
            found = torch.where(better.reshape(reach.shape), point, found)
            point = _ascend(x, point, slope, reach, step_share, input_domain, ball)
        return {"point": point, "found": found, "least": least, "lost": least < 0}

    reach = reach_of(x, eps)
    state = {
        "x": x,
        "y": y,
        "reach": reach,
        "point": ball.random_start(x, reach, input_domain, generator),
        "found": x,
        "least": torch.full_like(reach.flatten(), float("inf")),
        "lost": torch.zeros_like(y, dtype=torch.bool),
    }
    return in_packs(state, _parts(steps, pack_every, searched), batch_size, progress)["found"]


def _parts(steps: int, pack_every: int, advance: Callable[[State, int], State]) -> list[Part]:
    """The start and all steps, `pack_every` points at a time."""
    sizes = [min(pack_every, steps + 1 - first) for first in range(0, steps + 1, pack_every)]
    return [Part(size, lambda state, size=size: advance(state, size)) for size in sizes]  # type: ignore[misc]


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


def _ascend(x: Tensor, point: Tensor, slope: Tensor, reach: Tensor, share: float, domain: Domain, ball: Ball) -> Tensor:
    return ball.project(x, point + share * reach * ball.steepest(slope) - x, reach, domain)
