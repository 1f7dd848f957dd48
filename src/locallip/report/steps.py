"""How many steps it takes until a norm has converged, per layer and image: the paper's poweriter, and Lanczos beside it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from locallip.bounds import Trace, norm_keys
from locallip.network import Network
from locallip.ops import Masked

#: The paper stops power iteration when its unit vector moves by less than this.
STILL = 1e-3
#: Lanczos has converged when its value stays within this share of the last one.
CLOSE = 1e-3
POWER_CAP, LANCZOS_CAP = 300, 60


def steps_to_converge(network: Network, trace: Trace, seed: int) -> dict[str, Any]:
    """For each term of the network, under the masks of a trace: steps of both methods per image, capped."""
    generator = torch.Generator().manual_seed(seed)
    layers, power, lanczos = [], [], []
    for index, stage in enumerate(network.stages):
        inputs = trace.varying[index].inputs if stage.activation is not None else None
        for source, key in norm_keys(stage, index).items():
            op = Masked(stage.terms[source], inputs, trace.regions[source].outputs)
            start = torch.randn(len(trace.logits), *op.in_shape, generator=generator).to(trace.logits.device)
            layers.append(key.name)
            power.append(_power(op, start).tolist())
            lanczos.append(_lanczos(op, start).tolist())
    return {"layers": layers, "power": power, "lanczos": lanczos, "power_cap": POWER_CAP, "lanczos_cap": LANCZOS_CAP}


def _normal(op: Masked, v: Tensor) -> Tensor:
    """AᵀA v."""
    return op.adjoint(op.apply(v))


def _length(v: Tensor) -> Tensor:
    return v.flatten(1).norm(dim=1).reshape(-1, *[1] * (v.dim() - 1))


def _unit(v: Tensor) -> Tensor:
    return v / _length(v).clamp(min=1e-30)


def _power(op: Masked, start: Tensor) -> Tensor:
    """Steps until ||u(t+1) - u(t)|| <= STILL, (B,)."""
    u = _unit(_normal(op, start))
    steps = torch.full((len(u),), POWER_CAP, device=u.device)
    for step in range(1, POWER_CAP):
        after = _unit(_normal(op, u))
        still = _length(after - u).flatten() <= STILL
        steps = torch.where(still & (steps == POWER_CAP), step, steps)
        u = after
        if bool((steps < POWER_CAP).all()):
            break
    return steps


def _lanczos(op: Masked, start: Tensor) -> Tensor:
    """Steps until the largest Ritz value of AᵀA stays within CLOSE of its last value in the norm, (B,)."""
    q, before, beta = _unit(start), torch.zeros_like(start), torch.zeros(len(start), device=start.device)
    diagonal, beside = [], []
    for _ in range(LANCZOS_CAP):
        w = _normal(op, q) - beta.reshape(-1, *[1] * (q.dim() - 1)) * before
        alpha = (w * q).flatten(1).sum(1)
        w = w - alpha.reshape(-1, *[1] * (q.dim() - 1)) * q
        diagonal.append(alpha)
        beta = _length(w).flatten()
        beside.append(beta)
        before, q = q, _unit(w)
    a, b = torch.stack(diagonal, 1).double().cpu(), torch.stack(beside, 1).double().cpu()
    whole = torch.diag_embed(a) + torch.diag_embed(b[:, :-1], 1) + torch.diag_embed(b[:, :-1], -1)
    values = [torch.linalg.eigvalsh(whole[:, :k, :k])[:, -1] for k in range(1, LANCZOS_CAP + 1)]
    norms = torch.stack(values, 1).clamp(min=0).sqrt()
    away = norms < norms[:, -1:] * (1 - CLOSE)
    return away.sum(1) + 1  # Ritz values grow, so those away are the first ones
