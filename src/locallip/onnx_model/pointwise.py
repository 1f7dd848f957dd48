"""Rules of arithmetic, activations, max pooling, and of what changes no number."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import nn

from locallip.onnx_model.linear import pooling, same_sides, windows
from locallip.onnx_model.network import Difference, Minus, MinusFrom, Over, Plus, Sum, Times, WithConstant
from locallip.onnx_model.nodes import Node
from locallip.onnx_model.steps import Flow, Steps, Value, constant, flow, operator

#: Operators of one value and one constant, by the place of the constant.
_RIGHT: dict[str, type[WithConstant]] = {"Add": Plus, "Sub": Minus, "Mul": Times, "Div": Over}
_LEFT: dict[str, type[WithConstant]] = {"Add": Plus, "Sub": MinusFrom, "Mul": Times}
_BOTH: dict[str, type[nn.Module]] = {"Add": Sum, "Sub": Difference}


@operator("Add", "Sub", "Mul", "Div", inputs=(2, 2))
def _arithmetic(node: Node, inputs: list[Value | None], steps: Steps) -> Value:
    left, right = inputs
    if isinstance(left, Flow) and isinstance(right, Flow):
        if node.operator not in _BOTH:
            raise node.wrong("a product or quotient of two values that depend on the input is not linear, and has no rule")
        if (left.shape, left.batched) != (right.shape, right.batched):
            raise node.wrong(f"values of shapes {left.shape} and {right.shape} would broadcast, which has no rule")
        if left.step == right.step:  # as two branches, a row of these would take twice as long with every one
            factor = 2.0 if node.operator == "Add" else 0.0
            return steps.add(node, Times(torch.tensor(factor, dtype=steps.dtype)), left.sample, left)
        return steps.add(node, _BOTH[node.operator](), left.sample, left, right)
    if isinstance(left, Flow):
        return _with_constant(node, left, right, _RIGHT[node.operator], steps)
    if node.operator not in _LEFT:
        raise node.wrong("division by a value that depends on the input is not linear, and has no rule")
    return _with_constant(node, flow(node, right), left, _LEFT[node.operator], steps)


def _with_constant(node: Node, source: Flow, value: Value | None, layer: type[WithConstant], steps: Steps) -> Flow:
    """The constant may broadcast against the value, and never the other way round."""
    array = constant(node, value, "other operand")
    try:
        fits = np.broadcast_shapes(source.shape, array.shape) == source.shape
    except ValueError:
        fits = False
    if not fits:
        raise node.wrong(f"a constant of shape {array.shape} does not fit a value of shape {source.shape}")
    if source.batched and array.ndim == len(source.shape):
        array = array[0]  # of the batch of one
    if layer is Over and not array.all():
        raise node.wrong("it divides by 0")
    return steps.add(node, layer(steps.stored(node, array)), source.sample, source)


@operator("Relu", inputs=(1, 1))
def _relu(node: Node, inputs: list[Value | None], steps: Steps) -> Value:
    return _unitwise(node, inputs, nn.ReLU(), steps)


@operator("Tanh", inputs=(1, 1))
def _tanh(node: Node, inputs: list[Value | None], steps: Steps) -> Value:
    return _unitwise(node, inputs, nn.Tanh(), steps)


@operator("Sigmoid", inputs=(1, 1))
def _sigmoid(node: Node, inputs: list[Value | None], steps: Steps) -> Value:
    return _unitwise(node, inputs, nn.Sigmoid(), steps)


@operator("Softplus", inputs=(1, 1))
def _softplus(node: Node, inputs: list[Value | None], steps: Steps) -> Value:
    return _unitwise(node, inputs, nn.Softplus(), steps)


@operator("LeakyRelu", inputs=(1, 1), attributes="alpha")
def _leaky(node: Node, inputs: list[Value | None], steps: Steps) -> Value:
    slope = node.number("alpha", float(np.float32(0.01)))
    return _unitwise(node, inputs, nn.LeakyReLU(_at_least_zero(node, slope)), steps)


@operator("Elu", inputs=(1, 1), attributes="alpha")
def _elu(node: Node, inputs: list[Value | None], steps: Steps) -> Value:
    return _unitwise(node, inputs, nn.ELU(_at_least_zero(node, node.number("alpha", 1.0))), steps)


@operator("Clip", inputs=(1, 3), attributes="min max")
def _clip(node: Node, inputs: list[Value | None], steps: Steps) -> Value:
    """Values between two ends; one that is not given is the largest number of the type, or of float32 before opset 11."""
    largest = float(np.finfo(np.float32 if node.opset < 11 else steps.kind).max)
    ends = [-largest, largest]
    for place, name in enumerate(("min", "max")):
        if node.opset < 11:
            ends[place] = node.number(name, ends[place])
        elif len(inputs) > place + 1 and inputs[place + 1] is not None:
            array = constant(node, inputs[place + 1], name)
            if array.size != 1 or array.dtype != steps.kind:
                raise node.wrong(f"its {name} must be one number of {steps.kind}, got {array.dtype} of shape {array.shape}")
            ends[place] = float(array.reshape(()))
    if node.opset >= 11 and node.attributes:
        raise node.wrong("min and max are inputs since opset 11, not attributes")
    low, high = ends
    if not -math.inf < low < high < math.inf:
        raise node.wrong(f"clipping to [{low:g}, {high:g}] has no rule; give two finite numbers, the lower one first")
    return _unitwise(node, inputs, nn.Hardtanh(low, high), steps)


def _at_least_zero(node: Node, value: float) -> float:
    if not 0 <= value < math.inf:
        raise node.wrong(f"alpha = {value:g} has no rule; it must be finite and at least 0")
    return value


def _unitwise(node: Node, inputs: list[Value | None], layer: nn.Module, steps: Steps) -> Flow:
    source = flow(node, inputs[0])
    return steps.add(node, layer, source.sample, source)


@operator("MaxPool", inputs=(1, 1), attributes="auto_pad ceil_mode dilations kernel_shape pads storage_order strides")
def _max_pool(node: Node, inputs: list[Value | None], steps: Steps) -> Value:
    source = flow(node, inputs[0], range(3, 4))
    node.must("ceil_mode", 0)
    node.must("storage_order", 0)
    kernel, strides, sides = pooling(node, 2)
    if any(stride < size for stride, size in zip(strides, kernel, strict=True)):
        raise node.wrong(
            f"windows overlap (kernel {kernel}, strides {strides}), so an input counts twice; no bound is known"
        )
    out = windows(node, source.sample[1:], kernel, strides, sides, (1, 1))
    layer = nn.MaxPool2d(kernel, strides, same_sides(node, sides, kernel))
    return steps.add(node, layer, (source.sample[0], *out), source)


@operator("Identity", inputs=(1, 1))
def _identity(node: Node, inputs: list[Value | None], steps: Steps) -> Value:
    assert inputs[0] is not None
    return inputs[0]


@operator("Dropout", inputs=(1, 3), attributes="ratio seed")
def _dropout(node: Node, inputs: list[Value | None], steps: Steps) -> Value:
    """Nothing is dropped in inference, whatever the ratio."""
    if len(inputs) > 2 and inputs[2] is not None and bool(constant(node, inputs[2], "training_mode").any()):
        raise node.wrong("it is in training mode, which is random; export the network for inference")
    return flow(node, inputs[0])


@operator("Cast", inputs=(1, 1), attributes="to saturate round_mode")
def _cast(node: Node, inputs: list[Value | None], steps: Steps) -> Value:
    """To the type that the value has already; to any other, numbers would be rounded."""
    kinds = {1: np.float32, 10: np.float16, 11: np.float64, 6: np.int32, 7: np.int64}  # as TensorProto numbers them
    there = inputs[0].dtype if isinstance(inputs[0], np.ndarray) else steps.kind
    if kinds.get(node.whole("to", 0)) != there:
        raise node.wrong(f"it changes the type of its numbers from {there}, which has no rule; export it in one type")
    assert inputs[0] is not None
    return inputs[0]
