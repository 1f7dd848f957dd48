"""Reading a pickle of plain values and numpy arrays as data: it is never executed.

Python's own reader calls whatever functions a pickle names. This one interprets the opcodes that build numbers, strings,
lists, tuples and dictionaries; the functions with which numpy rebuilds an array are kept as names beside their arguments,
and turned into an array only by `as_array`, which calls none of them. Any other name or opcode is refused.
"""

from __future__ import annotations

import math
import pickletools
from dataclasses import dataclass
from typing import Any

import numpy as np

RECONSTRUCT, NDARRAY, DTYPE = "numpy.core.multiarray _reconstruct", "numpy ndarray", "numpy dtype"

VALUES = {
    "BININT",
    "BININT1",
    "BININT2",
    "INT",
    "LONG",
    "LONG1",
    "SHORT_BINSTRING",
    "BINSTRING",
    "STRING",
    "BINUNICODE",
    "UNICODE",
}
CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
EMPTY = {"EMPTY_LIST": list, "EMPTY_DICT": dict, "EMPTY_TUPLE": tuple}
SHORT_TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}


class NotPlain(ValueError):
    """The bytes are no pickle, or one that names or does more than plain data needs."""


@dataclass(frozen=True)
class _Name:
    """One of numpy's names, as a word: nothing is imported."""

    text: str


@dataclass
class _Record:
    """What a pickle would build by a call: the name, the arguments, and the state set afterwards."""

    name: str
    arguments: tuple[Any, ...]
    state: Any = None


_MARK = object()


def read_plain(content: bytes) -> Any:
    """The value in a pickle of plain data; numpy arrays inside it are for `as_array`."""
    stack: list[Any] = []
    memo: dict[int, Any] = {}
    try:
        for opcode, argument, _ in pickletools.genops(content):
            if opcode.name == "STOP":
                (value,) = stack
                return value
            _step(opcode.name, argument, stack, memo)
    except NotPlain:
        raise
    except (ValueError, IndexError, KeyError, TypeError) as error:
        raise NotPlain(f"it is not a whole pickle ({error})") from error
    raise NotPlain("it ends before its end mark")


def _step(name: str, argument: Any, stack: list[Any], memo: dict[int, Any]) -> None:
    """Carry out one opcode on the stack."""
    if name in VALUES:
        stack.append(argument)
    elif name in CONSTANTS:
        stack.append(CONSTANTS[name])
    elif name in EMPTY:
        stack.append(EMPTY[name]())
    elif name == "MARK":
        stack.append(_MARK)
    elif name in ("BINPUT", "LONG_BINPUT", "PUT"):
        memo[argument] = stack[-1]
    elif name in ("BINGET", "LONG_BINGET", "GET"):
        stack.append(memo[argument])
    elif name in SHORT_TUPLES:
        stack.append(tuple(_pop(stack, SHORT_TUPLES[name])))
    elif name in ("TUPLE", "LIST"):
        stack.append((tuple if name == "TUPLE" else list)(_pop_to_mark(stack)))
    elif name == "DICT":
        stack.append(_pairs(_pop_to_mark(stack)))
    elif name in ("APPEND", "APPENDS"):
        items = _pop(stack, 1) if name == "APPEND" else _pop_to_mark(stack)
        _top(stack, list).extend(items)
    elif name in ("SETITEM", "SETITEMS"):
        items = _pop(stack, 2) if name == "SETITEM" else _pop_to_mark(stack)
        _top(stack, dict).update(_pairs(items))
    elif name == "GLOBAL":
        if argument not in (RECONSTRUCT, NDARRAY, DTYPE):
            raise NotPlain(
                f"it names {argument.replace(' ', '.')!r}, which plain data does not need; nothing of it was executed"
            )
        stack.append(_Name(argument))
    elif name == "REDUCE":
        called, arguments = _pop(stack, 2)
        if not isinstance(called, _Name) or not isinstance(arguments, tuple):
            raise NotPlain("it calls something that is no function of numpy; nothing of it was executed")
        stack.append(_Record(called.text, arguments))
    elif name == "BUILD":
        (state,) = _pop(stack, 1)
        _top(stack, _Record).state = state
    elif name != "PROTO":
        raise NotPlain(f"it uses the opcode {name}, which plain data does not need; nothing of it was executed")


def _pop(stack: list[Any], count: int) -> list[Any]:
    """The last `count` values of the stack, which must all be values of the innermost unfinished collection."""
    if len(stack) < count or any(value is _MARK for value in stack[-count:]):
        raise NotPlain("it takes a value that is not there")
    values = stack[-count:]
    del stack[-count:]
    return values


def _pop_to_mark(stack: list[Any]) -> list[Any]:
    """The values since the last mark, which goes with them."""
    values = []
    while (value := stack.pop()) is not _MARK:
        values.append(value)
    return values[::-1]


def _top(stack: list[Any], kind: type) -> Any:
    """The value at the end of the stack, which must be of this kind."""
    if type(stack[-1]) is not kind:
        raise NotPlain(f"it fills a {type(stack[-1]).__name__} as if it were a {kind.__name__.lstrip('_')}")
    return stack[-1]


def _pairs(items: list[Any]) -> dict[str, Any]:
    """Keys and values in turn, as a dictionary; keys are words."""
    keys, values = items[::2], items[1::2]
    if len(keys) != len(values) or not all(isinstance(key, str) for key in keys):
        raise NotPlain("it holds a dictionary whose keys are not words")
    return dict(zip(keys, values, strict=True))


def as_array(value: Any) -> np.ndarray:
    """The array of bytes (uint8) that a pickle describes; its own memory, not writable."""
    match value:
        case _Record(name=name, state=(int(), tuple(shape), _Record() as kind, order, str(raw))) if name == RECONSTRUCT:
            pass
        case _:
            raise NotPlain("it holds no array where one is expected")
    if kind.name != DTYPE or kind.arguments[:1] not in (("u1",), ("|u1",)):
        raise NotPlain("it holds an array of something else than bytes")
    if not all(type(n) is int and n >= 0 for n in shape) or math.prod(shape) != len(raw):
        raise NotPlain(f"it holds an array of {len(raw):,} bytes with a shape that does not fit")
    try:
        content = raw.encode("latin-1")
    except UnicodeEncodeError:
        raise NotPlain("it holds an array whose content is text") from None
    return np.frombuffer(content, np.uint8).reshape(shape, order="F" if order else "C")
