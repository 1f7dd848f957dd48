"""What a network is, as text: the classes and settings of its parts, and digests of the numbers that it reads now."""

from __future__ import annotations

import functools
import hashlib
import types
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from locallip.activations import Clip, SortPairs
from locallip.network.stages import Network
from locallip.ops import Compose, Conv, Dense, Diagonal, LinearOp, Sum

_PLAIN = (type(None), bool, int, float, str, bytes, torch.dtype, torch.device, torch.Size, type)


class Digests:
    """SHA-256 of tensors, each once: layers and networks read the same ones."""

    def __init__(self) -> None:
        self._known: dict[tuple[Any, ...], tuple[Tensor, str]] = {}

    def __call__(self, tensor: Tensor) -> str:
        place = (
            tensor.data_ptr(),
            tensor.device,
            tensor.dtype,
            tensor.shape,
            tensor.stride(),
            tensor.is_neg(),
            tensor.is_conj(),
        )
        if not tensor.numel() or place not in self._known:  # the tensor is kept, so that its memory is not used again
            self._known[place] = tensor, hashlib.sha256(bytes_of(tensor)).hexdigest()
        return f"{tuple(tensor.shape)} {tensor.dtype} {self._known[place][1]}"


def bytes_of(tensor: Tensor) -> memoryview:
    """The numbers of a tensor in row-major order, without a copy where they are so already."""
    stored = tensor.detach().resolve_neg().resolve_conj().cpu().contiguous()
    return stored.as_strided((stored.numel(),), (1,)).view(torch.uint8).numpy().data  # one number may keep any stride


@torch.no_grad()
def described(network: Network, digest: Digests) -> list[str]:
    """Equal for networks that compute the same in the same way; names are left out."""
    found = [f"{tuple(network.input_shape)}"]
    for stage in network.stages:
        _tell((stage.terms, [op for op, _ in stage.offset.parts], stage.activation), digest, found)
    return [*found, *(digest(value) for value in read_by(network))]


def read_by(network: Network) -> Iterator[Tensor]:
    """The numbers that a network reads now, which need not be those of the module that a worker has.

    In a deep copy of a worker they are the first module's, and where a layer or a tensor was exchanged, those from before.
    """
    for stage in network.stages:
        for op in stage.terms.values():
            yield from _read_by_op(op)
        yield from (value(torch.float64) for _, value in stage.offset.parts)
        if isinstance(stage.activation, (Clip, SortPairs)):
            ends = stage.activation.thresholds(torch.float64)
            yield from (end if isinstance(end, Tensor) else torch.tensor(end, device="cpu") for end in ends)


def _read_by_op(op: LinearOp) -> Iterator[Tensor]:
    if isinstance(op, Compose):
        yield from (*_read_by_op(op.outer), *_read_by_op(op.inner))
    elif isinstance(op, Sum):
        yield from (value for part in op.parts for value in _read_by_op(part))
    elif isinstance(op, (Dense, Conv)):
        yield op.weight()
    elif isinstance(op, Diagonal):
        yield op.factor(torch.float64)


def _tell(value: Any, digest: Digests, found: list[str], within: tuple[int, ...] = ()) -> None:
    """A value and, where it is an object of any kind, what it keeps; of functions what they were made with.

    Modules are left out: what is read of them is in `read_by`, and they keep much that no bound reads.
    """
    if isinstance(value, _PLAIN):
        found.append(repr(value))
    elif isinstance(value, Tensor):
        found.append(digest(value))
    elif isinstance(value, (np.ndarray, np.generic)):
        found.append(f"{value.dtype} {value.shape} {hashlib.sha256(value.tobytes()).hexdigest()}")
    elif id(value) not in within:
        found.append(type(value).__qualname__)
        for part in _kept_by(value):
            _tell(part, digest, found, (*within, id(value)))


def _kept_by(value: Any) -> Iterable[Any]:
    if isinstance(value, Mapping):
        return [*value.keys(), *value.values()]
    if isinstance(value, (list, tuple)):
        return value
    if isinstance(value, (set, frozenset)):
        return sorted(map(repr, value))
    if isinstance(value, types.FunctionType):
        return [value.__qualname__, *(cell.cell_contents for cell in value.__closure__ or ())]
    if isinstance(value, functools.partial):
        return [value.func, value.args, value.keywords]
    if isinstance(value, nn.Module):
        return []
    slots = [name for kind in type(value).__mro__ for name in getattr(kind, "__slots__", ()) if hasattr(value, name)]
    kept = {**{name: getattr(value, name) for name in slots}, **getattr(value, "__dict__", {})}
    return [part for pair in kept.items() for part in pair]
