"""How far the logits of the network that runs, in float32, can be from those in real arithmetic, anywhere in the ball.

A stage computes sum_k W_k z_k + b from values that are off by d_k already. Each of its outputs is off by at most
sum_k |W_k| (d_k + gamma (|z_k| + d_k)) + gamma |b|, with gamma that of float32 and |z_k| the largest value in the box: the
same running error as behind every center of the bound, but over the whole ball. What is too small for float32 is added, as
a number for every product and weight that may vanish; where anything may come near the largest number of float32 the bound
is infinite. Assumed are sums of products of float32 numbers in any order (no TF32, no Winograd or Fourier schemes), and an
x' that is in float32.
"""

from __future__ import annotations

import torch
from torch import Tensor

from locallip.activations import Box, Softplus
from locallip.bounds.propagate import Trace
from locallip.network import Network
from locallip.ops import Compose, LinearOp, Sum, total
from locallip.rounding import gamma, up

#: Roundings allowed to an activation: library functions are good to a few units in the last place.
OF_ACTIVATION = 32
#: Nothing may come nearer to overflow than this, so that no order of sums and no step inside a layer overflows either.
ROOM = 2.0**-20
#: Below its threshold Softplus takes e^(beta z), and e^89 is infinite in float32.
SOFTPLUS_THRESHOLD = 80


def deployed_error(network: Network, trace: Trace, dtype: torch.dtype = torch.float32) -> Tensor:
    """At least |logit computed in `dtype` - logit| for every x' in the ball of `trace`, (B, C)."""
    info = torch.finfo(dtype)
    errors = [torch.full_like(trace.regions[0].center, info.tiny)]  # a number too small may become 0 when it is read
    peak = torch.zeros(len(trace.logits), dtype=trace.logits.dtype, device=trace.logits.device)
    for index, stage in enumerate(network.stages):
        slack = gamma(stage.fan_in + 8, dtype)
        parts = []
        for source, op in stage.terms.items():
            before = errors[source]
            value = up(_largest(trace.regions[source].box) + before)
            parts.append(op.apply_abs(up(before + slack * value)) + _vanished(op, value, info.tiny))
            peak = peak + _peak(op, value + 1)  # the 1 lets no weight hide behind a value of 0
        for op, bias in stage.offset.parts:
            value = bias(peak.dtype).abs().expand(1, *op.in_shape)
            parts.append(_vanished(op, value, info.tiny))
            peak = peak + _peak(op, value + 1)
        error = up(total(parts) + slack * stage.offset.magnitude(parts[0]), 8 + stage.fan_in)
        if stage.activation is None:
            return torch.where((peak < ROOM * info.max)[:, None], error, float("inf"))
        after = trace.regions[index + 1]
        rounding = gamma(OF_ACTIVATION, dtype) * _largest(after.box) + info.tiny
        if isinstance(stage.activation, Softplus) and stage.activation.threshold > SOFTPLUS_THRESHOLD:
            rounding = torch.full_like(rounding, float("inf"))
        errors.append(up(stage.activation.spread(error) + rounding))
    raise AssertionError("the last stage has no activation")


def _vanished(op: LinearOp, value: Tensor, tiny: float) -> Tensor:
    """What products and weights below `tiny` can take from W z in all, for |z| at most `value`, (B, *out_shape)."""
    if isinstance(op, Compose):
        between = op.inner.apply_abs(value)
        lost = op.outer.apply_abs(_vanished(op.inner, value, tiny)) + _vanished(op.outer, between, tiny)
        # Batch norm may multiply its two factors first.
        return lost + _vanished_products(op, value, tiny) if op.single_entry_rows else lost
    if isinstance(op, Sum):
        return total([_vanished(part, value, tiny) for part in op.parts]) + len(op.parts) * tiny
    return _vanished_products(op, value, tiny)


def _vanished_products(op: LinearOp, value: Tensor, tiny: float) -> Tensor:
    """The same where entries of the matrix itself meet z."""
    most = value.flatten(1).amax(1).reshape(-1, *[1] * len(op.out_shape))
    return ((op.fan_in + 8) * tiny * (1 + most)).expand(-1, *op.out_shape)


def _peak(op: LinearOp, value: Tensor) -> Tensor:
    """At least the largest absolute value on the way of z through W, for |z| at most `value`, (B,) or (1,)."""
    if isinstance(op, Compose):
        return torch.maximum(_peak(op.inner, value), _peak(op.outer, op.inner.apply_abs(value)))
    if isinstance(op, Sum):
        return torch.stack([_peak(part, value) for part in op.parts]).sum(0)
    return torch.maximum(value.flatten(1).amax(1), op.apply_abs(value).flatten(1).amax(1))


def _largest(box: Box) -> Tensor:
    return torch.maximum(box.lower.abs(), box.upper.abs())
