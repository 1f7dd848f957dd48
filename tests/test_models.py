"""The paper's architectures layer by layer, and the training losses against direct transcriptions of their formulas."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

import locallip as ll
from locallip.bounds import WorstLogits, propagate
from locallip.losses import bcp_loss, gloro_loss, lmt_loss, sparsity_loss, trades_loss
from locallip.models import num_parameters
from locallip.norms import ExactNorm

ACTIVATIONS = {"relu": nn.ReLU, "relu_theta": ll.ReLUTheta, "maxmin": ll.MaxMin, "clipped_maxmin": ll.ClippedMaxMin}

#: Architecture -> input, classes, and the input of every linear layer as the appendix's C(c, k, s, p) and F(c) imply.
PAPER = {
    "4c3f": (
        (1, 28, 28),
        10,
        [(1, 28, 28), (32, 28, 28), (32, 14, 14), (64, 14, 14), (3136,), (512,), (512,)],
        ["C(32,3,1,1)", "C(32,4,2,1)", "C(64,3,1,1)", "C(64,4,2,1)", "F(512)", "F(512)", "F(10)"],
    ),
    "6c2f": (
        (3, 32, 32),
        10,
        [(3, 32, 32), (32, 32, 32), (32, 32, 32), (32, 16, 16), (64, 16, 16), (64, 16, 16), (4096,), (512,)],
        [
            *("C(32,3,1,1)", "C(32,3,1,1)", "C(32,4,2,1)", "C(64,3,1,1)", "C(64,3,1,1)", "C(64,4,2,1)"),
            *("F(512)", "F(10)"),
        ],
    ),
    "8c2f": (
        (3, 64, 64),
        200,
        [
            *((3, 64, 64), (64, 64, 64), (64, 64, 64), (64, 31, 31), (128, 31, 31), (128, 31, 31), (128, 14, 14)),
            *((256, 14, 14), (9216,), (256,)),
        ],
        [
            *("C(64,3,1,1)", "C(64,3,1,1)", "C(64,4,2,0)", "C(128,3,1,1)", "C(128,3,1,1)", "C(128,4,2,0)"),
            *("C(256,3,1,1)", "C(256,4,2,0)", "F(256)", "F(200)"),
        ],
    ),
}


def written(layer: nn.Module) -> str:
    """A layer in the appendix's notation."""
    if isinstance(layer, nn.Conv2d):
        return f"C({layer.out_channels},{layer.kernel_size[0]},{layer.stride[0]},{layer.padding[0]})"
    return f"F({layer.out_features})"


def linear_inputs(model: nn.Sequential, shape: tuple[int, ...]) -> list[tuple[int, ...]]:
    """Shape of what every convolution and fully connected layer reads, on one real sample."""
    shapes, x = [], torch.zeros(1, *shape)
    for layer in model:
        if isinstance(layer, (nn.Conv2d, nn.Linear)):
            shapes.append(tuple(x.shape[1:]))
        x = layer(x)
    return shapes


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("architecture", PAPER)
def test_layers_are_those_of_the_appendix(architecture, activation):
    shape, classes, inputs, layers = PAPER[architecture]
    model = ll.build_model(architecture, shape, classes, activation)
    linear = [layer for layer in model if isinstance(layer, (nn.Conv2d, nn.Linear))]
    assert [written(layer) for layer in linear] == layers
    assert linear_inputs(model, shape) == inputs
    assert sum(isinstance(layer, ACTIVATIONS[activation]) for layer in model) == len(layers) - 1
    assert isinstance(model[-1], nn.Linear)
    assert model(torch.zeros(2, *shape)).shape == (2, classes)


def test_size_of_the_warm_starts_of_6c2f():
    """One start vector per image and layer but the last: 113,664 numbers."""
    shape, classes, *_ = PAPER["6c2f"]
    inputs = linear_inputs(ll.build_model("6c2f", shape, classes), shape)
    assert sum(math.prod(s) for s in inputs[:-1]) == 113_664


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("architecture", PAPER)
def test_models_are_lowered(architecture, activation):
    shape, classes, _, layers = PAPER[architecture]
    torch.manual_seed(0)
    model = ll.build_model(architecture, shape, classes, activation, threshold=0.05)
    network = ll.lower(model, shape)
    assert len(network.stages) == len(layers)
    assert network.output_shape == (classes,)
    x = torch.rand(2, *shape)
    with torch.no_grad():
        torch.testing.assert_close(network(x), model(x), rtol=1e-4, atol=1e-4)


def test_thresholds_start_where_they_are_told_to():
    theta = ll.build_model("4c3f", (1, 28, 28), 10, "relu_theta", threshold=0.7)
    assert all(bool((layer.theta == 0.7).all()) for layer in theta if isinstance(layer, ll.ReLUTheta))
    clipped = ll.build_model("4c3f", (1, 28, 28), 10, "clipped_maxmin", threshold=0.7)
    pairs = [layer for layer in clipped if isinstance(layer, ll.ClippedMaxMin)]
    assert all(bool((layer.upper == 0.7).all() and (layer.lower == -0.7).all()) for layer in pairs)
    assert pairs[0].upper.shape == (16, 28, 28)


def test_parameters_of_4c3f():
    convolutions = 32 * 9 + 32 + 32 * 32 * 16 + 32 + 64 * 32 * 9 + 64 + 64 * 64 * 16 + 64
    dense = 3136 * 512 + 512 + 512 * 512 + 512 + 512 * 10 + 10
    assert num_parameters(ll.build_model("4c3f", (1, 28, 28), 10, "relu")) == convolutions + dense


def test_names_in_capitals_are_the_same():
    assert str(ll.build_model("6C2F", (3, 32, 32), 10)) == str(ll.build_model("6c2f", (3, 32, 32), 10))


def test_unknown_names_are_rejected():
    with pytest.raises(ValueError, match=r"'5c5f'.*4c3f, 6c2f, 8c2f"):
        ll.build_model("5c5f", (1, 28, 28), 10)
    with pytest.raises(ValueError, match=r"'gelu'.*relu_theta"):
        ll.build_model("4c3f", (1, 28, 28), 10, "gelu")
    with pytest.raises(ValueError, match="too small"):
        ll.build_model("8c2f", (3, 8, 8), 10)


# Losses ------------------------------------------------------------------------------------------------------------------


def logits_and_labels() -> tuple[WorstLogits, torch.Tensor]:
    torch.manual_seed(0)
    clean = torch.randn(6, 4, dtype=torch.float64)
    return WorstLogits(clean, clean + torch.rand_like(clean)), torch.tensor([0, 3, 1, 1, 2, 0])


def cross_entropy(logits: list[float], label: int) -> float:
    return math.log(sum(math.exp(z) for z in logits)) - logits[label]


def mean(values) -> float:
    values = list(values)
    return sum(values) / len(values)


@pytest.mark.parametrize("mix", [0.0, 0.3, 1.0])
def test_bcp_loss_is_its_formula(mix):
    logits, y = logits_and_labels()
    rows = zip(logits.clean.tolist(), logits.worst.tolist(), y.tolist(), strict=True)
    expected = mean(
        (1 - mix) * cross_entropy(clean, label) + mix * cross_entropy(worst, label) for clean, worst, label in rows
    )
    assert bcp_loss(logits, y, mix).item() == pytest.approx(expected, rel=1e-12)
    assert bcp_loss(logits, y, torch.tensor(mix, dtype=torch.float64)).item() == pytest.approx(expected, rel=1e-12)


def test_gloro_loss_is_its_formula():
    """One more logit: the best worst logit among the other classes."""
    logits, y = logits_and_labels()
    rows = zip(logits.clean.tolist(), logits.worst.tolist(), y.tolist(), strict=True)
    expected = mean(
        cross_entropy([*clean, max(z for i, z in enumerate(worst) if i != label)], label) for clean, worst, label in rows
    )
    assert gloro_loss(logits, y).item() == pytest.approx(expected, rel=1e-12)


def test_lmt_loss_is_its_formula():
    logits, y = logits_and_labels()
    expected = mean(cross_entropy(worst, label) for worst, label in zip(logits.worst.tolist(), y.tolist(), strict=True))
    assert lmt_loss(logits, y).item() == pytest.approx(expected, rel=1e-12)


def small_trace(activation_of, eps: float = 0.3):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 6), activation_of(6), nn.Linear(6, 4), activation_of(4), nn.Linear(4, 3)).double()
    network = ll.lower(model, (5,))
    x = torch.randn(7, 5, dtype=torch.float64)
    return model, network, propagate(network, x, torch.full((7,), eps, dtype=torch.float64), ExactNorm())


@pytest.mark.parametrize("weight", [0.0, 0.1, 1.0])
def test_sparsity_loss_of_relu_theta(weight):
    """max(0, UB_i) + lambda_theta max(0, theta_i - LB_i), averaged over samples and units and summed over layers."""
    model, network, trace = small_trace(lambda width: ll.ReLUTheta(width, init=0.4))
    expected = 0.0
    for box, layer in zip(trace.boxes, (model[1], model[3]), strict=True):
        theta = layer.theta.tolist()
        for lower, upper in zip(box.lower.tolist(), box.upper.tolist(), strict=True):
            terms = zip(lower, upper, theta, strict=True)
            expected += mean(max(0, ub) + weight * max(0, t - lb) for lb, ub, t in terms) / len(box.lower)
    assert sparsity_loss(network, trace, weight).item() == pytest.approx(expected, rel=1e-12)
    assert expected > 0


def test_sparsity_loss_of_relu_has_one_term():
    _, network, trace = small_trace(lambda width: nn.ReLU())
    expected = sum(mean(max(0, ub) for row in box.upper.tolist() for ub in row) for box in trace.boxes)
    assert sparsity_loss(network, trace).item() == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("weight", [0.1, 1.0])
def test_sparsity_loss_of_clipped_maxmin(weight):
    """max(0, UB_min - b) + lambda_theta max(0, a - LB_max), pair by pair."""
    _, network, trace = small_trace(lambda width: ll.ClippedMaxMin(width // 2, upper=0.5, lower=-0.2))
    expected = 0.0
    for box in trace.boxes:
        terms = []
        for lower, upper in zip(box.lower.tolist(), box.upper.tolist(), strict=True):
            half = len(lower) // 2
            for i in range(half):
                highest_min, lowest_max = min(upper[i], upper[half + i]), max(lower[i], lower[half + i])
                terms.append(max(0, highest_min + 0.2) + weight * max(0, 0.5 - lowest_max))
        expected += mean(terms)
    assert sparsity_loss(network, trace, weight).item() == pytest.approx(expected, rel=1e-6)


def test_sparsity_loss_without_constant_regions_is_zero():
    _, network, trace = small_trace(lambda width: ll.MaxMin())
    assert sparsity_loss(network, trace).item() == 0


def test_sparsity_loss_reaches_weights_and_thresholds():
    model, network, trace = small_trace(lambda width: ll.ReLUTheta(width, init=0.4))
    sparsity_loss(network, trace).backward()
    for parameter in (model[0].weight, model[1].raw_theta, model[3].raw_theta):
        assert float(parameter.grad.abs().sum()) > 0


def test_trades_is_cross_entropy_plus_weighted_divergence():
    generator = torch.Generator().manual_seed(0)
    clean, attacked = torch.randn(5, 4, generator=generator), torch.randn(5, 4, generator=generator)
    y = torch.tensor([0, 1, 2, 3, 0])
    p, q = clean.softmax(1), attacked.softmax(1)
    expected = -p[torch.arange(5), y].log().mean() + 6 * (p * (p / q).log()).sum(1).mean()
    torch.testing.assert_close(trades_loss(clean, attacked, y, 6.0), expected)
