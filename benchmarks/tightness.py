"""What each part of the bound adds: certified accuracy, margin, local bound and seconds with one part changed at a time.

    python benchmarks/tightness.py [NAME ...] --data-root DIR [--images 1000] [--batch 250] [--layers dense|all]
    python benchmarks/tightness.py --table

The first form measures shipped networks on their first test images (norms: high probability, 1e-9 per image, one rule for
all rows) and writes results/tightness-DEVICE.json; the second fills docs/tightness.md from these files.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor

import record
from bound_cost import synchronize
from locallip import documents
from locallip.activations import Box
from locallip.bounds import PartlyLocal, Region, Trace, dense_places, propagate, worst_logits
from locallip.bounds.propagate import _Balls
from locallip.certify.inputs import as_eps
from locallip.certify.prover import Prover, exact_arithmetic, lead
from locallip.data import load_images, pixels
from locallip.ops import LinearOp
from locallip.provenance import ROOT
from locallip.training.recipe import find
from locallip.zoo import ModelCard, load_model, model_cards

DOCUMENT = ROOT / "docs" / "tightness.md"
PIXELS = (0.0, 1.0)
MODULE = "locallip.bounds.propagate"
_REACH = _Balls.reach


class Row(NamedTuple):
    """One way to bound: how the boxes are cut, which rows of a trace it can share, and how the last layers are bounded."""

    title: str
    boxes: str
    margin: dict[str, Any]


#: Rows with the same boxes share one propagation, whose seconds count for each.
ROWS = (
    Row("all parts: the default", "local", {}),
    Row("slopes at the last activation only", "local", {"depth": 1}),
    Row("no slopes: last layer over box and ball", "local", {"slope_steps": 0}),
    Row("no slopes, last layer over the ball", "local", {"form": "ball"}),
    Row("no slopes, last layer over the box", "local", {"form": "box"}),
    Row("no slopes, sqrt(2) eps L", "local", {"form": "lmt"}),
    Row("the paper's radii for the boxes, no slopes", "global", {"slope_steps": 0}),
    Row("row norms without masks, no slopes", "unmasked", {"slope_steps": 0}),
    Row("no interval image, no slopes", "balls", {"slope_steps": 0}),
    Row("input domain [0, 1], no slopes", "domain", {"slope_steps": 0}),
    Row("all parts and input domain [0, 1]", "domain", {}),
)


def _unmasked_reach(balls: Any, op: LinearOp, source: int, region: Region) -> Tensor:
    """`_Balls.reach` with the local radius and the row norms of the whole map."""
    return _REACH(balls, op, source, Region(**{**vars(region), "outputs": None}))


def _no_box(box: Box) -> tuple[Tensor, Tensor]:
    """A covering so wide that the interval image says nothing."""
    return torch.zeros_like(box.lower), torch.full_like(box.lower, 1e200)


@contextmanager
def parts(boxes: str) -> Iterator[dict[str, Any]]:
    """The options of `propagate` for one kind of boxes; what has no option is taken out for the time being."""
    if boxes == "unmasked":
        with patch(f"{MODULE}._Balls.reach", _unmasked_reach):
            yield {}
    elif boxes == "balls":
        with patch(f"{MODULE}._covering", _no_box):
            yield {}
    else:
        yield {"global": {"box_radii": "global"}, "domain": {"input_domain": PIXELS}}.get(boxes, {})


class Measured(NamedTuple):
    margin: Tensor
    lipschitz: Tensor
    seconds: float


def measure(card: ModelCard, args: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    recipe = find(card.recipe)
    data = load_images(recipe.data, "test", args.data_root)
    model = load_model(card.name).to(device)
    x, y = pixels(data.images[: args.images], device).double(), data.labels[: args.images].to(device)
    prover = Prover(model, x.shape[1:], "high_probability", seed=args.seed)
    eps = as_eps(recipe.eps, 1, device)
    right = torch.cat([prover.clean_logits(part)[0].argmax(1) for part in x.split(args.batch)]) == y
    x, y = x[right], y[right]
    found: dict[str, list[Measured]] = {row.title: [] for row in ROWS}
    for boxes in dict.fromkeys(row.boxes for row in ROWS):
        for part, labels in zip(x.split(args.batch), y.split(args.batch), strict=True):
            trace, seconds = timed(device, lambda part=part, boxes=boxes: _trace(prover, part, eps, boxes, args))
            for row in (row for row in ROWS if row.boxes == boxes):
                call = lambda row=row, trace=trace, labels=labels: _margin(prover, trace, labels, row)  # noqa: E731
                margin, more = timed(device, call)
                found[row.title].append(Measured(margin, trace.lipschitz, seconds + more))
    rows = []
    for title, batches in found.items():
        margin, bound = torch.cat([b.margin for b in batches]), torch.cat([b.lipschitz for b in batches])
        rows.append(
            {
                "row": title,
                "certified": 100 * int((margin > 0).sum()) / args.images,
                "margin": float(margin.mean()),
                "lipschitz": float(bound.mean()),
                "seconds": round(sum(b.seconds for b in batches), 2),
            }
        )
        print(f"  {title:45} " + "  ".join(f"{k} {v:.4g}" for k, v in rows[-1].items() if k != "row"), flush=True)
    return {"network": card.name, "eps": recipe.eps, "clean": 100 * len(x) / args.images, "rows": rows}


def _trace(prover: Prover, x: Tensor, eps: Tensor, boxes: str, args: argparse.Namespace) -> Trace:
    rule = prover.rule if args.layers == "all" else PartlyLocal(prover.rule, dense_places(prover.network), prover.ceiling)
    with exact_arithmetic(), parts(boxes) as options:
        radii = eps.expand(len(x))
        return propagate(prover.network, x, radii, rule, ceiling=prover.ceiling, outward=True, **options)


def _margin(prover: Prover, trace: Trace, y: Tensor, row: Row) -> Tensor:
    with exact_arithmetic():
        return lead(worst_logits(prover.network, trace, y, outward=True, **row.margin).worst, y)


def timed(device: torch.device, call: Any) -> tuple[Any, float]:
    synchronize(device)
    begin = time.perf_counter()
    value = call()
    synchronize(device)
    return value, time.perf_counter() - begin


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="shipped networks; all of them by default")
    parser.add_argument("--data-root", type=Path)
    parser.add_argument("--images", type=int, default=1000)
    parser.add_argument("--batch", type=int, default=250)
    parser.add_argument("--layers", choices=("dense", "all"), default="all", help="layers with norms of their own per image")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=record.RESULTS)
    parser.add_argument("--table", action="store_true", help="fill docs/tightness.md from results/ and measure nothing")
    args = parser.parse_args()
    if args.table:
        text = documents.filled_from(DOCUMENT.read_text(encoding="utf-8"), record.RESULTS)
        DOCUMENT.write_text(text, encoding="utf-8")
        return
    begin, device = time.perf_counter(), torch.device(args.device)
    networks = []
    for card in model_cards():
        if not args.names or card.name in args.names:
            print(card.name, flush=True)
            networks.append(measure(card, args, device))
    settings = {"images": args.images, "batch": args.batch, "layers": args.layers, "failure_prob": 1e-9}
    measured = {"settings": settings, "networks": networks}
    path = record.write(f"tightness-{device.type}", measured, device=device, seed=args.seed, begin=begin, folder=args.out)
    print(f"written to {path.name}")


if __name__ == "__main__":
    main()
