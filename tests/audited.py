"""Networks whose certificates are attacked, and one whose exact radii are known."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import locallip as ll
from locallip.audit import Claims, Issuer
from locallip.balls import INF, L2, Ball
from locallip.certify import Certificate, Certifier, Verdict
from locallip.data import load_images
from locallip.norms import Guarantee


def images(count: int) -> tuple[Tensor, Tensor]:
    """Test images (count, 1, 28, 28) in float64, and their labels."""
    found = load_images("embedded", "test")
    return (found.images[:count].float() / 255).double(), found.labels[:count]


def trained(model: nn.Module, steps: int = 60) -> nn.Module:
    """The model after ordinary training steps on digits."""
    found = load_images("embedded", "train")
    optimizer = torch.optim.Adam(model.parameters(), 3e-3)
    for step in range(steps):
        part = slice(64 * step, 64 * (step + 1))
        loss = F.cross_entropy(model(found.images[part].float() / 255), found.labels[part])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model.eval()


def convolutional() -> nn.Module:
    torch.manual_seed(0)
    return trained(ll.build_model("small", (1, 28, 28), 10, "relu_theta"))


def logistic() -> nn.Module:
    """A linear classifier: the boundary lies just where the certificates end."""
    torch.manual_seed(0)
    return trained(nn.Sequential(nn.Flatten(), nn.Linear(784, 10)))


def certifier_of(guarantee: str = "deterministic", **options: object) -> Callable[[nn.Module], Issuer]:
    """No attack before the proof, so that whatever is certified comes out."""

    def make(model: nn.Module) -> Issuer:
        shape = (1, 28, 28) if model[0].__class__.__name__ in ("Flatten", "Conv2d") else (model[0].in_features,)
        return Certifier(model, shape, guarantee=guarantee, attack_steps=0, seed=1, **options)  # type: ignore[arg-type]

    return make


def everything(x: Tensor, y: Tensor, eps: Tensor) -> Certificate:
    """A certifier that certifies whatever it is asked."""
    none = torch.full((len(x),), 1.0, dtype=torch.float64)
    words = [Verdict.CERTIFIED] * len(x), ["nothing"] * len(x)
    return Certificate(*words, none, none, eps, Guarantee.DETERMINISTIC, 0.0, "none", y.tolist())


@torch.no_grad()
def linear_claims(
    count: int = 8, size: int = 20, classes: int = 4, excess: float = 0.0, ball: Ball = L2
) -> tuple[nn.Module, Claims]:
    """A linear network in float64, and claims whose radii are the exact ones times 1 + excess."""
    generator = torch.Generator().manual_seed(3)
    model = nn.Sequential(nn.Linear(size, classes, dtype=torch.float64))
    for value in model.parameters():
        value.copy_(torch.randn(value.shape, generator=generator, dtype=torch.float64))
    x = torch.randn(count, size, generator=generator, dtype=torch.float64)
    logits, weight = model(x), model[0].weight
    y = logits.argmax(1)
    ahead = logits.gather(1, y[:, None]) - logits
    between = (weight[y][:, None] - weight[None]).norm(dim=2, p=1 if ball is INF else 2)  # the dual norm
    radius = (ahead / between).scatter(1, y[:, None], float("inf")).amin(1)
    return model, Claims(x, y, radius * (1 + excess), torch.arange(count), ball)
