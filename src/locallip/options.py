"""Options of the command line: what is wrong with one is said in a sentence."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, is_dataclass
from typing import Any, Literal, get_args, get_origin, get_type_hints

import torch

from locallip.certify.inputs import as_eps
from locallip_command import nearest


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
        kind = name.partition(":")[0]
        reason = str(error).splitlines()[0] if kind == "cuda" else "there is no such device"
        raise WrongOption(f"--device {name}: {reason}; choose cpu, cuda or one such as cuda:1, or leave it out") from None
    return device


@dataclass(frozen=True)
class Option:
    """What may stand behind an option: nothing, one of its choices, or anything where there are none."""

    takes_value: bool
    choices: tuple[str, ...] = ()


def options_of(command: Callable[..., Any]) -> dict[str, Option]:
    """The options of a command by name, from the arguments of its function; --help is not among them."""
    found: dict[str, Option] = {}
    hints = get_type_hints(command)
    for argument in inspect.signature(command).parameters.values():
        hint, dashed = hints[argument.name], argument.name.replace("_", "-")
        if is_dataclass(hint):
            found |= options_of(hint)  # type: ignore[arg-type]
        elif hint is bool:
            found[f"--no-{dashed}" if argument.default is True else f"--{dashed}"] = Option(takes_value=False)
        elif argument.kind is not argument.POSITIONAL_ONLY:
            literals = [part for part in (hint, *get_args(hint)) if get_origin(part) is Literal]
            found[f"--{dashed}"] = Option(True, tuple(str(value) for part in literals for value in get_args(part)))
    return found


def check_choices(command: Callable[..., Any], args: Sequence[str]) -> None:
    """Refuse a value that is none of an option's choices, and name the one that was meant."""
    known = options_of(command)
    for place, word in enumerate(args):
        name, equals, value = word.partition("=")
        option = known.get(name.replace("_", "-"))
        if not equals:
            if place + 1 == len(args):
                return  # the parser says what is missing
            value = args[place + 1]
        if option is not None and option.choices and value not in option.choices:
            raise WrongOption(
                f"{name} {value or repr(value)}: choose one of {', '.join(option.choices)}{nearest(value, option.choices)}"
            )
