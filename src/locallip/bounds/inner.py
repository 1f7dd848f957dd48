"""Boxes of inner units by slopes of their own: each end is pulled back to the input as the rise of a logit is.

Lines take the slopes that are closest on the whole, whatever they are for. Here they are sought for every unit and either
end of its box by itself, as alpha-CROWN does (Xu et al. 2021), stage by stage, so that later ends rest on boxes that are
smaller already. That is as dear as the search for worst logits times the units, and so for small networks.
"""

from __future__ import annotations

import torch
from torch import Tensor

from locallip.activations import Box
from locallip.bounds.lines import unstable
from locallip.bounds.pullback import Pullback
from locallip.bounds.region import Trace
from locallip.network import Network
from locallip.rounding import gamma, up

#: Steps of the search for the slopes of one end: fewer gain less, more hardly anything (benchmarks/NOTES.md).
STEPS = 40
#: Numbers per sample that the ways of all ends of a stage may take: few, as published networks gain a hundredth at most for
#: many times the time of lines, and as many as take tenths of a second for those who insist.
LIMIT, MOST = 2**16, 2**20


def pays(network: Network, limit: int) -> bool:
    """Whether there are boxes that are not known exactly and cheap enough to search for."""
    numbers = [network.input_shape.numel(), *(stage.linear_shape.numel() for stage in network.stages[:-1])]
    inside = [k for k, stage in enumerate(network.stages[:-1]) if any(source > 0 for source in stage.terms)]
    return any(_ends(numbers[k + 1], sum(numbers[: k + 1])) <= limit for k in inside)


def _ends(count: int, units: int) -> int:
    """Numbers that the ends of `count` units take, with as many on the way back; all rows of the stage are there as well."""
    return 2 * count * max(count, units)


def searched(network: Network, trace: Trace, box: Box, limit: int) -> Box:
    """The box (B, *shape) before the next activation, smaller where a unit may bend; `trace` ends at its pre-activation.

    Stages whose ends would take more than `limit` numbers are left as they are, and so are those that read nothing but the
    input: what is known there is exact.
    """
    activation = network.stages[len(trace.before)].activation
    # Later boxes rest on these: in float32 what a search finds depends on the samples beside it, by far more than rounding.
    back = Pullback(network, trace, rough=torch.float64)
    count = box.lower[0].numel()
    if activation is None or not back.stages or _ends(count, back.units) > limit:
        return box
    samples, units = unstable(activation, box).flatten(1).nonzero(as_tuple=True)
    if not len(samples):
        return box
    none = torch.full_like(units, count)
    twice, ends, others = torch.cat([samples, samples]), torch.cat([units, none]), torch.cat([none, units])
    high, low = back(twice, ends, others, STEPS).chunk(2)
    assert trace.logits_error is not None
    center, error = (values.flatten(1)[samples, units] for values in (trace.logits, trace.logits_error))
    lost = up(error) + gamma(8, center.dtype) * center.abs()
    upper, lower = (end.flatten(1)[samples, units] for end in (box.upper, box.lower))
    # A NaN changes nothing.
    above, below = center + up(up(high) + lost), center - up(up(low) + lost)
    upper, lower = torch.where(above < upper, above, upper), torch.where(below > lower, below, lower)
    return Box(_put(box.lower, samples, units, lower), _put(box.upper, samples, units, upper))


def _put(end: Tensor, samples: Tensor, units: Tensor, values: Tensor) -> Tensor:
    return end.flatten(1).index_put((samples, units), values).reshape(end.shape)
