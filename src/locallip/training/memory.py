"""Where a run keeps what it needs, decided before it begins."""

from __future__ import annotations

import math
import socket
from dataclasses import dataclass, replace

import torch
from torch import nn

from locallip.data import ImageSet
from locallip.network import lower
from locallip.norms.rows import Rows
from locallip.processes import ALONE, Processes
from locallip.room import free_bytes
from locallip.training.batches import margin_of
from locallip.training.objective import local_places, places
from locallip.training.recipe import Recipe, WrongRecipe

#: What a training step needs beside the saved vectors, per sample of a batch and unit of the network, in bytes: a little
#: more than the most that a run of results/runs needed, weights and all, in bfloat16; twice that in float32.
STEP_BYTES_PER_UNIT = {"bfloat16": 32, "tf32": 64, "float32": 64}
#: Share of the free memory that a plan uses.
USED = 0.95
#: The saved vectors' numbers by the names of recipes.
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "int8": torch.int8, "int4": torch.uint8}

#: What a user can do who has no room for vectors in any number of bits.
WITHOUT_VECTORS = ("starts = 'random' keeps none, with power_steps = 5 or more", "local_layers = 'dense' keeps few")


@dataclass(frozen=True)
class Need:
    """What a run has to keep, in bytes: `starts` by what their numbers are, `step` while it trains on one batch."""

    starts: dict[str, int]
    step: int
    images: int


@dataclass(frozen=True)
class Plan:
    """Where the saved vectors live, as what, whether the images are on the device too, and in how many pieces a batch is
    worked on."""

    device: torch.device
    home: torch.device
    numbers: str
    resident: bool
    need: Need
    pieces: int = 1

    @property
    def dtype(self) -> torch.dtype:
        return DTYPES[self.numbers]

    def __str__(self) -> str:
        starts = self.need.starts.get(self.numbers, 0)
        kept = f"{_gb(starts)} of saved vectors ({self.numbers})" if starts else "no saved vectors"
        where = "" if not starts else " on the device" if self.home == self.device else " in pinned host memory"
        images = "on the device" if self.resident else "streamed from host memory"
        pieces = f" in {self.pieces} pieces" if self.pieces > 1 else ""
        step = f"about {_gb(self.need.step / self.pieces)} for a step{pieces}"
        return f"memory: {kept}{where}, {step}, {_gb(self.need.images)} of images {images}"


def plan_memory(
    recipe: Recipe,
    model: nn.Module,
    train: ImageSet,
    device: torch.device,
    batch: int | None = None,
    together: Processes = ALONE,
) -> Plan:
    """What fits the machine, vectors on the device in as many bits as possible before vectors in host memory.

    `train` and `batch` (default: the recipe's) are those of this process, one of `together`. All of these keep vectors in
    the same bits, the fewest that one of them has room for: their rows go into one checkpoint.
    """
    sharing = together.all_gathered((socket.gethostname(), str(device))).count((socket.gethostname(), str(device)))
    need = needed(recipe, model, train, batch)

    def plan(vectors: str) -> Plan:
        asked = replace(recipe, vectors=vectors)  # type: ignore[arg-type]
        host = free_bytes(torch.device("cpu")) / together.local_size
        if device.type != "cuda":
            return _on_a_cpu(asked, need, device, host)
        return fitting(asked, need, device, torch.cuda.mem_get_info(device)[0] / sharing, host, batch)

    own = plan(recipe.vectors)
    fewest = min(together.all_gathered(own.numbers), key=list(reversed(DTYPES)).index)
    return own if own.numbers == fewest else plan(fewest)


def _on_a_cpu(recipe: Recipe, need: Need, device: torch.device, room: float) -> Plan:
    numbers = "float32" if recipe.vectors == "auto" else recipe.vectors
    if need.starts[numbers] and need.starts[numbers] + need.images > USED * room:
        fewer = [f"vectors = '{few}' fits" for few in ("int8", "int4") if need.starts[few] + need.images < USED * room]
        raise WrongRecipe(
            f"the saved vectors need {_gb(need.starts[numbers])} ({numbers}), and there is {_gb(USED * room)} of memory: "
            + "; ".join([*fewer[:1], *WITHOUT_VECTORS])
        )
    return Plan(device, device, numbers, True, need)


def needed(recipe: Recipe, model: nn.Module, train: ImageSet, batch: int | None = None) -> Need:
    network = lower(model, train.images.shape[1:])
    units = sum(shape.numel() for shape in places(network).values())
    saved = local_places(network, recipe) if recipe.starts == "saved" else {}
    starts = {
        name: len(train.labels) * sum(Rows(dtype).nbytes(shape.numel()) for shape in saved.values())
        for name, dtype in DTYPES.items()
    }
    channels, *sides = train.images.shape[1:]
    margin = margin_of(recipe, sides[0])
    images = len(train.labels) * channels * math.prod(side + 2 * margin for side in sides)
    return Need(starts, units * STEP_BYTES_PER_UNIT[recipe.precision] * ((batch or recipe.batch) + recipe.probes), images)


def fitting(recipe: Recipe, need: Need, device: torch.device, free: float, host: float, batch: int | None = None) -> Plan:
    """The first plan that fits into `free` bytes of the device and `host` bytes beside it; whole batches before pieces."""
    free, host, batch = USED * free, USED * host, batch or recipe.batch
    wanted: list[str] = ["bfloat16", "int8", "int4"] if recipe.vectors == "auto" else [recipe.vectors]
    for pieces in (n for n in range(1, batch + 1) if batch % n == 0):
        step = need.step / pieces
        for numbers in wanted:
            if need.starts[numbers] + step + need.images < free:
                return Plan(device, device, numbers, True, need, pieces)
        # The bus is what host memory costs, so fewer bits come first there.
        for numbers in [name for name in ("int8", "int4", "bfloat16", "float32") if name in wanted]:
            if need.starts[numbers] + need.images < host and step < free:
                return Plan(device, torch.device("cpu"), numbers, step + need.images < free, need, pieces)
    raise WrongRecipe(_nothing_fits(recipe, need, wanted, free, host, batch))


def _nothing_fits(recipe: Recipe, need: Need, wanted: list[str], free: float, host: float, batch: int) -> str:
    least = min(need.starts[numbers] for numbers in wanted)
    room = f"{_gb(free)} of device memory and {_gb(host)} of host memory"
    if need.step / batch > free:
        return f"one image needs about {_gb(need.step / batch)} in a step, and there is {room}: the network is too large"
    if not need.starts["int4"]:
        return f"the images need {_gb(need.images)}, one of them in a step {_gb(need.step / batch)}, and there is {room}"
    ways = list(WITHOUT_VECTORS)
    if need.starts["int4"] + need.step / batch + need.images < free or need.starts["int4"] + need.images < host:
        ways.insert(0, "vectors = 'int4' fits")
    return f"the saved vectors need {_gb(least)}, and there is {room}: {'; '.join(ways)}"


def _gb(count: float) -> str:
    return f"{count / 1e9:.2f} GB"
