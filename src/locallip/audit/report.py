"""What an audit has tried and what came of it."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import Tensor

from locallip.audit.judge import Judgement
from locallip.audit.paths import Found


class Break(NamedTuple):
    """A certificate that does not hold: the point within `radius` of x has another class than y."""

    kind: str
    image: int
    label: int
    radius: float
    x: Tensor
    point: Tensor

    def __str__(self) -> str:
        return f"image {self.image} (class {self.label}, certified radius {self.radius:.17g}) by {self.kind}"


@dataclass
class Tally:
    """Attempts of one kind. `closest` is the smallest lead that was left to a label, as a share of that at its image;
    `boundary` the smallest distance at which a class was seen to change, in certified radii."""

    tried: int = 0
    broken: int = 0
    within_rounding: int = 0
    closest: float = math.inf
    boundary: float = math.inf
    certificates: int = 0
    seconds: float = 0.0
    refused: list[str] = field(default_factory=list)
    breaks: list[Break] = field(default_factory=list)

    def add(self, kind: str, found: Found, judged: Judgement) -> None:
        self.tried += int(judged.counts.sum())
        self.broken += int(judged.broken.sum())
        self.within_rounding += int(judged.doubtful.sum())
        finite = judged.lead[judged.counts & judged.lead.isfinite()]
        if len(finite):
            self.closest = min(self.closest, float(finite.min()))
        if found.distance is not None and len(found.distance):
            self.boundary = min(self.boundary, float(found.distance.min()))
        for i in judged.broken.nonzero()[:1, 0].tolist():
            claims = found.claims
            numbers = (int(claims.index[i]), int(claims.y[i]), float(claims.radius[i]))
            self.breaks.append(Break(kind, *numbers, claims.x[i].cpu(), found.points[i].cpu()))

    def join(self, other: Tally) -> None:
        """Add the attempts of another search on certificates that are counted elsewhere."""
        self.tried, self.broken = self.tried + other.tried, self.broken + other.broken
        self.within_rounding += other.within_rounding
        self.closest, self.breaks = min(self.closest, other.closest), self.breaks + other.breaks

    def as_dict(self) -> dict[str, Any]:
        return {
            "tried": self.tried,
            "broken": self.broken,
            "within_rounding": self.within_rounding,
            "closest_lead": _finite(self.closest),
            "nearest_boundary": _finite(self.boundary),
            "certificates": self.certificates,
            "refused": self.refused,
            "seconds": round(self.seconds, 3),
        }


@dataclass
class Report:
    """The tallies by kind."""

    kinds: dict[str, Tally] = field(default_factory=dict)

    @property
    def tried(self) -> int:
        return sum(tally.tried for tally in self.kinds.values())

    @property
    def broken(self) -> int:
        return sum(tally.broken for tally in self.kinds.values())

    @property
    def within_rounding(self) -> int:
        return sum(tally.within_rounding for tally in self.kinds.values())

    @property
    def breaks(self) -> list[Break]:
        return [found for tally in self.kinds.values() for found in tally.breaks]

    def as_dict(self) -> dict[str, Any]:
        return {
            "tried": self.tried,
            "broken": self.broken,
            "within_rounding": self.within_rounding,
            "closest_lead": _finite(min((tally.closest for tally in self.kinds.values()), default=math.inf)),
            "nearest_boundary": _finite(min((tally.boundary for tally in self.kinds.values()), default=math.inf)),
            "kinds": {name: tally.as_dict() for name, tally in self.kinds.items()},
        }

    def describe(self) -> str:
        """For people: a line per kind."""
        lines = [f"{'kind':16} {'tried':>9} {'broken':>7} {'in rounding':>12} {'least lead':>11} {'boundary at':>12}"]
        for name, tally in self.kinds.items():
            lead, away = _share(tally.closest), _radii(tally.boundary)
            counts = f"{tally.tried:9,} {tally.broken:7,} {tally.within_rounding:12,}"
            lines.append(f"{name:16} {counts} {lead:>11} {away:>12}")
            if tally.refused:
                lines.append(f"{'':16} refused to certify: {', '.join(tally.refused)}")
        lines.append(f"{'all':16} {self.tried:9,} {self.broken:7,} {self.within_rounding:12,}")
        return "\n".join(lines)


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _share(value: float) -> str:
    return f"{100 * value:.3g} %" if math.isfinite(value) else "-"


def _radii(value: float) -> str:
    return f"{value:.3g} radii" if math.isfinite(value) else "-"
