"""`locallip demo`: train a small network with the local bound on the embedded digits, then certify test images.

The recipe is recipes/demo.toml. Every random draw follows from the seed, so a second run on the same machine prints the same
accuracies.
"""

from __future__ import annotations

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

from locallip.certify import Certificate, Verdict, certified_radius, certify, global_lipschitz, local_lipschitz
from locallip.data import load_embedded
from locallip.training.fit import Options, fit
from locallip.training.progress import display
from locallip.training.recipe import find, rescaled
from locallip.zoo import load_model

Say = Callable[..., None]
DOMAIN = (0.0, 1.0)
NEXT_STEPS = """  Your own network:  import locallip as ll; print(ll.certify(model, x, y, eps=0.5))
  Another radius:    locallip demo --eps 1.0 --epochs 30, some minutes     (all options: locallip demo --help)"""


def run(
    eps: float, epochs: int, seed: int, limit: int, images: int, out: Path | None = None, to: TextIO | None = None
) -> Certificate:
    """The whole demo: train on the first `images` training images, certify the first `limit` test images, print both.

    `out` keeps the run folder; without it the run is forgotten. `to` is where it prints, stdout unless given.
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
        folder = out or Path(forgotten) / "run"
        options = Options(out=folder, evaluate=False, announce=out is not None, device=torch.device("cpu"))
        fit(recipe, options, display(quiet=0.0))
        model = load_model(folder)
    # Another stream of random numbers than the one behind the weights: the proof wants its starts independent of them.
    return report(model, *_test_images(limit), eps, seed + 1_000_003, say)


def _test_images(count: int) -> tuple[Tensor, Tensor]:
    """The first `count` test images, (count, 1, 28, 28) in [0, 1], and their labels (count,)."""
    images, labels = load_embedded("test")
    return images[:count].float() / 255, labels[:count]


def report(model: nn.Module, x: Tensor, y: Tensor, eps: float, seed: int, say: Say) -> Certificate:
    """Certify x (N, 1, 28, 28) and print accuracies, bounds and a few of the images."""
    say("\nCertifying", "bold")
    say(f"  {len(x):,} test images, some tens of milliseconds each ...")
    begin = time.perf_counter()
    result = certify(model, x, y, eps, input_domain=DOMAIN, seed=seed)
    seconds = time.perf_counter() - begin
    say(f"  The first {len(x):,} test images at eps = {eps:g}, in {seconds:.1f} s. Guarantee: {result.guarantee.value};")
    say(f"  each certificate is wrong with probability at most {result.failure_prob:g}.\n")
    share = {verdict: result.verdicts.count(verdict) / len(x) for verdict in Verdict}
    clean, certified = 1 - share[Verdict.MISCLASSIFIED], share[Verdict.CERTIFIED]
    by_global = result.decided_by.count("global bound") / len(x)
    say(f"  clean accuracy      {clean:6.1%}   right on the image itself")
    say(f"  attacked accuracy   {clean - share[Verdict.ATTACKED]:6.1%}   right, and an attack (PGD, 20 steps) found nothing")
    say(f"  certified accuracy  {certified:6.1%}   proved: no attack of this size exists", "bold")
    say(f"    the same proof with the global bound in place of the local one: {by_global:.1%}\n")
    _compare_bounds(model, x, eps, result, seed, say)
    _show_examples(model, x, y, result, seed, say)
    say("\nWhat next", "bold")
    say(NEXT_STEPS)
    return result


def _compare_bounds(model: nn.Module, x: Tensor, eps: float, result: Certificate, seed: int, say: Say) -> None:
    """The local bounds that the certificate rests on, against the one bound for all images."""
    general = global_lipschitz(model, x.shape[1:], seed=seed)
    needed = torch.tensor([check.startswith("local bound") or check == "nothing" for check in result.decided_by])
    # What a certificate holds is the bound that was enough for it; this is the tightest.
    local = local_lipschitz(model, x[needed], eps, input_domain=DOMAIN, seed=seed)
    local = local[local.isfinite()]
    say(f"  Lipschitz bound     global {general:.2f} for all images")
    if len(local):
        mean = float(local.mean())
        times = f"{general / mean:.1f} times smaller"
        say(f"                      local  {mean:.2f}, {times}: mean of the {len(local)} images that needed it;")
        say("                      the global bound or the attack decided the others")


def _show_examples(model: nn.Module, x: Tensor, y: Tensor, result: Certificate, seed: int, say: Say) -> None:
    """Three certified images and the first of every other verdict, three in a row."""
    places = [i for i, v in enumerate(result.verdicts) if v is Verdict.CERTIFIED][:3]
    others = (Verdict.UNKNOWN, Verdict.ATTACKED, Verdict.MISCLASSIFIED)
    places += [result.verdicts.index(verdict) for verdict in others if verdict in result.verdicts]
    some, labels = x[places], y[places]
    radii = certified_radius(model, some, labels, input_domain=DOMAIN, seed=seed + 1)
    with torch.no_grad():
        predicted = model(some).argmax(1)
    pictures = []
    for k, place in enumerate(places):
        about = [f"label {labels[k]}, predicted {predicted[k]}", str(result.verdicts[place])]
        about += [f"certified radius {radii[k]:.2f}" if radii[k] > 0 else "no certified radius"]
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


def figures(result: Certificate, eps: float) -> dict[str, Any]:
    """What the demo found, for a script; accuracies are shares of the images."""
    count = {str(verdict): result.verdicts.count(verdict) for verdict in Verdict}
    clean = 1 - result.verdicts.count(Verdict.MISCLASSIFIED) / len(result.verdicts)
    return {
        "eps": eps,
        "images": len(result.verdicts),
        "guarantee": result.guarantee.value,
        "failure_prob": result.failure_prob,
        "clean": clean,
        "attacked": clean - result.verdicts.count(Verdict.ATTACKED) / len(result.verdicts),
        "certified": int(result.certified.sum()) / len(result.verdicts),
        "verdicts": count,
        "fingerprint": result.fingerprint,
    }


def _speaker(to: TextIO) -> Say:
    """A function that prints a line, in a style where rich is installed and the output is a terminal."""
    try:
        from rich.console import Console
    except ImportError:
        return lambda line, style=None: print(line, file=to, flush=True)
    console = Console(file=to, highlight=False, markup=False)
    return lambda line, style=None: console.print(line, style=style, soft_wrap=True)
