"""The rules of activations: which interval rule belongs to which torch module or function."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from locallip import activations as act
from locallip.network.rules import Refused, Step, as_tuple, function_rule, register_layer


@register_layer(nn.ReLU)
@function_rule(F.relu, F.relu_, torch.relu, torch.relu_, "relu", "relu_")
def _relu(*call: Any, **inplace: Any) -> Step:
    return act.relu()


@register_layer(nn.Hardtanh, nn.ReLU6)
def _hardtanh_module(module: nn.Hardtanh, in_shape: torch.Size, like: Tensor) -> Step:
    return act.clip(module.min_val, module.max_val)


@function_rule(F.hardtanh)
def _hardtanh(in_shape: torch.Size, like: Tensor, min_val: float = -1, max_val: float = 1, inplace: bool = False) -> Step:
    return act.clip(min_val, max_val)


@function_rule(F.relu6)
def _relu6(*call: Any, **inplace: Any) -> Step:
    return act.clip(0.0, 6.0)


@register_layer(act.ReLUTheta)
def _relu_theta(module: act.ReLUTheta, in_shape: torch.Size, like: Tensor) -> Step:
    if torch.broadcast_shapes(module.raw_theta.shape, in_shape) != in_shape:
        raise Refused(f"thresholds of shape {tuple(module.raw_theta.shape)} do not fit {tuple(in_shape)}")
    return act.relu_theta(module)


@register_layer(act.MaxMin, act.ClippedMaxMin)
def _maxmin(module: act.MaxMin | act.ClippedMaxMin, in_shape: torch.Size, like: Tensor) -> Step:
    return act.SortPairs(module)


@register_layer(nn.MaxPool2d)
def _max_pool_module(module: nn.MaxPool2d, in_shape: torch.Size, like: Tensor) -> Step:
    settings = (module.stride, module.padding, module.dilation, module.ceil_mode, module.return_indices)
    return _max_pool(in_shape, like, module.kernel_size, *settings)


@function_rule(F.max_pool2d, torch.max_pool2d)
def _max_pool(
    in_shape: torch.Size,
    like: Tensor,
    kernel_size: Any,
    stride: Any = None,
    padding: Any = 0,
    dilation: Any = 1,
    ceil_mode: bool = False,
    return_indices: bool = False,
) -> Step:
    kernel, steps = as_tuple(kernel_size), as_tuple(stride or kernel_size)
    if return_indices or as_tuple(dilation) != (1, 1):
        raise Refused("max pooling with dilation or returned indices has no rule")
    if any(s < k for s, k in zip(steps, kernel, strict=True)):
        raise Refused(f"windows overlap (kernel {kernel}, stride {steps}), so an input counts twice; use stride >= kernel")
    return act.MaxPool2d(in_shape, kernel, steps, as_tuple(padding), ceil_mode)  # type: ignore[arg-type]


@register_layer(nn.LeakyReLU)
def _leaky_module(module: nn.LeakyReLU, in_shape: torch.Size, like: Tensor) -> Step:
    return _leaky(in_shape, like, module.negative_slope)


@function_rule(F.leaky_relu)
def _leaky(in_shape: torch.Size, like: Tensor, negative_slope: float = 0.01, inplace: bool = False) -> Step:
    return act.LeakyReLU(negative_slope)


@register_layer(nn.ELU)
def _elu_module(module: nn.ELU, in_shape: torch.Size, like: Tensor) -> Step:
    return _elu(in_shape, like, module.alpha)


@function_rule(F.elu)
def _elu(in_shape: torch.Size, like: Tensor, alpha: float = 1.0, inplace: bool = False) -> Step:
    return act.ELU(alpha)


@register_layer(nn.Tanh)
@function_rule(F.tanh, torch.tanh, "tanh")
def _tanh(*call: Any) -> Step:
    return act.Tanh()


@register_layer(nn.Sigmoid)
@function_rule(F.sigmoid, torch.sigmoid, "sigmoid")
def _sigmoid(*call: Any) -> Step:
    return act.Sigmoid()


@register_layer(nn.Softplus)
def _softplus_module(module: nn.Softplus, in_shape: torch.Size, like: Tensor) -> Step:
    return _softplus(in_shape, like, module.beta, module.threshold)


@function_rule(F.softplus)
def _softplus(in_shape: torch.Size, like: Tensor, beta: float = 1.0, threshold: float = 20.0) -> Step:
    return act.Softplus(beta, threshold)
