"""`deployed_dtype="float32"`: a certificate that the program in float32 keeps as well."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import locallip as ll
from locallip.bounds import deployed_error
from locallip.certify.prover import Prover

from .random_networks import ACTIVATIONS, BODIES, random_network


def points(x: Tensor, eps: float, count: int, seed: int) -> Tensor:
    """Points of the balls around x that float32 can hold, (count, B, *shape)."""
    numbers = torch.Generator().manual_seed(seed)
    delta = torch.randn(count, *x.shape, generator=numbers, dtype=torch.float64)
    length = delta.flatten(2).norm(dim=2).reshape(count, len(x), *[1] * (x.dim() - 1))
    share = torch.rand(length.shape, generator=numbers, dtype=torch.float64)
    return (x + 0.999999 * eps * share * delta / length).float()


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("body", BODIES)
def test_logits_in_float32_are_no_further_off_than_said(body: str, activation: str) -> None:
    model, shape = random_network(body, activation, 3, 2.0)
    eps = 0.3
    x = torch.randn(4, *shape, generator=torch.Generator().manual_seed(1)).double()
    prover = Prover(model, shape, "deterministic")
    allowed = deployed_error(prover.network, prover.trace(x, torch.full((4,), eps, dtype=torch.float64)))
    found = points(x, eps, 50, 2)
    exact = torch.stack([model(part.double()) for part in found])
    rounded = torch.stack([model.float()(part) for part in found])  # the weights are rounded too
    off = (rounded.double() - exact).abs().amax(0)
    assert bool((off <= allowed).all())
    assert bool((off > 0).any()), "nothing was rounded, so nothing was tested"
    assert bool((allowed < 0.05 * (1 + exact.abs().amax())).all()), "the allowance is of the size of the logits"


def near_tie() -> tuple[nn.Module, Tensor]:
    """Class 0 leads by 1e-4 everywhere; float32 loses that, as it is the difference of two numbers near 4096."""
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2)).double().eval()
    with torch.no_grad():
        model[0].weight.copy_(torch.eye(2))
        model[0].bias.fill_(4096.0)
        model[2].weight.copy_(torch.tensor([[1.0, 0.0], [1.0, 0.0]]))
        model[2].bias.copy_(torch.tensor([1e-4, 0.0]))
    return model, torch.zeros(1, 2)


def test_a_lead_that_float32_loses_is_certified_in_real_arithmetic_alone() -> None:
    model, x = near_tie()
    label = torch.tensor([0])
    assert model(x.double()).argmax(1).item() == 0
    for guarantee in ("deterministic", "high_probability"):
        assert ll.certify(model, x, label, 0.01, guarantee=guarantee).certified.all()
        careful = ll.certify(model, x, label, 0.01, guarantee=guarantee, deployed_dtype="float32")
        assert careful.verdicts == [ll.Verdict.UNKNOWN]
    logits = model.float()(x)
    assert logits[0, 0] == logits[0, 1], "float32 keeps the lead, so nothing was tested"


def test_an_ordinary_lead_is_certified_for_float32_as_well() -> None:
    model, shape = random_network("dense", "relu", 0, 1.0)
    model = model.float()
    x = torch.randn(20, *shape, generator=torch.Generator().manual_seed(5))
    y = model(x).argmax(1)
    eps = 1e-3
    certificate = ll.certify(model, x, y, eps, deployed_dtype=torch.float32, seed=0)
    plain = ll.certify(model, x, y, eps, seed=0)
    assert int(certificate.certified.sum()) >= 15
    assert bool((plain.margin >= certificate.margin)[plain.certified].all())
    for part in points(x.double(), eps, 200, 6):
        assert bool((model(part).argmax(1) == y)[certificate.certified].all())


@pytest.mark.parametrize("dtype", [torch.bfloat16, "float16", torch.float64, 32])
def test_other_arithmetic_is_refused(dtype: object) -> None:
    model, x = near_tie()
    with pytest.raises(ValueError, match="deployed_dtype must be"):
        ll.certify(model, x, torch.tensor([0]), 0.01, deployed_dtype=dtype)  # type: ignore[arg-type]


EXTREME = {
    "overflow": ([1e30], [[1e20], [-1e20]], [0.0, 0.0]),
    "a weight that vanishes": ([1.0], [[1e-46], [0.0]], [0.0, 0.0]),
    "products that vanish": ([1e-30], [[1e-30], [0.0]], [0.0, 0.0]),
}


@pytest.mark.parametrize("kind", EXTREME)
def test_a_lead_beyond_the_range_of_float32_is_not_certified_for_it(kind: str) -> None:
    first, last, bias = EXTREME[kind]
    model = nn.Sequential(nn.Linear(1, len(first), bias=False), nn.ReLU(), nn.Linear(len(first), 2)).double().eval()
    with torch.no_grad():
        model[0].weight.copy_(torch.tensor(first, dtype=torch.float64)[:, None])
        model[2].weight.copy_(torch.tensor(last, dtype=torch.float64))
        model[2].bias.copy_(torch.tensor(bias, dtype=torch.float64))
    x, label = torch.ones(1, 1), torch.tensor([0])
    assert ll.certify(model, x, label, 0.01, guarantee="deterministic").certified.all()
    logits = model.float()(x)[0]
    assert not bool(logits[0] > logits[1]) or not bool(torch.isfinite(logits).all())  # float32 does lose it
    model.double()
    careful = ll.certify(model, x, label, 0.01, guarantee="deterministic", deployed_dtype="float32")
    assert careful.verdicts == [ll.Verdict.UNKNOWN]
