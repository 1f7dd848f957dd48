"""The page of a report: what it is made of, and one self-contained HTML file from it."""

import json
import math
from dataclasses import dataclass, field
from importlib import resources
from typing import Any
from urllib.parse import quote

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup


@dataclass(frozen=True)
class Figure:
    """A chart with the sentence that says what to see in it, and its data."""

    id: str  # part of an address and of the file name of its data: letters, digits, - and _
    title: str
    see: str
    svg: str  # markup with a viewBox, trusted: it is made by this package and escapes the names in it
    csv: str
    alt: str


@dataclass(frozen=True)
class Section:
    """Figures about one question."""

    id: str
    title: str
    about: str = ""
    figures: list[Figure] = field(default_factory=list)


@dataclass(frozen=True)
class Card:
    """A run in a few numbers: (label, value, note) each."""

    name: str
    about: str
    figures: list[tuple[str, str, str]] = field(default_factory=list)


@dataclass(frozen=True)
class Page:
    """All that a report shows; explorer holds the networks and images to explore, or None."""

    title: str
    made: str
    cards: list[Card] = field(default_factory=list)
    sections: list[Section] = field(default_factory=list)
    explorer: dict[str, Any] | None = None


def render(page: Page) -> str:
    """Return the page as one HTML file that needs no other file and no network."""
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    template = environment.from_string(_text("report.html.j2"))
    return template.render(
        page=page,
        css=Markup(_text("report.css")),
        js=Markup(_text("explorer.js")),
        data=Markup(embedded(page.explorer)) if page.explorer is not None else None,
        drawing=Markup,
        download=lambda csv: "data:text/csv;charset=utf-8," + quote(csv),
    )


def embedded(data: Any) -> str:
    """Return data as JSON that can stand in a script element: no < > & in it, and null for what is not finite."""
    text = json.dumps(_finite(data), separators=(",", ":"), allow_nan=False)  # ASCII: everything else is escaped
    return text.replace("&", r"\u0026").replace("<", r"\u003c").replace(">", r"\u003e")


def _finite(data: Any) -> Any:
    """Return data with None for numbers that JSON cannot hold; the page shows them as not known, never as proved."""
    if isinstance(data, float):
        return data if math.isfinite(data) else None
    if isinstance(data, dict):
        return {key: _finite(value) for key, value in data.items()}
    if isinstance(data, list | tuple):
        return [_finite(value) for value in data]
    return data


def _text(name: str) -> str:
    return resources.files("locallip.report").joinpath("templates", name).read_text(encoding="utf-8")
