"""What may be worth trying: a guess decides what is tried next, for which inputs and how long, and stands in no proof."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from locallip.arithmetic import exact_arithmetic
from locallip.balls import Domain
from locallip.bounds import CeilingNorm, Relax, propagate, rises_by_lines, worst_logits
from locallip.bounds.margin import SMALL
from locallip.bounds.pullback import Pullback
from locallip.certify.prover import Prover, lead

#: Boxes are sharpened by lines where these, with boxes as they are, let classes rise by less than this share of what norms
#: do. Few inputs of networks that were trained with the local bound come below, and most of others do.
PROMISING = 0.5
#: Where lines promise less than this share of a radius, nothing was certified by them there (benchmarks/NOTES.md).
HOPELESS = 0.125
#: In large networks a proof with slopes is tried where norms from below leave the label such a share of what they take from
#: it: those that are proved take as much more.
SPARE = 0.01
#: In large networks norms with sharpened boxes are tried where lines alone miss at most this share of what they take from
#: the label: published ones needed a fifth of it.
NEAR = 0.3
#: Norms are taken more closely where what is missing is at most this share of what they take from the label: all of them
#: together hardly become smaller by more.
WITHIN_REACH = 0.03
#: Steps of the multiplier in a guess.
ROUGH_STEPS = 6
#: What lines let a margin lose grows about as this power of eps: boxes grow, and the gaps in them.
LINES_POWER = 1.8
#: A guess of a radius where nothing rises.
FAR = 1e30


def spares(prover: Prover) -> bool:
    """What will hardly be shown is given up early: in large networks, but for those who insist."""
    return prover.plan.units > SMALL and not prover.insists


def chooses(prover: Prover) -> bool:
    """Lines are left out where they promise little beside norms: small networks always have the time for both."""
    return prover.has_norms and (spares(prover) or not prover.leaning)


def promised(prover: Prover, x: Tensor, y: Tensor, *, domain: Domain = None) -> Tensor:
    """About the radius that boxes sharpened by lines certify, (B,); 0 where norms promise more.

    It is seen on the ball that the bound over all inputs certifies without any boxes, whatever radius is asked for.
    """
    with exact_arithmetic():
        logits = prover.network(x)
        ahead, rival = lead(logits, y), logits.scatter(1, y[:, None], -float("inf")).argmax(1)
        eps = (ahead / (prover.ceiling.total * prover.ball.stretch(x[:1].numel()))).nan_to_num(0.0, 0.0, 0.0).clamp(min=0)
        by_lines, by_norms = _rises(prover, x, y, rival, eps, domain)
    promising = (by_lines < prover.leaning * PROMISING * by_norms) & (eps > 0) if chooses(prover) else eps > 0
    return torch.where(promising, eps * (ahead / by_lines) ** (1 / LINES_POWER), 0.0).nan_to_num(0.0, FAR, 0.0)


def _rises(prover: Prover, x: Tensor, y: Tensor, rival: Tensor, eps: Tensor, domain: Domain) -> tuple[Tensor, Tensor]:
    """About how far the rival comes up on the label by lines and by norms over all inputs, (B,) each.

    It is a guess, so it is made in float32 without outward rounding wherever slopes pass all activations.
    """
    options = {"input_domain": domain, "ball": prover.ball, "keep_before": True}
    trace = propagate(prover.network, x.float(), eps.float(), CeilingNorm(prover.ceiling), **options)  # type: ignore[arg-type]
    way = Pullback(prover.network, trace)
    if len(way.stages) == len(trace.before):
        by_lines = way.roughly(torch.arange(len(x), device=x.device), rival, y)
        worst = worst_logits(prover.network, trace, y, steps=ROUGH_STEPS).worst
    else:
        trace = prover.trace(x, eps, local="none", domain=domain, relax="lines")
        by_lines = rises_by_lines(prover.network, trace, y, rival[:, None])[:, 0]
        worst = worst_logits(prover.network, replace(trace, relaxation=None), y, outward=True, slope_steps=0).worst
    return by_lines.to(eps), (lead(trace.logits, y) - lead(worst, y)).to(eps)


def bendable(prover: Prover, x: Tensor, y: Tensor, eps: Tensor, *, domain: Domain = None) -> Tensor:
    """Where boxes are to be sharpened by lines for balls of radius eps, (B,) bool."""
    if prover.has_lines and chooses(prover):
        return promised(prover, x, y, domain=domain) > HOPELESS / max(1.0, prover.leaning) * eps
    return torch.full((len(x),), prover.has_lines, dtype=torch.bool, device=x.device)


def may_prove(
    prover: Prover, x: Tensor, y: Tensor, eps: Tensor, *, domain: Domain = None, relax: Relax | None = None
) -> Tensor:
    """Where norms from below, which are never above proved ones, leave the margin a chance; (B,) bool."""
    guessed = prover.trace_by(prover.guess, x, eps, domain, relax)
    plain = prover.lead_of(guessed, y, slopes=False)
    if not prover.has_slopes:
        return ~(plain <= 0)  # a NaN rules nothing out
    if relax or not spares(prover):
        return ~(prover.lead_of(guessed, y, verdict=True) <= 0)
    spare = prover.wanted(guessed, y) + SPARE * (lead(guessed.logits, y) - plain).clamp(min=0)
    with exact_arithmetic():
        steps, last = prover.slope_steps, 1
        worst = worst_logits(prover.network, guessed, y, outward=True, slope_steps=steps, depth=last, wanted=spare).worst
    return ~(plain <= 0) | ~(lead(worst, y) <= spare)


def is_near(prover: Prover, ahead: Tensor, worst: Tensor) -> Tensor:
    """Where norms may prove what lines leave at a lead of `worst` (B,), for leads `ahead` at x."""
    missing = -worst > NEAR * (ahead - worst)
    return ~missing if spares(prover) else torch.ones_like(missing)


def within_reach(ahead: Tensor, worst: Tensor) -> Tensor:
    """Where norms taken more closely may prove what is not shown at a lead of `worst` (B,); `ahead` is that at x."""
    return ~(-worst > WITHIN_REACH * (ahead - worst))
