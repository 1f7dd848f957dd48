"""The paper's appendix walks through a network of three layers; its numbers are ours."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

import locallip as ll
from locallip.bounds import propagate
from locallip.norms import CholeskyNorm


def toy_network() -> nn.Sequential:
    """x -> W1 -> ReLU-theta -> W2 -> ReLU-theta -> W3, theta = 1."""
    network = nn.Sequential(
        *(nn.Linear(3, 3, bias=False), ll.ReLUTheta(3), nn.Linear(3, 3, bias=False), ll.ReLUTheta(3)),
        nn.Linear(3, 1, bias=False),
    )
    with torch.no_grad():
        network[0].weight.copy_(torch.diag(torch.tensor([3.0, 2.0, 1.0])))
        network[2].weight.copy_(network[0].weight)
        network[4].weight.fill_(1.0)
    return network


X, EPS = torch.tensor([[1.0, -1.0, 0.0]]), 0.1


@pytest.mark.parametrize(
    ("guarantee", "tolerance"), [("deterministic", 1e-9), ("high_probability", 1e-6), ("estimate", 1e-9)]
)
def test_local_is_1_and_global_is_9_sqrt_3(guarantee, tolerance):
    local = ll.local_lipschitz(toy_network(), X, EPS, guarantee=guarantee)
    assert local.item() == pytest.approx(1.0, rel=tolerance)
    assert ll.global_lipschitz(toy_network(), (3,), guarantee=guarantee) == pytest.approx(9 * math.sqrt(3), rel=tolerance)


def test_the_bounds_of_proof_are_not_below():
    assert ll.local_lipschitz(toy_network(), X, EPS, guarantee="deterministic").item() >= 1.0
    assert ll.global_lipschitz(toy_network(), (3,), guarantee="deterministic") >= 9 * math.sqrt(3)


def test_boxes_and_masks_are_those_of_the_appendix():
    network = ll.lower(toy_network(), (3,))
    with torch.no_grad():
        trace = propagate(network, X.double(), torch.tensor([EPS], dtype=torch.float64), CholeskyNorm(), outward=True)
    first, second = trace.boxes
    expected = torch.tensor([[2.7, 3.3], [-2.2, -1.8], [-0.1, 0.1]], dtype=torch.float64)
    torch.testing.assert_close(torch.stack([first.lower[0], first.upper[0]], dim=1), expected, atol=1e-7, rtol=0)
    expected = torch.tensor([[3, 3], [0, 0], [0, 0.1]], dtype=torch.float64)
    torch.testing.assert_close(torch.stack([second.lower[0], second.upper[0]], dim=1), expected, atol=1e-7, rtol=0)
    for varying in trace.varying:
        assert varying.inputs[0].tolist() == [False, False, True]
        assert varying.outputs[0].tolist() == [False, False, True]
