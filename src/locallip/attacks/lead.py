"""The margin that an attack wants to lose."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def margins(logits: Tensor, y: Tensor) -> Tensor:
    """z_y - max_{i != y} z_i, (B,): negative where the label loses."""
    label = F.one_hot(y, logits.shape[1]).bool()
    return logits.gather(1, y[:, None])[:, 0] - logits.masked_fill(label, -float("inf")).amax(1)
