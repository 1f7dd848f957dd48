"""The architectures of the paper's appendix, 4C3F, 6C2F, 8C2F, and a small one for the CPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import nn

from locallip.activations import ClippedMaxMin, MaxMin, ReLUTheta

#: Convolutions C(channels, kernel, stride, padding) and widths F of the fully connected layers but the last.
ARCHITECTURES: dict[str, tuple[tuple[tuple[int, int, int, int], ...], tuple[int, ...]]] = {
    "4c3f": (((32, 3, 1, 1), (32, 4, 2, 1), (64, 3, 1, 1), (64, 4, 2, 1)), (512, 512)),
    "6c2f": (((32, 3, 1, 1), (32, 3, 1, 1), (32, 4, 2, 1), (64, 3, 1, 1), (64, 3, 1, 1), (64, 4, 2, 1)), (512,)),
    "8c2f": (
        (
            *((64, 3, 1, 1), (64, 3, 1, 1), (64, 4, 2, 0), (128, 3, 1, 1)),
            *((128, 3, 1, 1), (128, 4, 2, 0), (256, 3, 1, 1), (256, 4, 2, 0)),
        ),
        (256,),
    ),
    "small": (((16, 4, 2, 1), (32, 4, 2, 1)), (100,)),  # for small images on the CPU; not from the paper
}


def _clipped_maxmin(shape: tuple[int, ...], threshold: float) -> nn.Module:
    return ClippedMaxMin((shape[0] // 2, *shape[1:]), upper=threshold, lower=-threshold)


ACTIVATIONS: dict[str, Callable[[tuple[int, ...], float], nn.Module]] = {
    "relu": lambda shape, threshold: nn.ReLU(),
    "relu_theta": lambda shape, threshold: ReLUTheta(shape, init=threshold),
    "maxmin": lambda shape, threshold: MaxMin(),
    "clipped_maxmin": _clipped_maxmin,
}


def build_model(
    architecture: str,
    input_shape: Sequence[int],
    classes: int,
    activation: str = "relu_theta",
    threshold: float = 1.0,
) -> nn.Sequential:
    """One of the paper's networks for samples of `input_shape` (C, H, W); `threshold` starts theta, a and -b."""
    if architecture.lower() not in ARCHITECTURES:
        raise ValueError(f"unknown architecture {architecture!r}; choose one of {', '.join(ARCHITECTURES)}")
    convolutions, widths = ARCHITECTURES[architecture.lower()]
    return convolutional_network(convolutions, widths, input_shape, classes, activation, threshold)


def convolutional_network(
    convolutions: Sequence[tuple[int, int, int, int]],
    widths: Sequence[int],
    input_shape: Sequence[int],
    classes: int,
    activation: str = "relu_theta",
    threshold: float = 1.0,
) -> nn.Sequential:
    """Convolutions C(channels, kernel, stride, padding), then fully connected layers; activations between them."""
    if activation not in ACTIVATIONS:
        raise ValueError(f"unknown activation {activation!r}; choose one of {', '.join(ACTIVATIONS)}")
    channels, height, width = input_shape
    layers: list[nn.Module] = []
    for out, kernel, stride, padding in convolutions:
        layers.append(nn.Conv2d(channels, out, kernel, stride, padding))
        height = (height + 2 * padding - kernel) // stride + 1
        width = (width + 2 * padding - kernel) // stride + 1
        if min(height, width) < 1:
            raise ValueError(f"input {tuple(input_shape)} is too small for these convolutions")
        channels = out
        layers.append(ACTIVATIONS[activation]((channels, height, width), threshold))
    layers.append(nn.Flatten())
    features = channels * height * width
    for out in widths:
        layers += [nn.Linear(features, out), ACTIVATIONS[activation]((out,), threshold)]
        features = out
    layers.append(nn.Linear(features, classes))
    return nn.Sequential(*layers)


def num_parameters(model: torch.nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())
