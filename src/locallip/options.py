"""Options of the command line: what is wrong with one is said in a sentence."""

from __future__ import annotations

import torch

from locallip.certify.inputs import as_eps


class WrongOption(ValueError):
    """An option whose value makes no sense; the message is for the user."""


def radius_of(eps: str) -> float:
    """The number behind --eps, never rounded down."""
    try:
        radius = float(as_eps(eps, 1, torch.device("cpu")))
    except ValueError as error:
        raise WrongOption(f"--eps: {error}") from None
    check(radius > 0, f"--eps must be a positive number, got {eps}")
    return radius


def check(holds: bool, message: str) -> None:
    if not holds:
        raise WrongOption(message)


def device_of(name: str | None) -> torch.device | None:
    """The device of that name, if it can be used; None for None."""
    if name is None:
        return None
    try:
        device = torch.device(name)
        check(device.type in ("cpu", "cuda"), f"--device {name}: only cpu and cuda are supported")
        check(device.type == "cuda" or not device.index, f"--device {name}: there is one cpu, called cpu")
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        raise WrongOption(f"--device {name}: {str(error).splitlines()[0]}") from None
    return device
