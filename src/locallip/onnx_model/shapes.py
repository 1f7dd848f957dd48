"""Rules of reshapes and transpositions, of values and of constants; no number changes."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from locallip.onnx_model.network import Permuted, Reshaped
from locallip.onnx_model.nodes import Node
from locallip.onnx_model.steps import Flow, Steps, Value, check_size, numbers, operator


@operator("Flatten", inputs=(1, 1), attributes="axis")
def _flatten(node: Node, inputs: list[Value | None], steps: Steps) -> Value:
    shape = _shape(node, inputs[0])
    axis = node.whole("axis", 1)
    if not -len(shape) <= axis <= len(shape):
        raise node.wrong(f"axis = {axis} is not one of a value of shape {shape}")
    axis = axis + len(shape) if axis < 0 else axis
    return _reshaped(node, inputs[0], (math.prod(shape[:axis]), math.prod(shape[axis:])), steps)


@operator("Reshape", inputs=(2, 2), attributes="allowzero")
def _reshape(node: Node, inputs: list[Value | None], steps: Steps) -> Value:
    node.must("allowzero", 0)
    shape, target = _shape(node, inputs[0]), list(numbers(node, inputs[1], "target"))
    if any(size < -1 or (size == 0 and dim >= len(shape)) for dim, size in enumerate(target)) or target.count(-1) > 1:
        raise node.wrong(f"its target is {tuple(target)}, which says no shape")
    target = [shape[dim] if size == 0 else size for dim, size in enumerate(target)]
    if -1 in target:
        rest = -math.prod(target)
        target[target.index(-1)] = math.prod(shape) // rest
    return _reshaped(node, inputs[0], target, steps)


@operator("Squeeze", inputs=(1, 2), attributes="axes")
def _squeeze(node: Node, inputs: list[Value | None], steps: Steps) -> Value:
    shape = _shape(node, inputs[0])
    axes = _axes(node, inputs, len(shape)) if _has_axes(node, inputs) else [d for d, n in enumerate(shape) if n == 1]
    if any(shape[axis] != 1 for axis in axes):
        raise node.wrong(f"it takes away the dimensions {axes} of a value of shape {shape}, which are not all 1")
    return _reshaped(node, inputs[0], [size for dim, size in enumerate(shape) if dim not in axes], steps)


@operator("Unsqueeze", inputs=(1, 2), attributes="axes")
def _unsqueeze(node: Node, inputs: list[Value | None], steps: Steps) -> Value:
    shape = list(_shape(node, inputs[0]))
    count = len(node.wholes("axes", ()) if node.opset < 13 else numbers(node, [*inputs, None][1], "axes"))
    for axis in _axes(node, inputs, len(shape) + count):
        shape.insert(axis, 1)
    return _reshaped(node, inputs[0], shape, steps)


@operator("Transpose", inputs=(1, 1), attributes="perm")
def _transpose(node: Node, inputs: list[Value | None], steps: Steps) -> Value:
    value, shape = inputs[0], _shape(node, inputs[0])
    order = node.wholes("perm", tuple(reversed(range(len(shape)))))
    if sorted(order) != list(range(len(shape))):
        raise node.wrong(f"perm = {order[:8]} is no order of the dimensions of a value of shape {shape}")
    if isinstance(value, np.ndarray):
        return value.transpose(order)
    assert value is not None
    turned = [shape[dim] for dim in order]
    if [dim for dim in order if shape[dim] > 1] == sorted(dim for dim in order if shape[dim] > 1):
        return _reshaped(node, value, turned, steps)  # only dimensions of 1 change places, so no number does
    if not value.batched or order[0] != 0:
        raise node.wrong(f"perm = {order} moves the batch, which has no rule")
    return steps.add(node, Permuted([dim - 1 for dim in order[1:]]), tuple(turned[1:]), value)


def _shape(node: Node, value: Value | None) -> tuple[int, ...]:
    assert value is not None  # the first input of a node is never left out
    return tuple(value.shape)


def _has_axes(node: Node, inputs: list[Value | None]) -> bool:
    return "axes" in node.attributes if node.opset < 13 else [*inputs, None][1] is not None


def _axes(node: Node, inputs: list[Value | None], rank: int) -> list[int]:
    """The axes of Squeeze and Unsqueeze in rising order, an attribute before opset 13 and an input since."""
    given = node.wholes("axes", ()) if node.opset < 13 else numbers(node, [*inputs, None][1], "axes")
    if node.opset >= 13 and node.attributes:
        raise node.wrong("axes are an input since opset 13, not an attribute")
    axes = sorted(axis + rank if axis < 0 else axis for axis in given)
    if len(set(axes)) != len(axes) or not all(0 <= axis < rank for axis in axes):
        raise node.wrong(f"axes {given} are not those of {rank} dimensions")
    return axes


def _reshaped(node: Node, value: Value | None, shape: Sequence[int], steps: Steps) -> Value:
    """The same numbers in another shape of the file's; with a batch, the first dimension must be that of one."""
    assert value is not None
    shape = tuple(shape)
    if math.prod(shape) != math.prod(value.shape):
        raise node.wrong(f"{tuple(value.shape)} cannot become {shape}")
    if isinstance(value, np.ndarray):
        return value.reshape(shape)
    batched = shape[:1] == (1,)
    if value.batched and not batched:
        raise node.wrong(f"it turns a batch of one, {value.shape}, into {shape}; the first dimension must stay the batch")
    sample = shape[1:] if batched else shape
    check_size(node, sample)
    if sample == value.sample:
        return Flow(value.step, shape, batched)
    made = steps.add(node, Reshaped(sample), sample, value)
    return Flow(made.step, shape, batched)
