"""Which operations a computation runs on its input, for telling whether a traced graph is what the module itself runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

#: The name of an operation, and the numbers among its arguments; sizes and other lists are left out.
Operation = tuple[str, tuple[Any, ...]]


def operations(compute: Callable[[Tensor], Any], x: Tensor, inference: bool = False) -> list[Operation]:
    """Every operation of torch that `compute` applies to x or to what came of it, in order.

    What is computed from stored tensors alone is not in the list: tracing may have done it beforehand. In-place
    operations count as their plain counterparts. With `inference`, in torch's inference mode.
    """
    with _Recorder(x) as recorder, torch.inference_mode(inference), torch.no_grad():
        compute(x)
    return recorder.seen


class _Recorder(TorchDispatchMode):
    """Follows memory, not tensors, so that a view of x is known too; keeps all of it, so that no address is used twice."""

    def __init__(self, x: Tensor):
        super().__init__()
        self.seen: list[Operation] = []
        self._kept, self._memory = [x], {_memory(x)}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        given = tree_leaves((args, kwargs))
        if any(isinstance(value, Tensor) and _memory(value) in self._memory for value in given):
            name = func.overloadpacket.__name__
            numbers = tuple(v for v in (*args, *kwargs.values()) if isinstance(v, (bool, int, float)))
            self.seen.append((name.removesuffix("_"), numbers))
            made = [value for value in tree_leaves(result) if isinstance(value, Tensor)]
            self._kept.extend(made)
            self._memory.update(_memory(value) for value in made)
        return result


def _memory(value: Tensor) -> int:
    return value.untyped_storage().data_ptr()
