"""The published networks of bounds.py as ONNX files, as they are audited: docs/auditing.md has what was tried on them.

    python benchmarks/published_onnx.py --networks ../shared/networks --out nets
    locallip audit nets/cap_mnist.onnx --data mnist --data-root data --eps 0.25 --limit 100 --attempts 100000 --seed 1

An audit in l-infinity is asked for with --norm inf. The radii to begin with (--eps) are those of EPS in bounds.py.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import onnx
from onnx import TensorProto, helper, numpy_helper
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.bounds import NETWORKS, network

SHAPES = {"mnist": (1, 28, 28), "cifar10": (3, 32, 32)}


def graph_of(model: nn.Sequential, name: str, shape: tuple[int, ...]) -> onnx.ModelProto:
    """A model of float32 for any number of images; classes are the outputs of its last layer."""
    nodes, weights, value = [], [], "input"

    def stored(tensor: Tensor | None) -> str:
        assert tensor is not None
        weights.append(numpy_helper.from_array(tensor.detach().numpy(), f"w{len(weights)}"))
        return weights[-1].name

    for number, layer in enumerate(model):
        out = f"v{number}"
        if isinstance(layer, nn.Conv2d):
            window = {
                "strides": layer.stride,
                "pads": [int(p) for p in layer.padding] * 2,
                "kernel_shape": layer.kernel_size,
            }
            nodes.append(helper.make_node("Conv", [value, stored(layer.weight), stored(layer.bias)], [out], **window))
        elif isinstance(layer, nn.Linear):
            nodes.append(helper.make_node("Gemm", [value, stored(layer.weight), stored(layer.bias)], [out], transB=1))
        else:
            nodes.append(helper.make_node("Relu" if isinstance(layer, nn.ReLU) else "Flatten", [value], [out]))
        value = out
    ends = [
        helper.make_tensor_value_info(end, TensorProto.FLOAT, ["batch", *sizes])
        for end, sizes in (("input", shape), (value, (model[-1].out_features,)))
    ]
    graph = helper.make_graph(nodes, name, ends[:1], ends[1:], weights)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--networks", type=Path, required=True, help="folder of the weights")
    parser.add_argument("--out", type=Path, required=True, help="folder for the files")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    for name, (data, _) in NETWORKS.items():
        model = graph_of(network(args.networks, name), name, SHAPES[data])
        onnx.checker.check_model(model)
        onnx.save(model, str(args.out / f"{name}.onnx"))
        print(args.out / f"{name}.onnx")


if __name__ == "__main__":
    main()
