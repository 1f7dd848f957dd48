"""Figures of how soon norms converge, per layer (the paper's poweriter and poweriters_all)."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import mean

from locallip.report.charts import Line, bar_chart, histogram_lines, panels
from locallip.report.figure import of_lines, table
from locallip.report.page import Figure, Section
from locallip.report.runs import Run


def convergence(runs: Sequence[Run]) -> Section | None:
    """A figure per run that was explored; None where none was."""
    figures = [figure for k, run in enumerate(runs) for figure in (_steps(run, k), _spread(run, k))]
    found = [figure for figure in figures if figure is not None]
    about = (
        "The paper stops power iteration when its vector moves by at most 0.001 in a step. Lanczos counts as converged when "
        "its norm stays within 0.1 % of the last value."
    )
    return Section("convergence", "Steps until a norm has converged", about, found) if found else None


def _steps(run: Run, k: int) -> Figure | None:
    steps = run.explored.get("steps") or {}
    power, lanczos = steps.get("power") or [], steps.get("lanczos") or []
    if not power or not power[0]:
        return None
    groups = [f"layer {n + 1}" for n in range(len(power))]
    series = [("power iteration", [mean(row) for row in power]), ("Lanczos", [mean(row) for row in lanczos])]
    late = sum(value >= steps["power_cap"] for row in power for value in row)
    see = f"Lanczos needs a small part of the steps. Means over {len(power[0])} images"
    see += (
        f"; {late} of {sum(map(len, power))} norms had not converged after {steps['power_cap']} power steps."
        if late
        else "."
    )
    data = [
        (group, "power" if row is power[n] else "lanczos", image, value)
        for n, group in enumerate(groups)
        for row in (power[n], lanczos[n])
        for image, value in enumerate(row)
    ]
    title = f"Steps per layer: {run.name}"
    csv = table(("layer", "method", "image", "steps"), data)
    return Figure(f"steps-{k}", title, see, bar_chart(groups, series, "steps"), csv, f"{title}. {see}")


def _spread(run: Run, k: int) -> Figure | None:
    """A histogram of the steps for each layer."""
    steps = run.explored.get("steps") or {}
    power, lanczos = steps.get("power") or [], steps.get("lanczos") or []
    if not power or not power[0]:
        return None
    names = ("power iteration", "Lanczos")
    layers = [(f"layer {n + 1}", histogram_lines([power[n], lanczos[n]], names, bins=15)) for n in range(len(power))]
    see = "Layers differ, by the gaps in their spectra; the last bar of power iteration also holds what was cut off there."
    flat = [Line(f"{title} {line.name}", line.x, line.y) for title, lines in layers for line in lines]
    title = f"Steps of the images, by layer: {run.name}"
    return of_lines(f"spread-{k}", title, see, panels(layers, "steps", "images, %"), flat, "steps", "per cent")
