"""What it costs a training that its saved vectors are lost, as they are where they are too large for checkpoints.

    python benchmarks/cold_restart.py [NAME] --data-root DIR [--images N]
    python benchmarks/cold_restart.py --run COPY --went-on RUN --data-root DIR [--epochs N]

The first form takes a trained network as it is. Vectors begin at random, as behind a resume; every epoch follows them for as
many steps as the recipe has, the first one perhaps for more. Given is how far the norms, and their product over the
layers, stay below the converged ones, in per cent, in the mean over images. The weights of a layer's own vector, which
checkpoints keep, take part as in training.

The second form trains on. COPY is a copy of a run folder from the middle of a run, RUN the folder in which that run went on
with its vectors. Copies of COPY go on for some epochs without them, with and without steps on every image beforehand, on the
same batches and crops, and their figures stand beside those of RUN.
"""

from __future__ import annotations

import argparse
import gc
import json
import shutil
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks import record
from benchmarks.start_bits import CONVERGED, Noting, norms

from locallip.bounds import global_bound, propagate
from locallip.data import load_images, pixels
from locallip.network import Network, lower
from locallip.norms import BatchStarts, NormKey, PowerNorm, WarmStarts
from locallip.training import run as running
from locallip.training.objective import FIGURES, TOWARDS_SHARED, Vectors, places
from locallip.training.progress import display
from locallip.training.recipe import Recipe, find
from locallip.training.run import Run
from locallip.training.run_folder import RunFolder
from locallip.zoo import load_model, model_cards

FIRST_STEPS, EPOCHS = (0, 2, 4, 8, 16), 4


def frozen(network: Network, x: torch.Tensor, recipe: Recipe) -> list[dict[str, Any]]:
    """A row per number of additional steps in the first epoch: what norms and their product lack behind every epoch."""
    eps, one = torch.full((len(x),), recipe.eps_train), torch.zeros(1, dtype=torch.long)
    warm = WarmStarts(len(x), torch.float32)
    true = norms(network, x, eps, warm, CONVERGED)
    noise = {place: warm.jitter(NormKey(*place, ""), shape, x) for place, shape in places(network).items()}
    own = BatchStarts({place: torch.randn(1, *shape) for place, shape in places(network).items()}, noise)
    global_bound(network, PowerNorm(CONVERGED, own, one), eps)
    near = {place: noise[place] + TOWARDS_SHARED * u for place, u in own.vectors.items()}
    rows = []
    for more in FIRST_STEPS:
        torch.manual_seed(1)
        vectors: Vectors = {}
        for place, shape in places(network).items():
            u = torch.randn(len(x), *shape)
            vectors[place] = u / u.flatten(1).norm(dim=1).reshape(-1, *[1] * len(shape))
        row: dict[str, Any] = {"more_steps_in_the_first_epoch": more, "short": []}
        for epoch in range(EPOCHS):
            starts = BatchStarts(vectors, near)
            rule = Noting(recipe.power_steps + (0 if epoch else more), starts, torch.arange(len(x)))
            rule.found = {}
            propagate(network, x, eps, rule, intervals=recipe.intervals)
            vectors = starts.vectors
            ratios = torch.stack([rule.found[key] / true[key] for key in true if key[:2] in vectors])
            row["short"].append(
                {
                    "norm": round(100 * float(1 - ratios.mean()), 3),
                    "worst_layer": round(100 * float(1 - ratios.mean(1).min()), 3),
                    "product": round(100 * float(1 - ratios.prod(0).mean()), 3),
                }
            )
        rows.append(row)
        print(row, flush=True)
    return rows


Figures = dict[int, dict[str, Any]]


def gone_on(copy: Path, data_root: Path | None, epochs: int, healing: int, device: torch.device) -> Figures:
    """The figures of the next epochs without the saved vectors, after so many steps on every image."""
    recipe = Recipe(**json.loads((copy / "config.json").read_text()))
    train = load_images(recipe.data, "train", data_root)
    train = train.take(torch.arange(recipe.images or len(train)))
    run = Run(recipe, train, RunFolder(copy), device, display())
    run.prepare(resume=True)
    if not run.is_cold:
        raise SystemExit(f"{copy} has a checkpoint with its vectors, or is done: there is nothing to compare")
    run.is_cold = healing > 0
    running.HEALING_STEPS = healing
    first, begin = run.step // run.per_epoch + 1, run.seconds
    run.total = min(run.total, (first - 1 + epochs) * run.per_epoch)
    run.train([], None)
    run.engine.release()
    found = {row["epoch"]: row for row in run.folder.metrics() if row["epoch"] >= first}
    spent = run.seconds - begin - sum(row["seconds"] for row in found.values())
    return {epoch: {**figures, "healing_seconds": round(spent, 2)} for epoch, figures in found.items()}


def compared(copy: Path, went_on: Path, data_root: Path | None, epochs: int, device: torch.device) -> list[dict[str, Any]]:
    """A row per epoch and number of steps on every image beforehand: figures without the saved vectors and with them."""
    warm, rows = {row["epoch"]: row for row in RunFolder(went_on).metrics()}, []
    for healing in (0, running.HEALING_STEPS):
        with tempfile.TemporaryDirectory() as folder:
            place = Path(shutil.copytree(copy, Path(folder) / "run"))
            cold = gone_on(place, data_root, epochs, healing, device)
        gc.collect()  # two sets of vectors do not fit
        for number, (epoch, figures) in enumerate(cold.items(), start=1):
            row: dict[str, Any] = {"healing_steps": healing, "epoch": epoch, "behind_the_restart": number}
            row["healing_seconds"] = figures["healing_seconds"]
            for name, shown in (("cold", figures), ("warm", warm[epoch])):
                row[name] = {figure: shown[figure] for figure in (*FIGURES, "local_norms")}
            rows.append(row)
            print(row, flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", nargs="?", default="tiny-imagenet-8c2f-local-b")
    parser.add_argument("--data-root", type=Path)
    parser.add_argument("--images", type=int, default=16)
    parser.add_argument("--run", type=Path)
    parser.add_argument("--went-on", type=Path)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--out", type=Path, default=record.RESULTS)
    options = parser.parse_args()
    begin = time.perf_counter()
    device = torch.device("cuda" if torch.cuda.is_available() and options.run else "cpu")
    if options.run:
        measured: dict[str, Any] = {"epochs": options.epochs}
        measured["rows"] = compared(options.run, options.went_on, options.data_root, options.epochs, device)
        measured["recipe"] = json.loads((options.run / "config.json").read_text())["name"]
        name = f"cold_restart-run-{device.type}"
    else:
        torch.set_grad_enabled(False)
        card = next(card for card in model_cards() if card.name == options.name)
        recipe = replace(find(card.recipe), starts="saved")
        images = load_images(recipe.data, "test", options.data_root)
        x = pixels(images.images[: options.images])
        rows = frozen(lower(load_model(card.name), images.shape), x, recipe)
        measured = {"network": card.name, "images": len(x), "power_steps": recipe.power_steps, "rows": rows}
        name = "cold_restart-cpu"
    print(record.write(name, measured, device=device, seed=1, begin=begin, folder=options.out), flush=True)


if __name__ == "__main__":
    main()
