"""Figures from charts: the data behind one as CSV, and the words around it."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Sequence
from typing import Any

from locallip.report.charts import Line
from locallip.report.page import Figure


def table(head: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """CSV of what a figure shows."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(head)
    writer.writerows(rows)
    return text.getvalue()


def of_lines(name: str, title: str, see: str, svg: str, lines: Iterable[Line], x: str, y: str) -> Figure:
    """A figure of lines, with their points as data."""
    rows = [(line.name, a, b) for line in lines for a, b in zip(line.x, line.y, strict=True)]
    return Figure(name, title, see, svg, table(("line", x, y), rows), f"{title}. {see}")
