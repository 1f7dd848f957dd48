"""What training and certificates cost: measured, and training continued to sizes that have not been run."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from locallip.models import build_model, num_parameters
from locallip.room import in_words
from locallip.tables import NOTHING, duration, markdown

#: Bytes a second between the GPUs of one machine and between machines, as assumed: NVLink, and a card of 200 Gbit/s.
NEAR, FAR = 300e9, 25e9
#: GPUs of one machine, images of a step on each GPU, and the length of our schedule for Tiny-ImageNet.
GPUS_PER_MACHINE, IMAGES_PER_GPU, EPOCHS = 8, 128, 80
#: Memory of a GPU, as assumed an H200's, what of it a step and the images take, and each GPU's share of 2 TB of its host.
ON_GPU, FOR_STEPS, ON_HOST = 141e9, 25e9, 250e9


@dataclass(frozen=True)
class Data:
    """A data set by its size."""

    name: str
    images: int
    side: int
    classes: int


TINY_IMAGENET = Data("Tiny-ImageNet, 64 x 64", 100_000, 64, 200)
IMAGENET = (Data("ImageNet, 64 x 64", 1_281_167, 64, 1000), Data("ImageNet, 224 x 224", 1_281_167, 224, 1000))


@dataclass(frozen=True)
class Size:
    """Numbers that power iteration works on per image, and parameters."""

    numbers: int
    parameters: int


def size_of(architecture: str, data: Data) -> Size:
    """Counted without making the network."""
    with torch.device("meta"):
        model = build_model(architecture, (3, data.side, data.side), data.classes)
        x, numbers = torch.empty(1, 3, data.side, data.side), 0
    for layer in model:
        if isinstance(layer, (nn.Conv2d, nn.Linear)):
            numbers += x.numel()
        x = layer(x)
    return Size(numbers, num_parameters(model))


def speeds(results: Path) -> str:
    """Epochs of 8C2F at the size of Tiny-ImageNet, with the vectors on the GPU and in host memory."""
    rows = []
    for name in ("train_speed-tiny-cuda", "train_speed-tiny-host"):
        measured = _read(results, name)
        for row in measured.get("rows", []):
            where = "host memory" if "host" in row["net"] else "on the GPU"
            network = "8C2F + MaxMin, 3 power steps" if "maxmin" in row["net"] else "8C2F, 1 power step"
            kept = f"{row['starts_gb']:.1f} GB in 8 bits, {where}"
            seconds, peak = f"{row['seconds_per_epoch']:.1f} s", f"{row['peak_memory_gb']:.1f} GB"
            rows.append([network, kept, seconds, peak, measured["about"]["hardware"]])
    head = ("Network, batch 128", "Saved vectors", "An epoch of 100,000 images", "Peak memory of the GPU", "Hardware")
    return markdown(head, rows) if rows else NOTHING


def ranks(results: Path) -> str:
    """Throughput against the number of processes."""
    measured = _read(results, "scaling-ranks-cpu")
    if not measured:
        return NOTHING
    columns = {
        "images_trained_per_second": "Images trained a second",
        "trained_speedup": "Times one process",
        "images_certified_per_second": "Images certified a second",
        "certified_speedup": "Times one process",
        "certified_per_second_side_by_side": "By as many separate programs",
    }
    columns = {name: word for name, word in columns.items() if name in measured["rows"][0]}
    head = ("Processes", *columns.values())
    rows = [[f"{row['processes']}", *[f"{row[name]:.3g}" for name in columns]] for row in measured["rows"]]
    threads = f"{measured['threads_per_process']} threads each, {measured['cores']} cores"
    about = f"4C3F in batches of {measured['batch']}; certificates of `mnist-4c3f-local-g`. {measured['about']['hardware']}"
    return f"{markdown(head, rows)}\n\n{about.partition(',')[0]}; {threads}."


def restarts(results: Path) -> str:
    """What it costs a training that its saved vectors begin at random again, on a frozen network and in a run."""
    frozen, run = _read(results, "cold_restart-cpu"), _read(results, "cold_restart-run-cuda")
    return "\n\n".join(part(of) for part, of in ((_frozen, frozen), (_gone_on, run)) if of) or NOTHING


def _frozen(measured: Mapping[str, Any]) -> str:
    rows = [
        [str(row["more_steps_in_the_first_epoch"]), *[f"{epoch['product']:.1f} %" for epoch in row["short"]]]
        for row in measured["rows"]
    ]
    epochs = [f"epoch {number}" for number in range(1, len(rows[0]))]
    about = (
        f"How far the product of the norms of all layers stays below the converged one, in the mean of {measured['images']} "
        f"images: weights of `{measured['network']}` as they are, {measured['power_steps']} power steps an epoch."
    )
    return f"{about}\n\n{markdown(('Steps beforehand', *epochs), rows)}"


def _gone_on(measured: Mapping[str, Any]) -> str:
    rows = []
    for row in measured["rows"]:
        cold, warm = row["cold"], row["warm"]
        lost = 100 * (cold["local_bound"] / warm["local_bound"] - 1)
        robust = [f"{100 * figures['robust']:.2f}" for figures in (cold, warm)]
        steps, seconds = str(row["healing_steps"]), f"{row['healing_seconds']:.1f} s"
        rows.append([steps, seconds, str(row["behind_the_restart"]), f"{lost:+.1f} %", *robust])
    head = (
        "Steps beforehand",
        "which took",
        "Epoch behind the restart",
        "Local bound, beside the run that kept its vectors",
        "Estimated robust %",
        "of the run that kept them",
    )
    return f"`{measured['recipe']}` on {measured['about']['hardware']}:\n\n{markdown(head, rows)}"


def exponents(results: Path) -> str:
    """How time and memory grow with each axis, on every machine that was measured."""
    parts = []
    for kind in ("cuda", "cpu"):
        measured = _read(results, f"scaling-{kind}")
        if not measured:
            continue
        names = ("step_seconds", "step_bytes", "certificate_seconds", "certificate_bytes")
        rows = [
            [axis, *[f"{found[name]:.2f}" if name in found else "-" for name in names]] for axis, found in _fitted(measured)
        ]
        head = ("Axis", "Time of a step", "Memory of a step", "Time of a certificate", "Memory of a certificate")
        middle = ", ".join(f"{name} {value}" for name, value in measured["middle"].items())
        picture = f"![What a step and a certificate cost along each axis](images/scaling-{kind}.svg)"
        parts.append(f"{measured['about']['hardware']}, around {middle}:\n\n{markdown(head, rows)}\n\n{picture}")
    return "\n\n".join(parts) or NOTHING


def auto_costs(results: Path) -> str:
    """`method="auto"` beside `method="local"`, from the files auto_cost-*.json that benchmarks/auto_cost.py wrote."""
    parts = []
    for path in sorted(results.glob("auto_cost-*.json")):
        measured = _read(results, path.stem)
        rows = []
        for network in measured["networks"]:
            first = [f"`{network['network']}`", network["guarantee"], str(network["images"])]
            for found in network["verdicts"]:
                shares = [f"{100 * found['certified'][name] / network['images']:.2f}" for name in ("local", "auto")]
                attack = f"{found['attack_steps']} steps of attack" if found["attack_steps"] else "no attack"
                rows.append([*first, f"verdicts, {attack}", *shares, *_both_seconds(found)])
            if "radii" in network:
                found = network["radii"]
                medians = [f"{found['median'][name]:.3g}" for name in ("local", "auto")]
                rows.append([*first[:2], str(found["images"]), "radii", *medians, *_both_seconds(found)])
        head = ("Network", "Guarantee", "Images", "What", "Local", "Auto", "Local, s", "Auto, s", "Auto : local")
        parts.append(f"{measured['about']['hardware']}:\n\n{markdown(head, rows)}")
    return "\n\n".join(parts) or NOTHING


def _both_seconds(found: Mapping[str, Any]) -> list[str]:
    return [*[f"{found['seconds'][name]:.2f}" for name in ("local", "auto")], f"{found['auto : local']:.2f}"]


def lines(results: Path) -> str:
    """What lines take against the size of the network, said and measured, and 6C2F as a whole."""
    parts = []
    for kind in ("cuda", "cpu"):
        measured = _read(results, f"scaling-lines-{kind}")
        if measured:
            parts += [_lines_rows(measured), _lines_exponents(measured), _whole(measured)]
    return "\n\n".join(parts) or NOTHING


def _lines_rows(measured: Mapping[str, Any]) -> str:
    axes = [name for name in measured["middle"] if name != "batch"]
    rows = [
        [
            *[str(row[axis]) for axis in axes],
            f"{row['units']:.0f}",
            f"{row['lines_seconds']:.2f}",
            in_words(row["lines_bytes_said"]),
            in_words(row["lines_bytes"]),
        ]
        for row in measured["rows"]
    ]
    head = (*(axis.capitalize() for axis in axes), "Units", "Seconds an image", "Said beforehand, at most", "Peak")
    return f"{measured['about']['hardware']}, {measured['images']} images at a time:\n\n{markdown(head, rows)}"


def _lines_exponents(measured: Mapping[str, Any]) -> str:
    names = ("lines_seconds", "lines_bytes", "lines_bytes_said")
    rows = [[axis, *[f"{found[name]:.2f}" for name in names]] for axis, found in _fitted(measured)]
    return f"The exponents of that:\n\n{markdown(('Axis', 'Time', 'Peak', 'Said'), rows)}"


def _whole(measured: Mapping[str, Any]) -> str:
    rows = []
    for row in measured["whole"]:
        room = "all" if row["memory"] is None else in_words(row["memory"])
        seconds, peak = f"{row['seconds']:.3f}", in_words(row["bytes"])
        rows.append([row["guarantee"], str(row["images"]), row["data"], room, seconds, peak])
    head = ("Guarantee", "Images", "Of", "Memory that it may take", "Seconds an image", "Peak")
    return f'`cifar10-6c2f-local-b`, eps 36/255, `method="auto"`, attack included:\n\n{markdown(head, rows)}'


def imagenet(results: Path) -> str:
    """8C2F on ImageNet with 1, 8 and 64 GPUs, continued from the epoch measured on Tiny-ImageNet's size."""
    measured = _read(results, "train_speed-tiny-cuda")
    if not measured:
        return NOTHING
    epoch = next(row["seconds_per_epoch"] for row in measured["rows"] if "maxmin" not in row["net"])
    here, rows = size_of("8c2f", TINY_IMAGENET), []
    for data in IMAGENET:
        there = size_of("8c2f", data)
        alone = epoch * data.images / TINY_IMAGENET.images * there.numbers / here.numbers
        for gpus in (1, 8, 64):
            steps = data.images / (IMAGES_PER_GPU * gpus)
            wire = 0.0 if gpus == 1 else 2 * 4 * there.parameters / (NEAR if gpus <= GPUS_PER_MACHINE else FAR)
            seconds = alone / gpus + steps * wire
            kept = data.images * there.numbers / gpus
            cells = [f"{alone / gpus:.0f} s", f"{steps * wire:.0f} s", duration(EPOCHS * seconds)]
            rows.append([data.name, str(gpus), *cells, _size(kept), _size(kept / 2), _home(kept)])
    ours = ("Epoch: arithmetic", "and sums", f"{EPOCHS} epochs", "Vectors per GPU in 8 bits", "in 4 bits", "They fit")
    head = ("Data", "GPUs", *ours)
    small, large = (size_of("8c2f", data) for data in IMAGENET)
    about = (
        f"8C2F has {small.numbers / 1e6:.2f} million numbers an image and {small.parameters / 1e6:.1f} million parameters "
        f"at 64 x 64, {large.numbers / 1e6:.1f} and {large.parameters / 1e6:.1f} million at 224 x 224, with 1,000 classes. "
        f"Assumed are GPUs of {_size(ON_GPU)}, of which steps and images take {_size(FOR_STEPS)}, and "
        f"{_size(ON_HOST * GPUS_PER_MACHINE)} of host memory for {GPUS_PER_MACHINE} of them."
    )
    return f"{markdown(head, rows)}\n\n{about}"


def _home(kept: float) -> str:
    """Where vectors of so many bytes per GPU, in 8 bits, can be kept."""
    if kept <= ON_GPU - FOR_STEPS:
        return "on the GPUs in 8 bits"
    if kept / 2 <= ON_GPU - FOR_STEPS:
        return "on the GPUs in 4 bits"
    if kept / 2 <= ON_HOST:
        return "in host memory"
    return "nowhere: those of dense layers alone, or none"


def _fitted(measured: Mapping[str, Any]) -> list[tuple[str, Mapping[str, float]]]:
    return list(measured["exponents"].items())


def _size(count: float) -> str:
    return f"{count / 1e12:.1f} TB" if count >= 1e12 else f"{count / 1e9:.0f} GB"


def _read(results: Path, name: str) -> dict[str, Any]:
    """A file that a benchmark wrote; empty where it has not been run."""
    path = results / f"{name}.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
