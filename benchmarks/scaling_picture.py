"""The picture of docs/scale.md: what a step and a certificate cost along each axis, as benchmarks/scaling.py measured it.

python benchmarks/scaling_picture.py        docs/images/scaling-*.svg from results/scaling-*.json
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from locallip.report.charts import Line, panels

ROOT = Path(__file__).resolve().parent.parent
#: The panels: a title, and the name of what is shown in rows of the results. A CPU does not say what certificates take.
SHOWN = (
    ("Time of a step", "step_seconds"),
    ("Memory of a step", "step_bytes"),
    ("Time of a certificate", "certificate_seconds"),
    ("Memory of a certificate", "certificate_bytes"),
)
#: Colours that can be seen on any background: of the axes, of words and of rules. A page has its own for charts.
COLOURS, WORDS, RULES = ("#2f7fc1", "#d0642b", "#37976f", "#b5568f", "#a5830f"), "#808080", "#80808040"


def picture(measured: Mapping[str, Any]) -> str:
    """An SVG file: every cost beside that of the middle case, along every axis beside its middle value, both logarithmic."""
    shown = [(title, name) for title, name in SHOWN if all(row.get(name) for row in measured["rows"])]
    axes = list(enumerate(measured["exponents"]))
    charts = [(title, [_line(measured, axis, k, name) for k, axis in axes]) for title, name in shown]
    drawn = panels(charts, "times the middle value", "times its cost", log=True, log_x=True)
    alone = drawn.replace("<svg ", '<svg xmlns="http://www.w3.org/2000/svg" ')
    return alone.replace(">", f"><style>{_style()}</style>", 1) + "\n"


def _style() -> str:
    series = (f".line.s{k}{{stroke:{colour}}}.fill .s{k}{{fill:{colour}}}" for k, colour in enumerate(COLOURS))
    words = f"svg{{font:12px system-ui,sans-serif}}text{{fill:{WORDS}}}"
    return f"{words}.axis{{stroke:{WORDS}}}.gridline{{stroke:{RULES}}}.line{{stroke-width:1.9}}{''.join(series)}"


def _line(measured: Mapping[str, Any], axis: str, series: int, name: str) -> Line:
    """What is measured along one axis, the others being at their middle values."""
    middle = measured["middle"]
    rows = [row for row in measured["rows"] if all(row[other] == middle[other] for other in middle if other != axis)]
    rows.sort(key=lambda row: row[axis])
    base = next(row[name] for row in rows if row[axis] == middle[axis])
    return Line(axis, [row[axis] / middle[axis] for row in rows], [row[name] / base for row in rows], series, dots=True)


def pictures(results: Path) -> dict[str, str]:
    """The pictures of all machines that were measured, by the names of their files."""
    found = {f"scaling-{kind}.svg": results / f"scaling-{kind}.json" for kind in ("cuda", "cpu")}
    return {name: picture(json.loads(path.read_text(encoding="utf-8"))) for name, path in found.items() if path.exists()}


def main() -> None:
    for name, text in pictures(ROOT / "results").items():
        (ROOT / "docs" / "images" / name).write_text(text, encoding="utf-8")
        print(f"docs/images/{name}")


if __name__ == "__main__":
    main()
