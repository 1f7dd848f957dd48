"""What norms cost and how close they are, on networks that come with the package: tolerances, and proofs in blocks.

    python benchmarks/norm_cost.py [NAME ...] --data-root DIR [--images 2] [--count NAME ...] [--out results]

Per network: the product of the norms over all inputs and its seconds, by Lanczos to several tolerances and by the
deterministic proof, beside 2,000 power steps, which come from below; seconds and mean of the local bound of some test images
under both guarantees. For the networks behind `--count` also how many test images the global bound alone certifies, to the
tolerance that certificates use and to the one of local norms.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import record
from bound_cost import synchronize
from locallip.bounds import global_bound
from locallip.certify import prover
from locallip.certify.inputs import as_eps
from locallip.certify.prover import Prover, exact_arithmetic
from locallip.data import ImageSet, load_images, pixels
from locallip.network import lower
from locallip.norms import LanczosNorm, PowerNorm
from locallip.training.recipe import find
from locallip.zoo import load_model, model_cards

TOLERANCES = ((2e-3, 300), (1e-3, 600), (5e-4, 1000), (2e-4, 2000), (1e-4, 3000))
FAILURE_PROB = 1e-11
NETWORKS = ["mnist-4c3f-local-g", "cifar10-6c2f-local-b"]


def timed(work: Callable[[], Any], device: torch.device) -> tuple[Any, float]:
    synchronize(device)
    begin = time.perf_counter()
    value = work()
    synchronize(device)
    return value, round(time.perf_counter() - begin, 2)


def ceilings(model: nn.Module, shape: tuple[int, ...], device: torch.device) -> list[dict[str, Any]]:
    """The product of norms over all inputs, to each tolerance."""
    network, like = lower(model, shape), torch.ones(1, dtype=torch.float64, device=device)
    rows = []
    for rtol, steps in TOLERANCES:
        rule = LanczosNorm(FAILURE_PROB, rtol, steps, seed=1)
        with exact_arithmetic():
            found, seconds = timed(lambda rule=rule: global_bound(network, rule, like, outward=True).total, device)
        rows.append({"rtol": rtol, "steps": steps, "product": float(found), "seconds": seconds})
    with torch.no_grad():
        rows.append({"power_steps": 2000, "product": float(global_bound(network, PowerNorm(2000, seed=1), like).total)})
    return rows


def local(model: nn.Module, x: Tensor, eps: float, guarantee: str) -> dict[str, Any]:
    """Seconds of the norms over all inputs and of one image's local bound."""
    made, ceiling = timed(lambda: Prover(model, x.shape[1:], guarantee, seed=1), x.device)
    radii = torch.full((len(x),), eps, dtype=torch.float64, device=x.device)
    trace, seconds = timed(lambda: made.trace(x, radii), x.device)
    product = float(made.ceiling.total)
    return {
        "guarantee": guarantee,
        "ceiling": product,
        "ceiling_seconds": ceiling,
        "local_bound": float(trace.lipschitz.mean()),
        "seconds_per_image": round(seconds / len(x), 2),
    }


def by_global_bound(model: nn.Module, images: ImageSet, eps: float, device: torch.device) -> dict[str, int]:
    """Test images that the norms over all inputs certify, to the tolerance of certificates and to that of local norms."""
    counts = {}
    whole = prover.CEILING_RTOL, prover.CEILING_STEPS
    for name, (rtol, steps) in {"as in certificates": whole, "as local norms": TOLERANCES[0]}.items():
        prover.CEILING_RTOL, prover.CEILING_STEPS = rtol, steps
        made, count = Prover(model, images.shape, "high_probability", seed=1), 0
        for first in range(0, len(images), 250):
            part = slice(first, first + 250)
            x, y = pixels(images.images[part], device).double(), images.labels[part].to(device)
            radii = torch.full((len(x),), eps, dtype=torch.float64, device=device)
            count += int((made.margin(x, y, radii, local="none").worst > 0).sum())
        counts[name] = count
    prover.CEILING_RTOL, prover.CEILING_STEPS = whole
    return counts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", default=NETWORKS)
    parser.add_argument("--data-root", type=Path)
    parser.add_argument("--images", type=int, default=2)
    parser.add_argument("--count", nargs="*", default=[])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, default=record.RESULTS)
    args = parser.parse_args()
    begin, device = time.perf_counter(), torch.device(args.device)
    recipes = {card.name: find(card.recipe) for card in model_cards()}
    measured = {}
    for name in args.names:
        recipe, model = recipes[name], load_model(name).to(device)
        images = load_images(recipe.data, "test", args.data_root)
        eps = float(as_eps(recipe.eps, 1, torch.device("cpu")))
        x = pixels(images.images[: args.images], device).double()
        rows: dict[str, Any] = {"eps": recipe.eps, "ceilings": ceilings(model, images.shape, device)}
        rows["local"] = [local(model, x, eps, guarantee) for guarantee in ("high_probability", "deterministic")]
        if name in args.count:
            rows["certified_by_global_bound"] = by_global_bound(model, images, eps, device)
        measured[name] = rows
        print(name, rows, flush=True)
    settings = {"images": args.images, "failure_prob": FAILURE_PROB}
    result = {"settings": settings, "networks": measured}
    print(record.write(f"norm_cost-{device.type}", result, device=device, seed=1, begin=begin, folder=args.out).name)


if __name__ == "__main__":
    main()
