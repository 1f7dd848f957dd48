"""What a pass of the bound through a network learns: of one stage's output, and of all."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from locallip.activations import Box, Varying
from locallip.bounds.bend import Before, taken
from locallip.bounds.plan import MemoryPlan
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

    def of(self, index: Tensor) -> Region:
        """The same of the samples `index`."""
        names = ("center", "error", "radius", "lipschitz", "outputs")
        return replace(self, box=_box_of(self.box, index), **{name: taken(getattr(self, name), index) for name in names})


@dataclass(frozen=True)
class Trace:
    """Everything that `propagate` learned: a region per source, a box and masks per activation, a norm per term.

    `before` has what was known before each activation, with outward rounding only; `logits_box` holds every logit.
    `relaxation` is the way back through lines, where it was asked for; `plan` says how much is looked at together.
    `is_small`: time may be spent on searches, as boxes were searched for.
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
    plan: MemoryPlan | None = None
    is_small: bool = False

    def of(self, index: Tensor) -> Trace:
        """What was learned of the samples `index`, without the lines, which are about all of them."""
        return Trace(
            tuple(region.of(index) for region in self.regions),
            tuple(_box_of(box, index) for box in self.boxes),
            tuple(Varying(*(taken(mask, index) for mask in masks)) for masks in self.varying),
            {key: taken(norm, index) for key, norm in self.norms.items()},
            taken(self.logits, index),
            taken(self.logits_error, index),
            taken(self.lipschitz, index),
            tuple(before.of(index) for before in self.before),
            None if self.logits_box is None else _box_of(self.logits_box, index),
            plan=self.plan,
            is_small=self.is_small,
        )


def _box_of(box: Box, index: Tensor) -> Box:
    return Box(*(taken(end, index) for end in box))


def width_of(region: Region) -> Tensor:
    """|z' - c| or larger, (B, *shape)."""
    width = torch.maximum(region.box.upper - region.center, region.center - region.box.lower).clamp(min=0)
    return up(width + (0.0 if region.error is None else region.error))
