"""Algorithm 1 of the paper with the BCP loss, written down in eager PyTorch as it is printed: the peer of our training step.

It shares nothing with locallip but the activation of the networks. As in the paper, gradients run through all power
iterations, boxes are cut with the global radii, and one vector per sample and layer is kept in 16 bits. Nothing is slowed
down on purpose: a 0/1 mask stands once where the printed formula has it twice, and no loop runs over samples.

It is for ReLU-theta networks as `locallip.models.build_model` makes them, of Conv2d, Linear, ReLUTheta and Flatten in a row.
The sparsity loss is left out. It is no certificate: power iteration approaches a norm from below.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from locallip.activations import ReLUTheta

LEARNING_RATE = 1e-3


@dataclass
class Bounds:
    """Boxes and indicator matrices; lists hold one entry per linear layer, the last layer has no box.

    `lower` and `upper` bound what goes into the activations; `cols` and `rows` are I^{l-1} and I^l, None for the identity;
    `last` is center, lower and upper end of what goes into the last layer.
    """

    lower: list[Tensor]
    upper: list[Tensor]
    cols: list[Tensor | None]
    rows: list[Tensor | None]
    last: tuple[Tensor, Tensor, Tensor]
    logits: Tensor


@dataclass
class Worst:
    """What one pass of Algorithm 1 computes before the loss."""

    global_norms: list[Tensor]  # one number per layer
    local_norms: list[Tensor]  # (B,) per layer
    bounds: Bounds
    logits: Tensor  # (B, C)
    worst: Tensor  # (B, C)


class Vectors:
    """The vectors u^l that power iteration goes on from: one per layer for the whole weight, one per sample and layer."""

    def __init__(self, model: nn.Sequential, x: Tensor, num_samples: int):
        shapes = []
        with torch.no_grad():
            z = x[:1]
            for module in model:
                if isinstance(module, (nn.Conv2d, nn.Linear)):
                    shapes.append(z.shape[1:])
                z = module(z)
        self.shared = [torch.randn(1, *shape, dtype=x.dtype, device=x.device) for shape in shapes]
        self.saved = [torch.randn(num_samples, *shape, dtype=torch.float16, device=x.device) for shape in shapes]


def linear_layers(model: nn.Sequential) -> list[nn.Module]:
    return [module for module in model if isinstance(module, (nn.Conv2d, nn.Linear))]


def apply(layer: nn.Module, weight: Tensor, v: Tensor) -> Tensor:
    """W v for the layer's geometry and any weight of its shape."""
    if isinstance(layer, nn.Conv2d):
        return F.conv2d(v, weight, None, layer.stride, layer.padding)
    return F.linear(v, weight)


def transposed(layer: nn.Module, v: Tensor, shape: torch.Size) -> Tensor:
    """W^T v; `shape` is the shape of the result, which a strided convolution alone does not tell."""
    if not isinstance(layer, nn.Conv2d):
        return F.linear(v, layer.weight.T)
    sizes = zip(shape[-2:], layer.padding, layer.kernel_size, layer.stride, strict=True)
    left_over = [(n + 2 * p - k) % s for n, p, k, s in sizes]
    return F.conv_transpose2d(v, layer.weight, None, layer.stride, layer.padding, left_over)


def masked(mask: Tensor | None, v: Tensor) -> Tensor:
    return v if mask is None else mask * v


def unit(v: Tensor) -> Tensor:
    return F.normalize(v.flatten(1)).view_as(v)


def power_method(layer: nn.Module, u: Tensor, rows: Tensor | None, cols: Tensor | None, steps: int) -> tuple[Tensor, Tensor]:
    """sigma = v^T I^l W I^{l-1} u, (B,), and the last u, after `steps` iterations from u (B, *shape)."""
    u = masked(cols, u)
    for _ in range(steps):
        v = unit(masked(rows, apply(layer, layer.weight, u)))
        u = unit(masked(cols, transposed(layer, v, u.shape)))
    return (v * apply(layer, layer.weight, u)).flatten(1).sum(1), u


def global_norms(model: nn.Sequential, vectors: Vectors, steps: int) -> list[Tensor]:
    """||W^l|| of every layer, (1,) each."""
    norms = []
    for number, layer in enumerate(linear_layers(model)):
        sigma, u = power_method(layer, vectors.shared[number], None, None, steps)
        vectors.shared[number] = u.detach()
        norms.append(sigma)
    return norms


def local_norms(model: nn.Sequential, vectors: Vectors, bounds: Bounds, index: Tensor, steps: int) -> list[Tensor]:
    """||I^l W^l I^{l-1}|| of every layer for the samples `index`, (B,) each."""
    norms = []
    for number, layer in enumerate(linear_layers(model)):
        u = vectors.saved[number][index].to(layer.weight.dtype)
        sigma, u = power_method(layer, u, bounds.rows[number], bounds.cols[number], steps)
        vectors.saved[number][index] = u.detach().half()
        norms.append(sigma)
    return norms


def linear_box(layer: nn.Module, z: Tensor, lower: Tensor, upper: Tensor, radius: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Center and box behind a linear layer: the interval image cut with center +- ||W_i|| * radius."""
    middle, half = (upper + lower) / 2, (upper - lower) / 2
    center = layer(z)
    middle, half = layer(middle), apply(layer, layer.weight.abs(), half)
    # A row of a convolution is its filter, less what lies in the padding.
    reach = apply(layer, layer.weight.square(), torch.ones_like(z[:1])).sqrt() * radius
    return center, torch.maximum(middle - half, center - reach), torch.minimum(middle + half, center + reach)


def outer_bounds(model: nn.Sequential, x: Tensor, eps: float | Tensor, norms: list[Tensor]) -> Bounds:
    """Boxes for all ||x' - x|| <= eps and the units that vary in them (eq:indicator_relux)."""
    z, lower, upper, radius = x, x - eps, x + eps, torch.as_tensor(eps, dtype=x.dtype, device=x.device)
    lowers, uppers, cols, rows = [], [], [], []
    varying = None
    for module in model[:-1]:
        if isinstance(module, nn.Flatten):
            z, lower, upper, varying = z.flatten(1), lower.flatten(1), upper.flatten(1), varying.flatten(1)
        elif isinstance(module, ReLUTheta):
            varying = ((upper > 0) & (lower < module.theta)).to(x.dtype)
            rows.append(varying)
            z, lower, upper = module(z), module(lower), module(upper)
        else:
            cols.append(varying)
            z, lower, upper = linear_box(module, z, lower, upper, radius)
            lowers.append(lower)
            uppers.append(upper)
            radius = radius * norms[len(cols) - 1]
    return Bounds(lowers, uppers, [*cols, varying], [*rows, None], (z, lower, upper), model[-1](z))


def largest_rise(direction: Tensor, lower: Tensor, upper: Tensor, radius: Tensor, steps: int) -> Tensor:
    """max d.t over lower <= t <= upper, ||t|| <= radius; d (B, C, h), ends (B, 1, h), radius (B, 1, 1).

    Along d as far as the ball allows; entries that leave the box are clipped, and the others take up the length they leave.
    """
    corner = torch.where(direction > 0, upper, lower)
    clipped = torch.zeros_like(direction, dtype=torch.bool)
    for _ in range(steps):
        free = direction.masked_fill(clipped, 0)
        used = corner.masked_fill(~clipped, 0).square().sum(-1, keepdim=True)
        left = (radius.square() - used).clamp(min=1e-12).sqrt()
        t = torch.where(clipped, corner, free * left / free.norm(dim=-1, keepdim=True).clamp(min=1e-12))
        clipped = clipped | (t > upper) | (t < lower)
    return (direction * torch.minimum(torch.maximum(t, lower), upper)).sum(-1)


def worst_logits(model: nn.Sequential, bounds: Bounds, radius: Tensor, y: Tensor, steps: int) -> Tensor:
    """F_y - min (z_y - z_i) over the box and the ball of radius (B,) before the last layer, (B, C) (eqn:bcpworst)."""
    center, lower, upper = bounds.last
    weight = model[-1].weight
    direction = weight[None] - weight[y][:, None]
    rise = largest_rise(direction, (lower - center)[:, None], (upper - center)[:, None], radius[:, None, None], steps)
    return bounds.logits + rise


def compute(
    model: nn.Sequential,
    vectors: Vectors,
    x: Tensor,
    y: Tensor,
    index: Tensor,
    eps: float | Tensor,
    power_steps: int,
    clip_steps: int = 4,
) -> Worst:
    """Boxes, indicator matrices, norms and worst logits of the samples x (B, *shape) with numbers `index` (B,)."""
    whole = global_norms(model, vectors, power_steps)
    bounds = outer_bounds(model, x, eps, whole)
    local = local_norms(model, vectors, bounds, index, power_steps)
    radius = eps * torch.stack(local[:-1]).prod(0)
    return Worst(whole, local, bounds, bounds.logits, worst_logits(model, bounds, radius, y, clip_steps))


def make_step(
    model: nn.Sequential, num_samples: int, batch: int, power_steps: int, device: torch.device | str
) -> Callable[[Tensor, Tensor, Tensor, float, float], Tensor]:
    """A training step(x, y, index, eps, mix) -> loss with Adam, for batches of `batch` out of `num_samples` samples.

    x (B, C, H, W), labels y (B,), `index` (B,) says which samples they are; `mix` is lambda of eqn:bcploss.
    """
    model.to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=LEARNING_RATE)
    vectors: Vectors | None = None  # made by the first step, which knows the shape of a sample

    def step(x: Tensor, y: Tensor, index: Tensor, eps: float, mix: float) -> Tensor:
        nonlocal vectors
        if len(x) != batch:
            raise ValueError(f"this step was made for batches of {batch}, got {len(x)}")
        vectors = vectors or Vectors(model, x, num_samples)
        found = compute(model, vectors, x, y, index, eps, power_steps)
        loss = (1 - mix) * F.cross_entropy(found.logits, y) + mix * F.cross_entropy(found.worst, y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step
