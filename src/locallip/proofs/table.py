"""Certificates of whole test sets side by side: what each guarantee and method certifies of a network, and in what time."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from locallip.norms import Guarantee
from locallip.proofs.rows import WrongRows
from locallip.proofs.settings import Settings, read_about

#: Columns: guarantee, method and what they are called.
COLUMNS: tuple[tuple[Guarantee, str, str], ...] = (
    (Guarantee.ESTIMATE, "local", "Estimate, paper's bound"),
    (Guarantee.HIGH_PROBABILITY, "local", "High probability, paper's bound"),
    (Guarantee.DETERMINISTIC, "local", "Deterministic, paper's bound"),
    (Guarantee.HIGH_PROBABILITY, "auto", "High probability, auto"),
    (Guarantee.DETERMINISTIC, "auto", "Deterministic, auto"),
)
HEAD = ("Network", "eps", "Images", "Correct", *(title for *_, title in COLUMNS), "Hardware")
EMPTY = "—"
#: That of an image unless another is asked for, which is then said.
FAILURE_PROB = 1e-9


@dataclass(frozen=True)
class About:
    """What stands beside the rows of one run."""

    settings: Settings
    summary: Mapping[str, Any]
    run: Mapping[str, Any]


def read_certificates(folder: Path) -> list[About]:
    """The files *.json of `locallip certify` in a folder, those of runs that ended; none where there is no folder."""
    found = [_read(path) for path in sorted(folder.glob("*.json"))] if folder.is_dir() else []
    return [about for about in found if about is not None]


def _read(path: Path) -> About | None:
    settings, summary = read_about(path.with_suffix(".jsonl"))
    run = json.loads(path.read_text(encoding="utf-8")).get("run")
    if summary is None or run is None:
        return None
    if not isinstance(run, dict) or not all(isinstance(run.get(key), (int, float)) for key in ("seconds", "others_gb")):
        raise WrongRows(f"{path}: how long it took is not what it should be")
    if not all(isinstance(summary.get(key), (int, float)) for key in ("images", "correct", "certified")):
        raise WrongRows(f"{path}: its summary is not what it should be")
    return About(settings, summary, run)


def certificate_rows(found: Sequence[About]) -> list[list[str]]:
    """The cells of HEAD, a line per network, images and hardware; seconds are those from the first norm to the last row."""
    groups: dict[tuple[str, ...], list[About]] = {}
    for about in found:
        s = about.settings
        groups.setdefault((s.model, s.fingerprint, s.data_sha256, s.eps, s.norm, s.hardware), []).append(about)
    return [_line(group) for _, group in sorted(groups.items())]


def _line(group: Sequence[About]) -> list[str]:
    first = group[0]
    cells = [_cell(group, guarantee.value, method) for guarantee, method, _ in COLUMNS]
    images = f"{first.summary['images']} of {first.settings.data}, {first.settings.split}"
    return [
        f"`{first.settings.model}`",
        first.settings.shown_eps,
        images,
        f"{first.summary['correct']:.2f}",
        *cells,
        first.settings.hardware,
    ]


def _cell(group: Sequence[About], guarantee: str, method: str) -> str:
    """The last of the runs of one kind: certified share and seconds."""
    of_kind = [a for a in group if (a.settings.guarantee, a.settings.method) == (guarantee, method)]
    if not of_kind:
        return EMPTY
    about = max(of_kind, key=lambda a: str(a.settings.environment.get("date", "")))
    shared = ", shared" if about.run["others_gb"] > 2 else ""
    risk = about.settings.failure_prob
    other = "" if risk in (0, FAILURE_PROB) else f", failure probability {risk:g} an image"
    return f"{about.summary['certified']:.2f} ({about.run['seconds']:.0f} s{shared}{other})"
