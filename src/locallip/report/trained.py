"""Figures of a training: bounds, losses and varying units over the epochs, as in the paper's figures, and per layer."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from locallip.report.charts import Line, bar_chart, line_chart, panels
from locallip.report.figure import of_lines, table
from locallip.report.page import Figure, Section
from locallip.report.runs import Run

#: Points of a line at most: more than pixels help nobody.
POINTS = 250


def training(runs: Sequence[Run]) -> Section | None:
    """All of the runs with metrics; None where there are none."""
    told = [run for run in runs if len(run.metrics) > 1]
    if not told:
        return None
    figures = [_bounds(told), _losses(told), *(_layers(run, k) for k, run in enumerate(told))]
    figures += [*(_varying(run, k) for k, run in enumerate(told)), _varying_at_end(told)]
    about = (
        "Means over the training images of an epoch. In training norms come from power iteration, so these are estimates."
    )
    return Section("training", "Training", about, [figure for figure in figures if figure is not None])


def _bounds(runs: Sequence[Run]) -> Figure | None:
    lines = []
    for k, run in enumerate(runs):
        for key, word in (("global_bound", "global"), ("local_bound", "local")):
            lines.append(
                _line(run, key, _name(run, word, runs), k if len(runs) > 1 else int(word == "local"), word == "global")
            )
    lines = [line for line in lines if line.x]
    if not lines:
        return None
    see = (
        "The further the local bound falls below the global one, the more rows and columns the ball around an image removes."
    )
    ratios = [_last(run, "global_bound") / _last(run, "local_bound") for run in runs if _last(run, "local_bound")]
    if ratios:
        see += f" At the end it is {' and '.join(f'{ratio:.2g}' for ratio in ratios)} times smaller."
    svg = line_chart(lines, "epoch", "Lipschitz bound, logarithmic", log=True)
    return of_lines("lipschitz", "Lipschitz bound over training", see, svg, lines, "epoch", "bound")


def _losses(runs: Sequence[Run]) -> Figure | None:
    lines = []
    for k, run in enumerate(runs):
        for key, word in (("clean_loss", "clean"), ("worst_loss", "worst logits")):
            lines.append(
                _line(run, key, _name(run, word, runs), k if len(runs) > 1 else int(word == "clean"), word != "clean")
            )
    lines = [line for line in lines if line.x]
    if not lines:
        return None
    see = "The loss on worst logits is what robustness costs on top; where eps grows it rises, and then both fall together."
    svg = line_chart(lines, "epoch", "cross entropy")
    return of_lines("loss", "Loss on clean and on worst logits", see, svg, lines, "epoch", "loss")


def _layers(run: Run, k: int) -> Figure | None:
    """Global and mean local norm of every layer over training (the paper's lips_all)."""
    rows = [row for row in _thinned(run.metrics) if row.get("local_norms") and row.get("global_norms")]
    if not rows:
        return None
    epochs, charts = [float(row["epoch"]) for row in rows], []
    for layer in range(len(rows[-1]["local_norms"])):
        values = {key: [_number(_at(row[key], layer)) for row in rows] for key in ("global_norms", "local_norms")}
        lines = [Line("global", epochs, values["global_norms"], 0, True), Line("local", epochs, values["local_norms"], 1)]
        charts.append((f"layer {layer + 1}", lines))
    shrink = [_at(rows[-1]["local_norms"], n) / _at(rows[-1]["global_norms"], n) for n in range(len(charts))]
    best = min(range(len(shrink)), key=lambda n: shrink[n])
    see = (
        f"The gap is not the same everywhere: at the end layer {best + 1} gains most, by a factor of {1 / shrink[best]:.2g}."
    )
    flat = [Line(f"{title} {line.name}", line.x, line.y) for title, lines in charts for line in lines]
    svg = panels(charts, "epoch", "norm")
    return of_lines(f"layers-{k}", f"Norm of each layer: {run.name}", see, svg, flat, "epoch", "norm")


def _varying(run: Run, k: int) -> Figure | None:
    """The share of units that can change, per layer over training (the paper's act_all)."""
    rows = [row for row in _thinned(run.metrics) if row.get("varying")]
    if not rows:
        return None
    epochs = [float(row["epoch"]) for row in rows]
    lines = [
        Line(f"layer {n + 1}", epochs, [100 * _number(_at(row["varying"], n)) for row in rows], n)
        for n in range(len(rows[-1]["varying"]))
    ]
    see = "Every unit that cannot change inside the ball takes a row and a column out of the matrices; lower means tighter."
    svg = line_chart(lines, "epoch", "units that vary, %", top=100)
    return of_lines(f"varying-{k}", f"Units that vary: {run.name}", see, svg, lines, "epoch", "per cent")


def _varying_at_end(runs: Sequence[Run]) -> Figure | None:
    ends = [(run, [100 * _number(v) for v in run.metrics[-1].get("varying") or []]) for run in runs]
    ends = [(run, values) for run, values in ends if values]
    if not ends:
        return None
    count = max(len(values) for _, values in ends)
    groups = [f"layer {n + 1}" for n in range(count)]
    series = [(run.name, values + [math.nan] * (count - len(values))) for run, values in ends]
    see = "The last layers before the logits remove most where training made the bound local."
    rows = [(name, group, value) for name, values in series for group, value in zip(groups, values, strict=True)]
    data = table(("run", "layer", "per cent"), rows)
    svg = bar_chart(groups, series, "units that vary, %", top=100)
    return Figure("varying-end", "Units that vary at the end", see, svg, data, f"Units that vary at the end. {see}")


def _line(run: Run, key: str, name: str, series: int, dashed: bool) -> Line:
    rows = [row for row in _thinned(run.metrics) if row.get(key) is not None]
    return Line(name, [float(row["epoch"]) for row in rows], [_number(row[key]) for row in rows], series, dashed)


def _name(run: Run, word: str, runs: Sequence[Run]) -> str:
    return word if len(runs) == 1 else f"{run.name}: {word}"


def _last(run: Run, key: str) -> float:
    return _number(run.metrics[-1].get(key))


def _thinned(rows: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Every n-th row and the last one."""
    step = max(1, -(-len(rows) // POINTS))
    return [
        row
        for n, row in enumerate(rows)
        if isinstance(row.get("epoch"), (int, float)) and (n % step == 0 or n == len(rows) - 1)
    ]


def _at(values: Any, place: int) -> Any:
    return values[place] if isinstance(values, list) and place < len(values) else None


def _number(value: Any) -> float:
    return float(value) if isinstance(value, (int, float)) else math.nan
