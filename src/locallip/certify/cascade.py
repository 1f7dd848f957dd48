"""`certify`: one verdict per input, each by the cheapest check that can give it, and what the verdict rests on."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from locallip.arithmetic import alone, autocast_off
from locallip.attacks import pgd_l2
from locallip.balls import Ball, Domain
from locallip.bounds import Relax
from locallip.certify import guesses
from locallip.certify.confirm import best_class, confirmed, surely
from locallip.certify.inputs import Eps, as_batch, as_domain, as_eps, as_labels, as_seconds, check_batch_size
from locallip.certify.prover import LocalLayers, Margin, Method, Prover, fingerprint, lead, number_of_classes
from locallip.norms import Guarantee

#: What a bound is called in `Certificate.decided_by`.
GLOBAL, DENSE, LOCAL = "global bound", "local bound of dense layers", "local bound"
SLOPES, LOCAL_SLOPES = "slopes", "slopes and local bound"
LINES, LOCAL_LINES = "lines", "lines and local bound"
BRANCHING = "branch and bound"


class Verdict(StrEnum):
    """The outcome for one input."""

    MISCLASSIFIED = "MISCLASSIFIED"
    ATTACKED = "ATTACKED"
    CERTIFIED = "CERTIFIED"
    UNKNOWN = "UNKNOWN"

    def __str__(self) -> str:
        return self.value

    __repr__ = __str__


@dataclass(frozen=True)
class Certificate:
    """Verdicts for a batch and what they rest on.

    verdicts, decided_by and predictions (the class at x itself, None for a tie or a NaN) have one entry per input; margin
    (B,) is the proved lead of the label on the ball and lipschitz (B,) the bound behind it, NaN where the deciding check
    computed none; of UNKNOWN inputs those of the last proof that was tried, which is not the tightest where an estimate
    shows that even that cannot succeed. Under ESTIMATE, which is only there when asked for by name, CERTIFIED says that the
    estimate found no violation, and nothing is proved.
    """

    verdicts: list[Verdict]
    decided_by: list[str]
    margin: Tensor
    lipschitz: Tensor
    eps: Tensor
    guarantee: Guarantee
    failure_prob: float
    fingerprint: str
    predictions: list[int | None]
    norm: str = "2"

    @property
    def certified(self) -> Tensor:
        """(B,) bool."""
        return torch.tensor([v is Verdict.CERTIFIED for v in self.verdicts], dtype=torch.bool, device="cpu")

    def __str__(self) -> str:
        count = Counter(self.verdicts)
        word = "estimated robust (no proof)" if self.guarantee is Guarantee.ESTIMATE else "certified"
        risk = f", failure probability {self.failure_prob:g} per input" if self.failure_prob else ""
        return (
            f"{count[Verdict.CERTIFIED]} of {len(self.verdicts)} inputs {word}, {count[Verdict.ATTACKED]} attacked, "
            f"{count[Verdict.MISCLASSIFIED]} misclassified, {count[Verdict.UNKNOWN]} unknown "
            f"(guarantee: {self.guarantee.value}{risk})"
        )


def certify(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    eps: Eps,
    *,
    guarantee: str | Guarantee = Guarantee.HIGH_PROBABILITY,
    failure_prob: float = 1e-9,
    input_domain: Domain = None,
    attack_steps: int = 20,
    batch_size: int = 64,
    power_steps: int = 100,
    seed: int | None = None,
    deployed_dtype: torch.dtype | str | None = None,
    method: Method = "auto",
    branch_seconds: float = 0.0,
    norm: str | float | Ball = "2",
) -> Certificate:
    """Is the prediction of `model` y[i] at every x' with ||x' - x[i]|| <= eps? One verdict per input.

    CERTIFIED: yes, under `guarantee` ("estimate" proves nothing). MISCLASSIFIED: not even at x. ATTACKED: an x' in the ball
    was found that is classified otherwise. UNKNOWN: none of these was shown; ties and numbers that are not finite end here.
    `attack_steps=0` leaves the attack out. The statement is about the network in real arithmetic with the stored weights
    (docs/soundness.md); `deployed_dtype="float32"` makes CERTIFIED hold for the float32 program as well, at every x' that
    float32 can hold. `method="local"` keeps to the paper's bound and "lines" to linear relaxation; each proves less.
    "auto" gives up searches that look hopeless, and "thorough" none: it takes longer and proves more.
    With `branch_seconds` branch and bound is tried on what nothing else decides, for about so long per input. The smaller
    the network, the more it decides; what it decides follows from the time that it is given.

    `norm` is "2" or "inf": the ball is that of l2 or of l-infinity, where lines prove far more than norms. x' also lies in
    `input_domain`, two numbers, or a tensor of lower and one of upper ends (*input shape): with norm="inf" and a large eps
    the region is that box, whatever its half widths are.
    """
    check_batch_size(batch_size)
    x = as_batch(x, model, input_domain)
    radii = as_eps(eps, len(x), x.device)  # what is wrong with them is said before the bound over all inputs is computed
    certifier = Certifier(
        model,
        x.shape[1:],
        guarantee=guarantee,
        failure_prob=failure_prob,
        input_domain=input_domain,
        attack_steps=attack_steps,
        batch_size=batch_size,
        power_steps=power_steps,
        seed=seed,
        device=x.device,
        deployed_dtype=deployed_dtype,
        method=method,
        branch_seconds=branch_seconds,
        norm=norm,
    )
    return certifier(x, y, radii)


class Certifier:
    """`certify` for many batches of one model, with the same arguments: what holds for all inputs is computed once.

    `seed_again` begins a new stream of random numbers, so that a batch gives the same rows whatever came before it.
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
        attack_steps: int = 20,
        batch_size: int = 64,
        power_steps: int = 100,
        seed: int | None = None,
        device: torch.device | None = None,
        deployed_dtype: torch.dtype | str | None = None,
        method: Method = "auto",
        branch_seconds: float = 0.0,
        norm: str | float | Ball = "2",
    ):
        check_batch_size(batch_size)
        self.branch_seconds = as_seconds(branch_seconds, method)
        if attack_steps < 0:
            raise ValueError(f"attack_steps must be at least 0, got {attack_steps}")
        self.model, self.input_domain, self.batch_size = model, as_domain(input_domain), batch_size
        self.attack_steps, self.failure_prob, self._seed = attack_steps, failure_prob, seed
        self.prover = Prover(
            model,
            input_shape,
            guarantee,
            failure_prob=failure_prob,
            # Norms with sharpened boxes, of dense layers alone, of all layers, of these more closely, and before branching,
            # for which `branch_seconds` may be set later.
            probes=5,
            power_steps=power_steps,
            seed=seed,
            device=device,
            deployed_dtype=deployed_dtype,
            method=method,
            norm=norm,
        )
        self.classes = number_of_classes(self.prover)
        self.fingerprint = fingerprint(model)
        #: Told after every batch of every check how many inputs are undecided.
        self.watch: Callable[[int], None] = lambda undecided: None

    @property
    def global_lipschitz(self) -> float:
        return float(self.prover.ceiling.total)

    def within(self, input_domain: Domain) -> Certifier:
        """The same for inputs in another domain; what holds for all inputs is not computed again."""
        other = copy.copy(self)
        other.input_domain = as_domain(input_domain)
        return other

    def seed_again(self, seed: int) -> None:
        """Random numbers from here on are those of `seed`; it must have been chosen without knowledge of the weights."""
        self._seed = seed
        self.prover.seed_again(seed)

    @alone()
    def __call__(self, x: Tensor, y: Tensor, eps: Eps) -> Certificate:
        x = as_batch(x, self.model, self.input_domain)
        radii = as_eps(eps, len(x), x.device)
        y = as_labels(y, len(x), self.classes, x.device)
        inputs = _Inputs(x, y, radii, self.input_domain, self.prover.together(self.batch_size))
        with self.prover.held(self.model, "Certifier"), torch.inference_mode(False):  # the attack takes gradients
            cascade = _Cascade(inputs, self.prover, self.attack_steps, self._seed, self.watch)
            cascade.decide(self.branch_seconds)
        return Certificate(
            cascade.verdicts,
            cascade.decided_by,
            cascade.margin,
            cascade.lipschitz,
            radii.cpu(),
            self.prover.guarantee,
            self.failure_prob if self.prover.guarantee is Guarantee.HIGH_PROBABILITY else 0.0,
            self.fingerprint,
            cascade.predictions,
            self.prover.ball.norm,
        )


class _Inputs(NamedTuple):
    """x (N, *shape), y (N,) and eps (N,), the domain of x, and how many are looked at together."""

    x: Tensor
    y: Tensor
    eps: Tensor
    domain: Domain
    batch_size: int

    def take(self, index: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self.x[index], self.y[index], self.eps[index]


class _Cascade:
    """misclassified -> bound from unmasked norms -> attack -> lines -> local bound -> branch and bound.

    Each sees what is undecided. Lines that promise more than norms sharpen the boxes of single units, and then also the
    norms. Norms with boxes as they are have the last word, so that all is certified that they certify. Where proofs are
    dear, norms per input are first taken in the dense layers alone, without slopes and with them; norms of all layers are
    taken only where norms from below leave the proof a chance, roughly and then closely.
    """

    def __init__(self, inputs: _Inputs, prover: Prover, attack_steps: int, seed: int | None, watch: Callable[[int], None]):
        self.inputs, self.prover, self.attack_steps, self.watch = inputs, prover, attack_steps, watch
        # Not the stream that the starts of proofs come from: those must not depend on what the attack found.
        self.generator_seed = 0 if seed is None else (seed + 5_000_011) % 2**63
        count = len(inputs.x)
        self.verdicts = [Verdict.UNKNOWN] * count
        self.decided_by = ["nothing"] * count
        self.predictions: list[int | None] = [None] * count
        self.margin = torch.full((count,), float("nan"), dtype=torch.float64, device="cpu")
        self.lipschitz, self.ahead = self.margin.clone(), self.margin.clone()  # `ahead`: the label's lead at x itself

    def decide(self, branch_seconds: float) -> None:
        index = torch.arange(len(self.inputs.x), device=self.inputs.x.device)
        index = self._each_batch(self._first, index)
        if self.attack_steps:
            index = self._each_batch(self._attack, index)
        self._by_bounds(index)
        if branch_seconds:
            left = [i for i in index.tolist() if self.verdicts[i] is Verdict.UNKNOWN]
            for number, i in enumerate(left):
                self._branch(index.new_tensor([i]), branch_seconds)
                self.watch(len(left) - number - 1)

    def _by_bounds(self, index: Tensor) -> None:
        """Certify what the bounds of whole balls can."""
        estimate = self.prover.guarantee is Guarantee.ESTIMATE
        if estimate and self.prover.has_norms:  # which follows the paper's protocol
            index = self._try("all", LOCAL, index, slopes=False)
        if self.prover.has_lines:
            index = self._by_lines(index)
        if not self.prover.has_norms:
            return
        if estimate:
            if self.prover.has_slopes:
                self._try("all", LOCAL_SLOPES, index)
            return
        if self.prover.has_cheap_layers and self.prover.has_slopes:
            index = self._each_batch(self._dense, index)
        elif self.prover.has_cheap_layers:
            index = self._try("dense", DENSE, index, slopes=False)
        elif self.prover.has_slopes:
            index = self._try("none", SLOPES, index)
        if not self.prover.is_dense:
            index = self._each_batch(self._promising, index)
        check = LOCAL_SLOPES if self.prover.has_slopes else LOCAL
        index = self._try("all", check, index)
        if self.prover.guarantee is Guarantee.HIGH_PROBABILITY:  # other proofs are close already
            reach = guesses.within_reach(self.ahead[index.cpu()], self.margin[index.cpu()])
            self._try("closely", check, index[reach.to(index.device)])

    def _by_lines(self, index: Tensor) -> Tensor:
        """Certify by lines and the boxes that they sharpen, where these promise more than norms; returns the others."""
        domain, parts = self.inputs.domain, self._split(index)
        found = [guesses.bendable(self.prover, *self.inputs.take(some), domain=domain) for some in parts]
        bendable = torch.cat(found) if found else torch.zeros_like(index, dtype=torch.bool)
        left = self._try("none", LINES, index[bendable], slopes=not self.prover.has_norms, relax="boxes")
        if not self.prover.has_norms:
            return left if self.prover.boxes == "boxes" else self._try("none", LINES, left, relax=self.prover.boxes)
        near = guesses.is_near(self.prover, self.ahead[left.cpu()], self.margin[left.cpu()]).to(left.device)
        hopeful = left[near]
        if not self.prover.is_dense:
            hopeful = self._each_batch(partial(self._promising, relax=self.prover.boxes), hopeful)
        proved = torch.isin(hopeful, self._try("all", LOCAL_LINES, hopeful, relax=self.prover.boxes), invert=True)
        left = left[torch.isin(left, hopeful[proved], invert=True)]
        return torch.cat([index[~bendable], left]).sort().values

    def _split(self, index: Tensor) -> Sequence[Tensor]:
        return index.split(self.inputs.batch_size) if len(index) else ()

    def _each_batch(self, check: Callable[[Tensor], Tensor], index: Tensor) -> Tensor:
        """What `check` leaves undecided of `index`."""
        parts, left = [], len(index)
        for part in self._split(index):
            parts.append(check(part))
            left -= len(part) - len(parts[-1])
            self.watch(left)
        return torch.cat(parts) if parts else index

    def _first(self, index: Tensor) -> Tensor:
        """Certify by the norms over all inputs; returns the rest of those that are surely right at x itself."""
        x, y, eps = self.inputs.take(index)
        found = self.prover.margin(x, y, eps, local="none", domain=self.inputs.domain, slopes=False)
        right, wrong = surely(x, y, found.clean, found.error)
        self.ahead[index.cpu()] = lead(found.clean, y).cpu()
        for i, best in zip(index.tolist(), best_class(found.clean, found.error).tolist(), strict=True):
            self.predictions[i] = best if best >= 0 else None
        self._settle(index[wrong], Verdict.MISCLASSIFIED, "clean logits")
        # What is neither surely right nor surely wrong (a tie, a NaN) stays UNKNOWN.
        self._settle(index[~wrong & ~right], Verdict.UNKNOWN, "clean logits")
        return self._certified(index[right], Margin(*(values[right] for values in found)), GLOBAL)

    def _try(self, local: LocalLayers, check: str, index: Tensor, slopes: bool = True, relax: Relax | None = None) -> Tensor:
        """Certify what this bound can; returns the rest."""
        return self._each_batch(partial(self._prove, local=local, check=check, slopes=slopes, relax=relax), index)

    def _prove(self, index: Tensor, local: LocalLayers, check: str, slopes: bool, relax: Relax | None) -> Tensor:
        domain = self.inputs.domain
        options = {"local": local, "domain": domain, "slopes": slopes, "relax": relax}
        found = self.prover.margin(*self.inputs.take(index), verdict=True, **options)  # type: ignore[arg-type]
        return self._certified(index, found, check)

    def _dense(self, index: Tensor) -> Tensor:
        """Certify by norms of dense layers, without slopes and with them; returns the rest."""
        plain, sloped = self.prover.margins(*self.inputs.take(index), local="dense", domain=self.inputs.domain)
        left = self._certified(index, plain, DENSE)
        open_ = torch.isin(index, left)
        return self._certified(left, Margin(*(values[open_] for values in sloped)), SLOPES)

    def _branch(self, index: Tensor, seconds: float) -> None:
        found = self.prover.branched(*self.inputs.take(index), seconds, domain=self.inputs.domain)
        if bool(found.worst > 0):  # else what is noted is the margin of the whole ball
            self._certified(index, found, BRANCHING)

    def _certified(self, index: Tensor, found: Margin, check: str) -> Tensor:
        proved = (found.worst > 0) & torch.isfinite(found.lipschitz)
        self.margin[index.cpu()], self.lipschitz[index.cpu()] = found.worst.cpu(), found.lipschitz.cpu()
        self._settle(index[proved], Verdict.CERTIFIED, check)
        return index[~proved]

    def _promising(self, index: Tensor, relax: Relax | None = None) -> Tensor:
        """Those where norms of all layers have a chance."""
        return index[guesses.may_prove(self.prover, *self.inputs.take(index), domain=self.inputs.domain, relax=relax)]

    def _attack(self, index: Tensor) -> Tensor:
        """Mark as attacked what surely changes class at a point surely inside the ball; returns the rest.

        The search is in float32, which is fast; what it finds counts in float64 alone.
        """
        x, y, eps = self.inputs.take(index)
        generator = torch.Generator().manual_seed(self.generator_seed)  # of the CPU: the same start on every device
        with autocast_off():
            found = pgd_l2(
                self.prover.network,
                x.float(),
                y,
                eps.float(),
                steps=self.attack_steps,
                input_domain=self.inputs.domain,
                ball=self.prover.ball,
                generator=generator,
            ).double()
        broken = confirmed(self.prover, x, found, y, eps, self.inputs.domain).broken
        self._settle(index[broken], Verdict.ATTACKED, "attack")
        return index[~broken]

    def _settle(self, index: Tensor, verdict: Verdict, check: str) -> None:
        for i in index.tolist():
            self.verdicts[i], self.decided_by[i] = verdict, check
