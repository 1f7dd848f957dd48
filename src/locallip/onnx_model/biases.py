"""A product with a matrix and the addition behind it, MatMul and Add, as the one dense layer that they were written for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from torch import Tensor, nn

from locallip.onnx_model.network import Plus, Step


def with_biases(steps: Sequence[Step]) -> list[Step]:
    """The same network with additions put into the dense layers before them, where nobody else reads those; exact."""
    readers = Counter(source for step in steps for source in step.sources)
    kept: list[Step] = []
    place = {-1: -1}
    for number, step in enumerate(steps):
        sources = tuple(place[source] for source in step.sources)
        dense = kept[sources[0]].layer if sources[0] >= 0 else None
        if isinstance(dense, nn.Linear) and readers[step.sources[0]] == 1 and (bias := _bias(step.layer, dense)) is not None:
            dense.bias = nn.Parameter(bias)
            place[number] = sources[0]
        else:
            place[number] = len(kept)
            kept.append(Step(step.name, step.layer, sources))
    return kept


def _bias(layer: nn.Module, dense: nn.Linear) -> Tensor | None:
    """What is added, (outputs,), if that is one number per output or one for all, and there is no bias yet."""
    if not isinstance(layer, Plus) or "bias" in dict(dense.named_parameters()):
        return None
    count = layer.value.numel()
    if count not in (1, dense.out_features) or layer.value.shape[-1:] not in ((), (count,)):
        return None
    return layer.value.reshape(-1).expand(dense.out_features).clone()
