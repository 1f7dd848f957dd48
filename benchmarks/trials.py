"""A short training on all but some training images and a quick look at those: what the choices in our recipes rest on.

    python benchmarks/trials.py NAME RECIPE [field=value ...] --data-root DIR

RECIPE is a name or a .toml file; `epochs` stretches its schedules. 5,000 training images are held out unless `validation`
says otherwise, and the test images choose nothing. The figures are estimates by power iteration.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks import record

from locallip.bounds import global_bound, propagate, worst_logits
from locallip.data import ImageSet, hold_out, load_images, pixels
from locallip.network import lower
from locallip.norms import PowerNorm
from locallip.training.fit import Options, fit
from locallip.training.recipe import Recipe, find, radius, rescaled
from locallip.zoo import load_model

HELD_OUT = 5000


def changed(recipe: Recipe, fields: list[str]) -> Recipe:
    """The recipe with `name=value` applied, values read as JSON or else as text."""
    values: dict[str, Any] = {}
    for field in fields:
        name, _, text = field.partition("=")
        try:
            values[name] = text if name == "eps" else json.loads(text)
        except ValueError:
            values[name] = text
    if "epochs" in values:
        recipe = rescaled(recipe, values.pop("epochs"))
    return dataclasses.replace(recipe, **{"validation": HELD_OUT, **values})


@torch.no_grad()
def look(model: torch.nn.Module, images: ImageSet, eps: float, device: torch.device, steps: int = 100) -> dict[str, float]:
    """Clean accuracy and estimated robust accuracy in per cent, and the mean local and the global bound."""
    model = model.to(device)
    network = lower(model, images.images.shape[1:])
    radii = torch.full((1,), eps, device=device)
    ceiling = global_bound(network, PowerNorm(300, seed=1), radii)
    clean = robust = 0
    bounds = []
    for start in range(0, len(images.labels), 500):
        x = pixels(images.images[start : start + 500], device)
        y = images.labels[start : start + 500].to(device)
        trace = propagate(network, x, radii, PowerNorm(steps, seed=2), ceiling=ceiling, box_radii="global")
        logits = worst_logits(network, trace, y)
        clean += int((logits.clean.argmax(1) == y).sum())
        robust += int((logits.worst.argmax(1) == y).sum())
        bounds.append(trace.lipschitz.mean())
    share = 100 / len(images.labels)
    found = {"clean": clean * share, "estimate": robust * share}
    return found | {"local_bound": float(torch.stack(bounds).mean()), "global_bound": float(ceiling.total)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name")
    parser.add_argument("recipe")
    parser.add_argument("fields", nargs="*")
    parser.add_argument("--data-root", type=Path)
    parser.add_argument("--out", type=Path, default=record.RESULTS / "trials")
    options = parser.parse_args()
    begin = time.perf_counter()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    recipe = changed(find(options.recipe), options.fields)
    _, held_out = hold_out(load_images(recipe.data, "train", root=options.data_root), recipe.validation)
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        result = fit(recipe, Options(out=run, data_root=options.data_root, evaluate=False, validate=False, device=device))
        last = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])
        found = look(load_model(run), held_out, float(radius(recipe)), device)
    row = {"fields": options.fields, "held_out": found, "last_epoch": last, "training": result["training"]}
    measured = {"recipe": result["recipe"], **row}
    record.write(options.name, measured, device=device, seed=recipe.seed, begin=begin, folder=options.out)
    figures = {name: round(value, 2) for name, value in found.items()}
    shown = {name: round(last[name], 3) for name in ("clean", "robust", "local_bound")}
    seconds = result["training"]["seconds"]
    print(f"TRIAL {options.name} {' '.join(options.fields)} | held out {figures} | training {shown} | {seconds} s")


if __name__ == "__main__":
    main()
