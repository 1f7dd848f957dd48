"""Figures of certificates: accuracies beside the paper's, accuracy over eps, classes, the cascade's shares, radii."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from locallip.balls import L2, as_ball, said
from locallip.certify import Verdict
from locallip.data.cifar10 import CLASSES as CIFAR10
from locallip.norms import Guarantee
from locallip.report.charts import Line, bar_chart, histogram_lines, line_chart, shares
from locallip.report.figure import of_lines, table
from locallip.report.page import Figure, Section
from locallip.report.runs import Certified, Run

#: Radii at which accuracy over eps is drawn.
RADII = 81


def certificates(runs: Sequence[Run]) -> Section | None:
    """Everything about what is proved; None where nothing is known of it."""
    figures = [
        _accuracies(runs),
        _over_eps(runs),
        _cascade(runs),
        _radii(runs),
        *(_classes(run, k) for k, run in enumerate(runs)),
    ]
    found = [figure for figure in figures if figure is not None]
    about = (
        "An attack gives an upper bound of the accuracy that holds against every perturbation, a certificate a lower one."
    )
    return Section("certificates", "Certificates", about, found) if found else None


def _accuracies(runs: Sequence[Run]) -> Figure | None:
    """Clean, attacked, estimated and certified, with the paper's row for each run that stands for one."""
    kinds = (("clean", "clean"), ("pgd", "PGD"), ("estimate", "estimate"), ("certified", "certified"))
    shown = [run for run in runs if run.evaluation]
    if not shown:
        return None
    series = [(run.name, [_figure(run, key) for key, _ in kinds]) for run in shown]
    printed = [_printed(run) for run in shown]
    known = any(math.isfinite(value) for row in printed for value in row)
    marks = ("paper's row (what it calls certified is an estimate)", printed) if known else None
    first = shown[0].evaluation
    see = f"The evaluation behind training: {first.get('images', '')} test images, PGD with {first.get('pgd_steps')} steps. "
    see += "From left to right each can only be lower; the estimate takes norms from below and proves nothing."
    gaps = [_figure(run, "estimate") - _figure(run, "certified") for run in shown]
    if all(math.isfinite(gap) for gap in gaps):
        see += f" Between estimate and proof lie {' and '.join(f'{gap:.2f}' for gap in gaps)} points."
    data = [(name, word, value) for name, values in series for (_, word), value in zip(kinds, values, strict=True)]
    for run, row in zip(shown, printed, strict=True):
        data += [(f"{run.name}, paper", word, value) for (_, word), value in zip(kinds, row, strict=True) if value == value]
    csv = table(("run", "accuracy", "per cent"), data)
    svg = bar_chart([word for _, word in kinds], series, "test images, %", top=100, marks=marks)
    title = "Estimate against proof" + (", and the paper" if marks else "")
    return Figure("accuracies", title, see, svg, csv, f"{title}. {see}")


def _over_eps(runs: Sequence[Run]) -> Figure | None:
    """Certified accuracy over eps where radii are known, with the attack above it."""
    lines: list[Line] = []
    for k, run in enumerate(runs):
        found = run.proofs
        if found is not None:
            lines += _proved_lines(run, found, k)
        lines += _explored_lines(run, k)
    if not any(len(line.x) > 1 for line in lines):
        return None
    see = "Between what is certified and what attacks leave lies what nobody knows; the closer they are, the more is known."
    if any(run.explored and run.proofs for run in runs):
        see += " Explored images are chosen by verdict, so each counts for its share of all images with that verdict."
    trained_on = any(run.proofs is not None and run.proofs.settings.split == "train" for run in runs)
    svg = line_chart(lines, f"eps ({_balls(runs)})", "images, %" if trained_on else "test images, %", top=100)
    return of_lines("over-eps", "Accuracy over eps, proved and attacked", see, svg, lines, "eps", "per cent")


def _named(run: Run) -> str:
    """The name of a run, and the ball that its certificates are about where that is not the l2 ball."""
    norm = L2.norm if run.proofs is None else run.proofs.settings.norm
    return f"{run.name}{said(norm)}"


def _balls(runs: Sequence[Run]) -> str:
    """What the radii of a figure count in; what is explored is always in l2."""
    norms = {run.proofs.settings.norm for run in runs if run.proofs is not None}
    norms |= {L2.norm for run in runs if run.explored or not norms}
    return " or ".join(as_ball(norm).words for norm in sorted(norms))


def _proved_lines(run: Run, found: Certified, k: int) -> list[Line]:
    count, eps, lines = len(found.rows), found.settings.radius, []
    name = _named(run)
    radii = sorted(row.radius or 0.0 for row in found.rows if row.radius is not None)
    if len(radii) == count:
        grid = [1.05 * radii[-1] * n / (RADII - 1) for n in range(RADII)]
        share = [100 * (count - bisect_left(radii, max(r, 1e-300))) / count for r in grid]
        lines.append(Line(f"{name}: certified ({count} images)", grid, share, 2 * k))
    verdicts = Counter(row.verdict for row in found.rows)
    proved, right = verdicts[Verdict.CERTIFIED], count - verdicts[Verdict.MISCLASSIFIED]
    if len(radii) != count:
        lines.append(Line(f"{name}: certified at eps", [eps], [100 * proved / count], 2 * k, dots=True))
    stands = 100 * (right - verdicts[Verdict.ATTACKED]) / count
    if found.settings.attack_steps:
        lines.append(Line(f"{name}: attacked at eps", [eps], [stands], 2 * k + 1, dots=True))
    return lines


def _explored_lines(run: Run, k: int) -> list[Line]:
    """The share of images that an attack leaves, and that is proved, at every radius, from those that were explored.

    They were chosen by verdict, so each stands for its share of the images with that verdict.
    """
    network = run.explored.get("network") or {}
    images = network.get("images") or []
    if not images:
        return []
    top = max([*network["grid"], *(image["attacked"] or 0.0 for image in images)])
    grid = [top * n / (RADII - 1) for n in range(RADII)]
    weights = _weights(run, network["eps"], images)
    right = [(image, weight) for image, weight in zip(images, weights, strict=True) if image["prediction"] == image["label"]]
    stands = [100 * sum(weight for image, weight in right if (image["attacked"] or math.inf) > r) for r in grid]
    lines = [Line(f"{run.name}: attacked, from {len(images)} images", grid, stands, 2 * k + 1)]
    if run.proofs is None or not run.proofs.settings.radii or run.proofs.settings.norm != L2.norm:
        proved = [100 * sum(weight for image, weight in right if (image["radius"] or -1.0) >= r) for r in grid]
        word = "estimated (no proof)" if network.get("guarantee") == Guarantee.ESTIMATE.value else "certified"
        lines.append(Line(f"{run.name}: {word}, from {len(images)} images", grid, proved, 2 * k))
    return lines


def _weights(run: Run, eps: float, images: Sequence[Mapping[str, Any]]) -> list[float]:
    """What share of all images each explored one stands for; equal ones where no certificates say how many there are."""
    verdicts = [image["verdict"] for image in images]
    explored = Counter(verdicts)
    by_rows = all(image["decided_by"] != "exploration" for image in images)
    found = run.proofs
    fitting = found is not None and by_rows and found.settings.radius == eps and found.settings.norm == L2.norm
    rows = found.rows if found is not None and fitting else ()
    known = Counter(row.verdict for row in rows)
    if not rows or any(verdict not in known for verdict in explored):
        return [1 / len(verdicts)] * len(verdicts)
    seen = sum(known[verdict] for verdict in explored)
    return [known[verdict] / seen / explored[verdict] for verdict in verdicts]


def _cascade(runs: Sequence[Run]) -> Figure | None:
    rows, data = [], []
    for run in runs:
        found = run.proofs
        if found is None:
            continue
        counts = Counter(row.decided_by for row in found.rows)
        parts = [(name, 100 * count / len(found.rows)) for name, count in counts.most_common()]
        rows.append((f"{run.name}: {len(found.rows)} images at eps {found.settings.shown_eps}", parts))
        data += [(run.name, name, value) for name, value in parts]
    if not rows:
        return None
    see = "Cheap checks come first, and each sees only what is undecided; what nothing decided remains open."
    title = "Which check decided"
    return Figure("cascade", title, see, shares(rows), table(("run", "check", "per cent"), data), f"{title}. {see}")


def _radii(runs: Sequence[Run]) -> Figure | None:
    with_radii = [
        (_named(run), [row.radius for row in run.proofs.rows]) for run in runs if run.proofs and run.proofs.settings.radii
    ]
    known = [(name, [r for r in radii if r is not None]) for name, radii in with_radii]
    if not known:
        return None
    lines = histogram_lines([radii for _, radii in known], [name for name, _ in known])
    see = (
        "Images at 0 are those that are wrong or that nothing is proved of; the rest shows how far proofs reach beyond eps."
    )
    svg = line_chart(lines, f"certified radius ({_balls(runs)})", "images, %")
    return of_lines("certified-radii", "Certified radii", see, svg, lines, "radius", "per cent")


def _classes(run: Run, k: int) -> Figure | None:
    found = run.proofs
    if found is None:
        return None
    names = _names(run, found)
    clean, proved = ([0] * len(names) for _ in range(2))
    totals = Counter(row.label for row in found.rows)
    for row in found.rows:
        clean[row.label] += row.verdict != Verdict.MISCLASSIFIED
        proved[row.label] += row.verdict == Verdict.CERTIFIED
    if len(names) > 30:
        return None
    share = [[100 * n / totals[c] if totals[c] else math.nan for c, n in enumerate(row)] for row in (clean, proved)]
    weakest = min((c for c in range(len(names)) if totals[c]), key=lambda c: share[1][c])
    see = f"Robustness is not shared out evenly: least is proved of the class {names[weakest]}."
    data = [(name, a, b) for name, a, b in zip(names, *share, strict=True)]
    svg = bar_chart(names, [("right", share[0]), ("certified", share[1])], "images of the class, %", top=100)
    title = f"By class: {run.name}"
    return Figure(f"classes-{k}", title, see, svg, table(("class", "right", "certified"), data), f"{title}. {see}")


def _names(run: Run, found: Certified) -> list[str]:
    """The names of the classes where they are known, else their numbers."""
    names = (run.explored.get("network") or {}).get("classes") or (CIFAR10 if found.settings.data == "cifar10" else ())
    count = max([row.label for row in found.rows], default=0) + 1
    return list(names) if len(names) >= count else [str(n) for n in range(count)]


def _printed(run: Run) -> list[float]:
    """The paper's accuracies of a run: clean, PGD, and what it calls certified, which is an estimate; none is a proof."""
    row = run.paper
    return [math.nan] * 4 if row is None else [row.clean, row.pgd, row.certified, math.nan]


def _figure(run: Run, key: str) -> float:
    value = run.evaluation.get(key)
    return float(value) if isinstance(value, (int, float)) else math.nan
