"""Certified radii, and images certified at one radius, by one bound after the other, beside auto_LiRPA's.

    python benchmarks/bounds.py --networks ../shared/networks --data-root data             radii of 20 images by our methods
    python benchmarks/bounds.py --networks ../shared/networks --data-root data --peers crown,alpha
    python benchmarks/bounds.py --networks ../shared/networks --data-root data --names cifar10-6c2f-local-b --images 10
    python benchmarks/bounds.py --networks ../shared/networks --data-root data --peers crown --norm inf --name bounds-inf

Networks that others trained are read from a folder; those of `locallip models` and the random ones (RANDOM) need none.

The peer is auto_LiRPA (https://github.com/Verified-Intelligence/auto_LiRPA), if it is installed: CROWN, and alpha-CROWN
with 20 iterations. It takes one radius for all images, so its median radius is found by bisection, in PROBES calls; ours are
radii of single images. `above` is what no bound can exceed: where projected gradient descent breaks half of the images.
At one radius branch and bound has BRANCH_SECONDS for an image. Certificates of ours count their rounding, those of the
peer are computed in float32 as they are. For the tiny random MLP the exact radius is known: by enumeration of all activation
patterns in l2 (enumeration.py), by mixed-integer programs in l-infinity (mip.py).
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks import record
from benchmarks.enumeration import exact_radius
from benchmarks.mip import exact_radius_inf

import locallip as ll
from locallip.attacks import pgd_l2
from locallip.balls import NORMS, as_ball
from locallip.certify.prover import Prover
from locallip.data import load_images
from locallip.zoo import load_model

#: Layers of the networks by the name of their file, and the images that they are for.
NETWORKS: dict[str, tuple[str, Callable[[], list[nn.Module]]]] = {
    "lirpa_mnist_fc_3layer": (
        "mnist",
        lambda: [nn.Flatten(), nn.Linear(784, 128), nn.ReLU(), nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 10)],
    ),
    "lirpa_cifar_2c2f": (
        "cifar10",
        lambda: [
            *(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3), nn.ReLU(), nn.Flatten()),
            *(nn.Linear(3136, 32), nn.ReLU(), nn.Linear(32, 10)),
        ],
    ),
    "cap_mnist": (
        "mnist",
        lambda: [
            *(nn.Conv2d(1, 16, 4, 2, 1), nn.ReLU(), nn.Conv2d(16, 32, 4, 2, 1), nn.ReLU(), nn.Flatten()),
            *(nn.Linear(1568, 100), nn.ReLU(), nn.Linear(100, 10)),
        ],
    ),
}
#: The radius at which images are counted, by norm and network.
EPS = {
    "2": {
        "lirpa_cifar_2c2f": "36/255",
        "lirpa_mnist_fc_3layer": "0.3",
        "cap_mnist": "0.25",
        "random-tiny": "0.35",
        "random": "0.5",
        "random-deep": "1",
        "mnist-4c3f-local-b": "1.58",
        "mnist-4c3f-local-g": "1.58",
        "cifar10-6c2f-local-b": "36/255",
    },
    "inf": {
        "lirpa_cifar_2c2f": "2/255",
        "lirpa_mnist_fc_3layer": "0.02",
        "cap_mnist": "0.1",
        "random-tiny": "0.2",
        "random": "0.15",
        "random-deep": "0.25",
    },
}
#: Between these lie the radii where half of the images are certified; attacks go on to ten times the second.
REACH = {"2": (1e-3, 4.096), "inf": (1e-4, 0.4096)}
#: The widths of random MLPs.
RANDOM = {"random-tiny": (4, 10, 10, 3), "random": (20, 32, 32, 5), "random-deep": (20, 32, 32, 32, 32, 32, 5)}
#: Networks whose exact radii are computed, and how, by norm.
TINY = ("random-tiny",)
EXACT = {"2": ("exact, by enumeration", exact_radius), "inf": ("exact, by MIP", exact_radius_inf)}
BRANCH_SECONDS = 20.0
#: Images that the peer looks at together: the memory of alpha-CROWN grows with them.
TOGETHER = {"CROWN": 100, "CROWN-Optimized": 10}
PEERS = {"crown": "CROWN", "alpha": "CROWN-Optimized"}
#: Layers behind which the peer may keep patches of images in place of matrices.
PLAIN = (nn.Conv2d, nn.Linear, nn.ReLU, nn.Flatten)
#: Calls of the peer, which narrow a bracket of a factor of 4096 to 0.2 %.
PROBES = 12


def brought(folder: Path, data_root: Path | None, name: str, count: int) -> tuple[nn.Module, Tensor, Tensor]:
    """A network and the images of the first `count` that it classifies correctly, with their labels."""
    if name in RANDOM:
        torch.manual_seed(0)
        layers = [layer for pair in itertools.pairwise(RANDOM[name]) for layer in (nn.Linear(*pair), nn.ReLU())]
        model: nn.Module = nn.Sequential(*layers[:-1])
        x = torch.randn(count, RANDOM[name][0])
        return model, x, model(x).argmax(1)
    model = network(folder, name) if name in NETWORKS else load_model(name)
    data = NETWORKS[name][0] if name in NETWORKS else name.split("-")[0]
    images = load_images(data, "test", data_root)
    x, y = images.images[:count].float() / 255, images.labels[:count]
    right = model(x).argmax(1) == y
    return model, x[right], y[right]


def network(folder: Path, name: str) -> nn.Sequential:
    """With its weights, stored as 0.weight, 0.bias, 1.weight, ... in the order of the layers."""
    stored, model = load_file(folder / f"{name}.safetensors"), nn.Sequential(*NETWORKS[name][1]())
    layers = [layer for layer in model if isinstance(layer, (nn.Conv2d, nn.Linear))]
    for number, layer in enumerate(layers):
        layer.load_state_dict({part: stored[f"{number}.{part}"] for part in ("weight", "bias")})
    return model.eval()


def reached(radii: Tensor) -> float:
    """The largest radius that half of the images reach, as `median_radius` finds it."""
    return statistics.median_high(radii.tolist())


def median_radius(certified: Callable[[float], Tensor], low: float, high: float) -> float:
    """The largest radius at which half of the images are certified, by bisection of its logarithm."""
    for _ in range(PROBES):
        middle = (low * high) ** 0.5
        if float(certified(middle).float().mean()) >= 0.5:
            low = middle
        else:
            high = middle
    return low


def peer(model: nn.Module, x: Tensor, y: Tensor, method: str, norm: str) -> Callable[[float], Tensor]:
    """Which images auto_LiRPA certifies at a radius."""
    size = TOGETHER[method]
    parts = [part_of_peer(model, *part, method, norm) for part in zip(x.split(size), y.split(size), strict=True)]
    return lambda eps: torch.cat([part(eps) for part in parts])


def part_of_peer(model: nn.Module, x: Tensor, y: Tensor, method: str, norm: str) -> Callable[[float], Tensor]:
    from auto_LiRPA import BoundedModule, BoundedTensor, PerturbationLpNorm

    plain = all(isinstance(layer, PLAIN) for layer in model.children())  # thresholds of units need whole matrices
    bounded = BoundedModule(model, torch.zeros_like(x), bound_opts={"conv_mode": "patches" if plain else "matrix"})
    bounded.set_bound_opts({"optimize_bound_args": {"iteration": 20}})
    classes = model(x[:1]).shape[1]
    eye = torch.eye(classes)
    others = torch.stack([torch.tensor([i for i in range(classes) if i != label]) for label in y.tolist()])
    differences = eye[y][:, None] - eye[others]

    def certified(eps: float) -> Tensor:
        around = BoundedTensor(x, PerturbationLpNorm(norm=float(norm), eps=eps))
        with torch.set_grad_enabled(method != "CROWN"):
            lower, _ = bounded.compute_bounds(x=(around,), C=differences, method=method, bound_upper=False)
        return lower.detach().amin(1) > 0

    return certified


def global_radii(model: nn.Module, x: Tensor, y: Tensor, norm: str) -> Tensor:
    """What the product of all norms proves: the lead over sqrt 2 times the product, in the l2 ball that holds the ball."""
    prover = Prover(model, x.shape[1:], "high_probability", seed=0)
    logits = prover.clean_logits(x.double())[0]
    rest = logits.scatter(1, y[:, None], -float("inf")).amax(1)
    stretch = as_ball(norm).stretch(x[0].numel())
    return (logits.gather(1, y[:, None])[:, 0] - rest).clamp(min=0) / (2**0.5 * stretch * prover.ceiling.total)


def broken_at(model: nn.Module, x: Tensor, y: Tensor, norm: str) -> Callable[[float], Tensor]:
    def unbroken(eps: float) -> Tensor:
        radii = torch.full((len(x),), eps)
        generator = torch.Generator().manual_seed(0)
        found = pgd_l2(model, x, y, radii, steps=50, ball=as_ball(norm), generator=generator)
        return model(found).argmax(1) == y

    return unbroken


def timed(bound: str, by: str, of: str, run: Callable[[], float]) -> dict[str, Any]:
    """A row: what `run` finds, under the name `of`, and the seconds for all images."""
    begin = time.perf_counter()
    found = run()
    return {"bound": bound, "by": by, of: float(f"{found:.4g}"), "seconds": round(time.perf_counter() - begin, 2)}


def certified_at(eps: str, model: nn.Module, x: Tensor, y: Tensor, peers: list[str], norm: str) -> Iterator[dict[str, Any]]:
    """A row per bound: the share of the images that it certifies at eps, without the attack's time."""

    def share(**options: Any) -> float:
        return float(ll.certify(model, x, y, eps, seed=0, attack_steps=0, norm=norm, **options).certified.double().mean())

    for name in peers:
        certified = peer(model, x, y, PEERS[name], norm)
        certified(REACH[norm][0])
        run = lambda certified=certified: float(certified(float(Fraction(eps))).double().mean())  # noqa: E731
        yield {"eps": eps, **timed(PEERS[name], "auto_LiRPA", "certified", run)}
    for method in ("local", "lines", "auto"):
        yield {"eps": eps, **timed(method, "locallip", "certified", lambda method=method: share(method=method))}
    kept: list[Tensor] = []

    def survived() -> float:
        kept.append(broken_at(model, x, y, norm)(float(Fraction(eps))))
        return float(kept[0].double().mean())

    attack = timed("attack", "above", "certified", survived)
    left = x[kept[0]], y[kept[0]]

    def with_branches() -> float:
        """What the attack breaks is not tried: branch and bound would search there until its time is up."""
        found = ll.certify(model, *left, eps, seed=0, attack_steps=0, branch_seconds=BRANCH_SECONDS, norm=norm)
        return float(found.certified.double().sum()) / len(x)

    yield {"eps": eps, **timed("auto with branch and bound", "locallip", "certified", with_branches)}
    yield {"eps": eps, **attack}


def measured(model: nn.Module, x: Tensor, y: Tensor, peers: list[str], norm: str) -> Iterator[dict[str, Any]]:
    """A row per bound: the median radius, and the seconds for all images."""
    low, high = REACH[norm]
    yield timed("product of norms", "locallip", "median", lambda: reached(global_radii(model, x, y, norm)))
    for method in ("local", "lines", "auto"):
        yield timed(
            method,
            "locallip",
            "median",
            lambda method=method: reached(
                ll.certified_radius(model, x, y, method=method, seed=0, batch_size=TOGETHER["CROWN"], norm=norm)
            ),
        )
    for name in peers:
        certified = peer(model, x, y, PEERS[name], norm)
        certified(low)  # the first call builds what later ones use
        yield timed(PEERS[name], "auto_LiRPA", "median", lambda certified=certified: median_radius(certified, low, high))
    yield timed("attack", "above", "median", lambda: median_radius(broken_at(model, x, y, norm), low, 10 * high))


def exact(model: nn.Module, x: Tensor, y: Tensor, norm: str) -> Iterator[dict[str, Any]]:
    """The median of what radii can be at most."""
    assert isinstance(model, nn.Sequential)
    bound, radius = EXACT[norm]
    pairs = list(zip(x, y.tolist(), strict=True))
    yield timed(
        bound,
        "above",
        "median",
        lambda: statistics.median_high(radius(model, one, label, REACH[norm][1]).radius for one, label in pairs),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--networks", type=Path, required=True, help="folder of the weights")
    parser.add_argument("--only", choices=("radii", "counts"), help="radii alone, or what is certified at one radius")
    parser.add_argument("--data-root", type=Path)
    parser.add_argument("--names", default=",".join(NETWORKS))
    parser.add_argument("--images", type=int, default=20)
    parser.add_argument("--norm", choices=NORMS, default="2")
    parser.add_argument("--peers", default="", help=f"of {','.join(PEERS)}")
    parser.add_argument("--name", default="bounds-cpu")
    args = parser.parse_args()
    begin, rows = time.perf_counter(), []
    peers = [word for word in args.peers.split(",") if word]
    for name in args.names.split(","):
        model, x, y = brought(args.networks, args.data_root, name, args.images)
        parts = [measured(model, x, y, peers, args.norm)] if args.only != "counts" else []
        if name in EPS[args.norm] and args.only != "radii":
            parts.append(certified_at(EPS[args.norm][name], model, x, y, peers, args.norm))
        if name in TINY:
            parts.append(exact(model, x, y, args.norm))
        for row in itertools.chain(*parts):
            rows.append({"network": name, "images": len(x), "norm": args.norm, **row})
            print(rows[-1], flush=True)
        # After every network: the next one may take an hour.
        settings = {"images": args.images, "threads": torch.get_num_threads(), "probes": PROBES, "rows": rows}
        print(record.write(args.name, settings, device=torch.device("cpu"), seed=0, begin=begin), flush=True)


if __name__ == "__main__":
    main()
