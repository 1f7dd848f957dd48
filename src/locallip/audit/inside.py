"""Is a point in a ball? Decided exactly: by distances in twice the digits of float64, and where these tie by fractions.

In l-infinity every coordinate decides for itself.

A sum a + b is s + e without any error (Knuth's two-sum), and so is a square (Dekker's product), so squares of distances are
known to about 30 digits on whatever device the points are.
"""

from __future__ import annotations

from fractions import Fraction

import torch
from torch import Tensor

from locallip.balls import L2, Ball

_SPLIT = 2.0**27 + 1
#: Relative and absolute error of a sum of squares in twice the digits, both far above what they can be.
_RELATIVE, _ABSOLUTE = 1e-26, 1e-280

Double = tuple[Tensor, Tensor]


def inside(x: Tensor, point: Tensor, radius: Tensor, ball: Ball = L2) -> Tensor:
    """Where ||point - x|| <= radius holds in exact arithmetic, (B,) bool; x, point (B, *shape), radius (B,), float64."""
    if ball.is_box:
        return _inside_box(x.flatten(1), point.flatten(1), radius[:, None])
    high, low = _squared_distance(x.flatten(1), point.flatten(1))
    most, rest = _square(radius)
    gap = (most - high) + (rest - low)
    slack = _RELATIVE * most + _ABSOLUTE
    found = gap > slack
    for i in (~(gap.abs() > slack)).nonzero()[:, 0].tolist():  # a NaN is looked at as well
        found[i] = _exactly_inside(x[i], point[i], float(radius[i]))
    return found


def _inside_box(x: Tensor, point: Tensor, radius: Tensor) -> Tensor:
    """|point - x| is s + e exactly with s the rounded difference; e decides where s is the radius itself."""
    s, e = _sum(point, -x)
    e = torch.where(s < 0, -e, e)
    return ((s.abs() < radius) | ((s.abs() == radius) & (e <= 0))).all(1)  # a NaN is not inside


def _exactly_inside(x: Tensor, point: Tensor, radius: float) -> bool:
    if not (bool(torch.isfinite(x).all()) and bool(torch.isfinite(point).all())):
        return False
    pairs = zip(point.flatten().tolist(), x.flatten().tolist(), strict=True)
    return sum((Fraction(p) - Fraction(c)) ** 2 for p, c in pairs) <= Fraction(radius) ** 2


def _squared_distance(x: Tensor, point: Tensor) -> Double:
    d, e = _sum(point, -x)
    high, low = _square(d)
    terms = _sum(high, low + 2 * d * e + e * e)
    while terms[0].shape[1] > 1:
        if terms[0].shape[1] % 2:
            terms = tuple(torch.nn.functional.pad(t, (0, 1)) for t in terms)  # type: ignore[assignment]
        half = terms[0].shape[1] // 2
        first, second = ([t[:, k * half : (k + 1) * half] for t in terms] for k in (0, 1))
        terms = _add((first[0], first[1]), (second[0], second[1]))
    return terms[0][:, 0], terms[1][:, 0]


def _add(a: Double, b: Double) -> Double:
    high, low = _sum(a[0], b[0])
    more, least = _sum(a[1], b[1])
    high, low = _sum(high, low + more)
    return _sum(high, low + least)


def _sum(a: Tensor, b: Tensor) -> Double:
    """s, e with s + e = a + b exactly."""
    s = a + b
    c = s - a
    return s, (a - (s - c)) + (b - c)


def _square(a: Tensor) -> Double:
    """p, e with p + e = a * a exactly, short of overflow and underflow."""
    wide = a * _SPLIT
    top = wide - (wide - a)
    rest = a - top
    p = a * a
    return p, ((top * top - p) + 2 * top * rest) + rest * rest
