"""What the training bound costs, in forward passes of the same network: time, memory, and how both grow.

    python benchmarks/bound_cost.py [--device cpu|cuda] [--batch 64] [--out results]

The peer is torch's own forward pass of the user's module, in the same process, on the same batch, timed in turns with it
and with a graph recorded for the backward pass in both. Memory is what autograd keeps for the backward pass of the bound,
against the activations of the network: the outputs of all its layers. The floor of the time is the ratio of floating-point
operations, counted by torch on both. On a GPU the bound runs once under `torch.cuda.set_sync_debug_mode("error")`, which
raises at the first host synchronisation inside.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import locallip as ll
import record
from locallip.bounds import WorstLogits, global_bound, propagate, worst_logits
from locallip.models import convolutional_network
from locallip.norms import PowerNorm, WarmStarts

EPS = 36 / 255
POWER_STEPS = 2


class TrainingBound:
    """The worst logits of one training step: global radii for the boxes as in the paper, saved vectors, two power steps."""

    def __init__(self, model: nn.Module, x: Tensor, y: Tensor):
        self.network, self.x, self.y = ll.lower(model, x.shape[1:]), x, y
        self.eps = torch.full((len(x),), EPS, device=x.device)
        self.starts = WarmStarts(len(x), device=x.device)
        self.shared = WarmStarts(1, torch.float32, device=x.device)
        self.index, self.zero = torch.arange(len(x), device=x.device), torch.zeros(1, dtype=torch.long, device=x.device)

    def __call__(self) -> WorstLogits:
        ceiling = global_bound(self.network, PowerNorm(POWER_STEPS, self.shared, self.zero), self.eps)
        rule = PowerNorm(POWER_STEPS, self.starts, self.index)
        trace = propagate(self.network, self.x, self.eps, rule, ceiling=ceiling, box_radii="global")
        return worst_logits(self.network, trace, self.y, steps=4)


@dataclass(frozen=True)
class Cost:
    """One network at one batch size; every ratio is bound over forward pass."""

    name: str
    batch: int
    forward_seconds: float
    bound_seconds: float
    time_ratio: float
    activations_mib: float
    forward_saves_mib: float
    bound_saves_mib: float
    memory_ratio: float
    flop_ratio: float


def measure(name: str, model: nn.Module, shape: tuple[int, ...], batch: int, device: torch.device, repeats: int) -> Cost:
    model = model.to(device)
    x, y = torch.rand(batch, *shape, device=device), torch.randint(0, 10, (batch,), device=device)
    bound = TrainingBound(model, x, y)
    forward, both = (lambda: model(x)), (lambda: bound().worst)
    seconds = interleaved(forward, both, device, repeats)
    mib = activations_mib(model, x), saved_mib(forward), saved_mib(both)
    flops = count_flops(forward), count_flops(both)
    return Cost(name, batch, *seconds, seconds[1] / seconds[0], *mib, mib[2] / mib[0], flops[1] / flops[0])


def interleaved(
    first: Callable[[], Tensor], second: Callable[[], Tensor], device: torch.device, repeats: int
) -> tuple[float, float]:
    """Median seconds of each, timed in turns so that a busy machine slows both alike."""
    times: tuple[list[float], list[float]] = ([], [])
    for round_ in range(repeats + 2):
        for function, list_ in zip((first, second), times, strict=True):
            synchronize(device)
            begin = time.perf_counter()
            result = function()
            synchronize(device)
            if round_ >= 2:
                list_.append(time.perf_counter() - begin)
            del result
    return sorted(times[0])[repeats // 2], sorted(times[1])[repeats // 2]


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def activations_mib(model: nn.Module, x: Tensor) -> float:
    """MiB of the outputs of all layers of the network, views (flatten) left out."""
    sizes: list[int] = []
    handles = [
        layer.register_forward_hook(lambda layer, args, out: sizes.append(out.numel() * out.element_size()))
        for layer in model.modules()
        if not isinstance(layer, (nn.Sequential, nn.Flatten))
    ]
    with torch.no_grad():
        model(x)
    for handle in handles:
        handle.remove()
    return sum(sizes) / 2**20


def saved_mib(function: Callable[[], Tensor]) -> float:
    """MiB that autograd keeps for the backward pass, every storage counted once, parameters left out."""
    kept: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        if not (isinstance(tensor, nn.Parameter) or isinstance(tensor._base, nn.Parameter)):
            kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        result = function()
    del result
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values()) / 2**20


def count_flops(function: Callable[[], Tensor]) -> int:
    with FlopCounterMode(display=False) as counter:
        function()
    return counter.get_total_flops()


def slope(sizes: list[int], seconds: list[float]) -> float:
    """The exponent p of seconds ~ size**p by least squares on logarithms."""
    xs, ys = [math.log(s) for s in sizes], [math.log(t) for t in seconds]
    mean_x, mean_y = sum(xs) / len(xs), sum(ys) / len(ys)
    return sum((a - mean_x) * (b - mean_y) for a, b in zip(xs, ys, strict=True)) / sum((a - mean_x) ** 2 for a in xs)


def deep(depth: int) -> nn.Sequential:
    """`depth` equal convolutions, so that cost per layer is the same."""
    return convolutional_network([(32, 3, 1, 1)] * depth, (), (32, 16, 16), 10)


def growth(device: torch.device, repeats: int) -> dict[str, dict[str, object]]:
    """How the time of the bound grows with batch size and with depth."""
    batches, depths = [16, 32, 64, 128], [4, 8, 16, 32]
    by_batch = [measure("6c2f", ll.build_model("6c2f", (3, 32, 32), 10), (3, 32, 32), b, device, repeats) for b in batches]
    by_depth = [measure(f"{d} convolutions", deep(d), (32, 16, 16), 16, device, repeats) for d in depths]
    return {
        name: {
            "sizes": sizes,
            "bound_seconds": [c.bound_seconds for c in costs],
            "forward_seconds": [c.forward_seconds for c in costs],
            "exponent": slope(sizes, [c.bound_seconds for c in costs]),
        }
        for name, sizes, costs in (("batch", batches, by_batch), ("depth", depths, by_depth))
    }


def check_no_synchronisation(device: torch.device, batch: int) -> str:
    """Run the bound where any host synchronisation raises."""
    if device.type != "cuda":
        return "not a GPU"
    model = ll.build_model("6c2f", (3, 32, 32), 10).to(device)
    x, y = torch.rand(batch, 3, 32, 32, device=device), torch.randint(0, 10, (batch,), device=device)
    bound = TrainingBound(model, x, y)
    bound()
    torch.cuda.synchronize(device)
    torch.cuda.set_sync_debug_mode("error")
    try:
        bound()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return "none"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--out", type=Path, default=record.RESULTS)
    args = parser.parse_args()
    begin, device, seed = time.perf_counter(), torch.device(args.device), 0
    torch.manual_seed(seed)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    costs = [
        measure(
            f"6c2f {activation}",
            ll.build_model("6c2f", (3, 32, 32), 10, activation),
            (3, 32, 32),
            args.batch,
            device,
            args.repeats,
        )
        for activation in ("relu_theta", "relu", "clipped_maxmin")
    ]
    grown = growth(device, max(3, args.repeats // 3))
    synchronisations = check_no_synchronisation(device, args.batch)
    heads = ("network", "forward", "bound", "time", "flops", "activations", "kept", "memory")
    print("{:22} {:>10} {:>10} {:>7} {:>7} {:>12} {:>10} {:>7}".format(*heads))
    for c in costs:
        times = (
            f"{c.forward_seconds * 1e3:7.2f} ms {c.bound_seconds * 1e3:7.2f} ms {c.time_ratio:6.2f}x {c.flop_ratio:6.2f}x"
        )
        print(f"{c.name:22} {times} {c.activations_mib:8.1f} MiB {c.bound_saves_mib:6.1f} MiB {c.memory_ratio:6.2f}x")
    for name, values in grown.items():
        print(f"time grows as {name} ** {values['exponent']:.2f}")
    print(f"host synchronisations inside the bound: {synchronisations}")
    settings = {
        "batch": args.batch,
        "power_steps": POWER_STEPS,
        "eps": "36/255",
        "repeats": args.repeats,
        "box_radii": "global",
    }
    measured = {
        "settings": settings,
        "costs": [asdict(c) for c in costs],
        "growth": grown,
        "synchronisations": synchronisations,
    }
    path = record.write(f"bound_cost-{device.type}", measured, device=device, seed=seed, begin=begin, folder=args.out)
    print(f"written to {path.name}")


if __name__ == "__main__":
    main()
