"""Certify a network of one's own: a residual network with an average pool, trained as usual on handwritten digits.

Nothing here knows of Lipschitz bounds until the last lines: any model made of supported layers can stand in its place.
Runs in half a minute on a CPU; the images come with the package.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import locallip as ll
from locallip.data import load_embedded

EPS = 0.1  # the l2 radius to certify, in the space of the images: here pixels in [0, 1]


class Block(nn.Module):
    """relu(z + conv(relu(conv(z))))."""

    def __init__(self, channels: int):
        super().__init__()
        self.first, self.second = (nn.Conv2d(channels, channels, 3, padding=1) for _ in range(2))

    def forward(self, z: Tensor) -> Tensor:
        return torch.relu(z + self.second(torch.relu(self.first(z))))


def build() -> nn.Sequential:
    return nn.Sequential(
        ll.Normalize([0.13], [0.31]),  # part of the model, so that eps is a distance between raw images
        *(nn.Conv2d(1, 8, 4, stride=2, padding=1), nn.ReLU(), Block(8), nn.AvgPool2d(2)),
        *(nn.Flatten(), nn.Linear(8 * 7 * 7, 10)),
    )


def pixels(split: str, count: int) -> tuple[Tensor, Tensor]:
    images, labels = load_embedded(split)  # type: ignore[arg-type]
    return images[:count].float() / 255, labels[:count]


def train(model: nn.Module, x: Tensor, y: Tensor, epochs: int = 3) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.1)
    for _ in range(epochs):
        for index in torch.randperm(len(x)).split(64):
            loss = F.cross_entropy(model(x[index]), y[index])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()


def main() -> None:
    # An ordinary network, trained in the ordinary way.
    torch.manual_seed(0)
    model = build()
    train(model, *pixels("train", 4000))
    model.eval()  # batch norm and dropout, where there are any, must stand still

    # One verdict per image: does any point of its ball, inside the pixels' range, get another class?
    x, y = pixels("test", 32)
    certificate = ll.certify(model, x, y, EPS, input_domain=(0.0, 1.0))

    # How far the proof reaches for each image, and the Lipschitz bounds: on each ball, and over all inputs.
    few = slice(0, 8)  # a radius takes several proofs
    radii = ll.certified_radius(model, x[few], y[few], input_domain=(0.0, 1.0))
    local, everywhere = ll.local_lipschitz(model, x[few], EPS), ll.global_lipschitz(model, x.shape[1:])

    print(f"eps = {EPS}: {certificate}")
    print(f"Lipschitz bound: {float(local.mean()):.1f} local (mean), {everywhere:.1f} global")
    print("label  verdict        decided by    certified radius")
    for label, verdict, check, radius in zip(y, certificate.verdicts, certificate.decided_by, radii, strict=False):
        print(f"{int(label):5d}  {verdict!s:13s}  {check:12s}  {float(radius):.3f}")


if __name__ == "__main__":
    main()
