"""No tensor is made on a device of its own choice: one without a place would lie beside a network on a GPU, not on it.

Tensors that are made without one land on the default device. Where that is "meta", which has no values, whatever meets
them fails, so that a processor is enough to find what a GPU would stumble over.
"""

from __future__ import annotations

import pytest
import torch

import locallip as ll
from tests.random_networks import BODIES, random_network


@pytest.fixture
def nowhere(monkeypatch):
    """A default device without values; users who ask for certificates there are told so, which is left out here."""
    monkeypatch.setattr(torch, "get_default_device", lambda: torch.device("cpu"))
    return torch.device("meta")


CASES = [(body, "relu") for body in BODIES]
CASES += [("convolutional", "tanh"), ("convolutional", "clipped_maxmin"), ("dense", "relu_theta")]


@pytest.mark.parametrize(("body", "activation"), CASES)
def test_certificates_need_no_default_device(body, activation, nowhere):
    model, shape = random_network(body, activation, 5, 1.0)
    x = torch.randn(2, *shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    y = model(x).argmax(1)

    def found():
        proved = ll.certify(model, x, y, 0.02, guarantee="deterministic", seed=0)
        ll.certify(model, x, y, 0.3, seed=0, attack_steps=3, branch_seconds=0.05)
        ll.certify(model, x, y, 0.02, seed=0, attack_steps=3, norm="inf")
        radii = ll.certified_radius(model, x[:1], y[:1], guarantee="deterministic", seed=0)
        return proved.verdicts, radii, ll.local_lipschitz(model, x, 0.02, guarantee="deterministic")

    verdicts, radii, bounds = found()
    with nowhere:
        again = found()
    assert again[0] == verdicts
    assert torch.equal(again[1], radii)
    assert torch.equal(again[2], bounds)
