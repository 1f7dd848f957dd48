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
import statistics
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks import record
from benchmarks.scaling_cases import (
    MIDDLE,
    Case,
    apart,
    memory_of,
    moved_one_by_one,
    network,
    recipe_of,
    some_images,
    table_of,
    wait_for,
)
from benchmarks.scaling_lines import all_lines, measure_lines, measure_whole
from benchmarks.scaling_ranks import all_ranks, as_one_of_many, certified_per_second

from locallip.certify import Certifier
from locallip.processes import ALONE, processes
from locallip.training.batches import Epoch
from locallip.training.engine import Engine

#: Images behind which saved vectors are kept; their number costs memory alone, which is known beforehand.
SAMPLES = 4


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


def all_axes(axes: list[str], device: torch.device, jobs: int, steps: int) -> dict[str, Any]:
    """Every case once, and per axis the exponents of what was measured."""
    wanted = moved_one_by_one(axes, device)
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(jobs) as pool:
        lock = Path(folder) / "lock"
        found = dict(zip(wanted, pool.map(lambda case: apart(case, device, lock, steps), wanted), strict=True))
    return table_of(found, axes, ("step_seconds", "step_bytes", "certificate_seconds", "certificate_bytes"), device)


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
    parser.add_argument("--certify-alone", action="store_true")
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
    if args.certify_alone:
        print(certified_per_second(ALONE, args.limit))
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
