"""ONNX files: what is understood computes what the reference implementation computes, all else is refused by name."""

from __future__ import annotations

import io
import re
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper

import locallip as ll
from locallip.certify.prover import fingerprint
from locallip.onnx_model.steps import LARGEST, OPERATORS
from locallip.proofs.settings import structure_of
from locallip.zoo import WrongModel
from tests.onnx_graphs import Graph, residual, written

Z = "x"
IMAGE, VECTOR, SIGNAL = (1, 2, 6, 7), (1, 5), (1, 2, 9)


def loaded(model: onnx.ModelProto, folder: Path) -> torch.nn.Module:
    return ll.load_onnx(written(model, folder / "net.onnx"))


def check_same(graph: Graph, model: onnx.ModelProto, folder: Path, tolerance: float = 1e-10) -> torch.nn.Module:
    """The module must give what the reference evaluator gives; three samples in one batch, which that one sees singly."""
    network = loaded(model, folder)
    assert not network.training
    x = np.random.default_rng(1).normal(size=(3, *network.input_shape)) * 2
    dtype = next(network.parameters()).dtype
    with torch.no_grad():
        found = network(torch.from_numpy(x).to(dtype)).double().numpy()
    expected = np.stack([graph.run(model, sample.reshape(graph.sizes)).reshape(-1) for sample in x])
    assert found.shape == expected.shape == (3, network.classes)
    np.testing.assert_allclose(found, expected, rtol=tolerance, atol=tolerance * np.abs(expected).max())
    return network


# Every operator --------------------------------------------------------------------------------------------------------

Body = Callable[[Graph], str]


def conv(shape: tuple[int, ...], **attributes: object) -> Body:
    return lambda g: g.add("Conv", Z, g.weight(*shape), g.weight(shape[0]), **attributes)


def one(operator: str, **attributes: object) -> Body:
    return lambda g: g.add(operator, Z, **attributes)


def with_constant(operator: str, *shape: int, left: bool = False) -> Body:
    def body(g: Graph) -> str:
        value = g.weight(*shape, positive=operator == "Div")
        return g.add(operator, *((value, Z) if left else (Z, value)))

    return body


def read_twice(g: Graph, z: str) -> str:
    return g.add("Add", z, g.add("Relu", g.add("Add", z, g.weight(4))))


def viewed(g: Graph) -> str:
    """The target of x.view(x.size(0), -1), as PyTorch writes it for a batch of any size."""
    batch = g.add("Gather", g.add("Shape", Z), g.stored(0, np.int64), axis=0)
    return g.add("Concat", g.add("Unsqueeze", batch, g.whole(0)), g.whole(-1), axis=0)


#: Shape of the input, opset and body of a graph; a dense layer follows, so that it gives classes.
CASES: dict[str, tuple[tuple[int | str, ...], int, Body]] = {
    "Conv": (IMAGE, 17, conv((3, 2, 3, 3))),
    "Conv without bias": (IMAGE, 22, lambda g: g.add("Conv", Z, g.weight(3, 2, 3, 3), kernel_shape=[3, 3])),
    "Conv with all": (IMAGE, 11, conv((4, 1, 2, 3), group=2, strides=[2, 1], pads=[1, 2, 1, 2], dilations=[2, 2])),
    "Conv padded at the end": (IMAGE, 17, conv((3, 2, 3, 3), strides=[2, 2], pads=[0, 0, 1, 1])),
    "Conv padded unequally": (IMAGE, 17, conv((3, 2, 3, 2), pads=[2, 0, 0, 3], strides=[2, 3])),
    "Conv with VALID": (IMAGE, 17, conv((3, 2, 3, 3), auto_pad="VALID")),
    "Conv of signals": (SIGNAL, 17, conv((3, 2, 4), strides=[2], pads=[1, 2])),
    "Conv of volumes": ((1, 1, 4, 3, 4), 17, conv((2, 1, 2, 2, 3), pads=[0, 1, 1, 1, 1, 1])),
    "Gemm": (VECTOR, 7, lambda g: g.add("Gemm", Z, g.weight(5, 4), g.weight(4))),
    "Gemm transposed": (VECTOR, 17, lambda g: g.add("Gemm", Z, g.weight(4, 5), g.weight(1, 4), transB=1)),
    "Gemm with factors": (VECTOR, 17, lambda g: g.add("Gemm", Z, g.weight(5, 4), g.stored([3.0]), alpha=0.3)),
    "Gemm without bias": (VECTOR, 17, lambda g: g.add("Gemm", Z, g.weight(5, 4), alpha=0.3)),
    "Gemm with bias times 0": (VECTOR, 17, lambda g: g.add("Gemm", Z, g.weight(5, 4), g.weight(4), beta=0.0)),
    "MatMul": (VECTOR, 17, lambda g: g.add("MatMul", Z, g.weight(5, 4))),
    "MatMul with bias": (VECTOR, 17, lambda g: g.add("Add", g.add("MatMul", Z, g.weight(5, 4)), g.weight(4))),
    "MatMul with one bias": (VECTOR, 17, lambda g: g.add("Add", g.stored(2.0), g.add("MatMul", Z, g.weight(5, 4)))),
    "MatMul of rows": (IMAGE, 17, lambda g: g.add("Add", g.add("MatMul", Z, g.weight(7, 4)), g.weight(6, 1))),
    "MatMul with as many rows": (
        *((1, 2, 4, 7), 17),
        lambda g: g.add("Add", g.add("MatMul", Z, g.weight(7, 4)), g.weight(4, 1)),
    ),
    "MatMul that is read twice": (VECTOR, 17, lambda g: read_twice(g, g.add("MatMul", Z, g.weight(5, 4)))),
    "MatMul with a turned weight": (VECTOR, 17, lambda g: g.add("MatMul", Z, g.add("Transpose", g.weight(4, 5)))),
    "Add to all": (IMAGE, 17, with_constant("Add", 1, 2, 6, 7)),
    "Add from the left": (IMAGE, 14, with_constant("Add", 2, 1, 1, left=True)),
    "Sub": (IMAGE, 17, with_constant("Sub", 7)),
    "Sub from a constant": (IMAGE, 17, with_constant("Sub", 1, 1, 1, 1, left=True)),
    "Mul": (IMAGE, 17, with_constant("Mul", 1, 2, 1, 1)),
    "Mul from the left": (VECTOR, 17, with_constant("Mul", left=True)),
    "Div": (IMAGE, 17, with_constant("Div", 2, 1, 1)),
    "Add to itself": (IMAGE, 17, lambda g: g.add("Add", Z, Z)),
    "Sub from itself": (IMAGE, 17, lambda g: g.add("Add", g.add("Sub", Z, Z), g.weight(2, 6, 7))),
    "Sub of branches": (IMAGE, 17, lambda g: g.add("Sub", g.add("Relu", Z), g.add("Tanh", Z))),
    "Relu": (IMAGE, 13, one("Relu")),
    "LeakyRelu": (IMAGE, 17, one("LeakyRelu", alpha=0.3)),
    "LeakyRelu by default": (IMAGE, 17, one("LeakyRelu")),
    "Tanh": (IMAGE, 17, one("Tanh")),
    "Sigmoid": (IMAGE, 17, one("Sigmoid")),
    "Softplus": (IMAGE, 17, one("Softplus")),
    "Elu": (IMAGE, 17, one("Elu", alpha=1.5)),
    "Elu by default": (IMAGE, 17, one("Elu")),
    "Clip": (IMAGE, 13, lambda g: g.add("Clip", Z, g.stored(0.0), g.stored(6.0))),
    "Clip from below": (IMAGE, 13, lambda g: g.add("Clip", Z, g.stored(0.0))),
    "Clip of old": (IMAGE, 9, one("Clip", min=-1.0, max=0.5)),
    "MaxPool": (IMAGE, 17, one("MaxPool", kernel_shape=[2, 3], strides=[2, 3])),
    "MaxPool with padding": (IMAGE, 17, one("MaxPool", kernel_shape=[2, 2], strides=[3, 2], pads=[1, 1, 1, 1])),
    "AveragePool": (IMAGE, 17, one("AveragePool", kernel_shape=[3, 2], strides=[1, 2])),
    "AveragePool with padding": (IMAGE, 17, one("AveragePool", kernel_shape=[3, 3], strides=[2, 2], pads=[1, 1, 1, 1])),
    "AveragePool with padding that counts": (
        *(IMAGE, 17),
        one("AveragePool", kernel_shape=[3, 3], strides=[2, 2], pads=[1, 0, 2, 1], count_include_pad=1),
    ),
    "AveragePool of signals": (SIGNAL, 17, one("AveragePool", kernel_shape=[3], pads=[1, 1])),
    "GlobalAveragePool": (IMAGE, 17, one("GlobalAveragePool")),
    "GlobalAveragePool of signals": (SIGNAL, 17, one("GlobalAveragePool")),
    "ReduceMean": (IMAGE, 17, one("ReduceMean", axes=[2, 3])),
    "ReduceMean since 18": (IMAGE, 18, lambda g: g.add("ReduceMean", Z, g.whole(-1, -2), keepdims=0)),
    "BatchNormalization": (IMAGE, 15, lambda g: g.batch_norm(Z, 2, epsilon=0.3)),
    "BatchNormalization by default": (IMAGE, 17, lambda g: g.batch_norm(Z, 2)),
    # Before opset 14 the reference takes part in the statistics what it is given, unlike the text; 1 leaves nothing of that.
    "BatchNormalization of old": (IMAGE, 9, lambda g: g.batch_norm(Z, 2, momentum=1.0)),
    "BatchNormalization of vectors": (VECTOR, 17, lambda g: g.batch_norm(Z, 5, momentum=0.5)),
    "Flatten": (IMAGE, 17, one("Flatten", axis=-3)),
    "Reshape": (IMAGE, 17, lambda g: g.add("Reshape", Z, g.whole(0, -1))),
    "Reshape to a batch of 1": (IMAGE, 13, lambda g: g.add("Reshape", Z, g.whole(1, 7, 0, 2))),
    "Reshape to any batch": (IMAGE, 17, lambda g: g.add("Reshape", Z, g.whole(-1, 7, 12))),
    "Shape": (IMAGE, 17, lambda g: g.add("Reshape", Z, g.add("Shape", Z))),
    "Gather": (IMAGE, 17, lambda g: g.add("Reshape", Z, g.add("Gather", g.add("Shape", Z), g.whole(0, 2, 1, -1)))),
    "Concat": (("n", 2, 6, 7), 17, lambda g: g.add("Reshape", Z, viewed(g))),
    "Squeeze": ((1, 1, 6), 17, lambda g: g.add("Squeeze", Z, g.whole(1))),
    "Squeeze of old": ((1, 1, 6), 11, one("Squeeze", axes=[-2])),
    "Unsqueeze": (VECTOR, 17, lambda g: g.add("Unsqueeze", Z, g.whole(-1, 1))),
    "Unsqueeze of old": (VECTOR, 11, one("Unsqueeze", axes=[1, 3])),
    "Transpose": (IMAGE, 17, one("Transpose", perm=[0, 2, 3, 1])),
    "Transpose of ones": ((1, 6, 7, 1), 17, one("Transpose", perm=[3, 0, 1, 2])),
    "Identity": (IMAGE, 17, lambda g: g.add("Identity", g.add("Relu", g.add("Identity", Z)))),
    "Dropout": (IMAGE, 17, lambda g: g.add("Dropout", Z, g.stored(0.5, np.float32), g.stored(False, np.bool_))),
    "Dropout of old": (IMAGE, 7, one("Dropout", ratio=0.3)),
    "Constant": (VECTOR, 17, lambda g: g.add("Add", Z, g.add("Constant", value=numpy_helper.from_array(np.ones(5))))),
    "Constant of whole numbers": (IMAGE, 17, lambda g: g.add("Reshape", Z, g.add("Constant", value_ints=[0, -1]))),
    "Pad": (IMAGE, 13, lambda g: g.add("Pad", Z, g.whole(0, 0, 1, 0, 0, 0, 2, 1))),
    "Pad with a value": (SIGNAL, 17, lambda g: g.add("Pad", Z, g.whole(0, 0, 2, 0, 0, 2), g.stored(0.0))),
    "Pad of old": (IMAGE, 10, one("Pad", pads=[0, 0, 1, 2, 0, 0, 1, 2])),
    "Cast": (IMAGE, 17, one("Cast", to=TensorProto.DOUBLE)),
}


@pytest.mark.parametrize("name", CASES)
def test_every_operator_computes_what_onnx_says(name: str, tmp_path: Path) -> None:
    shape, opset, body = CASES[name]
    graph = Graph(*shape, opset=opset)
    check_same(graph, graph.head(body(graph)), tmp_path)


def test_every_operator_with_a_rule_has_a_case() -> None:
    assert {name.split()[0] for name in CASES} == {*OPERATORS, "Constant"}


@given(data=st.data())
def test_drawn_graphs_compute_what_onnx_says(data: st.DataObject, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Layers in any order, with skips over them where shapes allow it."""
    channels = data.draw(st.integers(1, 3))
    graph = Graph(
        "n", channels, *data.draw(st.tuples(st.integers(4, 7), st.integers(4, 7))), seed=data.draw(st.integers(0, 99))
    )
    z, earlier = Z, [Z]
    for _ in range(data.draw(st.integers(1, 6))):
        z = _drawn(data, graph, z)
        same = [name for name in earlier if graph.shape_of(name) == graph.shape_of(z)]
        if same and data.draw(st.booleans()):
            z = graph.add(data.draw(st.sampled_from(["Add", "Sub"])), data.draw(st.sampled_from(same)), z)
        earlier.append(z)
    check_same(graph, graph.head(z), tmp_path_factory.mktemp("drawn"), 1e-9)


def _drawn(data: st.DataObject, graph: Graph, z: str) -> str:
    _, channels, *sizes = graph.shape_of(z)
    small = st.integers(0, 2)
    match data.draw(st.sampled_from(["conv", "same", "act", "norm", "pool", "max", "constant", "pad", "turn"])):
        case "conv":
            groups = data.draw(st.sampled_from([g for g in (1, channels) if channels % g == 0]))
            sides = [data.draw(small) for _ in range(4)]
            same = sides[:2] == sides[2:]
            dilation = data.draw(st.integers(1, 2)) if same and min(sizes) > 2 else 1
            kernel = [min(data.draw(st.integers(1, 3)), (n - 1) // dilation + 1) for n in sizes]
            out = groups * data.draw(st.integers(1, 2))
            strides = [data.draw(st.integers(1, 3)) for _ in sizes]
            geometry = {"group": groups, "strides": strides, "pads": sides, "dilations": [dilation] * 2}
            return graph.add("Conv", z, graph.weight(out, channels // groups, *kernel), graph.weight(out), **geometry)
        case "same":
            return graph.add("Conv", z, graph.weight(channels, channels, 3, 3), pads=[1, 1, 1, 1])
        case "act":
            return graph.add(data.draw(st.sampled_from(["Relu", "LeakyRelu", "Tanh", "Sigmoid", "Elu", "Softplus"])), z)
        case "norm":
            return graph.batch_norm(z, channels)
        case "pool":
            kernel = [data.draw(st.integers(1, min(n, 3))) for n in sizes]
            counts, pads = data.draw(st.integers(0, 1)), [data.draw(st.integers(0, k // 2)) for k in kernel]
            return graph.add("AveragePool", z, kernel_shape=kernel, pads=pads * 2, count_include_pad=counts)
        case "max":
            kernel = [data.draw(st.integers(1, min(n, 3))) for n in sizes]
            return graph.add("MaxPool", z, kernel_shape=kernel, strides=[k + data.draw(st.integers(0, 1)) for k in kernel])
        case "constant":
            shape = data.draw(st.sampled_from([(), (1,), (channels, 1, 1), (1, channels, *sizes), (sizes[1],)]))
            operator = data.draw(st.sampled_from(["Add", "Sub", "Mul", "Div"]))
            return graph.add(operator, z, graph.weight(*shape, positive=operator == "Div"))
        case "pad":
            before, after = [data.draw(small) for _ in sizes], [data.draw(small) for _ in sizes]
            return graph.add("Pad", z, graph.whole(0, 0, *before, 0, 0, *after))
    return graph.add("Transpose", z, perm=[0, *data.draw(st.permutations([1, 2, 3]))])


# The module ------------------------------------------------------------------------------------------------------------


def test_a_residual_network_is_certified_and_no_point_of_the_ball_breaks_it(tmp_path: Path) -> None:
    graph, model = residual()
    network = check_same(graph, model, tmp_path)
    assert network.input_shape == (2, 6, 6)
    x = torch.rand(2, 2, 6, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    y = network(x).argmax(1)
    radius = ll.certified_radius(network, x, y)
    assert bool((radius > 0).all())
    for seed in range(20):
        step = torch.randn(x.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
        step *= (radius / step.flatten(1).norm(dim=1)).reshape(-1, 1, 1, 1)
        assert bool((network(x + step).argmax(1) == y).all())


def test_a_chain_is_a_sequential_of_ordinary_layers(tmp_path: Path) -> None:
    graph = Graph("batch", 1, 4, 4, kind=np.float32)
    z = graph.add("Relu", graph.add("Conv", Z, graph.weight(2, 1, 3, 3), graph.weight(2)))
    z = graph.add("MatMul", graph.add("Flatten", z), graph.weight(8, 3))
    network = loaded(graph.model(graph.add("Add", z, graph.weight(3))), tmp_path)
    assert isinstance(network, torch.nn.Sequential)
    assert [type(layer).__name__ for layer in network] == ["Conv2d", "ReLU", "Reshaped", "Linear"]
    assert torch.equal(network[-1].bias, torch.from_numpy(numpy_helper.to_array(graph.weights[-1]).copy()))
    assert (network.input_shape, network.classes) == ((1, 4, 4), 3)


@pytest.mark.parametrize("kind", [np.float16, np.float32, np.float64])
def test_weights_are_those_of_the_file(kind: type, tmp_path: Path) -> None:
    graph, model = residual(kind)
    network = loaded(model, tmp_path)
    stored = {tuple(array.reshape(-1)) for array in map(numpy_helper.to_array, graph.weights)}
    expected = torch.float64 if kind is np.float64 else torch.float32
    for name, value in network.state_dict().items():
        assert value.dtype == expected, name
        flat = value.T if "Gemm.weight" in name else value
        assert tuple(flat.reshape(-1).numpy().astype(kind)) in stored, name
        assert np.array_equal(value.numpy().astype(kind).astype(np.float64), value.double().numpy()), name


@pytest.mark.parametrize("kind", [np.float16, np.float32])
def test_lower_precision_comes_close_to_the_reference(kind: type, tmp_path: Path) -> None:
    check_same(*residual(kind), tmp_path, tolerance=0.02 if kind is np.float16 else 1e-5)


@pytest.mark.parametrize("field", ["float_data", "double_data", "int32_data"])
def test_numbers_that_are_listed_are_read_too(field: str, tmp_path: Path) -> None:
    kind = {"float_data": np.float32, "double_data": np.float64, "int32_data": np.float16}[field]
    _, model = residual(kind)
    for tensor in model.graph.initializer:
        array = numpy_helper.to_array(tensor)
        tensor.ClearField("raw_data")
        getattr(tensor, field).extend((array.view(np.uint16) if kind is np.float16 else array).reshape(-1).tolist())
    again = loaded(model, tmp_path)
    assert fingerprint(again) == fingerprint(loaded(residual(kind)[1], tmp_path))
    assert structure_of(again) == structure_of(loaded(residual(kind)[1], tmp_path))


def test_a_softmax_at_the_end_is_left_out(tmp_path: Path) -> None:
    graph = Graph(*VECTOR)
    logits = graph.add("Gemm", Z, graph.weight(5, 3))
    plain = loaded(graph.model(logits), tmp_path)
    for operator in ("Softmax", "LogSoftmax"):
        model = graph.model(graph.add(operator, logits, axis=1))
        network = loaded(model, tmp_path)
        x = torch.rand(4, 5, dtype=torch.float64)
        assert torch.equal(network(x), plain(x))
        expected = [int(graph.run(model, sample[None].numpy()).argmax()) for sample in x]
        assert network(x).argmax(1).tolist() == expected
        graph.nodes.pop()


def test_an_input_without_a_batch_is_one_sample(tmp_path: Path) -> None:
    graph = Graph(5)
    z = graph.add("Relu", graph.add("Add", graph.add("MatMul", Z, graph.weight(5, 4)), graph.weight(4)))
    alone = graph.add("MatMul", z, graph.weight(4, 3))
    assert check_same(graph, graph.model(alone), tmp_path).input_shape == (5,)
    graph.nodes.pop()
    row = graph.add("Unsqueeze", z, graph.whole(0))
    assert check_same(graph, graph.model(graph.add("Gemm", row, graph.weight(4, 3))), tmp_path).input_shape == (5,)


def test_branches_that_lead_nowhere_are_left_out(tmp_path: Path) -> None:
    graph = Graph(*VECTOR)
    z = graph.add("Gemm", Z, graph.weight(5, 3))
    graph.add("Gemm", Z, graph.weight(5, 7))
    network = loaded(graph.model(z), tmp_path)
    assert [tuple(value.shape) for value in network.parameters()] == [(3, 5)]


def test_doublings_in_a_row_cost_no_more_than_other_layers(tmp_path: Path) -> None:
    graph, z = Graph(*VECTOR), Z
    for _ in range(100):
        z = graph.add("Add", z, z)
    check_same(graph, graph.head(z), tmp_path)


def test_weights_among_the_inputs_are_weights(tmp_path: Path) -> None:
    """As files of an IR version below 4 have them."""
    graph, model = residual()
    for tensor in graph.weights:
        model.graph.input.append(helper.make_tensor_value_info(tensor.name, tensor.data_type, tensor.dims))
    model.ir_version = 3
    check_same(graph, model, tmp_path)


def test_the_structure_tells_wirings_apart(tmp_path: Path) -> None:
    """Rows of certificates keep it: the same weights in another order are another network."""
    found = set()
    for order in ((0, 1), (1, 0)):
        graph = Graph(1, 3)
        z = [Z, graph.add("Gemm", Z, graph.weight(3, 3))]
        z.append(graph.add("Relu", z[1]))
        found.add(structure_of(loaded(graph.model(graph.add("Sub", z[1 + order[0]], z[1 + order[1]])), tmp_path)))
    assert len(found) == 2


# What is refused -------------------------------------------------------------------------------------------------------


def refused(model: onnx.ModelProto | bytes, folder: Path, name: str = "net.onnx") -> str:
    path = folder / name
    path.write_bytes(model if isinstance(model, bytes) else model.SerializeToString())
    with pytest.raises(WrongModel) as caught:
        ll.load_onnx(path)
    assert str(caught.value).startswith(f"{path}: ")
    return str(caught.value)


def bodies(*shape: int, opset: int = 17) -> Callable[[Body], tuple[tuple[int, ...], int, Body]]:
    return lambda body: (shape, opset, body)


image, vector = bodies(*IMAGE), bodies(*VECTOR)
WRONG_NODES: dict[str, tuple[tuple[tuple[int, ...], int, Body], str]] = {
    "an unknown operator": (image(one("Gelu")), "there is no rule for this operator; understood are Add, AveragePool"),
    "another domain": (image(one("Relu", domain="com.microsoft")), "it is of the domain 'com.microsoft'"),
    "an unknown attribute": (image(one("Relu", slope=0.5)), "the attribute 'slope' is not understood"),
    "auto_pad": (image(conv((3, 2, 3, 3), auto_pad="SAME_UPPER")), "auto_pad = 'SAME_UPPER' has no rule; export it with"),
    "VALID with pads": (image(conv((3, 2, 3, 3), auto_pad="VALID", pads=[1, 1, 1, 1])), "auto_pad = 'VALID' has no rule"),
    "negative pads": (image(conv((3, 2, 3, 3), pads=[-1, 0, 0, 0])), r"pads = \(-1, 0, 0, 0\): expected 4 numbers from 0"),
    "huge pads": (image(conv((3, 2, 3, 3), pads=[60000] * 4)), "expected from 1 to 67,108,864 numbers"),
    "too few pads": (image(conv((3, 2, 3, 3), pads=[1])), r"pads = \(1,\): expected 4 numbers"),
    "unequal pads and dilation": (
        image(conv((3, 2, 2, 2), pads=[0, 0, 1, 1], dilations=[2, 2])),
        "differ at both ends, with dilation, have no rule",
    ),
    "strides of 0": (image(conv((3, 2, 3, 3), strides=[0, 1])), r"strides = \(0, 1\): expected 2 numbers from 1"),
    "too few strides": (image(conv((3, 2, 3, 3), strides=[1])), r"strides = \(1,\): expected 2 numbers from 1"),
    "no group": (image(conv((3, 2, 3, 3), group=0)), "in 0 groups does not fit 2 channels"),
    "another kernel": (image(conv((3, 2, 3, 3), kernel_shape=[2, 2])), r"kernel_shape is not that of its weight, \(3, 3\)"),
    "too large a kernel": (image(conv((3, 2, 8, 3))), r"window of \(8, 3\) is larger than the padded image of \(6, 7\)"),
    "a flat weight": (vector(conv((3, 5))), r"it reads a value of shape \(1, 5\); expected 3 or 4 or 5 dimensions"),
    "a weight that is computed": (
        image(lambda g: g.add("Conv", Z, g.add("Relu", Z))),
        "its weight must be stored in the file and not be computed",
    ),
    "a bias of another shape": (
        image(lambda g: g.add("Conv", Z, g.weight(3, 2, 3, 3), g.weight(2))),
        r"its bias has the shape \(2,\), expected \(3,\)",
    ),
    "transA": (vector(lambda g: g.add("Gemm", Z, g.weight(5, 3), transA=1)), "transA = 1 has no rule"),
    "beta that rounds": (
        vector(lambda g: g.add("Gemm", Z, g.weight(5, 3), g.weight(3), beta=0.1)),
        "beta = 0.1 times its bias has to be rounded",
    ),
    "a product from the left": (vector(lambda g: g.add("MatMul", g.weight(4, 5), Z)), "constant in the wrong place"),
    "a product of values": (
        image(lambda g: g.add("Mul", Z, Z)),
        "product or quotient of two values that depend on the input",
    ),
    "division by a value": (image(lambda g: g.add("Div", g.weight(1), Z)), "division by a value that depends on the input"),
    "division by 0": (image(lambda g: g.add("Div", Z, g.stored([0.0]))), "it divides by 0"),
    "a constant that grows": (vector(with_constant("Add", 1, 1, 1)), r"constant of shape \(1, 1, 1\) does not fit"),
    "a constant per sample": (vector(with_constant("Add", 2, 5)), r"constant of shape \(2, 5\) does not fit"),
    "a branch that broadcasts": (
        image(lambda g: g.add("Add", Z, g.add("GlobalAveragePool", Z))),
        r"shapes \(1, 2, 6, 7\) and \(1, 2, 1, 1\) would broadcast",
    ),
    "mixed types": (
        vector(lambda g: g.add("Add", Z, g.stored(np.ones(5), np.float32))),
        "it mixes float32 with the float64 of the input",
    ),
    "whole numbers as weights": (vector(lambda g: g.add("Add", Z, g.whole(1))), "it mixes int64 with the float64"),
    "a cast": (image(one("Cast", to=TensorProto.FLOAT)), "it changes the type of its numbers from float64"),
    "a falling LeakyRelu": (image(one("LeakyRelu", alpha=-1.0)), "alpha = -1 has no rule"),
    "a slope that is NaN": (image(one("LeakyRelu", alpha=float("nan"))), "alpha = nan has no rule"),
    "a slope in words": (image(one("LeakyRelu", alpha="much")), "the attribute alpha is of type str, expected float"),
    "a whole slope": (image(one("LeakyRelu", alpha=1)), "the attribute alpha is of type int, expected float"),
    "ends the wrong way round": (
        image(lambda g: g.add("Clip", Z, g.stored(1.0), g.stored(0.0))),
        r"clipping to \[1, 0\] has no rule",
    ),
    "ends of another type": (image(lambda g: g.add("Clip", Z, g.stored(0.0, np.float32))), "must be one number of float64"),
    "overlapping windows": (image(one("MaxPool", kernel_shape=[3, 3], strides=[2, 2])), "windows overlap"),
    "rounding up": (image(one("MaxPool", kernel_shape=[2, 2], strides=[2, 2], ceil_mode=1)), "ceil_mode = 1 has no rule"),
    "another order": (
        image(one("MaxPool", kernel_shape=[2, 2], strides=[2, 2], storage_order=1)),
        "storage_order = 1 has no rule",
    ),
    "pooling of signals": (bodies(*SIGNAL)(one("MaxPool", kernel_shape=[2], strides=[2])), "expected 4 dimensions"),
    "dilated pooling": (
        bodies(*IMAGE, opset=19)(one("AveragePool", kernel_shape=[2, 2], dilations=[2, 2])),
        "pooling with dilation has no rule",
    ),
    "unequal pads of a mean": (
        image(one("AveragePool", kernel_shape=[2, 2], pads=[0, 0, 1, 1])),
        "differ at both ends, or exceed half the window",
    ),
    "a mean that rounds up": (image(one("AveragePool", kernel_shape=[2, 2], ceil_mode=1)), "ceil_mode = 1 has no rule"),
    "a mean over channels": (image(one("ReduceMean", axes=[1])), "only the mean over all dimensions of an image has a rule"),
    "batch norm in training": (image(lambda g: g.batch_norm(Z, 2, training_mode=1)), "training_mode = 1 has no rule"),
    "statistics of other channels": (image(lambda g: g.batch_norm(Z, 3)), r"must have the shape \(2,\)"),
    "a negative variance": (
        image(lambda g: g.add("BatchNormalization", Z, g.weight(2), g.weight(2), g.weight(2), g.stored([-1.0, 1.0]))),
        r"variance \+ epsilon must be above 0",
    ),
    "dropout in training": (
        image(lambda g: g.add("Dropout", Z, g.stored(0.5, np.float32), g.stored(True, np.bool_))),
        "it is in training mode",
    ),
    "a batch that is split": (
        image(lambda g: g.add("Reshape", Z, g.whole(2, -1))),
        "the first dimension must stay the batch",
    ),
    "no shape": (image(lambda g: g.add("Reshape", Z, g.whole(-1, -1))), r"its target is \(-1, -1\), which says no shape"),
    "another size": (image(lambda g: g.add("Reshape", Z, g.whole(1, 5))), r"\(1, 2, 6, 7\) cannot become \(1, 5\)"),
    "a huge target": (image(lambda g: g.add("Reshape", Z, g.whole(1, 2**62, 2**62))), "cannot become"),
    "a target that is computed": (image(lambda g: g.add("Reshape", Z, Z)), "its target must be stored in the file"),
    "channels that are joined": (image(lambda g: g.add("Concat", Z, Z, axis=1)), "axis = 1 has no rule"),
    "values that are joined": (image(lambda g: g.add("Concat", Z, Z, axis=0)), "its parts must be stored in the file"),
    "numbers that are picked": (image(lambda g: g.add("Gather", Z, g.whole(0))), "its list of numbers must be stored"),
    "a place beyond the end": (
        image(lambda g: g.add("Reshape", Z, g.add("Gather", g.whole(1, 84), g.whole(0, 2)))),
        r"node 0 \(Gather 'the Gather'\): it takes the places \[0, 2\] of 2 numbers",
    ),
    "weights as sizes": (
        image(lambda g: g.add("Reshape", Z, g.add("Concat", g.weight(2), axis=0))),
        "its parts must be a short list of whole numbers, got float64",
    ),
    "zeros that are zeros": (image(lambda g: g.add("Reshape", Z, g.whole(1, 84), allowzero=1)), "allowzero = 1 has no rule"),
    "a batch that moves": (image(one("Transpose", perm=[1, 0, 2, 3])), "first dimension must stay the batch"),
    "a batch that goes inside": (image(one("Transpose", perm=[3, 2, 1, 0])), r"perm = \(3, 2, 1, 0\) moves the batch"),
    "no order": (image(one("Transpose", perm=[0, 1, 1, 3])), "is no order of the dimensions"),
    "padding with ones": (
        image(lambda g: g.add("Pad", Z, g.whole(0, 0, 1, 1, 0, 0, 1, 1), g.stored(1.0))),
        "only padding with zeros has a rule",
    ),
    "reflections": (
        image(lambda g: g.add("Pad", Z, g.whole(0, 0, 1, 1, 0, 0, 1, 1), mode="reflect")),
        "only padding with zeros has a rule",
    ),
    "new channels": (image(lambda g: g.add("Pad", Z, g.whole(0, 1, 0, 0, 0, 0, 0, 0))), "go beyond the sides of the images"),
    "cut-off sides": (image(lambda g: g.add("Pad", Z, g.whole(0, 0, -1, 0, 0, 0, 0, 0))), "or cut them off"),
    "a softmax within": (vector(one("Softmax")), "it stands before other layers, and has a rule as the last one alone"),
    "a missing weight": (
        vector(lambda g: g.add("Gemm", Z, "nothing")),
        "it reads 'nothing', which no weight and no node before it gives: a weight is missing",
    ),
    "too many inputs": (vector(lambda g: g.add("Relu", Z, Z)), "it has 2 inputs, expected 1 to 1"),
    "a constant in words": (
        vector(lambda g: g.add("Add", Z, g.add("Constant", value_string="5"))),
        "a constant given as 'value_string' is not read",
    ),
    "a constant that is NaN": (
        vector(lambda g: g.add("Add", Z, g.add("Constant", value_float=float("nan")))),
        "NaN or infinite values",
    ),
}


@pytest.mark.parametrize("name", WRONG_NODES)
def test_what_has_no_rule_is_refused_with_the_name_of_the_node(name: str, tmp_path: Path) -> None:
    (shape, opset, body), message = WRONG_NODES[name]
    graph = Graph(*shape, opset=opset)
    z = body(graph)
    first = len(graph.nodes) - 1
    # The reference may not run it, so the head is for a width that nobody gets to see.
    flat = graph.add("Flatten", z)
    said = refused(graph.model(graph.add("Gemm", flat, graph.weight(1, 3)), shape=["n", 3]), tmp_path)
    assert f"node {first} ({graph.nodes[first].op_type} 'the " in said or "node 0 (" in said
    assert re.search(message, said), said


def a_subgraph(model: onnx.ModelProto) -> None:
    branch = helper.make_graph(
        [helper.make_node("Identity", ["x"], ["b"])], "b", [], [helper.make_tensor_value_info("b", TensorProto.DOUBLE, None)]
    )
    condition = helper.make_node("If", ["c"], ["i"], name="a choice", then_branch=branch, else_branch=branch)
    model.graph.node.insert(0, condition)


def a_function(model: onnx.ModelProto) -> None:
    relu = helper.make_node("Relu", ["a"], ["b"])
    model.functions.append(helper.make_function("mine", "F", ["a"], ["b"], [relu], [helper.make_opsetid("", 17)]))


def elsewhere(model: onnx.ModelProto) -> None:
    tensor = model.graph.initializer[0]
    tensor.ClearField("raw_data")
    tensor.data_location = TensorProto.EXTERNAL
    tensor.external_data.add(key="location", value="../../etc/passwd")


def half_elsewhere(model: onnx.ModelProto) -> None:
    model.graph.initializer[0].external_data.add(key="location", value="weights.bin")


def a_bomb(model: onnx.ModelProto) -> None:
    model.graph.initializer[0].dims[:] = [2**40, 2**40]


def empty_sides(model: onnx.ModelProto) -> None:
    model.graph.initializer[0].dims[:] = [-1, 0]


def a_short_tensor(model: onnx.ModelProto) -> None:
    model.graph.initializer[2].raw_data = model.graph.initializer[2].raw_data[:-3]


def numbers_twice(model: onnx.ModelProto) -> None:
    model.graph.initializer[2].double_data.append(1.0)


def no_numbers(model: onnx.ModelProto) -> None:
    model.graph.initializer[2].ClearField("raw_data")


def another_type(model: onnx.ModelProto) -> None:
    model.graph.initializer[2].data_type = TensorProto.BFLOAT16


def no_type(model: onnx.ModelProto) -> None:
    model.graph.initializer[2].data_type = 99


def a_segment(model: onnx.ModelProto) -> None:
    model.graph.initializer[2].segment.begin = 1


def nan(model: onnx.ModelProto) -> None:
    tensor = model.graph.initializer[2]
    tensor.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(tensor) * np.nan, tensor.name))


def two_inputs(model: onnx.ModelProto) -> None:
    model.graph.input.append(helper.make_tensor_value_info("other", TensorProto.DOUBLE, [1]))


def no_input(model: onnx.ModelProto) -> None:
    del model.graph.input[:]


def two_outputs(model: onnx.ModelProto) -> None:
    model.graph.output.append(helper.make_tensor_value_info("v2", TensorProto.DOUBLE, None))


def another_output(model: onnx.ModelProto) -> None:
    model.graph.output[0].type.tensor_type.shape.dim[1].dim_value = 7


def output_of_nothing(model: onnx.ModelProto) -> None:
    model.graph.output[0].name = "w0"


def a_circle(model: onnx.ModelProto) -> None:
    model.graph.node[0].input[0] = "v3"


def a_name_twice(model: onnx.ModelProto) -> None:
    model.graph.node[3].output[0] = "v2"


def a_weight_twice(model: onnx.ModelProto) -> None:
    model.graph.initializer.append(model.graph.initializer[0])


def an_attribute_twice(model: onnx.ModelProto) -> None:
    conv = next(node for node in model.graph.node if node.op_type == "Conv")
    conv.attribute.append(conv.attribute[0])


def an_attribute_of_functions(model: onnx.ModelProto) -> None:
    conv = next(node for node in model.graph.node if node.op_type == "Conv")
    conv.attribute[0].ref_attr_name = "pads"


def sparse(model: onnx.ModelProto) -> None:
    values, places = numpy_helper.from_array(np.ones(1), "s"), numpy_helper.from_array(np.zeros(1, np.int64), "i")
    model.graph.sparse_initializer.append(helper.make_sparse_tensor(values, places, [3]))


def old(model: onnx.ModelProto) -> None:
    model.opset_import[0].version = 6


def of_tomorrow(model: onnx.ModelProto) -> None:
    model.opset_import[0].version = 1000


def no_opset(model: onnx.ModelProto) -> None:
    model.opset_import[0].domain = "com.microsoft"


def any_size(model: onnx.ModelProto) -> None:
    model.graph.input[0].type.tensor_type.shape.dim[2].dim_param = "height"


def many_at_once(model: onnx.ModelProto) -> None:
    model.graph.input[0].type.tensor_type.shape.dim[0].dim_value = 64


def no_shape(model: onnx.ModelProto) -> None:
    model.graph.input[0].type.tensor_type.ClearField("shape")


def a_huge_input(model: onnx.ModelProto) -> None:
    for dim in model.graph.input[0].type.tensor_type.shape.dim:
        dim.dim_value = 2**40
    model.graph.input[0].type.tensor_type.shape.dim[0].dim_value = 1


def whole_pixels(model: onnx.ModelProto) -> None:
    model.graph.input[0].type.tensor_type.elem_type = TensorProto.UINT8


def no_graph(model: onnx.ModelProto) -> None:
    model.ClearField("graph")


def no_nodes(model: onnx.ModelProto) -> None:
    del model.graph.node[:]


def training(model: onnx.ModelProto) -> None:
    model.training_info.add()


def no_output_of_a_node(model: onnx.ModelProto) -> None:
    del model.graph.node[2].output[:]


def not_text(model: onnx.ModelProto) -> None:
    model.graph.node[2].name = "\x1b[31m" + "x" * 1000
    model.graph.node[2].op_type = "\x1b[31mBad" * 100


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (a_subgraph, "node 0 (If 'a choice'), attribute 'else_branch': control flow is not followed"),
        (a_function, "it defines functions of its own"),
        (elsewhere, "weight 0 ('w0') lies in another file, which is not read: save the model with its weights in one file"),
        (half_elsewhere, "weight 0 ('w0') lies in another file"),
        (a_bomb, "weight 0 ('w0') has the shape (1099511627776, 1099511627776), and 2 numbers are there"),
        (empty_sides, "weight 0 ('w0') has the shape (-1, 0): every side must be at least 1"),
        (a_short_tensor, "weight 2 ('w2') has the shape (3, 2, 3, 3), and 53.625 numbers are there"),
        (numbers_twice, "weight 2 ('w2') has its numbers twice"),
        (no_numbers, "weight 2 ('w2') has its numbers nowhere"),
        (another_type, "weight 2 ('w2') is of type BFLOAT16; FLOAT, DOUBLE, FLOAT16"),
        (no_type, "weight 2 ('w2') is of type 99"),
        (a_segment, "weight 2 ('w2') is a part of a tensor"),
        (nan, "weight 2 ('w2') holds NaN or infinite values"),
        (two_inputs, "it has 2 inputs ('x', 'other'), expected one"),
        (no_input, "it has 0 inputs (none), expected one"),
        (two_outputs, "it has 2 outputs"),
        (another_output, "is said to have the shape [1, 7], and its nodes give (1, 3)"),
        (output_of_nothing, "does not come from the input by its nodes"),
        (a_circle, "node 0 (Sub 'the Sub'): it reads 'v3', which no weight and no node before it gives"),
        (a_name_twice, "node 3 (Relu 'the Relu'): the name 'v2' is given twice"),
        (a_weight_twice, "the name 'w0' is given twice"),
        (an_attribute_twice, "node 2 (Conv 'the Conv'): it has the attribute 'pads' twice"),
        (an_attribute_of_functions, "node 2 (Conv 'the Conv'): the attribute 'pads' is one of a function"),
        (sparse, "it has sparse weights"),
        (old, "it is of opset 6, and 7 to 28 are understood: export it with one of these, or convert it with"),
        (of_tomorrow, "it is of opset 1000, and 7 to 28 are understood"),
        (no_opset, "it names 0 versions of ONNX's operators"),
        (any_size, "the input 'x' has the shape (batch, 2, height, 6): all but the batch must be fixed numbers"),
        (many_at_once, "the input 'x' has 64 as its first dimension: expected a batch of 1 or of any size"),
        (no_shape, "the input 'x' has no shape"),
        (a_huge_input, f"more than {LARGEST:,} numbers"),
        (whole_pixels, "the input 'x' is of type UINT8; FLOAT, DOUBLE, FLOAT16 are read"),
        (no_graph, "there is no graph in it"),
        (no_nodes, "does not come from the input by its nodes: the file is cut short"),
        (training, "it holds a step of training"),
        (no_output_of_a_node, "node 2 (Conv 'the Conv'): it gives no value"),
        (not_text, "there is no rule for this operator"),
    ],
)
def test_hostile_and_damaged_files_are_refused(
    change: Callable[[onnx.ModelProto], None], message: str, tmp_path: Path
) -> None:
    _, model = residual()
    change(model)
    said = refused(model, tmp_path)
    assert message in said
    assert "\x1b" not in said
    assert len(said) < 1200


@pytest.mark.parametrize(
    ("result", "message"),
    [
        (lambda g: Z, "it gives its input back without a layer"),
        (lambda g: g.add("Gemm", Z, g.weight(5, 1)), "expected one number for each of two classes or more"),
        (lambda g: g.add("Unsqueeze", Z, g.whole(1)), r"has the shape (1, 1, 5); expected one number for each"),
        (lambda g: g.add("Softmax", g.add("Relu", Z), axis=0), "axis = 0 has no rule"),
    ],
)
def test_outputs_that_are_no_classes_are_refused(result: Body, message: str, tmp_path: Path) -> None:
    graph = Graph(*VECTOR)
    assert message in refused(graph.model(result(graph), shape=["n", "classes"]), tmp_path)


def test_a_file_that_is_cut_short_is_refused_wherever_the_cut_is(tmp_path: Path) -> None:
    content = residual()[1].SerializeToString()
    for end in range(0, len(content) - 1, 37):
        refused(content[:end], tmp_path)


@given(data=st.data())
def test_a_changed_byte_gives_what_the_file_says_or_a_refusal(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    _, model = residual()
    content = bytearray(model.SerializeToString())
    for _ in range(data.draw(st.integers(1, 3))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    path = tmp_path_factory.mktemp("changed") / "net.onnx"
    path.write_bytes(content)
    try:
        network = ll.load_onnx(path)
    except WrongModel:
        return
    changed = onnx.ModelProto.FromString(bytes(content))
    x = np.random.default_rng(0).random((1, *network.input_shape))
    with torch.no_grad():
        found = network(torch.from_numpy(x)).numpy()
    (name,) = [value.name for value in changed.graph.input if value.name not in {w.name for w in changed.graph.initializer}]
    (expected,) = onnx.reference.ReferenceEvaluator(changed).run(None, {name: x})
    np.testing.assert_allclose(found, expected, rtol=1e-9, atol=1e-9 * np.abs(expected).max())


def archive() -> bytes:
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w") as file:
        file.writestr("net/code/__torch__.py", "import os")
        file.writestr("net/data.pkl", b"\x80\x02.")
    return made.getvalue()


@pytest.mark.parametrize("name", ["net.onnx", "net.pt", "net.pth", "net.ts", "net"])
@pytest.mark.parametrize("content", [archive(), b"\x80\x02}q\x00."])
def test_torchscript_and_pickles_are_refused_with_what_to_do(name: str, content: bytes, tmp_path: Path, command) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    code, _, said = command("certify", path, "--data", "embedded", "--eps", "1")
    assert code == 2
    for part in ("pickle", "torch.onnx.export", "safetensors"):
        assert part in said
    assert "Traceback" not in said


def test_what_reads_our_own_files_says_who_reads_onnx(tmp_path: Path) -> None:
    with pytest.raises(WrongModel, match=r"locallip\.load_onnx reads it"):
        ll.load_model(written(residual()[1], tmp_path / "net.onnx"))


def test_a_file_that_is_not_there_is_named(tmp_path: Path, command) -> None:
    code, _, said = command("certify", tmp_path / "no.onnx", "--data", "embedded", "--eps", "1")
    assert (code, "no.onnx: cannot be read: No such file" in said) == (2, True)
    refused(b"", tmp_path)
    refused(b"not a network", tmp_path)


def test_without_the_package_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command) -> None:
    path = written(residual()[1], tmp_path / "net.onnx")
    for name in ("onnx", "onnx.checker", "onnx.numpy_helper"):
        monkeypatch.setitem(sys.modules, name, None)
    code, _, said = command("certify", path, "--data", "embedded", "--eps", "1")
    assert code == 3
    assert "ONNX files need the extra 'onnx': pip install 'locallip[onnx]'" in said
