"""What one certificate's bounds cost in float64, in forward passes of the same network, with random weights and images.

    python benchmarks/certify_cost.py [--device cpu|cuda] [--batch 64] [--out results]

The peer is the lowered network's own float64 forward pass in the same process. Measured are the bound from unmasked norms,
the high-probability local bound, and per convolution the map, its adjoint, and torch's transposed convolution, which is what
the adjoint would be without the turned kernel. Random weights have no gap at the top of the spectrum: the most steps.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import torch
import torch.nn.functional as F

import locallip as ll
import record
from bound_cost import interleaved, synchronize
from locallip.certify.prover import Prover
from locallip.ops import Conv


def convolutions(network: ll.Network, batch: int, device: torch.device) -> list[dict[str, object]]:
    """Milliseconds of each convolution in float64: apply, adjoint, transposed convolution."""
    rows = []
    for stage in network.stages:
        op = next(iter(stage.terms.values()))
        if isinstance(op, Conv):
            v = torch.randn(batch, *op.in_shape, dtype=torch.float64, device=device)
            w, weight, padding = op.apply(v), op.weight().double(), (op.weight().shape[-1] - 1) // 2
            geometry = {"stride": op.stride, "padding": padding}
            peer = lambda w=w, k=weight, g=geometry: F.conv_transpose2d(w, k, **g)  # noqa: E731
            transposed, _ = interleaved(peer, lambda v=v: v, device, 5)
            apply, adjoint = interleaved(lambda op=op, v=v: op.apply(v), lambda op=op, w=w: op.adjoint(w), device, 5)
            times = {"apply_ms": apply * 1e3, "adjoint_ms": adjoint * 1e3, "transposed_ms": transposed * 1e3}
            rows.append({"layer": stage.layers[next(iter(stage.terms))], "stride": op.stride[0], **times})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--out", type=Path, default=record.RESULTS)
    args = parser.parse_args()
    begin, device, seed = time.perf_counter(), torch.device(args.device), 0
    torch.manual_seed(seed)
    model = ll.build_model("6c2f", (3, 32, 32), 10).to(device)
    x = torch.rand(args.batch, 3, 32, 32, device=device).double()
    eps = torch.full((args.batch,), 36 / 255, dtype=torch.float64, device=device)
    prover = Prover(model, (3, 32, 32), "high_probability", seed=seed)
    network = prover.network
    with torch.no_grad():
        forward, unmasked = interleaved(lambda: network(x), lambda: prover.trace(x, eps, local="none").lipschitz, device, 5)
        prover.trace(x, eps)  # warm
        synchronize(device)
        start = time.perf_counter()
        prover.trace(x, eps)
        synchronize(device)
        local = time.perf_counter() - start
        layers = convolutions(network, args.batch, device)
    seconds = {"forward": forward, "unmasked": unmasked, "local": local}
    ratios = {"unmasked": unmasked / forward, "local": local / forward}
    for name, value in seconds.items():
        print(f"{name:10} {value * 1e3:10.2f} ms  {value / forward:8.1f} forward passes")
    for row in layers:
        print("  {layer:>3} stride {stride}: {apply_ms:8.3f} {adjoint_ms:8.3f} {transposed_ms:8.3f} ms".format(**row))
    settings = {"network": "6c2f relu_theta, random weights", "batch": args.batch, "eps": "36/255", "failure_prob": 1e-9}
    measured = {"settings": settings, "seconds": seconds, "ratios": ratios, "convolutions": layers}
    path = record.write(f"certify_cost-{device.type}", measured, device=device, seed=seed, begin=begin, folder=args.out)
    print(f"written to {path.name}")


if __name__ == "__main__":
    main()
