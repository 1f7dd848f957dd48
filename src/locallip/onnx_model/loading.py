"""From a path to a torch module: the file is read once, checked, and walked node by node."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

from locallip.network import UnsupportedLayer, lower
from locallip.onnx_model.building import build
from locallip.onnx_model.file import check_valid, read_model
from locallip.onnx_model.network import OnnxNetwork
from locallip.zoo import WrongModel


class MissingOnnx(Exception):
    """The package that reads ONNX files is not installed; the message names the extra."""


def load_onnx(path: str | Path) -> OnnxNetwork:
    """The network of an ONNX file as a torch module in eval mode, with its `input_shape` (without batch) and `classes`.

    Weights are exactly those of the file: float16 ones become float32, float32 and float64 ones stay what they are. The
    file is read as it is for a batch of one. A Softmax or LogSoftmax at the end is left out: it keeps the order of the
    classes, and certificates are about the class with the largest value. Every operator and attribute is either
    understood or refused, and what no bound is known for is refused here too, so that a network that is loaded can be
    certified. What the module computes is compared with the reference implementation of ONNX by the tests, not here:
    that one computes in the dtype of the file, so that a comparison would have to let differences pass.

    Raises:
        WrongModel: The file is damaged, hostile or not understood; the message names the node.
        MissingOnnx: The extra `onnx` is not installed.
    """
    path, onnx = Path(path), _package()
    try:
        model = read_model(path, onnx)
        network = build(model, onnx)
        check_valid(model, onnx)
        lower(network, network.input_shape)
    except (WrongModel, UnsupportedLayer) as error:
        raise WrongModel(f"{path}: {error}") from None
    except ValueError as error:  # layers of a known kind that lowering cannot use, such as values beyond float32
        raise WrongModel(f"{path}: this network cannot be certified: {error}") from None
    return network


def _package() -> Any:
    try:
        for part in ("onnx.checker", "onnx.numpy_helper"):
            importlib.import_module(part)
        return importlib.import_module("onnx")
    except ImportError as error:
        raise MissingOnnx(
            f"ONNX files need the extra 'onnx': pip install 'locallip[onnx]', or '.[onnx]' in a clone ({error})"
        ) from None
