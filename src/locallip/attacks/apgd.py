"""Auto-PGD in a ball: ascent that finds its own step size (Croce & Hein 2020)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from locallip.attacks.lead import margins
from locallip.attacks.packs import Part, Progress, State, in_packs
from locallip.balls import L2, Ball, Domain, reach_of

#: Share of the new direction in a step; the rest is that of the step before.
FRESH = 0.75
#: A step size stays where at least this share of the steps since the last checkpoint has raised the loss.
RISING = 0.75


class _Look(NamedTuple):
    """What a point shows: loss (B,), margin of the label (B,), gradient of the loss (B, *shape)."""

    value: Tensor
    lead: Tensor
    slope: Tensor


def apgd_l2(
    logits: Callable[[Tensor], Tensor],
    x: Tensor,
    y: Tensor,
    eps: Tensor,
    *,
    steps: int = 100,
    target: Tensor | None = None,
    input_domain: Domain = None,
    ball: Ball = L2,
    generator: torch.Generator | None = None,
    batch_size: int = 500,
    progress: Progress | None = None,
) -> Tensor:
    """Auto-PGD from a random start: for every sample the point seen with the smallest margin of its label, (B, *shape).

    x (B, *shape), y (B,), eps (B,). It climbs the cross entropy (APGD-CE) or, with classes `target` (B,), the targeted DLR
    loss (APGD-T). Steps are of length 2 eps at first and carry momentum. At each of a few checkpoints a sample whose loss
    has not risen often enough, or whose best loss stands still, halves its step and goes back to its best point. Points
    stay inside the ball and the domain, a box that holds x. Who has lost the label is dropped at checkpoints, and the others
    packed into full batches. Everything is computed in the dtype and on the device of x; a NaN is never a success.
    """
    reach = reach_of(x, eps)
    start = ball.random_start(x, reach, input_domain, generator)
    search = _Search(logits, input_domain, ball, targeted=target is not None)
    ends = checkpoints(steps)
    parts = [Part(1, search.begin)]
    for first, last in zip([0, *ends], ends, strict=False):
        parts.append(Part(last - first, lambda state, first=first, last=last: search.part(state, first, last)))  # type: ignore[misc]
    state = _start(x, y, y if target is None else target, reach, start)
    return in_packs(state, parts, batch_size, progress)["found"]


def apgd_targets(
    logits: Callable[[Tensor], Tensor],
    x: Tensor,
    y: Tensor,
    eps: Tensor,
    *,
    steps: int = 100,
    targets: int = 9,
    input_domain: Domain = None,
    ball: Ball = L2,
    generator: torch.Generator | None = None,
    batch_size: int = 500,
    progress: Progress | None = None,
) -> Tensor:
    """APGD-T: `apgd_l2` towards each of the `targets` classes next to the label at x, one after the other, (B, *shape).

    Each run sees only the samples that the runs before it left their label; of those that keep it the point of the last run
    is returned.
    """
    found, alive = x.clone(), torch.arange(len(x), device=x.device)
    ranked = _ranked(logits, x, y, batch_size)
    count = min(targets, ranked.shape[1])
    for place in range(count):
        if not len(alive):
            break
        at = x[alive], y[alive], eps[alive]
        settings = {
            "steps": steps,
            "input_domain": input_domain,
            "ball": ball,
            "generator": generator,
            "batch_size": batch_size,
        }
        heard = None if progress is None else _part_of(progress, place, count)
        points = apgd_l2(logits, *at, target=ranked[alive, place], progress=heard, **settings)  # type: ignore[arg-type]
        found[alive] = points
        alive = alive[~(_leads(logits, points, at[1], batch_size) < 0)]
    return found


def _part_of(progress: Progress, place: int, count: int) -> Progress:
    """The progress of one of several runs, taken to be as long as each other."""
    return lambda done, total: progress(place * total + done, count * total)


def checkpoints(steps: int) -> list[int]:
    """Where step sizes are looked at again: periods of 22 % of all steps, each 3 % shorter than the last, at least 6 %."""
    ends, share, period = list[int](), 0.22, 0.22
    while share < 1:
        ends.append(math.ceil(round(share * steps, 6)))  # without the rounding, 0.22 + 0.19 + ... ends a step late
        period = max(period - 0.03, 0.06)
        share += period
    return sorted({*(end for end in ends if 0 < end < steps), *([steps] if steps else [])})


def targeted_dlr(logits: Tensor, y: Tensor, target: Tensor) -> Tensor:
    """(z_t - z_y) / (z_1 - (z_3 + z_4) / 2) with z_1 >= z_2 >= ... the sorted logits, (B,): no scaling of them changes it.

    With fewer than four classes there is no such scale, and the loss is z_t - z_y.
    """
    ahead = (logits.gather(1, target[:, None]) - logits.gather(1, y[:, None]))[:, 0]
    if logits.shape[1] < 4:
        return ahead
    top = logits.topk(4, dim=1).values
    return ahead / (top[:, 0] - (top[:, 2] + top[:, 3]) / 2).clamp(min=torch.finfo(logits.dtype).tiny)


class _Search:
    """The steps of Auto-PGD for one batch, from state to state."""

    def __init__(self, logits: Callable[[Tensor], Tensor], domain: Domain, ball: Ball, targeted: bool):
        self.logits, self.domain, self.ball, self.targeted = logits, domain, ball, targeted

    def begin(self, state: State) -> State:
        """Look at the start."""
        return self._noted(state, self._look(state, state["point"]))

    def part(self, state: State, first: int, last: int) -> State:
        """The steps first + 1 ... last, and the checkpoint behind them."""
        for step in range(first, last):
            old, point = state, self._moved(state, fresh=FRESH if step else 1.0)
            look = self._look(state, point)
            state = self._noted({**state, "previous": state["point"], "point": point}, look)
            state["rises"] = old["rises"] + (look.value > old["value"])
        return _checked(state, last - first)

    def _moved(self, state: State, fresh: float) -> Tensor:
        """A step along the gradient, mixed with the step before."""
        x, reach, point = state["x"], state["reach"], state["point"]
        length = state["step"].reshape(reach.shape)
        ahead = self.ball.project(x, point + length * self.ball.steepest(state["slope"]) - x, reach, self.domain)
        mixed = point + fresh * (ahead - point) + (1 - fresh) * (point - state["previous"])
        return self.ball.project(x, mixed - x, reach, self.domain)

    def _look(self, state: State, point: Tensor) -> _Look:
        y, target = state["y"], state["target"]
        with torch.enable_grad():
            point = point.detach().requires_grad_()
            output = self.logits(point)
            value = targeted_dlr(output, y, target) if self.targeted else F.cross_entropy(output, y, reduction="none")
            (slope,) = torch.autograd.grad(value.sum(), point)
        return _Look(value.detach(), margins(output.detach(), y), slope)

    def _noted(self, state: State, look: _Look) -> State:
        """The state at a new point, with the best and the smallest margin so far; a NaN is neither."""
        shape = state["reach"].shape
        higher, lower = look.value > state["best_value"], look.lead < state["least"]
        least = torch.where(lower, look.lead, state["least"])
        return {
            **state,
            "value": look.value,
            "slope": look.slope,
            "best": torch.where(higher.reshape(shape), state["point"], state["best"]),
            "best_value": torch.where(higher, look.value, state["best_value"]),
            "best_slope": torch.where(higher.reshape(shape), look.slope, state["best_slope"]),
            "found": torch.where(lower.reshape(shape), state["point"], state["found"]),
            "least": least,
            "lost": least < 0,
        }


def _start(x: Tensor, y: Tensor, target: Tensor, reach: Tensor, start: Tensor) -> State:
    none = torch.full_like(reach.flatten(), -float("inf"))
    return {
        "x": x,
        "y": y,
        "target": target,
        "reach": reach,
        "point": start,
        "previous": start,
        "value": none,
        "slope": torch.zeros_like(x),
        "best": start,
        "best_value": none,
        "best_slope": torch.zeros_like(x),
        "best_before": none,
        "step": 2 * reach.flatten(),
        "halved": torch.zeros_like(y, dtype=torch.bool),
        "rises": torch.zeros_like(y),
        "found": x,
        "least": -none,
        "lost": torch.zeros_like(y, dtype=torch.bool),
    }


def _checked(state: State, taken: int) -> State:
    """The state behind a checkpoint: smaller steps from the best point, where the last ones did not get on."""
    stands = ~state["halved"] & ~(state["best_value"] > state["best_before"])
    halved = (state["rises"] < RISING * taken) | stands
    back = halved.reshape(state["reach"].shape)
    best = torch.where(back, state["best"], state["point"])
    return {
        **state,
        "point": best,
        # No momentum behind a jump: its direction was that of a step.
        "previous": torch.where(back, state["best"], state["previous"]),
        "value": torch.where(halved, state["best_value"], state["value"]),
        "slope": torch.where(back, state["best_slope"], state["slope"]),
        "best_before": state["best_value"],
        "step": torch.where(halved, state["step"] / 2, state["step"]),
        "halved": halved,
        "rises": torch.zeros_like(state["rises"]),
    }


@torch.no_grad()
def _ranked(logits: Callable[[Tensor], Tensor], x: Tensor, y: Tensor, batch_size: int) -> Tensor:
    """The classes other than the label, most likely first, (B, C - 1)."""
    parts = []
    for xs, ys in _batches(x, y, batch_size):
        output = logits(xs)
        own = F.one_hot(ys, output.shape[1]).bool()
        # The label goes last whatever the logits are, NaN and infinities too.
        order = torch.nan_to_num(output, nan=0.0).argsort(dim=1, descending=True, stable=True)
        parts.append(order[~own.gather(1, order)].reshape(len(xs), -1))
    return torch.cat(parts) if parts else torch.zeros(0, 0, dtype=torch.long, device=x.device)


@torch.no_grad()
def _leads(logits: Callable[[Tensor], Tensor], x: Tensor, y: Tensor, batch_size: int) -> Tensor:
    return torch.cat([margins(logits(xs), ys) for xs, ys in _batches(x, y, batch_size)])


def _batches(x: Tensor, y: Tensor, batch_size: int) -> Iterator[tuple[Tensor, Tensor]]:
    return zip(x.split(batch_size), y.split(batch_size), strict=True) if len(x) else iter(())
