"""Time and memory of a training step and of a certificate against batch, width, depth, side of the images, classes, ranks.

    python benchmarks/scaling.py                       all axes on this machine's GPU, or its CPU; exponents are fitted
    python benchmarks/scaling.py --axes batch,side --jobs 5
    python benchmarks/scaling.py --lines               lines and the method "auto" on all axes but batch, and on 6C2F
    python benchmarks/scaling.py --ranks 1,2,4         training and certification in several processes on the CPU

The network has `depth` 3x3 convolutions of `width` channels at the full side, two of stride 2 and two dense layers, with
ReLU-theta between them. One axis moves at a time, the others stay at the middle case. A certificate is the local bound under
high_probability, for images that the bound over all inputs does not decide. Each case runs in a process of its own, so that
memory and compiled code are its own; on a GPU several may compile at once (--jobs), but only one at a time is measured.

With --lines a certificate is the verdict by lines with sharpened boxes, slopes included, for LINES_BATCH images in a ball
that norms leave open. Beside seconds and peak bytes stands what the plan of the memory said beforehand. 6C2F stands for
CIFAR-10 as a whole: all of `method="auto"` under either guarantee with the weights that come along, if need be with
random pixels; --memory GB is all that is free.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import math
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks import record

from locallip.bounds.plan import MemoryPlan
from locallip.bounds.relaxation import TOGETHER
from locallip.certify import Certifier
from locallip.data import ImageSet, load_images
from locallip.models import build_model, convolutional_network, num_parameters
from locallip.processes import Processes, processes
from locallip.proofs import Job, certify_images
from locallip.training.batches import Epoch, Images
from locallip.training.engine import Engine
from locallip.training.recipe import Recipe
from locallip.training.schedules import Setting
from locallip.training.share import share_of
from locallip.zoo import load_model

MIDDLE = Setting(1e-4, 0.1, 0.8)
#: Images behind which saved vectors are kept; their number costs memory alone, which is known beforehand.
SAMPLES = 4
#: Images of a certificate by lines, the radius of their balls as a share of what norms certify, and the axes.
LINES_BATCH, BEYOND, LINES_AXES = 4, 1.5, ("width", "depth", "side", "classes")
#: Images of CIFAR-10, certified in batches of the usual size.
WHOLE_IMAGES = {"cuda": 512, "cpu": 8}


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


def measure(case: Case, device: torch.device, lock: Path, steps: int) -> dict[str, float]:
    """Seconds and peak bytes of a training step, then of certificates."""
    torch.manual_seed(0)
    shape = (3, case.side, case.side)
    recipe, model = recipe_of(case.batch), network(case)
    count = SAMPLES * case.batch
    images = some_images(count, shape, case.classes, device)
    before = memory_of(device)
    engine = Engine(model, recipe, shape, count, device)
    batches = list(Epoch(count, recipe, 0, 0).batches(images))
    for one in batches[:3]:
        engine.step(one, MIDDLE)
    wait_for(device)
    with lock.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        times = []
        for number in range(steps):
            begin = time.perf_counter()
            engine.step(batches[number % len(batches)], MIDDLE)
            wait_for(device)
            times.append(time.perf_counter() - begin)
        found = {"step_seconds": statistics.median(times), "step_bytes": memory_of(device) - before}
        engine.release()
        certifier = Certifier(model.eval(), shape, attack_steps=0, batch_size=case.batch, method="local", device=device)
        x = images.pixels[: case.batch].to(device).permute(0, 3, 1, 2).float() / 255
        y = model(x).argmax(1).cpu()
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        begin = time.perf_counter()
        certificate = certifier(x, y, 1.0)
        wait_for(device)
        found["certificate_seconds"] = (time.perf_counter() - begin) / case.batch
        if device.type == "cuda":  # elsewhere the peak of the process is that of the step
            found["certificate_bytes"] = memory_of(device)
        found["left_to_the_local_bound"] = sum("global" not in check for check in certificate.decided_by) / case.batch
    return found


def measure_lines(case: Case, device: torch.device, lock: Path) -> dict[str, float]:
    """Seconds and peak bytes of verdicts by lines, and what the plan said."""
    torch.manual_seed(0)
    shape = (3, case.side, case.side)
    model = network(case).eval().to(device)
    certifier = Certifier(model, shape, guarantee="estimate", power_steps=20, attack_steps=0, seed=0, method="lines")
    prover, plan = certifier.prover, certifier.prover.plan
    x = some_images(LINES_BATCH, shape, case.classes, device).pixels.to(device).permute(0, 3, 1, 2).double() / 255
    logits = prover.clean_logits(x)[0]
    y, first = logits.argmax(1), logits.topk(2).values
    eps = BEYOND * (first[:, 0] - first[:, 1]) / (2**0.5 * prover.ceiling.total)
    before = memory_of(device)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    with lock.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        begin = time.perf_counter()
        found = prover.margin(x, y, eps, local="none", relax="boxes", verdict=True)
        wait_for(device)
        seconds = time.perf_counter() - begin
    return {
        "lines_seconds": seconds / LINES_BATCH,
        "lines_bytes": memory_of(device) - before,
        "lines_bytes_said": float(said(plan, LINES_BATCH, device)),
        "units": float(plan.units),
        "certified_by_lines": float((found.worst > 0).double().mean()),
    }


def said(plan: MemoryPlan, images: int, device: torch.device) -> int:
    """Bytes that lines take at most, by the plan: images, and a part on the way back."""
    return images * plan.image(lines=True) + int(plan.each * plan.numbers(TOGETHER[device.type], images))


def measure_whole(guarantee: str, device: torch.device, data_root: Path | None, memory: float) -> dict[str, Any]:
    """6C2F on CIFAR-10 by all of auto: seconds an image and the peak, of `memory` bytes at most."""
    if device.type == "cuda" and memory < math.inf:
        torch.cuda.set_per_process_memory_fraction(min(1.0, memory / torch.cuda.get_device_properties(device).total_memory))
    model, count = load_model("cifar10-6c2f-local-b").to(device), WHOLE_IMAGES[device.type]
    if data_root is None:
        pixels, y = some_images(count, (3, 32, 32), 10, device).pixels.permute(0, 3, 1, 2), None
    else:
        images = load_images("cifar10", "test", data_root)
        pixels, y = images.images[:count], images.labels[:count]
    x = pixels.to(device).float() / 255
    y = model(x).argmax(1).cpu() if y is None else y
    before = memory_of(device)
    certifier = Certifier(model, (3, 32, 32), guarantee=guarantee, seed=0, device=device)
    if memory < math.inf:
        certifier.prover.plan = replace(certifier.prover.plan, given=memory)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    begin = time.perf_counter()
    certificate = certifier(x, y, "36/255")
    wait_for(device)
    return {
        "guarantee": guarantee,
        "images": count,
        "data": "random pixels" if data_root is None else "test images",
        "memory": None if memory == math.inf else memory,
        "seconds": (time.perf_counter() - begin) / count,
        "bytes": memory_of(device) - (0.0 if device.type == "cuda" else before),
        "bytes_said": certifier.prover.plan.image(True) * 64 + certifier.prover.plan.row,
        "certified": float(certificate.certified.double().mean()),
    }


def all_lines(device: torch.device, data_root: Path | None, memory: float) -> dict[str, Any]:
    """Every case of lines once, the exponents, and 6C2F whole, each in a process of its own."""
    middle, moved = CASES[device.type]
    wanted = dict.fromkeys([middle, *(replace(middle, **{axis: v}) for axis in LINES_AXES for v in moved[axis])])
    with tempfile.TemporaryDirectory() as folder:
        lock = Path(folder) / "lock"
        found = {case: _apart(case, device, lock, 0, "--lines") for case in wanted}
    fitted = {}
    for axis in LINES_AXES:
        line = [found[replace(middle, **{axis: value})] for value in moved[axis]]
        names = ("lines_seconds", "lines_bytes", "lines_bytes_said")
        fitted[axis] = {name: round(exponent(list(moved[axis]), [case[name] for case in line]), 3) for name in names}
    rows = [{**asdict(case), **{k: float(f"{v:.5g}") for k, v in values.items()}} for case, values in found.items()]
    whole = []
    for guarantee in ("high_probability", "deterministic"):
        words = ["--whole", guarantee, "--device", device.type, "--memory", str(memory / 1e9)]
        words += [] if data_root is None else ["--data-root", str(data_root)]
        whole.append(_run(words))
        print(whole[-1], flush=True)
    return {"middle": asdict(middle), "images": LINES_BATCH, "rows": rows, "exponents": fitted, "whole": whole}


def exponent(values: list[float], measured: list[float]) -> float:
    """The slope of a straight line through the logarithms, by least squares."""
    x, y = [math.log(v) for v in values], [math.log(max(m, 1e-12)) for m in measured]
    mean_x, mean_y = statistics.fmean(x), statistics.fmean(y)
    over = sum((a - mean_x) * (b - mean_y) for a, b in zip(x, y, strict=True))
    return over / sum((a - mean_x) ** 2 for a in x)


def all_axes(axes: list[str], device: torch.device, jobs: int, steps: int) -> dict[str, Any]:
    """Every case once, and per axis the exponents of what was measured."""
    middle, moved = CASES[device.type]
    wanted = {middle} | {replace(middle, **{axis: value}) for axis in axes for value in moved[axis]}
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(jobs) as pool:
        lock = Path(folder) / "lock"
        found = dict(zip(wanted, pool.map(lambda case: _apart(case, device, lock, steps), wanted), strict=True))
    rows = [{**asdict(case), **{k: float(f"{v:.5g}") for k, v in found[case].items()}} for case in found]
    fitted = {}
    for axis in axes:
        line = [found[replace(middle, **{axis: value})] for value in moved[axis]]
        names = ("step_seconds", "step_bytes", "certificate_seconds", "certificate_bytes")
        fitted[axis] = {
            name: round(exponent(list(moved[axis]), [case[name] for case in line]), 3)
            for name in names
            if all(case.get(name, 0) > 0 for case in line)
        }
    return {"middle": asdict(middle), "rows": sorted(rows, key=str), "exponents": fitted}


def _apart(case: Case, device: torch.device, lock: Path, steps: int, *more: str) -> dict[str, float]:
    words = ["--case", json.dumps(asdict(case)), "--device", device.type, "--lock", str(lock), "--steps", str(steps)]
    found: dict[str, float] = _run([*words, *more])
    print(case, found, flush=True)
    return found


def _run(words: list[str]) -> dict[str, Any]:
    """What this program says in a process of its own."""
    done = subprocess.run([sys.executable, __file__, *words], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{words}: {done.stderr[-2000:]}")
    return json.loads(done.stdout.strip().splitlines()[-1])


def as_one_of_many(together: Processes, batch: int, steps: int, limit: int) -> dict[str, float] | None:
    """Images a second that these processes train on and certify together, in the first of them."""
    recipe = recipe_of(batch, "4c3f")
    step_seconds = _step_seconds(together, recipe, steps)
    fixed_seconds = _step_seconds(together, replace(recipe, batch=together.size), steps)
    gradients = torch.zeros(num_parameters(build_model("4c3f", (3, 32, 32), 10, "relu_theta")))
    begin = time.perf_counter()
    for _ in range(steps):
        together.add(gradients)
    sum_seconds = (time.perf_counter() - begin) / steps
    digits = load_images("embedded", "test")
    seen: list[float] = []

    def say(line: str) -> None:
        seen.append(time.perf_counter())

    job = Job("mnist-4c3f-local-g", "1.58", limit=limit, batch_size=4, seed=0, chunk=4, together=together)
    certify_images(job, load_model("mnist-4c3f-local-g"), _shuffled(digits), say)
    end = time.perf_counter()
    if not together.first:
        return None
    return {
        "step_seconds": round(step_seconds, 4),
        "of_that_for_one_image_per_process": round(fixed_seconds, 4),
        "of_that_for_the_sum_of_gradients": round(sum_seconds, 4),
        "images_trained_per_second": round(batch / step_seconds, 3),
        "images_certified_per_second": round(limit / (end - seen[0]), 3),
    }


def _step_seconds(together: Processes, recipe: Recipe, steps: int) -> float:
    """The median time of a step, as the slowest process has it."""
    shape, count, device = (3, 32, 32), 4 * recipe.batch, torch.device("cpu")
    share = share_of(recipe.batch, count, together)
    model = build_model(recipe.architecture, shape, 10, "relu_theta")
    engine = Engine(model, recipe, shape, count, device, together=together)
    images = some_images(share.count(count), shape, 10, device)
    batches = list(Epoch(count, recipe, 0, 0, share).batches(images))
    times = []
    for number in range(steps + 1):
        together.wait()
        begin = time.perf_counter()
        engine.step(batches[number % len(batches)], MIDDLE)
        together.wait()
        times.append(time.perf_counter() - begin)
    return statistics.median(times[1:])


def _shuffled(images: ImageSet) -> ImageSet:
    """Hard images and easy ones in no order."""
    return images.take(torch.randperm(len(images), generator=torch.Generator().manual_seed(0)))


def all_ranks(ranks: list[int], threads: int, batch: int, steps: int, limit: int) -> dict[str, Any]:
    rows = []
    for count in ranks:
        words = ["--one-of-many", "--batch", str(batch), "--steps", str(steps), "--limit", str(limit)]
        torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={count}"]
        done = subprocess.run(
            [sys.executable, *(torchrun if count > 1 else []), __file__, *words],
            env={**os.environ, "OMP_NUM_THREADS": str(threads)},
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
        row = {"processes": count, **json.loads(done.stdout.strip().splitlines()[-1])}
        rows.append(row)
        print(row, flush=True)
    for row in rows:
        for name in ("images_trained_per_second", "images_certified_per_second"):
            row[name.replace("images_", "").replace("_per_second", "_speedup")] = round(row[name] / rows[0][name], 3)
    return {"threads_per_process": threads, "cores": os.cpu_count(), "batch": batch, "images": limit, "rows": rows}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--axes", default="batch,width,depth,side,classes")
    parser.add_argument("--ranks", help="numbers of processes instead, such as 1,2,4")
    parser.add_argument("--threads", type=int, default=0, help="of each process (default: cores over the most processes)")
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--limit", type=int, default=128)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--case")
    parser.add_argument("--lock", type=Path)
    parser.add_argument("--one-of-many", action="store_true")
    parser.add_argument("--lines", action="store_true", help="lines and auto instead of training and the local bound")
    parser.add_argument("--data-root", type=Path, help="CIFAR-10 for 6C2F with --lines; random pixels without it")
    parser.add_argument("--memory", type=float, default=math.inf, help="GB that 6C2F may take")
    parser.add_argument("--whole")
    args = parser.parse_args()
    begin, device = time.perf_counter(), torch.device(args.device)
    if args.whole:
        print(json.dumps(measure_whole(args.whole, device, args.data_root, args.memory * 1e9)))
        return
    if args.case and args.lines:
        print(json.dumps(measure_lines(Case(**json.loads(args.case)), device, args.lock)))
        return
    if args.case:
        print(json.dumps(measure(Case(**json.loads(args.case)), device, args.lock, args.steps)))
        return
    if args.one_of_many:
        with processes() as together:
            found = as_one_of_many(together, args.batch, args.steps, args.limit)
        if found:
            print(json.dumps(found))
        return
    if args.ranks:
        ranks = [int(word) for word in args.ranks.split(",")]
        threads = args.threads or max(1, (os.cpu_count() or 1) // max(ranks))
        measured = all_ranks(ranks, threads, args.batch, args.steps, args.limit)
        name, device = "scaling-ranks-cpu", torch.device("cpu")
    elif args.lines:
        measured, name = all_lines(device, args.data_root, args.memory * 1e9), f"scaling-lines-{device.type}"
    else:
        measured = all_axes(args.axes.split(","), device, args.jobs, args.steps)
        name = f"scaling-{device.type}"
    print(record.write(name, measured, device=device, seed=0, begin=begin))


if __name__ == "__main__":
    main()
