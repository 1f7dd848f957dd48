"""The plain transcription of Algorithm 1 that we measure ourselves against computes what the library computes."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import locallip as ll
from locallip.bounds import GlobalBound, Trace, WorstLogits, global_bound, propagate
from locallip.bounds import worst_logits as our_worst_logits
from locallip.losses import bcp_loss
from locallip.models import convolutional_network
from locallip.norms import ExactNorm

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "benchmarks"))
import algorithm1

# (eps, size of the image): with 7 x 7 the stride does not divide the image; the larger eps lets boxes bind less often.
CASES = [(0.05, 8), (0.3, 8), (0.3, 7)]


def network_and_batch(size: int, seed: int = 0) -> tuple[nn.Sequential, Tensor, Tensor]:
    """A network small enough for SVD, its thresholds low enough that units are constant on both sides; in float64."""
    torch.manual_seed(seed)
    model = convolutional_network(((4, 3, 1, 1), (6, 4, 2, 1)), (12, 9), (2, size, size), 5, threshold=0.4)
    for layer in algorithm1.linear_layers(model):
        layer.weight.data *= 1.5
    return model.double(), torch.rand(6, 2, size, size, dtype=torch.float64), torch.randint(0, 5, (6,))


def ours(model: nn.Sequential, x: Tensor, y: Tensor, eps: float) -> tuple[GlobalBound, Trace, WorstLogits]:
    network, radii = ll.lower(model, x.shape[1:]), torch.full((len(x),), eps, dtype=x.dtype)
    ceiling = global_bound(network, ExactNorm(), radii)
    trace = propagate(network, x, radii, ExactNorm(), ceiling=ceiling, box_radii="global")
    return ceiling, trace, our_worst_logits(network, trace, y)


def theirs(model: nn.Sequential, x: Tensor, y: Tensor, eps: float, power_steps: int = 300) -> algorithm1.Worst:
    vectors = algorithm1.Vectors(model, x, 20)
    index = torch.arange(len(x)) * 3
    return algorithm1.compute(model, vectors, x, y, index, eps, power_steps, clip_steps=15)


def close(ours: Tensor, theirs: Tensor, tolerance: float = 1e-4) -> bool:
    return torch.allclose(ours, theirs.reshape(ours.shape), rtol=tolerance, atol=tolerance * float(ours.abs().max()))


@pytest.mark.parametrize(("eps", "size"), CASES)
def test_norms_boxes_and_worst_logits_are_the_librarys(eps, size):
    model, x, y = network_and_batch(size)
    with torch.no_grad():
        ceiling, trace, logits = ours(model, x, y, eps)
        found = theirs(model, x, y, eps)
    for ours_, theirs_ in zip(ceiling.norms.values(), found.global_norms, strict=True):
        assert close(ours_, theirs_)
    for box, masks, lower, upper, rows in zip(
        trace.boxes, trace.varying, found.bounds.lower, found.bounds.upper, found.bounds.rows[:-1], strict=True
    ):
        assert close(box.lower, lower)
        assert close(box.upper, upper)
        assert torch.equal(masks.inputs, rows.bool())
    for ours_, theirs_ in zip(trace.norms.values(), found.local_norms, strict=True):
        assert close(ours_, theirs_)
    assert close(logits.clean, found.logits)
    assert close(logits.worst, found.worst)


def test_the_comparison_sees_constant_units_and_a_binding_box():
    """Else the test above would compare the global bound with itself."""
    model, x, y = network_and_batch(8)
    with torch.no_grad():
        _, trace, box_ball = ours(model, x, y, 0.05)
        ball = our_worst_logits(ll.lower(model, x.shape[1:]), trace, y, form="ball")
        found = theirs(model, x, y, 0.05)
    for number, rows in enumerate(found.bounds.rows[:-1]):
        assert 0.02 < rows.mean() < 0.98, f"layer {number}"
    assert bool((found.local_norms[1] < 0.99 * found.global_norms[1]).all())
    assert bool((ball.worst - box_ball.worst > 1e-3).any())


def test_gradients_through_all_iterations_meet_ours_at_convergence():
    """At a singular pair sigma does not change to first order with u and v, so both gradients are the same."""
    model, x, y = network_and_batch(8)
    found = theirs(model, x, y, 0.1)
    plain = bcp_loss(WorstLogits(found.logits, found.worst), y, 0.7)
    parameters = list(model.parameters())
    expected = torch.autograd.grad(bcp_loss(ours(model, x, y, 0.1)[2], y, 0.7), parameters)
    for a, b in zip(expected, torch.autograd.grad(plain, parameters), strict=True):
        assert close(a, b, 1e-3)


def test_vectors_are_saved_for_the_samples_of_the_batch_alone_and_help_the_next_pass():
    model, x, y = network_and_batch(8)
    vectors, index = algorithm1.Vectors(model, x, 20), torch.tensor([1, 19, 4, 5, 12, 7])
    others = torch.ones(20, dtype=torch.bool)
    others[index] = False
    before = [u.clone() for u in vectors.saved]
    with torch.no_grad():
        first, second, third = (algorithm1.compute(model, vectors, x, y, index, 0.1, 2) for _ in range(3))
    for old, new in zip(before, vectors.saved, strict=True):
        assert new.dtype == torch.float16
        assert torch.equal(old[others], new[others])
        assert not bool((old[index] == new[index]).all())
    for a, b, c in zip(first.local_norms, second.local_norms, third.local_norms, strict=True):
        assert bool((b >= a - 1e-3).all())
        assert bool((c >= b - 1e-3).all())
    assert bool((third.local_norms[1] > 1.001 * first.local_norms[1]).any())


def test_a_few_steps_bring_the_loss_down():
    torch.manual_seed(0)
    model = convolutional_network(((4, 3, 1, 1), (6, 4, 2, 1)), (12,), (2, 8, 8), 5)
    x, y, index = torch.rand(16, 2, 8, 8), torch.randint(0, 5, (16,)), torch.arange(16)
    step = algorithm1.make_step(model, num_samples=16, batch=16, power_steps=2, device="cpu")
    losses = [step(x, y, index, 0.02, 0.5).item() for _ in range(60)]
    assert losses[-1] < 0.9 * losses[0]
    with pytest.raises(ValueError, match="batches of 16, got 3"):
        step(x[:3], y[:3], index[:3], 0.02, 0.5)
