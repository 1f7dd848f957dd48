"""The way of the bound through a network: per stage a box, the units that vary, their norm, and the radius behind it.

Every stage turns what is known of its sources into the same knowledge of its output:
1. box of the pre-activation = interval image, cut with center +- (row norm * radius);
2. masks I_V from the box (eq:indicator_relu0, eq:indicator_relux);
3. radius = sum_k ||I_V^l W_k I_V^k|| * radius_k (eq:local_lip).

With `outward=True` (certification, float64) every quantity is rounded to the safe side: centers carry a bound of their own
error, boxes and radii are widened by what their computation may have lost (docs/soundness.md).
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from locallip.activations import Box, Varying
from locallip.balls import L2, Ball, Domain, box_of
from locallip.bounds import inner
from locallip.bounds.bend import Before
from locallip.bounds.plan import MemoryPlan
from locallip.bounds.region import Region, Trace
from locallip.bounds.relaxation import LIMIT, Relaxation
from locallip.network import Network, Stage
from locallip.norms import Guarantee, NormKey, NormRule
from locallip.ops import LinearOp, Masked, total
from locallip.rounding import FLOOR, floored, gamma, up

BoxRadii = Literal["local", "global", "input"]
Relax = Literal["lines", "boxes", "slopes"]


@dataclass(frozen=True)
class GlobalBound:
    """The bound over all inputs, eq:glocal_lips: the ceiling of every local norm and the paper's radii for the boxes.

    `norms` per term and `lipschitz` per source (input first) are (1,); `outputs` are the slope bounds over all inputs.
    `guarantee` is what the norms rest on.
    """

    norms: Mapping[NormKey, Tensor]
    outputs: tuple[Tensor | None, ...]
    lipschitz: tuple[Tensor, ...]
    total: Tensor
    guarantee: Guarantee


class CeilingNorm(NormRule):
    """The unmasked norm in place of the masked one: BCP's bound, which needs no norm of its own per sample."""

    def __init__(self, ceiling: GlobalBound):
        self.ceiling, self.guarantee = ceiling, ceiling.guarantee

    def __call__(self, op: Masked, key: NormKey, like: Tensor) -> Tensor:
        return self.ceiling.norms[key].to(like.dtype)

    norm = __call__


class PartlyLocal(NormRule):
    """The norms of `rule` in some terms, given as (stage, source), and those of the whole layers elsewhere."""

    def __init__(self, rule: NormRule, places: Container[tuple[int, int]], ceiling: GlobalBound):
        if rule.guarantee is not ceiling.guarantee:
            raise ValueError(f"norms with the guarantee {rule.guarantee} cannot go with a ceiling of {ceiling.guarantee}")
        self.rule, self.places, self.ceiling, self.guarantee = rule, places, ceiling, rule.guarantee

    def norm(self, op: Masked, key: NormKey, like: Tensor) -> Tensor:
        return self.rule.norm(op, key, like) if key[:2] in self.places else self.ceiling.norms[key]


def dense_places(network: Network) -> set[tuple[int, int]]:
    """The terms (stage, source) whose output is a plain vector: those of dense layers, where a norm costs little."""
    flat = [(index, stage) for index, stage in enumerate(network.stages) if len(stage.linear_shape) == 1]
    return {(index, source) for index, stage in flat for source in stage.terms}


def check_exact(network: Network) -> None:
    """Refuse a network in 16-bit arithmetic: its rounding is not what outward rounding allows for."""
    for stage in network.stages:
        if not all(op.exact for op in stage.terms.values()):
            raise ValueError(
                f"the layer before '{stage.name}' computes in 16 bits (in_precision), which is for training; bound the "
                "network itself"
            )


def _masks(stage: Stage, box: Box) -> Varying:
    """Those of a stage, one for each sample, though a layer of one's own may give the same one for all."""
    assert stage.activation is not None
    found = stage.activation.varying(box)
    batch, dims = len(box.lower), box.lower.dim()
    for mask in found:
        if mask.dim() != dims or len(mask) not in (1, batch):
            raise ValueError(
                f"'varying' of the activation behind '{stage.name}' gives masks of shape {tuple(mask.shape)} for boxes of "
                f"shape {tuple(box.lower.shape)}: the first dimension must be that of the samples"
            )
    return Varying(*(mask.expand(batch, *mask.shape[1:]) for mask in found))


def norm_keys(stage: Stage, index: int) -> dict[int, NormKey]:
    """The key of each term of a stage, by source."""
    return {source: NormKey(index, source, stage.layers.get(source, stage.name)) for source in stage.terms}


def global_bound(network: Network, norm: NormRule, like: Tensor, *, outward: bool = False) -> GlobalBound:
    """Norms without masks and their products along the network; `like` gives dtype and device."""
    if outward:
        check_exact(network)
    one = torch.ones(1, dtype=like.dtype, device=like.device)
    outputs: list[Tensor | None] = [None]
    lipschitz = [one]
    norms: dict[NormKey, Tensor] = {}
    for index, stage in enumerate(network.stages):
        inputs, out = None, None
        if stage.activation is not None:
            inputs, out = _masks(stage, Box.everything(stage.linear_shape, like))
        keys = norm_keys(stage, index)
        for source, op in stage.terms.items():
            norms[keys[source]] = norm(Masked(op, inputs, outputs[source]), keys[source], one)
        outputs.append(out)
        lipschitz.append(_weighted_sum([(norms[key], lipschitz[source]) for source, key in keys.items()], outward))
    return GlobalBound(norms, tuple(outputs), tuple(lipschitz), lipschitz[-1], norm.guarantee)


def propagate(
    network: Network,
    x: Tensor,
    eps: Tensor,
    norm: NormRule,
    *,
    ceiling: GlobalBound | None = None,
    box_radii: BoxRadii = "local",
    intervals: bool = True,
    input_domain: Domain = None,
    ball: Ball = L2,
    outward: bool = False,
    relax: Relax | None = None,
    limit: float = LIMIT,
    search: int = inner.LIMIT,
    keep_before: bool = False,
    plan: MemoryPlan | None = None,
) -> Trace:
    """Bounds for every x' with ||x' - x|| <= eps in the norm of the ball, for x (B, *input_shape) and eps (B,).

    `box_radii="global"` cuts the boxes with the paper's radii eps * prod ||W^k||; "local" with the local radii found so
    far, which are smaller; "input" only those of stages that read nothing but the input: plain interval arithmetic from
    there on. `ceiling` caps every norm by the unmasked one (theo:local_lip) and is needed for "global".
    `intervals=False` takes the box around the ball alone, without the interval image: a valid box at a third of the cost.
    eps of shape (1,) serves all samples, and saves a batch of equal radii. `relax`, which needs `outward`, adds the lines of
    linear relaxation; "boxes" also sharpens with them the boxes of units that may bend, up to `limit` numbers, and "slopes"
    some of them once more with slopes of their own, up to `search` numbers (inner.py).
    `keep_before` keeps what slopes need without outward rounding too, for guesses. With a `plan` lines and slopes are looked
    at in parts that fit the memory.
    """
    if x.shape[1:] != network.input_shape:  # layers over images take other sizes too, but have other norms there
        here, there = tuple(x.shape[1:]), tuple(network.input_shape)
        raise ValueError(f"x has samples of shape {here}, and the bounds are those of the network for samples of {there}")
    if box_radii == "global" and ceiling is None:
        raise ValueError("box_radii='global' needs the global bound as ceiling")
    if outward:
        check_exact(network)
    if relax and not outward:
        raise ValueError("lines are for certificates: relax needs outward=True")
    if outward and (box_radii == "input" or not intervals):
        raise ValueError("box_radii='input' and intervals=False are for training; a certificate uses ball and interval")
    if box_radii == "input" and not intervals:
        raise ValueError("box_radii='input' leaves nothing but intervals, so intervals=False cannot go with it")
    regions = [_input_region(x, eps, input_domain, ball, outward)]
    boxes: list[Box] = []
    masks: list[Varying] = []
    befores: list[Before] = []
    norms: dict[NormKey, Tensor] = {}
    balls = _Balls(regions[0].radius, box_radii, ceiling, outward, intervals)
    relaxation = Relaxation(regions[0], limit, plan) if relax else None
    for index, stage in enumerate(network.stages):
        keys = norm_keys(stage, index)
        center, error, box = _pre_activation(stage, regions, balls)
        if relaxation is not None and relax != "lines" and error is not None:
            box = relaxation.sharpened(stage, center, error, box)
        if relax == "slopes" and error is not None:
            box = inner.searched(network, _so_far(regions, befores, center, error, plan), box, search)
        varying = Varying(None, None) if stage.activation is None else _masks(stage, box)  # type: ignore[arg-type]
        for source, op in stage.terms.items():
            value = norm(Masked(op, varying.inputs, regions[source].outputs), keys[source], eps)
            norms[keys[source]] = value if ceiling is None else torch.minimum(value, ceiling.norms[keys[source]])
        radius = _weighted_sum([(norms[key], regions[source].radius) for source, key in keys.items()], outward)
        lipschitz = _weighted_sum([(norms[key], regions[source].lipschitz) for source, key in keys.items()], outward)
        if stage.activation is None:
            total_slope = lipschitz.expand(len(x))
            known = tuple(regions), tuple(boxes), tuple(masks), norms, center, error, total_slope, tuple(befores), box
            return Trace(*known, relaxation, plan, is_small=relax == "slopes")
        boxes.append(box)
        masks.append(varying)
        if error is not None or keep_before:
            off = torch.zeros_like(center) if error is None else error
            befores.append(Before(center, off, box, varying, radius.expand(len(x))))
        center, error, image = _activate(stage, center, error, box)
        regions.append(Region(center, error, image, radius, lipschitz, varying.outputs))
        if relaxation is not None:
            relaxation.learn(stage, befores[-1], regions[-1])
    raise AssertionError("the last stage has no activation")


def _so_far(regions: list[Region], befores: list[Before], center: Tensor, error: Tensor, plan: MemoryPlan | None) -> Trace:
    """What is known up to a pre-activation, which stands for the logits."""
    lipschitz = regions[-1].lipschitz
    return Trace(tuple(regions), (), (), {}, center, error, lipschitz, tuple(befores), plan=plan)


def _input_region(x: Tensor, eps: Tensor, domain: Domain, ball: Ball, outward: bool) -> Region:
    box = Box(*box_of(x, eps, domain, outward))
    radius, error = ball.l2_radius(x, eps, box, outward), torch.zeros_like(x) if outward else None
    around_ball = domain is None and not ball.is_box
    return Region(x, error, box, radius, torch.ones_like(eps), None, ball_only=around_ball)


@dataclass(frozen=True)
class _Balls:
    """How the balls cut the boxes; `radius` (B,) is that of the l2 ball at the input."""

    radius: Tensor
    radii: BoxRadii
    ceiling: GlobalBound | None
    outward: bool
    intervals: bool = True

    def cut(self, stage: Stage) -> bool:
        """Whether the ball says anything about a stage."""
        return self.radii != "input" or set(stage.terms) == {0}

    def reach(self, op: LinearOp, source: int, region: Region) -> Tensor:
        """||W_i|| * rho for every unit: how far the ball lets a pre-activation move from its center."""
        if self.radii == "global":
            assert self.ceiling is not None
            outputs, radius = self.ceiling.outputs[source], self.radius * self.ceiling.lipschitz[source]
        else:
            outputs, radius = region.outputs, region.radius
        ones = torch.ones_like(region.center[:1], dtype=self.radius.dtype)
        rows = op.row_norms(ones if outputs is None else outputs.to(self.radius.dtype))
        radius = radius.reshape(-1, *[1] * (rows.dim() - 1))
        if not self.outward:
            return rows * radius
        # Squares of entries below 1e-154 vanish; FLOOR covers them, as no operator comes near it (check_scale).
        return up((up(rows, 8 + op.fan_in) + FLOOR) * (up(radius) + FLOOR))


def _pre_activation(stage: Stage, regions: list[Region], balls: _Balls) -> tuple[Tensor, Tensor | None, Box]:
    """Center, its error, and the box before the activation of a stage, each (B, *linear_shape)."""
    if balls.outward:
        return _pre_activation_outward(stage, regions, balls)
    reaches = [balls.reach(op, k, regions[k]) for k, op in stage.terms.items()] if balls.cut(stage) else []
    if not balls.intervals or all(regions[source].ball_only for source in stage.terms):
        center = stage.linear([region.center for region in regions])
        return center, None, Box(center - total(reaches), center + total(reaches))
    centers, middles, spans = [], [], []
    for source, op in stage.terms.items():
        box = regions[source].box
        center, middle = _apply_both(op, regions[source].center, torch.lerp(box.lower, box.upper, 0.5))
        centers.append(center)
        middles.append(middle)
        spans.append(op.apply_abs(box.upper - box.lower))
    offset = stage.offset(balls.radius)
    center, middle = total(centers) + offset, total(middles) + offset
    return center, None, _cut(middle, total(spans), center, total(reaches) if reaches else None)


def _apply_both(op: LinearOp, first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
    """W first and W second: on a GPU as one call, which halves the kernels; elsewhere the copy would cost more."""
    if not first.is_cuda:
        return op.apply(first), op.apply(second)
    both = op.apply(torch.cat([first, second]))
    return both[: len(first)], both[len(first) :]


def _pre_activation_outward(stage: Stage, regions: list[Region], balls: _Balls) -> tuple[Tensor, Tensor, Box]:
    """The same, every part widened by what its own computation may have lost."""
    like = balls.radius
    slack = gamma(stage.fan_in + 8, like.dtype)
    centers, middles, spreads, reaches, errors = [], [], [], [], []
    for source, op in stage.terms.items():
        region = regions[source]
        middle, half = _covering(region.box)
        centers.append(op.apply(region.center))
        middles.append(op.apply(middle))
        spreads.append(op.apply_abs(floored(half + slack * middle.abs(), middle != 0)))
        reaches.append(balls.reach(op, source, region))
        assert region.error is not None
        errors.append(op.apply_abs(floored(region.error + slack * region.center.abs(), region.center != 0)))
    offset, offset_slack = stage.offset(like), slack * stage.offset.magnitude(like)
    center, middle = total(centers) + offset, total(middles) + offset
    error = up(total(errors) + offset_slack, 8 + stage.fan_in)
    spread = up(total(spreads) + offset_slack, 8 + stage.fan_in) + slack * middle.abs()
    reach = up(total(reaches) + error, 8 + stage.fan_in) + slack * center.abs()
    upper = torch.minimum(middle + spread, center + reach)
    lower = torch.maximum(middle - spread, center - reach)
    return center, error, Box(lower, upper)


def _covering(box: Box) -> tuple[Tensor, Tensor]:
    """m = (UB + LB) / 2 and r = (UB - LB) / 2, rounded so that m +- r covers the box."""
    middle = (box.upper + box.lower) / 2
    return middle, up(torch.maximum(box.upper - middle, middle - box.lower).clamp(min=0))


def _cut(middle: Tensor, span: Tensor, center: Tensor, reach: Tensor | None) -> Box:
    """middle +- span / 2 cut with center +- reach."""
    if reach is None:
        return Box(torch.sub(middle, span, alpha=0.5), torch.add(middle, span, alpha=0.5))
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():  # a compiler chooses itself what to keep
        return Box(*_CutByte.apply(middle, span, center, reach)[:2])
    low = torch.maximum(torch.sub(middle, span, alpha=0.5), center - reach)
    return Box(low, torch.minimum(torch.add(middle, span, alpha=0.5), center + reach))


class _CutByte(torch.autograd.Function):
    """`_cut`, keeping for the backward pass only which ends of each unit the ball gave; torch would keep both sides."""

    @staticmethod
    def forward(middle: Tensor, span: Tensor, center: Tensor, reach: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        low, ball_low = torch.sub(middle, span, alpha=0.5), center - reach
        high, ball_high = torch.add(middle, span, alpha=0.5), center + reach
        code = (low < ball_low).view(torch.uint8) + 2 * (high > ball_high).view(torch.uint8)
        return torch.maximum(low, ball_low), torch.minimum(high, ball_high), code

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, ...]) -> None:
        ctx.save_for_backward(output[2])
        ctx.mark_non_differentiable(output[2])
        ctx.shapes = [value.shape for value in inputs]

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, ...]:
        (code,) = ctx.saved_tensors
        low, high = grads[:2]
        ball_low, ball_high = (code & 1).to(low.dtype).mul_(low), (code >> 1).to(high.dtype).mul_(high)
        box_low, box_high = low - ball_low, high - ball_high
        found = box_low + box_high, (box_high - box_low) * 0.5, ball_low + ball_high, ball_high - ball_low
        return tuple(grad.sum_to_size(shape) for grad, shape in zip(found, ctx.shapes, strict=True))


def _activate(stage: Stage, center: Tensor, error: Tensor | None, box: Box) -> tuple[Tensor, Tensor | None, Box]:
    """Center, its error and the box behind the activation; the error through the image of the thin box around the center."""
    assert stage.activation is not None
    after, image = stage.activation.center_and_image(center, box)
    if error is None:
        return after, None, image
    around = up(error) + gamma(2, center.dtype) * center.abs()
    thin = stage.activation.image(Box(center - around, center + around))
    return after, up(torch.maximum(thin.upper - after, after - thin.lower).clamp(min=0)), image


def _weighted_sum(pairs: list[tuple[Tensor, Tensor]], outward: bool) -> Tensor:
    """sum_k norm_k * value_k, (B,)."""
    products = [floored(norm * value, (norm > 0) & (value > 0)) if outward else norm * value for norm, value in pairs]
    result = total(products)
    return up(result, 8 + 2 * len(pairs)) if outward else result
