"""A thirteenth round of attempts: branch and bound against fractions, sums that end a network, forged rows, damaged PNG."""

from __future__ import annotations

import dataclasses
import json
import math
import random
import struct
import zlib
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import locallip as ll
from locallip.bounds import branched, worst_logits
from locallip.bounds.branching import Branching, CutWay
from locallip.data import DamagedData, load_own
from locallip.data.own import OwnImages
from locallip.norms import Guarantee
from locallip.proofs import Job, Row, certify_images, verify_rows
from locallip.proofs.rows import append_rows
from locallip.proofs.settings import about_file
from locallip.proofs.summary import summarize
from tests import test_attacker_eleventh as eleventh
from tests import test_attacker_twelfth as twelfth
from tests.test_branching import part_of, runs_of, traced

DOUBLE = torch.float64


# Branch and bound against fractions --------------------------------------------------------------------------------------


def activation(draw: random.Random, width: int) -> Callable[[], nn.Module]:
    """One or two kinks, at infinity too, and pairs whose thresholds stand in either order."""
    kinds: list[Callable[[], nn.Module]] = [
        nn.ReLU,
        lambda: nn.Hardtanh(-0.5, 0.25),
        lambda: nn.Hardtanh(-math.inf, 0.25),
        ll.MaxMin,
        lambda: ll.ReLUTheta((width,)),
        lambda: ll.ClippedMaxMin((width // 2,), 0.5, -0.5),
        lambda: ll.ClippedMaxMin((width // 2,), 0.5, 0.75),
    ]
    return draw.choice(kinds)


def wild(tensors: list[Tensor], draw: random.Random) -> list[Tensor]:
    """Some of them 1e-200 to 1e30 times what they were."""
    return [v * draw.choice([1.0, 1.0, 0.0, -1.0, 1e-200, 10.0 ** draw.uniform(-30, 30)]) for v in tensors]


@pytest.mark.parametrize("seed", range(30))
def test_no_part_is_exceeded_by_a_bit_whatever_the_slopes_and_pulls(seed: int) -> None:
    """Costs of either sign that nearly cancel, or are 1e30 times the bound: a point of the part, in fractions, stays below.

    Catches: the cost of a pull with the wrong sign.
    """
    draw, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    inputs, width, radius = draw.choice([1, 2]), draw.choice([2, 4]), draw.choice([2.0, 1.0, 1e-3, 1e-9, 1e-14])
    act = activation(draw, width)
    layers = nn.Linear(inputs, width), act(), nn.Linear(width, width), act(), nn.Linear(width, 3)
    model = eleventh.filled(nn.Sequential(*layers), draw, draw.choice([0, 20, 60, -1]))
    x = torch.tensor([[draw.choice([draw.randint(0, 4) / 4, draw.random()]) for _ in range(inputs)]], dtype=DOUBLE)
    network, trace = traced(model, x, radius, draw.choice([None, "boxes"]))
    label = draw.randrange(3)
    found, numbers = Branching(network, trace, label), exact_of(network)
    weight, bias = (eleventh.exact(v) for v in (model[4].weight, model[4].bias))
    middle = weight @ eleventh.exact(trace.regions[-1].center.flatten()) + bias
    with torch.no_grad():
        for _ in range(4):
            move = torch.randn(x.shape, generator=generator, dtype=DOUBLE)
            point = x + move * radius / move.norm() * (1 - 1e-12)
            other = (label + draw.choice([1, 2])) % 3
            parts, plain = part_of(found, runs_of(found, network, trace, point), label, other, generator)
            way = CutWay(found.pullback, found.units, parts, label, DOUBLE, outward=True)
            bound = float(way.bound(wild(plain, draw)))
            rise = numbers.before(eleventh.exact(point.flatten())[:, None])[-1][:, 0] - middle
            assert not math.isfinite(bound) or Fraction(bound) >= rise[other] - rise[label]


def exact_of(network: ll.Network) -> eleventh.Exact:
    return eleventh.Exact(network)


@pytest.fixture(autouse=True)
def pairs_in_fractions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(eleventh, "_applied", twelfth.applied)
    monkeypatch.setattr(eleventh, "_bends", twelfth.bends)


class Shared(nn.Module):
    """Sums that two layers read, so that they are passed on the way back without bending."""

    def __init__(self, inputs: int, width: int, act: Callable[[], nn.Module], kind: int):
        super().__init__()
        self.one, self.skip = nn.Linear(inputs, width), nn.Linear(inputs, width)
        self.two, self.three, self.four = (nn.Linear(width, width) for _ in range(3))
        self.first, self.second, self.kind = nn.Linear(width, 3), nn.Linear(width, 3), kind
        self.acts = nn.ModuleList(act() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        t = self.two(self.acts[0](self.one(x))) + self.skip(x)
        if self.kind == 0:
            return self.first(t) + self.second(self.acts[1](self.three(t)))
        u = t + self.acts[1](self.three(t)) if self.kind == 1 else self.acts[1](t) - self.three(t)
        return self.first(u) - self.second(self.acts[2](self.four(u)))


@pytest.mark.parametrize("seed", range(16))
def test_no_worst_logit_by_branches_is_exceeded_by_a_bit(seed: int) -> None:
    """Sums on the way back, from one input, at levels just above what fractions reach and well above it."""
    draw = random.Random(seed)
    width, eps = draw.choice([2, 4]), draw.choice([0.25, 1.0, 3.0, 1e-3, 1e-9, 1e-100])
    model = eleventh.filled(Shared(1, width, activation(draw, width), seed % 3), draw, draw.choice([0, 20, 60, -1, -1]))
    x = torch.tensor([[draw.choice([draw.randint(0, 4) / 4, draw.random()])]], dtype=DOUBLE)
    network, trace = traced(model, x, eps)
    y = trace.logits.argmax(1)
    label, here, worst = int(y), trace.logits[0], worst_logits(network, trace, y, outward=True, slope_steps=0).worst
    found = [
        exact_of(network).along(*segment)[-1]
        for segment in eleventh.segments(x, eleventh.into(eleventh.steepest(network, x, draw), eps), None)
    ]
    most = {k: max((f[k] - f[label]).max() for f in found) for k in range(3) if k != label}
    reach = max(abs(float(v) - float(here[k] - here[label])) for k, v in most.items())
    for share in (1e-9, 0.3):
        level = worst[:, label] + float(max(most.values())) + share * reach
        with torch.no_grad():
            new = branched(network, trace, y, worst, level, 0.1)[0].tolist()
        assert all(Fraction(new[k]) - Fraction(new[label]) >= v for k, v in most.items())


def test_a_radius_at_which_two_logits_tie_is_not_certified_and_a_little_less_is() -> None:
    """One input, where parts are as sharp as rounding lets them: an exact tie is told from a small margin."""
    model = nn.Sequential(nn.Linear(1, 4), nn.ReLU(), nn.Linear(4, 2)).double().requires_grad_(False)
    values = [
        [[1.0], [-1.0], [1.0], [2.0]],
        [0.0, 0.0, -0.25, -1.5],
        [[1.0, 1.0, -3.0, 0.0], [0.0, 0.0, 0.0, 0.5]],
        [0.5, 0.0],
    ]
    for p, value in zip(model.parameters(), values, strict=True):
        p.copy_(torch.tensor(value))
    # |t| + 1/2 - 3 max(t - 1/4, 0) - max(2 t - 3/2, 0) / 2 is 0 at t = 5/8, and above 0 between there and its mirror image.
    x, y = torch.zeros(1, 1, dtype=DOUBLE), torch.tensor([0])
    for eps, certified in ((0.625, False), (0.624, True)):
        found = ll.certify(model, x, y, eps, guarantee="deterministic", attack_steps=0, branch_seconds=1.0)
        assert bool(found.certified[0]) is certified
    assert float(ll.certified_radius(model, x, y, guarantee="deterministic")[0]) < 0.625


# Finds --------------------------------------------------------------------------------------------------------------------


class TwoHeads(nn.Module):
    """A sum of two sources that two layers read, with nothing behind them: the last activation is the identity."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.first, self.second = (nn.Linear(4, n) for n in (4, 4, 3, 3))

    def forward(self, x: Tensor) -> Tensor:
        z = x + self.two(torch.relu(self.one(x)))
        return self.first(z) + self.second(z)


@pytest.mark.parametrize("what", ["verdicts", "branches", "radii"])
def test_a_network_that_ends_with_a_sum_is_certified(what: str) -> None:
    """It was before identities were passed on the way back."""
    torch.manual_seed(0)
    model = TwoHeads().double().requires_grad_(False)
    x = torch.randn(3, 4, dtype=DOUBLE)
    y = model(x).argmax(1)
    if what == "radii":
        assert bool((ll.certified_radius(model, x, y) > 0).all())
    else:
        found = ll.certify(model, x, y, 0.3, attack_steps=0, branch_seconds=0.2 if what == "branches" else 0.0)
        assert len(found.verdicts) == 3


@pytest.fixture(scope="module")
def by_branches(tmp_path_factory: pytest.TempPathFactory) -> tuple[nn.Module, OwnImages, Path, list[Row]]:
    """Rows of which one at least was decided by branch and bound."""
    torch.manual_seed(0)
    layers = nn.Linear(4, 12), nn.ReLU(), nn.Linear(12, 10), nn.ReLU(), nn.Linear(10, 3)
    model = nn.Sequential(*layers).double().requires_grad_(False)
    for layer in (layers[0], layers[2], layers[4]):
        layer.weight.mul_(2)  # type: ignore[operator]
    pixels = torch.rand(12, 4)[[0, 9]]
    images = OwnImages("mine", "test", pixels, model(pixels.double()).argmax(1), ("0", "1", "2"))
    out = tmp_path_factory.mktemp("rows") / "rows.jsonl"
    job = Job("mine", "0.185304", guarantee=Guarantee.DETERMINISTIC, attack_steps=5, branch_seconds=3.0, out=out)
    return model, images, out, certify_images(job, model, images)[0]


@pytest.mark.parametrize("changes", [{"margin": 1e300}, {"lipschitz": 0.0}])
def test_numbers_of_branch_and_bound_are_looked_at(
    by_branches: tuple[nn.Module, OwnImages, Path, list[Row]], changes: dict[str, float]
) -> None:
    """docs/certifying.md: a certified row comes again with the same margin and bound, within 2 %.

    No margin exceeds the lead at the image itself, and the bound is that of the norms, whenever branching ends.
    """
    model, images, out, rows = by_branches
    index = next(row.index for row in rows if row.decided_by == "branch and bound")
    new = [dataclasses.replace(row, **changes) if row.index == index else row for row in rows]  # type: ignore[arg-type]
    out.unlink()
    append_rows(out, new)
    about = json.loads(about_file(out).read_text())
    about_file(out).write_text(json.dumps({**about, "summary": summarize(new)}))
    assert verify_rows(out, model, images, sample=len(rows)) != []


def chunk(name: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))


def header(kind: int) -> bytes:
    return chunk(b"IHDR", struct.pack(">IIBBBBB", 2, 2, 8, kind, 0, 0, 0))


def palette(colours: int) -> bytes:
    return chunk(b"PLTE", bytes(range(3 * colours)))


#: Chunks before the pixels, which are numbers of colours from 1 to 3, or those of RGB.
DAMAGED = {
    "no palette": header(3),
    "a second palette, which is too short": header(3) + palette(4) + palette(2),
    "a second header": header(2) + header(0),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_a_png_whose_pixels_would_come_out_as_others_is_refused(name: str, tmp_path: Path) -> None:
    rows = b"\0\1\3\0\1\2" if "palette" in name else b"\0" + bytes(range(6)) + b"\0" + bytes(range(6))
    for folder in "01":
        (tmp_path / folder).mkdir()
    content = b"\x89PNG\r\n\x1a\n" + DAMAGED[name] + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")
    (tmp_path / "0" / "a.png").write_bytes(content)
    with pytest.raises(DamagedData):
        load_own(tmp_path, (3, 2, 2), 2)
