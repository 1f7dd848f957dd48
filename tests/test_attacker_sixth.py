"""A sixth round of attempts: what pages say of rows, hints that lie, and many features at once."""

import copy
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import locallip as ll
from locallip import reporting
from locallip.bounds import pullback
from locallip.certify import radius as radius_search
from locallip.certify.inputs import as_eps
from locallip.data import ImageSet
from locallip.norms import Guarantee, NormRule
from locallip.proofs import Job, certify_images
from locallip.proofs.settings import Settings
from locallip.report.explore import Explorer
from locallip.report.runs import Certified, Run
from locallip.zoo import save_model

CPU = torch.device("cpu")
#: Some of the images are certified here, and some are broken.
EPS = "1/2"

# What a page says -----------------------------------------------------------------------------------------------------


class Small(nn.Sequential):
    """A classifier of images of 1 x 4 x 4."""

    def __init__(self) -> None:
        torch.manual_seed(3)
        super().__init__(nn.Flatten(), nn.Linear(16, 12), nn.ReLU(), nn.Linear(12, 3))


def pictures(split: str, seed: int = 0) -> ImageSet:
    images = torch.randint(0, 256, (8, 1, 4, 4), generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)
    with torch.no_grad():
        labels = Small()(images.float() / 255).argmax(1)
    return ImageSet("embedded", split, images, labels, ("one", "two", "three"))  # type: ignore[arg-type]


def told(images: ImageSet, eps: str, guarantee: str = "high_probability") -> tuple[Settings, list[Any]]:
    rows, settings, _ = certify_images(Job("small", eps, Guarantee.parse(guarantee), seed=1), Small().eval(), images)
    return settings, rows


def explored(found: list[tuple[Settings, list[Any]]], eps: str, guarantee: str = "high_probability") -> list[dict[str, Any]]:
    run = Run("small", {}, (), {}, {}, "", [Certified(*one) for one in found])
    explorer = Explorer(Small().eval(), pictures("test"), eps, guarantee, "all")
    return list(reporting._explored(run, "small", explorer, 8).explored["network"]["images"])


def test_rows_at_a_smaller_radius_are_no_verdicts_at_a_larger_one() -> None:
    """`certify --eps 1/1000`, then `report --explore`: images were "certified at 2" beside an attack that succeeds before.

    Catches: verdicts that are taken from rows at any eps.
    """
    rows = told(pictures("test"), "1/1000")
    assert all(row.verdict == "CERTIFIED" for row in rows[1])
    images = explored([rows], "2")
    broken = [image for image in images if image["attacked"] is not None and image["attacked"] <= 2]
    assert len(broken) >= 4
    assert all(image["verdict"] != "CERTIFIED" for image in broken)
    with pytest.raises(ValueError, match="another eps"):
        Explorer(Small().eval(), pictures("test"), "2").run([0], {0: rows[1][0]})


def test_rows_of_training_images_are_no_verdicts_of_test_images() -> None:
    """`certify --split train` and then `report --explore`: every row has an index that a test image has too.

    Catches: rows that are matched by their index alone.
    """
    train, test = told(pictures("train", seed=9), EPS), told(pictures("test"), EPS)
    own = [row.verdict for row in test[1]]
    assert own != [row.verdict for row in train[1]]
    found = explored([train], EPS)
    assert {image["decided_by"] for image in found} == {"exploration"}
    for image in explored([train, test], EPS):
        row = test[1][image["index"]]
        assert (image["verdict"], image["decided_by"]) == (row.verdict, row.decided_by)


def test_a_page_of_deterministic_bounds_takes_no_verdict_that_may_fail() -> None:
    """The page has one line for the guarantee of all that it shows. Catches: rows of any guarantee."""
    test = pictures("test")
    likely, sure = told(test, "1/100"), told(test, "1/100", "deterministic")
    assert {image["decided_by"] for image in explored([likely], "1/100", "deterministic")} == {"exploration"}
    assert "exploration" not in {image["decided_by"] for image in explored([sure], "1/100", "deterministic")}
    assert "exploration" not in {image["decided_by"] for image in explored([sure], "1/100")}
    guessed = told(test, "1/100", "estimate")
    assert {image["decided_by"] for image in explored([guessed], "1/100", "estimate")} == {"exploration"}


def test_a_report_leaves_out_rows_of_the_same_weights_in_another_network(tmp_path: Path) -> None:
    """MaxMin has no weights either, so the fingerprint is the same.

    Catches: rows that are known by their fingerprint alone.
    """
    about = {"architecture": "small", "input_shape": (1, 28, 28), "classes": 10}
    torch.manual_seed(0)
    model = ll.build_model("small", (1, 28, 28), 10, "relu").eval()
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    images = ImageSet("embedded", "test", torch.zeros(2, 1, 28, 28, dtype=torch.uint8), torch.zeros(2).long(), ("x",) * 10)
    save_model(folder / "model.safetensors", model, {**about, "activation": "relu"})
    certify_images(Job("run", "1/100", seed=1, out=folder / "rows.jsonl"), ll.load_model(folder), images)
    assert len(reporting.read_run(str(folder)).certified) == 1
    other = ll.build_model("small", (1, 28, 28), 10, "maxmin")
    other.load_state_dict(model.state_dict())
    save_model(folder / "model.safetensors", other, {**about, "activation": "maxmin"})
    assert len(reporting.read_run(str(folder)).certified) == 0


@pytest.mark.parametrize("other", [ll.MaxMin, nn.LeakyReLU, nn.Tanh])
def test_a_network_is_not_stored_under_the_name_of_another(other: type[nn.Module], tmp_path: Path) -> None:
    """Its weights fit the record, so `locallip certify` would have proved something about a network that nobody has.

    Catches: a record of which nothing but names and shapes of weights is checked.
    """
    about = {"architecture": "small", "activation": "relu", "input_shape": (1, 28, 28), "classes": 10}
    torch.manual_seed(0)
    model = ll.build_model("small", (1, 28, 28), 10, "relu")
    save_model(tmp_path / "right.safetensors", model, about)
    odd = nn.Sequential(*(other() if isinstance(layer, nn.ReLU) else layer for layer in model))
    with pytest.raises(ValueError, match="something else"):
        save_model(tmp_path / "wrong.safetensors", odd, about)
    assert not (tmp_path / "wrong.safetensors").exists()


# What is asked --------------------------------------------------------------------------------------------------------


def test_numbers_of_every_kind_mean_what_they_say() -> None:
    """Arrays and tensors without dimensions, unsigned labels; some of these once ended in an error from inside torch.

    Catches: a radius below the number that was given, or one that is given to the wrong input.
    """
    for eps in (np.array(0.1), np.float32(0.1), np.longdouble("0.1"), torch.tensor(0.1), " 1/10 ", "1e-1"):
        given = Fraction(eps) if isinstance(eps, str) else Fraction(*np.asarray(eps)[()].as_integer_ratio())
        assert all(Fraction(value) >= given for value in as_eps(eps, 3, CPU).tolist())  # type: ignore[arg-type]
    for unordered in ({0.1, 0.2, 0.3}, {0.1: 1, 0.2: 2, 0.3: 3}, b"0.1"):
        with pytest.raises(ValueError, match="neither a number"):
            as_eps(unordered, 3, CPU)  # type: ignore[arg-type]
    x = torch.rand(6, 1, 4, 4, generator=torch.Generator().manual_seed(0))
    y = Small()(x).argmax(1)
    plain = ll.certify(Small(), x, y, 0.2, seed=0).verdicts
    assert ll.Verdict.CERTIFIED in plain
    for kind in (torch.uint8, torch.uint16, torch.uint32, torch.uint64, torch.int8):
        assert ll.certify(Small(), x, y.to(kind), 0.2, seed=0).verdicts == plain
    with pytest.raises(ValueError, match="labels must lie"):
        ll.certify(Small(), x, torch.full((6,), 2**64 - 1, dtype=torch.uint64), 0.2)


def test_a_curve_counts_a_radius_at_itself_and_not_beyond() -> None:
    radii = torch.tensor([0.0, 0.1, 0.1, 0.3], dtype=torch.float64)
    beyond = np.nextafter(0.1, 1)
    for eps, share in ((0.1, 0.75), (beyond, 0.25), ("1/10", 0.75), (0.0, 0.75)):
        for form in (eps, np.array(float(Fraction(eps))), torch.tensor(float(Fraction(eps)), dtype=torch.float64)):
            assert float(ll.certified_accuracy(radii, form)) == share  # type: ignore[arg-type]


@pytest.mark.parametrize("deployed", [None, "float32"])
def test_every_input_has_its_own_verdict_in_any_company(deployed: str | None) -> None:
    """Twins, a NaN, radii from 0 to 1e300 and batches of 1, 2, 3 and 64, on the border of the domain.

    Catches: an index that is lost when what is undecided is packed anew.
    """
    x = torch.rand(10, 1, 4, 4, generator=torch.Generator().manual_seed(2)).mul(2).sub(0.5).clamp(0, 1)
    y = Small()(x).argmax(1)
    x[7], x[8], y[8] = x[2], x[3], (y[3] + 1) % 3
    eps = torch.tensor([0.0, 0.05, 0.3, 1e300, 0.2, 2.0, 1e-300, 0.3, 0.1, 0.4], dtype=torch.float64)
    options: dict[str, Any] = {
        "guarantee": "deterministic",
        "seed": 0,
        "input_domain": (0.0, 1.0),
        "deployed_dtype": deployed,
    }
    alone = [ll.certify(Small(), x[i : i + 1], y[i : i + 1], eps[i], **options) for i in range(10)]
    expected = [one.verdicts[0] for one in alone]
    assert len(set(expected)) == 4 or deployed
    order = torch.randperm(10, generator=torch.Generator().manual_seed(1))
    for size in (1, 2, 3, 64):
        found = ll.certify(Small(), x[order], y[order], eps[order], batch_size=size, **options)
        assert found.verdicts == [expected[i] for i in order]
        assert found.eps.tolist() == eps[order].tolist()
    spoiled = torch.cat([x, torch.full_like(x[:1], float("nan"))])
    found = ll.certify(Small(), spoiled, torch.cat([y, y[:1]]), torch.cat([eps, eps[:1]]), batch_size=3, **options)
    assert found.verdicts == [*expected, ll.Verdict.UNKNOWN]


# Hints that lie -------------------------------------------------------------------------------------------------------


class Liar(NormRule):
    """Says that every norm is a hundredth, or nothing, or no number."""

    guarantee = Guarantee.ESTIMATE

    def __init__(self, says: float):
        self.says = says

    def norm(self, op: Any, key: Any, like: Tensor) -> Tensor:
        return like.new_full((op.batch,), self.says)


@pytest.mark.parametrize("says", [0.0, 0.01, 1e6, float("nan")])
@pytest.mark.parametrize("guarantee", ["deterministic", "high_probability"])
def test_guesses_that_lie_prove_nothing(says: float, guarantee: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The radius of a linear classifier is its lead over ||w_0 - w_1||; a guide that sees no norms must not pass it.

    Catches: a radius that only the guide has seen, a verdict that rests on the guess of what is worth a proof, and slopes
    that count as they were found.
    """
    honest = radius_search._guide

    def lying(prover: Any, seed: int | None) -> Any:
        guide = honest(prover, seed)
        guide.rule = Liar(says)
        guide.ceiling = replace(guide.ceiling, norms=dict.fromkeys(guide.ceiling.norms, torch.full((1,), says).double()))
        return guide

    monkeypatch.setattr(radius_search, "_guide", lying)

    def searched(way: pullback.Way, *args: Any) -> Any:
        return torch.arange(len(way.samples)), [1e3 * a + says for a in way.line_slopes()]

    monkeypatch.setattr(pullback.Way, "searched", searched)
    generator = torch.Generator().manual_seed(0)
    first, last = nn.Linear(6, 6, bias=False).double(), nn.Linear(6, 2, bias=False).double()
    model = nn.Sequential(first, nn.Hardtanh(-1e6, 1e6), last)  # linear wherever it is looked at
    x = torch.randn(4, 6, generator=generator, dtype=torch.float64)
    with torch.no_grad():
        y = model(x).argmax(1)
        whole = (last.weight[0] - last.weight[1]) @ first.weight
        true = (x @ whole).abs() / whole.norm()
    found = ll.certified_radius(model, x, y, guarantee=guarantee, seed=0)
    assert bool((found > 0).all())
    assert bool((found <= true * (1 + 1e-12)).all())
    prover = ll.certify.__globals__["Certifier"](model, (6,), guarantee=guarantee, seed=0, attack_steps=0)
    prover.prover.guess = Liar(says)
    assert ll.Verdict.CERTIFIED not in prover(x, y, true * (1 + 1e-9)).verdicts


@pytest.mark.parametrize("guarantee", ["deterministic", "high_probability"])
def test_a_linear_classifier_in_the_corner_of_its_domain(guarantee: str) -> None:
    """Where most pixels can go one way only, the worst point of ball and domain is known, and the radius is close to it.

    Catches: a box that the domain cuts too far, or that is cut around another point than x.
    """
    generator = torch.Generator().manual_seed(4)
    model = nn.Linear(8, 2).double()
    with torch.no_grad():
        model.weight.copy_(torch.randn(2, 8, generator=generator))
        slope = model.weight[1] - model.weight[0]
    x = torch.tensor([[0.0, 1.0, 0.0, 1.0, 0.0, 1.0, 0.25, 0.5]], dtype=torch.float64)
    with torch.no_grad():
        most = torch.maximum(slope * (1 - x[0]), -slope * x[0]).sum()  # what class 1 can gain in the whole domain
        model.bias.copy_(torch.tensor([0.7, 0.0]) * most - model.weight @ x[0])
    found = ll.certified_radius(model, x, torch.tensor([0]), input_domain=(0.0, 1.0), guarantee=guarantee, seed=0)
    for factor, safe in ((1.0, True), (1.01, False)):
        # The ray x + t slope, cut to the domain, has the worst point of every ball.
        low, high = 0.0, 1e3
        for _ in range(100):
            t = (low + high) / 2
            point = (x + t * slope).clamp(0, 1)
            low, high = (t, high) if float((point - x).norm()) < factor * float(found) else (low, t)
        assert (float(lead_of(model(point), torch.tensor([0])).detach()) > 0) == safe


# Many features at once ------------------------------------------------------------------------------------------------


class Everything(nn.Module):
    """Normalize, convolutions, batch norm, sums over an activation, max pooling and dense layers."""

    def __init__(self, act: nn.Module):
        super().__init__()
        self.normalize, self.first, self.norm = ll.Normalize([0.48], [0.2]), nn.Conv2d(1, 4, 3, 1, 1), nn.BatchNorm2d(4)
        self.second, self.act, self.pool = nn.Conv2d(4, 4, 3, 1, 1), act, nn.MaxPool2d(2)
        self.dense, self.last = nn.Linear(16, 6), nn.Linear(6, 3)
        with torch.no_grad():
            for values in (self.norm.running_mean, self.norm.weight, self.norm.bias):
                values.normal_()  # type: ignore[union-attr, operator]
            self.norm.running_var.uniform_(0.2, 3)  # type: ignore[union-attr, operator]

    def forward(self, x: Tensor) -> Tensor:
        z = self.act(self.norm(self.first(self.normalize(x))))
        z = F.relu(z - 0.5 * self.second(z)) + z
        return self.last(F.relu(self.dense(self.pool(z).flatten(1))))


@pytest.mark.parametrize("number", range(2))
def test_radii_of_everything_together(number: int) -> None:
    """Pixels on the border, with and without a domain, for real numbers and for float32: no search gets past a radius.

    Catches: a box that is cut too far by the domain, masks or slopes that leave something out.
    """
    torch.manual_seed(number)
    model = Everything([ll.ReLUTheta((4, 4, 4), init=0.5), ll.ClippedMaxMin((2, 4, 4), 0.5, -0.5)][number]).eval()
    x = torch.rand(1, 1, 4, 4).mul(2).sub(0.5).clamp(0, 1)
    with torch.no_grad():  # a small lead has a small ball, where bounds are close
        model.last.bias.sub_(model(x)[0]).add_(torch.tensor([0.01, 0.0, 0.0]))
    x = (x + 1e-3 * torch.rand(4, 1, 4, 4)).clamp(0, 1)
    y = model(x).argmax(1)
    exact = copy.deepcopy(model).double()
    for options in ({"input_domain": (0.0, 1.0), "deployed_dtype": "float32"}, {}):
        radii = ll.certified_radius(model, x, y, guarantee="deterministic", **options)  # type: ignore[arg-type]
        assert bool((radii > 0).any())
        far = torch.cat([radii, 8 * radii])  # the search itself must be able to find something
        found = worst_lead(exact, model, torch.cat([x, x]), torch.cat([y, y]), far, "input_domain" in options)
        assert bool((found[:4] > 0).all())
        assert bool((found[4:] < 0).any())


def worst_lead(exact: nn.Module, model: nn.Module, x: Tensor, y: Tensor, radii: Tensor, inside: bool) -> Tensor:
    """The least lead that gradient ascent finds, in float64 and at the points that float32 holds; (B,)."""
    least = torch.full_like(radii, float("inf"))
    for seed in range(3):
        numbers = torch.Generator().manual_seed(seed)
        delta = torch.randn(x.shape, generator=numbers, dtype=torch.float64)
        for _ in range(25):
            size = delta.flatten(1).norm(dim=1).clamp(min=1e-30)
            delta = delta * ((1 - 1e-6) * radii / size).clamp(max=1).reshape(-1, 1, 1, 1)
            point = x.double() + delta
            point = (point.clamp(0, 1) if inside else point).float().double().requires_grad_()
            lead = lead_of(exact(point), y)
            (slope,) = torch.autograd.grad(lead.sum(), point)
            with torch.no_grad():
                held = (point - x.double()).flatten(1).norm(dim=1) <= radii
                both = torch.minimum(lead, lead_of(model(point.float()).double(), y)) if inside else lead
                least = torch.where(held, torch.minimum(least, both), least)
                slope = slope / slope.flatten(1).norm(dim=1).clamp(min=1e-30).reshape(-1, 1, 1, 1)
                delta = point.detach() - x.double() - 0.3 * radii.reshape(-1, 1, 1, 1) * slope
    return least


def lead_of(logits: Tensor, y: Tensor) -> Tensor:
    others = logits.scatter(1, y[:, None], -float("inf")).amax(1)
    return logits.gather(1, y[:, None])[:, 0] - others
