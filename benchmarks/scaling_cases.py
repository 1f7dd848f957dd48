"""The cases of benchmarks/scaling.py: their networks, and a process of its own for each of them."""

from __future__ import annotations

import json
import math
import resource
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from locallip.models import convolutional_network
from locallip.training.batches import Images
from locallip.training.recipe import Recipe
from locallip.training.schedules import Setting

#: The program that measures one case in each process.
PROGRAM = Path(__file__).with_name("scaling.py")
#: Where training stands: rate, radius and mix.
MIDDLE = Setting(1e-4, 0.1, 0.8)


@dataclass(frozen=True)
class Case:
    batch: int
    width: int
    depth: int
    side: int
    classes: int


#: The middle case and the values of each axis, by device: a CPU has small ones.
CASES = {
    "cuda": (
        Case(64, 64, 4, 64, 100),
        {
            "batch": (32, 64, 128, 256),
            "width": (32, 64, 128),
            "depth": (2, 4, 8),
            "side": (32, 64, 128),
            "classes": (10, 100, 1000),
        },
    ),
    "cpu": (
        Case(8, 16, 3, 24, 20),
        {
            "batch": (4, 8, 16, 32),
            "width": (8, 16, 32),
            "depth": (2, 3, 6),
            "side": (16, 24, 48),
            "classes": (10, 20, 200),
        },
    ),
}


def network(case: Case) -> nn.Sequential:
    convolutions = [(case.width, 3, 1, 1)] * case.depth + [(case.width, 4, 2, 1)] * 2
    return convolutional_network(convolutions, (256,), (3, case.side, case.side), case.classes)


def recipe_of(batch: int, architecture: str = "small") -> Recipe:
    return Recipe(
        name="scaling",
        data="tiny-imagenet",
        architecture=architecture,
        method="local-b",
        eps="0.1",
        eps_train=0.1,
        epochs=1,
        batch=batch,
        power_steps=2,
        intervals=False,
    )


def some_images(count: int, shape: tuple[int, int, int], classes: int, device: torch.device) -> Images:
    generator = torch.Generator().manual_seed(1)
    pixels = torch.randint(0, 256, (count, *shape), dtype=torch.uint8, generator=generator)
    return Images(pixels, torch.randint(0, classes, (count,), generator=generator), 0, device)


def memory_of(device: torch.device) -> float:
    """Bytes at the peak so far: of the GPU's allocator, or of the whole process."""
    if device.type == "cuda":
        return float(torch.cuda.max_memory_allocated(device))
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024.0


def wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def exponent(values: Sequence[float], measured: Sequence[float]) -> float:
    """The slope of a straight line through the logarithms, by least squares."""
    x, y = [math.log(v) for v in values], [math.log(max(m, 1e-12)) for m in measured]
    mean_x, mean_y = statistics.fmean(x), statistics.fmean(y)
    over = sum((a - mean_x) * (b - mean_y) for a, b in zip(x, y, strict=True))
    return over / sum((a - mean_x) ** 2 for a in x)


def moved_one_by_one(axes: Sequence[str], device: torch.device) -> list[Case]:
    """The middle case, and every value of each axis with the others at the middle."""
    middle, moved = CASES[device.type]
    return list(dict.fromkeys([middle, *(replace(middle, **{axis: value}) for axis in axes for value in moved[axis])]))


def table_of(
    found: Mapping[Case, Mapping[str, float]], axes: Sequence[str], names: Sequence[str], device: torch.device
) -> dict[str, Any]:
    """Every case with its figures in five digits, and along each axis the exponents of `names` where all are above 0."""
    middle, moved = CASES[device.type]
    rows = [{**asdict(case), **{name: float(f"{v:.5g}") for name, v in figures.items()}} for case, figures in found.items()]
    fitted: dict[str, dict[str, float]] = {}
    for axis in axes:
        line = [found[replace(middle, **{axis: value})] for value in moved[axis]]
        there = [name for name in names if all(figures.get(name, 0) > 0 for figures in line)]
        fitted[axis] = {name: round(exponent(moved[axis], [figures[name] for figures in line]), 3) for name in there}
    return {"middle": asdict(middle), "rows": rows, "exponents": fitted}


def apart(case: Case, device: torch.device, lock: Path, steps: int, *more: str) -> dict[str, float]:
    words = ["--case", json.dumps(asdict(case)), "--device", device.type, "--lock", str(lock), "--steps", str(steps)]
    found: dict[str, float] = run([*words, *more])
    print(case, found, flush=True)
    return found


def run(words: list[str]) -> dict[str, Any]:
    """What this program says in a process of its own."""
    done = subprocess.run([sys.executable, str(PROGRAM), *words], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{words}: {done.stderr[-2000:]}")
    return json.loads(done.stdout.strip().splitlines()[-1])
