"""The order of checks in `certify`: dear proofs come last and only where they can succeed, and no verdict changes by it."""

from __future__ import annotations

import math
from collections import Counter

import pytest
import torch
from torch import nn

import locallip as ll
from locallip.bounds import PartlyLocal, global_bound
from locallip.certify.prover import Prover
from locallip.network import lower
from locallip.norms import Guarantee, LanczosNorm, PowerNorm

SHAPE = (2, 8, 8)


def convolutional(seed: int) -> nn.Module:
    """Two convolutions and two dense layers, some units of each switched off by their offsets."""
    torch.manual_seed(seed)
    model = nn.Sequential(
        nn.Conv2d(2, 6, 3, padding=1), nn.ReLU(), nn.Conv2d(6, 6, 4, stride=2, padding=1), nn.ReLU(), nn.Flatten(),
        nn.Linear(96, 24), nn.ReLU(), nn.Linear(24, 4),
    )  # fmt: skip
    with torch.no_grad():
        for number in (0, 2, 5):
            model[number].bias.copy_(torch.randn_like(model[number].bias) * 0.4)
    return model.eval()


def some_inputs(model: nn.Module, count: int = 60) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Inputs, the labels that the model gives them, and radii from easy to hopeless."""
    x = torch.randn(count, *SHAPE)
    return x, model(x).argmax(1), torch.logspace(-2, 0.5, count, dtype=torch.float64)


@pytest.mark.parametrize("guarantee", ["high_probability", "deterministic"])
@pytest.mark.parametrize("seed", range(3))
def test_trying_cheap_proofs_first_changes_no_verdict(seed, guarantee):
    model = convolutional(seed)
    x, y, eps = some_inputs(model)
    found = ll.certify(model, x, y, eps, guarantee=guarantee, seed=1, method="local")
    more = ll.certify(model, x, y, eps, guarantee=guarantee, seed=1)
    assert (more.certified >= found.certified).all()
    prover = Prover(model, SHAPE, guarantee, probes=2, seed=2, method="local")
    whole, full = (prover.margin(x.double(), y, eps, local=local) for local in ("none", "all"))
    # A margin so near to 0 that other random starts change its sign is possible, and not here.
    assert torch.equal(found.certified, (whole.worst > 0) | (full.worst > 0))
    checks = Counter(found.decided_by)
    assert checks["local bound of dense layers"] > 0
    assert checks["nothing"] > 0
    assert (found.margin[found.certified] > 0).all()
    # What the dense layers alone prove is a bound too, if not the tightest.
    assert (found.lipschitz >= full.lipschitz * (1 - 5e-3))[found.certified].all()


@pytest.mark.parametrize("guarantee", ["high_probability", "deterministic"])
def test_a_guess_that_overflows_rules_nothing_out(guarantee):
    """Power iteration leaves float64 behind between two layers whose scales cancel; the proofs do not."""
    model = half_off().double()
    with torch.no_grad():
        for p in model[2].parameters():
            p.mul_(2.0**140)
        model[5].weight.div_(2.0**140)
    x = torch.randn(40, *SHAPE, dtype=torch.float64)
    eps = torch.logspace(-2, 0, 40, dtype=torch.float64)
    found = ll.certify(model, x, model(x).argmax(1), eps, attack_steps=0, guarantee=guarantee, seed=0, method="local")
    assert Counter(found.decided_by)["local bound"] > 5


def half_off() -> nn.Module:
    """The second convolution reads units of which most are off near x: no norm of a dense layer makes up for that."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(2, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 4, 3, padding=1), nn.ReLU(), nn.Flatten(),
                          nn.Linear(256, 3))  # fmt: skip
    with torch.no_grad():
        model[0].bias.copy_(torch.tensor([-9.0] * 6 + [9.0] * 2))
        model[2].weight[:, :6] *= 10
    return model.eval()


def test_a_full_local_bound_is_tried_where_it_can_succeed():
    model = half_off()
    x = torch.randn(40, *SHAPE)
    y = model(x).argmax(1)
    found = ll.certify(model, x, y, torch.logspace(-2, 0, 40, dtype=torch.float64), attack_steps=0, seed=0, method="local")
    checks = Counter(found.decided_by)
    assert checks["local bound"] > 5
    # The last layer alone is dense, and no margin needs its norm.
    assert "local bound of dense layers" not in checks


@pytest.mark.parametrize("seed", [None, 0, 2**63, 2**64 - 1])
def test_any_seed_will_do(seed):
    model = half_off()
    x = torch.randn(3, *SHAPE)
    assert ll.certify(model, x, model(x).argmax(1), 1e-4, seed=seed).certified.all()
    assert (ll.certified_radius(model, x, model(x).argmax(1), seed=seed) > 0).all()


def test_what_was_made_in_inference_mode_is_certified_inside_and_outside():
    with torch.inference_mode():
        model = half_off()
        x = torch.randn(4, *SHAPE)
        y = model(x).argmax(1)
        assert ll.certify(model, x, y, 1e-4, seed=0).certified.all()
    assert ll.certify(model, x, y, 1e-4, seed=0).certified.all()


@pytest.mark.parametrize("guarantee", list(Guarantee))
def test_norms_of_dense_layers_alone_lie_between_local_and_global_bound(guarantee):
    model = convolutional(4)
    prover = Prover(model, SHAPE, guarantee, seed=0)
    x, eps = torch.randn(20, *SHAPE, dtype=torch.float64), torch.full((20,), 0.1, dtype=torch.float64)
    none, dense, everything = (prover.trace(x, eps, local=local).lipschitz for local in ("none", "dense", "all"))
    slack = 1e-2 if guarantee is not Guarantee.DETERMINISTIC else 1e-6
    assert (everything <= dense * (1 + slack)).all()
    assert (dense <= none).all()
    assert (dense < 0.97 * none).any()
    assert (everything < 0.97 * dense).any()


def test_norms_of_two_guarantees_are_not_mixed():
    network = lower(convolutional(0), SHAPE)
    ceiling = global_bound(network, PowerNorm(5, seed=0), torch.ones(1, dtype=torch.float64))
    with pytest.raises(ValueError, match="cannot go with a ceiling"):
        PartlyLocal(LanczosNorm(1e-9, seed=0), set(), ceiling)


def test_a_dense_network_has_one_local_bound():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(12, 20), nn.ReLU(), nn.Linear(20, 3)).eval()
    x = torch.randn(30, 12)
    found = ll.certify(model, x, model(x).argmax(1), torch.logspace(-2, 0, 30, dtype=torch.float64), seed=0, method="local")
    assert set(found.decided_by) <= {"global bound", "local bound", "attack", "nothing"}
    assert "local bound" in found.decided_by


def test_norms_over_all_inputs_are_close_whatever_the_spectrum():
    """300 dimensions are too many for a complete basis. Singular values crowd below the largest in the second spectrum."""
    torch.manual_seed(0)
    crowded = torch.linspace(0, math.pi / 2, 300, dtype=torch.float64).cos().clamp(min=0).sqrt()
    crowded[1:] *= 1 - 1e-9
    for values in (torch.linspace(3.0, 1e-3, 300, dtype=torch.float64), crowded):
        left, right = (torch.linalg.qr(torch.randn(300, 300, dtype=torch.float64))[0] for _ in range(2))
        layer = nn.Linear(300, 300, bias=False, dtype=torch.float64)
        layer.weight.data = left @ values.diag() @ right
        model = nn.Sequential(layer, nn.ReLU(), nn.Linear(300, 2, bias=False, dtype=torch.float64))
        prover = Prover(model, (300,), "high_probability", seed=0)
        found = float(next(iter(prover.ceiling.norms.values()))) / float(values[0])
        assert 1 - 1e-13 <= found <= (1 + 5e-4) * (1 + 1e-7)
