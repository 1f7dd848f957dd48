"""Networks that others trained and published, where the folder with them stands beside the checkout."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import locallip as ll
from locallip.attacks import margins, pgd_l2
from locallip.data import load_embedded

FOLDER = Path(__file__).resolve().parents[2] / "shared" / "networks"
pytestmark = pytest.mark.skipif(not FOLDER.is_dir(), reason="the published networks are not here")

BUILD = {
    "cap_mnist": lambda: nn.Sequential(
        *(nn.Conv2d(1, 16, 4, 2, 1), nn.ReLU(), nn.Conv2d(16, 32, 4, 2, 1), nn.ReLU(), nn.Flatten()),
        *(nn.Linear(1568, 100), nn.ReLU(), nn.Linear(100, 10)),
    ),
    "lirpa_mnist_fc_3layer": lambda: nn.Sequential(
        *(nn.Flatten(), nn.Linear(784, 128), nn.ReLU(), nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 10)),
    ),
}


def load(name: str) -> nn.Sequential:
    """The network `name` with its weights, stored as 0.weight, 0.bias, 1.weight, ... in the order of the layers."""
    stored, network = load_file(FOLDER / f"{name}.safetensors"), BUILD[name]()
    layers = [layer for layer in network if isinstance(layer, (nn.Conv2d, nn.Linear))]
    for number, layer in enumerate(layers):
        layer.load_state_dict({part: stored[f"{number}.{part}"] for part in ("weight", "bias")})
    return network.eval()


@pytest.mark.parametrize("name", BUILD)
def test_radii_hold_against_attack_and_guarantees_agree(name):
    model = load(name)
    images, labels = load_embedded("test")
    x, y = images[:3].float() / 255, labels[:3]
    proved = ll.certified_radius(model, x, y, guarantee="deterministic", seed=0)
    likely = ll.certified_radius(model, x, y, seed=0)
    torch.testing.assert_close(likely, proved, rtol=0.03, atol=1e-6)
    right = proved > 0
    assert int(right.sum()) >= 3
    general = ll.global_lipschitz(model, (1, 28, 28), guarantee="deterministic")
    lead = margins(model(x).detach().double(), y)
    assert bool((proved[right] > lead[right] / (2**0.5 * general)).all())
    double = model.double()
    found = pgd_l2(double, x[right].double(), y[right], proved[right], steps=40)
    assert bool((margins(double(found).detach(), y[right]) > 0).all())
