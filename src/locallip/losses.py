"""Training losses on the worst logits, as functions of plain tensors."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from locallip.bounds import Trace, WorstLogits
from locallip.network import Network


def bcp_loss(logits: WorstLogits, y: Tensor, mix: float | Tensor) -> Tensor:
    """(1 - lambda) CE(z, y) + lambda CE(z*, y), eqn:bcploss; `mix` is lambda, logits (B, C), y (B,)."""
    return (1 - mix) * F.cross_entropy(logits.clean, y) + mix * F.cross_entropy(logits.worst, y)


def gloro_loss(logits: WorstLogits, y: Tensor) -> Tensor:
    """CE([z | max_{m != y} z*_m], y): a class of its own for "cannot be certified" (Leino et al. 2021)."""
    label = F.one_hot(y, logits.worst.shape[1]).bool()
    runner_up = logits.worst.masked_fill(label, -float("inf")).amax(1, keepdim=True)
    return F.cross_entropy(torch.cat([logits.clean, runner_up], dim=1), y)


def lmt_loss(logits: WorstLogits, y: Tensor) -> Tensor:
    """CE(z*, y) for worst logits of the form "lmt", which add sqrt(2) eps L to all classes but y (Tsuzuku et al. 2018)."""
    return F.cross_entropy(logits.worst, y)


def trades_loss(clean: Tensor, attacked: Tensor, y: Tensor, weight: float) -> Tensor:
    """CE(z, y) + beta KL(p(x) || p(x')), Zhang et al. 2019; logits (B, C) at the image and at the attacked point."""
    drift = F.kl_div(attacked.log_softmax(1), clean.softmax(1), reduction="batchmean")
    return F.cross_entropy(clean, y) + weight * drift


def sparsity_loss(network: Network, trace: Trace, theta_weight: float = 1.0) -> Tensor:
    """max(0, UB) + lambda_theta max(0, theta - LB), eqn:sparse_loss: draws units into their constant regions.

    The mean over samples and units of each stage, summed over stages.
    """
    total = trace.lipschitz.new_zeros(())
    for stage, box in zip(network.stages, trace.boxes, strict=False):
        if stage.activation is not None:
            hinge = stage.activation.hinge(box)
            total = total + hinge.below.mean() + theta_weight * hinge.above.mean()
    return total
