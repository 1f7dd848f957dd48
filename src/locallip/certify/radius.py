"""The largest certified radius of each input: a cheap search says where to look, a proof says what counts."""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from locallip.arithmetic import alone
from locallip.balls import Ball, Domain, as_ball
from locallip.bounds import Relax
from locallip.certify import guesses
from locallip.certify.crossing import Crossing
from locallip.certify.guesses import LINES_POWER
from locallip.certify.inputs import as_batch, as_deployed, as_domain, as_labels, as_seconds, check_batch_size
from locallip.certify.prover import LocalLayers, Method, Prover, another_seed, fingerprint, number_of_classes
from locallip.norms import Guarantee, LanczosNorm

#: Proofs per input at most, fixed beforehand, for the failure probability is split over them; and which share of the guessed
#: radius each of them tries.
_SHARES = (0.998, 0.997, 0.99, 0.97, 0.9, 0.6)
PROOFS = len(_SHARES)
#: Branch and bound tries so many radii at most, the first ones larger by this factor each; such a bracket is narrow enough.
BRANCHES, OUTWARDS, _ENOUGH = 10, 1.3, 0.01
#: A proof that leaves less than this share of the radius to gain is the last one.
_WORTH = 0.004
#: Failure probability, tolerance and steps of the guide's norms: so little is asked of them that they cost an eighth of
#: those of a proof, and they are about as close (benchmarks/NOTES.md).
_GUIDE_NORMS = 0.5, 0.01, 60
#: Tolerances of the brackets, and probes at most: of the bound from unmasked norms, which needs no norms, and of the guide.
_UNMASKED, _GUIDE, _LINES = (2e-4, 60), (0.01, 16), (0.01, 16)
#: Where no ball takes the label away, radii end at so many times the one that the global bound gives, or at LARGEST.
_REACH, LARGEST = 4096.0, 1e30


def certified_radius(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    *,
    guarantee: str | Guarantee = Guarantee.HIGH_PROBABILITY,
    failure_prob: float = 1e-9,
    input_domain: Domain = None,
    batch_size: int = 64,
    power_steps: int = 100,
    seed: int | None = None,
    deployed_dtype: torch.dtype | str | None = None,
    method: Method = "auto",
    branch_seconds: float = 0.0,
    norm: str | float | Ball = "2",
) -> Tensor:
    """A radius up to which the prediction of y is certified, (B,) float64; 0 where it is wrong at x, tied or not finite.

    Every value returned was itself proved: norms that may be wrong only suggest radii, and each suggestion stands or falls
    with its own proof under `guarantee`; the failure probability is split over all of them. Under "estimate" norms from
    `power_steps` steps take the place of the proof, and nothing is proved. Radii are in the `norm` "2" or "inf", and finite:
    where nothing takes the label away, they end at the diameter of `input_domain`, or without one at some thousand times the
    radius that the bound over all inputs gives. Costs one or two proofs per input and about as much again for the search.
    With `branch_seconds` branch and bound then looks for larger radii, for about so long per input.
    """
    check_batch_size(batch_size)
    x = as_batch(x, model, input_domain)
    finder = RadiusFinder(
        model,
        x.shape[1:],
        guarantee=guarantee,
        failure_prob=failure_prob,
        input_domain=input_domain,
        batch_size=batch_size,
        power_steps=power_steps,
        seed=seed,
        device=x.device,
        deployed_dtype=deployed_dtype,
        method=method,
        branch_seconds=branch_seconds,
        norm=norm,
    )
    return finder(x, y)


class RadiusFinder:
    """`certified_radius` for many batches of one model, with the same arguments: what holds for all inputs is computed once.

    `seed_again` begins a new stream of random numbers, so that a batch gives the same radii whatever came before it.
    `prover` is one that is there already and need not be made again: with the same arguments, of the same model, which has
    not changed since; for "high_probability" it must allow for PROOFS probes, and with `branch_seconds` for BRANCHES more.
    """

    @alone()
    def __init__(
        self,
        model: nn.Module,
        input_shape: Sequence[int],
        *,
        guarantee: str | Guarantee = Guarantee.HIGH_PROBABILITY,
        failure_prob: float = 1e-9,
        input_domain: Domain = None,
        batch_size: int = 64,
        power_steps: int = 100,
        seed: int | None = None,
        device: torch.device | None = None,
        prover: Prover | None = None,
        deployed_dtype: torch.dtype | str | None = None,
        method: Method = "auto",
        branch_seconds: float = 0.0,
        norm: str | float | Ball = "2",
    ):
        check_batch_size(batch_size)
        self._branch_seconds = as_seconds(branch_seconds, method)
        probes = PROOFS + (BRANCHES if self._branch_seconds else 0)
        self.model, self.input_domain, self.batch_size = model, as_domain(input_domain), batch_size
        if prover is None:
            prover = Prover(
                model,
                input_shape,
                guarantee,
                failure_prob=failure_prob,
                probes=probes,
                power_steps=power_steps,
                seed=seed,
                device=device,
                deployed_dtype=deployed_dtype,
                method=method,
                norm=norm,
            )
        else:
            wanted = {
                "model": model,
                "input_shape": torch.Size(input_shape),
                "guarantee": Guarantee.parse(guarantee),
                "failure_prob": failure_prob,
                "device": device or next((p.device for p in model.parameters()), prover.device),
                "deployed_dtype": as_deployed(deployed_dtype),
                "method": method,
                "ball": as_ball(norm),
            }
            _check_prover(prover, wanted, probes)
        self.prover, self.guide = prover, _guide(prover, seed)
        self.classes = number_of_classes(prover)
        self.fingerprint = fingerprint(model)

    @property
    def branch_seconds(self) -> float:
        """Seconds of branch and bound per input; fixed, as the failure probability is split for its proofs."""
        return self._branch_seconds

    def seed_again(self, seed: int) -> None:
        """Random numbers from here on are those of `seed`; it must have been chosen without knowledge of the weights."""
        self.prover.seed_again(seed)
        self.guide = _guide(self.prover, seed)

    @alone()
    def __call__(self, x: Tensor, y: Tensor, *, least: Tensor | None = None, below: Tensor | None = None) -> Tensor:
        """Radii (B,), float64, for x (B, *shape) and y (B,).

        `least` (B,) are radii that are proved already, 0 where none is: nothing smaller is returned. What is found here is
        below `below` (B,).
        """
        x = as_batch(x, self.model, self.input_domain)
        search = _Search(self, x, as_labels(y, len(x), self.classes, x.device))
        zero, far = x.new_zeros(len(x)), x.new_full((len(x),), float("inf"))
        with self.prover.held(self.model, "RadiusFinder"):
            return search.radii(zero if least is None else least.to(x), far if below is None else below.to(x))


def _check_prover(prover: Prover, wanted: Mapping[str, Any], probes: int) -> None:
    """Refuse bounds of another model, of other weights, or with other promises than those asked for."""
    made = {**vars(prover), "input_shape": prover.network.input_shape}
    for name, value in wanted.items():
        if made[name] is not value and made[name] != value:
            what = "" if name == "model" else f": {made[name]!r}, not {value!r}"
            raise ValueError(
                f"this prover was made with another {name}{what}; make one with the arguments of the RadiusFinder"
            )
    if prover.guarantee is Guarantee.HIGH_PROBABILITY and prover.probes < probes:
        raise ValueError(f"this prover divides failure_prob among {prover.probes} probes; radii need {probes}")
    with prover.held(prover.model, "prover"):
        pass


def _guide(prover: Prover, seed: int | None) -> Prover:
    """The same bounds with norms that prove nothing and cost little.

    It has random numbers of its own: the starts of a proof must not depend on how its radius was found.
    """
    guide = copy.copy(prover)
    guide.rule, guide.guarantee = LanczosNorm(*_GUIDE_NORMS, seed=another_seed(seed)), Guarantee.ESTIMATE
    return guide


class _Search:
    """Radii of one set of inputs; each step sees those that may still gain by it, in full batches."""

    def __init__(self, finder: RadiusFinder, x: Tensor, y: Tensor):
        self.x, self.y = x, y
        self.prover, self.guide = finder.prover, finder.guide
        self.domain, self.batch_size, self.seconds = (
            finder.input_domain,
            finder.prover.together(finder.batch_size),
            finder.branch_seconds,
        )
        self.finite = torch.isfinite(x.flatten(1)).all(1)
        self.bendable = torch.zeros_like(self.finite)  # where boxes are sharpened by lines

    def radii(self, least: Tensor, below: Tensor) -> Tensor:
        everything = torch.arange(len(self.x), device=self.x.device)
        lead = self._margins(self.prover, "none", everything, torch.zeros_like(least))
        right = (lead > 0).nonzero()[:, 0]
        stretch = self.prover.ball.stretch(self.x[:1].numel())
        first = (lead / (stretch * self.prover.ceiling.total.to(lead))).nan_to_num(0.0).clamp(1 / LARGEST, LARGEST)
        most = torch.minimum(self._reach(first), below.nextafter(torch.zeros_like(below)))
        unmasked = self._unmasked(lead, first, most, right)
        proved = torch.maximum(unmasked.low, least)
        most = torch.minimum(self._reach(proved), below.nextafter(torch.zeros_like(below)))
        if self.prover.has_lines:
            proved = self._by_lines(lead, proved, most, right)
        if self.prover.has_norms:
            proved = self._proved(lead, proved, most, self._guided(lead, proved, most, unmasked.power, right), right)
        for i in right.tolist() if self.seconds else ():
            proved[i] = self._branched(i, float(proved[i]), float(most[i]))
        return proved

    def _branched(self, i: int, low: float, most: float) -> float:
        """The radius of one input, at least `low` and at most `most`, by branch and bound: outwards, then by bisection."""
        end, high, some = time.monotonic() + self.seconds, math.inf, torch.tensor([i], device=self.x.device)
        trial = min(OUTWARDS * low, most)
        for _ in range(BRANCHES):
            left = end - time.monotonic()
            if not (low < trial < high) or high < low * (1 + _ENOUGH) or left <= 0:
                break
            # What cannot be shown takes all of its time, so some is left for smaller radii.
            found = self.prover.branched(
                self.x[some], self.y[some], self.x.new_tensor([trial]), left / 2, domain=self.domain
            )
            if bool((found.worst > 0) & torch.isfinite(found.lipschitz)) and bool(self.finite[i]):
                low = trial
            else:
                high = trial
            trial = min(OUTWARDS * low, most) if math.isinf(high) else math.sqrt(low * high)
        return low

    def _by_lines(self, lead: Tensor, proved: Tensor, most: Tensor, index: Tensor) -> Tensor:
        """What lines prove, with boxes that they sharpen where that promises more; no probe needs a norm."""
        gain = torch.minimum(proved * (1 + _WORTH), most)
        index = index[(gain > proved)[index]]
        first = torch.zeros_like(proved)
        for some in index.split(self.batch_size) if len(index) else ():
            first[some] = guesses.promised(self.prover, self.x[some], self.y[some], domain=self.domain)
        self.bendable, first = first > 0, torch.maximum(first, gain)
        index = index[self.bendable[index]]
        if not len(index):
            return proved
        found = Crossing(lead, most, torch.full_like(lead, LINES_POWER))
        probe = lambda some, eps: self._margins(self.prover, "none", some, eps, "boxes")  # noqa: E731
        found.search(probe, index, first, *_LINES, trusting=True)
        return torch.maximum(proved, found.low)

    def _reach(self, radius: Tensor) -> Tensor:
        """Beyond this no radius is looked for, (B,)."""
        if self.domain is None:
            return (radius * _REACH).clamp(max=LARGEST)
        whole = self.prover.ball.diameter(self.domain, self.x) if len(self.x) else 0.0
        return torch.full_like(radius, min(whole, LARGEST))

    def _unmasked(self, lead: Tensor, first: Tensor, most: Tensor, index: Tensor) -> Crossing:
        """What norms over all inputs prove: no probe needs a norm, and `low` counts as proved."""
        found = Crossing(lead, most)
        found.search(lambda some, eps: self._margins(self.prover, "none", some, eps), index, first, *_UNMASKED)
        return found

    def _guided(self, lead: Tensor, proved: Tensor, most: Tensor, power: Tensor, index: Tensor) -> Crossing:
        """Where the guide sees the end of the margin: a guess of where a proof may succeed.

        The first probe asks whether there is anything to gain; where there is not, it is the last.
        """
        found = Crossing(lead, most, power)
        gain = proved * (1 + _WORTH)
        index = index[(gain < most)[index]]
        probe = lambda some, eps: self._all(self.guide, some, eps)  # noqa: E731
        found.search(probe, index, gain, *_GUIDE, enough=gain)
        return found

    def _proved(self, lead: Tensor, proved: Tensor, most: Tensor, guided: Crossing, index: Tensor) -> Tensor:
        """Prove the guess, or what the margin of the last proof leaves of it."""
        found, guess = Crossing(lead, most, guided.power), guided.root()
        radii = proved.clone()
        for share in _SHARES:
            trial = torch.minimum(guess * share, most)
            trial = torch.minimum(trial, found.high * share)
            index = index[(trial > radii * (1 + _WORTH / 2))[index]]
            if not len(index):
                break
            margin = self._all(self.prover, index, trial[index])
            found.tell(index, trial[index], margin)
            holds = index[margin > 0]
            radii[holds] = trial[holds]
            guess = found.root()
            # A success is repeated further out only where that promises more than it costs.
            done = (found.low > 0) & (guess * _SHARES[0] <= found.low * (1 + _WORTH))
            index = index[~done[index]]
        return radii

    def _all(self, prover: Prover, index: Tensor, eps: Tensor) -> Tensor:
        """The label's lead on each ball by norms of all layers, (K,), with sharpened boxes where these promise more."""
        bent, found = self.bendable[index], torch.zeros_like(eps)
        for which, relax in ((bent, prover.boxes), (~bent, None)):
            if bool(which.any()):
                found[which] = self._margins(prover, "all", index[which], eps[which], relax)
        return found

    def _margins(self, prover: Prover, local: LocalLayers, index: Tensor, eps: Tensor, relax: Relax | None = None) -> Tensor:
        """The label's lead on each ball, (K,); NaN where anything behind it is not finite."""
        parts = [eps.new_zeros(0)]
        for some, radius in zip(index.split(self.batch_size), eps.split(self.batch_size), strict=True):
            x, y = self.x[some], self.y[some]
            # Slopes would make every probe of a search without norms, which has many, as dear as the others.
            slopes = local != "none"
            found = prover.margin(x, y, radius, local=local, domain=self.domain, slopes=slopes, relax=relax)
            sound = self.finite[some] & torch.isfinite(radius) & torch.isfinite(found.lipschitz)
            parts.append(torch.where(sound, found.worst, float("nan")))
        return torch.cat(parts)
