"""Evaluate networks again: what the bounds of today prove of the same weights.

    python benchmarks/evaluate_again.py [NAME | RUN ...] --data-root DIR [--out FOLDER] [--limit N]
    python benchmarks/evaluate_again.py RUN ... --figures FOLDER [--out FOLDER]

NAME is a network that comes with the package (all of them if none is named), RUN a run folder, perhaps not evaluated yet.
Writes each result file anew, with the training as it was and under `evaluated` where and by which commit these figures were
measured. With --figures nothing is measured: they are those that another process wrote to FOLDER/RECIPE.json about the same
weights. `locallip.zoo.add_to_zoo` puts them into the index of networks.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from locallip.data import load_images
from locallip.files import write_atomically
from locallip.provenance import ROOT, environment, hardware
from locallip.results import read_result, read_results
from locallip.training.evaluate import evaluate
from locallip.training.recipe import find
from locallip.zoo import load_model, model_cards

EVALUATED = ("commit", "date", "torch", "python", "hardware")


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


def figures_in(folder: Path, recipe: str, weights: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """The evaluation in a result file, and where it was made; an error where it is of other weights."""
    found = read_result(folder / f"{recipe}.json")
    if found.model["sha256"] != weights:
        raise SystemExit(f"{found.path} is about other weights than the run of {recipe}")
    return dict(found.evaluation), dict(found.about)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--data-root", type=Path)
    parser.add_argument("--out", type=Path, default=ROOT / "results" / "runs")
    parser.add_argument("--limit", type=int)
    parser.add_argument("--figures", type=Path)
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
        print(name, flush=True)
        values = json.loads(path.read_text(encoding="utf-8"))
        if args.figures:
            figures, here = figures_in(args.figures, recipe.name, values["model"]["sha256"])
        else:
            images = load_images(recipe.data, "test", args.data_root)
            figures = evaluate(model.to(device), images, recipe.eps, limit=args.limit, seed=recipe.seed, say=print)
            here = {**environment(), "hardware": hardware(device)}
        values["evaluation"] = figures
        values["about"]["evaluated"] = {name: here[name] for name in EVALUATED}
        args.out.mkdir(parents=True, exist_ok=True)
        write_atomically(args.out / f"{recipe.name}.json", (json.dumps(values, indent=1) + "\n").encode())


if __name__ == "__main__":
    main()
