"""The local Lipschitz bound as a plug-in of a plain PyTorch loop: train for certified robustness, then certify.

The loop is an ordinary one. What is new in it are three lines that turn a batch into worst logits: logits that no point of
the ball around an image exceeds, relative to the label's. The loss acts on them, and gradients run through them.

    python examples/plug_in_training.py                 10,000 digits that come with the package, minutes on a CPU
    python examples/plug_in_training.py --images 1000   a shorter try
"""

from __future__ import annotations

import argparse

import torch
from torch import Tensor, nn

import locallip as ll
from locallip.bounds import global_bound, propagate, worst_logits
from locallip.data import load_embedded
from locallip.losses import bcp_loss
from locallip.norms import PowerNorm, WarmStarts

EPS = 0.3  # l2 radius to certify, for pixels in [0, 1]
BATCH = 64


def build() -> nn.Sequential:
    """Two convolutions and two dense layers. ReLU-theta is a ReLU that is cut off at a height which is learned.

    Units that stay below 0 or above theta on the whole ball are constant there, and the bound leaves them out: the more
    there are, the smaller it is.
    """
    return nn.Sequential(
        *(nn.Conv2d(1, 16, 4, stride=2, padding=1), ll.ReLUTheta((16, 14, 14))),
        *(nn.Conv2d(16, 16, 4, stride=2, padding=1), ll.ReLUTheta((16, 7, 7))),
        *(nn.Flatten(), nn.Linear(16 * 7 * 7, 64), ll.ReLUTheta(64), nn.Linear(64, 10)),
    )


def digits(split: str, count: int) -> tuple[Tensor, Tensor]:
    """The first images (count, 1, 28, 28) in [0, 1], and their labels (count,)."""
    images, labels = load_embedded(split)  # type: ignore[arg-type]
    return images[:count].float() / 255, labels[:count]


def train(model: nn.Module, x: Tensor, y: Tensor, epochs: int) -> None:
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    # Once, before the loop: the model as stages that the bound walks through. It copies no weights, so it sees every step.
    network = ll.lower(model, x.shape[1:])
    # Power iteration goes on where it ended the last time: a vector per image and layer, and one per layer for the ceiling.
    per_image, per_layer, first = WarmStarts(len(x)), WarmStarts(1), torch.tensor([0])
    for epoch in range(epochs):
        # Begin with plain training and end with the worst logits alone; the radius grows at the same pace.
        grown = epoch / max(epochs - 1, 1)
        right = robust = 0
        for index in torch.randperm(len(x)).split(BATCH):
            images, labels = x[index], y[index]
            eps = torch.full((len(index),), grown * EPS * 1.1)  # a little more than is certified later

            # The plug-in: norms over all inputs, then the bound around each image, then the worst logits.
            ceiling = global_bound(network, PowerNorm(3, per_layer, first), images)
            trace = propagate(network, images, eps, PowerNorm(2, per_image, index), ceiling=ceiling)
            logits = worst_logits(network, trace, labels)

            loss = bcp_loss(logits, labels, mix=grown)  # (1 - mix) * CE(clean) + mix * CE(worst)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            right += int((logits.clean.argmax(1) == labels).sum())
            robust += int((logits.worst.argmax(1) == labels).sum())
        local, everywhere = trace.lipschitz.mean().item(), ceiling.total.item()
        print(f"epoch {epoch + 1:2d}  clean {right / len(x):6.1%}  robust* {robust / len(x):6.1%}", end="  ")
        print(f"local* {local:6.2f}  global* {everywhere:6.2f}")
    print("* estimates by power iteration, on the training images")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=10_000, help="train on the first so many images")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--certify", type=int, default=200, help="certify the first so many test images")
    args = parser.parse_args()

    torch.manual_seed(0)
    model = build()
    train(model, *digits("train", args.images), args.epochs)

    # Nothing from the loop enters the proof: `certify` lowers the model anew and takes norms that hold.
    x, y = digits("test", args.certify)
    print(f"eps = {EPS}: {ll.certify(model.eval(), x, y, EPS)}")


if __name__ == "__main__":
    main()
