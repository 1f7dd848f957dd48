"""Checks of what a caller hands over: clear words instead of an error from deep inside torch."""

from __future__ import annotations

import math
import numbers
import re
from collections.abc import Iterable, Mapping, Sequence, Set
from decimal import Decimal
from fractions import Fraction

import torch
from torch import Tensor, nn

from locallip.arithmetic import small_numbers_kept
from locallip.balls import Domain
from locallip.network import Network

#: log10 of the smallest entry of an operator whose squares and products with widths stay clear of underflow in float64;
#: every float32 number is larger, and so is the product of two.
SMALLEST = -120
#: Random starts come from generators of 64 bits, whose every value has a probability of 5e-20.
SMALLEST_FAILURE_PROB = 1e-15

#: Text beyond these is no radius, and as a fraction it would fill the memory: 1e999999999 has a billion digits.
LONGEST_EPS, LARGEST_EXPONENT = 1000, 5000
_EXPONENT = re.compile(r"[eE]([-+]?[\d_]*\d)\s*$")

Eps = float | str | Fraction | Sequence[float] | Tensor


@small_numbers_kept()
def as_eps(eps: Eps, batch: int, device: torch.device) -> Tensor:
    """The radii as float64 (batch,), never below the number meant: "36/255" is rounded up."""
    if getattr(eps, "shape", None) == () and not isinstance(eps, Tensor):  # numpy's array of one number
        eps = eps[()]  # type: ignore[index, call-overload]
    if isinstance(eps, (str, numbers.Real, Decimal)):
        values = [_scalar(eps)] * batch
    elif isinstance(eps, Iterable) and not isinstance(eps, (bytes, bytearray, Set, Mapping)):  # which is whose?
        listed = [_scalar(e) for e in (eps.detach().reshape(-1).tolist() if isinstance(eps, Tensor) else list(eps))]
        values = listed * batch if len(listed) == 1 else listed
        if len(values) != batch:
            raise ValueError(f"eps has {len(values)} values for {batch} samples; give one number or one per sample")
    else:
        raise ValueError(f"eps {eps!r} is neither a number, a fraction such as '36/255', nor one value per sample")
    for value in values:
        if not (math.isfinite(value) and value >= 0):
            raise ValueError(f"eps must be finite and at least 0, got {value}")
    return torch.tensor(values, dtype=torch.float64, device=device)


def _scalar(eps: object) -> float:
    if isinstance(eps, str) and len(eps) > LONGEST_EPS:
        raise ValueError(f"eps {eps[:LONGEST_EPS]!r}... is too long for a number or a fraction such as '36/255'")
    if (
        isinstance(eps, str)
        and (exponent := _EXPONENT.search(eps))
        and abs(int(exponent[1].replace("_", ""))) > LARGEST_EXPONENT
    ):
        raise ValueError(f"eps {eps!r} is beyond what float64 can hold")
    try:
        if isinstance(eps, numbers.Integral):  # numpy's too, which do not know their ratio
            eps = int(eps)
        exact = Fraction(eps) if isinstance(eps, str) else Fraction(*eps.as_integer_ratio())  # type: ignore[attr-defined]
        nearest = float(exact)
    except (ValueError, ZeroDivisionError, TypeError, AttributeError):
        if isinstance(eps, numbers.Real):
            return float(eps)  # NaN, refused by the caller with its value
        raise ValueError(f"eps {eps!r} is neither a number nor a fraction such as '36/255'") from None
    except OverflowError:
        return math.inf
    return nearest if Fraction(nearest) >= exact else math.nextafter(nearest, math.inf)


@small_numbers_kept()
def as_batch(x: object, model: nn.Module, input_domain: Domain) -> Tensor:
    """A copy of the samples in float64 on the model's device; shape is checked when the network is lowered.

    A copy, as every check reads it again, and a caller's buffer may be filled with the next batch meanwhile.
    """
    check_model(model)
    if not isinstance(x, Tensor):
        hint = "; use torch.from_numpy(x)" if type(x).__module__ == "numpy" else ""
        raise TypeError(f"x must be a torch.Tensor, got {type(x).__name__}{hint}")
    if not x.is_floating_point():
        hint = "; for pixels use x.float() / 255" if x.dtype == torch.uint8 else ""
        raise TypeError(f"x must hold floating-point numbers in the model's input space, got {x.dtype}{hint}")
    if x.layout != torch.strided:
        raise TypeError(f"x must be a dense tensor, got {x.layout}; use x.to_dense()")
    if x.dim() < 2:
        raise ValueError(f"x must be a batch (B, ...), got shape {tuple(x.shape)}; use x[None] for one sample")
    device = next((p.device for p in model.parameters()), x.device)
    if device != x.device:
        raise ValueError(f"x is on {x.device}, the model on {device}; move one of them")
    x = (x if x.is_inference() else x.detach()).clone().double()
    domain = as_domain(input_domain)
    if domain is not None:
        low, high = _ends(domain, x)
        if bool(((x < low) | (x > high)).any()):
            where = "the box input_domain" if isinstance(domain[0], Tensor) else f"input_domain {input_domain}"
            raise ValueError(f"x leaves {where}: its values span {x.min():.4g} to {x.max():.4g}")
    return x


def _ends(domain: tuple[float, float] | tuple[Tensor, Tensor], x: Tensor) -> tuple[Tensor, Tensor]:
    low, high = (torch.as_tensor(end, dtype=x.dtype, device=x.device) for end in domain)
    if low.shape not in (torch.Size(), x.shape[1:]):
        raise ValueError(f"input_domain has ends of shape {tuple(low.shape)} for samples of shape {tuple(x.shape[1:])}")
    return low, high


def as_domain(domain: Domain) -> Domain:
    """Two numbers of float64, exactly those that were given: a fraction would be rounded into the domain or out of it.

    Or two tensors, the ends of every value of a sample, which may coincide.
    """
    if domain is None:
        return None
    if isinstance(domain, tuple) and len(domain) == 2 and all(isinstance(end, Tensor) and end.dim() for end in domain):
        return _as_box(*domain)
    try:
        low, high = (float(end) for end in domain)
        exact = all(bool(float(end) == end) or bool(end != end) for end in domain)
    except (TypeError, ValueError, OverflowError, RuntimeError):
        exact = False
    if not exact:
        raise ValueError(f"input_domain must be two numbers (low, high) that float64 can hold, got {domain!r}")
    if not low < high:
        raise ValueError(f"input_domain must be (low, high) with low < high, got {domain}")
    return low, high


def _as_box(low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
    """The ends of a box, copied."""
    if low.shape != high.shape or not (low.is_floating_point() and high.is_floating_point()):
        shapes = f"{low.dtype} of shape {tuple(low.shape)} and {high.dtype} of shape {tuple(high.shape)}"
        raise ValueError(f"the ends of input_domain must be floating-point tensors of one shape, got {shapes}")
    if not bool((low <= high).all()):  # a NaN is in no order
        raise ValueError("input_domain must have low <= high everywhere, and no NaN")
    return low.detach().clone().double(), high.detach().clone().double()


def as_labels(y: Tensor | Sequence[int], batch: int, classes: int, device: torch.device) -> Tensor:
    try:
        y = torch.as_tensor(y, device=y.device if isinstance(y, Tensor) else device)
    except (TypeError, ValueError, RuntimeError):
        raise ValueError(f"y must be {batch} integer labels, got {type(y).__name__}") from None
    if y.is_floating_point() or y.is_complex() or y.dtype == torch.bool or y.shape != (batch,):
        hint = "; use y.squeeze(1)" if y.shape == (batch, 1) else ""
        raise ValueError(f"y must be {batch} integer labels, got {y.dtype} of shape {tuple(y.shape)}{hint}")
    y = y.to(torch.long, copy=True)  # torch finds no minimum of some unsigned numbers
    if batch and (int(y.min()) < 0 or int(y.max()) >= classes):
        raise ValueError(f"labels must lie in 0..{classes - 1}, got {int(y.min())}..{int(y.max())}")
    return y.to(device)


def as_deployed(dtype: object) -> torch.dtype | None:
    """The arithmetic of the program that runs the network, torch.float32 or "float32"; None for real arithmetic."""
    if dtype is None or dtype in (torch.float32, "float32"):
        return None if dtype is None else torch.float32
    raise ValueError(
        f"deployed_dtype must be torch.float32, 'float32' or None, got {dtype!r}: rounding is known of no other"
    )


def as_method(method: object) -> str:
    if method not in ("auto", "thorough", "local", "lines"):
        raise ValueError(f"method must be 'auto', 'thorough', 'local' or 'lines', got {method!r}")
    return str(method)


def as_lipschitz_method(method: object) -> str:
    if method not in ("auto", "product", "jacobian"):
        raise ValueError(f"method must be 'auto', 'product' or 'jacobian', got {method!r}")
    return str(method)


def as_seconds(seconds: object, method: str) -> float:
    """The time of branch and bound per input."""
    if isinstance(seconds, bool) or not isinstance(seconds, numbers.Real) or not 0 <= float(seconds) < math.inf:
        raise ValueError(f"branch_seconds must be a number of at least 0, got {seconds!r}")
    if seconds and method == "local":
        raise ValueError("branch_seconds: branch and bound is left out by method='local'; use 'auto', 'thorough' or 'lines'")
    return float(seconds)


def check_model(model: object) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    if torch.get_default_device().type == "meta":
        raise RuntimeError(
            "new tensors have no values (torch.set_default_device or torch.device 'meta'): certify outside of it"
        )


def check_shape(shape: object) -> None:
    if isinstance(shape, Tensor) or not isinstance(shape, Sequence) or not all(isinstance(n, int) and n > 0 for n in shape):
        what = f"a tensor of shape {tuple(shape.shape)}" if isinstance(shape, Tensor) else repr(shape)
        raise ValueError(f"input_shape must be the shape of one sample, such as (3, 32, 32), without batch; got {what}")


def check_numbers(failure_prob: object, power_steps: object, seed: object) -> None:
    if not isinstance(failure_prob, numbers.Real) or not 0 < float(failure_prob) < 1:
        raise ValueError(f"failure_prob must be a number between 0 and 1, got {failure_prob!r}")
    if float(failure_prob) < SMALLEST_FAILURE_PROB:
        raise ValueError(
            f"failure_prob must be at least {SMALLEST_FAILURE_PROB:g}, got {failure_prob!r}: random starts come from 64 "
            "bits; use guarantee='deterministic' for less"
        )
    if not isinstance(power_steps, int) or power_steps < 1:
        raise ValueError(f"power_steps must be a whole number of at least 1, got {power_steps!r}")
    if seed is not None and not (isinstance(seed, int) and -(2**63) <= seed < 2**64):
        raise ValueError(f"seed must be a whole number of 64 bits or None, got {seed!r}")


def check_batch_size(batch_size: int) -> None:
    if batch_size < 1:
        raise ValueError(f"batch_size must be at least 1, got {batch_size}")


def check_scale(network: Network) -> None:
    """Refuse operators whose entries come near underflow in float64, where a bound could vanish with them."""
    for stage in network.stages:
        for op in (*stage.terms.values(), *(op for op, _ in stage.offset.parts)):
            if op.smallest() < SMALLEST:
                raise ValueError(
                    f"the weights before '{stage.name}' multiply to about 1e{op.smallest():.0f}: rounding is not accounted "
                    f"for below 1e{SMALLEST:.0f}. Rescale the layer or set such values to 0."
                )
