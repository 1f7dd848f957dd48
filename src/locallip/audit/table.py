"""Reports of audits side by side: what was tried on the certificates of each network, and what broke."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from locallip.balls import L2, said

HEAD = ("Network", "Images", "Certificates", "Radii", "Attempts", "Broken", "Least lead", "Boundary at", "Hardware")


class WrongReport(ValueError):
    """A file that should hold the report of an audit does not."""


def audit_rows(folder: Path) -> list[list[str]]:
    """The cells of HEAD, a line per file *.json of `locallip audit --out` in a folder; none where there is none."""
    return [_line(path) for path in sorted(folder.glob("*.json"))] if folder.is_dir() else []


def _line(path: Path) -> list[str]:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        settings, report = values["settings"], values["report"]
        least, most = settings["radii"]
        return [
            f"`{settings['model']}`",
            f"{settings['images']} of {settings['data']}, {settings['split']}",
            f"{settings['certificates']} ({settings['guarantee'].replace('_', ' ')})",
            f"{least:.2g} to {most:.2g}{said(settings.get('norm', L2.norm))}",
            f"{report['tried']:,}",
            f"{report['broken']:,}",
            _number(report["closest_lead"], 100, " %"),
            _number(report["nearest_boundary"], 1, " radii"),
            str(settings["hardware"]),
        ]
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise WrongReport(f"{path} is no report of `locallip audit`: {error}") from None


def _number(value: Any, factor: float, unit: str) -> str:
    return "—" if value is None else f"{factor * value:.3g}{unit}"
