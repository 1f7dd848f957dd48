"""One pass over the nodes of a graph, each by the rule of its operator, to the network that they make."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import numpy as np

from locallip.onnx_model import linear, pointwise, shapes, size_lists  # noqa: F401 - register their rules
from locallip.onnx_model.biases import with_biases
from locallip.onnx_model.network import OnnxNetwork, needed, wired
from locallip.onnx_model.nodes import Node, node_of
from locallip.onnx_model.steps import LARGEST, OPERATORS, Flow, Steps, Value, flow
from locallip.onnx_model.tensors import FLOATS, array_of, type_name
from locallip.onnx_model.words import quoted, shown, weight_label
from locallip.zoo import LARGEST_SIDE, WrongModel

_KINDS = {"FLOAT": np.float32, "DOUBLE": np.float64, "FLOAT16": np.float16}
_LAST = ("Softmax", "LogSoftmax")


def build(model: Any, onnx: Any) -> OnnxNetwork:
    """The network of a ModelProto that `read_model` has passed."""
    return _Building(model, onnx).run()


class _Building:
    """The values that are known so far, by name, and the steps that they are made by."""

    def __init__(self, model: Any, onnx: Any):
        self.graph, self.onnx = model.graph, onnx
        self.opset = next(o.version for o in model.opset_import if o.domain in ("", "ai.onnx"))
        self.values: dict[str, Value] = {}
        self.left_out = ""
        self.readers = Counter(name for node in self.graph.node for name in node.input)

    def run(self) -> OnnxNetwork:
        for index, tensor in enumerate(self.graph.initializer):
            where = weight_label(index, tensor.name)
            self._keep(tensor.name, array_of(tensor, where, self.onnx), where)
        source = self._enter()
        for index, proto in enumerate(self.graph.node):
            node = node_of(index, proto, self.opset, self.onnx)
            self._keep(node.outputs[0], self._value_of(node), node.label)
        result = self._result()
        steps = with_biases(needed(self.steps.found, result.step))
        if not steps:
            raise WrongModel("it gives its input back without a layer")
        network = wired(steps, source.sample, result.sample[0])
        network.left_out = self.left_out
        return network

    def _keep(self, name: str, value: Value, where: str) -> None:
        if not name or name in self.values:
            raise WrongModel(f"{where}: {'it has no name' if not name else f'the name {quoted(name)} is given twice'}")
        self.values[name] = value

    def _enter(self) -> Flow:
        """The one input that is not a weight; older files list their weights among the inputs."""
        inputs = [value for value in self.graph.input if value.name not in self.values]
        if len(inputs) != 1:
            raise WrongModel(f"it has {len(inputs)} inputs ({_some(inputs)}), expected one")
        where = f"the input {quoted(inputs[0].name)}"
        kind = type_name(inputs[0].type.tensor_type.elem_type, self.onnx)
        if kind not in FLOATS:
            raise WrongModel(f"{where} is of type {kind}; {', '.join(FLOATS)} are read")
        self.steps = Steps(np.dtype(_KINDS[kind]))
        source = _input_flow(inputs[0].type.tensor_type, where)
        self._keep(inputs[0].name, source, where)
        return source

    def _value_of(self, node: Node) -> Value:
        if node.operator == "Constant":
            return self._constant(node)
        if node.operator in _LAST:
            return self._last(node)
        known = OPERATORS.get(node.operator)
        if known is None:
            names = ", ".join(sorted([*OPERATORS, "Constant", *_LAST]))
            raise node.wrong(f"there is no rule for this operator; understood are {names}")
        for name in node.attributes:
            if name not in known.attributes:
                raise node.wrong(f"the attribute {quoted(name)} is not understood; export it without")
        if any(node.outputs[1:]) and node.operator != "Dropout":  # whose mask is not read, or reading it fails
            raise node.wrong("it gives more than one value, which has no rule; export the network for inference")
        return known.rule(node, self._inputs(node, *known.inputs), self.steps)

    def _inputs(self, node: Node, least: int, most: int) -> list[Value | None]:
        if not least <= len(node.inputs) <= most or not all(node.inputs[:least]):
            raise node.wrong(f"it has {len(node.inputs)} inputs, expected {least} to {most}, the first {least} not left out")
        for name in node.inputs:
            if name and name not in self.values:
                raise node.wrong(
                    f"it reads {quoted(name)}, which no weight and no node before it gives: a weight is missing, or the "
                    "nodes are not in order or go round in a circle"
                )
        return [self.values[name] if name else None for name in node.inputs]

    def _constant(self, node: Node) -> np.ndarray:
        if node.inputs or len(node.attributes) != 1:
            raise node.wrong("a constant has no inputs and one attribute")
        ((name, value),) = node.attributes.items()
        types = {"value_float": np.float32, "value_floats": np.float32, "value_int": np.int64, "value_ints": np.int64}
        if name == "value" and isinstance(value, self.onnx.TensorProto):
            return array_of(value, node.label, self.onnx)
        if name not in types or not isinstance(value, int | float | list | tuple):
            raise node.wrong(f"a constant given as {quoted(name)} is not read; store it as a tensor")
        array = np.array(value, dtype=types[name])
        if not np.isfinite(array).all():
            raise node.wrong("it holds NaN or infinite values: nothing can be said about this network")
        return array

    def _last(self, node: Node) -> Value:
        """Softmax at the end keeps the order of the classes, so it is left out."""
        (value,) = self._inputs(node, 1, 1)
        if self.readers[node.outputs[0]] or node.outputs[0] not in [output.name for output in self.graph.output]:
            raise node.wrong("it stands before other layers, and has a rule as the last one alone")
        source = flow(node, value, range(1, 2))
        axis = node.whole("axis", 1 if node.opset < 13 else -1)
        if axis not in (1, -1) or set(node.attributes) - {"axis"}:
            raise node.wrong(f"axis = {axis} has no rule; it must be that of the classes")
        self.left_out = node.operator
        return source

    def _result(self) -> Flow:
        """The one output: a number per class."""
        if len(self.graph.output) != 1:
            raise WrongModel(f"it has {len(self.graph.output)} outputs ({_some(self.graph.output)}), expected one")
        (output,) = self.graph.output
        value, where = self.values.get(output.name), f"the output {quoted(output.name)}"
        if not isinstance(value, Flow):
            raise WrongModel(f"{where} does not come from the input by its nodes: the file is cut short, or damaged")
        if len(value.sample) != 1 or not 2 <= value.sample[0] <= LARGEST_SIDE:
            raise WrongModel(f"{where} has the shape {value.shape}; expected one number for each of two classes or more")
        declared = output.type.tensor_type
        sizes = [dim.dim_value if dim.HasField("dim_value") else None for dim in declared.shape.dim]
        found = [None, *value.shape[1:]] if value.batched else list(value.shape)
        if declared.HasField("shape") and (
            len(sizes) != len(found)
            or any(None not in pair and pair[0] != pair[1] for pair in zip(sizes, found, strict=True))
        ):
            raise WrongModel(f"{where} is said to have the shape {sizes[:8]}, and its nodes give {value.shape}")
        return value


def _input_flow(declared: Any, where: str) -> Flow:
    """The shape of the input; its first dimension is the batch, 1 or of any size, and missing where there is but one."""
    if not declared.HasField("shape") or not declared.shape.dim:
        raise WrongModel(f"{where} has no shape: export the network with one")
    first, *rest = declared.shape.dim
    sizes = tuple(dim.dim_value if dim.HasField("dim_value") else 0 for dim in (rest or [first]))
    if min(sizes) < 1:
        named = ", ".join(
            shown(dim.dim_param) or "?" if dim.dim_value < 1 else str(dim.dim_value) for dim in declared.shape.dim
        )
        raise WrongModel(f"{where} has the shape ({named}): all but the batch must be fixed numbers from 1; export it so")
    if math.prod(sizes) > LARGEST:
        raise WrongModel(f"{where} has the shape {sizes[:8]}: more than {LARGEST:,} numbers")
    if not rest:
        return Flow(-1, sizes, batched=False)
    if first.HasField("dim_value") and first.dim_value != 1:
        raise WrongModel(
            f"{where} has {first.dim_value} as its first dimension: expected a batch of 1 or of any size; export it so"
        )
    return Flow(-1, (1, *sizes))


def _some(values: Any) -> str:
    names = [quoted(value.name) for value in values]
    return ", ".join(names[:3]) + (", ..." if len(names) > 3 else "") if names else "none"
