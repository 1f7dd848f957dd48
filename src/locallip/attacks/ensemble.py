"""Several attacks, one after the other: each sees the samples that those before it could not break."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from locallip.attacks.apgd import apgd_l2, apgd_targets
from locallip.attacks.lead import margins
from locallip.attacks.pgd import pgd_attack
from locallip.balls import L2, Ball, Domain

Logits = Callable[[Tensor], Tensor]
#: From x (B, *shape), points (B, *shape), y (B,) and eps (B,) to those that count as broken, (B,) bool.
IsBroken = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


class Search(Protocol):
    """From x (B, *shape), y (B,) and eps (B,) to one point each, (B, *shape)."""

    def __call__(self, x: Tensor, y: Tensor, eps: Tensor, /) -> Tensor: ...


class Attempt(NamedTuple):
    """An attack and the name under which it reports."""

    name: str
    search: Search


Attempts = Sequence[Attempt]


class Outcome(NamedTuple):
    """points (B, *shape), x itself where nothing was found; by (B,): position of the attack that broke it, -1 for none."""

    points: Tensor
    by: Tensor

    @property
    def broken(self) -> Tensor:
        """(B,) bool."""
        return self.by >= 0


def attack_in_turn(
    attempts: Attempts,
    x: Tensor,
    y: Tensor,
    eps: Tensor,
    broken: IsBroken,
    told: Callable[[str, int, int], None] = lambda name, tried, fell: None,
) -> Outcome:
    """Every attack on the samples that the ones before it left standing, until none is left.

    `broken` decides what counts. `told` hears behind each attack its name, how many samples it tried and how many fell.
    """
    points, by = x.clone(), torch.full_like(y, -1)
    for number, (name, search) in enumerate(attempts):
        alive = (by < 0).nonzero()[:, 0]
        if not len(alive):
            break
        at = x[alive], y[alive], eps[alive]
        found = search(*at)
        fell = broken(at[0], found, at[1], at[2])
        points[alive[fell]], by[alive[fell]] = found[fell], number
        told(name, len(alive), int(fell.sum()))
    return Outcome(points, by)


def strong_attempts(
    logits: Logits,
    *,
    kinds: Sequence[str] = ("pgd", "apgd-ce", "apgd-t"),
    steps: int = 100,
    restarts: int = 1,
    targets: int = 9,
    input_domain: Domain = None,
    ball: Ball = L2,
    generator: torch.Generator | None = None,
    batch_size: int = 500,
    progress: Callable[[str, int, int], None] | None = None,
) -> list[Attempt]:
    """PGD with steps of eps / 4 as in the paper, APGD-CE, and APGD-T towards `targets` classes; `restarts` of each.

    `progress` hears which attack is under way, how many points it has looked at, and how many these may become.
    """
    settings: dict[str, Any] = {
        "steps": steps,
        "input_domain": input_domain,
        "ball": ball,
        "generator": generator,
        "batch_size": batch_size,
    }
    known: dict[str, Callable[..., Tensor]] = {
        "pgd": pgd_attack,
        "apgd-ce": apgd_l2,
        "apgd-t": partial(apgd_targets, targets=targets),
    }

    def attempt(kind: str) -> Attempt:
        heard = None if progress is None else partial(progress, kind)
        return Attempt(kind, partial(known[kind], logits, progress=heard, **settings))

    return [attempt(kind) for kind in kinds for _ in range(restarts)]


def strong_attack(
    logits: Logits,
    x: Tensor,
    y: Tensor,
    eps: Tensor,
    *,
    steps: int = 100,
    restarts: int = 1,
    targets: int = 9,
    input_domain: Domain = None,
    ball: Ball = L2,
    generator: torch.Generator | None = None,
    batch_size: int = 500,
) -> Outcome:
    """PGD, then APGD-CE, then APGD-T, each on what is left; x (B, *shape), y (B,), eps (B,).

    Broken is who has a class ahead of the label in the dtype of x: where rounding matters, look again in a finer one.
    """
    attempts = strong_attempts(
        logits,
        steps=steps,
        restarts=restarts,
        targets=targets,
        input_domain=input_domain,
        ball=ball,
        generator=generator,
        batch_size=batch_size,
    )
    return attack_in_turn(attempts, x, y, eps, default_broken(logits, batch_size))


def default_broken(logits: Logits, batch_size: int = 500) -> IsBroken:
    """Some class is ahead of the label; a tie or a NaN is no success."""

    @torch.no_grad()
    def broken(x: Tensor, points: Tensor, y: Tensor, eps: Tensor) -> Tensor:
        parts = zip(points.split(batch_size), y.split(batch_size), strict=True)
        return torch.cat([margins(logits(part), labels) < 0 for part, labels in parts])

    return broken
