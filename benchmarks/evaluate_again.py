"""Evaluate the networks that come with the package again: what the bounds of today prove of the same weights.

    python benchmarks/evaluate_again.py [NAME ...] --data-root DIR [--out FOLDER] [--limit N]

Writes each network's result file anew, with the training as it was and under `evaluated` where and by which commit these
figures were measured. `locallip.zoo.add_to_zoo` puts them into the index of networks.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch

from locallip.data import load_images
from locallip.files import write_atomically
from locallip.provenance import ROOT, environment, hardware
from locallip.results import read_results
from locallip.training.evaluate import evaluate
from locallip.training.recipe import find
from locallip.zoo import load_model, model_cards

EVALUATED = ("commit", "date", "torch", "python")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--data-root", type=Path)
    parser.add_argument("--out", type=Path, default=ROOT / "results" / "runs")
    parser.add_argument("--limit", type=int)
    args = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    files = {result.model["sha256"]: result.path for result in read_results(ROOT / "results")}
    for card in model_cards():
        if args.names and card.name not in args.names:
            continue
        path = files[card.sha256]
        recipe = find(card.recipe)
        images = load_images(recipe.data, "test", args.data_root)
        model = load_model(card.name).to(device)
        print(card.name, flush=True)
        figures = evaluate(model, images, recipe.eps, limit=args.limit, seed=recipe.seed, say=print)
        values = json.loads(path.read_text(encoding="utf-8"))
        here = environment()
        values["evaluation"] = figures
        values["about"]["evaluated"] = {name: here[name] for name in EVALUATED} | {"hardware": hardware(device)}
        args.out.mkdir(parents=True, exist_ok=True)
        write_atomically(args.out / path.name, (json.dumps(values, indent=1) + "\n").encode())


if __name__ == "__main__":
    main()
