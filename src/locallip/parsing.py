"""From words to the call of a command: tyro reads them and prints the help, and what is wrong is said in a line."""

from __future__ import annotations

import functools
import inspect
import io
import re
from collections.abc import Callable, Sequence
from contextlib import redirect_stderr
from itertools import dropwhile, takewhile
from typing import Annotated, Any, TypeVar, get_origin, get_type_hints

import tyro

from locallip.options import WrongOption, check_words

T = TypeVar("T")
#: What draws the frames around what tyro says, in terminals that know such characters and in others, and its colours.
_FRAME = re.compile("[\u2500-\u257f]+|-{5,}|\x1b\\[[0-9;]*m")


def parsed(
    command: Callable[..., T], words: Sequence[str], prog: str, *, pairs: bool = False, **defaults: Any
) -> Callable[[], T]:
    """The command with its arguments, to be called; WrongOption where the words cannot be read.

    `defaults` replace those of the command's own; with `pairs` every switch has its opposite, as in --no-json.
    """
    check_words(command, words, prog, pairs=pairs)
    markers = [tyro.conf.PositionalMetavarFromFieldName, tyro.conf.DisallowNone, tyro.conf.OmitArgPrefixes]
    markers += [] if pairs else [tyro.conf.FlagCreatePairsOff]
    said = io.StringIO()
    try:
        with redirect_stderr(said):
            return tyro.cli(_described(command, defaults), args=list(words), prog=prog, config=tuple(markers))
    except SystemExit as left:
        if left.code in (None, 0):  # after the help
            raise
    raise WrongOption(f"{_told(said.getvalue()) or 'these words make no call'}; see `{prog} --help`")


def _told(said: str) -> str:
    """The sentences in what tyro says about an error, without its frame and title."""
    lines = (_FRAME.sub("", line).strip() for line in said.splitlines()[1:])
    first = takewhile(bool, dropwhile(lambda line: not line, lines))  # what follows is about the help
    return re.sub(r"^Error parsing \w+: ", "", " ".join(first)).rstrip(".")


def _described(command: Callable[..., T], defaults: dict[str, Any]) -> Callable[..., Callable[[], T]]:
    """What tyro shall look at: the command's arguments and help, with nothing said of defaults that say nothing."""

    def bound(*args: Any, **options: Any) -> Callable[[], T]:
        return functools.partial(command, *args, **options)

    hints, signature = get_type_hints(command, include_extras=True), inspect.signature(command)
    arguments = [p.replace(default=defaults.get(p.name, p.default)) for p in signature.parameters.values()]
    bound.__name__, bound.__signature__ = command.__name__, signature.replace(parameters=arguments)  # type: ignore[attr-defined]
    # tyro keeps the line breaks of an argument that goes over several lines.
    bound.__doc__ = re.sub(r"\n {8,}", " ", inspect.getdoc(command) or "")
    bound.__annotations__ = {p.name: Annotated[hints[p.name], _shown(p, hints[p.name])] for p in arguments}
    return bound


def _shown(argument: inspect.Parameter, hint: Any) -> Any:
    """How the help shows an argument: some words of the same kind as NAME ..., and a default where it says something."""
    if argument.kind is argument.POSITIONAL_ONLY and get_origin(hint) is tuple:
        return tyro.conf.arg(metavar=f"{argument.name.upper()} ...", help_behavior_hint="(required)")
    silent = argument.default is None or argument.default == () or argument.default is False
    return tyro.conf.arg(help_behavior_hint=lambda label: "" if silent else f"(default: {label})")
