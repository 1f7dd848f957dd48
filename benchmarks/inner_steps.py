"""What steps of the search for slopes of inner boxes bring: median radii of random networks.

    python benchmarks/inner_steps.py [--steps 0,20,40,60]

Networks and inputs are those of bounds.py; 0 steps are boxes by lines alone. Slopes for logits are looked for as well, and
no norms of single inputs are taken.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks import record
from benchmarks.bounds import RANDOM, REACH, brought, median_radius

from locallip.bounds import inner
from locallip.certify.prover import Prover


def radius(prover: Prover, x: Tensor, y: Tensor, norm: str, steps: int) -> float:
    """Where half of the inputs are certified, with so many steps for boxes, and for logits where these have some."""
    inner.STEPS = steps

    def certified(eps: float) -> Tensor:
        radii = torch.full((len(x),), eps, dtype=torch.float64)
        return prover.margin(x, y, radii, local="none", relax="slopes" if steps else "boxes").worst > 0

    return median_radius(certified, *REACH[norm])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", default="0,20,40,60")
    parser.add_argument("--images", type=int, default=20)
    args = parser.parse_args()
    begin, rows = time.perf_counter(), []
    for norm in REACH:
        for name in RANDOM:
            model, x, y = brought(Path(), None, name, args.images)
            prover = Prover(model.eval(), x.shape[1:], "estimate", power_steps=20, seed=0, norm=norm)
            for steps in map(int, args.steps.split(",")):
                found = float(f"{radius(prover, x.double(), y, norm, steps):.4g}")
                rows.append({"norm": norm, "network": name, "steps": steps, "median": found})
                print(rows[-1], flush=True)
    measured = {"images": args.images, "rows": rows}
    print(record.write("inner_steps-cpu", measured, device=torch.device("cpu"), seed=0, begin=begin))


if __name__ == "__main__":
    main()
