"""The largest certified radius of each input: a cheap search says where to look, a proof says what counts."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from locallip.certify.inputs import as_batch, as_labels, check_batch_size
from locallip.certify.prover import LocalLayers, Prover, another_seed, number_of_classes
from locallip.norms import Guarantee

#: Shares of the suggested radius that are tried, in this order, until one is proved.
_SHRINK = (0.998, 0.995, 0.991, 0.985, 0.977, 0.966, 0.95, 0.92, 0.87, 0.8, 0.65, 0.5)
_DOUBLINGS, _HALVINGS = 12, 12


def certified_radius(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    *,
    guarantee: str | Guarantee = Guarantee.HIGH_PROBABILITY,
    failure_prob: float = 1e-9,
    input_domain: tuple[float, float] | None = None,
    batch_size: int = 64,
    power_steps: int | None = None,
    seed: int | None = None,
) -> Tensor:
    """A radius up to which the prediction of y is certified, (B,) float64; 0 where it is wrong at x, tied or not finite.

    Every value returned was itself proved: power iteration only suggests radii, the largest first, and each suggestion
    stands or falls with its own proof under `guarantee`; the failure probability is split over all of them. Under "estimate"
    the suggestion itself is returned, and nothing is proved. Costs ten to fifty times as much as `certify`. `power_steps` is
    100 for an estimate, as in `certify`, and 60 for suggestions, unless given.
    """
    if power_steps is None:
        power_steps = 100 if Guarantee.parse(guarantee) is Guarantee.ESTIMATE else 60
    check_batch_size(batch_size)
    x = as_batch(x, model, input_domain)
    prover = Prover(
        model,
        x.shape[1:],
        guarantee,
        failure_prob=failure_prob,
        probes=len(_SHRINK),
        power_steps=power_steps,
        seed=seed,
        device=x.device,
    )
    y = as_labels(y, len(x), number_of_classes(prover), x.device)
    # The guide has random numbers of its own: the starts of a proof must not depend on how its radius was found.
    guide = Prover(model, x.shape[1:], Guarantee.ESTIMATE, power_steps=power_steps, seed=another_seed(seed), device=x.device)
    parts = [
        _radii(prover, guide, x[i : i + batch_size], y[i : i + batch_size], input_domain)
        for i in range(0, len(x), batch_size)
    ]
    return torch.cat(parts) if parts else torch.zeros(0, dtype=torch.float64, device=x.device)


def _radii(prover: Prover, guide: Prover, x: Tensor, y: Tensor, domain: tuple[float, float] | None) -> Tensor:
    sound = _search(prover, x, y, domain, local="none")  # certified by unmasked norms: no fresh norm per probe
    suggested = _search(guide, x, y, domain, local="all", start=sound)
    if prover.guarantee is Guarantee.ESTIMATE:
        return torch.maximum(sound, suggested * _SHRINK[0])
    radii = sound.clone()
    for share in _SHRINK:
        index = (suggested * share > radii).nonzero()[:, 0]
        if not len(index):
            break
        trial = suggested[index] * share
        proved = _holds(prover, x[index], y[index], trial, domain, local="all")
        radii[index[proved]] = trial[proved]
        suggested[index[proved]] = 0.0
    return radii


def _search(
    prover: Prover,
    x: Tensor,
    y: Tensor,
    domain: tuple[float, float] | None,
    *,
    local: LocalLayers,
    start: Tensor | None = None,
) -> Tensor:
    """The largest radius this prover was seen to certify, by doubling and then halving the bracket, (B,)."""
    none = torch.zeros(len(x), dtype=x.dtype, device=x.device)
    logits, _ = prover.clean_logits(x)
    low = none if start is None else start
    scale = logits.abs().amax(1).clamp(min=1e-30) / prover.ceiling.total.clamp(min=1e-30)
    high = torch.where(low > 0, 2 * low, scale)
    for _ in range(_DOUBLINGS):
        holds = _holds(prover, x, y, high, domain, local=local)
        low = torch.where(holds, high, low)
        high = torch.where(holds, 2 * high, high)
        if not bool(holds.any()):
            break
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        holds = _holds(prover, x, y, middle, domain, local=local)
        low, high = torch.where(holds, middle, low), torch.where(holds, high, middle)
    return low


def _holds(
    prover: Prover, x: Tensor, y: Tensor, eps: Tensor, domain: tuple[float, float] | None, *, local: LocalLayers
) -> Tensor:
    margin = prover.margin(x, y, eps, local=local, domain=domain)
    finite = torch.isfinite(x.flatten(1)).all(1) & torch.isfinite(eps) & torch.isfinite(margin.lipschitz)
    return (margin.worst > 0) & finite
