"""Rules of linear operators: convolutions, dense layers, batch normalisation, average pooling, zero padding."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor, nn

from locallip.onnx_model.network import Plus, Reshaped, Times
from locallip.onnx_model.nodes import Node
from locallip.onnx_model.steps import Flow, Steps, Value, check_size, constant, flow, numbers, operator
from locallip.onnx_model.words import quoted

_CONVOLUTIONS: dict[int, type[nn.Conv1d] | type[nn.Conv2d] | type[nn.Conv3d]] = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}
#: By the dimensions of a sample.
_NORMS: dict[int, type[nn.BatchNorm1d] | type[nn.BatchNorm2d] | type[nn.BatchNorm3d]] = {
    1: nn.BatchNorm1d,
    2: nn.BatchNorm1d,
    3: nn.BatchNorm2d,
    4: nn.BatchNorm3d,
}
#: Zero padding per dimension: before and after.
Sides = list[tuple[int, int]]


@operator("Conv", inputs=(2, 3), attributes="auto_pad dilations group kernel_shape pads strides")
def _conv(node: Node, inputs: list[Value | None], steps: Steps) -> Value:
    source = flow(node, inputs[0], range(2, 5))
    weight = steps.stored(node, constant(node, inputs[1], "weight"))
    channels, *sizes = source.sample
    dims, groups = len(sizes), node.whole("group", 1)
    if weight.dim() != dims + 2:
        raise node.wrong(f"its weight has the shape {tuple(weight.shape)}, and it reads samples of shape {source.sample}")
    kernel = tuple(weight.shape[2:])
    if node.wholes("kernel_shape", kernel) != kernel:
        raise node.wrong(f"kernel_shape is not that of its weight, {kernel}")
    if groups < 1 or weight.shape[0] % groups or weight.shape[1] * groups != channels:
        raise node.wrong(f"a weight of shape {tuple(weight.shape)} in {groups} groups does not fit {channels} channels")
    strides, dilations = positive(node, "strides", dims), positive(node, "dilations", dims)
    bias = None if len(inputs) < 3 or inputs[2] is None else steps.stored(node, constant(node, inputs[2], "bias"))
    if bias is not None and bias.shape != weight.shape[:1]:
        raise node.wrong(f"its bias has the shape {tuple(bias.shape)}, expected ({len(weight)},)")
    sides = padding(node, dims)
    out = windows(node, sizes, kernel, strides, sides, dilations)
    layer = _convolution(node, weight, bias, strides, sides, dilations, groups)
    return steps.add(node, layer, (len(weight), *out), source)


def _convolution(
    node: Node,
    weight: Tensor,
    bias: Tensor | None,
    strides: Sequence[int],
    sides: Sides,
    dilations: Sequence[int],
    groups: int,
) -> nn.Module:
    """torch's layer, which pads both sides alike: where they differ, zeros at one end of the kernel make up for it."""
    more = [(max(b - a, 0), max(a - b, 0)) for a, b in sides]
    if any(before + after and d > 1 for (before, after), d in zip(more, dilations, strict=True)):
        raise node.wrong(f"pads {sides} that differ at both ends, with dilation, have no rule; pad before it")
    grown = [k + before + after for k, (before, after) in zip(weight.shape[2:], more, strict=True)]
    check_size(node, (*weight.shape[:2], *grown))
    weight = nn.functional.pad(weight, [count for pair in reversed(more) for count in pair])
    out, inside, *kernel = weight.shape
    make = _CONVOLUTIONS[len(kernel)]
    same = tuple(max(pair) for pair in sides)
    geometry = (tuple(kernel), tuple(strides), same, tuple(dilations), groups)
    with torch.device("meta"):  # no random weights
        layer = make(inside * groups, out, *geometry, bias=bias is not None)  # type: ignore[arg-type]
    layer.weight = nn.Parameter(weight)
    layer.bias = None if bias is None else nn.Parameter(bias)
    return layer


@operator("Pad", inputs=(1, 4), attributes="mode pads value")
def _pad(node: Node, inputs: list[Value | None], steps: Steps) -> Value:
    """Zeros around an image: one convolution per channel, with the kernel 1."""
    source = flow(node, inputs[0], range(2, 5))
    given = [*inputs, None, None, None][:4]
    if node.text("mode", "constant") != "constant":
        raise node.wrong("only padding with zeros has a rule")
    if node.opset < 11:
        value, pads = node.number("value", 0.0), node.wholes("pads", ())
    else:
        value = 0.0 if given[2] is None else float(constant(node, given[2], "value").reshape(-1)[0])
        pads = numbers(node, given[1], "pads")
    rank = len(source.shape)
    if value != 0 or given[3] is not None or len(pads) != 2 * rank:
        raise node.wrong(
            f"only padding with zeros has a rule, with {2 * rank} pads and no axes; got {value} and {len(pads)}"
        )
    if any(pads[dim] or pads[dim + rank] for dim in (0, 1)) or min(pads) < 0:
        raise node.wrong(f"pads {pads} go beyond the sides of the images, or cut them off, which has no rule")
    return _padded(node, source, [(pads[dim], pads[dim + rank]) for dim in range(2, rank)], steps)


def _padded(node: Node, source: Flow, sides: Sides, steps: Steps) -> Flow:
    channels, *sizes = source.sample
    ones = [1] * len(sizes)
    out = windows(node, sizes, ones, ones, sides, ones)
    weight = torch.ones(channels, 1, *ones, dtype=steps.dtype)
    return steps.add(node, _convolution(node, weight, None, ones, sides, ones, channels), (channels, *out), source)


@operator("Gemm", inputs=(2, 3), attributes="alpha beta transA transB")
def _gemm(node: Node, inputs: list[Value | None], steps: Steps) -> Value:
    """alpha A B + beta C; the two factors are layers of their own, so that no weight is rounded."""
    source = flow(node, inputs[0], range(1, 2))
    node.must("transA", 0)
    weight = steps.stored(node, constant(node, inputs[1], "weight"))
    if weight.dim() != 2:
        raise node.wrong(f"its weight has the shape {tuple(weight.shape)}, expected a matrix")
    matrix = weight if node.whole("transB", 0) else weight.T
    if node.whole("transB", 0) not in (0, 1) or matrix.shape[1:] != source.sample:
        raise node.wrong(f"a weight of shape {tuple(weight.shape)} does not fit samples of shape {source.sample}")
    alpha, beta = node.number("alpha", 1.0), node.number("beta", 1.0)
    bias = None
    if len(inputs) > 2 and inputs[2] is not None and beta != 0:
        bias = _bias(node, steps.stored(node, constant(node, inputs[2], "bias")), len(matrix), beta)
    result = steps.add(node, _dense(matrix, bias if alpha == 1 else None), (len(matrix),), source)
    if alpha != 1:
        result = steps.add(node, Times(_number(node, alpha, steps)), result.sample, result)
        if bias is not None:
            result = steps.add(node, Plus(bias), result.sample, result)
    return result


def _bias(node: Node, stored: Tensor, width: int, beta: float) -> Tensor:
    if stored.shape not in [(width,), (1, width), (), (1,), (1, 1)]:
        raise node.wrong(f"its bias has the shape {tuple(stored.shape)}, expected ({width},)")
    exact = stored.double() * beta  # of two numbers of float32, or of any number and 1
    scaled = exact.to(stored.dtype)
    if beta != 1 and (stored.dtype != torch.float32 or not torch.equal(scaled.double(), exact)):
        raise node.wrong(f"beta = {beta:g} times its bias has to be rounded: multiply them before the export")
    return scaled.reshape(-1).expand(width).clone()


def _number(node: Node, value: float, steps: Steps) -> Tensor:
    if not math.isfinite(value):
        raise node.wrong(f"the factor {value} is not finite")
    return torch.tensor(value, dtype=steps.dtype)


def _dense(matrix: Tensor, bias: Tensor | None) -> nn.Linear:
    with torch.device("meta"):  # no random weights
        layer = nn.Linear(matrix.shape[1], matrix.shape[0], bias=bias is not None)
    layer.weight = nn.Parameter(matrix.contiguous())
    if bias is not None:
        layer.bias = nn.Parameter(bias)
    return layer


@operator("MatMul", inputs=(2, 2))
def _matmul(node: Node, inputs: list[Value | None], steps: Steps) -> Value:
    source = flow(node, inputs[0])
    matrix = steps.stored(node, constant(node, inputs[1], "second factor"))
    if matrix.dim() != 2 or matrix.shape[0] != source.shape[-1] or not source.sample:
        raise node.wrong(f"a matrix of shape {tuple(matrix.shape)} does not fit a value of shape {source.shape}")
    return steps.add(node, _dense(matrix.T, None), (*source.sample[:-1], matrix.shape[1]), source)


@operator("BatchNormalization", inputs=(5, 5), attributes="epsilon momentum spatial training_mode")
def _batch_norm(node: Node, inputs: list[Value | None], steps: Steps) -> Value:
    source = flow(node, inputs[0], range(1, 5))
    node.must("training_mode", 0)
    node.must("spatial", 1)
    words = ("scale", "bias", "mean", "variance")
    scale, bias, mean, variance = (
        steps.stored(node, constant(node, value, word)) for value, word in zip(inputs[1:], words, strict=True)
    )
    channels = source.sample[0]
    if any(stored.shape != (channels,) for stored in (scale, bias, mean, variance)):
        raise node.wrong(f"scale, bias, mean and variance must have the shape ({channels},)")
    epsilon = node.number("epsilon", float(np.float32(1e-5)))
    if not (math.isfinite(epsilon) and epsilon >= 0 and bool((variance + epsilon > 0).all())):
        raise node.wrong("its variance + epsilon must be above 0")
    with torch.device("meta"):
        layer = _NORMS[len(source.sample)](channels, eps=epsilon)
    layer.weight, layer.bias = nn.Parameter(scale), nn.Parameter(bias)
    layer.running_mean, layer.running_var = mean, variance
    layer.num_batches_tracked = torch.zeros((), dtype=torch.int64)
    return steps.add(node, layer, source.sample, source)


@operator(
    "AveragePool", inputs=(1, 1), attributes="auto_pad ceil_mode count_include_pad dilations kernel_shape pads strides"
)
def _average_pool(node: Node, inputs: list[Value | None], steps: Steps) -> Value:
    """Padding that counts is a step of its own, so that a layer that pads always leaves its zeros out of the mean."""
    source = flow(node, inputs[0], range(2, 4))
    node.must("ceil_mode", 0)
    dims = len(source.sample) - 1
    kernel, strides, sides = pooling(node, dims)
    counts = node.whole("count_include_pad", 0)
    if counts not in (0, 1):
        raise node.wrong(f"count_include_pad = {counts}, expected 0 or 1")
    if counts and any(map(any, sides)):
        source, sides = _padded(node, source, sides, steps), [(0, 0)] * dims
    out = windows(node, source.sample[1:], kernel, strides, sides, [1] * dims)
    before = same_sides(node, sides, kernel)
    layer: nn.Module
    if dims == 1:
        layer = nn.AvgPool1d(kernel[0], strides[0], before[0], count_include_pad=False)
    else:
        layer = nn.AvgPool2d(kernel, strides, before, count_include_pad=False)  # type: ignore[arg-type]
    return steps.add(node, layer, (source.sample[0], *out), source)


@operator("GlobalAveragePool", inputs=(1, 1))
def _global_pool(node: Node, inputs: list[Value | None], steps: Steps) -> Value:
    return _mean(node, flow(node, inputs[0], range(2, 4)), steps)


@operator("ReduceMean", inputs=(1, 2), attributes="axes keepdims noop_with_empty_axes")
def _reduce_mean(node: Node, inputs: list[Value | None], steps: Steps) -> Value:
    source = flow(node, inputs[0], range(2, 4))
    axes = node.wholes("axes", ()) if node.opset < 18 else numbers(node, [*inputs, None][1], "axes")
    rank = len(source.shape)
    if sorted(axis % rank if -rank <= axis < rank else -1 for axis in axes) != list(range(2, rank)):
        raise node.wrong(f"only the mean over all dimensions of an image has a rule, got the axes {axes}")
    kept = node.whole("keepdims", 1)
    if kept not in (0, 1):
        raise node.wrong(f"keepdims = {kept}, expected 0 or 1")
    result = _mean(node, source, steps)
    return result if kept else steps.add(node, Reshaped(result.sample[:1]), result.sample[:1], result)


def _mean(node: Node, source: Flow, steps: Steps) -> Flow:
    dims = len(source.sample) - 1
    layer = nn.AdaptiveAvgPool1d(1) if dims == 1 else nn.AdaptiveAvgPool2d(1)
    return steps.add(node, layer, (source.sample[0], *[1] * dims), source)


# What windows of all kinds share ---------------------------------------------------------------------------------------


def positive(node: Node, name: str, dims: int) -> tuple[int, ...]:
    """Strides or dilations: one number per dimension, 1 by default."""
    values = node.wholes(name, (1,) * dims)
    if len(values) != dims or not all(1 <= value <= 2**16 for value in values):
        raise node.wrong(f"{name} = {values[:8]}: expected {dims} numbers from 1 to {2**16}")
    return values


def pooling(node: Node, dims: int) -> tuple[tuple[int, ...], tuple[int, ...], Sides]:
    """Kernel, strides and padding of a pooling layer; dilation is refused."""
    if "kernel_shape" not in node.attributes:
        raise node.wrong("it has no kernel_shape")
    if positive(node, "dilations", dims) != (1,) * dims:
        raise node.wrong("pooling with dilation has no rule")
    return positive(node, "kernel_shape", dims), positive(node, "strides", dims), padding(node, dims)


def padding(node: Node, dims: int) -> Sides:
    pads, auto = node.wholes("pads", (0,) * 2 * dims), node.text("auto_pad", "NOTSET")
    if auto not in ("NOTSET", "VALID") or (auto == "VALID" and any(pads)):
        raise node.wrong(f"auto_pad = {quoted(auto)} has no rule; export it with explicit pads")
    if len(pads) != 2 * dims or not all(0 <= pad <= 2**16 for pad in pads):
        raise node.wrong(f"pads = {pads[:8]}: expected {2 * dims} numbers from 0 to {2**16}")
    return list(zip(pads[:dims], pads[dims:], strict=True))


def same_sides(node: Node, sides: Sides, kernel: Sequence[int]) -> tuple[int, ...]:
    """Padding that is the same at both ends and at most half a window, which is what torch's pooling has."""
    if any(a != b for a, b in sides) or any(2 * a > k for (a, _), k in zip(sides, kernel, strict=True)):
        raise node.wrong(f"pads {sides} that differ at both ends, or exceed half the window {tuple(kernel)}, have no rule")
    return tuple(a for a, _ in sides)


def windows(
    node: Node,
    sizes: Sequence[int],
    kernel: Sequence[int],
    strides: Sequence[int],
    sides: Sides,
    dilations: Sequence[int],
) -> tuple[int, ...]:
    """How many windows there are along each dimension; refused where the padded image is too large or has none."""
    padded = tuple(n + a + b for n, (a, b) in zip(sizes, sides, strict=True))
    check_size(node, padded)
    extent = [d * (k - 1) + 1 for k, d in zip(kernel, dilations, strict=True)]
    if any(n < e for n, e in zip(padded, extent, strict=True)):
        raise node.wrong(f"its window of {tuple(extent)} is larger than the padded image of {padded}")
    return tuple((n - e) // s + 1 for n, e, s in zip(padded, extent, strides, strict=True))
