"""Attackers: they break what can be broken, never leave the ball, and what they report is checked again."""

from __future__ import annotations

import importlib.util
import json
import math
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import locallip as ll
from locallip import cli
from locallip.attacks import (
    MissingAttack,
    apgd_l2,
    apgd_targets,
    attack_in_turn,
    autoattack_attempts,
    margins,
    pgd_attack,
    pgd_l2,
    strong_attack,
    strong_attempts,
)
from locallip.attacks.apgd import _checked, checkpoints, targeted_dlr
from locallip.breaking import read_attack_rows
from locallip.breaking import run as breaking_run
from locallip.certify.confirm import Judge
from locallip.data import load_images
from locallip.proofs import read_rows
from locallip.proofs.settings import about_file
from tests.small_network import stored_network

EPS, COUNT = "0.3", 24
CPU = torch.device("cpu")


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def linear(classes: int, dtype: torch.dtype, seed: int = 0) -> tuple[nn.Linear, Tensor, Tensor, Tensor]:
    """A linear classifier, 60 inputs, their classes, and their exact distances from the nearest other class."""
    layer = nn.Linear(12, classes, dtype=torch.float64)
    with torch.no_grad():
        layer.weight.copy_(torch.randn(classes, 12, generator=seeded(seed), dtype=torch.float64))
    x = torch.randn(60, 12, generator=seeded(seed + 1), dtype=torch.float64)
    z = layer(x).detach()
    y = z.argmax(1)
    apart = (layer.weight[None] - layer.weight[y][:, None]).norm(dim=2).detach()
    gaps = (z.gather(1, y[:, None]) - z) / apart
    distance = gaps.masked_fill(F.one_hot(y, classes).bool(), math.inf).amin(1)
    return layer.to(dtype), x.to(dtype), y, distance.to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("classes", [2, 3, 4, 7])
def test_targets_break_a_linear_network_just_beyond_the_distance_and_never_below(classes, dtype):
    layer, x, y, distance = linear(classes, dtype)
    beyond = apgd_targets(layer, x, y, 1.01 * distance, generator=seeded())
    assert bool((margins(layer(beyond), y) < 0).all())
    below = apgd_targets(layer, x, y, 0.99 * distance, generator=seeded())
    assert bool((margins(layer(below), y) > 0).all())
    assert beyond.dtype == dtype


def test_cross_entropy_breaks_a_linear_network_of_two_classes_just_beyond_the_distance():
    layer, x, y, distance = linear(2, torch.float64)
    assert bool((margins(layer(apgd_l2(layer, x, y, 1.01 * distance, generator=seeded())), y) < 0).all())
    assert bool((margins(layer(apgd_l2(layer, x, y, 0.99 * distance, generator=seeded())), y) > 0).all())


def test_each_sample_has_its_own_radius():
    layer, x, y, distance = linear(4, torch.float64)
    share = torch.where(torch.arange(60) % 2 == 0, 1.01, 0.99)
    outcome = strong_attack(layer, x, y, share * distance, steps=30, generator=seeded())
    assert torch.equal(outcome.broken, share > 1)


def narrow(center: Tensor, radius: float) -> nn.Module:
    """Class 1 wins inside a small ball around `center` and nowhere else."""

    class Narrow(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            far = (x - center).square().sum(1) - radius**2
            return torch.stack([far, torch.zeros_like(far)], 1)

    return Narrow()


def test_steps_shrink_where_fixed_ones_jump_over_the_mark():
    """The mark lies inside the ball and is smaller than PGD's steps of eps / 4 can meet but by luck."""
    x, y, eps = torch.zeros(20, 8), torch.zeros(20, dtype=torch.long), torch.ones(20)
    network = narrow(F.normalize(torch.randn(8, generator=seeded(3)), dim=0) * 0.6, 0.05)
    fixed = margins(network(pgd_l2(network, x, y, eps, steps=100, generator=seeded())), y) < 0
    own = margins(network(apgd_l2(network, x, y, eps, steps=100, generator=seeded())), y) < 0
    assert int(fixed.sum()) < 10
    assert int(own.sum()) == 20


def test_saturated_cross_entropy_hides_nothing_from_targets():
    """Logits so large that softmax is exactly 0 or 1 in float32: cross entropy has no gradient, the DLR loss has one."""
    layer, x, y, distance = linear(5, torch.float32)
    masked = lambda z: 1e4 * layer(z)  # noqa: E731
    clear = margins(layer(x), y) > 0.2
    x, y, eps = x[clear], y[clear], 1.01 * distance[clear]
    by_cross_entropy = margins(masked(pgd_attack(masked, x, y, eps, generator=seeded())), y) < 0
    by_targets = margins(masked(apgd_targets(masked, x, y, eps, generator=seeded())), y) < 0
    assert int(by_cross_entropy.sum()) < len(x) / 2
    assert bool(by_targets.all())


@pytest.mark.parametrize("scale", [1e-25, 1e25])
def test_the_size_of_gradients_does_not_matter(scale):
    """Squares of these gradients are 0 or infinite in float32; with three classes no denominator takes the scale away."""
    layer, x, y, distance = linear(3, torch.float32)
    found = apgd_targets(lambda z: scale * layer(z), x, y, 1.01 * distance, generator=seeded())
    assert bool((margins(layer(found), y) < 0).all())


ATTACKS = {
    "pgd": lambda *args, **more: pgd_attack(*args, steps=7, pack_every=3, **more),
    "apgd-ce": lambda *args, **more: apgd_l2(*args, steps=9, **more),
    "apgd-t": lambda *args, **more: apgd_targets(*args, steps=9, targets=2, **more),
}


def small_network(classes: int, seed: int, dtype: torch.dtype) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return nn.Sequential(nn.Flatten(), nn.Linear(18, 10), nn.ReLU(), nn.Linear(10, classes)).to(dtype)


@pytest.mark.parametrize("name", ATTACKS)
@settings(max_examples=25)
@given(
    seed=st.integers(0, 10**6),
    size=st.floats(-4, 1).map(lambda power: 10**power),
    classes=st.integers(2, 6),
    domain=st.sampled_from([None, (0.0, 1.0)]),
    dtype=st.sampled_from([torch.float64, torch.float32]),
)
def test_points_stay_in_ball_and_domain(name, seed, size, classes, domain, dtype):
    network = small_network(classes, seed, dtype)
    x = torch.rand(4, 2, 3, 3, generator=seeded(seed), dtype=dtype)
    y = torch.randint(0, classes, (4,), generator=seeded(seed))
    eps = size * torch.tensor([0.0, 0.5, 1.0, 2.0], dtype=dtype)
    found = ATTACKS[name](network, x, y, eps, input_domain=domain, generator=seeded(seed))
    assert (found.shape, found.dtype) == (x.shape, dtype)
    length = (found.double() - x.double()).flatten(1).norm(dim=1)
    # In float32, x + delta itself rounds by 6e-8 per pixel, which no shrink of a tiny ball covers.
    allowed = 0.0 if dtype == torch.float64 else 18**0.5 * 6e-8 * float(found.abs().max())
    assert bool((length <= eps.double() + allowed).all())
    assert bool((found >= 0).all() & (found <= 1).all()) or domain is None
    assert torch.equal(found[0], x[0])


@pytest.mark.parametrize("name", ATTACKS)
def test_the_same_seed_gives_the_same_points_and_batches_do_not_matter(name):
    network = small_network(5, 0, torch.float64)
    x = torch.rand(9, 2, 3, 3, generator=seeded(5), dtype=torch.float64)
    y = network(x).argmax(1)
    eps = torch.full((9,), 0.1, dtype=torch.float64)
    first = ATTACKS[name](network, x, y, eps, generator=seeded(1))
    assert torch.equal(first, ATTACKS[name](network, x, y, eps, generator=seeded(1)))
    assert not torch.equal(first, ATTACKS[name](network, x, y, eps, generator=seeded(2)))
    torch.testing.assert_close(first, ATTACKS[name](network, x, y, eps, generator=seeded(1), batch_size=2))


@pytest.mark.parametrize("name", ATTACKS)
def test_none_and_one_sample(name):
    network = small_network(5, 0, torch.float32)
    for count in (0, 1):
        x = torch.rand(count, 2, 3, 3)
        y = torch.zeros(count, dtype=torch.long)
        assert ATTACKS[name](network, x, y, torch.ones(count)).shape == x.shape


@pytest.mark.parametrize("name", ATTACKS)
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_logits_that_are_no_numbers_are_no_success(name, value):
    network = small_network(5, 0, torch.float32)
    with torch.no_grad():
        network[3].bias.fill_(value)
    x, y = torch.rand(3, 2, 3, 3), torch.zeros(3, dtype=torch.long)
    found = ATTACKS[name](network, x, y, torch.ones(3))
    assert bool(torch.isfinite(found).all())
    assert not strong_attack(network, x, y, torch.ones(3), steps=5).broken.any()


def test_a_hole_of_nans_does_not_stop_the_search():
    layer, x, y, distance = linear(4, torch.float64)

    def holed(points: Tensor) -> Tensor:
        inside = (points - x[:1]).norm(dim=1) < 0.5 * distance[0]
        return torch.where(inside[:, None], float("nan"), layer(points))

    found = apgd_targets(holed, x[:1], y[:1], 1.5 * distance[:1], generator=seeded())
    assert bool((margins(layer(found), y[:1]) < 0).all())


def test_who_has_fallen_is_not_looked_at_again():
    layer, x, y, distance = linear(4, torch.float64)
    seen = []

    def counting(points: Tensor) -> Tensor:
        seen.append(len(points))
        return layer(points)

    easy, hard = 20 * distance[:50], 0.5 * distance[50:]
    apgd_l2(counting, x, y, torch.cat([easy, hard]), steps=100, generator=seeded())
    assert seen[0] == 60
    assert len(seen) == 101
    assert sum(seen) < 60 * 23 + 15 * 78


def test_who_does_not_get_on_goes_back_to_the_best_point_with_half_the_step():
    """Four samples behind eight steps: rising, rising too seldom, standing still, and standing still behind a halving."""
    rises, best, before = torch.tensor([6, 5, 8, 8]), torch.tensor([2.0, 2.0, 1.0, 1.0]), torch.ones(4)
    state = {
        "reach": torch.ones(4, 1),
        "point": torch.full((4, 1), 0.1),
        "previous": torch.full((4, 1), 0.2),
        "slope": torch.full((4, 1), 0.3),
        "value": torch.full((4,), 0.5),
        "best": torch.full((4, 1), 0.7),
        "best_slope": torch.full((4, 1), 0.8),
        "best_value": best,
        "best_before": before,
        "step": torch.full((4,), 2.0),
        "halved": torch.tensor([False, False, False, True]),
        "rises": rises,
    }
    found = _checked(state, 8)
    assert found["halved"].tolist() == [False, True, True, False]
    assert found["step"].tolist() == [2.0, 1.0, 1.0, 2.0]
    for name, old, new in (("point", 0.1, 0.7), ("previous", 0.2, 0.7), ("slope", 0.3, 0.8)):
        torch.testing.assert_close(found[name][:, 0], torch.tensor([old, new, new, old]))
    torch.testing.assert_close(found["value"], torch.tensor([0.5, 2.0, 1.0, 0.5]))
    assert found["rises"].tolist() == [0, 0, 0, 0]
    assert torch.equal(found["best_before"], best)


def test_checkpoints_are_those_of_the_paper():
    assert checkpoints(100) == [22, 41, 57, 70, 80, 87, 93, 99, 100]
    assert checkpoints(1) == [1]
    assert checkpoints(0) == []
    for steps in range(2, 40):
        assert checkpoints(steps)[-1] == steps
        assert sorted(set(checkpoints(steps))) == checkpoints(steps)


def test_targeted_dlr_by_hand():
    z = torch.tensor([[3.0, 1.0, 5.0, 2.0, -1.0]])
    y, target = torch.tensor([2]), torch.tensor([1])
    assert float(targeted_dlr(z, y, target)) == pytest.approx((1.0 - 5.0) / (5.0 - (2.0 + 1.0) / 2))
    assert float(targeted_dlr(10 * z, y, target)) == pytest.approx(float(targeted_dlr(z, y, target)))
    assert float(targeted_dlr(z[:, :3], y, target)) == -4.0


def test_each_attack_sees_what_is_left():
    layer, x, y, distance = linear(4, torch.float64)
    told = []
    attempts = strong_attempts(layer, steps=5, restarts=2, generator=seeded())
    outcome = attack_in_turn(
        attempts, x, y, distance * 1.005, lambda x, p, y, eps: margins(layer(p), y) < 0, lambda *what: told.append(what)
    )
    assert [name for name, _, _ in told] == ["pgd", "pgd", "apgd-ce", "apgd-ce", "apgd-t", "apgd-t"][: len(told)]
    left = 60
    for number, (_, tried, fell) in enumerate(told):
        assert tried == left
        assert fell == int((outcome.by == number).sum())
        left -= fell
    assert left == int((~outcome.broken).sum())
    assert torch.equal(outcome.points[~outcome.broken], x[~outcome.broken])


def test_auto_pgd_is_at_least_as_strong_as_pgd_on_a_shipped_network():
    network, images = ll.load_model("mnist-4c3f-local-g"), load_images("embedded", "test")
    x, y = images.images[:10].float() / 255, images.labels[:10]
    eps = torch.full((10,), 1.58)
    by_pgd = margins(network(pgd_attack(network, x, y, eps, generator=seeded())), y) < 0
    found = apgd_targets(network, x, y, eps, targets=1, generator=seeded())
    by_apgd = margins(network(found), y) < 0
    assert 0 < int(by_pgd.sum()) <= int(by_apgd.sum()) < 10


def test_the_judge_pulls_points_into_the_ball_and_counts_no_ties():
    layer, x, y, distance = linear(3, torch.float64)
    judge = Judge(layer, (12,), CPU)
    rest = F.one_hot(y, 3).bool()
    gaps = (layer(x).gather(1, y[:, None]) - layer(x)).masked_fill(rest, math.inf)
    apart = (layer.weight[None] - layer.weight[y][:, None]).norm(dim=2)
    other = (gaps / apart).argmin(1)
    toward = F.normalize(layer.weight[other] - layer.weight[y], dim=1).detach()
    far = x + 3 * distance[:, None] * toward
    outside = judge.look(x, far, y, 0.99 * distance)
    assert not outside.broken.any()
    assert bool((outside.distance <= 0.99 * distance).all())
    reached = judge.look(x, far, y, 1.01 * distance)
    assert bool(reached.broken.all())
    torch.testing.assert_close(reached.distance, 1.01 * distance, rtol=1e-6, atol=0)
    nan = far.clone()
    nan[:, 0] = math.nan
    assert not judge.look(x, nan, y, 1.01 * distance).broken.any()
    with torch.no_grad():
        layer.weight.fill_(0.5), layer.bias.fill_(1.0)
    tied = Judge(layer, (12,), CPU)
    assert tied.predictions(x).tolist() == [-1] * 60
    assert not tied.look(x, far, y, 9 * distance).broken.any()


def test_autoattack_is_asked_for_by_its_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "pyautoattack", None)
    with pytest.raises(MissingAttack, match=r"pip install 'locallip\[attack\]'"):
        autoattack_attempts(small_network(5, 0, torch.float32), 5, seed=0)


@pytest.mark.skipif(importlib.util.find_spec("pyautoattack") is None, reason="the extra 'attack' is not installed")
def test_autoattack_breaks_a_linear_network_and_leaves_the_random_numbers_alone():
    layer, x, _, _ = linear(5, torch.float32)
    model = nn.Sequential(nn.Flatten(), layer)
    x = torch.sigmoid(x).reshape(60, 1, 3, 4) * 0.5 + 0.25
    y = model(x).argmax(1)
    before = torch.random.get_rng_state()
    for attempt in autoattack_attempts(model, 5, seed=0, parts=("apgd-ce", "apgd-t", "fab-t")):
        for eps, few in ((2.0, False), (1e-4, True)):
            found = attempt.search(x, y, torch.full((60,), eps))
            fell = int((model(found).argmax(1) != y).sum())
            assert fell < 3 if few else fell > 57
    assert torch.equal(before, torch.random.get_rng_state())
    with pytest.raises(MissingAttack, match="at least 4 classes"):
        autoattack_attempts(model, 3, seed=0)


@pytest.fixture(scope="module")
def network_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return stored_network(tmp_path_factory.mktemp("network"), steps=40)


@pytest.fixture(scope="module")
def certified(network_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Rows of `locallip certify` for it."""
    path = tmp_path_factory.mktemp("rows") / "certified.jsonl"
    args = ["certify", network_file, "--data", "embedded", "--eps", EPS, "--limit", COUNT, "--out", path, "--device", "cpu"]
    assert cli.main([str(arg) for arg in args]) == 0
    return path


@pytest.fixture
def attack(network_file, capsys):
    """`locallip attack` on a few images, in this process: code, stdout, stderr."""

    def called(*more):
        common = ["--data", "embedded", "--limit", COUNT, "--steps", 6, "--seed", 1, "--device", "cpu"]
        eps = [] if "--eps" in more else ["--eps", EPS]
        try:
            code = cli.main([str(word) for word in ["attack", network_file, *common, *eps, *more]])
        except SystemExit as exit:  # the parser of options leaves this way
            code = exit.code
        found = capsys.readouterr()
        return code, found.out, found.err

    return called


def test_the_command_says_what_it_found_and_that_it_is_no_proof(attack):
    code, out, err = attack()
    assert code == 0
    assert "broken by" in out
    assert "upper bound of the robust accuracy and no proof" in out
    assert f"{COUNT} of {COUNT} images" in err


def test_rows_and_summary_agree_and_every_kind_can_be_asked_for(attack, network_file, tmp_path):
    stands = {}
    for kind in ("pgd", "apgd", "strong"):
        out = tmp_path / f"{kind}.jsonl"
        code, printed, _ = attack("--attack", kind, "--out", out, "--json")
        assert code == 0
        about = json.loads(printed)
        assert {"rows": out.suffix, **about} == json.loads(out.with_suffix(".json").read_text())
        rows = [json.loads(line) for line in out.read_text().splitlines()]
        summary, settings = about["summary"], about["settings"]
        assert [row["index"] for row in rows] == list(range(COUNT))
        assert summary["broken"] == sum(row["broken"] for row in rows) > 0
        assert sum(summary["broken_by"].values()) == summary["broken"]
        assert all(0 < row["distance"] <= 0.3 for row in rows if row["broken"])
        assert all(row["by"] is None and row["distance"] is None for row in rows if not row["broken"])
        right = [row["prediction"] == row["label"] for row in rows]
        assert summary["correct"] == pytest.approx(100 * sum(right) / COUNT)
        assert summary["robust_at_most"] == pytest.approx(100 * (sum(right) - summary["broken"]) / COUNT)
        assert (settings["attack"], settings["seed"], settings["steps"]) == (kind, 1, 6)
        assert settings["fingerprint"]
        stands[kind] = summary["robust_at_most"]
    assert stands["strong"] <= stands["pgd"]


def test_the_same_seed_gives_the_same_rows_whatever_the_batches(attack, tmp_path):
    for name, batch in (("one", COUNT), ("two", COUNT), ("three", 5)):
        assert attack("--attack", "pgd", "--out", tmp_path / f"{name}.jsonl", "--batch", batch)[0] == 0
    assert (tmp_path / "one.jsonl").read_bytes() == (tmp_path / "two.jsonl").read_bytes()
    one, three = ((tmp_path / f"{name}.jsonl").read_text().splitlines() for name in ("one", "three"))
    assert [json.loads(line)["broken"] for line in one] == [json.loads(line)["broken"] for line in three]


def test_pixels_keeps_to_images_and_can_only_break_less(attack):
    whole, pixels = (
        json.loads(attack("--attack", "pgd", "--json", *more)[1])["summary"]["broken"] for more in ((), ("--pixels",))
    )
    assert pixels <= whole


def test_certificates_that_hold_are_said_to_hold(attack, certified):
    code, out, _ = attack("--attack", "apgd", "--certified", certified)
    assert code == 0
    count = sum(row.verdict == "CERTIFIED" for row in read_rows(certified))
    assert count > 0
    assert f"of {count} images that are certified in certified.jsonl, none was broken" in out


def forged(source: Path, to: Path, guarantee: str | None = None) -> int:
    """Rows in which one attacked image is called certified; its index."""
    rows = [json.loads(line) for line in source.read_text().splitlines()]
    true = next(row for row in rows if row["verdict"] == "CERTIFIED")
    false = next(row for row in rows if row["verdict"] == "ATTACKED")
    false.update({**true, "index": false["index"], "label": false["label"], "prediction": false["prediction"]})
    about = json.loads(about_file(source).read_text())
    if guarantee is not None:
        changed = {"guarantee": guarantee, "failure_prob": 0.0}
        about["settings"].update(changed)
        rows = [{**row, **changed} for row in rows]
    to.write_text("".join(json.dumps(row) + "\n" for row in rows))
    about_file(to).write_text(json.dumps(about))
    return false["index"]


def test_a_broken_certificate_is_an_error(attack, certified, tmp_path):
    index = forged(certified, tmp_path / "forged.jsonl")
    code, out, err = attack("--certified", tmp_path / "forged.jsonl", "--out", tmp_path / "attack.jsonl")
    assert code == 1
    assert "CERTIFICATES BROKEN: 1 of" in err
    assert f"are not: {index}." in err
    assert "none was broken" not in out
    rows = [json.loads(line) for line in (tmp_path / "attack.jsonl").read_text().splitlines()]
    assert rows[index]["broken"]
    assert json.loads((tmp_path / "attack.json").read_text())["summary"]["against"]["broken"] == [index]


def test_a_broken_estimate_is_none(attack, certified, tmp_path):
    forged(certified, tmp_path / "estimate.jsonl", guarantee="estimate")
    code, out, _ = attack("--attack", "pgd", "--certified", tmp_path / "estimate.jsonl")
    assert code == 0
    assert "estimated robust in estimate.jsonl (no proof), 1 were broken" in out


@pytest.mark.parametrize(
    ("more", "told"),
    [
        (["--eps", "0.4"], "is about eps 0.3, and an attack with eps 0.4 goes beyond that"),
        (["--split", "train"], "is about other images"),
    ],
)
def test_rows_of_something_else_are_refused(attack, certified, more, told):
    code, _, err = attack("--certified", certified, *more)
    assert code == 2
    assert told in err


def test_rows_of_other_weights_are_refused(certified, tmp_path, capsys):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        model = ll.build_model("small", (1, 28, 28), 10, "relu")
    about = {"architecture": "small", "activation": "relu", "input_shape": [1, 28, 28], "classes": 10}
    ll.save_model(tmp_path / "other.safetensors", model.eval(), about)
    args = ["attack", tmp_path / "other.safetensors", "--data", "embedded", "--eps", EPS, "--certified", certified]
    assert cli.main([str(arg) for arg in args]) == 2
    assert "is about other weights" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("more", "code", "told"),
    [
        (["--steps", "0"], 2, "--steps must lie between"),
        (["--restarts", "0"], 2, "--restarts must lie between"),
        (["--limit", "0"], 2, "--limit must be at least 1"),
        (["--batch", "0"], 2, "--batch must lie between"),
        (["--seed", "-1"], 2, "--seed must be between"),
        (["--eps", "0"], 2, "--eps must be a positive number"),
        (["--eps", "wide"], 2, "--eps"),
        (["--data", "mnits"], 2, "--data mnits: choose one of"),
        (["--device", "tpu"], 2, "--device tpu"),
        (["--attack", "fgsm"], 2, "fgsm"),
        (["--step", "10"], 2, "--steps"),
        (["--attack", "autoattack", "--steps", "10"], 2, "do not go with --attack autoattack"),
        (["--out", "rows.csv"], 2, "ends in .jsonl"),
        (["--out", "x" * 247 + ".jsonl"], 2, "cannot be written: File name too long"),
        (["--out", "nowhere/rows.jsonl"], 2, "there is no folder nowhere"),
        (["--certified", "nowhere.jsonl"], 2, "there is no nowhere.jsonl"),
    ],
)
def test_wrong_calls_are_explained(attack, more, code, told):
    found, _, err = attack(*more)
    assert (found, told in err) == (code, True), err


def test_rows_that_are_there_are_not_overwritten(attack, tmp_path):
    (tmp_path / "rows.jsonl").write_text("mine\n")
    code, _, err = attack("--out", tmp_path / "rows.jsonl")
    assert code == 2
    assert "is there already: go on with --resume, or name another --out" in err
    assert (tmp_path / "rows.jsonl").read_text() == "mine\n"


def test_an_attack_cut_off_anywhere_goes_on_to_the_same_rows(attack, tmp_path):
    few = ("--attack", "pgd", "--batch", 3)
    whole, cut = tmp_path / "whole.jsonl", tmp_path / "cut.jsonl"
    code, printed, _ = attack(*few, "--out", whole, "--json")
    assert code == 0
    content, about = whole.read_bytes(), json.loads(printed)
    assert about["run"]["images"] == COUNT
    for share, chunks in ((0.0, 0), (0.4, 1), (0.77, 3), (1.0, 4)):  # of four, with six images each
        cut.write_bytes(content[: int(share * len(content))])
        cut.with_suffix(".json").write_text(json.dumps({**about, "summary": None, "run": None}))
        code, printed, err = attack(*few, "--out", cut, "--resume", "--json")
        assert code == 0
        assert cut.read_bytes() == content
        again = json.loads(printed)
        assert {"rows": cut.suffix, **again} == json.loads(cut.with_suffix(".json").read_text())
        assert (again["settings"]["seed"], again["summary"]) == (about["settings"]["seed"], about["summary"])
        assert again["run"]["images"] == COUNT - 6 * chunks
        assert (f"{6 * chunks} images were attacked before; {COUNT - 6 * chunks} to go" in err) == (chunks > 0)


def test_rows_are_there_before_the_attack_ends(attack, tmp_path, monkeypatch):
    """Ctrl-C in the third chunk leaves two, and says how to go on."""
    rows, made = tmp_path / "rows.jsonl", []
    attacked = breaking_run._Chunk.rows

    def stopped(chunk):
        made.append(chunk)
        if len(made) == 3:
            raise KeyboardInterrupt
        return attacked(chunk)

    with monkeypatch.context() as patch:
        patch.setattr(breaking_run._Chunk, "rows", stopped)
        code, out, err = attack("--attack", "pgd", "--batch", 3, "--out", rows)
    assert (code, out) == (130, "")
    assert f"the rows so far are in {rows}: the same command with --resume goes on" in err
    assert [row.index for row in read_attack_rows(rows)] == list(range(12))
    assert json.loads(rows.with_suffix(".json").read_text())["summary"] is None
    assert attack("--attack", "pgd", "--batch", 3, "--out", rows, "--resume")[0] == 0
    assert len(read_attack_rows(rows)) == COUNT


def test_an_attack_goes_on_with_its_own_rows_alone(attack, certified, tmp_path):
    rows = tmp_path / "rows.jsonl"
    few = ("--attack", "pgd", "--batch", 3, "--out", rows)
    assert attack(*few)[0] == 0
    lines = rows.read_text().splitlines(keepends=True)
    place = next(i for i, line in enumerate(lines) if json.loads(line)["broken"])
    for changes, told in (
        ({"label": 10}, "its label is 10"),
        ({"broken": False}, "broken is False, by pgd"),
        ({"distance": 1.0}, "broken at the distance 1.0 in a ball of radius"),
        ({"prediction": 10}, "it is broken with prediction 10"),
        ({"index": 99}, "are not those of the images 0, 1, 2"),
        ({"broken": 1}, "broken = '1' is not what it should be"),
        ({"more": 1}, "has the fields"),
    ):
        forged = json.dumps({**json.loads(lines[place]), **changes}) + "\n"
        rows.write_text("".join([*lines[:place], forged, *lines[place + 1 :]]))
        code, _, err = attack(*few, "--resume")
        assert (code, told in err) == (2, True), err
    rows.write_text("".join(lines))
    code, _, err = attack(*few, "--resume", "--pixels")
    assert (code, "is of another run: pixels was False and is True" in err) == (2, True)
    code, _, err = attack("--out", certified, "--resume")
    assert (code, "is not of `locallip attack`: name another --out" in err) == (2, True)
    code, _, err = attack("--resume")
    assert (code, "name them with --out" in err) == (2, True)
    assert rows.read_text() == "".join(lines)


@pytest.mark.parametrize(
    ("lines", "ended", "told"),
    [
        (0, True, "has no rows for 24 images"),
        (5, True, "has 5 rows for 24 images"),
        (5, False, "has 5 rows for 24 images"),
        (5.5, False, "has 5 rows for 24 images"),
        (24, False, "has 24 rows for 24 images"),
        (None, False, "has no rows for 24 images"),
    ],
)
def test_certificates_of_a_run_that_has_not_ended_are_refused(attack, certified, tmp_path, lines, ended, told):
    rows, all_lines = tmp_path / "rows.jsonl", certified.read_text().splitlines(keepends=True)
    if lines is not None:
        half = all_lines[int(lines)][:20] if lines != int(lines) else ""
        rows.write_text("".join(all_lines[: int(lines)]) + half)
    about = json.loads(about_file(certified).read_text())
    about_file(rows).write_text(json.dumps(about if ended else {**about, "summary": None}))
    code, out, err = attack("--certified", rows)
    assert (code, out) == (2, "")
    assert f"{rows} {told}: `locallip certify` has not ended, or rows are missing" in err
    assert "with --resume, then attack" in err


def test_without_the_extra_the_command_says_what_to_install(attack, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyautoattack", None)
    code, _, err = attack("--attack", "autoattack", "--steps", "100")
    assert code == 3
    assert "pip install 'locallip[attack]'" in err


def test_help_lists_the_options(attack):
    code, out, _ = attack("--help")
    assert code == 0
    for option in ("--attack", "--steps", "--restarts", "--certified", "--out", "--pixels", "--seed", "--json"):
        assert option in out
