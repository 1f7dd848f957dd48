"""LipSDP (Fazlyab et al. 2019) for dense ReLU networks, with the slopes that units can have on a ball. Needs cvxpy.

Let xi hold the input u and the outputs w of all units that may bend. Units whose slope is known are linear in them, and so
are the pre-activation y_i = Y_i xi of any unit and the outputs C xi. A unit that may bend has
(w_i - low y_i)(high y_i - w_i) >= 0, for changes too. If C^T C + sum_i t_i Q_i <= rho E^T E for some t >= 0, where Q_i is
the form of that product and E xi = u, then ||F(x') - F(x'')||^2 <= rho ||x' - x''||^2. The least such rho is found by a
solver, whose accuracy nothing accounts for.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

#: States, inputs included, above which the solver takes too long.
LARGEST = 160
#: States up to which an interior-point method is taken; a first-order one from there on.
SMALL = 70


class TooLarge(ValueError):
    """More states than the solver manages."""


def lipsdp(weights: Sequence[np.ndarray], low: Sequence[np.ndarray], high: Sequence[np.ndarray]) -> float:
    """The bound for weights W_1 ... W_L and slopes between low and high of the units behind all but the last."""
    try:
        import cvxpy
    except ImportError:
        raise SystemExit("LipSDP needs cvxpy: pip install cvxpy, or leave lipsdp out of --bounds") from None
    outputs, forms, inputs = _forms(weights, low, high)
    states = outputs.shape[1]
    if states > LARGEST:
        raise TooLarge(f"{states} states are more than {LARGEST}")
    scale = float(np.prod([np.linalg.norm(weight, 2) for weight in weights]))
    multipliers, rho = cvxpy.Variable(len(forms), nonneg=True), cvxpy.Variable()
    corner = np.diag([1.0] * inputs + [0.0] * (states - inputs))
    total = outputs.T @ outputs / scale**2 - rho * corner
    if len(forms):
        stacked = np.stack([form.reshape(-1) for form in forms], axis=1)
        total = total + cvxpy.reshape(stacked @ multipliers, (states, states), order="C")
    problem = cvxpy.Problem(cvxpy.Minimize(rho), [total << 0])
    problem.solve(solver=cvxpy.CLARABEL if states <= SMALL else cvxpy.SCS, **({} if states <= SMALL else {"eps": 1e-5}))
    if problem.status not in ("optimal", "optimal_inaccurate"):
        raise TooLarge(f"the solver stops with {problem.status}")
    return scale * float(max(rho.value, 0.0)) ** 0.5


def _forms(
    weights: Sequence[np.ndarray], low: Sequence[np.ndarray], high: Sequence[np.ndarray]
) -> tuple[np.ndarray, list[np.ndarray], int]:
    """C, the Q_i, and how many states are inputs: no more than the first layer sees, in coordinates of its own."""
    first = np.linalg.qr(weights[0].T, mode="r").T  # the same singular values, and fewer columns
    bending = [h > lo for lo, h in zip(low, high, strict=True)]
    inputs = first.shape[1]
    states = inputs + sum(int(b.sum()) for b in bending)
    z, place, forms = np.eye(inputs, states), inputs, []
    for weight, lo, hi, bends in zip([first, *weights[1:-1]], low, high, bending, strict=True):
        y = weight @ z
        z = lo[:, None] * y
        for unit in np.flatnonzero(bends):
            w = np.zeros(states)
            w[place] = 1.0
            product = np.outer(w - lo[unit] * y[unit], hi[unit] * y[unit] - w)
            forms.append((product + product.T) / 2)
            z[unit], place = w, place + 1
    return weights[-1] @ z, forms, inputs
