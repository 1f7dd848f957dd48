"""What the bound does to single images over a grid of radii: the values behind the explorer of a report."""

from __future__ import annotations

import base64
import copy
import math
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from decimal import ROUND_CEILING, ROUND_FLOOR, Context, Decimal
from typing import Any

import torch
from torch import Tensor, nn

from locallip.bounds import Trace
from locallip.certify import Verdict, certified_radius
from locallip.certify.inputs import as_eps
from locallip.certify.prover import LocalLayers, Prover, fingerprint
from locallip.data import ImageSet, pixels
from locallip.norms import Guarantee
from locallip.proofs.rows import Row
from locallip.proofs.settings import structure_of
from locallip.report.nearest import nearest
from locallip.report.steps import steps_to_converge

#: The slider's radii, in units of eps: even steps, so that places on the slider are distances.
GRID = tuple(k / 5 for k in range(16))
#: The attack begins to search at so many eps.
TOP = 6.0
#: Slopes are tried at so many radii of the grid beyond the last one that is proved without.
TRIED = 2
#: Images whose norms are followed until they converge.
FOLLOWED = 12
#: Images bounded together.
TOGETHER = 4
#: Added to a given seed where something is proved: training draws saved vectors with its own seed and some beyond it, and
#: the starts of a proof must not be those that the weights were trained with.
PROOF_SEED = 6_000_011


@dataclass(frozen=True)
class Explorer:
    """Bounds of chosen images of a data set at every radius of the grid; `local` are the layers with norms per image.

    `radii` looks for the largest radius of images that no certificate gives one; without, it is the largest of the grid.
    Without a `seed`, proofs draw one, which the values note: weights could be made for one that is known beforehand.
    """

    model: nn.Module
    images: ImageSet
    eps: str
    guarantee: str = "high_probability"
    local: LocalLayers = "dense"
    seed: int | None = None
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    say: Callable[[str], None] = field(default=lambda line: None)
    radii: bool = False

    def run(self, places: Sequence[int], rows: Mapping[int, Row]) -> dict[str, Any]:
        """The values for these images; verdicts and radii are those of `rows`, by index, where an image has one.

        Rows must be about these images, at the same eps: verdicts are shown as verdicts at that.
        """
        if any(row.eps != float(as_eps(self.eps, 1, self.device)) for row in rows.values()):
            raise ValueError(f"rows at another eps than {self.eps} say nothing about it")
        model = self.model.to(self.device)
        # A radius of the grid is at most bounded twice, the second time with slopes.
        probes = 2 * len(GRID)
        seed = secrets.randbits(62) if self.seed is None else self.seed + PROOF_SEED
        prover = Prover(model, self.images.shape, self.guarantee, probes=probes, seed=seed, device=self.device)
        grid = as_eps(self.eps, 1, self.device) * torch.tensor(GRID, dtype=torch.float64, device=self.device)
        found: list[dict[str, Any]] = []
        shown: Trace | None = None
        for begin in range(0, len(places), TOGETHER):
            part = list(places[begin : begin + TOGETHER])
            with prover.held(model, "Explorer"):
                trace, lead = self._bounds(prover, part, grid)
            shown = shown or trace
            # Other random numbers than those of the grid: each proof has its own.
            found += self._images(part, grid, trace, lead, rows, (seed + 1) % 2**63)
            self.say(f"explored {len(found)} of {len(places)} images")
        network = {
            "name": "",
            "classes": list(self.images.classes),
            "shape": list(self.images.shape),
            "eps": float(grid[GRID.index(1.0)]),
            "eps_text": self.eps,
            "guarantee": Guarantee.parse(self.guarantee).value,
            "proof_seed": str(seed),  # as text: JavaScript has no whole numbers of that size
            "grid": [_down(float(r), 9) for r in grid],
            "layers": _layers(prover, shown) if shown is not None else [],
            "global_lipschitz": [_up(float(v)) for v in prover.ceiling.lipschitz[1:]],
            "images": found,
        }
        steps = self._steps(prover, list(places[:FOLLOWED]))
        known = {"fingerprint": fingerprint(self.model), "structure": structure_of(self.model)}
        return {**known, "network": network, "steps": steps}

    def _pixels(self, places: Sequence[int]) -> tuple[Tensor, Tensor]:
        index = torch.tensor(list(places))
        x = pixels(self.images.images[index], self.device).double()
        return x, self.images.labels[index].to(self.device)

    def _bounds(self, prover: Prover, places: Sequence[int], grid: Tensor) -> tuple[Trace, Tensor]:
        """The trace of every image at every radius, images first, and the proved leads (B, E)."""
        x, y = (part.repeat_interleave(len(grid), 0) for part in self._pixels(places))
        eps = grid.repeat(len(places))
        trace = prover.trace(x, eps, local=self.local)
        lead = prover.lead_of(trace, y, slopes=False).reshape(len(places), -1)
        proved = (lead > 0).sum(1, keepdim=True)
        order = torch.arange(len(grid), device=lead.device)
        open_ones = (order >= proved) & (order < proved + TRIED) & (lead[:, :1] > 0)
        where = open_ones.flatten().nonzero()[:, 0]
        if len(where):
            lead.view(-1)[where] = prover.margin(x[where], y[where], eps[where], local=self.local).worst
        return trace, lead

    def _images(
        self, places: Sequence[int], grid: Tensor, trace: Trace, lead: Tensor, rows: Mapping[int, Row], seed: int
    ) -> list[dict[str, Any]]:
        x, y = self._pixels(places)
        size, count = len(grid), len(places)
        assert trace.logits_box is not None
        lower, upper = (end.reshape(count, size, -1) for end in trace.logits_box)
        logits = trace.logits.reshape(count, size, -1)[:, 0]
        slopes = [region.lipschitz.expand(count * size).reshape(count, size) for region in trace.regions[1:]]
        slopes.append(trace.lipschitz.reshape(count, size))
        kept = [(varying.outputs > 0).reshape(count, size, *varying.outputs.shape[1:]) for varying in trace.varying]
        exact = copy.deepcopy(self.model).double()
        far = self._radii(x, y, [rows.get(int(place)) for place in places], seed)
        attack = nearest(exact, x, y, TOP * float(grid[GRID.index(1.0)]), self.seed or 0)
        found = []
        for k, place in enumerate(places):
            right = bool(logits[k].argmax() == y[k])
            image = {
                "index": int(place),
                "label": int(y[k]),
                "prediction": int(logits[k].argmax()),
                "pixels": _bytes(self.images.images[place]),
                "logits": [round(float(v), 4) for v in logits[k]],
                "lower": [[_down(float(v)) for v in row] for row in lower[k]],
                "upper": [[_up(float(v)) for v in row] for row in upper[k]],
                "margin": [_down(float(v)) for v in lead[k]],
                "lipschitz": [[_up(float(s[k, e])) for s in slopes] for e in range(size)],
                "varying": [[int(units[k, e].sum()) for units in kept] for e in range(size)],
                "maps": _bytes(torch.cat([_map(units[k]).flatten() for units in kept])) if kept else "",
            }
            image |= _adversary(exact, x[k], attack.point[k], float(attack.distance[k]), right)
            found.append(image | _verdict(image, grid, rows.get(int(place)), far[k]))
        return found

    def _radii(self, x: Tensor, y: Tensor, rows: Sequence[Row | None], seed: int) -> list[float | None]:
        """Certified radii of the images whose row has none, where they are wanted; None for the others."""
        wanted = [k for k, row in enumerate(rows) if self.radii and (row is None or row.radius is None)]
        found: list[float | None] = [None] * len(rows)
        if wanted:
            again = certified_radius(self.model, x[wanted], y[wanted], guarantee=self.guarantee, seed=seed)
            for k, radius in zip(wanted, again, strict=True):
                found[k] = float(radius)
        return found

    def _steps(self, prover: Prover, places: Sequence[int]) -> dict[str, Any]:
        x, _ = self._pixels(places)
        eps = as_eps(self.eps, len(x), self.device).double()
        self.say("following norms until they converge")
        return steps_to_converge(prover.network, prover.trace(x, eps, local="none"), self.seed or 0)


def chosen(count: int, images: int, rows: Sequence[Row]) -> list[int]:
    """Which images to explore: the first ones; where there are certificates, half of them, then verdicts by turns."""
    if not rows:
        return list(range(min(count, images)))
    first = [row.index for row in rows[: (count + 1) // 2] if row.index < images]
    rest = [row for row in rows if row.index < images and row.index not in set(first)]
    by_verdict = [[row.index for row in rest if row.verdict == verdict] for verdict in Verdict]
    turns = [place for turn in range(max(map(len, by_verdict))) for group in by_verdict for place in group[turn : turn + 1]]
    return sorted([*first, *turns[: count - len(first)]])


def _layers(prover: Prover, trace: Trace) -> list[dict[str, Any]]:
    layers = []
    for index, varying in enumerate(trace.varying):
        units = varying.outputs[0]
        name = prover.network.stages[index].name
        kind = "convolution" if units.dim() > 1 else "dense"
        layers.append({"title": f"{index + 1}: {kind} ({name})", "units": units.numel(), "map": list(_size(units.shape))})
    return layers


def _size(shape: Sequence[int]) -> tuple[int, int]:
    """Height and width of the map of a layer's units; a plain vector becomes a rectangle."""
    if len(shape) == 1:
        height = max(d for d in range(1, math.isqrt(shape[0]) + 1) if shape[0] % d == 0)
        return height, shape[0] // height
    return (1, shape[1]) if len(shape) == 2 else (shape[1], math.prod(shape[2:]))


def _map(units: Tensor) -> Tensor:
    """Share of the channels that vary at each place, (E, h, w) in 0 to 255, for units (E, *shape) bool."""
    height, width = _size(units.shape[1:])
    share = units.float() if units.dim() == 2 else units.float().mean(1)
    return (255 * share).round().reshape(len(units), height, width).to(torch.uint8)


def _adversary(exact: nn.Module, x: Tensor, point: Tensor, distance: float, right: bool) -> dict[str, Any]:
    """What the attack found of one image; nothing is attacked that is wrong anyway."""
    if not right or not math.isfinite(distance):
        return {"attacked": None, "adversary": None}
    with torch.no_grad():
        lost_to = int(exact(point[None])[0].argmax())
    difference = point - x
    scale = float(difference.abs().max()) or 1.0
    code = (127 * difference / scale).round().to(torch.int8).view(torch.uint8)
    away = _up(distance, 6)
    return {"attacked": away, "adversary": {"class": lost_to, "distance": away, "difference": _bytes(code), "scale": scale}}


def _verdict(image: Mapping[str, Any], grid: Tensor, row: Row | None, far: float | None) -> dict[str, Any]:
    """Verdict and radius of a certificate where there is one, else of this search; `tried`: at radii of the grid only."""
    proved = [float(r) for r, margin in zip(grid, image["margin"], strict=True) if margin > 0]
    right = image["prediction"] == image["label"]
    radius = _down(max([*proved, far or 0.0]), 9) if right and (proved or far) else None
    tried = far is None and radius is not None
    if row is not None:
        found = _broken_by(row, image, float(grid[GRID.index(1.0)]))
        known = row.radius if row.radius is not None else radius
        about = {"verdict": row.verdict, "decided_by": row.decided_by, "attacked": found}
        return about | {"radius": known, "tried": tried and row.radius is None}
    eps, attacked = float(grid[GRID.index(1.0)]), image["attacked"]
    if not right:
        verdict = Verdict.MISCLASSIFIED
    elif max([*proved, far or 0.0]) >= eps:  # the numbers that were proved, not those that are shown
        verdict = Verdict.CERTIFIED
    else:
        verdict = Verdict.ATTACKED if attacked is not None and attacked <= eps else Verdict.UNKNOWN
    return {"verdict": str(verdict), "decided_by": "exploration", "radius": radius, "tried": tried}


def _broken_by(row: Row, image: Mapping[str, Any], eps: float) -> float | None:
    """The smallest distance at which an attack is known to succeed: this search's, or eps where the row's attack did."""
    here: float | None = image["attacked"]
    if row.verdict != Verdict.ATTACKED:
        return here
    return _up(eps, 6) if here is None else min(here, _up(eps, 6))


def _bytes(values: Tensor) -> str:
    return base64.b64encode(values.cpu().contiguous().numpy().tobytes()).decode()


def _down(value: float, digits: int = 4) -> float:
    """So many digits behind the point, never above the number itself as it is written: 0.57 * 1000 is not quite 570."""
    return _cut(value, digits, ROUND_FLOOR)


def _up(value: float, digits: int = 4) -> float:
    return _cut(value, digits, ROUND_CEILING)


def _cut(value: float, digits: int, rounding: str) -> float:
    if not math.isfinite(value) or abs(value) > 2**53:
        return value
    return float(Decimal(repr(value)).quantize(Decimal(1).scaleb(-digits), rounding, Context(prec=60)))
