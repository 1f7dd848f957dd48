"""One node of a graph: what it reads and gives, its attributes by type, and its name for messages."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from locallip.onnx_model.words import node_label, quoted
from locallip.zoo import WrongModel


@dataclass(frozen=True)
class Node:
    """A node as the rules see it; `opset` is the version of its operator's meaning."""

    index: int
    operator: str
    name: str
    opset: int
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    attributes: dict[str, Any] = field(default_factory=dict)

    @property
    def label(self) -> str:
        return node_label(self.index, self.operator, self.name)

    def wrong(self, why: str) -> WrongModel:
        return WrongModel(f"{self.label}: {why}")

    def whole(self, name: str, default: int) -> int:
        return self._value(name, int, default)

    def number(self, name: str, default: float) -> float:
        """A number of float32, which every dtype of a module but float16 holds."""
        return self._value(name, float, default)

    def wholes(self, name: str, default: tuple[int, ...]) -> tuple[int, ...]:
        return self._value(name, tuple, default)

    def text(self, name: str, default: str) -> str:
        return self._value(name, str, default)

    def must(self, name: str, expected: int) -> None:
        """Refuse an attribute that changes the meaning; left out it must mean `expected`."""
        found = self.whole(name, expected)
        if found != expected:
            raise self.wrong(f"{name} = {found} has no rule; export it with {name} = {expected}")

    def _value(self, name: str, kind: type, default: Any) -> Any:
        value = self.attributes.get(name, default)
        if type(value) is not kind:
            raise self.wrong(f"the attribute {name} is of type {type(value).__name__}, expected {kind.__name__}")
        return value


def node_of(index: int, proto: Any, opset: int, onnx: Any) -> Node:
    """A NodeProto with its attributes read; those of unknown type, or that belong to functions, are refused."""
    node = Node(index, proto.op_type, proto.name, opset, tuple(proto.input), tuple(proto.output))
    if proto.domain not in ("", "ai.onnx"):
        raise node.wrong(f"it is of the domain {quoted(proto.domain)}, and only ONNX's own operators are understood")
    if not node.outputs:
        raise node.wrong("it gives no value")
    if getattr(proto, "overload", ""):
        raise node.wrong("it calls a function of the file, which is not followed")
    for attribute in proto.attribute:
        if attribute.name in node.attributes:
            raise node.wrong(f"it has the attribute {quoted(attribute.name)} twice")
        node.attributes[attribute.name] = _attribute(node, attribute, onnx.AttributeProto)
    return node


def _attribute(node: Node, attribute: Any, types: Any) -> Any:
    if attribute.ref_attr_name:
        raise node.wrong(f"the attribute {quoted(attribute.name)} is one of a function, which is not followed")
    match attribute.type:
        case types.FLOAT:
            return float(attribute.f)
        case types.INT:
            return int(attribute.i)
        case types.STRING:
            return attribute.s.decode("ascii", "replace")
        case types.TENSOR:
            return attribute.t
        case types.INTS:
            return tuple(int(value) for value in attribute.ints)
        case types.FLOATS:
            return [float(value) for value in attribute.floats]
    raise node.wrong(f"the attribute {quoted(attribute.name)} is of a type that is not understood")
