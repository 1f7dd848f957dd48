"""`locallip demo`: train a small network with the local bound on the embedded digits, then certify test images.

The numbers of `Recipe` were chosen on the last 1,000 training images while training on the others; the test images took no
part in it. Every random draw follows from the seed, so a second run on the same machine prints the same accuracies.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from locallip.bounds import global_bound, propagate, worst_logits
from locallip.certify import Certificate, Verdict, certified_radius, certify, global_lipschitz
from locallip.data import load_embedded
from locallip.losses import bcp_loss
from locallip.models import convolutional_network, num_parameters
from locallip.network import Network, lower
from locallip.norms import PowerNorm, WarmStarts

Say = Callable[..., None]
DOMAIN = (0.0, 1.0)
NEXT_STEPS = """  Your own network:  import locallip as ll; print(ll.certify(model, x, y, eps=0.5))
  Another radius:    locallip demo --eps 1.0 --epochs 30, some minutes     (all options: locallip demo --help)"""


@dataclass(frozen=True)
class Recipe:
    """What the demo trains and how; convolutions are C(channels, kernel, stride, padding)."""

    convolutions: tuple[tuple[int, int, int, int], ...] = ((16, 4, 2, 1), (32, 4, 2, 1))
    widths: tuple[int, ...] = (100,)
    batch: int = 128
    learning_rate: float = 5e-3
    power_steps: int = 2
    overshoot: float = 1.2  # the ratio of the eps trained for to the eps asked for; the paper trains beyond its eps too
    ramp: float = 0.5  # the share of training in which eps and lambda grow from 0 to their targets

    def network(self) -> nn.Sequential:
        model = convolutional_network(self.convolutions, self.widths, (1, 28, 28), 10, activation="relu_theta")
        for layer in model:
            if isinstance(layer, (nn.Conv2d, nn.Linear)):
                nn.init.orthogonal_(layer.weight)
        return model


RECIPE = Recipe()


def run(eps: float, epochs: int, seed: int, limit: int, images: int) -> Certificate:
    """The whole demo: train on the first `images` training images, certify the first `limit` test images, print both."""
    say = _speaker()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = RECIPE.network()
        x, y = _pixels("train", images)
        say("Training", "bold")
        size = num_parameters(model)
        say(f"  A network of {size:,} parameters learns {len(x):,} handwritten digits (MNIST) with the local bound.")
        say("  Its activation is ReLU-theta, a ReLU cut off at a height that is learned. The aim: no change of the pixels")
        say(f"  (0 to 1) of l2 norm up to eps = {eps:g} changes its answer. Training goes to {RECIPE.overshoot} times that;")
        say("  clean and robust accuracy are those on the training images while eps grows.\n")
        train(model, x, y, eps, epochs, say)
    # Another stream of random numbers than the one behind the weights: the proof wants its starts independent of them.
    return report(model, *_pixels("test", limit), eps, seed + 1_000_003, say)


def _pixels(split: str, count: int) -> tuple[Tensor, Tensor]:
    """The first `count` images, (count, 1, 28, 28) in [0, 1], and their labels (count,)."""
    images, labels = load_embedded(split)  # type: ignore[arg-type]
    return images[:count].float() / 255, labels[:count]


def train(model: nn.Module, x: Tensor, y: Tensor, eps: float, epochs: int, say: Say, recipe: Recipe = RECIPE) -> None:
    """Minimise the BCP mixture (eqn:bcploss) behind the local bound; x (N, 1, 28, 28), y (N,)."""
    network = lower(model, x.shape[1:])
    optimizer = torch.optim.Adam(model.parameters(), recipe.learning_rate)
    starts, shared = WarmStarts(len(x), torch.float32), WarmStarts(1, torch.float32)
    target = eps * recipe.overshoot
    total, done = epochs * -(-len(x) // recipe.batch), 0
    say("  epoch    clean   robust (estimate)     eps   local bound   global bound   seconds")
    for epoch in range(1, epochs + 1):
        begin, grown, shown = time.perf_counter(), 0.0, torch.zeros(4)
        for index in torch.randperm(len(x)).split(recipe.batch):
            grown = min(1.0, done / (recipe.ramp * total))  # the paper's ramps of eps and lambda, but per step
            optimizer.param_groups[0]["lr"] = recipe.learning_rate * min(1.0, 2 * (1 - done / total))
            rules = (
                PowerNorm(recipe.power_steps, starts, index),
                PowerNorm(recipe.power_steps, shared, torch.tensor([0])),
            )
            loss, numbers = _loss(network, x[index], y[index], target * grown, grown, *rules)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            shown += len(index) / len(x) * torch.tensor(numbers)
            done += 1
        clean, robust, local, general = shown.tolist()
        seconds = time.perf_counter() - begin
        say(f"  {epoch:5d} {clean:8.1%} {robust:19.1%} {target * grown:7.2f} {local:13.2f} {general:14.2f} {seconds:9.1f}")


def _loss(
    network: Network, x: Tensor, y: Tensor, eps: float, mix: float, local: PowerNorm, shared: PowerNorm
) -> tuple[Tensor, tuple[float, float, float, float]]:
    """The loss of one batch and what the progress line shows of it; power iteration makes both bounds estimates."""
    ceiling = global_bound(network, shared, x)
    trace = propagate(network, x, torch.full((len(x),), eps), local, ceiling=ceiling)
    logits = worst_logits(network, trace, y, steps=8)
    clean, robust = (float((z.argmax(1) == y).float().mean()) for z in logits)
    shown = clean, robust, float(trace.lipschitz.detach().mean()), float(ceiling.total.detach())
    return bcp_loss(logits, y, mix), shown


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
    _compare_bounds(model, x, result, seed, say)
    _show_examples(model, x, y, result, seed, say)
    say("\nWhat next", "bold")
    say(NEXT_STEPS)
    return result


def _compare_bounds(model: nn.Module, x: Tensor, result: Certificate, seed: int, say: Say) -> None:
    """The local bounds that the certificate rests on, against the one bound for all images."""
    general = global_lipschitz(model, x.shape[1:], seed=seed)
    needed = torch.tensor([check in {"local bound", "nothing"} for check in result.decided_by])
    local = result.lipschitz[needed & result.lipschitz.isfinite()]
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


def _speaker() -> Say:
    """A function that prints a line, in a style where rich is installed and the output is a terminal."""
    try:
        from rich.console import Console
    except ImportError:
        return lambda line, style=None: print(line, flush=True)
    console = Console(highlight=False, markup=False)
    return lambda line, style=None: console.print(line, style=style, soft_wrap=True)
