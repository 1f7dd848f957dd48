"""What a certified radius costs, in runs of `certify` on the same images, beside the search by bisection of before.

    python benchmarks/radius_cost.py [--data-root DIR] [--images 4] [--guarantee high_probability ...] [--out results]

Per network: seconds of `certify` at the radius that the network was trained for, without its attack, of `certified_radius`,
and of the search before it, `bisected` below, on the same images, the norms over all inputs being there already; how many
proofs and other local bounds each took per image; and the radii. Seconds are those of the processor on a CPU, so that other
work on the machine does not count. The MNIST network takes the embedded images; with `--data-root` one of CIFAR-10 follows.
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
from locallip.certify.inputs import as_eps
from locallip.certify.prover import Prover
from locallip.data import load_images, pixels
from locallip.norms import Guarantee
from locallip.training.recipe import find
from locallip.zoo import load_model, model_cards

SHARES = (0.998, 0.995, 0.991, 0.985, 0.977, 0.966, 0.95, 0.92, 0.87, 0.8, 0.65, 0.5)


def bisected(prover: Prover, guide: Prover, x: Tensor, y: Tensor) -> Tensor:
    """Radii by doublings and halvings with 60 power steps, then proofs at shrinking shares."""
    sound = search(prover, x, y, "none", torch.zeros(len(x)).to(x))
    suggested, radii = search(guide, x, y, "all", sound), sound.clone()
    for share in SHARES:
        index = (suggested * share > radii).nonzero()[:, 0]
        if not len(index):
            break
        trial = suggested[index] * share
        proved = prover.margin(x[index], y[index], trial, local="all").worst > 0
        radii[index[proved]] = trial[proved]
        suggested[index[proved]] = 0.0
    return radii


def search(prover: Prover, x: Tensor, y: Tensor, local: Any, low: Tensor) -> Tensor:
    scale = prover.clean_logits(x)[0].abs().amax(1) / prover.ceiling.total
    high = torch.where(low > 0, 2 * low, scale)
    for _ in range(12):
        holds = prover.margin(x, y, high, local=local).worst > 0
        low, high = torch.where(holds, high, low), torch.where(holds, 2 * high, high)
        if not bool(holds.any()):
            break
    for _ in range(12):
        middle = (low + high) / 2
        holds = prover.margin(x, y, middle, local=local).worst > 0
        low, high = torch.where(holds, middle, low), torch.where(holds, high, middle)
    return low


def measured(work: Callable[[], Any], x: Tensor) -> tuple[Any, dict[str, float]]:
    """What `work` gives, its seconds, and per image the bounds that it took, by proof (`proofs`) or not (`guesses`)."""
    count: Counter[str] = Counter()
    whole = Prover.margin

    def counted(self: Prover, x: Tensor, *args: Any, local: Any = "all", **rest: Any) -> Any:
        kind = "unmasked" if local == "none" else "guesses" if self.guarantee is Guarantee.ESTIMATE else "proofs"
        count[kind] += len(x)
        return whole(self, x, *args, local=local, **rest)

    clock = time.perf_counter if x.is_cuda else time.process_time
    Prover.margin = counted  # type: ignore[method-assign,assignment]
    try:
        synchronize(x.device)
        begin = clock()
        value = work()
        synchronize(x.device)
        seconds = clock() - begin
    finally:
        Prover.margin = whole  # type: ignore[method-assign]
    return value, {"seconds": round(seconds, 2), **{name: round(n / len(x), 2) for name, n in count.items()}}


def compare(
    name: str, data: str, eps: str, args: argparse.Namespace, guarantee: str, device: torch.device
) -> dict[str, Any]:
    model, images = load_model(name).to(device), load_images(data, "test", args.data_root)
    x = pixels(images.images[: args.images], device).double()
    y, shape = images.labels[: args.images].to(device), images.shape
    certifier = Certifier(model, shape, guarantee=guarantee, attack_steps=0, seed=1)
    finder = RadiusFinder(model, shape, guarantee=guarantee, seed=1)
    prover = Prover(model, shape, guarantee, probes=len(SHARES), seed=1)
    guide = Prover(model, shape, "estimate", power_steps=60, seed=2)
    verdicts, certify = measured(lambda: certifier(x, y, as_eps(eps, len(x), device)), x)
    radii, radius = measured(lambda: finder(x, y), x)
    old_radii, before = measured(lambda: bisected(prover, guide, x, y), x)
    gain = (radii / old_radii)[old_radii > 0]
    return {
        "eps": eps,
        "certified": int(verdicts.certified.sum()),
        "certify": certify,
        "certified_radius": radius,
        "bisected": before,
        "certified_radius : certify": round(radius["seconds"] / certify["seconds"], 2),
        "bisected : certified_radius": round(before["seconds"] / radius["seconds"], 2),
        "radii": [round(value, 5) for value in radii.tolist()],
        "radii_bisected": [round(value, 5) for value in old_radii.tolist()],
        "smallest_and_largest_gain": [round(float(gain.min()), 4), round(float(gain.max()), 4)],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-root", type=Path)
    parser.add_argument("--images", type=int, default=4)
    parser.add_argument("--guarantee", nargs="*", default=["high_probability"])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, default=record.RESULTS)
    args = parser.parse_args()
    begin, device = time.perf_counter(), torch.device(args.device)
    recipes = {card.name: find(card.recipe) for card in model_cards()}
    networks = {"mnist-4c3f-local-g": "embedded"}
    if args.data_root is not None:
        networks["cifar10-6c2f-local-b"] = "cifar10"
    result: dict[str, Any] = {"settings": {"images": args.images, "threads": torch.get_num_threads()}, "networks": {}}
    for name, data in networks.items():
        for guarantee in args.guarantee:
            found = compare(name, data, recipes[name].eps, args, guarantee, device)
            result["networks"][f"{name}, {guarantee}"] = found
            print(name, guarantee, found, flush=True)
    print(record.write(f"radius_cost-{device.type}", result, device=device, seed=1, begin=begin, folder=args.out).name)


if __name__ == "__main__":
    main()
