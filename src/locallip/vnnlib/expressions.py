"""The text of a VNN-LIB file as nested lists of words, each with its line. Nothing is evaluated, and nothing recurs."""

from __future__ import annotations

import gzip
import re
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

#: Files are a few megabytes at most; more is a mistake, or a small archive that was made to fill the memory.
MOST_BYTES = 2**28
#: Assertions are nested three or four deep.
MOST_DEPTH = 16
#: What ends a line, and with it a comment, here (\n, \r) or for readers that know more ends than SMT-LIB.
_ENDS = r"\n\r\v\f\x1c-\x1e\x85\u2028\u2029"
_TOKEN = re.compile(rf"[()]|;[^{_ENDS}]*|[^\s();\"|]+|\r?\n|\r|[ \t]+|.", re.DOTALL)


class WrongSpec(ValueError):
    """A VNN-LIB file that is damaged or not understood; the message is for the user and has the line."""


class Word(NamedTuple):
    """A name, a number or an operator."""

    text: str
    line: int

    def __str__(self) -> str:
        return self.text


class Group(NamedTuple):
    """What stands between two parentheses; `line` is that of the first."""

    parts: tuple[Word | Group, ...]
    line: int

    @property
    def head(self) -> str:
        """The operator, empty where none stands there."""
        return self.parts[0].text if self.parts and isinstance(self.parts[0], Word) else ""

    def __str__(self) -> str:
        """The beginning of it, on one line."""
        found, left = list[str](), list[Word | Group | str]([self])
        while left and len(found) < 40:
            part = left.pop()
            if isinstance(part, Group):
                left += [")", *reversed(part.parts)]
                found.append("(")
            else:
                found.append(str(part))
        return " ".join(found).replace("( ", "(").replace(" )", ")")


def content(path: Path) -> str:
    """The text of a file, unpacked where it ends in .gz."""
    try:
        with gzip.open(path, "rb") if path.suffix == ".gz" else open(path, "rb") as file:
            found = file.read(MOST_BYTES + 1)
    except (EOFError, zlib.error, gzip.BadGzipFile):
        raise WrongSpec(f"{path} is no whole gzip file") from None
    except OSError as error:
        raise WrongSpec(f"cannot read {path}: {error.strerror or error}") from None
    if len(found) > MOST_BYTES:
        raise WrongSpec(f"{path} has more than {MOST_BYTES:,} bytes, which no VNN-LIB file needs")
    try:
        return found.decode("utf-8")
    except UnicodeDecodeError:
        raise WrongSpec(f"{path} is not text: it is no VNN-LIB file") from None


def statements(text: str) -> Iterator[Group]:
    """The groups of a text that stand in no other, one after the other."""
    open_ones: list[tuple[list[Word | Group], int]] = []
    for word in _words(text):
        if word.text == "(":
            if len(open_ones) == MOST_DEPTH:
                raise WrongSpec(f"line {word.line}: nested more than {MOST_DEPTH} deep")
            open_ones.append(([], word.line))
        elif not open_ones:
            raise WrongSpec(f"line {word.line}: {quoted(word)} stands outside of all statements")
        elif word.text == ")":
            parts, line = open_ones.pop()
            group = Group(tuple(parts), line)
            if not open_ones:
                yield group
            else:
                open_ones[-1][0].append(group)
        else:
            open_ones[-1][0].append(word)
    if open_ones:
        raise WrongSpec(f"line {open_ones[0][1]}: the statement that begins here has no end")


def _words(text: str) -> Iterator[Word]:
    line = 1
    for match in _TOKEN.finditer(text):
        word = match.group()
        if word in ("\n", "\r", "\r\n"):
            line += 1
        elif word in ('"', "|"):
            raise WrongSpec(f"line {line}: {word} is not understood: names are words such as X_0, without quotes")
        elif word[0] in " \t;":
            continue
        elif word.isspace():
            raise WrongSpec(
                f"line {line}: the character U+{ord(word):04X} is not understood: use spaces, tabs and new lines"
            )
        else:
            yield Word(word, line)


def quoted(what: Word | Group) -> str:
    """What a message shows of a part of the file: short, and without what a terminal would obey."""
    return "'" + "".join(letter if letter.isprintable() else "?" for letter in str(what)[:80]) + "'"
