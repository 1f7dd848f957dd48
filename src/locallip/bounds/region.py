"""What a pass of the bound through a network learns: of one stage's output, and of all."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from locallip.activations import Box, Varying
from locallip.bounds.bends import Before
from locallip.norms import NormKey
from locallip.rounding import up

if TYPE_CHECKING:
    from locallip.bounds.relaxation import Relaxation


@dataclass(frozen=True)
class Region:
    """What is known of one stage's output z(x') for all x' in the ball around x.

    center (B, *shape) is z(x), off by at most `error` (None: not counted); box holds every z(x'); every difference
    z(x') - z(x'') is diag(outputs) t with ||t|| <= lipschitz * ||x' - x''||, and ||t|| <= radius for x'' = x, both (B,).
    `ball_only` says that the box is just the one around the ball, so that its interval image adds nothing to the ball's.
    """

    center: Tensor
    error: Tensor | None
    box: Box
    radius: Tensor
    lipschitz: Tensor
    outputs: Tensor | None
    ball_only: bool = False


@dataclass(frozen=True)
class Trace:
    """Everything that `propagate` learned: a region per source, a box and masks per activation, a norm per term.

    `before` has what was known before each activation, with outward rounding only; `logits_box` holds every logit.
    `relaxation` is the way back through lines, where it was asked for.
    """

    regions: tuple[Region, ...]
    boxes: tuple[Box, ...]
    varying: tuple[Varying, ...]
    norms: Mapping[NormKey, Tensor]
    logits: Tensor
    logits_error: Tensor | None
    lipschitz: Tensor
    before: tuple[Before, ...] = ()
    logits_box: Box | None = None
    relaxation: Relaxation | None = None


def width_of(region: Region) -> Tensor:
    """|z' - c| or larger, (B, *shape)."""
    width = torch.maximum(region.box.upper - region.center, region.center - region.box.lower).clamp(min=0)
    return up(width + (0.0 if region.error is None else region.error))
