"""Tensors of an ONNX file as numpy arrays, once their sizes are seen to be those of the bytes that are there."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from locallip.zoo import WrongModel

#: Types that are read, by their names in ONNX: bytes of a number, and the field that may hold it instead of raw_data.
_TYPES = {
    "FLOAT": (4, "float_data"),
    "DOUBLE": (8, "double_data"),
    "FLOAT16": (2, "int32_data"),
    "INT64": (8, "int64_data"),
    "INT32": (4, "int32_data"),
    "BOOL": (1, "int32_data"),
}
#: Types of weights and inputs.
FLOATS = ("FLOAT", "DOUBLE", "FLOAT16")


def check_tensor(tensor: Any, where: str, onnx: Any) -> None:
    """Refuse a tensor of another type, in another file, or with a size that is not that of its numbers."""
    kind = type_name(tensor.data_type, onnx)
    if kind not in _TYPES:
        raise WrongModel(f"{where} is of type {kind}; {', '.join(_TYPES)} are read")
    if tensor.external_data or tensor.data_location != onnx.TensorProto.DEFAULT:
        raise WrongModel(f"{where} lies in another file, which is not read: save the model with its weights in one file")
    if tensor.HasField("segment"):
        raise WrongModel(f"{where} is a part of a tensor, which is not read")
    if any(size < 1 for size in tensor.dims):
        raise WrongModel(f"{where} has the shape {tuple(tensor.dims)[:8]}: every side must be at least 1")
    size, field = _TYPES[kind]
    raw, listed = len(tensor.raw_data), len(getattr(tensor, field))
    if (raw > 0) == (listed > 0):
        raise WrongModel(f"{where} has its numbers {'twice' if raw else 'nowhere'}")
    wanted, there = math.prod(tensor.dims), raw / size if raw else listed
    if wanted != there:
        raise WrongModel(f"{where} has the shape {tuple(tensor.dims)[:8]}, and {there:g} numbers are there")


def array_of(tensor: Any, where: str, onnx: Any) -> np.ndarray:
    """The numbers of a tensor that `check_tensor` has passed."""
    array = np.asarray(onnx.numpy_helper.to_array(tensor))
    if array.dtype.kind == "f" and not np.isfinite(array).all():
        raise WrongModel(f"{where} holds NaN or infinite values: nothing can be said about this network")
    return array


def type_name(number: int, onnx: Any) -> str:
    """The name of a type, such as FLOAT."""
    names = onnx.TensorProto.DataType
    return names.Name(number) if number in names.values() else str(number)
