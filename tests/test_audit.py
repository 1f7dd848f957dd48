"""Attempts to break certificates: those of this library hold, wrong ones are found by every kind of attempt."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from torch import Tensor, nn

import locallip as ll
from locallip import auditing, cli
from locallip.audit import SEARCHES, SHARES, Auditor, Claims, Judge, Tally
from locallip.audit.inside import inside
from locallip.audit.variants import extreme, scaled
from locallip.balls import INF, L2, Ball
from locallip.certify import Certificate, Certifier
from tests.audited import certifier_of, convolutional, everything, images, linear_claims, logistic, trained

#: Networks, guarantees, attempts, radii tried per image: together more than 5,000 attempts.
AUDITS: list[tuple[Callable[[], nn.Module], str, int, int]] = [
    (convolutional, "high_probability", 2000, 2),
    (convolutional, "deterministic", 500, 2),
    (logistic, "deterministic", 2500, 40),
]


@pytest.mark.parametrize(("build", "guarantee", "attempts", "probes"), AUDITS)
def test_no_certificate_breaks(build: Callable[[], nn.Module], guarantee: str, attempts: int, probes: int) -> None:
    model, (x, y) = build(), images(20)
    # Proofs of convolutions by factorization are dear, so derived networks are left to the others.
    kinds = [*SEARCHES] if (build, guarantee) == (convolutional, "deterministic") else [*SHARES]
    number = math.ceil(attempts / sum(SHARES[kind] for kind in kinds))
    auditor = Auditor(model, certifier_of(guarantee), attempts=number, steps=12, probes=probes)
    report = auditor.run(auditor.issue(x, y, torch.full((20,), 0.1, dtype=torch.float64)), kinds)
    assert report.broken == 0
    assert report.within_rounding == 0
    assert report.tried >= attempts
    assert all(tally.tried > 0 and tally.certificates > 0 for tally in report.kinds.values())
    if build is logistic:  # nothing but rounding lies between these certificates and the boundary
        assert 1 < report.kinds["boundary"].boundary < 1.002
        assert report.kinds["attack"].closest < 1e-6


def test_no_certificate_breaks_in_l_infinity() -> None:
    model, (x, y) = logistic(), images(10)
    auditor = Auditor(model, certifier_of(norm="inf"), attempts=1000, steps=12, probes=30)
    claims = auditor.issue(x, y, torch.full((10,), 0.01, dtype=torch.float64))
    assert claims.ball is INF
    report = auditor.run(claims)
    assert (report.broken, report.within_rounding) == (0, 0)
    assert report.tried >= 1000
    assert 1 < report.kinds["boundary"].boundary < 1.01
    assert report.kinds["attack"].closest < 1e-6
    # The same radii in a wider norm, where most points of the ball are no closer.
    wide = Auditor(model, lambda model: everything, attempts=200, steps=12)
    l2 = auditor_claims_in_l2(model, x, y)
    assert wide.run(Claims(l2.x, l2.y, l2.radius, l2.index, INF), ["attack"]).broken > 0


def auditor_claims_in_l2(model: nn.Module, x: Tensor, y: Tensor) -> Claims:
    return Auditor(model, certifier_of(), probes=4).issue(x, y, torch.full((len(x),), 0.1, dtype=torch.float64))


def test_the_attempts_of_the_suite_are_enough() -> None:
    assert sum(attempts for _, _, attempts, _ in AUDITS) >= 5000


def run(model: nn.Module, claims: Claims, kind: str, attempts: int = 2000, **options: object) -> Tally:
    auditor = Auditor(model, lambda model: everything, attempts=attempts, **options)  # type: ignore[arg-type]
    return auditor.run(claims, [kind]).kinds[kind]


@pytest.mark.parametrize("ball", [L2, INF], ids=["l2", "inf"])
@pytest.mark.parametrize(
    ("kind", "excess"),
    [
        ("attack", 0.2),
        ("attack", 1e-6),
        ("attack", 1e-12),
        ("boundary", 0.2),
        ("boundary", 1e-2),
        ("rounding", 1e-12),
    ],
)
def test_radii_that_are_too_large_are_found(kind: str, excess: float, ball: Ball) -> None:
    """Of a linear network, whose exact radii are known; just below them, nothing breaks."""
    model, wrong = linear_claims(excess=excess, ball=ball)
    found = run(model, wrong, kind)
    assert found.broken > 0
    assert found.breaks[0].kind == kind
    _, right = linear_claims(excess=-1e-13, ball=ball)
    kept = run(model, right, kind)
    assert (kept.broken, kept.within_rounding) == (0, 0)
    assert kept.tried >= found.tried > 0


def test_radii_that_float32_rounded_up_are_found() -> None:
    """What a certifier does that computes radii in float32 and counts no rounding (Jin, Ohrimenko and Rubinstein 2022)."""
    model, exact = linear_claims(count=32)
    claims = Claims(exact.x, exact.y, exact.radius.float().double(), exact.index)
    too_large = claims.radius > exact.radius * (1 + 1e-9)
    assert bool(too_large.any())
    broken = [run(model, claims.take(torch.tensor([i])), "rounding", 200).broken > 0 for i in range(32)]
    assert broken == too_large.tolist()


def test_random_points_break_what_is_far_too_large() -> None:
    model, claims = linear_claims(size=3, excess=2.0)
    assert run(model, claims, "random").broken > 0


def test_a_few_roundings_too_many_are_found() -> None:
    """A lead 1 - x, certified a few ulps beyond 1: 200 of them are surely too many, two may be rounding."""
    model = nn.Sequential(nn.Linear(2, 2, dtype=torch.float64))
    with torch.no_grad():
        model[0].weight.copy_(torch.tensor([[-1.0, 0.0], [0.0, 0.0]]))
        model[0].bias.copy_(torch.tensor([1.0, 0.0]))
    for ulps, expected in ((200, (True, True)), (2, (False, True)), (0, (False, True)), (-200, (False, False))):
        radius = torch.tensor([1 + ulps * 2.0**-52], dtype=torch.float64)
        claims = Claims(torch.zeros(1, 2, dtype=torch.float64), torch.tensor([0]), radius, torch.tensor([0]))
        found = run(model, claims, "rounding", 400)
        assert (found.broken > 0, found.broken + found.within_rounding > 0) == expected, ulps


@pytest.mark.parametrize("kind", ["scaled weights", "extreme weights"])
def test_a_certifier_that_says_yes_is_found_with_derived_networks(kind: str) -> None:
    model, claims = linear_claims(excess=1.0)
    found = run(model, claims, kind, 4000)
    assert found.broken > 0
    assert found.breaks[0].kind.startswith(kind)


def test_certificates_of_tied_classes_are_found() -> None:
    """Of radii that no search could break."""
    model, claims = linear_claims(excess=-0.9)
    found = run(model, claims, "extreme weights", 4000)
    names = {entry.kind.removeprefix("extreme weights: ") for entry in found.breaks}
    assert names == {"classes tied in pairs", "last layer 0", "last layer infinite"}


def test_derived_networks_are_what_they_say() -> None:
    model, (x, _) = convolutional(), images(6)
    logits = model.double()(x)
    for variant in scaled(model, 0):
        again = variant.model(x * variant.unit)
        assert torch.equal(again.argmax(1), logits.argmax(1))
        if not variant.name.startswith("last layer"):
            assert torch.allclose(again, logits, rtol=1e-12, atol=1e-12)
    names = [variant.name for variant in scaled(model, 0)]
    assert len(names) == len(set(names)) == 8
    tied = next(iter(extreme(model))).model(x)
    assert torch.equal(tied[:, ::2], tied[:, 1::2])


@pytest.mark.parametrize("size", [1, 2, 7, 100])
def test_inside_is_exact(size: int) -> None:
    """Against fractions, with radii at the distance itself and one ulp off, where float64 cannot tell."""
    generator = torch.Generator().manual_seed(size)
    x, point = torch.randn(2, 200, size, generator=generator, dtype=torch.float64) * 10.0 ** torch.randint(
        -4, 5, (2, 200, 1)
    )
    near = (point - x).norm(dim=1)
    for radius in (near, torch.nextafter(near, torch.zeros(())), torch.nextafter(near, 2 * near), 2 * near, near / 2):
        assert inside(x, point, radius).tolist() == [_inside(*triple) for triple in zip(x, point, radius, strict=True)]


def _inside(x: Tensor, point: Tensor, radius: Tensor) -> bool:
    squares = [(Fraction(p) - Fraction(c)) ** 2 for p, c in zip(point.tolist(), x.tolist(), strict=True)]
    return sum(squares) <= Fraction(float(radius)) ** 2


@pytest.mark.parametrize("size", [1, 3, 50])
def test_inside_a_cube_is_exact(size: int) -> None:
    generator = torch.Generator().manual_seed(size)
    x, point = torch.randn(2, 300, size, generator=generator, dtype=torch.float64)
    near = INF.length(point - x)
    for radius in (near, torch.nextafter(near, torch.zeros(())), torch.nextafter(near, 2 * near), 2 * near, near / 2):
        exact = [
            max(abs(Fraction(p) - Fraction(c)) for p, c in zip(ps, cs, strict=True)) <= Fraction(r)
            for ps, cs, r in zip(point.tolist(), x.tolist(), radius.tolist(), strict=True)
        ]
        assert inside(x, point, radius, INF).tolist() == exact
    assert len({*inside(x, point, near, INF).tolist()}) == 2  # some differences were rounded up, others down
    nan = torch.tensor([[math.nan], [math.inf], [0.5]], dtype=torch.float64)
    assert inside(torch.zeros_like(nan), nan, torch.ones(3, dtype=torch.float64), INF).tolist() == [False, False, True]


def test_inside_with_numbers_that_are_none_or_huge() -> None:
    x, radius = torch.zeros(4, 2, dtype=torch.float64), torch.tensor([1.0, 1.0, 1e200, 1e-200], dtype=torch.float64)
    point = torch.tensor([[math.nan, 0.0], [math.inf, 0.0], [9e199, 0.0], [9e-201, 0.0]], dtype=torch.float64)
    assert inside(x, point, radius).tolist() == [False, False, True, True]


def test_points_outside_of_the_ball_do_not_count() -> None:
    model, claims = linear_claims()
    judged = Judge(model, claims.x.shape[1:], torch.device("cpu"))(claims, claims.x + 10 * claims.radius.max())
    assert not bool(judged.counts.any())
    assert not bool(judged.broken.any())


# The command -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def network_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("network") / "mine.safetensors"
    about = {"architecture": "small", "activation": "relu", "input_shape": [1, 28, 28], "classes": 10}
    ll.save_model(path, trained(ll.build_model("small", (1, 28, 28), 10, "relu")), about)
    return path


def called(capsys: pytest.CaptureFixture[str], *args: object) -> tuple[int, str, str]:
    code = cli.main([str(arg) for arg in args])
    printed = capsys.readouterr()
    return code, printed.out, printed.err


def test_the_command_reports(network_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, few = tmp_path / "audit.json", ("--limit", 3, "--attempts", 60, "--seed", 4, "--device", "cpu")
    code, printed, said = called(
        capsys, "audit", network_file, "--data", "embedded", "--eps", "0.05", *few, "--out", out, "--json"
    )
    assert code == 0, said
    found = json.loads(printed)
    assert found == json.loads(out.read_text())
    assert found["settings"]["seed"] == 4
    assert found["settings"]["fingerprint"]
    assert found["report"]["tried"] == sum(kind["tried"] for kind in found["report"]["kinds"].values()) >= 60
    assert found["report"]["broken"] == 0
    assert found["settings"]["norm"] == "2"
    code, printed, _ = called(
        capsys, "audit", network_file, "--data", "embedded", "--eps", "0.001", "--norm", "inf", *few, "--json"
    )
    assert (code, json.loads(printed)["settings"]["norm"]) == (0, "inf")
    assert "certified, with radii from" in said
    assert not out.with_suffix(".safetensors").exists()


class Boastful(Certifier):
    """Proves a thirtieth of the radius that it was asked for."""

    def __call__(self, x: Tensor, y: Tensor, eps: object) -> Certificate:
        return super().__call__(x, y, torch.as_tensor(eps) / 30)


def test_the_command_fails_and_saves_the_point(
    network_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(auditing, "Certifier", Boastful)
    monkeypatch.setattr(auditing.Auditor, "probes", 2)
    out = tmp_path / "audit.json"
    few = ("--limit", 3, "--attempts", 60, "--seed", 4, "--device", "cpu", "--out", out)
    code, printed, said = called(capsys, "audit", network_file, "--data", "embedded", "--eps", "1.5", *few)
    assert code == 1
    assert "CERTIFICATES BROKEN: image" in said
    assert "attack" in printed
    with safe_open(out.with_suffix(".safetensors"), "pt") as file:
        x, point, words = file.get_tensor("0.x"), file.get_tensor("0.point"), file.metadata()["0"]
    model, (clean, y) = ll.load_model(network_file).double(), images(3)
    image = int(words.split()[1])
    assert torch.equal(x, clean[image])
    assert int(model(point[None]).argmax()) != int(y[image])


@pytest.mark.parametrize(
    ("args", "told"),
    [
        (("--attempts", "0"), "--attempts must be at least 1"),
        (("--limit", "0"), "--limit must be at least 1"),
        (("--batch", "0"), "--batch must lie between"),
        (("--seed", "-1"), "--seed must be between"),
        (("--eps", "x"), "--eps"),
        (("--out", "audit.txt"), "ends in .json"),
        (("--out", "nowhere/audit.json"), "there is no folder nowhere"),
        (("--out", "x" * 248 + ".json"), "cannot be written: File name too long"),
        (("--eps", "1e9", "--limit", "1", "--device", "cpu"), "nothing to break"),
    ],
)
def test_what_makes_no_sense_is_said_in_a_sentence(network_file, capsys, args, told) -> None:
    code, _, said = called(capsys, "audit", network_file, "--data", "embedded", "--eps", "0.05", *args)
    assert code == 2
    assert told in said


def test_nothing_that_is_there_is_overwritten(network_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A point that breaks a certificate goes into .safetensors beside the report: that may be the network itself."""
    before = network_file.read_bytes()
    report = network_file.with_suffix(".json")
    options = ("--data", "embedded", "--eps", "0.05", "--limit", 1, "--attempts", 1, "--device", "cpu", "--out")
    code, _, said = called(capsys, "audit", network_file, *options, report)
    assert code == 2
    assert f"{network_file} is there already" in said
    other = report.with_name("other.json")
    other.write_text("mine")
    assert called(capsys, "audit", network_file, *options, other)[0] == 2
    assert (network_file.read_bytes(), other.read_text()) == (before, "mine")


def test_help_names_every_option(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        cli.main(["audit", "--help"])
    text = capsys.readouterr().out
    assert stopped.value.code == 0
    for option in ("--attempts", "--guarantee", "--data-root", "--limit", "--batch", "--seed", "--out", "--json"):
        assert option in text
