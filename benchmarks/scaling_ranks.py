"""Training and certification in several processes on the CPU, for benchmarks/scaling.py --ranks."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from dataclasses import replace
from typing import Any

import torch
from benchmarks.scaling_cases import MIDDLE, PROGRAM, recipe_of, some_images

from locallip.data import ImageSet, load_images
from locallip.models import build_model, num_parameters
from locallip.processes import Processes
from locallip.proofs import Job, certify_images
from locallip.training.batches import Epoch
from locallip.training.engine import Engine
from locallip.training.recipe import Recipe
from locallip.training.share import share_of
from locallip.zoo import load_model


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
    certified = certified_per_second(together, limit)
    if not together.first:
        return None
    return {
        "step_seconds": round(step_seconds, 4),
        "of_that_for_one_image_per_process": round(fixed_seconds, 4),
        "of_that_for_the_sum_of_gradients": round(sum_seconds, 4),
        "images_trained_per_second": round(batch / step_seconds, 3),
        "images_certified_per_second": round(certified, 3),
    }


def certified_per_second(together: Processes, limit: int) -> float:
    """Images that these processes certify together, once the bound over all inputs is there."""
    seen: list[float] = []

    def say(line: str) -> None:
        seen.append(time.perf_counter())

    job = Job("mnist-4c3f-local-g", "1.58", limit=limit, batch_size=4, seed=0, chunk=4, together=together)
    certify_images(job, load_model("mnist-4c3f-local-g"), _shuffled(load_images("embedded", "test")), say)
    return limit / (time.perf_counter() - seen[0])


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


def _side_by_side(count: int, threads: int, limit: int) -> float:
    """Images a second of so many programs that know nothing of each other: what the machine has to give."""
    words = [sys.executable, str(PROGRAM), "--certify-alone", "--limit", str(limit)]
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
    programs = [subprocess.Popen(words, env=environment, stdout=subprocess.PIPE, text=True) for _ in range(count)]
    return sum(float(program.communicate()[0].strip().splitlines()[-1]) for program in programs)


def all_ranks(ranks: list[int], threads: int, batch: int, steps: int, limit: int) -> dict[str, Any]:
    rows = []
    for count in ranks:
        words = ["--one-of-many", "--batch", str(batch), "--steps", str(steps), "--limit", str(limit)]
        torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={count}"]
        done = subprocess.run(
            [sys.executable, *(torchrun if count > 1 else []), str(PROGRAM), *words],
            env={**os.environ, "OMP_NUM_THREADS": str(threads)},
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
        row = {"processes": count, **json.loads(done.stdout.strip().splitlines()[-1])}
        row["certified_per_second_side_by_side"] = round(_side_by_side(count, threads, limit), 3)
        rows.append(row)
        print(row, flush=True)
    for row in rows:
        for name in ("images_trained_per_second", "images_certified_per_second"):
            row[name.replace("images_", "").replace("_per_second", "_speedup")] = round(row[name] / rows[0][name], 3)
    return {"threads_per_process": threads, "cores": os.cpu_count(), "batch": batch, "images": limit, "rows": rows}
