"""The same results on a GPU, where there is one, and no host synchronisation in the training bound."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import locallip as ll
from locallip.bounds import global_bound, propagate, worst_logits
from locallip.norms import PowerNorm, WarmStarts
from tests.random_networks import ACTIVATIONS, BODIES, random_network

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.mark.parametrize("body", BODIES)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_bounds_and_verdicts_agree_with_the_cpu(body, activation):
    model, shape = random_network(body, activation, 5, 1.0)
    x = torch.randn(4, *shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    y = model(x).argmax(1)
    here = ll.certify(model, x, y, 0.02, guarantee="deterministic")
    radii = ll.certified_radius(model, x, y, guarantee="deterministic", seed=0)
    model, x, y = model.cuda(), x.cuda(), y.cuda()
    there = ll.certify(model, x, y, 0.02, guarantee="deterministic")
    assert there.verdicts == here.verdicts
    assert there.fingerprint == here.fingerprint
    torch.testing.assert_close(there.lipschitz, here.lipschitz, rtol=1e-9, atol=0, equal_nan=True)
    likely = ll.local_lipschitz(model, x, 0.02)
    proved = ll.local_lipschitz(model, x, 0.02, guarantee="deterministic")
    assert bool((proved <= likely * (1 + 1e-6)).all())
    torch.testing.assert_close(
        ll.certified_radius(model, x, y, guarantee="deterministic", seed=0).cpu(), radii, rtol=0.1, atol=0
    )


def test_tf32_and_autocast_do_not_reach_a_certificate():
    torch.manual_seed(0)
    model = ll.build_model("4c3f", (3, 16, 16), 10).cuda()
    x = torch.rand(4, 3, 16, 16, device="cuda")
    y = model(x).argmax(1)
    plain = ll.certify(model, x, y, "1/255", seed=0)
    before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    try:
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loose = ll.certify(model, x, y, "1/255", seed=0)
    finally:
        torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = before
    assert plain.verdicts == loose.verdicts
    # Kernels may sum in another order from run to run; TF32 or bfloat16 would show at 1e-4.
    torch.testing.assert_close(plain.margin, loose.margin, rtol=0, atol=1e-7, equal_nan=True)


@pytest.mark.parametrize("activation", ["relu_theta", "relu", "maxmin", "clipped_maxmin"])
@pytest.mark.parametrize("box_radii", ["local", "global"])
def test_the_training_bound_never_waits_for_the_host(activation, box_radii):
    model = ll.build_model("4c3f", (3, 32, 32), 10, activation).cuda()
    x, y = torch.rand(8, 3, 32, 32, device="cuda"), torch.randint(0, 10, (8,), device="cuda")
    eps, index, zero = (
        torch.full((8,), 36 / 255, device="cuda"),
        torch.arange(8, device="cuda"),
        torch.zeros(1, dtype=torch.long, device="cuda"),
    )
    network = ll.lower(model, (3, 32, 32))
    starts, shared = WarmStarts(8, device="cuda"), WarmStarts(1, torch.float32, device="cuda")

    def step() -> torch.Tensor:
        ceiling = global_bound(network, PowerNorm(2, shared, zero), eps)
        trace = propagate(network, x, eps, PowerNorm(2, starts, index), ceiling=ceiling, box_radii=box_radii)
        loss = nn.functional.cross_entropy(worst_logits(network, trace, y).worst, y)
        loss.backward()
        return loss

    step()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        loss = step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert bool(torch.isfinite(loss))
