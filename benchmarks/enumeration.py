"""Exact values of a tiny dense ReLU network on an l2 ball, by the activation patterns that the ball meets.

On the set where a pattern holds the network is linear: its Lipschitz constant there is the norm of a product of weights, and
the nearest point where another class comes up is that of a polyhedron. The largest and the nearest count, over all patterns
whose sets meet the ball's interior. Layer by layer, unit by unit, a set {u: A u >= b} is cut where the unit's sign changes,
and a part is kept if its point of least norm lies in the ball: a least-distance problem, solved as one of non-negative least
squares (Lawson and Hanson 1974, chapter 23). Parts that only touch the ball, or each other, are left out by MARGIN: what is
found exceeds the constant by rounding at most.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from scipy.optimize import nnls
from torch import Tensor, nn

#: By how much a unit must be able to leave 0, relative to the norm of its weights; eps is shortened by as much.
MARGIN = 1e-9


class TooMany(ValueError):
    """More patterns than were allowed."""


@dataclass(frozen=True)
class Found:
    """The largest norm of a pattern's Jacobian, and how many patterns the ball meets."""

    lipschitz: float
    patterns: int


@dataclass(frozen=True)
class _Part:
    """Where a pattern holds so far: u with rows u >= bounds; z = matrix u + offset is the input of the next layer there."""

    rows: np.ndarray
    bounds: np.ndarray
    matrix: np.ndarray
    offset: np.ndarray


def weights_of(model: nn.Sequential) -> list[tuple[np.ndarray, np.ndarray]]:
    """Weights and biases of Linear, ReLU, Linear, ReLU, ..., Linear (a Flatten in front is left out), in float64."""
    layers = [layer for layer in model if not isinstance(layer, nn.Flatten)]
    if not all(isinstance(layer, (nn.Linear, nn.ReLU)[i % 2]) for i, layer in enumerate(layers)) or len(layers) % 2 == 0:
        raise ValueError(
            f"enumeration is for Linear, ReLU, ..., Linear; this is {[type(layer).__name__ for layer in model]}"
        )
    dense = [layer for layer in layers if isinstance(layer, nn.Linear)]
    return [(_numbers(layer.weight), _numbers(layer.bias)) for layer in dense]


def exact_lipschitz(model: nn.Sequential, x: Tensor, eps: float, most: int = 20_000) -> Found:
    """That of `model` on the ball around one x; raises TooMany above `most` patterns."""
    weights = weights_of(model)
    parts, last = _parts(weights, x, eps * (1 - MARGIN), most), weights[-1][0]
    return Found(max(float(np.linalg.norm(last @ part.matrix, 2)) for part in parts), len(parts))


@dataclass(frozen=True)
class Nearest:
    """The distance to the nearest point with another class, and that point; None where none is as near as was asked."""

    radius: float
    point: np.ndarray | None


def exact_radius(model: nn.Sequential, x: Tensor, label: int, eps: float, most: int = 20_000) -> Nearest:
    """How near to one x a class other than `label` comes up to it, eps where none is nearer.

    Raises TooMany where the ball of radius eps meets more than `most` patterns.
    """
    weights = weights_of(model)
    last, offset = weights[-1]
    others, nearest = np.delete(np.arange(len(offset)), label), Nearest(eps, None)
    for part in _parts(weights, x, eps, most):
        rises = (last[others] - last[label]) @ part.matrix
        ahead = (last[others] - last[label]) @ part.offset + offset[others] - offset[label]
        for row, constant in zip(rises, ahead, strict=True):
            size = np.linalg.norm(row)
            if constant + size * nearest.radius < 0:
                continue  # this class does not come up as near as that
            scale = max(size, 1e-300)
            move = least_point(np.vstack([part.rows, row / scale]), np.append(part.bounds, -constant / scale))
            if move is not None and (radius := float(np.linalg.norm(move))) < nearest.radius:
                nearest = Nearest(radius, _numbers(x).reshape(-1) + move)
    return nearest


def _parts(weights: Sequence[tuple[np.ndarray, np.ndarray]], x: Tensor, reach: float, most: int) -> list[_Part]:
    """Behind the last activation, for all patterns that the ball meets."""
    center = _numbers(x).reshape(-1)
    n = len(center)
    parts = [_Part(np.zeros((0, n)), np.zeros(0), np.eye(n), center)]
    for weight, bias in weights[:-1]:
        parts = [part for before in parts for part in _through(before, weight, bias, reach, most)]
        if len(parts) > most:
            raise TooMany(f"the ball meets more than {most} patterns")
    return parts


def _through(before: _Part, weight: np.ndarray, bias: np.ndarray, reach: float, most: int) -> Iterator[_Part]:
    """The parts of a part behind the next layer and its ReLU."""
    matrix, offset = weight @ before.matrix, weight @ before.offset + bias
    open_parts = [(before.rows, before.bounds, np.zeros(len(offset)))]
    for unit, (row, constant) in enumerate(zip(matrix, offset, strict=True)):
        size = np.linalg.norm(row)
        cut = []
        for rows, bounds, on in open_parts:
            for sign in (1.0, -1.0):
                # sign (row u + constant) >= 0, and a little more.
                if sign * constant - size * reach >= 0:
                    more, limit = rows, bounds  # so everywhere in the ball
                elif sign * constant + size * reach <= MARGIN * size:
                    continue
                else:
                    more, limit = np.vstack([rows, sign * row / size]), np.append(bounds, -sign * constant / size)
                    if least_norm(more, limit + MARGIN) > reach:
                        continue
                cut.append((more, limit, np.where(np.arange(len(on)) == unit, sign > 0, on)))
        open_parts = cut
        if len(open_parts) > most:
            raise TooMany(f"the ball meets more than {most} patterns")
    for rows, bounds, on in open_parts:
        yield _Part(rows, bounds, on[:, None] * matrix, on * offset)


def least_norm(rows: np.ndarray, bounds: np.ndarray) -> float:
    """min ||u|| over rows u >= bounds; inf where nothing fulfils them."""
    point = least_point(rows, bounds)
    return float("inf") if point is None else float(np.linalg.norm(point))


def least_point(rows: np.ndarray, bounds: np.ndarray) -> np.ndarray | None:
    """The u of least norm with rows u >= bounds; None where nothing fulfils them."""
    n = rows.shape[1]
    if not (bounds > 0).any():
        return np.zeros(n)
    target = np.zeros(n + 1)
    target[n] = 1
    multipliers, distance = nnls(np.vstack([rows.T, bounds]), target)
    if distance < 1e-10:
        return None
    residual = np.vstack([rows.T, bounds]) @ multipliers - target
    return -residual[:n] / residual[n]


def _numbers(values: Tensor | Sequence[float]) -> np.ndarray:
    return values.detach().double().cpu().numpy() if isinstance(values, Tensor) else np.asarray(values, dtype=np.float64)
