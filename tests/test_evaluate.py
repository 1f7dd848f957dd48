"""Evaluation: every column against what it is defined by, on networks small enough to know the answer."""

from __future__ import annotations

import copy
import json
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import locallip as ll
from locallip.attacks import margins, pgd_l2, withstands
from locallip.certify.inputs import as_eps
from locallip.models import convolutional_network
from locallip.norms import ExactNorm
from locallip.training import evaluate as module
from locallip.training.evaluate import evaluate

EPS = "1/15"
SHARES = ("clean", "pgd", "estimate", "certified", "global_certified")


def pictures(count: int, labels=None, seed: int = 0) -> SimpleNamespace:
    generator = torch.Generator().manual_seed(seed)
    pixels = torch.randint(0, 256, (count, 1, 6, 6), dtype=torch.uint8, generator=generator)
    labels = torch.randint(0, 3, (count,), generator=generator) if labels is None else labels
    return SimpleNamespace(images=pixels, labels=labels, split="test")


@pytest.fixture(scope="module")
def trained():
    """A small convolutional network and 60 pictures of three kinds, mostly right, robust for some only."""
    images = pictures(60)
    torch.manual_seed(6)
    # In float64 the weights do not depend on the number of threads.
    model = convolutional_network(((6, 3, 1, 1), (6, 4, 2, 1)), (12,), (1, 6, 6), 3).double()
    x = images.images.double() / 255
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    for _ in range(150):
        size = sum(p.square().sum() for p in model.parameters())
        loss = nn.functional.cross_entropy(model(x[:48]), images.labels[:48]) + 5e-3 * size
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model.float(), images


@pytest.fixture(scope="module")
def figures(trained):
    return evaluate(*trained, EPS, pgd_steps=30, batch_size=16)


def constant(logits: list[float]) -> nn.Module:
    model = nn.Sequential(nn.Flatten(), nn.Linear(36, 4), nn.ReLU(), nn.Linear(4, len(logits)))
    with torch.no_grad():
        model[3].weight.zero_()
        model[3].bias.copy_(torch.tensor(logits))
    return model


def test_columns_are_ordered_and_all_kinds_occur(figures):
    assert 100 >= figures["clean"] >= figures["pgd"] >= figures["certified"] >= figures["global_certified"] >= 0
    assert figures["pgd"] >= figures["estimate"]
    assert figures["clean"] > figures["pgd"] > figures["certified"] > figures["global_certified"] > 0
    assert 0 < figures["local_lipschitz"] < figures["global_lipschitz"]


def test_result_says_what_was_asked_and_is_json(figures):
    asked = {"split": "test", "images": 60, "eps": EPS, "pgd_steps": 30, "power_steps": 200, "failure_prob": 1e-9}
    assert figures.items() >= asked.items()
    assert figures["guarantee"] == "high_probability"
    parts = figures["seconds"]
    assert parts.keys() == {"clean", "pgd", "estimate", "certified", "total"}
    assert parts["total"] == pytest.approx(sum(v for k, v in parts.items() if k != "total"))
    assert json.loads(json.dumps(figures, allow_nan=False)) == figures


def test_the_first_images_are_counted_by_themselves(trained, figures, monkeypatch):
    everything = {"images": 60} | {name: round(figures[name] * 60 / 100) for name in ("clean", "certified")}
    assert figures["first"] == everything
    monkeypatch.setattr(module, "FIRST_IMAGES", 20)
    found = evaluate(*trained, EPS, pgd_steps=30, batch_size=16)["first"]
    alone = evaluate(*trained, EPS, limit=20, pgd_steps=30, batch_size=16)
    assert found == {"images": 20} | {name: round(alone[name] * 20 / 100) for name in ("clean", "certified")}
    assert found["clean"] != everything["clean"]


def test_a_long_attack_says_how_far_it_is(trained, monkeypatch):
    monkeypatch.setattr(module, "PATIENCE_SECONDS", 0.0)
    lines = []
    evaluate(*trained, EPS, pgd_steps=50, batch_size=16, power_steps=5, say=lines.append)
    shares = [int(line.split()[1].rstrip("%")) for line in lines if line.endswith("done")]
    assert len(shares) > 5
    assert shares == sorted(shares)
    assert shares[-1] < 100


def test_clean_is_what_the_model_says(trained, figures):
    model, images = trained
    with torch.no_grad():
        right = model(images.images.float() / 255).argmax(1) == images.labels
    assert figures["clean"] == pytest.approx(100 * float(right.double().mean()))


@pytest.mark.parametrize("domain", [None, (0.0, 1.0)])
def test_certified_is_what_certify_says(trained, domain):
    model, images = trained
    found = evaluate(model, images, EPS, pgd_steps=20, input_domain=domain)
    x = images.images.float() / 255
    direct = ll.certify(model, x, images.labels, EPS, attack_steps=0, input_domain=domain, method="local")
    assert found["certified"] == pytest.approx(100 * float(direct.certified.double().mean()))
    by_global = direct.decided_by.count("global bound")
    assert found["global_certified"] == pytest.approx(100 * by_global / len(x))
    assert found["input_domain"] == (domain and [0.0, 1.0])


def test_bounds_are_close_to_the_proved_ones(trained, figures):
    model, images = trained
    proved = ll.global_lipschitz(model, (1, 6, 6))
    # float32 rounds the converged estimate by a few units in its last place.
    assert 0.97 * proved <= figures["global_lipschitz"] <= proved * (1 + 1e-6)
    local = ll.local_lipschitz(model, images.images.float() / 255, EPS)
    assert figures["local_lipschitz"] >= 0.97 * float(local.mean())  # the paper's radii give the larger boxes


def test_estimate_is_that_of_converged_norms(trained, figures, monkeypatch):
    """Singular values by SVD in place of 200 power steps decide the same images."""
    monkeypatch.setattr(module, "PowerNorm", lambda steps, seed: ExactNorm())
    assert evaluate(*trained, EPS, pgd_steps=30)["estimate"] == figures["estimate"]


def test_the_first_look_of_the_estimate_changes_nothing(trained, figures, monkeypatch):
    """Few power steps rule out what many would rule out as well."""
    monkeypatch.setattr(module, "ROUGH_STEPS", 10**6)
    again = evaluate(*trained, EPS, pgd_steps=30, batch_size=16)
    assert again["estimate"] == figures["estimate"] < figures["pgd"]
    assert again["local_lipschitz"] == figures["local_lipschitz"]


def test_batch_size_changes_nothing_but_speed(trained, figures):
    other = evaluate(*trained, EPS, pgd_steps=30, batch_size=7)
    assert other["clean"] == figures["clean"]
    assert other["certified"] == figures["certified"]
    assert other["global_lipschitz"] == figures["global_lipschitz"]
    assert other["estimate"] == pytest.approx(figures["estimate"], abs=2)


def test_same_seed_same_figures_and_the_callers_random_numbers_stay(trained, figures):
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    again = evaluate(*trained, EPS, pgd_steps=30, batch_size=16, proof_seed=figures["proof_seed"])
    assert torch.equal(torch.rand(2), expected)
    assert {k: v for k, v in again.items() if k != "seconds"} == {k: v for k, v in figures.items() if k != "seconds"}


def test_the_seed_of_the_proofs_is_drawn_and_noted(trained, figures, monkeypatch):
    """Weights could be made for one that follows from the seed of the training."""
    used, original = [], module.certify
    monkeypatch.setattr(
        module, "certify", lambda *args, **options: used.append(options["seed"]) or original(*args, **options)
    )
    noted = [evaluate(*trained, EPS, limit=30, pgd_steps=2, power_steps=5, seed=0)["proof_seed"] for _ in range(2)]
    assert used == noted
    assert len({*noted, figures["proof_seed"]}) == 3


def test_model_and_switches_are_left_as_they_were(trained):
    model, images = copy.deepcopy(trained[0]).train(), trained[1]
    before = copy.deepcopy(model.state_dict())
    torch.set_float32_matmul_precision("high")
    try:
        evaluate(model, images, EPS, limit=5, pgd_steps=2, power_steps=5)
        assert torch.get_float32_matmul_precision() == "high"
        assert torch.backends.cuda.matmul.allow_tf32
        assert torch.backends.cudnn.allow_tf32
    finally:
        torch.set_float32_matmul_precision("highest")
    assert not torch.backends.cuda.matmul.allow_tf32
    assert model.training
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())


def test_tf32_is_off_inside(trained, monkeypatch):
    seen = []
    original = module.withstands

    def watching(*args, **kwargs):
        seen.append(
            (torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32, torch.is_autocast_enabled("cpu"))
        )
        return original(*args, **kwargs)

    monkeypatch.setattr(module, "withstands", watching)
    torch.backends.cuda.matmul.allow_tf32 = True
    try:
        with torch.autocast("cpu"):
            evaluate(*trained, EPS, limit=3, pgd_steps=2, power_steps=5)
    finally:
        torch.backends.cuda.matmul.allow_tf32 = False
    assert seen == [(False, False, False)]


def test_progress_is_told_part_by_part(trained):
    lines = []
    evaluate(*trained, EPS, limit=4, pgd_steps=2, power_steps=5, say=lines.append)
    assert [line.split()[0] for line in lines] == ["clean", "pgd", "estimate", "certified"]


def test_constant_network_is_certified_for_its_class():
    images = pictures(40)
    found = evaluate(constant([0.0, 1.0, 0.5]), images, EPS, pgd_steps=3)
    share = 100 * float((images.labels == 1).double().mean())
    assert 0 < share < 100
    assert [found[name] for name in SHARES] == pytest.approx([share] * 5)
    assert found["local_lipschitz"] == 0


def test_tie_counts_as_wrong():
    found = evaluate(constant([1.0, 1.0, 0.0]), pictures(20), EPS, pgd_steps=3)
    assert [found[name] for name in SHARES] == [0] * 5


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_not_finite_give_nothing(trained, value):
    model = copy.deepcopy(trained[0])
    with torch.no_grad():
        model[0].weight[0, 0, 0, 0] = value
    lines = []
    found = evaluate(model, trained[1], EPS, say=lines.append)
    assert [found[name] for name in SHARES] == [0] * 5
    assert found["global_lipschitz"] is found["local_lipschitz"] is None
    assert "not finite" in lines[0]
    assert json.loads(json.dumps(found, allow_nan=False)) == found


def test_logits_that_overflow_count_as_wrong():
    model = nn.Sequential(nn.Flatten(), nn.Linear(36, 3))
    with torch.no_grad():
        model[1].weight.fill_(3e38)
        model[1].weight[0] = 1.0
    found = evaluate(model, pictures(10), EPS, pgd_steps=3)
    assert [found[name] for name in SHARES] == [0] * 5


def test_limit_takes_the_first_images_and_may_exceed_them(trained, figures):
    model, images = trained
    found = evaluate(model, images, EPS, limit=1000, pgd_steps=30, batch_size=16)
    assert (found["images"], found["clean"]) == (60, figures["clean"])
    few = evaluate(model, images, EPS, limit=7, pgd_steps=3)
    with torch.no_grad():
        right = model(images.images[:7].float() / 255).argmax(1) == images.labels[:7]
    assert few["images"] == 7
    assert few["clean"] == pytest.approx(100 * float(right.double().mean()))


@pytest.mark.parametrize("label", [-1, 3])
def test_labels_out_of_range_are_refused(trained, label):
    images = pictures(4, labels=torch.tensor([0, 1, label, 2]))
    with pytest.raises(ValueError, match=r"labels must lie in 0\.\.2"):
        evaluate(trained[0], images, EPS)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"limit": 0}, "limit must be at least 1"),
        ({"eps": "-1"}, "eps must be finite and at least 0"),
        ({"eps": "a third"}, "eps 'a third'"),
        ({"batch_size": 0}, "batch_size"),
        ({"pictures": pictures(0)}, "0 images"),
        ({"pictures": pictures(3, labels=torch.zeros(2, dtype=torch.long))}, "3 images and 2 labels"),
    ],
)
def test_impossible_requests_are_refused(trained, change, message):
    images, eps = change.pop("pictures", trained[1]), change.pop("eps", EPS)
    with pytest.raises(ValueError, match=message):
        evaluate(trained[0], images, eps, **change)


def test_pixels_must_be_bytes(trained):
    images = SimpleNamespace(images=torch.rand(2, 1, 6, 6), labels=torch.zeros(2, dtype=torch.long))
    with pytest.raises(TypeError, match="uint8"):
        evaluate(trained[0], images, EPS)


@pytest.mark.parametrize("eps", ["36/255", "0.1", "1.58", "1e-3", "1/3"])
def test_eps_in_single_precision_is_never_below_the_exact_one(eps):
    exact = as_eps(eps, 1, torch.device("cpu"))
    rounded = module._rounded_up(exact)
    assert rounded.dtype == torch.float32
    assert float(exact) <= float(rounded) <= float(exact) * (1 + 2e-7)


# The attack behind the column


def test_packing_gives_what_the_whole_path_gives(trained):
    """One path per sample from the same random start, whether or not the broken ones are dropped on the way."""
    model, images = trained
    x, y = images.images.double() / 255, images.labels
    network = ll.lower(model, (1, 6, 6))
    eps = torch.full((len(x),), 0.25, dtype=torch.float64)
    settings = {"steps": 25, "input_domain": (0.0, 1.0)}
    found = pgd_l2(network, x, y, eps, generator=torch.Generator().manual_seed(5), **settings)
    expected = margins(network(found), y) > 0
    assert 0 < int(expected.sum()) < len(x)
    for every, batch_size in ((1, 60), (4, 7), (20, 500), (100, 16)):
        generator = torch.Generator().manual_seed(5)
        kept = withstands(network, x, y, eps, generator=generator, pack_every=every, batch_size=batch_size, **settings)
        assert torch.equal(kept, expected)


def test_attack_breaks_what_a_linear_network_must_lose_and_nothing_else():
    """The margin of a linear network of two classes falls by exactly eps times the norm of the difference of its rows."""
    model = nn.Sequential(nn.Flatten(), nn.Linear(36, 2, bias=False)).double()
    x = torch.rand(200, 1, 6, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) - 0.5
    y = model(x).argmax(1)
    distance = margins(model(x), y) / (model[1].weight[0] - model[1].weight[1]).norm()
    kept = withstands(model, x, y, torch.full((200,), 0.2, dtype=torch.float64), steps=20)
    clear = (distance - 0.2).abs() > 1e-3
    assert torch.equal(kept[clear], distance[clear] > 0.2)
    assert 0 < int(kept.sum()) < 200


def test_attack_on_no_samples_and_on_nan():
    model = nn.Sequential(nn.Flatten(), nn.Linear(36, 3))
    assert withstands(model, torch.zeros(0, 1, 6, 6), torch.zeros(0, dtype=torch.long), torch.zeros(0)).shape == (0,)
    with torch.no_grad():
        model[1].bias[0] = float("nan")
    kept = withstands(model, torch.zeros(2, 1, 6, 6), torch.ones(2, dtype=torch.long), torch.ones(2), steps=2)
    assert not kept.any()
