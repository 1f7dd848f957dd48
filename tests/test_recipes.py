"""Recipes: each shipped one says what the paper prints, and what cannot be run is refused with a message that helps."""

from __future__ import annotations

import re
from dataclasses import asdict, replace
from fractions import Fraction
from pathlib import Path

import pytest

from locallip import paper
from locallip.models import build_model
from locallip.training import recipe as recipes
from locallip.training.recipe import Recipe, WrongRecipe, find, from_mapping, names, radius, read, rescaled

PAPER_RECIPES = sorted(
    {row.recipe for row in (*paper.ROBUST, *paper.INITIALISATION, *paper.SPARSITY, *paper.ADVERSARIAL) if row.recipe}
)
#: Methods whose settings are those of tbl:hyper; the others are trained without a certified loss.
CERTIFIED = ("local-b", "local-g", "bcp", "gloro", "lmt", "ibp")
METHODS = {"Local-Lip-B": "local-b", "Local-Lip-G": "local-g"} | {
    name: name.lower() for name in ("BCP", "GloRo", "LMT", "IBP", "Standard", "AT", "TRADES")
}
GOOD = {"name": "mine", "data": "cifar10", "architecture": "6c2f", "method": "local-b", "eps": "36/255"} | {
    "eps_train": 0.1551,
    "epochs": 10,
}


def test_the_paper_has_thirty_seven_recipes():
    assert len(PAPER_RECIPES) == 37
    assert set(PAPER_RECIPES) <= set(names())


@pytest.mark.parametrize("name", names())
def test_every_recipe_loads_under_its_file_name_and_its_network_can_be_built(name):
    recipe = find(name)
    assert recipe.name == name
    assert recipe.about
    shape, classes = {"tiny-imagenet": ((3, 64, 64), 200), "cifar10": ((3, 32, 32), 10)}.get(recipe.data, ((1, 28, 28), 10))
    model = build_model(recipe.architecture, shape, classes, recipe.activation, recipe.threshold)
    assert model[-1].out_features == classes


@pytest.mark.parametrize("name", PAPER_RECIPES)
def test_a_recipe_has_the_hyper_parameters_of_the_papers_table(name):
    recipe = find(name)
    if recipe.method not in CERTIFIED:
        expected = {
            key: paper.hyper(recipe.data, maxmin=False)[key] for key in ("learning_rate", "end_learning_rate", "batch")
        }
    else:
        expected = dict(paper.hyper(recipe.data, maxmin="maxmin" in name))
    if not recipe.is_local:
        for key in ("sparsity", "theta_weight"):
            expected.pop(key, None)
    if random_steps := re.search(r"-random-(\d+)$", name):
        expected["power_steps"] = int(random_steps[1])
    if sparsity := re.search(r"-sparsity-(.+)$", name):
        expected["sparsity"] = float(sparsity[1])
    assert {key: asdict(recipe)[key] for key in expected} == expected
    assert recipe.starts == ("random" if random_steps else "saved")
    assert recipe.box_radii == "global"
    assert recipe.precision == "tf32"


@pytest.mark.parametrize(
    "row", [row for row in (*paper.ROBUST, *paper.ADVERSARIAL) if row.recipe], ids=lambda row: row.recipe
)
def test_a_row_of_the_paper_is_tied_to_the_recipe_of_its_data_network_and_method(row):
    recipe = find(row.recipe)
    method, _, maxmin = row.method.partition(" + ")
    local = method.startswith("Local-Lip")
    assert recipe.data == row.data
    assert recipe.architecture == ("8c2f" if row.network == "7C1F" else row.network.lower())
    assert recipe.method == METHODS[method]
    assert recipe.activation == (
        ("clipped_maxmin" if local else "maxmin") if maxmin == "MaxMin" else ("relu_theta" if local else "relu")
    )
    expected = "-".join([row.data, recipe.architecture, *(["maxmin"] if maxmin else []), recipe.method])
    assert row.recipe == expected


def test_schedules_stretch_with_the_epochs_and_never_end_behind_them():
    whole = Recipe(**{**GOOD, "epochs": 800.0, "ramp_epochs": 800.0, "decay_epoch": 400.0, "warmup_epochs": 20.0})
    for epochs in range(1, 1001):
        short = rescaled(whole, epochs)
        assert short.epochs == epochs
        assert short.ramp_epochs == epochs
        assert short.decay_epoch == pytest.approx(epochs / 2)
        assert short.warmup_epochs == pytest.approx(epochs / 40)


@pytest.mark.parametrize("name", PAPER_RECIPES)
def test_eps_is_exact(name):
    recipe = find(name)
    assert radius(recipe) == (Fraction(158, 100) if recipe.data == "mnist" else Fraction(36, 255))
    assert recipe.eps == paper.DATA[recipe.data][1]


@pytest.mark.parametrize("name", PAPER_RECIPES)
def test_a_file_opens_with_its_row_and_its_figures(name):
    text = (recipes.RECIPES / f"{name}.toml").read_text()
    head = " ".join(line.lstrip("# ") for line in text.split("\n\n")[0].splitlines())
    tables = {"tbl:AT": paper.ADVERSARIAL, "tbl:sparse": paper.SPARSITY, "tab:power_initialization": paper.INITIALISATION}
    label = next((label for label in tables if label in head), "tbl:robust")
    (row,) = [row for row in tables.get(label, paper.ROBUST) if row.recipe == name]
    assert label in head
    assert f"{row.clean} % clean, {row.pgd} % under PGD, {row.certified} % certified" in head


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("epochs", "many", "epochs = 'many': expected a number"),
        ("batch", 2.5, "batch = 2.5: expected a whole number"),
        ("batch", True, "batch = True: expected a whole number"),
        ("intervals", 1, "intervals = 1: expected true or false"),
        ("eps", "36/0", "neither a number nor a fraction"),
        ("eps", "a lot", "neither a number nor a fraction"),
        ("eps", "-1", "must be above 0"),
        ("learning_rate", float("nan"), "learning_rate = nan: expected a number"),
        ("learning_rate", -1e-3, "learning_rate = -0.001: must lie between"),
        ("end_learning_rate", 0.1, "the rate only falls"),
        ("batch", 0, "batch = 0: must lie between 1"),
        ("mix_target", 1.5, "mix_target = 1.5: must lie between 0 and 1"),
        ("power_steps", 0, "power_steps = 0: must lie between 1"),
        ("probes", -1, "probes = -1: must lie between 0"),
        ("crop_margin", -1, "crop_margin = -1: must lie between 0"),
        ("crop_margin", 2, "crop_margin = 2: augment = 'none' takes no crops"),
        ("local_layers", "convolutions", "local_layers = 'convolutions': choose one of all, dense"),
        ("decay_epoch", 11, "decay_epoch = 11 lies behind the last epoch, 10"),
        ("ramp_epochs", 10.5, "ramp_epochs = 10.5 lies behind the last epoch, 10"),
        ("method", "localb", "did you mean 'local-b'"),
        ("architecture", "6c3f", "choose one of"),
        ("activation", "relu-theta", "did you mean 'relu_theta'"),
        ("seed", -1, "seed = -1: must lie between 0"),
    ],
)
def test_what_cannot_be_run_is_refused_by_field(field, value, message):
    with pytest.raises(WrongRecipe, match=re.escape(message)) as caught:
        from_mapping(GOOD | {field: value}, where="mine.toml")
    assert str(caught.value).startswith("mine.toml: ")


def test_warm_up_cannot_outlast_the_ramp_that_includes_it():
    with pytest.raises(WrongRecipe, match="warmup_epochs = 6 lies behind ramp_epochs = 5"):
        from_mapping(GOOD | {"warmup_epochs": 6, "ramp_epochs": 5}, where="mine.toml")


@pytest.mark.parametrize("method", ["standard", "at", "trades"])
def test_a_field_that_would_do_nothing_is_refused(method):
    with pytest.raises(WrongRecipe, match=rf"sparsity = 0.1: method '{method}' has no boxes"):
        from_mapping(GOOD | {"method": method, "sparsity": 0.1}, where="mine.toml")


@pytest.mark.parametrize("method", ["gloro", "bcp", "standard"])
def test_random_starts_want_norms_per_sample(method):
    with pytest.raises(WrongRecipe, match=rf"starts = 'random': method '{method}' has no norms per sample"):
        from_mapping(GOOD | {"method": method, "starts": "random"}, where="mine.toml")


def test_an_unknown_field_is_named_with_the_nearest_known_one():
    with pytest.raises(WrongRecipe, match=r"unknown field 'learning_rates' \(did you mean 'learning_rate'\?\)"):
        from_mapping(GOOD | {"learning_rates": 1e-3}, where="mine.toml")


def test_a_missing_field_is_named():
    with pytest.raises(WrongRecipe, match="missing eps_train, epochs"):
        from_mapping({key: GOOD[key] for key in ("name", "data", "architecture", "method", "eps")}, where="mine.toml")


def test_an_unknown_name_gets_the_nearest_one():
    with pytest.raises(WrongRecipe, match="did you mean 'cifar10-6c2f-local-b'"):
        find("cifar10-6c2f-localb")


def test_a_file_of_ones_own_takes_its_name_from_the_file(tmp_path: Path):
    path = tmp_path / "mine.toml"
    path.write_text('data = "mnist"\narchitecture = "4c3f"\nmethod = "bcp"\neps = "1.58"\neps_train = 1.58\nepochs = 0.5\n')
    assert find(str(path)) == Recipe("mine", "mnist", "4c3f", "bcp", "1.58", 1.58, 0.5)


@pytest.mark.parametrize("content", [b"epochs = ", b"\xff\xfe", b"epochs = 1\nepochs = 2\n"])
def test_a_file_that_is_not_toml_is_named(tmp_path: Path, content: bytes):
    path = tmp_path / "broken.toml"
    path.write_bytes(content)
    with pytest.raises(WrongRecipe, match=r"broken\.toml is not valid TOML"):
        read(path)


def test_a_missing_file_is_named(tmp_path: Path):
    with pytest.raises(WrongRecipe, match=r"cannot read .*absent\.toml"):
        find(str(tmp_path / "absent.toml"))


@pytest.mark.parametrize("name", ["", "../evil", "a/b", ".hidden", "ä", "x" * 101])
def test_a_name_is_a_file_name(name):
    with pytest.raises(WrongRecipe, match="becomes a file's name"):
        replace(find("demo"), name=name)


@pytest.mark.parametrize("eps", ["1e400", "1e99999999", "1e7", "nan", "1/0"])
def test_eps_stays_within_reason(eps):
    with pytest.raises(WrongRecipe, match="eps = "):
        replace(find("demo"), eps=eps)
