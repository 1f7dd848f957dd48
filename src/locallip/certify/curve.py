"""Certified accuracy at any eps, from radii that were found once."""

from __future__ import annotations

import torch
from torch import Tensor

from locallip.certify.inputs import Eps, as_eps


def certified_accuracy(radii: Tensor, eps: Eps) -> Tensor:
    """The share of inputs that are certified at each eps, float64 of the shape of `eps`, for radii (N,).

    A proof for a ball is one for every smaller ball, so one pass over the radii gives the whole curve. A radius of 0 is that
    of an input without any proof, and counts at no eps, not even at 0.
    """
    radii = torch.as_tensor(radii, dtype=torch.float64, device="cpu").reshape(-1)
    if not bool((torch.isfinite(radii) & (radii >= 0)).all()):
        raise ValueError("radii must be finite and at least 0: they are those of certified_radius")
    many = not isinstance(eps, str) and hasattr(eps, "__len__") and getattr(eps, "shape", None) != ()
    at = as_eps(eps, len(eps) if many else 1, radii.device)  # type: ignore[arg-type]
    proved = radii[radii > 0].sort().values
    count = len(proved) - torch.searchsorted(proved, at)  # those of at least eps
    share = count.double() / max(len(radii), 1)
    return share if many else share[0]
