"""AutoAttack by its authors, through the package pyautoattack (the extra `attack`)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from locallip.attacks.ensemble import Attempt
from locallip.balls import L2, Ball

#: The parts of its standard version, in their order (Croce & Hein 2020).
PARTS = ("apgd-ce", "apgd-t", "fab-t", "square")
#: What it calls a norm.
NAMES = {"2": "L2", "inf": "Linf"}


class MissingAttack(Exception):
    """An attack that cannot be run here; the message says what to install or to choose."""


def autoattack_attempts(
    model: nn.Module, classes: int, *, seed: int, batch_size: int = 500, ball: Ball = L2, parts: tuple[str, ...] = PARTS
) -> list[Attempt]:
    """The attacks of AutoAttack's standard version, each as an attempt of its own; x (B, C, H, W) in [0, 1].

    They never leave [0, 1]. They need one radius for all samples of a call, at least four classes, and float32.
    """
    package = _package()
    if classes < 4:
        raise MissingAttack(f"AutoAttack needs at least 4 classes, here are {classes}: take the attack 'strong'")
    if any(parameter.dtype != torch.float32 for parameter in model.parameters()):
        raise MissingAttack("AutoAttack computes in float32, and this network does not: take the attack 'strong'")

    def attempt(name: str) -> Attempt:
        def search(x: Tensor, y: Tensor, eps: Tensor, /) -> Tensor:
            return _run(package, model, name, classes, x, y, eps, seed, batch_size, ball)

        return Attempt(f"autoattack {name}", search)

    return [attempt(name) for name in parts]


def _package() -> Any:
    try:
        import pyautoattack  # type: ignore[import-not-found,import-untyped,unused-ignore]
    except ImportError as error:
        raise MissingAttack(
            "AutoAttack needs the extra 'attack': pip install 'locallip[attack]', or '.[attack]' in a clone "
            f"({error}). The attack 'strong' needs no extra."
        ) from None
    return pyautoattack


def _run(
    package: Any,
    model: nn.Module,
    name: str,
    classes: int,
    x: Tensor,
    y: Tensor,
    eps: Tensor,
    seed: int,
    batch_size: int,
    ball: Ball,
) -> Tensor:
    """One part of the standard version; its points, x itself where it found none."""
    if len(x) == 0:
        return x.clone()
    radius = float(eps[0])
    if not bool((eps == eps[0]).all()):
        raise ValueError("AutoAttack takes one eps for all samples")
    # It seeds torch's own generators, which are not ours to change.
    with torch.random.fork_rng(devices=[x.device] if x.device.type == "cuda" else []):
        attack = package.AutoAttack(
            model, norm=NAMES[ball.norm], eps=radius, version="standard", device=x.device, seed=seed % 2**32
        )
        attack.attacks_to_run = [name]
        attack.apgd_targeted.n_target_classes = attack.fab.n_target_classes = min(9, classes - 1)
        points, _ = attack.run_standard_evaluation(x.float(), y, batch_size=batch_size)
    return points.to(x.dtype)
