"""What `method="auto"` costs and certifies beside `method="local"`, on the same images of the networks that come along.

    python benchmarks/auto_cost.py --data-root DIR [--images 100] [--guarantees deterministic] [--radii 20]
    python benchmarks/auto_cost.py mnist-4c3f-local-b cifar10-6c2f-local-b:40 --data-root DIR    so many images of a network

Per network and guarantee: seconds and certified images of both methods, without the attack and with it, what each check
decided, and, of the first `--radii` images, seconds and median of the certified radii. The norms over all inputs are there
already, which both share. The images are worked on in parts, both methods in turns on each, so that a busy machine slows
both alike. Seconds are those of the processor on a CPU, so that other work on the machine does not count.
"""

from __future__ import annotations

import argparse
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import record
from bound_cost import synchronize
from locallip.certify import Certifier, RadiusFinder
from locallip.data import load_images, pixels
from locallip.training.recipe import find
from locallip.zoo import ModelCard, load_model, model_cards

METHODS = ("local", "auto")


class Watch:
    """Seconds of calls, added up by name."""

    def __init__(self, device: torch.device):
        self.device, self.seconds = device, Counter[str]()
        self._clock = time.perf_counter if device.type == "cuda" else time.process_time

    def __call__(self, name: str, work: Callable[[], Any]) -> Any:
        synchronize(self.device)
        begin = self._clock()
        value = work()
        synchronize(self.device)
        self.seconds[name] += self._clock() - begin
        return value


def wanted(args: argparse.Namespace) -> list[tuple[ModelCard, int]]:
    """The networks that were asked for, and how many images of each."""
    counts = {name: int(count or args.images) for name, _, count in (word.partition(":") for word in args.names)}
    cards = {card.name: card for card in model_cards()}
    if unknown := set(counts) - set(cards):
        raise SystemExit(f"no such network: {', '.join(sorted(unknown))}; there are {', '.join(cards)}")
    return [(card, counts.get(name, args.images)) for name, card in cards.items() if name in counts or not counts]


def images_of(card: ModelCard, args: argparse.Namespace, count: int, device: torch.device) -> tuple[Tensor, Tensor]:
    data = load_images(find(card.recipe).data, "test", args.data_root)
    return pixels(data.images[:count], device).double(), data.labels[:count].to(device)


def verdicts(
    card: ModelCard, x: Tensor, y: Tensor, guarantee: str, steps: int, args: argparse.Namespace, device: torch.device
) -> dict[str, Any]:
    """Both methods on all images, with an attack of so many steps."""
    model, eps = load_model(card.name).to(device), find(card.recipe).eps
    settings = {"guarantee": guarantee, "attack_steps": steps, "batch_size": args.batch, "seed": args.seed}
    certifiers = {name: Certifier(model, x.shape[1:], method=name, device=device, **settings) for name in METHODS}
    watch, decided = Watch(device), {name: Counter[str]() for name in METHODS}
    certified, lost = Counter[str](), 0
    for number, (part, labels) in enumerate(zip(x.split(args.part), y.split(args.part), strict=True)):
        found = {}
        for name in METHODS[:: 1 if number % 2 else -1]:
            found[name] = watch(name, lambda name=name, p=part, t=labels: certifiers[name](p, t, eps))
            decided[name].update(found[name].decided_by)
            certified[name] += int(found[name].certified.sum())
        lost += int((found["local"].certified & ~found["auto"].certified).sum())
    return {
        "attack_steps": steps,
        "certified": {name: certified[name] for name in METHODS},
        "certified_by_local_alone": lost,
        "seconds": {name: round(watch.seconds[name], 3) for name in METHODS},
        "auto : local": round(watch.seconds["auto"] / watch.seconds["local"], 3),
        "decided_by": {name: dict(decided[name].most_common()) for name in METHODS},
    }


def radii(
    card: ModelCard, x: Tensor, y: Tensor, guarantee: str, args: argparse.Namespace, device: torch.device
) -> dict[str, Any]:
    """Certified radii of images by both methods."""
    model = load_model(card.name).to(device)
    settings = {"guarantee": guarantee, "batch_size": args.batch, "seed": args.seed, "device": device}
    finders = {name: RadiusFinder(model, x.shape[1:], method=name, **settings) for name in METHODS}
    watch = Watch(device)
    found = {name: watch(name, lambda name=name: finders[name](x, y)) for name in METHODS}
    right = found["local"] > 0
    return {
        "images": len(x),
        "median": {name: float(f"{float(value[right].median()):.5g}") for name, value in found.items()},
        "smaller_by_auto": int((found["auto"] < 0.995 * found["local"]).sum()),
        "seconds": {name: round(watch.seconds[name], 3) for name in METHODS},
        "auto : local": round(watch.seconds["auto"] / watch.seconds["local"], 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="shipped networks, as NAME or NAME:IMAGES; all of them by default")
    parser.add_argument("--data-root", type=Path)
    parser.add_argument("--images", type=int, default=100)
    parser.add_argument("--part", type=int, default=0, help="images that a method works on in its turn (default: --batch)")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--radii", type=int, default=0, help="images whose radii are taken")
    parser.add_argument("--guarantees", nargs="*", default=["high_probability", "deterministic"])
    parser.add_argument("--steps", nargs="*", type=int, default=[0, 20], help="steps of the attack")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--name", help="of the file (default: auto_cost-DEVICE)")
    parser.add_argument("--out", type=Path, default=record.RESULTS)
    args = parser.parse_args()
    args.part = args.part or args.batch
    begin, device, networks = time.perf_counter(), torch.device(args.device), []
    names = ("batch", "part")
    settings = {**{name: getattr(args, name) for name in names}, "threads": torch.get_num_threads(), "failure_prob": 1e-9}
    for card, count in wanted(args):
        x, y = images_of(card, args, count, device)
        for guarantee in args.guarantees:
            found = {"network": card.name, "eps": find(card.recipe).eps, "guarantee": guarantee, "images": len(x)}
            found["verdicts"] = [verdicts(card, x, y, guarantee, steps, args, device) for steps in args.steps]
            if args.radii:
                found["radii"] = radii(card, x[: args.radii], y[: args.radii], guarantee, args, device)
            networks.append(found)
            print(found, flush=True)
            # After every network: the next one may take long.
            measured = {"settings": settings, "networks": networks}
            name = args.name or f"auto_cost-{device.type}"
            path = record.write(name, measured, device=device, seed=args.seed, begin=begin, folder=args.out)
    print(f"written to {path.name}")


if __name__ == "__main__":
    main()
