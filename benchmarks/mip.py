"""The exact certified radius of a small dense ReLU network in l-infinity, as a mixed-integer linear program.

One 0/1 variable for every unit that can be on or off within the ball, and the least t for which a point at distance t has
another class (Tjeng, Xiao and Tedrake 2019). Units are bounded over the ball by intervals. HiGHS solves it; by how much its
answer may be off (its tolerances are 1e-6) is not counted.
"""

from __future__ import annotations

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import lil_matrix
from torch import Tensor, nn

try:
    from benchmarks.enumeration import Nearest, weights_of
except ImportError:  # from within the folder
    from enumeration import Nearest, weights_of


def exact_radius_inf(model: nn.Sequential, x: Tensor, label: int, eps: float, seconds: float = 60.0) -> Nearest:
    """How near to one x, in l-infinity, a class other than `label` comes up to it, eps where none is nearer.

    Raises TimeoutError where a class is not decided within so many seconds.
    """
    weights, nearest = weights_of(model), Nearest(eps, None)
    center = x.detach().double().cpu().numpy().reshape(-1)
    for rival in range(len(weights[-1][1])):
        found = None if rival == label else _nearest(weights, center, label, rival, nearest.radius, seconds)
        if found is not None and found[0] < nearest.radius:
            nearest = Nearest(float(found[0]), found[1 : 1 + len(center)])
    return nearest


class _Program:
    """Variables by blocks, and rows of constraints low <= A v <= high."""

    def __init__(self) -> None:
        self.lower: list[float] = []
        self.upper: list[float] = []
        self.whole: list[int] = []
        self.rows: list[tuple[dict[int, float], float, float]] = []

    def block(self, lower: np.ndarray, upper: np.ndarray, whole: bool = False) -> list[int]:
        """New variables between two ends; their numbers."""
        first = len(self.lower)
        self.lower += lower.tolist()
        self.upper += upper.tolist()
        self.whole += [int(whole)] * len(lower)
        return list(range(first, len(self.lower)))

    def row(self, terms: dict[int, float], low: float = -np.inf, high: float = np.inf) -> None:
        self.rows.append((terms, low, high))

    def least(self, variable: int, seconds: float) -> np.ndarray | None:
        """All variables where one has its least value; None where no point fulfils all rows."""
        count = len(self.lower)
        matrix, cost = lil_matrix((len(self.rows), count)), np.zeros(count)
        for number, (terms, _, _) in enumerate(self.rows):
            for place, value in terms.items():
                matrix[number, place] = value
        cost[variable] = 1.0
        rows = LinearConstraint(matrix.tocsr(), [low for _, low, _ in self.rows], [high for _, _, high in self.rows])
        options = {"time_limit": seconds, "mip_rel_gap": 1e-6}
        found = milp(cost, constraints=rows, bounds=Bounds(self.lower, self.upper), integrality=self.whole, options=options)
        if found.status == 2:
            return None
        if found.status != 0:
            raise TimeoutError(f"not decided within {seconds:g} s: {found.message}")
        return np.asarray(found.x)


def _nearest(
    weights: list[tuple[np.ndarray, np.ndarray]], x: np.ndarray, label: int, rival: int, eps: float, seconds: float
) -> np.ndarray | None:
    """The least t <= eps for which `rival` comes up to `label` within t of x, and that point; None where it does not."""
    program = _Program()
    low, high = x - eps, x + eps
    (reach,), inputs = program.block(np.zeros(1), np.full(1, eps)), program.block(low, high)
    for place, value in zip(inputs, x, strict=True):
        program.row({place: 1.0, reach: -1.0}, high=float(value))
        program.row({place: 1.0, reach: 1.0}, low=float(value))
    for weight, bias in weights[:-1]:
        middle, half = weight @ (low + high) / 2 + bias, np.abs(weight) @ (high - low) / 2
        before_low, before_high = middle - half, middle + half
        low, high = before_low.clip(min=0), before_high.clip(min=0)
        outputs = program.block(low, high)
        on = program.block((before_low >= 0).astype(float), (before_high > 0).astype(float), whole=True)
        for unit, (row, constant) in enumerate(zip(weight, bias, strict=True)):
            _relu(
                program,
                dict(zip(inputs, -row, strict=True)),
                constant,
                outputs[unit],
                on[unit],
                before_low[unit],
                before_high[unit],
            )
        inputs = outputs
    last, offset = weights[-1]
    program.row(dict(zip(inputs, last[rival] - last[label], strict=True)), low=float(offset[label] - offset[rival]))
    return program.least(reach, seconds)


def _relu(
    program: _Program, minus: dict[int, float], constant: float, output: int, on: int, low: float, high: float
) -> None:
    """output = max(y, 0) for y = constant - minus between low and high: output - y is between 0 and -low where it is off."""
    slack = {**minus, output: 1.0}  # output - y + constant
    program.row(slack, low=float(constant))
    program.row({**slack, on: -min(low, 0.0)}, high=float(constant - min(low, 0.0)))
    program.row({output: 1.0, on: -max(high, 0.0)}, high=0.0)
