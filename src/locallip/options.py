"""Options of the command line: what is wrong with one is said in a sentence."""

from __future__ import annotations

import inspect
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, is_dataclass, replace
from pathlib import Path
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
    """What may stand behind an option, or for a word without one: nothing, one of its choices, a number, or anything.

    With `paths`, a path may stand there as well as a choice. `many` words may stand there, at least one
    of them where it is `required`; `about` begins what the help says of it.
    """

    takes_value: bool
    choices: tuple[str, ...] = ()
    number: type[int] | type[float] | None = None
    many: bool = False
    required: bool = False
    about: str = ""
    paths: bool = False


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
            found[f"--{dashed}"] = _option(hint)
    return found


def places_of(command: Callable[..., Any]) -> dict[str, Option]:
    """What stands behind a command without a name, by the word that the help has for it."""
    hints = get_type_hints(command)
    places = [p for p in inspect.signature(command).parameters.values() if p.kind is p.POSITIONAL_ONLY]
    text = inspect.getdoc(command) or ""
    found = {}
    for place in places:
        # An entry goes on over lines that are indented further than it begins.
        about = re.search(rf"^( *){place.name}: (.*(?:\n\1 +.*)*)", text, re.MULTILINE)
        first = re.split(r"[;(]|\. |\.$", " ".join(about.group(2).split()))[0].strip() if about else ""
        option = _option(hints[place.name], place.default is place.empty)
        found[place.name.upper()] = replace(option, about=first)
    return found


def _option(hint: Any, required: bool = False) -> Option:
    parts = (hint, *get_args(hint))
    literals = [str(value) for part in parts if get_origin(part) is Literal for value in get_args(part)]
    number = int if int in parts else float if float in parts else None
    return Option(bool not in parts, tuple(literals), number, get_origin(hint) is tuple, required, paths=Path in parts)


def check_words(command: Callable[..., Any], words: Sequence[str], prog: str, *, pairs: bool = False) -> None:
    """Refuse words that the command does not know or cannot read, in a sentence that says what may have been meant.

    With `pairs`, what can be switched on can be switched off by --no- before it, and the other way round.
    """
    try:
        _check_words(command, words, pairs)
    except WrongOption as error:
        raise WrongOption(f"{error}; see `{prog} --help`") from None


def _check_words(command: Callable[..., Any], words: Sequence[str], pairs: bool) -> None:
    known, places, behind = options_of(command), places_of(command), list[str]()
    if pairs:
        known |= {_turned(name): option for name, option in known.items() if not option.takes_value}
    left = list(reversed(words))
    while left:
        word = left.pop()
        if word in ("-h", "--help"):
            return  # the help is all that will be printed
        name, equals, value = word.partition("=")
        if not name.startswith("-") or name == "-":
            behind.append(word)
            continue
        option = known.get(name.replace("_", "-"))
        if option is None:
            raise WrongOption(f"there is no option {name}{nearest(name, list(known))}")
        if not option.takes_value:
            check(not equals, f"{name} takes no value, got {value!r}")
            continue
        values = [value] if equals else _values(option, left)
        check(len(values) > 0, f"{name} wants a value behind it")
        for value in values:
            _check_value(name, option, value)
    _check_places(places, behind)


def _turned(name: str) -> str:
    return f"--{name.removeprefix('--no-')}" if name.startswith("--no-") else f"--no-{name.removeprefix('--')}"


def _values(option: Option, left: list[str]) -> list[str]:
    """The words behind an option that are its own, taken off those that are left."""
    values = list[str]()
    while left and not left[-1].startswith("--") and (option.many or not values):
        values.append(left.pop())
    return values


def _check_value(name: str, option: Option, value: str) -> None:
    if option.choices and value not in option.choices and not (option.paths and _is_path(value)):
        choices = ", ".join(option.choices) + (" or name a path" if option.paths else "")
        raise WrongOption(f"{name} {value or repr(value)}: choose one of {choices}{nearest(value, option.choices)}")
    if option.number is not None:
        kind = "a whole number" if option.number is int else "a number"
        try:
            option.number(value)
        except ValueError:
            raise WrongOption(f"{name} wants {kind}, got {value!r}") from None


def _is_path(value: str) -> bool:
    """Something that is there, or has a dot or a slash in it; any other word is more likely a mistyped choice."""
    return os.path.exists(value) or "." in value or os.sep in value


def _check_places(places: Mapping[str, Option], behind: list[str]) -> None:
    for name, option in places.items():
        values, behind = (behind, []) if option.many else (behind[:1], behind[1:])
        what = f": {option.about[:1].lower()}{option.about[1:]}" if option.about else ""
        check(bool(values) or not option.required, f"{name} is missing{what}")
        for value in values:
            _check_value(name, option, value)
    check(not behind, f"there is no place for {' '.join(behind)!r}")
