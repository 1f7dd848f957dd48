"""The answer to a VNN-LIB file: unsat by a certificate over the box, sat by a point of it, or unknown."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor, nn

from locallip.arithmetic import autocast_off
from locallip.attacks import strong_attempts
from locallip.balls import INF
from locallip.certify import Certifier, Verdict
from locallip.certify.confirm import Judge
from locallip.network import lower
from locallip.vnnlib.expressions import WrongSpec
from locallip.vnnlib.spec import Spec

#: Attacks in their order, from the cheapest.
ATTACKS = ("pgd", "apgd-ce", "apgd-t")


@dataclass(frozen=True)
class Answer:
    """`result` is "unsat", "sat" or "unknown", `by` what gave it, `margin` the proved lead of the label, None for none.

    Under sat, `point` are the inputs and `outputs` what the network computes there, flattened, in float64.
    """

    result: str
    by: str
    margin: float | None
    seconds: float
    point: list[float] | None = None
    outputs: list[float] | None = None

    def witness(self) -> str:
        """The point as the competition writes it."""
        both = (("X", self.point or ()), ("Y", self.outputs or ()))
        parts = [f"({kind}_{i} {value!r})" for kind, values in both for i, value in enumerate(values)]
        return "(" + "\n ".join(parts) + ")"


class Decider:
    """Answers questions about one network; `options` are those of a `Certifier`."""

    def __init__(self, model: nn.Module, input_shape: Sequence[int], classes: int, device: torch.device, **options: Any):
        self.model, self.shape, self.classes = model.to(device).eval(), torch.Size(input_shape), classes
        self.device, self.options = device, options
        self.network = lower(self.model, self.shape)
        self._known: dict[tuple[int, ...], tuple[Certifier, Judge]] = {}

    def check(self, spec: Spec) -> None:
        """Refuse a question about another network than this."""
        sizes = " x ".join(map(str, self.shape))
        if len(spec.lower) != self.shape.numel():
            raise WrongSpec(f"it has {len(spec.lower)} inputs, and the network {self.shape.numel()} ({sizes})")
        if spec.classes != self.classes:
            raise WrongSpec(f"it has {spec.classes} outputs, and the network {self.classes}")

    def __call__(self, spec: Spec, *, attack_steps: int, seed: int) -> Answer:
        """The attack comes first: what it breaks needs no proof."""
        self.check(spec)
        begin = time.perf_counter()
        certifier, judge = self._of(spec)
        low, high = (self._tensor(ends) for ends in outer_box(spec))
        x = (low / 2 + high / 2).clamp(low, high)[None]
        y = torch.tensor([spec.label if self._is_whole(spec) else 0], device=self.device)
        reach = torch.maximum(high - x, x - low).max() * (1 + 1e-12)
        most = torch.finfo(reach.dtype).max  # bounds widen it to infinity, and cut that with the box
        eps = torch.nextafter(reach, reach.new_tensor(math.inf)).clamp(max=most)[None]
        inner = inner_box(spec)
        box = self._tensor(inner[0]), self._tensor(inner[1])
        point, by = self._counterexample(judge, x.clamp(*box), y, (2 * eps).clamp(max=most), box, attack_steps, seed)
        if point is not None:
            with torch.no_grad(), autocast_off():
                outputs = self.network(point)[0]
            seconds = time.perf_counter() - begin
            return Answer("sat", by, None, seconds, point.flatten().tolist(), outputs.tolist())
        certifier.seed_again(seed)
        found = certifier.within((low, high))(x, y, eps)
        proved = found.verdicts[0] is Verdict.CERTIFIED
        margin = float(found.margin[0])
        result, by = ("unsat", found.decided_by[0]) if proved else ("unknown", "nothing")
        return Answer(result, by, margin if math.isfinite(margin) else None, time.perf_counter() - begin)

    def _counterexample(
        self, judge: Judge, x: Tensor, y: Tensor, eps: Tensor, box: tuple[Tensor, Tensor], steps: int, seed: int
    ) -> tuple[Tensor | None, str]:
        """A point of the box where the label is surely lost, and what found it: the middle, or an attack."""
        found = judge.look(x, x, y, eps, box)
        if bool(found.broken):
            return found.points, "middle of the box"
        generator = torch.Generator(self.device).manual_seed(seed)
        if not steps:
            return None, ""
        options: dict[str, Any] = {"steps": steps, "input_domain": box, "ball": INF, "generator": generator}
        for attempt in strong_attempts(judge.logits, kinds=ATTACKS, **options):
            with torch.inference_mode(False), autocast_off():
                points = attempt.search(x, y, eps)
            found = judge.look(x, points, y, eps, box)
            if bool(found.broken):
                return found.points, attempt.name
        return None, ""

    def _of(self, spec: Spec) -> tuple[Certifier, Judge]:
        """What certifies and judges this question; it is kept for others about the same classes."""
        key = () if self._is_whole(spec) else (spec.label, *spec.rivals)
        if key not in self._known:
            model = self.model if not key else nn.Sequential(self.model, _chosen(key, self.classes, self.model))
            options = {"norm": INF, "attack_steps": 0, "device": self.device, **self.options}
            judge = Judge(model, self.shape, self.device, ball=INF)
            self._known[key] = Certifier(model, self.shape, **options), judge
        return self._known[key]

    def _is_whole(self, spec: Spec) -> bool:
        """Whether all other classes are rivals."""
        return len(spec.rivals) == self.classes - 1

    def _tensor(self, ends: Sequence[float]) -> Tensor:
        return torch.tensor(ends, dtype=torch.float64, device=self.device).reshape(self.shape)


def outer_box(spec: Spec) -> tuple[list[float], list[float]]:
    """The ends in float64, rounded outward: this box holds that of the file."""
    return [_down(v) for v in spec.lower], [_up(v) for v in spec.upper]


def inner_box(spec: Spec) -> tuple[list[float], list[float]]:
    """The ends rounded inward, or to the nearest number where none lies between them."""
    low, high = [_up(v) for v in spec.lower], [_down(v) for v in spec.upper]
    thin = [a > b for a, b in zip(low, high, strict=True)]
    nearest = [float((a + b) / 2) for a, b in zip(spec.lower, spec.upper, strict=True)]
    low, high = ([n if t else v for n, t, v in zip(nearest, thin, ends, strict=True)] for ends in (low, high))
    return low, high


def _up(value: Fraction) -> float:
    nearest = float(value)
    return nearest if Fraction(nearest) >= value else math.nextafter(nearest, math.inf)


def _down(value: Fraction) -> float:
    return -_up(-value)


def _chosen(classes: Sequence[int], count: int, model: nn.Module) -> nn.Linear:
    """The outputs of these classes alone, as a linear layer: products with 0 and 1 are exact."""
    like = next(model.parameters(), torch.zeros(()))
    layer = nn.Linear(count, len(classes), bias=False, dtype=like.dtype, device=like.device)
    with torch.no_grad():
        layer.weight.copy_(torch.eye(count)[list(classes)])
    return layer
