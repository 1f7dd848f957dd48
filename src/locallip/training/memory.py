"""Where a run keeps what it needs, decided before it begins."""

from __future__ import annotations

import math

import torch
from torch import nn

from locallip.data import ImageSet
from locallip.network import lower
from locallip.training.batches import margin_of
from locallip.training.objective import local_places, places
from locallip.training.recipe import Recipe

#: What a training step needs beside the saved vectors, per sample of a batch and unit of the network, in bytes.
STEP_BYTES_PER_UNIT = 80


def plan_memory(
    recipe: Recipe, model: nn.Module, train: ImageSet, device: torch.device
) -> tuple[torch.device, bool, list[str]]:
    """Where the saved vectors and the images will live, and that in words."""
    network = lower(model, train.images.shape[1:])
    units = sum(shape.numel() for shape in places(network).values())
    saved = sum(shape.numel() for shape in local_places(network, recipe).values()) if recipe.starts == "saved" else 0
    width = 2 if device.type == "cuda" else 4
    starts = saved * width * len(train.labels)
    channels, *sides = train.images.shape[1:]
    margin = margin_of(recipe, sides[0])
    images = len(train.labels) * channels * math.prod(side + 2 * margin for side in sides)
    step = units * STEP_BYTES_PER_UNIT * (recipe.batch + recipe.probes)
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else float("inf")
    fits = starts + step + images < 0.95 * free
    home = device if fits else torch.device("cpu")
    resident = step + images + (starts if fits else 0) < 0.95 * free
    lines = [
        f"memory: {_gb(starts)} of saved vectors {'on the device' if fits else 'in pinned host memory'}, about {_gb(step)} "
        f"for a step, {_gb(images)} of images {'on the device' if resident else 'streamed from host memory'}"
    ]
    return home, resident, lines


def _gb(count: float) -> str:
    return f"{count / 1e9:.2f} GB"
