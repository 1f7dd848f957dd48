"""Small ONNX graphs, built by hand, with random weights in float64 unless said otherwise."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator

KINDS = {np.float32: TensorProto.FLOAT, np.float64: TensorProto.DOUBLE, np.float16: TensorProto.FLOAT16}


class Graph:
    """Nodes and weights as they are added; every addition returns the name of its value.

    `shape` is that of the input with its batch of 1, `opset` the version of the operators.
    """

    def __init__(self, *shape: int | str, kind: Any = np.float64, opset: int = 17, seed: int = 0):
        self.shape, self.kind, self.opset = shape, kind, opset
        self.nodes: list[onnx.NodeProto] = []
        self.weights: list[onnx.TensorProto] = []
        self.random = np.random.default_rng(seed)

    def weight(self, *shape: int, positive: bool = False) -> str:
        drawn = self.random.standard_normal(shape) / max(1, np.prod(shape[1:])) ** 0.5
        return self.stored(np.abs(drawn) + 0.5 if positive else drawn)

    def stored(self, values: Any, kind: Any = None) -> str:
        name = f"w{len(self.weights)}"
        self.weights.append(numpy_helper.from_array(np.array(values, dtype=kind or self.kind), name))
        return name

    def whole(self, *values: int) -> str:
        return self.stored(values, np.int64)

    def add(self, operator: str, *inputs: str, **attributes: Any) -> str:
        name = f"v{len(self.nodes)}"
        self.nodes.append(helper.make_node(operator, inputs, [name], name=f"the {operator}", **attributes))
        return name

    def batch_norm(self, z: str, channels: int, **attributes: Any) -> str:
        stored = [self.weight(channels), self.weight(channels), self.weight(channels), self.weight(channels, positive=True)]
        return self.add("BatchNormalization", z, *stored, **attributes)

    def shape_of(self, name: str) -> tuple[int, ...]:
        return self.run(self.model(name, unknown=True), np.zeros(self.sizes)).shape

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(size if isinstance(size, int) else 1 for size in self.shape)

    def head(self, z: str, classes: int = 3) -> onnx.ModelProto:
        """The model with a dense layer behind `z`."""
        flat = self.add("Flatten", z)
        return self.model(self.add("Gemm", flat, self.weight(self.shape_of(flat)[1], classes), self.weight(classes)))

    def model(self, result: str, shape: Sequence[int | str] | None = None, unknown: bool = False) -> onnx.ModelProto:
        """The model that gives `result`, whose shape is found by the reference unless it is said or left open."""
        kind = KINDS[self.kind]
        shape = None if unknown else self.shape_of(result) if shape is None else shape
        graph = helper.make_graph(
            self.nodes,
            "graph",
            [helper.make_tensor_value_info("x", kind, self.shape)],
            [helper.make_tensor_value_info(result, kind, shape)],
            self.weights,
        )
        return helper.make_model(graph, opset_imports=[helper.make_opsetid("", self.opset)], ir_version=8)

    def run(self, model: onnx.ModelProto, x: np.ndarray) -> np.ndarray:
        (value,) = ReferenceEvaluator(model).run(None, {"x": x.astype(self.kind)})
        return value


def residual(kind: Any = np.float64, seed: int = 0) -> tuple[Graph, onnx.ModelProto]:
    """relu(z + conv(relu(conv(z)))), an average pool and a dense layer, behind a normalisation of the pixels."""
    graph = Graph("batch", 2, 6, 6, kind=kind, seed=seed)
    z = graph.add("Sub", "x", graph.stored(np.full((1, 2, 1, 1), 0.5)))
    z = graph.add("Div", z, graph.stored([[[0.25]], [[0.5]]]))
    z = graph.add("Relu", graph.add("Conv", z, graph.weight(3, 2, 3, 3), graph.weight(3), pads=[1, 1, 1, 1]))
    inside = graph.add("Conv", z, graph.weight(3, 3, 3, 3), pads=[1, 1, 1, 1])
    inside = graph.add("Conv", graph.add("Relu", inside), graph.weight(3, 3, 3, 3), pads=[1, 1, 1, 1])
    z = graph.add("Relu", graph.add("Add", z, inside))
    return graph, graph.head(graph.add("AveragePool", z, kernel_shape=[2, 2], strides=[2, 2]))


def written(model: onnx.ModelProto, path: Path) -> Path:
    path.write_bytes(model.SerializeToString())
    return path


def images_for(shape: Sequence[int], count: int, seed: int = 0) -> np.ndarray:
    """Pixels, (count, *shape) uint8."""
    return np.random.default_rng(seed).integers(0, 256, (count, *shape), dtype=np.uint8)
