"""One network, one guarantee: everything that the public functions share."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from locallip.arithmetic import alone, check_small_numbers, exact_arithmetic
from locallip.attacks import margins
from locallip.balls import Ball, Domain, as_ball
from locallip.bounds import (
    LIMIT,
    SLOPE_STEPS,
    CeilingNorm,
    PartlyLocal,
    Relax,
    Trace,
    WorstLogits,
    branched,
    dense_places,
    deployed_error,
    global_bound,
    inner,
    norm_keys,
    propagate,
    worst_logits,
)
from locallip.bounds.plan import plan_of
from locallip.certify.inputs import as_deployed, as_method, check_model, check_numbers, check_scale, check_shape
from locallip.network import Digests, Network, bytes_of, check_no_cache, described, lower, lower_again, module_rule
from locallip.norms import CholeskyNorm, Guarantee, LanczosNorm, NormRule, RitzNorm
from locallip.rounding import gamma, up

#: The layers whose norms are taken for every input anew; those of the others are the ones over all inputs. "closely" is for
#: all layers, to a smaller tolerance where norms are found by Lanczos.
LocalLayers = Literal["none", "dense", "all", "closely"]
#: "local" is the paper's bound, "lines" linear relaxation alone (bounds/relaxation.py); "auto" takes both, and also lets
#: slopes pull the worst logits back through the network (bounds/pullback.py). Where only a verdict is asked for, "auto"
#: gives up early what will hardly be shown, and "thorough" nothing.
Method = Literal["auto", "thorough", "local", "lines"]
#: Steps of the guess where a proof may succeed: few, as it may err towards trying.
GUESS_STEPS = 40
#: The norms over all inputs are taken once and stand in every certificate, so they are taken more closely than those of one
#: input. Within so many steps Lanczos reaches this tolerance whatever the spectrum, for failure probabilities down to 1e-15.
CEILING_RTOL, CEILING_STEPS = 1e-4, 2000
#: Norms of single inputs where a verdict hangs on them: in dense layers they cost little, and in all layers few need them.
DENSE_RTOL, DENSE_STEPS = 2e-4, 1000
CLOSE_RTOL, CLOSE_STEPS = 2e-4, 1500


class Margin(NamedTuple):
    """worst = label's worst logit minus the best of the others, (B,); positive proves the label. lipschitz is (B,).

    clean and error (B, C) are the logits at x and a bound of their error.
    """

    worst: Tensor
    lipschitz: Tensor
    clean: Tensor
    error: Tensor


class Prover:
    """Bounds of one model under one guarantee, in float64 with outward rounding.

    The failure probability per input is split over the norms of the global bound and of `probes` local bounds. `is_dense`:
    all layers are, so that no norm costs much more than another; `has_cheap_layers`: norms of dense layers are worth trying
    before those of all layers.
    """

    @alone()
    def __init__(
        self,
        model: nn.Module,
        input_shape: Sequence[int],
        guarantee: str | Guarantee,
        *,
        failure_prob: float = 1e-9,
        probes: int = 1,
        power_steps: int = 100,
        seed: int | None = None,
        device: torch.device | None = None,
        deployed_dtype: torch.dtype | str | None = None,
        method: Method = "auto",
        norm: str | float | Ball = "2",
    ):
        self.ball = as_ball(norm)
        self.guarantee, self.failure_prob, self.probes = Guarantee.parse(guarantee), failure_prob, probes
        self.deployed_dtype, self.method = as_deployed(deployed_dtype), as_method(method)
        self.has_slopes, self.has_lines = self.method != "local", self.method != "local"
        self.has_norms = self.method != "lines"
        # What a proof that is repeated may change: whether lines or norms are tried, and how long slopes are looked for.
        self.leaning, self.slope_steps = 1.0, SLOPE_STEPS
        # Where a verdict alone is asked for, what will hardly be shown is given up early, but by those who insist.
        self.insists = self.method == "thorough"
        check_model(model)
        check_shape(input_shape)
        self.device = device or next((p.device for p in model.parameters()), torch.device("cpu"))
        with exact_arithmetic():
            check_small_numbers(self.device)
            check_no_cache(model)
        self.model, self.network = model, lower(model, input_shape)
        self._state = state_of(model, self.network)  # before any bound rests on it
        if self.guarantee is not Guarantee.ESTIMATE:
            with exact_arithmetic():
                check_scale(self.network)
        check_numbers(failure_prob, power_steps, seed)
        self._per_norm, self._power_steps = failure_prob / (self.network.num_norms * (1 + probes)), power_steps
        self.rule = _rule(self.guarantee, self.network, self._per_norm, power_steps, seed)
        # How boxes are sharpened where time may be spent on it, and the numbers that a search may take.
        self.search = inner.MOST if self.insists else inner.LIMIT
        self.boxes: Relax = "slopes" if inner.pays(self.network, self.search) else "boxes"
        self.plan = plan_of(self.network, self.device)
        if self.has_lines and not self.plan.images(1, lines=True):
            self.has_lines = self.has_slopes = False
            self.plan.warn_of(lines=True)
        # The starts of a proof must not depend on how it was decided to try it.
        self.guess = RitzNorm(GUESS_STEPS, seed=another_seed(seed))
        dense, last = dense_places(self.network), len(self.network.stages) - 1
        self.is_dense = len(dense) == self.network.num_norms
        # No margin needs the norm of the last layer, so it alone is no reason to try.
        self.has_cheap_layers = not self.is_dense and any(stage < last for stage, _ in dense)
        like = torch.ones(1, dtype=torch.float64, device=self.device)
        with exact_arithmetic():
            self.ceiling = global_bound(self.network, _closer(self.rule), like, outward=True)
        if isinstance(self.rule, CholeskyNorm):
            self.rule = self.rule.capped(self.ceiling.norms)

    @contextmanager
    def held(self, model: nn.Module, who: str) -> Iterator[None]:
        """For every use: before and after it the model is what it was, and no thread of torch takes small numbers for 0.

        Both may change between two calls or during one, by another thread or by what is called on the way.
        """
        self._look(model, who)
        yield
        self._look(model, who)

    def _look(self, model: nn.Module, who: str) -> None:
        with exact_arithmetic():
            check_small_numbers(self.device)
        check_no_cache(model)
        if state_of(model, self.network) != self._state:
            raise RuntimeError(f"the model has changed since this {who} was made for it: make another one")

    def together(self, batch_size: int) -> int:
        """How many inputs are looked at together: as many as were asked for, or as fit the memory."""
        found = self.plan.images(batch_size, lines=self.has_lines)
        if not found:
            self.plan.warn_of(lines=False)
        return max(1, found)

    def seed_again(self, seed: int) -> None:
        """Begin new streams of random numbers; the bound over all inputs stays, and its starts do not come again."""
        self.guess = RitzNorm(GUESS_STEPS, seed=another_seed(seed))
        if self.guarantee is not Guarantee.DETERMINISTIC:
            self.rule = _rule(self.guarantee, self.network, self._per_norm, self._power_steps, later_seed(seed))

    def trace(
        self,
        x: Tensor,
        eps: Tensor,
        *,
        local: LocalLayers = "all",
        domain: Domain = None,
        relax: Relax | None = None,
    ) -> Trace:
        """The bound with norms for every input in the layers `local`, for float64 x and eps (B,)."""
        rule = CeilingNorm(self.ceiling) if local == "none" else self._local_rule(local)
        return self.trace_by(rule, x, eps, domain, relax)

    def _local_rule(self, local: LocalLayers) -> NormRule:
        rule = self.rule
        if isinstance(rule, LanczosNorm) and local == "closely":
            return rule.sharpened(CLOSE_RTOL, CLOSE_STEPS)
        if local != "dense":
            return rule
        rule = rule.sharpened(DENSE_RTOL, DENSE_STEPS) if isinstance(rule, LanczosNorm) else rule
        return PartlyLocal(rule, dense_places(self.network), self.ceiling)

    def trace_by(self, rule: NormRule, x: Tensor, eps: Tensor, domain: Domain, relax: Relax | None = None) -> Trace:
        with exact_arithmetic():
            return propagate(
                self.network,
                x,
                eps,
                rule,
                ceiling=self.ceiling,
                input_domain=domain,
                ball=self.ball,
                outward=True,
                relax=relax,
                limit=LIMIT if self.has_norms else float("inf"),
                search=self.search,
                plan=self.plan,
            )

    def margin(
        self,
        x: Tensor,
        y: Tensor,
        eps: Tensor,
        *,
        local: LocalLayers = "all",
        domain: Domain = None,
        slopes: bool = True,
        relax: Relax | None = None,
        verdict: bool = False,
    ) -> Margin:
        """What is proved of the label's lead on each ball; NaN where nothing is. Without `slopes` they are not tried.

        Where a `verdict` alone is asked for, the leads of inputs that are not proved may be lower than need be.
        """
        return self._margin_of(self.trace(x, eps, local=local, domain=domain, relax=relax), y, slopes, verdict)

    def margins(self, x: Tensor, y: Tensor, eps: Tensor, *, local: LocalLayers, domain: Domain) -> tuple[Margin, Margin]:
        """`margin` without slopes and, for verdicts, with them, by the same norms."""
        trace = self.trace(x, eps, local=local, domain=domain)
        return self._margin_of(trace, y, False), self._margin_of(trace, y, True, verdict=True)

    def _margin_of(self, trace: Trace, y: Tensor, slopes: bool, verdict: bool = False) -> Margin:
        assert trace.logits_error is not None
        return Margin(self.lead_of(trace, y, slopes, verdict), trace.lipschitz, trace.logits, trace.logits_error)

    def lead_of(self, trace: Trace, y: Tensor, slopes: bool = True, verdict: bool = False) -> Tensor:
        """What a trace proves of the label's lead, (B,), as in `margin`; NaN where nothing is."""
        worst = self._worst(trace, y, slopes, verdict).worst
        with exact_arithmetic():
            return lead(self._deployed(trace, worst, y), y)

    def branched(self, x: Tensor, y: Tensor, eps: Tensor, seconds: float, *, domain: Domain = None) -> Margin:
        """As `margin` for a single input, by branch and bound of about so many seconds where that is needed."""
        local: LocalLayers = "all" if self.has_norms else "none"
        trace = self.trace(x, eps, local=local, domain=domain, relax=self.boxes)
        assert trace.logits_error is not None
        worst = self._worst(trace, y, True).worst
        with exact_arithmetic():
            level = worst.gather(1, y[:, None])[:, 0] - self.wanted(trace, y)
            worst = branched(self.network, trace, y, worst, level, seconds)
            ahead = lead(self._deployed(trace, worst, y), y)
        return Margin(ahead, trace.lipschitz, trace.logits, trace.logits_error)

    def _deployed(self, trace: Trace, worst: Tensor, y: Tensor) -> Tensor:
        """Worst logits of the float32 program, where the certificate is about that."""
        if self.deployed_dtype is None:
            return worst
        label = torch.nn.functional.one_hot(y, worst.shape[1]).bool()
        # Outward by what is added and by the rounding of adding it.
        error = up(deployed_error(self.network, trace, self.deployed_dtype)) + gamma(2, worst.dtype) * worst.abs()
        return torch.where(label, worst - error, worst + error)

    def wanted(self, trace: Trace, y: Tensor) -> Tensor:
        """The lead that the label must have, (B,): logits of the float32 program come nearer to each other."""
        none = torch.zeros_like(trace.logits)
        return none[:, 0] if self.deployed_dtype is None else -lead(self._deployed(trace, none, y), y)

    def _worst(self, trace: Trace, y: Tensor, slopes: bool, verdict: bool = False) -> WorstLogits:
        with exact_arithmetic():
            steps = self.slope_steps if slopes and self.has_slopes else 0
            wanted = self.wanted(trace, y) if steps and verdict and not self.insists else None
            return worst_logits(self.network, trace, y, outward=True, slope_steps=steps, wanted=wanted)

    def clean_logits(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Logits at x and a bound of their error, each (B, C)."""
        trace = self.trace(x, torch.zeros(len(x), dtype=x.dtype, device=x.device), local="none")
        assert trace.logits_error is not None
        return trace.logits, trace.logits_error


def number_of_classes(prover: Prover) -> int:
    shape = prover.network.output_shape
    if len(shape) != 1 or shape[0] < 2:
        found = ", ".join(["B", *map(str, shape)])
        raise ValueError(f"a classifier returns (B, classes) with at least 2 classes; this model returns ({found})")
    return shape[0]


def another_seed(seed: int | None) -> int | None:
    """A seed for random numbers that have nothing to do with those of `seed`."""
    return None if seed is None else (seed + 4_000_037) % 2**63


def later_seed(seed: int) -> int:
    """A seed for the starts behind the bound over all inputs, which may have been drawn with the same one.

    Boxes and masks rest on that bound: a start that it has used already would not be independent of what it is taken for.
    """
    return int.from_bytes(hashlib.sha256(f"{seed} later".encode()).digest()[:8], "big") >> 1


def lead(logits: Tensor, y: Tensor) -> Tensor:
    """z_y - max_{i != y} z_i, (B,); NaN anywhere gives NaN."""
    return torch.where(torch.isfinite(logits).all(1), margins(logits, y), float("nan"))


def _rule(guarantee: Guarantee, network: Network, per_norm: float, power_steps: int, seed: int | None) -> NormRule:
    if guarantee is Guarantee.ESTIMATE:
        return RitzNorm(power_steps, seed=seed)
    if guarantee is Guarantee.HIGH_PROBABILITY:
        return LanczosNorm(per_norm, seed=seed)
    rule = CholeskyNorm()
    for index, stage in enumerate(network.stages):
        for source, key in norm_keys(stage, index).items():
            if not stage.terms[source].disjoint_rows:
                rule.check_size(stage.terms[source], key)
    return rule


def _closer(rule: NormRule) -> NormRule:
    """The rule for the norms over all inputs."""
    return rule.sharpened(CEILING_RTOL, CEILING_STEPS) if isinstance(rule, LanczosNorm) else rule


def fingerprint(model: nn.Module) -> str:
    """SHA-256 of the names, shapes, dtypes and values of all parameters and buffers."""
    digest = hashlib.sha256()
    for name, tensor in sorted(_stored(model).items()):
        if not isinstance(tensor, Tensor):  # extra state of a module
            digest.update(f"{name} {tensor!r}\n".encode())
            continue
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}\n".encode())
        digest.update(bytes_of(tensor))
    return digest.hexdigest()


def _stored(model: nn.Module) -> dict[str, object]:
    """What is saved, and all parameters and buffers as they are: a module may leave out or change what it saves.

    Such as the weights of a frozen part, which checkpoints need not repeat.
    """
    found: dict[str, object] = dict(model.state_dict())
    for path, module in model.named_modules():
        own = {**module._parameters, **module._buffers}
        found.update({f"{path}.{name}".lstrip("."): tensor for name, tensor in own.items() if tensor is not None})
    return found


def state_of(model: nn.Module, network: Network) -> tuple[str, ...]:
    """All that a module computes with, for telling whether it has changed since it was lowered to `network`.

    It is lowered again, for a rule or forward may read what is kept anywhere. And `network` is looked at, which the bounds
    read: numbers such as `BatchNorm.eps` are read when they are needed, and a bound made before a change must not meet them.
    """
    digest, found = Digests(), []
    with exact_arithmetic():
        for name, value in sorted(_stored(model).items()):
            found.append(f"{name} {digest(value) if isinstance(value, Tensor) else repr(value)}")
        try:
            found.extend(described(lower_again(model, network.input_shape), digest))
        except (ValueError, TypeError) as error:  # it could be lowered once
            found.append(str(error))
        found.extend(described(network, digest))
        for name, module in model.named_modules():
            found.extend(_settings_of(name, module, digest))
    return tuple(found)


#: Kinds of settings that a layer keeps, numpy's numbers among them.
_SETTINGS = (int, float, complex, str, tuple, np.generic)


def _settings_of(name: str, module: nn.Module, digest: Digests) -> Iterator[str]:
    """What a module keeps beside its tensors; a rule of a user may read it at any time."""
    plain = {key: value for key, value in vars(module).items() if isinstance(value, _SETTINGS)}
    public = {key: value for key, value in sorted(plain.items()) if not key.startswith("__")}
    hooks = [list(module._forward_hooks), list(module._forward_pre_hooks), "forward" in vars(module)]
    yield f"{name} {type(module).__qualname__} {public!r} {hooks}"
    # Layers with a rule keep nothing but what they compute with; a module of the user may keep what it has computed.
    kept = vars(module).items() if type(module).__module__.startswith("torch.nn") or module_rule(module) else ()
    yield from (f"{key} {digest(value)}" for key, value in kept if isinstance(value, Tensor))
    yield from (f"{key} {value!r}" for key, value in kept if isinstance(value, (list, dict)) and key[0] != "_")
    # What a parametrization makes of its tensor is read anew at every use, and may come from anything that it keeps.
    yield from (f"{key} {digest(getattr(module, key))}" for key in getattr(module, "parametrizations", {}))
