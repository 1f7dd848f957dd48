"""Lipschitz bounds of a user's model: around each input, and over all inputs."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from locallip.certify.inputs import Eps, as_batch, as_domain, as_eps, check_batch_size
from locallip.certify.prover import Prover
from locallip.norms import Guarantee


def local_lipschitz(
    model: nn.Module,
    x: Tensor,
    eps: Eps,
    *,
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
    """
    check_batch_size(batch_size)
    x = as_batch(x, model, input_domain)
    radii = as_eps(eps, len(x), x.device)
    prover = Prover(
        model, x.shape[1:], guarantee, failure_prob=failure_prob, power_steps=power_steps, seed=seed, device=x.device
    )
    with prover.held(model, "bound"):
        parts = [
            prover.trace(x[i : i + batch_size], radii[i : i + batch_size], domain=as_domain(input_domain)).lipschitz
            for i in range(0, len(x), batch_size)
        ]
    bound = torch.cat(parts) if parts else radii
    finite = torch.isfinite(x.flatten(1)).all(1) & torch.isfinite(bound)
    return torch.where(finite, bound, float("inf"))


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
