"""Local Lipschitz bounds of one network after the other on the same balls: how large, and how long they take.

    python benchmarks/lipschitz_bounds.py             random MLPs, our bounds
    python benchmarks/lipschitz_bounds.py --lipsdp    and LipSDP, which needs cvxpy
    python benchmarks/lipschitz_bounds.py --networks ../shared/networks --data-root data --names cap_mnist,mnist-4c3f-local-b

Networks are those of bounds.py. All bounds by slopes rest on boxes that hold every unit on the ball; `boxes` says which, and
their seconds do not count again. LipSDP has the slopes of the sharpened ones, in small MLPs alone, and the accuracy of its
solver is not counted. Exact values come from enumeration.py, for tiny MLPs alone. What Jacobians come to at random points of
the ball is a bound from below.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks import record
from benchmarks.bounds import RANDOM, brought
from benchmarks.enumeration import TooMany, exact_lipschitz, weights_of
from benchmarks.lipsdp import TooLarge, lipsdp

import locallip as ll
from locallip.arithmetic import exact_arithmetic
from locallip.bounds import Trace, jacobian_bounds, multiplier_bounds, propagate
from locallip.bounds.jacobian import JacobianWay, known
from locallip.bounds.slopes import UnitSlopes
from locallip.certify.prover import Prover

#: The radii that are looked at.
EPS = {
    "random-tiny": ("0.3", "1"),
    "random": ("0.1", "0.5"),
    "random-deep": ("0.1", "0.5"),
    "lirpa_mnist_fc_3layer": ("0.1", "0.3"),
    "lirpa_cifar_2c2f": ("36/255",),
    "cap_mnist": ("0.1", "0.25"),
    "mnist-4c3f-local-b": ("0.3", "1.58"),
    "mnist-4c3f-local-g": ("0.3", "1.58"),
}
OTHERS = ("36/255",)
#: Points of the ball, where Jacobians are computed at one time and in all.
TOGETHER, POINTS = 32, 128


#: Name, boxes, and what computes a bound for every x.
Bound = tuple[str, str, Callable[[], list[float]]]


def values(model: nn.Module, x: Tensor, eps: float, with_lipsdp: bool) -> Iterator[Bound]:
    """Name, boxes, and how to compute it for every x, one bound after the other."""
    prover = Prover(model, x.shape[1:], "high_probability", seed=0)
    x, radii, network = x.double(), torch.full((len(x),), eps, dtype=torch.float64), prover.network
    kept: dict[str, Trace] = {}

    def product(boxes: str) -> list[float]:
        if boxes == "the paper's":
            with exact_arithmetic():
                options = {"ceiling": prover.ceiling, "box_radii": "global", "outward": True}
                return propagate(network, x, radii, prover.rule, **options).lipschitz.tolist()
        kept[boxes] = prover.trace(x, radii, relax="boxes" if boxes == "sharpened" else None)
        return kept[boxes].lipschitz.tolist()

    def slopes(boxes: str, *ways: JacobianWay) -> list[float]:
        with exact_arithmetic():
            return jacobian_bounds(network, kept[boxes], ways).tolist()

    def multipliers(boxes: str) -> list[float]:
        with exact_arithmetic():
            return torch.minimum(multiplier_bounds(network, kept[boxes]), kept[boxes].lipschitz).tolist()

    yield "product, all inputs", "", lambda: [float(prover.ceiling.total)] * len(x)
    yield "product", "the paper's", lambda: product("the paper's")
    for boxes in ("sequential", "sharpened"):
        yield "product", boxes, lambda boxes=boxes: product(boxes)
        yield "absolute values", boxes, lambda boxes=boxes: slopes(boxes, "absolute")
        yield "intervals", boxes, lambda boxes=boxes: slopes(boxes, "intervals")
        yield "middles", boxes, lambda boxes=boxes: slopes(boxes, "middle")
    yield "multipliers", "sharpened", lambda: multipliers("sharpened")
    yield "auto", "sharpened", lambda: ll.local_lipschitz(model, x, eps, seed=0).tolist()
    if isinstance(model, nn.Sequential) and with_lipsdp:
        yield "LipSDP", "sharpened", lambda: [semidefinite(model, prover, kept["sharpened"], i) for i in range(len(x))]
    if isinstance(model, nn.Sequential) and x[0].numel() <= 10:
        yield "exact, by enumeration", "", lambda: [exact_lipschitz(model, point, eps).lipschitz for point in x]
    yield "sampling, from below", "", lambda: [sampled(network, point, eps) for point in x]


def semidefinite(model: nn.Sequential, prover: Prover, trace: Trace, i: int) -> float:
    """LipSDP of sample i, with the slopes that a trace leaves to its units."""
    weights = [weight for weight, _ in weights_of(model)]
    steps = [found for _, found in sorted(known(prover.network, trace, slice(i, i + 1)).slopes.items())]
    units = [step for found in steps for step in found or () if isinstance(step, UnitSlopes)]
    return lipsdp(weights, [u.low.flatten().numpy() for u in units], [u.high.flatten().numpy() for u in units])


def sampled(network: Callable[[Tensor], Tensor], x: Tensor, eps: float) -> float:
    """The largest norm of a Jacobian at x and at random points of the ball, half of them on its surface."""
    generator, largest = torch.Generator().manual_seed(0), 0.0
    for _ in range(POINTS // TOGETHER):
        move = torch.randn(TOGETHER, *x.shape, generator=generator, dtype=x.dtype)
        length = eps * torch.rand(TOGETHER, generator=generator, dtype=x.dtype).mul(2).clamp(max=1)
        points = x + move * (length / move.flatten(1).norm(dim=1)).reshape(-1, *[1] * x.dim())
        points[0] = x
        with torch.enable_grad():
            outputs = network(points.requires_grad_())
            rows = [torch.autograd.grad(column.sum(), points, retain_graph=True)[0].flatten(1) for column in outputs.T]
        largest = max(largest, float(torch.linalg.matrix_norm(torch.stack(rows, dim=1), ord=2).max()))
    return largest


def rows_of(name: str, model: nn.Module, x: Tensor, with_lipsdp: bool) -> Iterator[dict[str, Any]]:
    """A row per radius and bound: the mean over the images, and the seconds for all of them."""
    for eps in EPS.get(name, OTHERS):
        for bound, boxes, compute in values(model, x, float(Fraction(eps)), with_lipsdp):
            begin = time.perf_counter()
            try:
                found = compute()
            except (TooLarge, TooMany, ValueError) as reason:
                print(f"{name}: {bound}: {reason}", flush=True)
                continue
            mean, seconds = sum(found) / len(found), time.perf_counter() - begin
            row = {"network": name, "images": len(x), "eps": eps, "bound": bound, "boxes": boxes}
            yield {**row, "mean": float(f"{mean:.5g}"), "seconds": round(seconds, 2)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--networks", type=Path, default=Path("."), help="folder of the weights")
    parser.add_argument("--data-root", type=Path)
    parser.add_argument("--names", default=",".join(RANDOM))
    parser.add_argument("--images", type=int, default=10)
    parser.add_argument("--lipsdp", action="store_true", help="LipSDP too; it needs cvxpy")
    parser.add_argument("--name", default="lipschitz_bounds-cpu")
    args = parser.parse_args()
    begin, rows = time.perf_counter(), []
    for name in args.names.split(","):
        model, x, _ = brought(args.networks, args.data_root, name, args.images)
        for row in rows_of(name, model, x, args.lipsdp):
            rows.append(row)
            print(row, flush=True)
        settings = {"images": args.images, "threads": torch.get_num_threads(), "rows": rows}
        print(record.write(args.name, settings, device=torch.device("cpu"), seed=0, begin=begin), flush=True)


if __name__ == "__main__":
    main()
