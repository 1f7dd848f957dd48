"""One rule per layer type: how a torch module or function becomes a linear operator. Activations: activation_rules.py.

A rule gets the layer, the shape of its input without batch, and a tensor whose device is the network's. It returns an
`Affine` step or an `Activation`, or raises `Refused` with the reason.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from locallip.activations import Activation
from locallip.network.normalize import Normalize
from locallip.ops import Conv, Dense, Diagonal, Identity, LinearOp, average_pool, compose
from locallip.ops.reshape import Reshape


class Refused(ValueError):
    """A layer of a known type whose settings have no rule; the message says which and what to use instead."""


@dataclass(frozen=True)
class Affine:
    """z -> op(z + shift) + bias; shift and bias broadcast against input and output of `op`.

    Both give stored numbers as they are: what the network's arithmetic does with them is left to the bound, which counts its
    rounding.
    """

    op: LinearOp
    bias: Callable[[torch.dtype], Tensor] | None = None
    shift: Callable[[torch.dtype], Tensor] | None = None


Step = Affine | Activation
ModuleRule = Callable[[Any, torch.Size, Tensor], Step]
AnyRule = TypeVar("AnyRule", bound=Callable[..., Step])

MODULE_RULES: dict[type[nn.Module], ModuleRule] = {}
FUNCTION_RULES: dict[Any, Callable[..., Step]] = {}
#: What a rule describes, as it was when the rule was registered: a program may replace methods of torch's own classes.
_METHODS: dict[type[nn.Module], dict[str, Any]] = {}
#: What a class may have of its own and still be the layer it derives from: how it is made, shown, stored and copied.
_APART = {
    *("__init__", "__new__", "__init_subclass__", "reset_parameters", "train", "extra_repr", "__repr__", "_get_name"),
    *("__getstate__", "__setstate__", "__deepcopy__", "_save_to_state_dict", "_load_from_state_dict"),
    *("__dict__", "__weakref__", "__annotate__", "__annotate_func__"),
}


def register_layer(*types: type[nn.Module]) -> Callable[[AnyRule], AnyRule]:
    """Decorator: `rule(module, in_shape, like)` lowers modules of these types (see docs/adding_a_layer.md)."""

    def keep(rule: AnyRule) -> AnyRule:
        MODULE_RULES.update(dict.fromkeys(types, rule))
        _METHODS.update({kind: _methods(kind) for kind in types})
        return rule

    return keep


def module_rule(module: nn.Module) -> ModuleRule | None:
    """The rule for this module's type, or for a base class of which it has changed no method.

    Whatever was changed may be called by forward, and what forward does then is for tracing to see.
    """
    for base in type(module).__mro__:
        if base in MODULE_RULES:
            now = _methods(type(module))
            return MODULE_RULES[base] if all(now.get(name) is was for name, was in _METHODS[base].items()) else None
    return None


def _methods(kind: type[nn.Module]) -> dict[str, Any]:
    """Methods and properties by name; of nn.Module's that they are its own, for torch.fx replaces some while it traces."""
    found: dict[str, Any] = dict.fromkeys(_OF_MODULE, nn.Module)
    for base in reversed(kind.__mro__):
        if base not in (object, nn.Module):
            found.update(_own_methods(base))
    return found


def _own_methods(kind: type) -> dict[str, Any]:
    return {name: value for name, value in vars(kind).items() if hasattr(value, "__get__") and name not in _APART}


_OF_MODULE = [*_own_methods(object), *_own_methods(nn.Module)]


def function_rule(*targets: Any) -> Callable[[AnyRule], AnyRule]:
    """Decorator: `rule(in_shape, like, *rest of the call)` lowers calls of these functions or tensor methods."""

    def keep(rule: AnyRule) -> AnyRule:
        FUNCTION_RULES.update(dict.fromkeys(targets, rule))
        return rule

    return keep


def as_tuple(value: int | Sequence[int], dims: int = 2) -> tuple[int, ...]:
    values = (value,) * dims if isinstance(value, int) else tuple(value)
    return values * dims if len(values) == 1 else values


# Linear layers ---------------------------------------------------------------------------------------------------------


@register_layer(nn.Linear)
def _linear_module(module: nn.Linear, in_shape: torch.Size, like: Tensor) -> Affine:
    bias = None if module.bias is None else lambda: module.bias
    return _dense(lambda: module.weight, bias, in_shape)


@function_rule(F.linear)
def _linear(in_shape: torch.Size, like: Tensor, weight: Tensor, bias: Tensor | None = None) -> Affine:
    return _dense(lambda: weight, None if bias is None else lambda: bias, in_shape)


def _dense(weight: Callable[[], Tensor], bias: Callable[[], Any] | None, in_shape: torch.Size) -> Affine:
    op = Dense(weight, tuple(in_shape[:-1]))
    return Affine(op, None if bias is None else lambda dtype: bias().to(dtype))


@register_layer(nn.Conv1d, nn.Conv2d, nn.Conv3d)
def _conv_module(module: nn.Conv2d, in_shape: torch.Size, like: Tensor) -> Affine:
    if module.padding_mode != "zeros":
        raise Refused(f"padding_mode={module.padding_mode!r} has no rule; use zero padding")
    bias: Callable[[], Any] | None = None if module.bias is None else lambda: module.bias
    geometry = (module.stride, module.padding, module.dilation, module.groups)
    return _convolution(lambda: module.weight, bias, in_shape, *geometry)


@function_rule(F.conv1d, F.conv2d, F.conv3d)
def _conv(
    in_shape: torch.Size,
    like: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> Affine:
    read_bias = None if bias is None else lambda: bias
    return _convolution(lambda: weight, read_bias, in_shape, stride, padding, dilation, groups)


def _convolution(
    weight: Callable[[], Tensor],
    bias: Callable[[], Any] | None,
    in_shape: torch.Size,
    stride: Any,
    padding: Any,
    dilation: Any,
    groups: int,
) -> Affine:
    dims = weight().dim() - 2
    if len(in_shape) != dims + 1:
        raise Refused(f"a {dims}d convolution takes samples of {dims + 1} dimensions, got {tuple(in_shape)}")
    strides, dilations = as_tuple(stride, dims), as_tuple(dilation, dims)
    if padding == "same":
        totals = [d * (k - 1) for d, k in zip(dilations, weight().shape[2:], strict=True)]
        sides = [(total // 2, total - total // 2) for total in totals]
    else:
        sides = [(p, p) for p in as_tuple(0 if padding == "valid" else padding, dims)]
    op = Conv(weight, in_shape, strides, sides, dilations, groups)
    if bias is None:
        return Affine(op)
    return Affine(op, lambda dtype: bias().to(dtype).reshape(-1, *[1] * dims))


@register_layer(nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
def _batch_norm(module: nn.BatchNorm2d, in_shape: torch.Size, like: Tensor) -> Affine:
    if module.training:
        raise Refused("batch norm in training mode mixes the samples of a batch; call model.eval() first")
    if module.running_mean is None or module.running_var is None:
        raise Refused("batch norm without running statistics mixes the samples of a batch; keep them")
    if bool((module.running_var < 0).any()):  # var + eps may cancel, and float32 has another eps
        raise Refused("batch norm with a negative running variance has no rule; a variance is at least 0")
    spread, info = module.running_var.double() + module.eps, torch.finfo(torch.float32)
    if not bool(((spread >= info.tiny) & (spread <= info.max)).all()):  # where float32 has lost its digits or overflows
        raise Refused(f"batch norm with a variance + eps outside {info.tiny:.1e} ... {info.max:.1e} has no rule; rescale it")
    shape = (-1, *[1] * (len(in_shape) - 1))

    def inverse(dtype: torch.dtype) -> Tensor:
        assert module.running_var is not None
        return (module.running_var.to(dtype) + module.eps).rsqrt().reshape(shape)

    def shift(dtype: torch.dtype) -> Tensor:
        assert module.running_mean is not None
        return -module.running_mean.to(dtype).reshape(shape)

    op: LinearOp = Diagonal(inverse, in_shape)
    if module.weight is not None:  # a factor of its own: the product of the two could underflow
        op = compose(Diagonal(lambda dtype: module.weight.to(dtype).reshape(shape), in_shape), op)
    bias = None if module.bias is None else lambda dtype: module.bias.to(dtype).reshape(shape)
    return Affine(op, bias, shift)


@register_layer(Normalize)
def _normalize(module: Normalize, in_shape: torch.Size, like: Tensor) -> Affine:
    shape = (-1, *[1] * (len(in_shape) - 1))

    def factor(dtype: torch.dtype) -> Tensor:
        return module.std.to(dtype).reciprocal().reshape(shape)

    return Affine(Diagonal(factor, in_shape), shift=lambda dtype: -module.mean.to(dtype).reshape(shape))


@register_layer(nn.Identity)
@function_rule("contiguous", "clone")
def _identity(*call: Any) -> Affine:
    in_shape = next(value for value in call if isinstance(value, torch.Size))
    return Affine(Identity(in_shape))


@register_layer(nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout)
def _dropout_module(module: nn.Dropout, in_shape: torch.Size, like: Tensor) -> Affine:
    return _dropout(in_shape, like, module.p, module.training)


@function_rule(F.dropout, F.dropout1d, F.dropout2d, F.dropout3d)
def _dropout(in_shape: torch.Size, like: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Affine:
    if training:
        raise Refused("dropout in training mode is random; call model.eval() first")
    return Affine(Identity(in_shape))


@register_layer(nn.Flatten, nn.Unflatten)
def _reshape_module(module: nn.Module, in_shape: torch.Size, like: Tensor) -> Affine:
    return reshape(in_shape, module(like.new_zeros(len(like), *in_shape)).shape, len(like))


def reshape(in_shape: torch.Size, out: torch.Size, batch: int) -> Affine:
    """The same numbers in another shape; `out` is with the batch, which must stay the first dimension."""
    if len(out) < 2 or out[0] != batch or out[1:].numel() != in_shape.numel():
        raise Refused(f"it turns the batch into {tuple(out)}; the first dimension must stay the batch")
    return Affine(Identity(in_shape) if in_shape == out[1:] else Reshape(in_shape, out[1:]))


#: Functions and methods that keep the numbers of a sample in row-major order; the new shape is read off a trial run.
RESHAPES: set[Any] = {
    *(torch.flatten, torch.reshape, torch.squeeze, torch.unsqueeze),
    *("flatten", "view", "reshape", "squeeze", "unsqueeze", "unflatten"),
}
#: Further views of a stored tensor; a value that depends on the input has no rule for them.
VIEWS: set[Any] = {operator.getitem, "expand", "permute", "transpose", "t"}


def scale(factor: Tensor | float, in_shape: torch.Size, like: Tensor) -> Affine:
    """Multiplication by a number or by a stored tensor that is the same for every sample."""
    value = _per_sample(_stored(factor, like), in_shape)
    return Affine(Diagonal(lambda dtype: value.to(dtype), in_shape))


def shift(summand: Tensor | float, sign: float, in_shape: torch.Size, like: Tensor) -> Affine:
    """Addition (sign 1) or subtraction (sign -1) of a number or a stored tensor."""
    value = _per_sample(_stored(summand, like), in_shape)
    if bool(((sign * value.double() == 0) & (value != 0) & (sign != 0)).any()):
        raise Refused(f"alpha={sign:g} times a number that is added vanishes in float64; multiply them beforehand")
    return Affine(Identity(in_shape), lambda dtype: sign * value.to(dtype))


def _stored(value: Tensor | float, like: Tensor) -> Tensor:
    """A constant as it is stored: a tensor in its own floating-point dtype, a Python number in float64."""
    if isinstance(value, Tensor) and value.is_floating_point():
        return value
    return torch.as_tensor(value, dtype=torch.float64, device=like.device)


def _per_sample(value: Tensor, in_shape: torch.Size) -> Tensor:
    """`value` without batch dimension; refused where it would broadcast the sample to another shape."""
    if value.dim() == len(in_shape) + 1 and value.shape[0] == 1:
        value = value[0]
    if value.dim() > len(in_shape) or torch.broadcast_shapes(value.shape, in_shape) != in_shape:
        raise Refused(f"a tensor of shape {tuple(value.shape)} does not fit samples of shape {tuple(in_shape)}")
    return value


# Average pooling -------------------------------------------------------------------------------------------------------


@register_layer(nn.AvgPool1d, nn.AvgPool2d)
def _avg_pool_module(module: nn.AvgPool1d | nn.AvgPool2d, in_shape: torch.Size, like: Tensor) -> Affine:
    divisor = getattr(module, "divisor_override", None)
    geometry = (module.kernel_size, module.stride, module.padding, module.ceil_mode, module.count_include_pad)
    rule = _avg_pool1d if isinstance(module, nn.AvgPool1d) else _avg_pool2d
    return rule(in_shape, like, *geometry, *(() if divisor is None else (divisor,)))


@function_rule(F.avg_pool1d)
def _avg_pool1d(in_shape: torch.Size, like: Tensor, kernel_size: Any, *settings: Any, **named: Any) -> Affine:
    return _avg_pool(F.avg_pool1d, 1, in_shape, like, kernel_size, *settings, **named)


@function_rule(F.avg_pool2d)
def _avg_pool2d(in_shape: torch.Size, like: Tensor, kernel_size: Any, *settings: Any, **named: Any) -> Affine:
    return _avg_pool(F.avg_pool2d, 2, in_shape, like, kernel_size, *settings, **named)


def _avg_pool(
    pool: Callable[..., Tensor],
    dims: int,
    in_shape: torch.Size,
    like: Tensor,
    kernel_size: Any,
    stride: Any = None,
    padding: Any = 0,
    *settings: Any,
    **named: Any,
) -> Affine:
    stride = stride or kernel_size
    geometry = (as_tuple(kernel_size, dims), as_tuple(stride, dims), as_tuple(padding, dims))

    def run(z: Tensor) -> Tensor:
        return pool(z, kernel_size, stride, padding, *settings, **named)

    return Affine(average_pool(run, in_shape, *geometry, like))


@register_layer(nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d)
def _adaptive_module(module: nn.AdaptiveAvgPool2d, in_shape: torch.Size, like: Tensor) -> Affine:
    return _adaptive(in_shape, like, module.output_size)


@function_rule(F.adaptive_avg_pool1d, F.adaptive_avg_pool2d)
def _adaptive(in_shape: torch.Size, like: Tensor, output_size: Any) -> Affine:
    sizes = tuple(in_shape[1:])
    if len(sizes) not in (1, 2):
        raise Refused(f"adaptive pooling takes samples with channels and 1 or 2 more dimensions, got {tuple(in_shape)}")
    wanted = (output_size,) * len(sizes) if isinstance(output_size, int) else tuple(output_size)
    out = tuple(n if w is None else w for n, w in zip(sizes, wanted * len(sizes), strict=False))
    if any(n % w for n, w in zip(sizes, out, strict=True)):
        raise Refused(f"adaptive pooling from {sizes} to {out} has windows of unequal size; choose sizes that divide")
    kernel = tuple(n // w for n, w in zip(sizes, out, strict=True))
    pool = _avg_pool1d if len(sizes) == 1 else _avg_pool2d
    return pool(in_shape, like, kernel)


@function_rule(torch.mean, "mean")
def _mean(in_shape: torch.Size, like: Tensor, dim: Any = None, keepdim: bool = False) -> Affine:
    spatial = len(in_shape) - 1
    dims = sorted(d % (spatial + 2) for d in ([dim] if isinstance(dim, int) else dim or []))
    if spatial not in (1, 2) or dims != list(range(2, spatial + 2)):
        raise Refused("only the mean over all spatial dimensions has a rule, such as x.mean(dim=(2, 3))")
    pooled = _adaptive(in_shape, like, 1).op
    return Affine(pooled if keepdim else compose(Reshape(pooled.out_shape, pooled.out_shape[:1]), pooled))


# Arithmetic ------------------------------------------------------------------------------------------------------------

ADDITIONS = {operator.add, operator.iadd, torch.add, "add", "add_"}
SUBTRACTIONS = {operator.sub, operator.isub, torch.sub, torch.subtract, "sub", "sub_"}
PRODUCTS = {operator.mul, operator.imul, torch.mul, torch.multiply, "mul", "mul_"}
QUOTIENTS = {operator.truediv, operator.itruediv, torch.div, torch.divide, torch.true_divide, "div", "div_"}
NEGATIONS = {operator.neg, torch.neg, torch.negative, "neg"}
