"""The command line: once each as a user calls it, in a process of its own, and the many wrong calls inside this one."""

import json
import platform
import re
import subprocess
import sys

import pytest
import torch

import locallip
from locallip.paper import ROBUST
from locallip.training.recipe import names
from locallip.training.run_folder import RunFolder

WITHOUT_TYRO = """
import sys
class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "tyro":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Blocker())
from locallip.cli import main
sys.exit(main(sys.argv[1:]))
"""


OWN_RECIPE = """
data = "embedded"
architecture = "small"
method = "local-b"
eps = "0.5"
eps_train = 0.6
epochs = 0.02
batch = 64
"""


@pytest.fixture
def own(tmp_path):
    """A recipe of the user's own that takes a few steps on embedded images."""
    path = tmp_path / "mine.toml"
    path.write_text(OWN_RECIPE)
    return str(path)


def call(*args, code=None):
    command = [sys.executable, *(["-c", code] if code else ["-m", "locallip"]), *args]
    return subprocess.run(command, capture_output=True, text=True, encoding="utf-8", timeout=300)


def test_version_names_everything_that_matters_in_a_report():
    done = call("--version")
    assert done.returncode == 0
    for part in (f"locallip {locallip.__version__}", f"torch {torch.__version__}", platform.python_version(), "device c"):
        assert part in done.stdout


@pytest.mark.parametrize("args", [["--help"], []])
def test_help_lists_the_commands_and_an_example(args):
    done = call(*args)
    assert done.returncode == 0
    assert "usage: locallip" in done.stdout
    assert "locallip demo --help" in done.stdout
    assert "\x1b" not in done.stdout


def test_help_of_the_demo_lists_its_options():
    text = call("demo", "--help").stdout
    for option in ("--eps", "--epochs", "--seed", "--limit", "--images"):
        assert option in text


@pytest.mark.parametrize(
    ("args", "hint"),
    [
        (["dmeo"], "demo"),
        (["demo", "--epoch", "3"], "--epochs"),
        (["demo", "--eps", "large"], "--eps"),
        (["demo", "--eps", "-1"], "--eps: eps must be finite and at least 0"),
        (["demo", "--eps", "nan"], "--eps: eps 'nan' is neither a number nor a fraction"),
        (["demo", "--epochs", "0"], "--epochs must be at least 1"),
        (["demo", "--limit", "10001"], "--limit must be between 1 and 10000"),
        (["demo", "--images", "0"], "--images must be between 1 and 10000"),
        (["demo", "--seed", "-3"], "--seed must be between 0"),
    ],
)
def test_a_wrong_call_is_explained_and_exits_with_2(command, args, hint):
    code, _, err = command(*args)
    assert code == 2
    assert hint in err


def test_without_the_extra_one_line_says_what_to_install():
    done = call("demo", code=WITHOUT_TYRO)
    assert done.returncode == 3
    assert done.stderr.strip().splitlines() == [
        "locallip: the command line needs the extra 'cli': pip install 'locallip[cli]', or '.[cli]' in a clone"
    ]


def test_version_needs_no_extra():
    done = call("--version", code=WITHOUT_TYRO)
    assert done.returncode == 0
    assert locallip.__version__ in done.stdout


@pytest.mark.parametrize("args", [["train"], ["train", "--help"], ["train", "-h"]])
def test_train_without_a_recipe_says_how_it_is_called(command, args):
    code, out, err = command(*args)
    assert (code, err) == (0, "")
    assert "usage: locallip train RECIPE" in out
    assert "locallip recipes" in out


def test_help_of_a_recipe_shows_its_fields_with_their_values(command):
    code, out, _ = command("train", "cifar10-6c2f-local-b", "--help")
    assert code == 0
    flat = " ".join(out.split())
    for part in ("--eps-train", "0.1551", "--epochs", "800", "--out", "--data-root", "--resume", "--seed", "--stop-after"):
        assert part in flat
    assert "Power iterations a step" in flat


@pytest.mark.parametrize("asked", [["--epochs", "80"], ["--epochs=80"], ["--epochs", "8", "--epochs", "80"]])
def test_schedules_stretch_with_the_epochs_unless_they_are_given_too(command, asked):
    code, out, _ = command("train", "cifar10-6c2f-local-b", *asked, "--help")
    flat = " ".join(out.split())
    assert code == 0
    for field, value in {"ramp-epochs": "40", "decay-epoch": "40", "warmup-epochs": "2"}.items():
        assert re.search(
            rf"--{field} FLOAT[^(]*(\(n in the paper\)|\(m in the paper\))?[^(]*\(default: {value}\.0\)", flat
        ), field


def test_a_schedule_that_is_given_stays(command, own, tmp_path):
    args = ("--epochs", "0.04", "--ramp-epochs", "0.03", "--device", "cpu", "--no-evaluate", "--out", tmp_path / "run")
    assert command("train", own, *args)[0] == 0
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    fields = config.get("recipe", config)
    assert (fields["epochs"], fields["ramp_epochs"]) == (0.04, 0.03)


@pytest.mark.parametrize(
    ("args", "hints"),
    [
        (["cifar10-6c2f-local-bb"], ["no recipe 'cifar10-6c2f-local-bb'", "did you mean 'cifar10-6c2f-local-b'?"]),
        (["nothing.toml"], ["cannot read nothing.toml"]),
        (["--epochs", "3"], ["the recipe comes first"]),
        (["cifar10-6c2f-local-b", "--learning-rat", "1"], ["--learning-rate"]),
        (["cifar10-6c2f-local-b", "--epochs", "many"], ["many"]),
        (["cifar10-6c2f-local-b", "--epochs", "-1"], ["epochs = -1", "between 0"]),
        (["cifar10-6c2f-local-b", "--epochs", "nan"], ["epochs = nan"]),
        (["cifar10-6c2f-local-b", "--epochs", "3", "--ramp-epochs", "4"], ["ramp_epochs = 4 lies behind the last epoch, 3"]),
        (["cifar10-6c2f-local-b", "--batch", "0"], ["batch = 0"]),
        (["cifar10-6c2f-local-b", "--batch", "2.5"], ["2.5"]),
        (["cifar10-6c2f-local-b", "--eps", "36/0"], ["eps = '36/0'", "fraction such as 36/255"]),
        (["cifar10-6c2f-local-b", "--eps", "-1"], ["eps"]),
        (["cifar10-6c2f-local-b", "--method", "localb"], ["method", "local-b"]),
        (["cifar10-6c2f-local-b", "--architecture", "7c3f"], ["architecture = '7c3f'", "6c2f"]),
        (["cifar10-6c2f-local-b", "--seed", "-1"], ["seed = -1"]),
        (["cifar10-6c2f-local-b", "--limit", "0"], ["--limit must be at least 1"]),
        (["cifar10-6c2f-local-b", "--stop-after", "-5"], ["--stop-after must be above 0"]),
        (["cifar10-6c2f-local-b", "--stop-after", "nan"], ["--stop-after must be above 0"]),
        (["cifar10-6c2f-local-b", "--no-evaluate", "--results", "r"], ["--results wants figures"]),
        (["cifar10-6c2f-local-b", "--device", "gpu"], ["--device gpu"]),
        (["cifar10-6c2f-local-b", "--resum"], ["--resume"]),
    ],
    ids=str,
)
def test_a_wrong_call_of_train_is_explained_and_exits_with_2(command, monkeypatch, tmp_path, args, hints):
    monkeypatch.chdir(tmp_path)
    code, _, err = command("train", *args)
    assert code == 2
    flat = " ".join(err.replace("│", " ").split())
    for hint in hints:
        assert hint in flat
    assert list(tmp_path.iterdir()) == []


def test_a_device_that_is_not_there_is_named(command, own):
    if torch.cuda.is_available():
        wrong = f"cuda:{torch.cuda.device_count()}"
    else:
        wrong = "cuda"
    code, _, err = command("train", own, "--device", wrong)
    assert code == 2
    assert f"--device {wrong}" in err
    assert len(err.splitlines()) == 1


@pytest.mark.parametrize(
    ("line", "hint"),
    [
        ("lerning_rate = 0.1", "unknown field 'lerning_rate' (did you mean 'learning_rate'?)"),
        ("method = 'local'", "method = 'local'"),
        ("batch = 'big'", "expected a whole number"),
        ("epochs = = 3", "not valid TOML"),
    ],
)
def test_a_wrong_file_is_named(command, tmp_path, line, hint):
    path = tmp_path / "mine.toml"
    kept = [known for known in OWN_RECIPE.splitlines() if known.split(" ")[0] != line.split(" ")[0]]
    path.write_text("\n".join([*kept, line]))
    code, _, err = command("train", path)
    assert code == 2
    assert str(path) in err
    assert hint in err


def test_missing_data_is_explained_and_exits_with_2(command, tmp_path):
    code, _, err = command("train", "cifar10-6c2f-local-b", "--data-root", tmp_path / "data", "--out", tmp_path / "run")
    assert code == 2
    assert str(tmp_path / "data") in err
    assert "--download" in err
    assert not (tmp_path / "run").exists()


def test_a_run_from_a_file_and_what_a_second_call_says(command, own, tmp_path):
    out = tmp_path / "run"
    args = ("train", own, "--out", out, "--device", "cpu", "--limit", "4", "--results", tmp_path / "results")
    code, said, err = command(*args, "--batch", "48")
    assert code == 0
    assert "steps of 48" in err
    figures = r"clean [\d.]+%, PGD-100 [\d.]+%, certified \(high_probability\) [\d.]+% of 4 test images\n"
    assert re.fullmatch(re.escape(f"{out}: ") + figures, said)
    assert (out / "model.safetensors").is_file()
    result = json.loads((tmp_path / "results" / "mine.json").read_text())
    assert result["recipe"]["batch"] == 48
    assert result["evaluation"]["images"] == 4
    code, _, err = command(*args, "--batch", "48")
    assert code == 2
    assert f"{out} already holds a run" in err
    code, _, err = command(*args, "--resume")
    assert code == 2
    assert "batch is 48 there and 64 now" in err
    code, said, err = command(*args, "--batch", "48", "--resume", "--json")
    assert code == 0
    assert "resumed at step" in err
    assert json.loads(said) == json.loads((out / "result.json").read_text())
    code, said, _ = command("table", "--results", tmp_path / "results")
    assert code == 0
    assert "mine" in said


def test_a_damaged_checkpoint_is_one_plain_line(command, own, tmp_path):
    args = ("train", own, "--out", tmp_path / "run", "--device", "cpu", "--no-evaluate")
    assert command(*args, "--stop-after", "1e-9")[0] == 130
    assert command(*args, "--resume")[0] == 0
    newest = max((tmp_path / "run" / "checkpoints").glob("state-*.json"), key=lambda path: int(path.stem.split("-")[1]))
    newest.write_text("{")
    done = call(*map(str, args), "--resume")  # in a process of its own: pytest keeps warnings to itself
    assert done.returncode == 0
    said = [line for line in done.stderr.splitlines() if "cannot be used" in line]
    assert len(said) == 1
    assert said[0].startswith(f"locallip: {newest} cannot be used")
    assert "warn" not in done.stderr.lower()


def test_demo_does_not_touch_a_run_that_is_there(command, tmp_path):
    (tmp_path / "config.json").write_text("{}")
    code, _, err = command("demo", "--out", tmp_path)
    assert code == 2
    assert f"--out {tmp_path} already holds a run: name another folder" in err


def test_stop_after_exits_with_130_and_says_how_to_go_on(command, own, tmp_path):
    code, said, err = command("train", own, "--out", tmp_path / "run", "--device", "cpu", "--stop-after", "1e-9")
    assert (code, said) == (130, "")
    assert "stopped at step 1 of 3" in err
    assert "--resume" in err
    assert RunFolder(tmp_path / "run").load().values["step"] == 1


def test_a_run_goes_to_a_folder_of_its_name_unless_told_otherwise(command, own, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert command("train", own, "--device", "cpu", "--no-evaluate")[0] == 0
    assert (tmp_path / "runs" / "mine" / "model.safetensors").is_file()


def test_recipes_are_listed_line_by_line(command):
    code, out, _ = command("recipes")
    assert code == 0
    assert [line.split()[0] for line in out.splitlines()] == names()
    assert "eps 36/255" in out


def test_models_are_listed(command):
    code, out, _ = command("models")
    assert code == 0
    cards = locallip.zoo.model_cards()
    assert all(card.name in out for card in cards)
    assert cards or "No trained networks" in out


def test_the_table_has_every_row_of_the_paper(command, tmp_path):
    code, out, _ = command("table", "--results", tmp_path)
    assert code == 0
    assert all(f"{row.certified:.1f}" in out for row in ROBUST if row.certified is not None)


def test_a_table_of_a_folder_that_is_not_there_or_holds_something_else_exits_with_2(command, tmp_path):
    code, _, err = command("table", "--results", tmp_path / "nothing")
    assert code == 2
    assert f"no folder {tmp_path / 'nothing'}" in err
    (tmp_path / "other.json").write_text("[1, 2]")
    code, _, err = command("table", "--results", tmp_path)
    assert code == 2
    assert str(tmp_path / "other.json") in err
    assert len(err.splitlines()) == 1


def test_train_from_a_shell(tmp_path):
    """The same once as a user calls it."""
    done = call("train", "cifar10-6c2f-local-bb", "--out", str(tmp_path / "run"))
    assert done.returncode == 2
    assert done.stdout == ""
    assert "did you mean" in done.stderr
    assert "Traceback" not in done.stderr
