"""Words of a file in messages: short, and without what a terminal would obey."""

from __future__ import annotations

LONGEST = 80


def shown(text: str, longest: int = LONGEST) -> str:
    """The beginning of a text, a question mark for every character that is not to be printed."""
    return "".join(letter if letter.isprintable() else "?" for letter in text[:longest])


def quoted(text: str) -> str:
    return f"'{shown(text)}'"


def node_label(index: int, operator: str, name: str) -> str:
    """How messages call a node: index, operator and name."""
    return f"node {index} ({shown(operator)} {quoted(name)})"


def weight_label(index: int, name: str) -> str:
    return f"weight {index} ({quoted(name)})"
