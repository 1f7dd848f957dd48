"""What is looked at before and after lowering: wrappers, parameters, hidden code, and whether both compute the same."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from itertools import zip_longest
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.nn.utils import parametrize

from locallip.network.recording import Operation, operations
from locallip.network.stages import Network

SUPPORTED = (
    "Linear, Conv1d/2d/3d, AvgPool1d/2d, AdaptiveAvgPool with equal windows, Flatten and reshapes, BatchNorm and Dropout "
    "in eval mode, locallip.Normalize, Identity, +, -, scaling by a stored number or tensor; ReLU, locallip.ReLUTheta, "
    "ReLU6, Hardtanh, LeakyReLU, ELU, Tanh, Sigmoid, Softplus, locallip.MaxMin, locallip.ClippedMaxMin, MaxPool2d with "
    "disjoint windows"
)

#: What torch's own layers call, as it was when this was imported: a program may have replaced it since.
_CALLED: dict[Any, str] = {
    torch: "tanh sigmoid",
    F: "linear conv1d conv2d conv3d batch_norm avg_pool1d avg_pool2d adaptive_avg_pool1d adaptive_avg_pool2d max_pool2d "
    "dropout dropout1d dropout2d dropout3d alpha_dropout relu relu6 hardtanh leaky_relu elu softplus",
    # Methods are known by their names, so it counts what those stand for.
    Tensor: "relu relu_ tanh sigmoid clone contiguous mean flatten view reshape squeeze unsqueeze unflatten expand permute "
    "transpose t add add_ sub sub_ mul mul_ div div_ neg __add__ __radd__ __iadd__ __sub__ __rsub__ __isub__ __mul__ "
    "__rmul__ __imul__ __truediv__ __rtruediv__ __itruediv__ __neg__ __getitem__",
}
_FUNCTIONS = [(space, name, getattr(space, name)) for space, names in _CALLED.items() for name in names.split()]

EXTEND = "Others can be added with locallip.register_layer."


class UnsupportedLayer(ValueError):
    """A layer for which no sound bound is known here. The message names it and says what is supported."""


def unwrap(module: nn.Module) -> nn.Module:
    """The user's module inside torch.compile or DataParallel."""
    if isinstance(module, torch.jit.ScriptModule):
        raise UnsupportedLayer("a TorchScript module cannot be traced; pass the original nn.Module")
    if not isinstance(module, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(module).__name__}")
    wrapped = "_orig_mod" if type(module) is torch._dynamo.eval_frame.OptimizedModule else "module"
    if wrapped == "_orig_mod" or type(module) in (nn.DataParallel, nn.parallel.DistributedDataParallel):
        if module._forward_hooks or module._forward_pre_hooks:
            raise UnsupportedLayer(f"{type(module).__name__} has forward hooks, which no rule can see.")
        return unwrap(getattr(module, wrapped))
    return module


def check_module(module: nn.Module) -> None:
    """Refuse what tracing cannot see or the bound cannot use."""
    _check_parameters(module)
    check_no_hidden_code(module)
    _check_parametrizations(module)
    _check_one_input(module)


def example(module: nn.Module, input_shape: Sequence[int], batch: int, seed: int = 0) -> Tensor:
    """Random samples in the dtype and on the device of the parameters."""
    stored = [t for t in (*module.parameters(), *module.buffers()) if t.is_floating_point()]
    dtype = stored[0].dtype if stored else torch.get_default_dtype()
    device = stored[0].device if stored else torch.device("cpu")
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(batch, *input_shape, generator=generator, dtype=torch.float32, device="cpu").to(
        dtype=dtype, device=device
    )


@torch.no_grad()  # what was made in inference mode and is asked for outside cannot be differentiated
def _check_parameters(module: nn.Module) -> None:
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if isinstance(tensor, (nn.UninitializedParameter, nn.UninitializedBuffer)):
            raise ValueError(f"'{name}' has no values yet (a lazy layer); run the model once on an input first")
        if not _is_plain(tensor):
            raise UnsupportedLayer(
                f"'{name}' is not supported: it is a {type(tensor).__name__} ({tensor.layout}, {tensor.dtype}), which may "
                "compute otherwise than a dense tensor of real numbers."
            )
        if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
            raise ValueError(f"'{name}' holds NaN or infinite values: nothing can be said about this network")


def _is_plain(tensor: Tensor) -> bool:
    """Whether it is dense, real, and torch's own; a subclass may give every function another meaning."""
    own = type(tensor) in (Tensor, nn.Parameter, nn.Buffer)
    return own and tensor.layout == torch.strided and not tensor.is_complex() and not tensor.is_quantized


def check_no_hidden_code(module: nn.Module) -> None:
    """Refuse what runs beside `forward` and is not seen in the graph."""
    everywhere = nn.modules.module
    if everywhere._global_forward_hooks or everywhere._global_forward_pre_hooks:
        raise UnsupportedLayer("a global forward hook is registered, which no rule can see; remove it.")
    for space, name, function in _FUNCTIONS:
        if getattr(space, name) is not function:
            raise UnsupportedLayer(f"{space.__name__}.{name} was replaced, so layers that call it are not supported.")
    for name, layer in module.named_modules():
        where = f"{type(layer).__name__} at '{name}'" if name else type(layer).__name__
        if layer._forward_hooks or layer._forward_pre_hooks:
            raise UnsupportedLayer(
                f"{where} is not supported: it has forward hooks, which no rule can see. Remove them; for weight or "
                f"spectral normalisation use torch.nn.utils.parametrizations."
            )
        calls = ("__call__", "_call_impl", "_wrapped_call_impl")
        replaced = any(getattr(type(layer), call) is not getattr(nn.Module, call) or call in vars(layer) for call in calls)
        if "forward" in vars(layer) or replaced:
            raise UnsupportedLayer(f"{where} is not supported: its forward was replaced.")
        if layer._compiled_call_impl is not None:  # which torch calls in place of forward, whoever has put it there
            raise UnsupportedLayer(f"{where} is not supported: it was compiled in place; use torch.compile(model) instead.")
        for method in vars(layer):
            if inspect.isfunction(getattr(type(layer), method, None)):
                raise UnsupportedLayer(f"{where} is not supported: its method {method} was replaced.")
        if type(layer).__name__ == "_SpectralNorm" and layer.training:
            raise UnsupportedLayer(f"{where} changes its weight at every use in training mode; call model.eval() first.")


def _check_parametrizations(module: nn.Module) -> None:
    """A parametrized tensor must be the same at every reading."""
    for name, layer in module.named_modules():
        for tensor in getattr(layer, "parametrizations", {}):
            where = f"{name}.{tensor}".lstrip(".")
            try:
                with torch.no_grad():
                    first, second = getattr(layer, tensor), getattr(layer, tensor)
            except Exception as error:
                raise UnsupportedLayer(f"'{where}' is not supported: its parametrization fails: {error}") from error
            if not torch.equal(first, second):
                raise UnsupportedLayer(
                    f"'{where}' is another tensor at every reading. Only parametrizations without state are supported."
                )


def check_no_cache(module: nn.Module) -> None:
    """Refuse to prove anything of weights that torch keeps from an earlier reading: they need not be the stored ones."""
    if parametrize._cache_enabled and any(hasattr(layer, "parametrizations") for layer in module.modules()):
        raise RuntimeError(
            "inside torch.nn.utils.parametrize.cached() parametrized weights need not be the stored ones: leave it first"
        )


def _check_one_input(module: nn.Module) -> None:
    parameters = inspect.signature(module.forward).parameters.values()
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    needed = [p.name for p in parameters if p.kind in positional and p.default is inspect.Parameter.empty]
    if len(needed) > 1:
        inputs = ", ".join(needed)
        raise UnsupportedLayer(
            f"{type(module).__name__} takes more than one input ({inputs}). Only one tensor is supported."
        )


def check_same_operations(module: nn.Module, root: nn.Module, graph: fx.Graph, input_shape: Sequence[int]) -> None:
    """The module must run the operations of its graph, with the same numbers, on batches of two sizes.

    Tracing sees what forward does with a stand-in for the tensor. Code that asks whether it has a tensor, or that calls
    something the stand-in does not pass on, does otherwise with x, and random samples need not show it.
    """
    run = fx.Interpreter(root, graph=graph).run
    found = _difference(module, run, input_shape, inference=False)
    # A forward that enters inference mode itself has layers in one piece there, and so has its graph in that mode.
    if found is not None and _difference(module, run, input_shape, inference=True) is not None:
        raise UnsupportedLayer(
            f"{type(module).__name__} is not supported: {found}. forward must do the same with every input; it may not ask "
            "for its type or batch size, nor use autocast."
        )


def _difference(module: nn.Module, run: Callable[[Tensor], Any], input_shape: Sequence[int], inference: bool) -> str | None:
    """Where the operations of the module leave those of its graph, in words."""
    expected = operations(run, example(module, input_shape, batch=2), inference)
    for size in (2, 3):
        found = operations(module, example(module, input_shape, batch=size), inference)
        for shown, runs in zip_longest(expected, found, fillvalue=("nothing", ())):
            if shown != runs:
                return f"it runs {_call(runs)} on a batch of {size} where its traced graph has {_call(shown)}"
    return None


def _call(operation: Operation) -> str:
    name, numbers = operation
    return f"{name}({', '.join(map(repr, numbers))})" if numbers else name


def check_same_function(network: Network, module: nn.Module, input_shape: Sequence[int]) -> None:
    """The lowered network must compute what the module computes, in float64, on other samples and batch sizes."""
    for size, spread in ((3, 1.0), (1, 10.0), (8, 0.1)):
        x = example(module, input_shape, batch=size, seed=size).double() * spread
        try:
            with torch.no_grad():
                theirs, ours = _in_double(module, x.clone()), network(x)
            same = theirs.shape == ours.shape and _close(theirs.flatten(1), ours.flatten(1))
        except Exception as error:
            raise UnsupportedLayer(
                f"{type(module).__name__} is not supported: it fails on a batch of {size}: {error}. forward must work for "
                "every batch size and keep the first dimension as the batch."
            ) from error
        if not same:
            raise UnsupportedLayer(
                f"the lowered network does not compute what {type(module).__name__} computes. Layers that change their own "
                f"state, random layers and code that depends on the batch are not supported."
            )


def _close(theirs: Tensor, ours: Tensor) -> bool:
    """Every output against its own size over the batch, so that one large logit does not hide the others."""
    allowed = 1e-8 * ours.abs().amax(0) + 1e-13 * ours.abs().max()
    return bool(((theirs - ours).abs() <= allowed).all())


def _in_double(module: nn.Module, x: Tensor) -> Any:
    """module(x) with every parameter and buffer in float64; the module itself stays as it is.

    A parametrized tensor is computed in the module's own dtype first, as its rounding is part of the network.
    """
    stored = (*module.named_parameters(), *module.named_buffers())
    doubled = {name: t.detach().double() if t.is_floating_point() else t.clone() for name, t in stored}
    with parametrize.cached():  # what it holds is used in place of computing the tensor
        before = dict(parametrize._cache)  # of a caller who is inside `cached` too
        try:
            for layer in module.modules():
                for name in getattr(layer, "parametrizations", {}):
                    parametrize._cache[(id(layer), name)] = getattr(layer, name).detach().double()
            return torch.func.functional_call(module, doubled, (x,))
        finally:
            parametrize._cache.clear()
            parametrize._cache.update(before)
