"""The bytes of an ONNX file as a message whose parts may be trusted to be there, of honest sizes, and without code.

Everything that could make reading costly or dangerous is refused before anything else sees it: tensors in other files,
sizes that do not fit their bytes, functions, graphs within nodes.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from locallip.onnx_model.tensors import check_tensor
from locallip.onnx_model.words import node_label, quoted, shown, weight_label
from locallip.zoo import PICKLE_SUFFIXES, WrongModel, is_pickle

#: What a message of protobuf can hold.
MOST_BYTES = 2**31 - 1
#: Versions of the operators whose changes were all looked at; below, + has other rules and dropout another meaning.
OLDEST, NEWEST = 7, 28


def read_model(path: Path, onnx: Any) -> Any:
    """The ModelProto in a file, checked for all but the meaning of its nodes."""
    model = _parsed(_content(path), onnx)
    if not model.HasField("graph"):
        raise WrongModel("there is no graph in it: the file is cut short, or not of ONNX")
    if model.functions:
        raise WrongModel("it defines functions of its own, which are not followed; export it with them inlined")
    if model.training_info:
        raise WrongModel("it holds a step of training; export the network for inference")
    if not all(isinstance(word, str) for word in _names(model)):  # protobuf gives what is no text as bytes
        raise WrongModel("a name in it is not text: the file is damaged, export it again")
    _check_opset(model)
    _check_graph(model.graph, onnx)
    return model


def check_valid(model: Any, onnx: Any) -> None:
    """Refuse what the package's own checker refuses: the last word, as it does not say where, and reads what it is given."""
    try:
        onnx.checker.check_model(model)
    except Exception as error:  # its own class, protobuf's, and whatever C++ raises
        raise WrongModel(f"it is no valid ONNX file: {_first_line(error)}") from None


def _content(path: Path) -> bytes:
    try:
        with open(path, "rb") as file:
            content = file.read(MOST_BYTES + 1)
    except OSError as error:
        raise WrongModel(f"cannot be read: {error.strerror or error}") from None
    if is_pickle(content[:9]) or path.suffix.lower() in PICKLE_SUFFIXES:
        raise WrongModel(
            "it is a pickle or TorchScript, and loading one runs whatever it contains. Export the network with "
            "torch.onnx.export, or save its weights as safetensors"
        )
    if len(content) > MOST_BYTES:
        raise WrongModel(f"it has more than {MOST_BYTES:,} bytes, which no ONNX file can have")
    return content


def _parsed(content: bytes, onnx: Any) -> Any:
    try:
        return onnx.ModelProto.FromString(content)
    except Exception as error:  # protobuf's class is not part of onnx
        raise WrongModel(f"it is cut short, damaged or not of ONNX: {_first_line(error)}") from None


def _names(model: Any) -> Iterator[Any]:
    """Everything in a model that something is called by."""
    graph = model.graph
    for named in (*graph.initializer, *graph.input, *graph.output, *graph.node):
        yield named.name
    for node in graph.node:
        yield from (node.op_type, node.domain, getattr(node, "overload", ""), *node.input, *node.output)
        yield from (word for attribute in node.attribute for word in (attribute.name, attribute.ref_attr_name))
    yield from (opset.domain for opset in model.opset_import)
    yield from (dim.dim_param for value in graph.input for dim in value.type.tensor_type.shape.dim)


def _check_opset(model: Any) -> None:
    versions = [opset.version for opset in model.opset_import if opset.domain in ("", "ai.onnx")]
    if len(versions) != 1:
        raise WrongModel(f"it names {len(versions)} versions of ONNX's operators, expected one")
    if not OLDEST <= versions[0] <= NEWEST:
        raise WrongModel(
            f"it is of opset {versions[0]}, and {OLDEST} to {NEWEST} are understood: export it with one of these, or "
            "convert it with onnx.version_converter"
        )


def _check_graph(graph: Any, onnx: Any) -> None:
    if graph.sparse_initializer:
        raise WrongModel("it has sparse weights, which are not read; store them as ordinary tensors")
    for where, tensor in _tensors(graph):
        check_tensor(tensor, where, onnx)


def _tensors(graph: Any) -> Iterator[tuple[str, Any]]:
    """Every tensor of the graph itself, and where it stands; graphs within nodes are refused when the node is looked at."""
    for index, tensor in enumerate(graph.initializer):
        yield weight_label(index, tensor.name), tensor
    for index, node in enumerate(graph.node):
        for attribute in node.attribute:
            where = f"{node_label(index, node.op_type, node.name)}, attribute {quoted(attribute.name)}"
            if attribute.HasField("g") or attribute.graphs:
                raise WrongModel(f"{where}: control flow is not followed; export the network without it")
            if attribute.HasField("sparse_tensor") or attribute.sparse_tensors:
                raise WrongModel(f"{where}: sparse tensors are not read; store it as an ordinary one")
            yield from ((where, tensor) for tensor in attribute.tensors)
            if attribute.HasField("t"):
                yield where, attribute.t


def _first_line(error: Exception) -> str:
    return shown((str(error).strip().splitlines() or [type(error).__name__])[0], 300)
