"""Verdicts by lines, and all of the method "auto": time and memory along every axis, for benchmarks/scaling.py --lines."""

from __future__ import annotations

import fcntl
import math
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from benchmarks.scaling_cases import Case, apart, memory_of, moved_one_by_one, network, run, some_images, table_of, wait_for

from locallip.bounds.plan import MemoryPlan
from locallip.bounds.relaxation import TOGETHER
from locallip.certify import Certifier
from locallip.data import load_images
from locallip.zoo import load_model

#: Images of a certificate by lines, the radius of their balls as a share of what norms certify, and the axes.
LINES_BATCH, BEYOND, LINES_AXES = 4, 1.5, ("width", "depth", "side", "classes")
#: Images of CIFAR-10, certified in batches of the usual size.
WHOLE_IMAGES = {"cuda": 512, "cpu": 8}


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
    with tempfile.TemporaryDirectory() as folder:
        lock = Path(folder) / "lock"
        found = {case: apart(case, device, lock, 0, "--lines") for case in moved_one_by_one(LINES_AXES, device)}
    whole = []
    for guarantee in ("high_probability", "deterministic"):
        words = ["--whole", guarantee, "--device", device.type, "--memory", str(memory / 1e9)]
        words += [] if data_root is None else ["--data-root", str(data_root)]
        whole.append(run(words))
        print(whole[-1], flush=True)
    names = ("lines_seconds", "lines_bytes", "lines_bytes_said")
    return {**table_of(found, LINES_AXES, names, device), "images": LINES_BATCH, "whole": whole}
