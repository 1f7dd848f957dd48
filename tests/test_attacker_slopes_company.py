"""Searches for slopes in float64: no sample depends on those beside it, and none takes more room than was said."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
from torch import nn

import locallip as ll
from locallip.certify import Certifier
from locallip.certify.prover import Prover
from tests.test_plan import Peak

DOUBLE = torch.float64


def network(activation: type[nn.Module], widths: tuple[int, ...], seed: int) -> nn.Module:
    torch.manual_seed(seed)
    layers = [layer for pair in itertools.pairwise(widths) for layer in (nn.Linear(*pair), activation())]
    return nn.Sequential(*layers[:-1]).double().requires_grad_(False)


@pytest.mark.parametrize("activation", [nn.ReLU, nn.Tanh, nn.ELU, nn.Softplus, nn.Sigmoid, ll.MaxMin])
def test_no_margin_depends_on_the_samples_beside_it(activation: type[nn.Module]) -> None:
    """The slope of a tangent is that of its line but for rounding, which decided where a search over curves went."""
    for seed in range(3):
        model = network(activation, (4, 10, 10, 3), seed)
        prover = Certifier(model, (4,), guarantee="deterministic", norm="inf", seed=0).prover
        assert prover.boxes == "slopes"
        x, eps = torch.randn(5, 4, dtype=DOUBLE), torch.full((5,), 0.5, dtype=DOUBLE)
        y = model(x).argmax(1)
        whole = prover.margin(x, y, eps, local="none", relax="slopes", slopes=True).worst
        for i in range(5):
            alone = prover.margin(x[i : i + 1], y[i : i + 1], eps[:1], local="none", relax="slopes", slopes=True).worst
            torch.testing.assert_close(whole[i : i + 1], alone, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("widths", [(2, 4, 1000, 2), (8, 16, 64, 4), (16, 16, 16, 4)], ids=str)
def test_searches_take_no_more_than_is_free(widths: tuple[int, ...]) -> None:
    """A wide layer behind narrow ones has more units than a way back has numbers."""
    model = network(nn.ReLU, widths, 0)
    prover = Prover(model, widths[:1], "estimate", seed=0)
    prover.plan = replace(prover.plan, given=2e8)
    x, eps = torch.randn(64, widths[0], dtype=DOUBLE), torch.full((64,), 0.5, dtype=DOUBLE)
    y = model(x).argmax(1)
    with Peak() as found:
        prover.margin(x, y, eps, local="none", relax=prover.boxes, slopes=False)
    assert found.peak <= prover.plan.free
