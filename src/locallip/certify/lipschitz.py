"""Lipschitz bounds of a user's model: around each input, and over all inputs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor, nn

from locallip.arithmetic import exact_arithmetic
from locallip.balls import Domain
from locallip.bounds import fits, jacobian_bounds, multiplier_bounds
from locallip.certify.inputs import Eps, as_batch, as_domain, as_eps, as_lipschitz_method, check_batch_size
from locallip.certify.prover import Prover
from locallip.norms import Guarantee

#: "product" is the paper's bound, the product of masked norms; "jacobian" bounds the whole Jacobian by the slopes that
#: activations can have (bounds/jacobian.py); "auto" takes the smaller of both.
LipschitzMethod = Literal["auto", "product", "jacobian"]


def local_lipschitz(
    model: nn.Module,
    x: Tensor,
    eps: Eps,
    *,
    method: LipschitzMethod = "auto",
    guarantee: str | Guarantee = Guarantee.HIGH_PROBABILITY,
    failure_prob: float = 1e-9,
    input_domain: tuple[float, float] | None = None,
    batch_size: int = 64,
    power_steps: int = 100,
    seed: int | None = None,
) -> Tensor:
    """Upper bound of the Lipschitz constant of `model` on the eps-ball around each x, (B,) float64 (eq:local_lip).

    x is (B, *input shape); eps a number, a fraction string or one value per sample. A sample that is not finite, or whose
    bound overflows, gets inf. Under "high_probability" each value is an upper bound except with `failure_prob`.

    `method`: "product" multiplies the norms of layers without the units that cannot change (the paper's bound, with
    sequential radii). "jacobian" follows the rows of the Jacobian back through the network with the slopes that each unit
    can have in its box, which linear relaxation sharpens first, and where few units bend by a semidefinite bound; a sample
    takes as many numbers as outputs times units of the largest layer. "auto" takes the smaller of both, and "product" alone
    where the rows do not fit.
    """
    check_batch_size(batch_size)
    as_lipschitz_method(method)
    x = as_batch(x, model, input_domain)
    radii = as_eps(eps, len(x), x.device)
    prover = Prover(
        model, x.shape[1:], guarantee, failure_prob=failure_prob, power_steps=power_steps, seed=seed, device=x.device
    )
    with prover.held(model, "bound"):
        parts = [
            _bound(prover, x[i : i + batch_size], radii[i : i + batch_size], as_domain(input_domain), method)
            for i in range(0, len(x), batch_size)
        ]
    bound = torch.cat(parts) if parts else radii
    finite = torch.isfinite(x.flatten(1)).all(1) & torch.isfinite(bound)
    return torch.where(finite, bound, float("inf"))


def _bound(prover: Prover, x: Tensor, eps: Tensor, domain: Domain, method: LipschitzMethod) -> Tensor:
    possible = fits(prover.network, x)
    if method == "jacobian" and not possible:
        shape = ", ".join(map(str, prover.network.output_shape))
        raise ValueError(f"the Jacobian of outputs ({shape}) is too large for method='jacobian'; use method='product'")
    if method == "product" or not possible:
        return prover.trace(x, eps, domain=domain).lipschitz
    trace = prover.trace(x, eps, domain=domain, relax="boxes")
    with exact_arithmetic():
        bound = torch.minimum(jacobian_bounds(prover.network, trace), multiplier_bounds(prover.network, trace))
    return torch.minimum(bound, trace.lipschitz) if method == "auto" else bound


def global_lipschitz(
    model: nn.Module,
    input_shape: Sequence[int],
    *,
    guarantee: str | Guarantee = Guarantee.HIGH_PROBABILITY,
    failure_prob: float = 1e-9,
    power_steps: int = 100,
    seed: int | None = None,
) -> float:
    """Upper bound of the Lipschitz constant of `model` over all inputs, the product of norms of eq:glocal_lips.

    `input_shape` is the shape of one sample, without batch. Branches of a residual network add up.
    """
    prover = Prover(
        model,
        input_shape,
        guarantee,
        failure_prob=failure_prob,
        probes=0,
        power_steps=power_steps,
        seed=seed,
    )
    with prover.held(model, "bound"):
        bound = float(prover.ceiling.total)
    return bound if bound == bound else float("inf")
