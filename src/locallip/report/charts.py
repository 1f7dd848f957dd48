"""Charts as SVG text: lines, bars, shares and small multiples. Colours and fonts come from the page's style sheet.

Classes: axis, gridline, tick, label, legend; s0 to s7 colour a series; paper is a dashed reference line; area a light fill.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

#: Narrow enough that a phone shows a chart whole with letters that can be read.
WIDTH, HEIGHT = 460, 290
#: Room around the drawing for ticks and names.
LEFT, RIGHT, TOP, BOTTOM = 58, 14, 14, 46
#: Where a legend begins, and what an entry needs beside its letters.
INDENT, SWATCH = 8.0, 34
LETTER = 6.6  # mean width of a letter in the font of labels
SERIES = 8
#: So many names find room below bars when they are slanted, of so many letters.
SLANTED, LONGEST = 16, 12


@dataclass(frozen=True)
class Line:
    """Points (x, y) in order; those that are not finite leave a gap. `dashed` for the second of two that belong together."""

    name: str
    x: Sequence[float]
    y: Sequence[float]
    series: int = 0
    dashed: bool = False
    dots: bool = False


@dataclass(frozen=True)
class Axis:
    """The way from values to places: low to high is `begin` to `end` in the drawing."""

    low: float
    high: float
    begin: float
    end: float
    log: bool = False

    def __call__(self, value: float) -> float:
        if self.log:
            share = (math.log(max(value, 1e-300)) - math.log(self.low)) / (math.log(self.high) - math.log(self.low))
        else:
            share = (value - self.low) / (self.high - self.low)
        return round(self.begin + min(max(share, -0.05), 1.05) * (self.end - self.begin), 2)

    def ticks(self) -> list[float]:
        if not self.log:
            return _steps(self.low, self.high)
        powers = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
        found = [m * 10.0**p for p in powers for m in (1, 2, 5) if self.low * 0.999 <= m * 10.0**p <= self.high * 1.001]
        return found if len(found) <= 7 else [tick for tick in found if f"{tick:.0e}".startswith("1")]


def line_chart(
    lines: Sequence[Line],
    x_name: str,
    y_name: str,
    *,
    log: bool = False,
    top: float | None = None,
) -> str:
    """Lines over one axis; y begins at 0, or is logarithmic; `top` fixes where it ends."""
    drawn = [line for line in lines if any(math.isfinite(v) for v in line.y)]
    legend = _legend([_entry(line) for line in drawn])
    x, y = _axes([v for line in lines for v in line.x], [v for line in lines for v in line.y], log, top, legend.height)
    return _svg([*_frame(x, y, x_name, y_name), *(_path(line, x, y) for line in drawn), *legend.parts])


def bar_chart(
    groups: Sequence[str],
    series: Sequence[tuple[str, Sequence[float]]],
    y_name: str,
    *,
    top: float | None = None,
    marks: tuple[str, Sequence[Sequence[float]]] | None = None,
) -> str:
    """Bars in groups, one per series; a value that is not finite has none. `marks` has a level to compare each bar with."""
    legend = _legend(
        [(name, k, "") for k, (name, _) in enumerate(series) if len(series) > 1] + ([(marks[0], -1, "")] if marks else [])
    )
    levels = marks[1] if marks else []
    values = [v for row in [*(row for _, row in series), *levels] for v in row]
    x, y = _axes([0.0, float(len(groups))], values, False, top, legend.height)
    parts = _frame(x, y, "", y_name, x_ticks=False)
    width = 0.8 / max(len(series), 1)
    for k, (_, row) in enumerate(series):
        for g, value in enumerate(row):
            if math.isfinite(value):
                left, right = x(g + 0.1 + k * width), x(g + 0.1 + (k + 1) * width)
                parts.append(_bar(left, y(value), right - left - min(1.0, (right - left) / 4), y(y.low), k))
    names, more = _names([(x(g + 0.5), name) for g, name in enumerate(groups)], y.begin, x.end - x.begin)
    parts += names
    for k, row in enumerate(levels):
        for g, value in enumerate(row):
            if math.isfinite(value):
                ends = f'x1="{x(g + 0.1 + (k - 0.1) * width)}" x2="{x(g + 0.1 + (k + 1.1) * width)}"'
                parts.append(f'<line class="paper" {ends} y1="{y(value)}" y2="{y(value)}"/>')
    return _svg(parts + legend.parts, HEIGHT + more)


def _names(groups: Sequence[tuple[float, str]], y: float, wide: float) -> tuple[list[str], float]:
    """Names below groups of bars, level where they fit, else slanted, else some of them; and how much room they lack."""
    letters = len(groups) * max((len(name) for _, name in groups), default=1) * LETTER
    if letters <= wide or len(groups) > SLANTED:
        kept = groups[:: max(1, math.ceil(letters / wide))]
        return [_text(x, y + 18, name, "tick", "middle") for x, name in kept], 0.0
    short = [(x, name if len(name) <= LONGEST else f"{name[: LONGEST - 1]}…") for x, name in groups]
    place = 'class="tick" text-anchor="end" transform="translate({:.1f} {:.1f}) rotate(-32)"'
    parts = [f"<text {place.format(x + 4, y + 14)}>{escape(name)}</text>" for x, name in short]
    return parts, max(0.0, 0.53 * LETTER * max(len(name) for _, name in short) + 20 - BOTTOM)


def histogram_lines(values: Sequence[Sequence[float]], names: Sequence[str], *, bins: int = 24) -> list[Line]:
    """How many values of each set fall between equal steps, in per cent, as one outline per set."""
    found = [v for row in values for v in row if math.isfinite(v)]
    low, high = (min(found), max(found)) if found else (0.0, 1.0)
    low = 0.0 if low < 0.3 * high else low
    width = (high - low) / bins or 1.0
    lines = []
    for k, row in enumerate(values):
        counts = [0] * bins
        for v in row:
            if math.isfinite(v):
                counts[min(bins - 1, int((v - low) / width))] += 1
        share = [100 * count / max(len(row), 1) for count in counts]
        xs = [low + width * (i // 2 + i % 2) for i in range(2 * bins)]
        lines.append(Line(names[k], [low, *xs, high], [0.0, *(share[i // 2] for i in range(2 * bins)), 0.0], k))
    return lines


def shares(rows: Sequence[tuple[str, Sequence[tuple[str, float]]]]) -> str:
    """One bar of 100 per cent per row, cut into named shares; the same name has the same colour in every row."""
    names = list(dict.fromkeys(name for _, parts in rows for name, _ in parts))
    legend = _legend([(name, k, "") for k, name in enumerate(names)])
    y, parts = legend.height + 10, []
    for title, cut in rows:
        words, begin = textwrap.wrap(title, int((WIDTH - 2 * INDENT) / LETTER)), 0.0
        parts += [_text(INDENT, y + 10 + 16 * k, part, "label", "start") for k, part in enumerate(words)]
        y += 16 * len(words)
        for name, value in cut:
            left, wide = INDENT + (WIDTH - 2 * INDENT) * begin / 100, (WIDTH - 2 * INDENT) * value / 100
            parts.append(_bar(left, y, max(wide - 1, 0), y + 18, names.index(name)))
            begin += value
        y += 28
    return _svg(parts + legend.parts, y + 8)


def panels(
    charts: Sequence[tuple[str, Sequence[Line]]],
    x_name: str,
    y_name: str,
    *,
    log: bool = False,
    log_x: bool = False,
) -> str:
    """Small multiples: two charts beside each other, each with its title, one legend for all."""
    first = charts[0][1] if charts else []
    legend = _legend([_entry(line) for line in first])
    wide, high, parts = WIDTH / 2, 190, list(legend.parts)
    for k, (title, lines) in enumerate(charts):
        left, upper = (k % 2) * wide, legend.height + (k // 2) * high
        x, y = _axes(
            [v for line in lines for v in line.x],
            [v for line in lines for v in line.y],
            log,
            None,
            upper + 12,
            left=left,
            wide=wide,
            bottom=upper + high,
            log_x=log_x,
        )
        parts.append(_text((x.begin + x.end) / 2, upper + 14, title, "label", "middle"))
        last = k >= len(charts) - 2
        parts += _frame(x, y, x_name if last else "", y_name if k % 2 == 0 else "")
        parts += [_path(line, x, y) for line in lines]
    return _svg(parts, legend.height + high * math.ceil(len(charts) / 2) + 6)


def _axes(
    xs: Sequence[float],
    ys: Sequence[float],
    log: bool,
    top: float | None,
    upper: float,
    *,
    left: float = 0,
    wide: float = WIDTH,
    bottom: float = HEIGHT,
    log_x: bool = False,
) -> tuple[Axis, Axis]:
    x = [v for v in xs if math.isfinite(v)] or [0.0, 1.0]
    y = [v for v in ys if math.isfinite(v) and (v > 0 or not log)] or [0.1, 1.0]
    x_low, x_high = min(x), max(x) if max(x) > min(x) else min(x) + 1
    if log:
        low, high = min(y) / 1.15, max(y) * 1.15
    else:
        low, high = min(0.0, *y, 0.0), (max(y) if top is None else top) or 1.0
        high += 0.04 * (high - low) if top is None else 0
    return (
        Axis(x_low, x_high, left + LEFT, left + wide - RIGHT, log_x),
        Axis(low, high if high > low else low + 1, bottom - BOTTOM, upper + TOP, log),
    )


def _frame(x: Axis, y: Axis, x_name: str, y_name: str, x_ticks: bool = True) -> list[str]:
    parts = []
    for tick in y.ticks():
        parts.append(f'<line class="gridline" x1="{x.begin}" x2="{x.end}" y1="{y(tick)}" y2="{y(tick)}"/>')
        parts.append(_text(x.begin - 7, y(tick) + 4, number(tick), "tick", "end"))
    parts.append(f'<line class="axis" x1="{x.begin}" x2="{x.end}" y1="{y.begin}" y2="{y.begin}"/>')
    if x_ticks:
        parts += [_text(x(tick), y.begin + 18, number(tick), "tick", "middle") for tick in x.ticks()]
    if x_name:
        parts.append(_text((x.begin + x.end) / 2, y.begin + 37, x_name, "label", "middle"))
    if y_name:
        place = f'transform="translate({x.begin - LEFT + 13:.1f} {(y.begin + y.end) / 2:.1f}) rotate(-90)"'
        parts.append(f'<text class="label" text-anchor="middle" {place}>{escape(y_name)}</text>')
    return parts


def _path(line: Line, x: Axis, y: Axis) -> str:
    words, pen = [], "M"
    for a, b in zip(line.x, line.y, strict=True):
        if not (math.isfinite(a) and math.isfinite(b)) or (y.log and b <= 0):
            pen = "M"
            continue
        words.append(f"{pen}{x(a)} {y(b)}")
        pen = "L"
    dash = ' stroke-dasharray="5 4"' if line.dashed else ""
    drawn = f'<path class="line s{line.series % SERIES}" fill="none"{dash} d="{"".join(words)}"/>'
    if line.dots:
        points = [(a, b) for a, b in zip(line.x, line.y, strict=True) if math.isfinite(a) and math.isfinite(b)]
        drawn += "".join(_dot(x(a), y(b), line.series) for a, b in points)
    return drawn


def _dot(x: float, y: float, series: int) -> str:
    return f'<g class="fill"><circle class="s{series % SERIES}" cx="{x}" cy="{y}" r="3.5"/></g>'


def _bar(left: float, upper: float, width: float, lower: float, series: int) -> str:
    box = f'x="{left:.2f}" y="{min(upper, lower):.2f}" width="{max(width, 0):.2f}" height="{abs(lower - upper):.2f}"'
    return f'<g class="fill"><rect class="s{series % SERIES}" {box}/></g>'


@dataclass(frozen=True)
class _Legend:
    parts: list[str]
    height: float


def _entry(line: Line) -> tuple[str, int, str]:
    """What the legend has to say of a line; one of a single point is a dot."""
    return line.name, line.series, "dot" if len(line.x) == 1 else "dashed" if line.dashed else ""


def _legend(entries: Sequence[tuple[str, int, str]]) -> _Legend:
    """Swatches (name, series, "", "dashed" or "dot"), in further lines where they do not fit; series -1 is a reference."""
    parts: list[str] = []
    left, line = INDENT, 0
    for name, series, how in entries:
        words = textwrap.wrap(name, int((WIDTH - INDENT - SWATCH) / LETTER)) or [""]
        wide = SWATCH + LETTER * max(map(len, words))
        if left + wide > WIDTH and left > INDENT:
            left, line = INDENT, line + 1
        middle = 12 + 18 * line
        parts.append(_swatch(left, middle, series, how))
        parts += [_text(left + 25, middle + 4 + 18 * k, part, "legend", "start") for k, part in enumerate(words)]
        left, line = left + wide, line + len(words) - 1
    return _Legend(parts, 18.0 * (line + 1) + 4 if parts else 0.0)


def _swatch(left: float, middle: float, series: int, how: str) -> str:
    if how == "dot":
        return _dot(left + 10, middle, series)
    kind = "paper" if series < 0 else f"line s{series % SERIES}"
    dash = ' stroke-dasharray="5 4"' if how == "dashed" else ""
    return f'<line class="{kind}"{dash} x1="{left}" x2="{left + 20}" y1="{middle}" y2="{middle}"/>'


def _text(x: float, y: float, words: str, kind: str, anchor: str) -> str:
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(words)}</text>'


def _svg(parts: Sequence[str], height: float = HEIGHT) -> str:
    kind = "chart tall" if height > 1.5 * HEIGHT else "chart"
    return f'<svg class="{kind}" viewBox="0 0 {WIDTH} {height:.0f}">{"".join(parts)}</svg>'


def _steps(low: float, high: float, wanted: int = 5) -> list[float]:
    """Round numbers between low and high, about `wanted` of them."""
    rough = (high - low) / wanted
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(m * power for m in (1, 2, 5, 10) if m * power >= rough * 0.999)
    first = math.ceil(low / step - 1e-9)
    return [k * step for k in range(first, math.floor(high / step + 1e-9) + 1)]


def number(value: float) -> str:
    """Short, without a tail of zeros."""
    if value == 0:
        return "0"
    if abs(value) >= 10_000 or abs(value) < 0.001:
        return f"{value:.0e}".replace("e+0", "e").replace("e-0", "e-").replace("e+", "e")
    return f"{value:.4g}"
