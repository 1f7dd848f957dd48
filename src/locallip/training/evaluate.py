"""The figures of one network on one set of images: clean, attacked, estimated and certified accuracy, and its bounds.

Clean, attacked and estimated accuracy are computed in float32 with TF32 and autocast off, the certificates in float64 with
outward rounding. All columns speak of the same points, pixels / 255 in float32, and of the same eps, never rounded down.
"""

from __future__ import annotations

import copy
import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from locallip.arithmetic import exact_arithmetic
from locallip.attacks import withstands
from locallip.bounds import CeilingNorm, GlobalBound, global_bound, propagate, worst_logits
from locallip.certify import certify
from locallip.certify.inputs import as_eps, as_labels, check_batch_size, check_model
from locallip.certify.prover import lead
from locallip.data import pixels
from locallip.data.image_set import checksum
from locallip.network import Network, lower
from locallip.norms import Guarantee, NormRule, PowerNorm

PIXELS = (0.0, 1.0)
#: The mean local bound is that of so many images, the first ones, whatever became of them.
LIPSCHITZ_IMAGES = 100
#: So many images, the first ones, are also counted by themselves: few enough to certify again on a CPU.
FIRST_IMAGES = 100
#: Power iteration comes from below: what the bound leaves open after so many steps it leaves open after more.
ROUGH_STEPS = 20
#: A part that takes longer says how far it is.
PATIENCE_SECONDS = 15.0
#: Offsets of the seed: training may have drawn the weights with the seed itself.
_ATTACK_SEED, _ESTIMATE_SEED = 1_000_003, 2_000_003


class Images(Protocol):
    """Pixels (N, C, H, W) uint8 and labels (N,)."""

    @property
    def images(self) -> Tensor: ...
    @property
    def labels(self) -> Tensor: ...


def evaluate(
    model: nn.Module,
    images: Images,
    eps: str | float,
    *,
    limit: int | None = None,
    pgd_steps: int = 100,
    power_steps: int = 200,
    failure_prob: float = 1e-9,
    batch_size: int = 500,
    seed: int = 0,
    proof_seed: int | None = None,
    input_domain: tuple[float, float] | None = None,
    device: torch.device | str | None = None,
    say: Callable[[str], None] | None = None,
) -> dict[str, Any]:
    """Accuracies in per cent of the first `limit` images, bounds, and the seconds that each part took.

    clean: the label is ahead of all others (ties and numbers that are not finite count as wrong).
    pgd: right, and PGD in steps of eps / 4 found nothing; it stays inside [0, 1], so that what it finds are images.
    estimate: the paper's protocol, but for the last power step (see PowerNorm). Of the images that PGD did not break, those
        that power iteration from random starts calls robust, by the global bound or else by the local one with the paper's
        global radii for the boxes. No proof.
    certified: `certify` with failure probability `failure_prob` per image, of those that PGD did not break; the others count
        as not certified.
    global_certified: the part of it that needed unmasked norms alone.
    proof_seed: that of the proofs' random starts, drawn unless given: weights follow from the seed of their training, and
        could be made for any that is known beforehand.
    first: how many of the first images (FIRST_IMAGES) are right and certified, in numbers.
    data_sha256: a checksum of all images and labels, whatever the limit.
    global_lipschitz, local_lipschitz: estimates; the local one is the mean over the first images (LIPSCHITZ_IMAGES).

    The bounds allow for the whole ball unless `input_domain` restricts it, as in the paper. The model itself stays as it is;
    it is evaluated on its own device unless `device` names another. Numbers that are not finite are None.
    """
    check_batch_size(batch_size)
    check_model(model)
    proof_seed = secrets.randbits(62) if proof_seed is None else proof_seed
    run = _Evaluation(model, images, eps, limit, batch_size, input_domain, device, say)
    if run.is_finite:
        run.columns(pgd_steps, power_steps, failure_prob, seed, proof_seed)
    else:
        run.tell("the weights are not finite: every image counts as wrong")
    found = run.result(pgd_steps, power_steps, failure_prob, proof_seed, getattr(images, "split", None), str(eps))
    return {**found, "data_sha256": checksum(images.images, images.labels)}


class _Evaluation:
    """One call of `evaluate`: the images on the device and the columns found so far."""

    def __init__(
        self,
        model: nn.Module,
        images: Images,
        eps: str | float,
        limit: int | None,
        batch_size: int,
        domain: tuple[float, float] | None,
        device: torch.device | str | None,
        say: Callable[[str], None] | None,
    ):
        self.model = copy.deepcopy(model).eval()
        here = next((p.device for p in model.parameters()), torch.device("cpu"))
        self.device = here if device is None else torch.device(device)
        self.model.to(self.device)
        self.batch_size, self.domain, self.say = batch_size, domain, say
        first, labels = _first(images, limit)
        self.x = pixels(first, self.device)
        self.y = labels.to(self.device)
        self.exact_eps = as_eps(eps, 1, self.device)
        self.eps = _rounded_up(self.exact_eps)
        self.is_finite = all(
            bool(torch.isfinite(t).all()) for t in self.model.state_dict().values() if isinstance(t, Tensor)
        )
        nobody = torch.zeros(len(self.x), dtype=torch.bool, device=self.device)
        self.shares = dict.fromkeys(("clean", "pgd", "estimate", "certified", "global_certified"), nobody)
        self.global_lipschitz, self.local_lipschitz = float("nan"), float("nan")
        self.seconds: dict[str, float] = {}

    def columns(self, pgd_steps: int, power_steps: int, failure_prob: float, seed: int, proof_seed: int) -> None:
        network = lower(self.model, self.x.shape[1:])
        classes = network.output_shape.numel()
        if len(network.output_shape) != 1 or classes < 2:
            raise ValueError(f"a classifier returns (B, classes) with at least 2 classes, not (B, {network.output_shape})")
        self.y = as_labels(self.y, len(self.x), classes, self.device)
        with exact_arithmetic():
            with self._part("clean"):
                self.shares["clean"] = self._clean(network)
            with self._part("pgd"):
                self.shares["pgd"] = self._attacked(network, pgd_steps, seed + _ATTACK_SEED)
            with self._part("estimate"):
                self.shares["estimate"] = self._estimated(network, power_steps, seed + _ESTIMATE_SEED)
        with self._part("certified"):
            self._certified(failure_prob, proof_seed)

    def _clean(self, network: Network) -> Tensor:
        everything = torch.arange(len(self.x), device=self.device)
        return torch.cat([lead(network(x), y) > 0 for x, y in self._batches(everything)])

    def _attacked(self, network: Network, steps: int, seed: int) -> Tensor:
        """The images that are right and stay so."""
        index = self.shares["clean"].nonzero()[:, 0]
        generator = torch.Generator(self.x.device).manual_seed(seed)
        kept = withstands(
            network,
            self.x[index],
            self.y[index],
            self.eps.expand(len(index)),
            steps=steps,
            input_domain=PIXELS,
            generator=generator,
            batch_size=self.batch_size,
            progress=self._patience("pgd"),
        )
        return self._mask(index[kept])

    def _estimated(self, network: Network, steps: int, seed: int) -> Tensor:
        """The images that the paper's protocol calls robust."""
        rule = PowerNorm(steps, seed=seed)
        ceiling = global_bound(network, rule, self.eps)
        self.global_lipschitz = float(ceiling.total)
        standing = self.shares["pgd"].nonzero()[:, 0]
        by_global = self._mask(standing[self._bound(network, standing, CeilingNorm(ceiling), ceiling)[0] > 0])
        sample = torch.arange(len(self.x), device=self.device) < LIPSCHITZ_IMAGES
        open_ = (self.shares["pgd"] & ~by_global).nonzero()[:, 0]
        if steps > ROUGH_STEPS:
            open_ = open_[self._bound(network, open_, PowerNorm(ROUGH_STEPS, seed=seed), ceiling)[0] > 0]
        index = (self._mask(open_) | sample).nonzero()[:, 0]
        margin, bound = self._bound(network, index, rule, ceiling)
        self.local_lipschitz = float(bound[: int(sample.sum())].double().mean())
        return by_global | (self._mask(index[margin > 0]) & self._mask(open_))

    def _bound(self, network: Network, index: Tensor, rule: NormRule, ceiling: GlobalBound) -> tuple[Tensor, Tensor]:
        """The label's lead in the worst logits and the Lipschitz bound for some images, each (len(index),)."""
        leads, bounds = [self.eps[:0]], [self.eps[:0]]
        for x, y in self._batches(index):
            eps = self.eps.expand(len(x))
            trace = propagate(network, x, eps, rule, ceiling=ceiling, box_radii="global", input_domain=self.domain)
            leads.append(lead(worst_logits(network, trace, y).worst, y))
            bounds.append(trace.lipschitz)
        return torch.cat(leads), torch.cat(bounds)

    def _certified(self, failure_prob: float, seed: int) -> None:
        index = self.shares["pgd"].nonzero()[:, 0]
        if not len(index):
            return
        certificate = certify(
            self.model,
            self.x[index],
            self.y[index],
            self.exact_eps,
            failure_prob=failure_prob,
            input_domain=self.domain,
            attack_steps=0,
            batch_size=self.batch_size,
            seed=seed,
            method="local",  # beside the estimate by the same bound, and beside older files
        )
        assert certificate.guarantee is Guarantee.HIGH_PROBABILITY
        certified = certificate.certified.to(self.device)
        by_global = torch.tensor([check == "global bound" for check in certificate.decided_by], device=self.device)
        self.shares["certified"] = self._mask(index[certified])
        self.shares["global_certified"] = self._mask(index[certified & by_global])

    def _batches(self, index: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Images and labels, `batch_size` at a time."""
        for begin in range(0, len(index), self.batch_size):
            part = index[begin : begin + self.batch_size]
            yield self.x[part], self.y[part]

    def _mask(self, index: Tensor) -> Tensor:
        mask = torch.zeros(len(self.x), dtype=torch.bool, device=self.device)
        mask[index] = True
        return mask

    @contextmanager
    def _part(self, name: str) -> Iterator[None]:
        begin = time.perf_counter()
        yield
        share = self._per_cent(name)  # waits for the device
        self.seconds[name] = round(time.perf_counter() - begin, 3)
        self.tell(f"{name:>9} {share:6.2f} %   {self.seconds[name]:.1f} s")

    def _patience(self, name: str) -> Callable[[int, int], None]:
        """Says how far a part is, where that takes long."""
        said = time.perf_counter()

        def progress(done: int, total: int) -> None:
            nonlocal said
            if time.perf_counter() - said > PATIENCE_SECONDS:
                said = time.perf_counter()
                self.tell(f"{name:>9} {done / total:4.0%} done")

        return progress

    def _per_cent(self, name: str) -> float:
        return 100 * int(self.shares[name].sum()) / len(self.x)

    def tell(self, line: str) -> None:
        if self.say is not None:
            self.say(line)

    def result(
        self, pgd_steps: int, power_steps: int, failure_prob: float, proof_seed: int, split: str | None, eps: str
    ) -> dict[str, Any]:
        return {
            "split": split,
            "images": len(self.x),
            "eps": eps,
            "clean": self._per_cent("clean"),
            "pgd": self._per_cent("pgd"),
            "pgd_steps": pgd_steps,
            "estimate": self._per_cent("estimate"),
            "power_steps": power_steps,
            "certified": self._per_cent("certified"),
            "guarantee": Guarantee.HIGH_PROBABILITY.value,
            "failure_prob": failure_prob,
            "proof_seed": proof_seed,
            "global_certified": self._per_cent("global_certified"),
            "first": {
                "images": min(FIRST_IMAGES, len(self.x)),
                **{name: int(self.shares[name][:FIRST_IMAGES].sum()) for name in ("clean", "certified")},
            },
            "global_lipschitz": _finite(self.global_lipschitz),
            "local_lipschitz": _finite(self.local_lipschitz),
            "input_domain": self.domain and list(self.domain),
            "seconds": {**self.seconds, "total": round(sum(self.seconds.values()), 3)},
        }


def _first(images: Images, limit: int | None) -> tuple[Tensor, Tensor]:
    """The first `limit` images and labels, all of them where there are fewer."""
    found, labels = images.images, images.labels
    if found.dtype != torch.uint8 or found.dim() != 4:
        raise TypeError(f"images must be (N, C, H, W) of uint8, got {tuple(found.shape)} of {found.dtype}")
    if limit is not None and limit < 1:
        raise ValueError(f"limit must be at least 1, got {limit}")
    if not len(found) or len(found) != len(labels):
        raise ValueError(f"there are {len(found)} images and {len(labels)} labels; give as many of both, at least one")
    return found[:limit], labels[:limit]


def _rounded_up(eps: Tensor) -> Tensor:
    """float32, never below the float64 value."""
    near = eps.float()
    return torch.where(near.double() < eps, torch.nextafter(near, torch.full_like(near, float("inf"))), near)


def _finite(value: float) -> float | None:
    return value if abs(value) < float("inf") else None
