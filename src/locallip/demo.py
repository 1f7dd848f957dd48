"""`locallip demo`: train a small network with the local bound on the embedded digits, certify test images, write a report.

The recipe is recipes/demo.toml. Every random draw follows from the seed, so a second run on the same machine prints the same
accuracies.
"""

from __future__ import annotations

import json
import math
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any, TextIO

import torch
from torch import Tensor, nn

from locallip.certify import Verdict, certified_radius, global_lipschitz, local_lipschitz
from locallip.data import ImageSet, load_images, pixels
from locallip.files import write_atomically
from locallip.proofs import Job, certify_images
from locallip.proofs.rows import Row
from locallip.report.explore import Explorer, chosen
from locallip.report.runs import EXPLORED as EXPLORER_FILE
from locallip.report.runs import read_run
from locallip.training.fit import Options, fit
from locallip.training.progress import display
from locallip.training.recipe import find, rescaled
from locallip.zoo import load_model

Say = Callable[..., None]
#: Images of the report's explorer.
EXPLORED = 16
NEXT_STEPS = """  In a clone the command is .venv/bin/locallip, or locallip after `. .venv/bin/activate`.
  Your own network:  import locallip as ll; print(ll.certify(model, x, y, eps=0.5))
  Step by step:      docs/guide.md: train, certify, verify, attack, audit, report
  Another radius:    locallip demo --eps 1.0 --epochs 30, some minutes     (all options: locallip demo --help)"""


def run(
    eps: float,
    epochs: int,
    seed: int,
    limit: int,
    images: int,
    out: Path | None = None,
    page: Path | None = None,
    to: TextIO | None = None,
) -> list[Row]:
    """The whole demo: train on the first `images` training images, certify the first `limit` test images, show both.

    `out` keeps the run folder; without it the run is forgotten. `page` is the report to write. `to` is where it prints,
    stdout unless given.
    """
    say = _speaker(to or sys.stdout)
    base = find("demo")
    target = eps * base.eps_train / float(Fraction(base.eps))
    recipe = replace(base, eps=repr(eps), eps_train=target, seed=seed, images=images)
    recipe = rescaled(recipe, epochs)
    say("Training", "bold")
    say("  A small network learns handwritten digits (MNIST) with the local bound. Its activation is ReLU-theta, a ReLU cut")
    say("  off at a height that is learned. The aim: no change of the pixels (0 to 1) of l2 norm up to")
    say(f"  eps = {eps:g} changes its answer. Training goes to {target / eps:.1f} times that, and eps grows on the way.\n")
    with tempfile.TemporaryDirectory() as forgotten:
        folder = out or Path(forgotten) / "demo"
        options = Options(out=folder, evaluate=False, announce=out is not None, device=torch.device("cpu"))
        fit(recipe, options, display(quiet=0.0))
        model, test = load_model(folder), load_images("embedded", "test")
        # Another stream of random numbers than the one behind the weights: the proof wants its starts independent of them.
        rows = report(model, test, repr(eps), limit, seed + 1_000_003, folder / "certificates.jsonl", say)
        if page is not None:
            _write_page(folder, model, test, repr(eps), rows, page, say)
    say("\nWhat next", "bold")
    say(NEXT_STEPS)
    return rows


def report(model: nn.Module, test: ImageSet, eps: str, limit: int, seed: int, out: Path, say: Say) -> list[Row]:
    """Certify the first test images, and print accuracies, bounds and a few of the images."""
    say("\nCertifying", "bold")
    say(f"  {limit:,} test images, some tens of milliseconds each ...")
    begin = time.perf_counter()
    job = Job(model_name="demo", eps=eps, limit=limit, batch_size=32, seed=seed, out=out)
    rows, settings, _ = certify_images(job, model, test)
    seconds = time.perf_counter() - begin
    say(f"  The first {limit:,} test images at eps = {float(eps):g}, in {seconds:.1f} s. Guarantee: {settings.guarantee};")
    say(f"  each certificate is wrong with probability at most {settings.failure_prob:g}.\n")
    share = {verdict: sum(row.verdict == verdict for row in rows) / len(rows) for verdict in Verdict}
    clean, certified = 1 - share[Verdict.MISCLASSIFIED], share[Verdict.CERTIFIED]
    by_global = sum(row.decided_by == "global bound" for row in rows) / len(rows)
    say(f"  clean accuracy      {clean:6.1%}   right on the image itself")
    say(f"  attacked accuracy   {clean - share[Verdict.ATTACKED]:6.1%}   right, and an attack (PGD, 20 steps) found nothing")
    say(f"  certified accuracy  {certified:6.1%}   proved: no attack of this size exists", "bold")
    say(f"    the same proof with the global bound in place of the local one: {by_global:.1%}\n")
    x = pixels(test.images[:limit])
    _compare_bounds(model, x, eps, rows, seed, say)
    _show_examples(model, x, test.labels[:limit], rows, seed, say)
    return rows


def _write_page(folder: Path, model: nn.Module, test: ImageSet, eps: str, rows: list[Row], page: Path, say: Say) -> None:
    """The report of this run, with some images to explore."""
    say("\nReport", "bold")
    try:
        from locallip.report.build import write_report
    except ImportError:
        say("  There is none without the extra 'report': pip install 'locallip[report]', or '.[report]' in a clone")
        return
    say(f"  Looking into {EXPLORED} images for it ...")
    values = Explorer(model, test, eps, radii=True).run(chosen(EXPLORED, len(test), rows), {row.index: row for row in rows})
    write_atomically(folder / EXPLORER_FILE, (json.dumps(values) + "\n").encode())
    about = write_report([read_run(str(folder))], page)
    say(f"  {page.resolve()} ({about}): open it in a browser", "bold")


def _compare_bounds(model: nn.Module, x: Tensor, eps: str, rows: list[Row], seed: int, say: Say) -> None:
    """The local bounds that the certificates rest on, against the one bound for all images."""
    general = global_lipschitz(model, x.shape[1:], seed=seed)
    needed = torch.tensor([row.decided_by not in ("global bound", "attack", "clean logits") for row in rows])
    # What a row holds is the bound that was enough for it; this is the tightest.
    local = local_lipschitz(model, x[needed], eps, seed=seed)
    local = local[local.isfinite()]
    say(f"  Lipschitz bound     global {general:.2f} for all images")
    if len(local):
        mean = float(local.mean())
        times = f"{general / mean:.1f} times smaller"
        say(f"                      local  {mean:.2f}, {times}: mean of the {len(local)} images that needed it;")
        say("                      the global bound or the attack decided the others")


def _show_examples(model: nn.Module, x: Tensor, y: Tensor, rows: list[Row], seed: int, say: Say) -> None:
    """Three certified images and the first of every other verdict, three in a row."""
    places = [row.index for row in rows if row.verdict == Verdict.CERTIFIED][:3]
    for verdict in (Verdict.UNKNOWN, Verdict.ATTACKED, Verdict.MISCLASSIFIED):
        places += [row.index for row in rows if row.verdict == verdict][:1]
    some, labels = x[places], y[places]
    radii = certified_radius(model, some, labels, seed=seed + 1)
    pictures = []
    for k, place in enumerate(places):
        about = [f"label {labels[k]}, predicted {rows[place].prediction}", rows[place].verdict]
        shown = math.floor(100 * float(radii[k])) / 100  # not above what is proved
        about += [f"certified radius {shown:.2f}" if radii[k] > 0 else "no certified radius"]
        pictures.append(draw(some[k, 0]) + about)
    for start in range(0, len(pictures), 3):
        say("")
        for lines in zip(*pictures[start : start + 3], strict=True):
            say("  " + "".join(f"{line:<26}" for line in lines).rstrip())


def draw(image: Tensor) -> list[str]:
    """The middle 20 x 20 pixels of an image (28, 28) in [0, 1] as 10 lines of text, two pixels to a character."""
    ink = " ▄▀█" if _can_print("▄▀█") else " .'#"
    rows = (image[4:24, 4:24] > 0.4).int()
    return ["".join(ink[2 * int(a) + int(b)] for a, b in zip(rows[i], rows[i + 1], strict=True)) for i in range(0, 20, 2)]


def _can_print(text: str) -> bool:
    try:
        text.encode(sys.stdout.encoding or "ascii")
    except UnicodeEncodeError:
        return False
    return True


def figures(rows: list[Row]) -> dict[str, Any]:
    """What the demo found, for a script; accuracies are shares of the images."""
    count = {str(verdict): sum(row.verdict == verdict for row in rows) for verdict in Verdict}
    share = {name: number / len(rows) for name, number in count.items()}
    clean = 1 - share[Verdict.MISCLASSIFIED]
    return {
        "eps": rows[0].eps,
        "images": len(rows),
        "guarantee": rows[0].guarantee,
        "failure_prob": rows[0].failure_prob,
        "clean": clean,
        "attacked": clean - share[Verdict.ATTACKED],
        "certified": share[Verdict.CERTIFIED],
        "verdicts": count,
    }


def _speaker(to: TextIO) -> Say:
    """A function that prints a line, in a style where rich is installed and the output is a terminal."""
    try:
        from rich.console import Console
    except ImportError:
        return lambda line, style=None: print(line, file=to, flush=True)
    console = Console(file=to, highlight=False, markup=False)
    return lambda line, style=None: console.print(line, style=style, soft_wrap=True)
