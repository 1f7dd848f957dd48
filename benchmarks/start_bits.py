"""What few bits cost: norms that a power step finds from saved vectors of 16, 8 or 4 bits, against the converged ones.

    python benchmarks/start_bits.py [NAME] --data-root DIR [--images N]

For every layer of a trained network and each of the first test images the masked operator's vector is found by many power
steps, kept as each kind of numbers, read again, and followed for one or two steps. Given is how far, in per cent of the
norm, the result lies below the converged one in the mean over images; a random start stands beside it.
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

from locallip.bounds import propagate
from locallip.data import load_images, pixels
from locallip.network import Network, lower
from locallip.norms import NormKey, PowerNorm, WarmStarts
from locallip.norms.rows import Rows
from locallip.ops import Masked
from locallip.training.memory import DTYPES
from locallip.training.recipe import find
from locallip.zoo import load_model, model_cards

CONVERGED = 200


class Noting(PowerNorm):
    """Power iteration that remembers the norms of all layers."""

    found: dict[NormKey, Tensor]

    def norm(self, op: Masked, key: NormKey, like: Tensor) -> Tensor:
        norm = super().norm(op, key, like)
        self.found[key] = norm
        return norm


def norms(network: Network, x: Tensor, eps: Tensor, starts: WarmStarts, steps: int) -> dict[NormKey, Tensor]:
    rule = Noting(steps, starts, torch.arange(len(x)))
    rule.found = {}
    propagate(network, x, eps, rule)
    return rule.found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", nargs="?", default="cifar10-6c2f-local-b")
    parser.add_argument("--data-root", type=Path)
    parser.add_argument("--images", type=int, default=16)
    parser.add_argument("--out", type=Path, default=record.RESULTS)
    options = parser.parse_args()
    begin = time.perf_counter()
    torch.set_grad_enabled(False)
    card = next(card for card in model_cards() if card.name == options.name)
    recipe = find(card.recipe)
    images = load_images(recipe.data, "test", options.data_root)
    x = pixels(images.images[: options.images])
    network, eps = lower(load_model(card.name), images.shape), torch.full((len(x),), recipe.eps_train)

    kept = WarmStarts(len(x), torch.float32)
    true = norms(network, x, eps, kept, CONVERGED)
    rows = []
    for name, dtype in [*DTYPES.items(), ("random", None)]:
        layout = Rows(dtype or torch.float32)
        row: dict[str, object] = {"numbers": name}
        row["bytes_per_image"] = sum(layout.nbytes(s.numel()) for s in kept.shapes.values()) if dtype else 0
        for steps in (1, 2):
            starts = WarmStarts(len(x), dtype or torch.float32, seed=1)
            starts.prepare(kept.shapes)
            for place, vectors in kept.rows.items():
                if dtype is not None:
                    starts.rows[place].copy_(layout.lay(vectors))
            found = norms(network, x, eps, starts, steps)
            short = [100 * float((1 - found[key] / true[key]).mean()) for key in true if key[:2] in kept.rows]
            row[f"short_after_{steps}"] = {"worst_layer": round(max(short), 3), "mean": round(sum(short) / len(short), 3)}
        rows.append(row)
        print(row, flush=True)
    settings = {"network": card.name, "eps": recipe.eps_train, "images": len(x), "converged_after": CONVERGED}
    cpu = torch.device("cpu")
    print(
        record.write(
            "start_bits-cpu", {"settings": settings, "rows": rows}, device=cpu, seed=1, begin=begin, folder=options.out
        )
    )


if __name__ == "__main__":
    main()
