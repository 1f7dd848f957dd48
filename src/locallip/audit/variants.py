"""Networks derived from a given one whose numbers are hard on a certifier: rescaled layers, ties, denormals, huge logits."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from locallip.activations import ClippedMaxMin, MaxMin, ReLUTheta

_LINEAR = (nn.Linear, nn.Conv1d, nn.Conv2d)
_SCALES = (nn.ReLU, ReLUTheta, MaxMin, ClippedMaxMin, nn.Flatten, nn.Identity)


@dataclass(frozen=True)
class Variant:
    """A derived network in float64; its inputs are those of the given one times `unit`, a power of two.

    `hopeless`: classes of which no certificate can be right, as they share their logit with another one everywhere, or as
    there are no numbers to compare.
    """

    name: str
    model: nn.Module
    unit: float = 1.0
    hopeless: tuple[int, ...] = ()

    def has_no_hope(self, y: Tensor) -> Tensor:
        """Where a label is not ahead of all others whatever the input, (B,) bool."""
        return torch.isin(y, torch.tensor(self.hopeless, dtype=y.dtype, device=y.device))


def scaled(model: nn.Module, seed: int) -> Iterator[Variant]:
    """Layers multiplied by factors; where they cancel out the classes are those of the given network."""
    for power in (33, -33, 100, -100):
        yield from _last(model, f"last layer x 2^{power}", partial(_multiply, factor=2.0**power))
    for power in (16, -16):
        yield from _first(model, power)
    yield from _between(model, "layers x 2^16, 2^-16 by turns", lambda k: 2.0 ** (16 if k % 2 else -16))
    drawn = torch.randint(-40, 41, (1000,), generator=torch.Generator().manual_seed(seed)).tolist()
    yield from _between(model, "layers x random powers of two", lambda k: 2.0 ** drawn[k])


def extreme(model: nn.Module) -> Iterator[Variant]:
    """Ties, denormal weights, and logits that overflow."""
    *_, last = model.modules()
    classes = last.out_features if isinstance(last, nn.Linear) else 0  # behind others it does not give the logits alone
    yield from _last(model, "classes tied in pairs", _tie, tuple(range(classes - classes % 2)))
    yield from _last(model, "last layer 0", partial(_multiply, factor=0.0), tuple(range(classes)))
    for factor in (1e-150, 1e150, 1e300):
        yield from _last(model, f"last layer x {factor:g}", partial(_multiply, factor=factor))
    yield from _last(model, "last layer denormal", partial(_multiply, factor=2.0**-1060))
    yield from _last(model, "last layer infinite", partial(_multiply, factor=float("inf")), tuple(range(classes)))


def _last(
    model: nn.Module, name: str, change: Callable[[nn.Linear], None], hopeless: tuple[int, ...] = ()
) -> Iterator[Variant]:
    other = _double(model)
    layers = [module for module in other.modules() if isinstance(module, nn.Linear)]
    if layers:
        with torch.no_grad():
            change(layers[-1])
        yield Variant(name, other, hopeless=hopeless)


def _first(model: nn.Module, power: int) -> Iterator[Variant]:
    """Inputs times a power of two, and the first weights divided by it."""
    other = _double(model)
    first = next((module for module in other.modules() if next(module.parameters(recurse=False), None) is not None), None)
    if isinstance(first, _LINEAR):
        with torch.no_grad():
            first.weight.mul_(2.0**-power)
        yield Variant(f"inputs x 2^{power}", other, unit=2.0**power)


def _between(model: nn.Module, name: str, factor: Callable[[int], float]) -> Iterator[Variant]:
    """The units behind layer k in units of factor(k): the same function, as the factors are powers of two."""
    if not isinstance(model, nn.Sequential) or not all(isinstance(module, (*_LINEAR, *_SCALES)) for module in model):
        return
    other = _double(model)
    assert isinstance(other, nn.Sequential)
    number, before, last = 0, 1.0, max(i for i, module in enumerate(other) if isinstance(module, _LINEAR))
    with torch.no_grad():
        for i, module in enumerate(other):
            if isinstance(module, _LINEAR):
                now = factor(number) if i < last else 1.0
                module.weight.mul_(now / before)
                if module.bias is not None:
                    module.bias.mul_(now)
                number, before = number + 1, now
            else:
                for threshold in module.parameters():
                    threshold.mul_(before)
    yield Variant(name, other)


def _double(model: nn.Module) -> nn.Module:
    return copy.deepcopy(model).double()


def _multiply(layer: nn.Linear, factor: float) -> None:
    for value in layer.parameters():
        value.mul_(factor)


def _tie(layer: nn.Linear) -> None:
    """Every second class is the one before it again."""
    for value in layer.parameters():
        value[1::2] = value[: len(value) - len(value) % 2 : 2]
