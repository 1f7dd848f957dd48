"""Seconds per epoch of training with the local bound, beside the floor that arithmetic and memory set.

    python benchmarks/train_speed.py                          what this machine has: one GPU, or the CPU
    python benchmarks/train_speed.py --nets 6c2f,4c3f,6c2f-maxmin --precision bfloat16,tf32

On a GPU: the whole training step at CIFAR-10's size (50,000 random images, batch 256, 2 power steps), or for 8c2f at that
of Tiny-ImageNet (100,000 images, batch 128, 1 power step, 3 with MaxMin). On the CPU: the time
of a step against a plain eager transcription of Algorithm 1 (benchmarks/algorithm1.py) in the same run.
"""

from __future__ import annotations

import argparse
import fcntl
import statistics
import sys
import time
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks import record

from locallip.models import build_model
from locallip.training.batches import Epoch, Images
from locallip.training.engine import Engine
from locallip.training.memory import DTYPES
from locallip.training.recipe import Recipe
from locallip.training.schedules import Setting


class Size(NamedTuple):
    """Of the data that a network is trained on, and of a step."""

    shape: tuple[int, int, int]
    classes: int
    count: int
    batch: int
    margin: int


CIFAR10, TINY_IMAGENET = Size((3, 32, 32), 10, 50_000, 256, 4), Size((3, 64, 64), 200, 100_000, 128, 8)
MIDDLE = Setting(1e-4, 0.1551, 0.8)  # a setting from the middle of training: boxes, masks and mixture all at work


def recipe_for(net: str, precision: str, batch: int) -> Recipe:
    """`net` is an architecture, then any of the changes in its name.

    -maxmin, -muon, -balls (boxes from balls alone), -dense (norms per sample in dense layers alone), -compiled (CPU),
    -int8, -int4 (saved vectors in codes; 8c2f needs them), -host (and in host memory).
    """
    architecture, *changes = net.split("-")
    maxmin, tiny = "maxmin" in changes, architecture == "8c2f"
    return Recipe(
        name=f"speed-{net}",
        data="tiny-imagenet" if tiny else "cifar10",
        architecture=architecture,
        activation="clipped_maxmin" if maxmin else "relu_theta",
        method="local-b",
        eps="36/255",
        eps_train=0.1551,
        power_steps=(3 if maxmin else 1) if tiny else 2,
        vectors="int8" if "int8" in changes else "int4" if "int4" in changes else "auto",
        epochs=1,
        batch=batch,
        augment="crop_flip",
        precision=precision,  # type: ignore[arg-type]
        intervals="balls" not in changes,
        optimizer="muon" if "muon" in changes else "adam",
        local_layers="dense" if "dense" in changes else "all",
        probes=8 if "dense" in changes else 0,
    )


def size_of(recipe: Recipe) -> Size:
    return TINY_IMAGENET if recipe.architecture == "8c2f" else CIFAR10


class ConvolutionBytes(TorchDispatchMode):
    """Bytes that convolutions and products must move if each reads its inputs and writes its outputs once."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if any(name in str(func) for name in ("convolution", "addmm", "aten.mm", "aten.linear")):
            tensors = [
                t for t in [*args, *(out if isinstance(out, (tuple, list)) else [out])] if isinstance(t, torch.Tensor)
            ]
            self.elements += sum(t.numel() for t in tensors)
        return out


def floor(recipe: Recipe) -> dict[str, float]:
    """Operations and elements per step, counted on the CPU with batches of 8 and 16 and continued in a straight line."""
    few, more = (_counted(recipe, batch) for batch in (8, 16))
    rise = (recipe.batch - 8) / 8
    return {name: few[name] + rise * (more[name] - few[name]) for name in few}


def _counted(recipe: Recipe, batch: int) -> dict[str, float]:
    torch.manual_seed(0)
    size = size_of(recipe)
    engine = Engine(model(recipe), recipe, size.shape, batch, torch.device("cpu"))
    one = random_images(size, batch, torch.device("cpu")).batch(torch.arange(batch), torch.tensor([[4, 4, 0]] * batch))
    engine.step(one, MIDDLE)
    with FlopCounterMode(display=False) as flops:
        engine.step(one, MIDDLE)
    with ConvolutionBytes() as moved:
        engine.step(one, MIDDLE)
    return {"gflop_per_step": flops.get_total_flops() / 1e9, "gigaelements_per_step": moved.elements / 1e9}


def model(recipe: Recipe) -> torch.nn.Module:
    size = size_of(recipe)
    return build_model(recipe.architecture, size.shape, size.classes, recipe.activation)


def random_images(size: Size, count: int, device: torch.device) -> Images:
    generator = torch.Generator().manual_seed(1)
    images = torch.randint(0, 256, (count, *size.shape), dtype=torch.uint8, generator=generator)
    labels = torch.randint(0, size.classes, (count,), generator=generator)
    return Images(images, labels, size.margin, device)


@contextmanager
def alone(lock: Path | None):
    """Several processes may compile at once, but only one at a time is measured."""
    if lock is None:
        yield
        return
    with lock.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def measure_gpu(net: str, precision: str, batch: int, epochs: int, lock: Path | None, profile: bool) -> dict[str, object]:
    device = torch.device("cuda")
    recipe = recipe_for(net, precision, batch)
    torch.manual_seed(0)
    begin = time.perf_counter()
    size = size_of(recipe)
    images = random_images(size, size.count, device)
    home = torch.device("cpu") if "host" in net else device
    kept = None if recipe.vectors == "auto" else DTYPES[recipe.vectors]
    engine = Engine(model(recipe), recipe, size.shape, size.count, device, starts_on=home, starts_in=kept)
    first = Epoch(size.count, recipe, size.margin, 0)
    for _, one in zip(range(3), first.batches(images), strict=False):
        engine.step(one, MIDDLE)
    torch.cuda.synchronize()
    ready = time.perf_counter() - begin
    with alone(lock):
        times = []
        for number in range(epochs):
            start = time.perf_counter()
            for one in Epoch(size.count, recipe, size.margin, number).batches(images):
                engine.step(one, MIDDLE)
            torch.cuda.synchronize()
            times.append(time.perf_counter() - start)
        if profile:
            show_profile(engine, images, recipe)
    figures = engine.read_figures()
    row = {
        "net": net,
        "precision": precision,
        "batch": batch,
        "seconds_per_epoch": round(statistics.median(times), 3),
        "all_epochs": [round(t, 3) for t in times],
        "ms_per_step": round(statistics.median(times) / len(first) * 1e3, 3),
        "seconds_until_ready": round(ready, 1),
        "peak_memory_gb": round(torch.cuda.max_memory_allocated() / 1e9, 2),
        "starts_gb": round(engine.starts.nbytes() / 1e9, 2) if engine.starts else 0.0,
        "loss": figures["worst_loss"],
    }
    need = floor(recipe)
    row |= {name: round(value, 3) for name, value in need.items()}
    row["floor_ms"] = {
        "arithmetic_790_tflops": round(need["gflop_per_step"] / 790, 3),
        "memory_4_tb_per_s_16_bit": round(need["gigaelements_per_step"] * 2 / 4, 3),
    }
    print(row, flush=True)
    return row


def show_profile(engine: Engine, images: Images, recipe: Recipe) -> None:
    """GPU time by kernel over a few steps, longest first."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as profiler

    size = size_of(recipe)

    with profiler(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as seen:
        for _, one in zip(range(5), Epoch(size.count, recipe, size.margin, 99).batches(images), strict=False):
            engine.step(one, MIDDLE)
        torch.cuda.synchronize()
    rows = [e for e in seen.key_averages() if e.self_device_time_total > 0 and "aten::" not in e.key]
    rows.sort(key=lambda e: -e.self_device_time_total)
    print(f"GPU ms a step: {sum(e.self_device_time_total for e in rows) / 5e3:.3f}")
    for e in rows[:45]:
        print(f"{e.self_device_time_total / 5e3:8.3f} ms {e.count / 5:6.1f} x  {e.key[:150]}")


def measure_cpu(net: str, batch: int, rounds: int) -> dict[str, object]:
    """Our step and the plain one in turns, so that both see the same machine."""
    from benchmarks.algorithm1 import make_step

    device = torch.device("cpu")
    recipe = recipe_for(net, "float32", batch)
    count = 4 * batch
    images = random_images(size_of(recipe), count, device)
    torch.manual_seed(0)
    engine = Engine(model(recipe), recipe, size_of(recipe).shape, count, device, compiled="compiled" in net)
    plain_model = model(recipe)
    plain = make_step(plain_model, count, batch, recipe.power_steps, device)
    ours, theirs = [], []
    for number in range(rounds + 1):
        for one in Epoch(count, recipe, 4, number).batches(images):
            start = time.perf_counter()
            engine.step(one, MIDDLE)
            middle = time.perf_counter()
            plain(one.x, one.y, one.index, MIDDLE.eps, MIDDLE.mix)
            end = time.perf_counter()
            if number:  # the first round warms both up
                ours.append(middle - start)
                theirs.append(end - middle)
    ratio = statistics.median(theirs) / statistics.median(ours)
    row = {
        "net": net,
        "batch": batch,
        "ours_seconds_per_step": round(statistics.median(ours), 3),
        "plain_seconds_per_step": round(statistics.median(theirs), 3),
        "ratio": round(ratio, 2),
        **{name: round(value, 3) for name, value in floor(recipe).items()},
    }
    print(row, flush=True)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nets", default="6c2f")
    parser.add_argument("--precision", default="bfloat16")
    parser.add_argument("--batch", type=int, default=0)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--lock", type=Path)
    parser.add_argument("--out", type=Path, default=record.RESULTS)
    parser.add_argument("--name", default="")
    options = parser.parse_args()
    begin = time.perf_counter()
    gpu = torch.cuda.is_available()
    rows = []
    for net in options.nets.split(","):
        if gpu:
            for precision in options.precision.split(","):
                batch = options.batch or size_of(recipe_for(net, precision, 1)).batch
                rows.append(measure_gpu(net, precision, batch, options.epochs, options.lock, options.profile))
                torch.cuda.empty_cache()
        else:
            rows.append(measure_cpu(net, options.batch or 64, options.epochs))
    device = torch.device("cuda" if gpu else "cpu")
    name = options.name or f"train_speed-{device.type}"
    print(record.write(name, {"rows": rows}, device=device, seed=0, begin=begin, folder=options.out))


if __name__ == "__main__":
    main()
