"""Evaluate networks again: what the bounds of today prove of the same weights.

    python benchmarks/evaluate_again.py [NAME | RUN ...] --data-root DIR [--out FOLDER] [--limit N]

NAME is a network that comes with the package (all of them if none is named), RUN a run folder, perhaps not evaluated yet.
Writes each result file anew, with the training as it was and under `evaluated` where and by which commit these figures were
measured. `locallip.zoo.add_to_zoo` puts them into the index of networks.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import nn

from locallip.data import load_images
from locallip.files import write_atomically
from locallip.provenance import ROOT, environment, hardware
from locallip.results import read_results
from locallip.training.evaluate import evaluate
from locallip.training.recipe import find
from locallip.zoo import load_model, model_cards

EVALUATED = ("commit", "date", "torch", "python")


def networks(names: list[str]) -> Iterator[tuple[nn.Module, str, Path]]:
    """Networks, the names of their recipes and the files of their results."""
    runs = [Path(name) for name in names if (Path(name) / "result.json").is_file()]
    for run in runs:
        path = run / "result.json"
        yield load_model(run), json.loads(path.read_text(encoding="utf-8"))["recipe"]["name"], path
    if names and len(runs) == len(names):
        return
    files = {result.model["sha256"]: result.path for result in read_results(ROOT / "results")}
    for card in model_cards():
        if not names or card.name in names:
            yield load_model(card.name), card.recipe, files[card.sha256]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--data-root", type=Path)
    parser.add_argument("--out", type=Path, default=ROOT / "results" / "runs")
    parser.add_argument("--limit", type=int)
    args = parser.parse_args()
    known = {card.name for card in model_cards()}
    for name in args.names:
        if name not in known and not (Path(name) / "result.json").is_file():
            parser.error(
                f"{name!r} is no network of the package ({', '.join(sorted(known))}) and no run folder with a result.json"
            )
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    for model, name, path in networks(args.names):
        recipe = find(name)
        images = load_images(recipe.data, "test", args.data_root)
        print(name, flush=True)
        figures = evaluate(model.to(device), images, recipe.eps, limit=args.limit, seed=recipe.seed, say=print)
        values = json.loads(path.read_text(encoding="utf-8"))
        here = environment()
        values["evaluation"] = figures
        values["about"]["evaluated"] = {name: here[name] for name in EVALUATED} | {"hardware": hardware(device)}
        args.out.mkdir(parents=True, exist_ok=True)
        write_atomically(args.out / f"{recipe.name}.json", (json.dumps(values, indent=1) + "\n").encode())


if __name__ == "__main__":
    main()
