"""Checks of what a caller hands over: clear words instead of an error from deep inside torch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction

import torch
from torch import Tensor, nn

#: Parameters of this size, every float32 number among them, keep squares and products of a few far from underflow and
#: overflow in float64.
SMALLEST, LARGEST = 1e-46, 1e46

Eps = float | str | Fraction | Sequence[float] | Tensor


def as_eps(eps: Eps, batch: int, device: torch.device) -> Tensor:
    """The radii as float64 (batch,), never below the number meant: "36/255" is rounded up."""
    if isinstance(eps, (str, int, float, Fraction)):
        values = [_scalar(eps)] * batch
    else:
        listed = eps.detach().double().cpu().reshape(-1).tolist() if isinstance(eps, Tensor) else [_scalar(e) for e in eps]
        values = listed * batch if len(listed) == 1 else listed
        if len(values) != batch:
            raise ValueError(f"eps has {len(values)} values for {batch} samples; give one number or one per sample")
    for value in values:
        if not (math.isfinite(value) and value >= 0):
            raise ValueError(f"eps must be finite and at least 0, got {value}")
    return torch.tensor(values, dtype=torch.float64, device=device)


def _scalar(eps: float | str | Fraction) -> float:
    if isinstance(eps, float):
        return eps
    try:
        exact = Fraction(eps)
    except (ValueError, ZeroDivisionError, TypeError):
        raise ValueError(f"eps {eps!r} is neither a number nor a fraction such as '36/255'") from None
    nearest = float(exact)
    return nearest if Fraction(nearest) >= exact else math.nextafter(nearest, math.inf)


def as_batch(x: object, model: nn.Module, input_domain: tuple[float, float] | None) -> Tensor:
    """The samples in float64 on the model's device; shape is checked when the network is lowered."""
    if not isinstance(x, Tensor):
        raise TypeError(f"x must be a torch.Tensor, got {type(x).__name__}")
    if not x.is_floating_point():
        raise TypeError(f"x must hold floating-point numbers in the model's input space, got {x.dtype}")
    if x.dim() < 2:
        raise ValueError(f"x must be a batch (B, ...), got shape {tuple(x.shape)}; use x[None] for one sample")
    device = next((p.device for p in model.parameters()), x.device)
    if device != x.device:
        raise ValueError(f"x is on {x.device}, the model on {device}; move one of them")
    if input_domain is not None:
        low, high = input_domain
        if not low < high:
            raise ValueError(f"input_domain must be (low, high) with low < high, got {input_domain}")
        if bool(((x < low) | (x > high)).any()):
            raise ValueError(f"x leaves input_domain {input_domain}: its values span {x.min():.4g} to {x.max():.4g}")
    return x.detach().double()


def as_labels(y: Tensor | Sequence[int], batch: int, classes: int, device: torch.device) -> Tensor:
    if not isinstance(y, Tensor):
        y = torch.as_tensor(y)
    if y.is_floating_point() or y.is_complex() or y.dtype == torch.bool or y.shape != (batch,):
        raise ValueError(f"y must be {batch} integer labels, got {y.dtype} of shape {tuple(y.shape)}")
    if batch and (int(y.min()) < 0 or int(y.max()) >= classes):
        raise ValueError(f"labels must lie in 0..{classes - 1}, got {int(y.min())}..{int(y.max())}")
    return y.to(device=device, dtype=torch.long)


def check_scale(model: nn.Module) -> None:
    """Refuse parameters whose squares could vanish or overflow in float64 and take a bound with them."""
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if not tensor.is_floating_point() or not tensor.numel():
            continue
        size = tensor.detach().double().abs()
        if bool(((size > 0) & (size < SMALLEST)).any()) or bool((size > LARGEST).any()):
            raise ValueError(
                f"'{name}' has values beyond {SMALLEST:g} .. {LARGEST:g} in absolute value; rounding is not accounted for "
                "there. Rescale the layer or set such values to 0."
            )
