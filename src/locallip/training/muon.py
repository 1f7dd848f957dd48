"""Muon: momentum whose every singular value is set to about 1 before it is subtracted (Jordan et al. 2024).

It suits training with a Lipschitz bound: the bound charges a layer for its largest singular value alone, so the others may
grow to the same size for free, and steps that move all singular directions alike bring them there.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

#: Coefficients of the quintic whose five-fold iteration moves singular values in (0, 1] to between about 0.7 and 1.2.
QUINTIC = (3.4445, -4.7750, 2.0315)
ITERATIONS = 5


def orthogonalized(matrices: Tensor) -> Tensor:
    """U V^T of every matrix U S V^T, approximately; (K, rows, cols) with rows <= cols, in bfloat16 on a GPU."""
    a, b, c = QUINTIC
    x = matrices.to(torch.bfloat16) if matrices.is_cuda else matrices
    x = x / (x.float().norm(dim=(1, 2), keepdim=True) + 1e-12).to(x.dtype)
    for _ in range(ITERATIONS):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.to(matrices.dtype)


class Muon(torch.optim.Optimizer):
    """Steps of spectral norm about `lr` for weights of two and more dimensions, seen as matrices (outputs, rest).

    Small matrices are padded with zeros to one size and worked on as a batch: padding changes nothing and saves kernels.
    """

    def __init__(self, params: Iterable[Tensor], lr: float | Tensor, momentum: float = 0.95):
        super().__init__(list(params), {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: object = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            ready = [(p, self._direction(p, group["momentum"])) for p in group["params"] if p.grad is not None]
            small = [pair for pair in ready if max(pair[1].shape) <= 2048]
            for pairs in (small, *([pair] for pair in ready if max(pair[1].shape) > 2048)):
                if pairs:
                    self._move(pairs, group["lr"])

    def _direction(self, p: Tensor, momentum: float) -> Tensor:
        """Nesterov's look ahead, as a matrix with no more rows than columns."""
        state = self.state[p]
        if "momentum" not in state:
            state["momentum"] = torch.zeros_like(p)
        assert p.grad is not None
        state["momentum"].lerp_(p.grad, 1 - momentum)
        flat = torch.lerp(p.grad, state["momentum"], momentum).flatten(1)
        return flat.T if flat.shape[0] > flat.shape[1] else flat

    def _move(self, pairs: list[tuple[Tensor, Tensor]], lr: float | Tensor) -> None:
        rows, cols = max(m.shape[0] for _, m in pairs), max(m.shape[1] for _, m in pairs)
        padded = [torch.nn.functional.pad(m, (0, cols - m.shape[1], 0, rows - m.shape[0])) for _, m in pairs]
        for (p, m), step in zip(pairs, orthogonalized(torch.stack(padded)), strict=True):
            step = step[: m.shape[0], : m.shape[1]]
            step = step.T if p.flatten(1).shape != m.shape else step
            p.sub_(lr * step.reshape(p.shape))
