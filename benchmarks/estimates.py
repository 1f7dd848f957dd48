"""How far from below norms come: the bound over all inputs by power iteration and by Lanczos, for so many products each.

python benchmarks/estimates.py [NAME ...]     shipped networks; writes results/estimates-cpu.json
"""

from __future__ import annotations

import sys
import time
from typing import Any

import torch

import record
from locallip.arithmetic import exact_arithmetic
from locallip.bounds import global_bound
from locallip.network import Network, lower
from locallip.norms import NormRule, PowerNorm, RitzNorm
from locallip.zoo import load_model, read_about

NETWORKS = ("mnist-4c3f-local-g", "cifar10-6c2f-local-b")
RULES: dict[str, type[PowerNorm] | type[RitzNorm]] = {"power iteration": PowerNorm, "Lanczos": RitzNorm}
STEPS = {"power iteration": (200, 1000), "Lanczos": (60, 100, 400)}
SEED = 1


def measured(network: Network, rule: NormRule) -> dict[str, float]:
    begin = time.perf_counter()
    with exact_arithmetic():
        product = float(global_bound(network, rule, torch.ones(1, dtype=torch.float64)).total)
    return {"product": product, "seconds": round(time.perf_counter() - begin, 2)}


def rows(name: str) -> list[dict[str, Any]]:
    network = lower(load_model(name), tuple(read_about(name)["input_shape"]))
    return [
        {"rule": title, "steps": steps, **measured(network, rule(steps, seed=SEED))}
        for title, rule in RULES.items()
        for steps in STEPS[title]
    ]


def main() -> None:
    begin = time.perf_counter()
    networks = {name: rows(name) for name in sys.argv[1:] or NETWORKS}
    path = record.write("estimates-cpu", {"networks": networks}, device=torch.device("cpu"), seed=SEED, begin=begin)
    print(f"written to {path.name}")


if __name__ == "__main__":
    main()
