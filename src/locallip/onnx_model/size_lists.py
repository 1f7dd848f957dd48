"""Rules of whole numbers that PyTorch computes in the graph: what x.view(x.size(0), -1) becomes, for a batch of one."""

from __future__ import annotations

import numpy as np

from locallip.onnx_model.nodes import Node
from locallip.onnx_model.steps import Steps, Value, constant, numbers, operator


@operator("Shape", inputs=(1, 1))
def _shape(node: Node, inputs: list[Value | None], steps: Steps) -> Value:
    assert inputs[0] is not None
    return np.array(inputs[0].shape, dtype=np.int64)


@operator("Gather", inputs=(2, 2), attributes="axis")
def _gather(node: Node, inputs: list[Value | None], steps: Steps) -> Value:
    """Some of a list of numbers."""
    node.must("axis", 0)
    listed = np.array(numbers(node, inputs[0], "list of numbers"), dtype=np.int64)
    places = constant(node, inputs[1], "places")
    if places.ndim > 1 or any(not -len(listed) <= place < len(listed) for place in numbers(node, places, "places")):
        raise node.wrong(f"it takes the places {places.tolist()} of {len(listed)} numbers")
    return np.asarray(listed[places])


@operator("Concat", inputs=(1, 64), attributes="axis")
def _concat(node: Node, inputs: list[Value | None], steps: Steps) -> Value:
    """Lists of numbers, one behind the other."""
    node.must("axis", 0)
    return np.array([number for value in inputs for number in numbers(node, value, "parts")], dtype=np.int64)
