"""How far the logits of the network that runs, in float32, can be from those in real arithmetic, anywhere in the ball.

A stage computes sum_k W_k z_k + b from values that are off by d_k already. Each of its outputs is off by at most
sum_k |W_k| (d_k + gamma (|z_k| + d_k)) + gamma |b|, with gamma that of float32 and |z_k| the largest value in the box: the
same running error as behind every center of the bound, but over the whole ball. Assumed are sums of products of float32
numbers in any order (no TF32, no Winograd or Fourier schemes), without overflow or underflow, and an x' that is in float32.
"""

from __future__ import annotations

import torch
from torch import Tensor

from locallip.activations import Box
from locallip.bounds.propagate import Trace
from locallip.network import Network
from locallip.ops import total
from locallip.rounding import gamma, up

#: Roundings allowed to an activation: library functions are good to a few units in the last place.
OF_ACTIVATION = 32


def deployed_error(network: Network, trace: Trace, dtype: torch.dtype = torch.float32) -> Tensor:
    """At least |logit computed in `dtype` - logit| for every x' in the ball of `trace`, (B, C)."""
    errors = [torch.zeros_like(trace.regions[0].center)]
    for index, stage in enumerate(network.stages):
        slack = gamma(stage.fan_in + 8, dtype)
        parts = []
        for source, op in stage.terms.items():
            before = errors[source]
            parts.append(op.apply_abs(up(before + slack * (_largest(trace.regions[source].box) + before))))
        error = up(total(parts) + slack * stage.offset.magnitude(parts[0]), 8 + stage.fan_in)
        if stage.activation is None:
            return error
        after = trace.regions[index + 1]
        rounding = gamma(OF_ACTIVATION, dtype) * _largest(after.box)
        errors.append(up(stage.activation.spread(error) + rounding))
    raise AssertionError("the last stage has no activation")


def _largest(box: Box) -> Tensor:
    return torch.maximum(box.lower.abs(), box.upper.abs())
