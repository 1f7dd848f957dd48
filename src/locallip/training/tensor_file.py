"""Safetensors files written piece by piece: the library's own writer would need a second copy of everything in memory."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import BinaryIO

import torch
from torch import Tensor

#: Bytes of a tensor that are copied from the device, hashed and written at a time.
CHUNK = 2**26
_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


def layout(tensors: Mapping[str, Tensor]) -> tuple[bytes, list[Tensor]]:
    """The head of a safetensors file and the tensors in the order in which they follow it, wide types first."""
    for name, tensor in tensors.items():
        if not isinstance(tensor, Tensor) or tensor.dtype not in _DTYPES:
            what = tensor.dtype if isinstance(tensor, Tensor) else type(tensor).__name__
            raise TypeError(f"the tensor {name!r} cannot be saved: {what} has no place in a safetensors file")
    order = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    entries, end = {}, 0
    for name in order:
        tensor = tensors[name]
        begin, end = end, end + tensor.numel() * tensor.element_size()
        entries[name] = {"dtype": _DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begin, end]}
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text, [tensors[name] for name in order]


def write_tensors(file: BinaryIO, header: bytes, tensors: list[Tensor]) -> str:
    """Header and tensors, piece by piece so that vectors of many gigabytes need no second copy; returns the SHA-256."""
    digest = hashlib.sha256(header)
    file.write(header)
    for tensor in tensors:
        if not tensor.numel():
            continue
        for piece in tensor.detach().contiguous().reshape(-1).view(torch.uint8).split(CHUNK):
            content = piece.cpu().numpy().data
            digest.update(content)
            file.write(content)
    return digest.hexdigest()
