"""A network in 16-bit arithmetic, for training."""

from __future__ import annotations

from dataclasses import replace

import torch

from locallip.network.stages import Network
from locallip.ops import Cast


def in_precision(network: Network, dtype: torch.dtype) -> Network:
    """The same network, the linear maps of every stage but the last computed in `dtype`.

    Weights, boxes, radii and logits stay in the dtype they have. For training: no certificate may rest on it.
    """
    hidden = tuple(
        replace(stage, terms={source: Cast(op, dtype) for source, op in stage.terms.items()})
        for stage in network.stages[:-1]
    )
    return replace(network, stages=(*hidden, network.stages[-1]))
