"""How to build every operator and activation that the contract tests run over: a new one is one row of a table."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from locallip import activations as act
from locallip.network import PassThrough
from locallip.ops import Compose, Conv, Dense, Diagonal, Identity, LinearOp, Masked, Permute, Reshape, Sum, average_pool

BATCH = 3
LIKE = torch.zeros(1, dtype=torch.float64)


# Operators -------------------------------------------------------------------------------------------------------------


class Weights:
    """Random weights that are float32 numbers in the dtype asked for, kept where the operators read them."""

    def __init__(self, seed: int = 0, dtype: torch.dtype = torch.float64):
        self._generator = torch.Generator().manual_seed(seed)
        self.dtype = dtype
        self.values: list[Tensor] = []

    def random(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self._generator, dtype=torch.float64).float().to(self.dtype)

    def new(self, *shape: int) -> Callable[[], Tensor]:
        """A reader of a new weight."""
        index = len(self.values)
        self.values.append(self.random(*shape).requires_grad_())
        return lambda: self.values[index]

    def mask(self, *shape: int, fractional: bool = False) -> Tensor:
        """One set of weights per sample: booleans, or numbers in [0, 1] of which about a third are 0."""
        draws = torch.rand(BATCH, *shape, generator=self._generator, dtype=torch.float64)
        return (draws - 1 / 3).clamp(min=0) if fractional else draws > 1 / 3


@dataclass
class Built:
    """An operator, the weights it reads, and torch's own layer for it where there is one."""

    op: LinearOp
    weights: Weights
    reference: Callable[[Tensor], Tensor] | None = None


@dataclass(frozen=True)
class OpCase:
    """`exact` says that apply_abs and row_norms are equalities, not just upper bounds."""

    name: str
    make: Callable[[Weights], LinearOp | tuple[LinearOp, Callable[[Tensor], Tensor]]]
    exact: bool = True

    def build(self, seed: int = 0, dtype: torch.dtype = torch.float64) -> Built:
        weights = Weights(seed, dtype)
        made = self.make(weights)
        op, reference = made if isinstance(made, tuple) else (made, None)
        return Built(op, weights, reference)


_CONV = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}


def conv(
    w: Weights,
    in_shape: Sequence[int],
    out: int,
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[tuple[int, int]],
    dilation: Sequence[int] | None = None,
    groups: int = 1,
) -> tuple[Conv, Callable[[Tensor], Tensor]]:
    """A convolution and torch's, the latter on an input that is padded by hand."""
    weight = w.new(out, in_shape[0] // groups, *kernel)
    dilation = dilation or [1] * len(kernel)
    op = Conv(weight, in_shape, stride, padding, dilation, groups)
    sides = [n for pair in reversed(list(padding)) for n in pair]
    layer = _CONV[len(kernel)]

    def reference(v: Tensor) -> Tensor:
        return layer(F.pad(v, sides), weight().to(v.dtype), None, tuple(stride), 0, tuple(dilation), groups)

    return op, reference


def pool(
    in_shape: Sequence[int],
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    *settings: bool,
    **named: object,
) -> tuple[LinearOp, Callable[[Tensor], Tensor]]:
    layer = F.avg_pool1d if len(kernel) == 1 else F.avg_pool2d

    def run(v: Tensor) -> Tensor:
        return layer(v, tuple(kernel), tuple(stride), tuple(padding), *settings, **named)  # type: ignore[operator]

    return average_pool(run, in_shape, kernel, stride, padding, LIKE), run


def dense(w: Weights, out: int, inputs: int, leading: tuple[int, ...] = ()) -> tuple[Dense, Callable[[Tensor], Tensor]]:
    weight = w.new(out, inputs)
    return Dense(weight, leading), lambda v: F.linear(v, weight().to(v.dtype))


def diagonal(w: Weights, factor_shape: Sequence[int], shape: Sequence[int]) -> Diagonal:
    factor = w.new(*factor_shape)
    return Diagonal(lambda dtype: factor().to(dtype), shape)


def residual(w: Weights) -> tuple[LinearOp, Callable[[Tensor], Tensor]]:
    inner, reference = conv(w, (2, 4, 4), 2, (3, 3), (1, 1), [(1, 1), (1, 1)])
    return Sum([Identity((2, 4, 4)), inner]), lambda v: v + reference(v)


def batch_normed(w: Weights) -> LinearOp:
    inner, _ = conv(w, (2, 5, 5), 3, (3, 3), (2, 2), [(1, 1), (1, 1)])
    return Compose(diagonal(w, (3, 1, 1), inner.out_shape), inner)


def classifier_head(w: Weights, kernel: int, stride: int) -> LinearOp:
    """Dense after Reshape after an average pool."""
    pooled, _ = pool((2, 6, 6), (kernel, kernel), (stride, stride), (0, 0))
    flat = Compose(Reshape(pooled.out_shape, (pooled.out_shape.numel(),)), pooled)
    return Compose(dense(w, 4, flat.out_shape.numel())[0], flat)


def masked(w: Weights, base: LinearOp, fractional: bool, rows: bool = True, cols: bool = True) -> Masked:
    return Masked(
        base,
        w.mask(*base.out_shape, fractional=fractional) if rows else None,
        w.mask(*base.in_shape, fractional=fractional) if cols else None,
    )


def _masked_conv(w: Weights, fractional: bool) -> LinearOp:
    return masked(w, conv(w, (2, 5, 4), 3, (3, 2), (2, 1), [(1, 1), (0, 1)])[0], fractional)


_Z = (0, 0)
OPS: tuple[OpCase, ...] = (
    OpCase("dense", lambda w: dense(w, 5, 7)),
    OpCase("dense tall", lambda w: dense(w, 9, 4)),
    OpCase("dense one row", lambda w: dense(w, 1, 6)),
    OpCase("dense leading", lambda w: dense(w, 4, 3, (2,))),
    OpCase("dense leading twice", lambda w: dense(w, 2, 3, (2, 2))),
    OpCase("conv1d", lambda w: conv(w, (2, 9), 3, (3,), (1,), [_Z])),
    OpCase("conv1d stride", lambda w: conv(w, (2, 10), 3, (3,), (3,), [(1, 1)])),
    OpCase("conv1d stride leaves a rest", lambda w: conv(w, (1, 11), 2, (2,), (4,), [_Z])),
    OpCase("conv1d same, even kernel", lambda w: conv(w, (2, 6), 2, (4,), (1,), [(1, 2)])),
    OpCase("conv1d dilation", lambda w: conv(w, (2, 12), 2, (3,), (2,), [(2, 2)], (3,))),
    OpCase("conv1d padding beyond the kernel", lambda w: conv(w, (1, 4), 2, (2,), (1,), [(5, 5)])),
    OpCase("conv1d one side padded", lambda w: conv(w, (1, 7), 2, (3,), (3,), [(0, 4)])),
    OpCase("conv2d", lambda w: conv(w, (2, 5, 5), 3, (3, 3), (1, 1), [(1, 1), (1, 1)])),
    OpCase("conv2d of 6C2F", lambda w: conv(w, (2, 8, 8), 2, (4, 4), (2, 2), [(1, 1), (1, 1)])),
    OpCase("conv2d unequal", lambda w: conv(w, (2, 7, 6), 2, (2, 3), (3, 2), [(1, 1), _Z])),
    OpCase("conv2d stride leaves a rest", lambda w: conv(w, (1, 8, 7), 2, (3, 2), (3, 4), [_Z, (1, 1)])),
    OpCase("conv2d asymmetric", lambda w: conv(w, (2, 5, 4), 2, (2, 4), (1, 1), [(0, 1), (1, 2)])),
    OpCase("conv2d asymmetric and stride", lambda w: conv(w, (1, 6, 6), 2, (3, 3), (2, 3), [(0, 1), (3, 0)])),
    OpCase("conv2d one side by hand", lambda w: conv(w, (1, 6, 5), 2, (3, 2), (2, 2), [(2, 2), (0, 1)])),
    OpCase("conv2d dilation", lambda w: conv(w, (1, 8, 7), 2, (3, 2), (2, 1), [(2, 2), (1, 1)], (2, 3))),
    OpCase("conv2d groups", lambda w: conv(w, (4, 4, 4), 6, (3, 3), (1, 1), [(1, 1), (1, 1)], None, 2)),
    OpCase("conv2d depthwise", lambda w: conv(w, (3, 5, 5), 3, (3, 3), (1, 1), [(1, 1), (1, 1)], None, 3)),
    OpCase("conv2d depthwise disjoint", lambda w: conv(w, (2, 6, 7), 2, (2, 3), (2, 3), [_Z, (1, 1)], None, 2)),
    OpCase("conv2d depthwise twice", lambda w: conv(w, (2, 4, 4), 4, (2, 2), (2, 2), [_Z, _Z], None, 2)),
    OpCase("conv2d patches", lambda w: conv(w, (2, 6, 6), 1, (3, 3), (3, 3), [_Z, _Z])),
    OpCase("conv2d dilated past its stride", lambda w: conv(w, (1, 7, 7), 1, (2, 2), (2, 2), [_Z, _Z], (2, 2))),
    OpCase("conv2d padding beyond the kernel", lambda w: conv(w, (1, 3, 3), 2, (2, 2), (2, 3), [(3, 3), (4, 4)])),
    OpCase("conv2d 1x1", lambda w: conv(w, (3, 3, 3), 2, (1, 1), (2, 2), [_Z, _Z])),
    OpCase("conv3d", lambda w: conv(w, (2, 3, 4, 3), 2, (2, 3, 2), (1, 2, 2), [(1, 1), (1, 1), _Z])),
    OpCase("conv3d asymmetric", lambda w: conv(w, (1, 3, 3, 4), 2, (2, 2, 3), (2, 1, 2), [(0, 1), (1, 0), (1, 1)])),
    OpCase("identity", lambda w: (Identity((2, 3)), lambda v: v)),
    OpCase("reshape", lambda w: (Reshape((2, 3, 2), (4, 3)), lambda v: v.reshape(-1, 4, 3))),
    OpCase("permute", lambda w: (Permute((2, 3, 4), (2, 0, 1)), lambda v: v.permute(0, 3, 1, 2))),
    OpCase("flatten", lambda w: (Reshape((2, 3, 2), (12,)), lambda v: v.flatten(1))),
    OpCase("diagonal", lambda w: diagonal(w, (2, 3), (2, 3))),
    OpCase("diagonal per channel", lambda w: diagonal(w, (2, 1, 1), (2, 3, 3))),
    OpCase("diagonal scalar", lambda w: diagonal(w, (), (5,))),
    OpCase("pool disjoint", lambda w: pool((2, 6, 6), (2, 2), (2, 2), (0, 0))),
    OpCase("pool overlapping", lambda w: pool((2, 5, 5), (3, 3), (1, 2), (1, 1))),
    OpCase("pool gaps", lambda w: pool((1, 7, 8), (2, 2), (3, 3), (1, 0))),
    OpCase("pool ceil", lambda w: pool((1, 6, 7), (3, 2), (2, 3), (0, 1), ceil_mode=True)),
    OpCase("pool ceil, padding left out", lambda w: pool((1, 6, 7), (3, 3), (2, 2), (1, 1), True, False)),
    OpCase("pool padding left out", lambda w: pool((2, 5, 4), (3, 2), (2, 2), (1, 1), False, False)),
    OpCase("pool divisor", lambda w: pool((1, 6, 5), (2, 3), (2, 2), (0, 1), divisor_override=5)),
    OpCase("pool 1d", lambda w: pool((2, 9), (3,), (2,), (1,))),
    OpCase("pool 1d ceil", lambda w: pool((2, 8), (3,), (3,), (0,), True, False)),
    OpCase("dense after flatten after disjoint pool", lambda w: classifier_head(w, 2, 2)),
    OpCase("dense after flatten after overlapping pool", lambda w: classifier_head(w, 3, 1), exact=False),
    OpCase("batch norm after conv", batch_normed),
    OpCase("dense after dense", lambda w: Compose(dense(w, 3, 4)[0], dense(w, 4, 5)[0]), exact=False),
    OpCase("dense after diagonal", lambda w: Compose(dense(w, 3, 4)[0], diagonal(w, (4,), (4,)))),
    OpCase("pool after depthwise", lambda w: _pool_after_patches(w)),
    OpCase("dense after permute", lambda w: Compose(dense(w, 3, 2, (4, 3))[0], Permute((2, 3, 4), (2, 1, 0)))),
    OpCase("diagonal after reshape", lambda w: Compose(diagonal(w, (6,), (6,)), Reshape((2, 3), (6,)))),
    OpCase("identity + conv", residual, exact=False),
    OpCase("dense + dense + dense", lambda w: Sum([dense(w, 3, 4)[0] for _ in range(3)]), exact=False),
    OpCase("masked dense", lambda w: masked(w, dense(w, 5, 6)[0], False)),
    OpCase("masked dense, rows alone", lambda w: masked(w, dense(w, 5, 6)[0], True, cols=False)),
    OpCase("masked dense, columns alone", lambda w: masked(w, dense(w, 5, 6)[0], True, rows=False)),
    OpCase("masked conv", lambda w: _masked_conv(w, False)),
    OpCase("weighed conv", lambda w: _masked_conv(w, True)),
    OpCase("weighed pool", lambda w: masked(w, pool((1, 4, 4), (2, 2), (2, 2), (0, 0))[0], True)),
    OpCase("weighed residual", lambda w: masked(w, residual(w)[0], True), exact=False),
    OpCase("unmasked", lambda w: Masked(dense(w, 3, 4)[0], None, None)),
)


def _pool_after_patches(w: Weights) -> LinearOp:
    inner, _ = conv(w, (2, 8, 8), 2, (2, 2), (2, 2), [_Z, _Z], None, 2)
    return Compose(pool(inner.out_shape, (2, 2), (2, 2), (0, 0))[0], inner)


def matrices(op: LinearOp) -> Tensor:
    """The matrix of each sample, (BATCH, out, in) in float64, column by column through `apply`."""
    if isinstance(op, Masked) and op.batch > 1:
        return torch.stack([op.select(slice(i, i + 1)).materialize(LIKE) for i in range(op.batch)]).detach()
    return op.materialize(LIKE).expand(BATCH, -1, -1).detach()


# Activations -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ActivationCase:
    """An activation, the module it stands for, and where its behaviour changes.

    `points` broadcast against (B, *shape). `difference` is phi(a) - phi(b) without cancellation where phi itself rounds.
    """

    name: str
    activation: act.Activation
    module: Callable[[Tensor], Tensor]
    shape: tuple[int, ...] = (6,)
    points: tuple[Tensor | float, ...] = (0.0,)
    difference: Callable[[Tensor, Tensor], Tensor] | None = None
    tolerance: float = field(default=0.0, kw_only=True)

    def change(self, a: Tensor, b: Tensor) -> Tensor:
        return self.activation(a) - self.activation(b) if self.difference is None else self.difference(a, b)


def _relu_theta() -> ActivationCase:
    module = act.ReLUTheta((6,)).double()
    with torch.no_grad():
        module.raw_theta.copy_(torch.tensor([0.0, 0.3, -1.0, 2.0, -0.05, 50.0]))
    return ActivationCase("relu_theta", act.relu_theta(module), module, (6,), (0.0, module.theta.detach()))


def _clipped(name: str, upper: Sequence[float], lower: Sequence[float], spatial: tuple[int, ...] = ()) -> ActivationCase:
    module = act.ClippedMaxMin((len(upper), *spatial)).double()
    with torch.no_grad():
        shape = (-1, *[1] * len(spatial))
        module.upper.copy_(torch.tensor(upper, dtype=torch.float64).reshape(shape).expand_as(module.upper))
        module.lower.copy_(torch.tensor(lower, dtype=torch.float64).reshape(shape).expand_as(module.lower))
    points = tuple(torch.cat([t.detach(), t.detach()]) for t in (module.upper, module.lower))
    return ActivationCase(name, act.SortPairs(module), module, (2 * len(upper), *spatial), points)


def _max_pool(
    name: str, in_shape: tuple[int, ...], kernel: tuple[int, int], stride: tuple[int, int], **more: object
) -> ActivationCase:
    settings = {"padding": (0, 0), "ceil_mode": False, **more}
    layer = nn.MaxPool2d(kernel, stride, **settings)  # type: ignore[arg-type]
    rule = act.MaxPool2d(in_shape, kernel, stride, **settings)  # type: ignore[arg-type]
    return ActivationCase(name, rule, layer, in_shape)


def _leaky(slope: float) -> ActivationCase:
    def difference(a: Tensor, b: Tensor) -> Tensor:
        return (a.clamp(min=0) - b.clamp(min=0)) + slope * (a.clamp(max=0) - b.clamp(max=0))

    return ActivationCase(f"leaky {slope}", act.LeakyReLU(slope), nn.LeakyReLU(slope), difference=difference)


def _elu(alpha: float) -> ActivationCase:
    def difference(a: Tensor, b: Tensor) -> Tensor:
        low_a, low_b = a.clamp(max=0), b.clamp(max=0)
        return (a.clamp(min=0) - b.clamp(min=0)) + alpha * _exp_difference(low_a, low_b)

    return ActivationCase(f"elu {alpha}", act.ELU(alpha), nn.ELU(alpha), difference=difference)


def _exp_difference(a: Tensor, b: Tensor) -> Tensor:
    """e^a - e^b from the larger one, so that nothing overflows or cancels."""
    return torch.sign(a - b) * torch.maximum(a, b).exp() * -torch.expm1(-(a - b).abs())


def _tanh_difference(a: Tensor, b: Tensor) -> Tensor:
    return (a - b).sinh() / (a.cosh() * b.cosh())


def _softplus(beta: float) -> ActivationCase:
    def difference(a: Tensor, b: Tensor) -> Tensor:
        gap, low, high = beta * (a - b).abs(), beta * torch.minimum(a, b), beta * torch.maximum(a, b)
        near = torch.log1p(torch.expm1(gap.clamp(max=30)) * low.sigmoid())
        zero = torch.zeros_like(low)
        rise = torch.where(gap < 30, near, torch.logaddexp(high, zero) - torch.logaddexp(low, zero))
        return torch.sign(a - b) * rise / beta

    # The module cuts off the logarithm above its threshold of 20.
    module = nn.Softplus(beta)
    return ActivationCase(f"softplus {beta}", act.Softplus(beta, 20.0), module, (6,), (0.0,), difference, tolerance=1e-8)


ACTIVATIONS: tuple[ActivationCase, ...] = (
    ActivationCase("relu", act.relu(), nn.ReLU()),
    ActivationCase("relu6", act.clip(0.0, 6.0), nn.ReLU6(), points=(0.0, 6.0)),
    ActivationCase("hardtanh", act.clip(-1.0, 1.0), nn.Hardtanh(), points=(-1.0, 1.0)),
    ActivationCase("hardtanh -2 .. 0.5", act.clip(-2.0, 0.5), nn.Hardtanh(-2.0, 0.5), points=(-2.0, 0.5)),
    _relu_theta(),
    ActivationCase("maxmin", act.SortPairs(act.MaxMin()), act.MaxMin()),
    ActivationCase("maxmin of images", act.SortPairs(act.MaxMin()), act.MaxMin(), (4, 2, 3)),
    _clipped("clipped maxmin", (1.0, 0.5, 3.0), (-1.0, 0.0, -0.2)),
    _clipped("clipped maxmin, thresholds crossed", (-1.0, 0.0), (1.0, 0.0)),
    _clipped("clipped maxmin of images", (0.4, 1.5), (-0.7, 0.1), (2, 3)),
    _max_pool("max pool", (2, 4, 4), (2, 2), (2, 2)),
    _max_pool("max pool, a rest unused", (1, 5, 7), (2, 3), (2, 3)),
    _max_pool("max pool, padding", (2, 5, 5), (3, 3), (3, 3), padding=(1, 1)),
    _max_pool("max pool, ceil", (1, 5, 7), (2, 3), (2, 3), ceil_mode=True),
    _max_pool("max pool, padding and ceil", (1, 6, 5), (3, 2), (3, 2), padding=(1, 1), ceil_mode=True),
    _max_pool("max pool, gaps", (1, 7, 8), (2, 2), (3, 4)),
    _max_pool("max pool, gaps, padding and ceil", (1, 8, 9), (2, 2), (3, 4), padding=(1, 1), ceil_mode=True),
    _leaky(0.01),
    _leaky(1.5),
    _elu(0.5),
    _elu(1.0),
    _elu(2.0),
    ActivationCase("tanh", act.Tanh(), nn.Tanh(), difference=_tanh_difference),
    ActivationCase("sigmoid", act.Sigmoid(), nn.Sigmoid(), difference=lambda a, b: _tanh_difference(a / 2, b / 2) / 2),
    _softplus(0.5),
    _softplus(1.0),
    _softplus(3.0),
    ActivationCase("pass through", PassThrough(), nn.Identity()),
)
