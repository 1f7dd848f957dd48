"""Compare bounds on one image: from the product of all norms to the local bound with slopes, and what an attack finds.

The true Lipschitz constant on the ball, and the true radius up to which the label is safe, lie between the last row, which
comes from points that were found, and the rows above it, which are proofs. Runs in seconds on a CPU; network and image come
with the package.

    python examples/compare_bounds.py
    python examples/compare_bounds.py --image 7 --eps 1.0     another of the test images, another ball
"""

from __future__ import annotations

import argparse
import math

import torch
from torch import Tensor, nn

import locallip as ll
from locallip.bounds import CeilingNorm, Trace, WorstLogits, global_bound, propagate, worst_logits
from locallip.data import load_embedded
from locallip.norms import LanczosNorm

NETWORK = "mnist-4c3f-local-b"
#: Radii that are tried, as shares of eps, which is the first. The same image at all of them is one batch.
PROVED = torch.tensor([1.0, 0.75, 1.25], dtype=torch.float64)
ATTACKED = torch.tensor([1.0, 0.75, 1.25, 1.5, 1.75, 2.0], dtype=torch.float64)


def leads(logits: Tensor, y: Tensor) -> Tensor:
    """The label's logit minus the best of the others, (B,)."""
    label = nn.functional.one_hot(y, logits.shape[1]).bool()
    return logits[label] - logits.masked_fill(label, -torch.inf).amax(1)


@torch.no_grad()
def proofs(model: nn.Module, x: Tensor, y: Tensor, eps: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
    """By name: a Lipschitz bound and a proved lead of the label, each (B,), one entry per radius."""
    network = ll.lower(model, x.shape[1:])

    def norm() -> LanczosNorm:
        """An upper bound of every norm, except with this probability each; power iteration would approach from below."""
        return LanczosNorm(1e-9, rtol=5e-3, seed=0)  # one seed for all rows, so that they differ by the bound alone

    def bound(trace: Trace, **how: object) -> tuple[Tensor, Tensor]:
        found: WorstLogits = worst_logits(network, trace, y, outward=True, **how)  # type: ignore[arg-type]
        return trace.lipschitz, leads(found.worst, y)

    # `outward=True` counts every rounding against the bound; it wants float64.
    ceiling = global_bound(network, norm(), x, outward=True)
    # 1. One number for all inputs, the product of the layers' norms; two logits differ by at most sqrt(2) eps L.
    everywhere = propagate(network, x, eps, CeilingNorm(ceiling), ceiling=ceiling, outward=True)
    # 2. The paper: units that are constant on the ball are left out of each norm; boxes are cut with eps * product of norms.
    paper = propagate(network, x, eps, norm(), ceiling=ceiling, box_radii="global", outward=True)
    # 3. In sequence: boxes are cut with the local radii found so far, so that more units turn out to be constant.
    local = propagate(network, x, eps, norm(), ceiling=ceiling, outward=True)
    return {
        "global product": bound(everywhere, form="lmt"),
        "paper's local bound": bound(paper, slope_steps=0),
        "sequential local bound": bound(local, slope_steps=0),
        # 4. The same norms, and the worst logits pulled back through the activations: better leads, no other constant.
        "with slopes": bound(local),
    }


def attack(model: nn.Module, x: Tensor, y: Tensor, eps: Tensor, steps: int = 25) -> tuple[Tensor, Tensor]:
    """Gradient ascent on the spheres: the steepest way from x that was found, and the least lead, each (B,)."""
    here = model(x).detach()
    steepest, least = torch.zeros_like(eps), torch.full_like(eps, torch.inf)
    for goal in ("slope", "lead"):  # once to move the logits far, once to take the lead away
        change = torch.randn(x.shape, dtype=x.dtype, generator=torch.Generator().manual_seed(0))
        for _ in range(steps):
            change = (change * _per_image(eps / change.flatten(1).norm(dim=1))).detach().requires_grad_()
            logits = model(x + change)
            slope, lead = (logits - here).norm(dim=1) / eps, leads(logits, y)
            steepest, least = steepest.maximum(slope.detach()), least.minimum(lead.detach())
            (gradient,) = torch.autograd.grad((slope if goal == "slope" else -lead).sum(), change)
            change = change + gradient * _per_image(0.2 * eps / gradient.flatten(1).norm(dim=1).clamp(min=1e-30))
    return steepest, least


def _per_image(values: Tensor) -> Tensor:
    """(B,) in a shape that multiplies images (B, channels, height, width)."""
    return values.reshape(-1, 1, 1, 1)


def at_least(value: Tensor | float) -> str:
    """Rounded down, so that what is printed holds as well."""
    return f">= {math.floor(100 * float(value)) / 100:.2f}"


def at_most(value: Tensor | float) -> str:
    return f"<= {math.ceil(100 * float(value)) / 100:.2f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--image", type=int, default=1, help="which of the test images")
    parser.add_argument("--eps", type=float, default=1.5, help="l2 radius of the ball, for pixels in [0, 1]")
    args = parser.parse_args()

    model = ll.load_model(NETWORK).double()  # float64 holds its weights exactly
    images, labels = load_embedded("test")
    image, label = (images[args.image] / 255).double(), labels[args.image]
    lead = leads(model(image[None]), label[None]).item()
    print(
        f"{NETWORK}, test image {args.image}: label {label}, its lead at the image {lead:.2f}; on the ball of {args.eps:g}:"
    )
    print(f"radii are tried in steps, up to {args.eps:g} for proofs; a row may reach further than it says")
    print(f"{'':24}{'Lipschitz':>12}{'lead':>12}{'safe radius':>14}")

    eps = args.eps * PROVED
    for name, (lipschitz, left) in proofs(model, image.expand(len(eps), -1, -1, -1), label.expand(len(eps)), eps).items():
        # A proof for a ball is one for every smaller ball, so the largest of the radii with a lead counts.
        radius = max([0.0, *eps[left > 0].tolist()])
        print(f"{name:24}{at_most(lipschitz[0]):>12}{at_least(left[0]):>12}{at_least(radius):>14}")

    eps = args.eps * ATTACKED
    slope, left = attack(model, image.expand(len(eps), -1, -1, -1), label.expand(len(eps)), eps)
    broken = eps[left < 0].tolist()
    print(f"{'attack':24}{at_least(slope[0]):>12}{at_most(left[0]):>12}{at_most(min(broken)) if broken else 'unbroken':>14}")


if __name__ == "__main__":
    main()
