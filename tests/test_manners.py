"""Manners of the command: overview, examples, completion, exit codes, JSON, colours, pipes, and questions back."""

import contextlib
import functools
import io
import json
import os
import platform
import re
import shlex
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

import locallip as ll
import locallip_command
from locallip import cli
from locallip.options import WrongOption, options_of
from locallip.parsing import parsed
from locallip.training.recipe import names
from locallip.training.run import Diverged
from locallip.zoo import model_cards

ROOT = Path(__file__).parent.parent
QUICK = "import sys, locallip_command; code = locallip_command.main(); assert 'torch' not in sys.modules; sys.exit(code)"
COLOURS = """
import locallip_command
locallip_command.without_colours()
import tyro
def command(number: int = 1) -> None: ...
tyro.cli(command, args=["--help"])
"""
#: The function that the script registered, called as bash calls it.
COMPLETE = r"""
source "$1"; shift
COMP_WORDS=(locallip "$@") COMP_CWORD=$#
[[ $(complete -p locallip) =~ -F\ ([a-z_]+) ]] && ${BASH_REMATCH[1]}
echo "${COMPREPLY[*]}"
"""


@pytest.fixture(scope="module")
def network_file(tmp_path_factory):
    """A small network whose answers are those of its random weights."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = ll.build_model("small", (1, 28, 28), 10, "relu").eval()
    path = tmp_path_factory.mktemp("network") / "mine.safetensors"
    ll.save_model(path, model, {"architecture": "small", "activation": "relu", "input_shape": [1, 28, 28], "classes": 10})
    return path


def quick(*args, **settings):
    """The command without torch, in a process of its own."""
    return subprocess.run([sys.executable, "-c", QUICK, *args], capture_output=True, text=True, timeout=60, **settings)


@pytest.mark.parametrize("args", [[], ["--help"], ["-h"], ["help"]])
def test_the_overview_has_a_line_for_every_command_and_needs_no_torch(args):
    done = quick(*args)
    assert (done.returncode, done.stderr) == (0, "")
    assert set(locallip_command.SUMMARIES) == {*cli.COMMANDS, "train"}
    for name, line in locallip_command.SUMMARIES.items():
        assert re.search(rf"^  {name} +{re.escape(line)}$", done.stdout, re.MULTILINE)
        assert len(line) < 90


def test_a_mistyped_command_is_asked_about_without_torch():
    done = quick("certfy", "x")
    assert (done.returncode, done.stdout) == (2, "")
    assert "no command 'certfy' (did you mean 'certify'?)" in done.stderr


def examples():
    """The calls in the help of all commands, in the overview and in the documents, each as words."""
    texts = [*(command.__doc__ for command in cli.COMMANDS.values()), cli.TRAIN_USAGE, locallip_command.OVERVIEW]
    for path in (ROOT / "README.md", *(ROOT / "docs").glob("*.md")):
        texts += re.findall(r"^```sh\n(.*?)^```$", path.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    lines = [line for text in texts for line in re.findall(r"^ *(locallip \w.*)$", text, re.MULTILINE)]
    calls = [re.split(r" > | {4,}", line)[0] for line in lines]
    return [tuple(shlex.split(call, comments=True)[1:]) for call in calls if "RECIPE" not in call]


def test_every_command_has_examples():
    shown = [call[0] for call in examples()]
    assert all(shown.count(name) >= 2 for name in locallip_command.SUMMARIES), shown


@pytest.mark.parametrize("words", sorted(set(examples())), ids=" ".join)
def test_examples_can_be_typed_as_they_stand(command, monkeypatch, tmp_path, words):
    """Everything is parsed, and nothing is run."""
    name, seen = words[0], []
    for own in ("mine.toml", "my-recipe.toml"):
        (tmp_path / own).write_text((ROOT / "src/locallip/recipes/cifar10-6c2f-local-b.toml").read_text())
    monkeypatch.chdir(tmp_path)
    if name == "train":
        monkeypatch.setattr(cli, "fit", lambda recipe, options: seen.append(recipe) or {"evaluation": None})
    else:
        wanted = functools.wraps(cli.COMMANDS[name])(lambda *args, **options: seen.append(options))
        monkeypatch.setitem(cli.COMMANDS, name, wanted)
    code, _, err = command(*words)
    assert (code, err, len(seen)) == (0, "", 1)


@pytest.mark.parametrize("name", sorted(cli.COMMANDS))
def test_help_shows_the_examples_and_all_options(command, name):
    code, out, _ = command(name, "--help")
    assert code == 0
    assert f"For example:\n  locallip {name}" in out
    for option in options_of(cli.COMMANDS[name]):
        assert option in out
    assert "\x1b" not in out
    assert command("help", name)[1] == out


@pytest.mark.parametrize(
    ("args", "hint"),
    [
        (["verfy"], "did you mean 'verify'?"),
        (["--verison"], "did you mean '--version'?"),
        (["version"], "did you mean '--version'?"),
        (["help", "modls"], "did you mean 'models'?"),
        (["models", "--jsn"], "--json"),
        (["certify", "mnist-4c3f-local", "--data", "embedded"], "did you mean 'mnist-4c3f-local-"),
        (["certify", "mnist-4c3f-local-g", "--data", "mnits"], "did you mean 'mnist'?"),
        (["certify", "mnist-4c3f-local-g", "--guarantee=determinstic"], "did you mean 'deterministic'?"),
        (["certify", "mnist-4c3f-local-g", "--data", "embedded", "--device", "gpu"], "choose cpu, cuda"),
        (["certify", "mnist-4c3f-local-g", "--data-root", "nowhere"], "--data embedded needs no files"),
        (["attack", "mnist-4c3f-local-g", "--attack", "apdg"], "did you mean 'apgd'?"),
        (["audit", "mnist-4c3f-local-g", "--split", "tst"], "did you mean 'test'?"),
        (["train", "fast-mnist-4c3f-local"], "did you mean 'fast-mnist-4c3f-local-"),
        (["train", "demo", "--optimizer", "adams"], "did you mean 'adam'?"),
        (["train", "demo", "--learning-rat", "1"], "--learning-rate"),
    ],
)
def test_mistakes_exit_with_2_and_say_what_may_have_been_meant(command, monkeypatch, tmp_path, args, hint):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("LOCALLIP_DATA", raising=False)
    code, out, err = command(*args)
    assert (code, out) == (2, "")
    assert hint in err


@pytest.mark.parametrize(
    ("args", "told"),
    [
        (["certify", "--esp", "0.5"], "there is no option --esp (did you mean '--eps'?)"),
        (["certify", "x", "-q"], "there is no option -q"),
        (["certify"], "MODEL is missing: a name from `locallip models`, a run folder, a .safetensors file or an .onnx file"),
        (
            ["certify", "--json"],
            "MODEL is missing: a name from `locallip models`, a run folder, a .safetensors file or an .onnx file",
        ),
        (["certify", "x", "y"], "there is no place for 'y'"),
        (["certify", "x", "--limit", "abc"], "--limit wants a whole number, got 'abc'"),
        (["certify", "x", "--limit=1.5"], "--limit wants a whole number, got '1.5'"),
        (["certify", "x", "--failure-prob", "few"], "--failure-prob wants a number, got 'few'"),
        (["certify", "x", "--limit"], "--limit wants a value behind it"),
        (["certify", "x", "--limit", "--json"], "--limit wants a value behind it"),
        (["certify", "x", "--json=yes"], "--json takes no value, got 'yes'"),
        (["certify", "x", "--no-json"], "there is no option --no-json (did you mean '--json'?)"),
        (["report"], "RUNS is missing: run folders, or names from `locallip models`"),
        (["report", "x", "--rows"], "--rows wants a value behind it"),
        (["completion", "zhs"], "SHELL zhs: choose one of bash, zsh, fish (did you mean 'zsh'?)"),
        (["models", "all"], "there is no place for 'all'"),
        (["train", "demo", "--epochs", "many"], "--epochs wants a number, got 'many'"),
        (["train", "demo", "--compiled", "yes"], "there is no place for 'yes'"),
    ],
)
def test_a_call_that_cannot_be_read_gets_one_line(command, args, told):
    code, out, err = command(*args)
    shown = " ".join(args[:2] if args[0] == "train" else args[:1])
    assert (code, out, err) == (2, "", f"locallip: {told}; see `locallip {shown} --help`\n")


@pytest.mark.parametrize(
    "words",
    [["x"], [*["x", "--limit", "5", "--data_root", "d", "--json"]], ["--seed=-1", "x"], ["x", "--eps", "-1", "--resume"]],
)
def test_calls_that_can_be_read_are_read(words):
    asked = {"--limit": ("limit", 5), "--seed=-1": ("seed", -1), "--eps": ("eps", "-1")}
    call = parsed(cli.COMMANDS["certify"], words, "locallip certify")
    assert (call.func, call.args) == (cli.COMMANDS["certify"], ("x",))
    for word, (name, value) in asked.items():
        assert (call.keywords[name] == value) == (word in words)


def test_switches_of_a_recipe_go_both_ways(command, monkeypatch):
    seen = []
    monkeypatch.setattr(cli, "fit", lambda recipe, options: seen.append((recipe, options)) or {"evaluation": None})
    for word in ("--intervals", "--no-intervals", "--compiled", "--no-compiled", "--no-evaluate"):
        assert command("train", "demo", word, "--epochs", "3")[0] == 0
    assert [recipe.intervals for recipe, _ in seen[:2]] == [True, False]
    assert [options.compiled for _, options in seen] == [None, None, True, False, None]
    assert [options.evaluate for _, options in seen] == [True] * 4 + [False]
    assert {(recipe.epochs, recipe.name) for recipe, _ in seen} == {(3.0, "demo")}


@pytest.mark.parametrize("coding", ["utf-8", "ascii"])
def test_what_the_parser_alone_refuses_is_one_line_too(monkeypatch, coding):
    """A kind of value that our own check does not know, in terminals with frames of lines and of dashes."""
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO(), coding))

    def number(point: complex = 1j) -> None: ...

    with pytest.raises(WrongOption, match=r"--point.*; see `locallip number --help`$") as told:
        parsed(number, ["--point", "x"], "locallip number")
    assert not re.search("[\u2500-\u257f\n]|---|helptext|Value error", str(told.value))


def test_help_names_no_default_that_says_nothing(command):
    for name in (*cli.COMMANDS, "train"):
        text = command(name, *(["demo"] if name == "train" else []), "--help")[1]
        flat = " ".join(re.sub("[\u2500-\u257f]", " ", text).split())
        assert "None" not in flat
        assert "(default: )" not in flat
        assert "(default: False)" not in flat.replace("needs a third less time. (default: False)", "")
    text = " ".join(command("report", "--help")[1].replace("│", " ").split())
    assert "locallip report [-h] [OPTIONS] RUNS ..." in text
    assert "several stand side by side. (required)" in text
    text = " ".join(command("certify", "--help")[1].replace("│", " ").split())
    assert "--limit INT Only the first so many images (default: all)." in text
    assert "(default: what the network was trained for)" in text


def test_completion_installed_as_its_help_says_works_in_bash(command, tmp_path):
    if shutil.which("bash") is None:
        pytest.skip("there is no bash here")
    text = command("completion", "--help")[1]
    lines = [line.strip() for line in text.splitlines() if "bash" in line and line.startswith("  ")]
    assert len(lines) == 2
    ours = f'locallip() {{ "{sys.executable}" -m locallip "$@"; }}'
    then = '. ~/.bashrc; COMP_WORDS=(locallip certify x --gu) COMP_CWORD=3; _locallip; echo "$COMPREPLY"'
    done = subprocess.run(
        ["bash", "--norc", "-c", "\n".join([ours, *lines, then])],
        env={**os.environ, "HOME": str(tmp_path)}, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert (done.stdout, done.stderr) == ("--guarantee\n", "")


def test_versions_for_people_and_for_scripts(command):
    code, out, _ = command("--version", "--json")
    found = json.loads(out)
    assert code == 0
    assert found["locallip"] == ll.__version__
    assert found["torch"] == torch.__version__
    assert found["python"] == platform.python_version()
    assert found["device"] == ("cuda" if torch.cuda.is_available() else "cpu")
    line = command("--version")[1]
    assert all(value in line for value in found.values())
    assert line.count("\n") == 1
    assert command("--version", "--jsno")[0] == 2


@pytest.fixture(scope="module")
def bash(tmp_path_factory):
    """What bash itself completes at the end of a line."""
    shell = shutil.which("bash")
    if shell is None:
        pytest.skip("there is no bash here")
    file = tmp_path_factory.mktemp("bash") / "locallip"
    with open(file, "w", encoding="utf-8") as out, pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "stdout", out)
        assert cli.main(["completion", "bash"]) == 0

    def completed(*words):
        done = subprocess.run(
            [shell, "--norc", "-c", COMPLETE, "bash", file, *words], capture_output=True, text=True, timeout=10
        )
        assert done.stderr == ""
        return done.stdout.split()

    return completed


def test_bash_completes(bash):
    assert bash("cer") == ["certify"]
    assert set(bash("")) == {*locallip_command.SUMMARIES, "--help", "--version"}
    for name in ("certify", "attack", "audit"):
        assert bash(name, "") == [card.name for card in model_cards()]
    assert bash("train", "fast-") == [name for name in names() if name.startswith("fast-")]
    assert bash("certify", "x", "--gu") == ["--guarantee"]
    assert bash("certify", "x", "--guarantee", "") == ["high_probability", "deterministic", "estimate"]
    assert bash("certify", "x", "--data", "=", "emb") == ["embedded"]  # bash splits at the sign
    assert bash("audit", "x", "--guarantee", "e") == []
    assert bash("train", "demo", "--no-ev") == ["--no-evaluate"]
    assert bash("certify", "x", "--out", "") == []  # nothing of ours: bash goes on with files
    for name in cli.COMMANDS:
        assert set(bash(name, "-")) == {*options_of(cli.COMMANDS[name]), "--help"}


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_the_other_shells_get_all_words_too(command, shell):
    code, out, _ = command("completion", shell)
    assert code == 0
    for word in ("certify", "mnist-4c3f-local-g", "fast-mnist-4c3f-bcp", "guarantee", "high_probability", "no-evaluate"):
        assert word in out
    if shutil.which(shell):
        done = subprocess.run([shell, "-n"], input=out, capture_output=True, text=True, timeout=10)
        assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("name", ["models", "recipes", "table"])
def test_lists_as_json(command, name):
    code, out, err = command(name, "--json", *(["--results", ROOT / "results"] if name == "table" else []))
    assert (code, err) == (0, "")
    found = json.loads(out)
    if name == "models":
        assert [card["name"] for card in found] == [card.name for card in model_cards()]
        assert all(card["evaluation"]["certified"] > 0 for card in found)
    elif name == "recipes":
        assert [recipe["name"] for recipe in found] == names()
    else:
        assert len(found["paper"]["robust"]) > 20
        assert len(found["runs"]) == len(list((ROOT / "results" / "runs").glob("*.json")))


def test_demo_as_json(command, tmp_path):
    few = ("--epochs", "1", "--images", "64", "--limit", "4", "--eps", "0.1")
    code, out, err = command("demo", "--json", *few, "--page", tmp_path / "page.html")
    assert code == 0
    found = json.loads(out)
    assert found["images"] == sum(found["verdicts"].values()) == 4
    assert found["certified"] <= found["attacked"] <= found["clean"]
    assert "Certifying" in err


def test_verify_says_yes_with_0_and_no_with_1(command, network_file, tmp_path):
    rows = tmp_path / "rows.jsonl"
    few = ("--data", "embedded", "--eps", "1e-6", "--limit", 4, "--device", "cpu")
    code, out, _ = command("certify", network_file, *few, "--out", rows, "--json")
    assert code == 0
    assert json.loads(out)["summary"]["images"] == 4
    code, out, err = command("verify", rows, "--model", network_file, "--json")
    assert (code, err) == (0, "")
    assert json.loads(out) == {
        "agree": True, "faults": [], "rows": 4, "repeated": 4, "eps": "1e-6", "norm": "2",
        "guarantee": "high_probability",
    }  # fmt: skip
    first, *others = rows.read_text().splitlines()
    changed = {**json.loads(first), "label": (json.loads(first)["label"] + 1) % 10}
    rows.write_text("\n".join([json.dumps(changed), *others]) + "\n")
    code, out, err = command("verify", rows, "--model", network_file, "--json")
    assert code == 1
    assert json.loads(out)["agree"] is False
    assert json.loads(out)["faults"]
    assert "does not agree" in err
    (tmp_path / "rows.json").write_text("{")
    assert command("verify", rows, "--model", network_file, "--json")[:2] == (2, "")


def test_verify_says_how_far_it_is_in_a_terminal_alone(command, network_file, tmp_path, monkeypatch):
    rows = tmp_path / "rows.jsonl"
    few = ("--data", "embedded", "--eps", "1e-6", "--limit", 4, "--device", "cpu")
    assert command("certify", network_file, *few, "--out", rows)[0] == 0
    code, out, err = command("verify", rows, "--model", network_file)
    assert (code, err) == (0, "")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    code, again, err = command("verify", rows, "--model", network_file, "--sample", 3)
    assert (code, again) == (0, out.replace("4 of them", "3 of them"))
    assert err.splitlines()[0] == "4 rows fit their settings; 3 of them to repeat"
    assert err.splitlines()[-1] == "3 of 3 rows repeated, 0 came out otherwise, 0 s left"
    assert command("verify", rows, "--model", network_file, "--json")[2] == ""


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (ZeroDivisionError(), "ZeroDivisionError\nlocallip: this is a fault in locallip: please report it"),
        (torch.OutOfMemoryError("of 80 GB"), "locallip: too little memory: try a smaller --batch"),
        (Diverged("the loss is not finite at step 3"), "locallip: the loss is not finite at step 3"),
    ],
)
def test_what_fails_on_the_way_exits_with_3(command, monkeypatch, error, told):
    def models() -> None:
        raise error

    monkeypatch.setitem(cli.COMMANDS, "models", models)
    code, out, err = command("models")
    assert (code, out) == (3, "")
    assert told in err


def test_a_missing_extra_exits_with_3(command, monkeypatch):
    monkeypatch.setitem(sys.modules, "tyro", None)
    assert command("models") == (3, "", cli.MISSING_EXTRA + "\n")


def test_ctrl_c_exits_with_130_and_says_how_to_go_on(command, network_file, tmp_path):
    rows = tmp_path / "rows.jsonl"
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    ended = threading.Event()

    def interrupt():
        while not (rows.exists() and rows.stat().st_size) and not ended.wait(0.05):
            pass
        os.kill(os.getpid(), signal.SIGINT)

    try:
        thread = threading.Thread(target=interrupt)
        thread.start()
        args = ("--data", "embedded", "--eps", "1", "--batch", "1", "--device", "cpu", "--out", rows)
        code, out, err = command("certify", network_file, *args)
    finally:
        ended.set()
        thread.join()
        signal.signal(signal.SIGINT, before)
    assert (code, out) == (130, "")
    assert f"the rows so far are in {rows}: the same command with --resume goes on" in err
    assert err.endswith("locallip: stopped\n")


def test_a_closed_pipe_is_no_matter_and_exits_with_141(monkeypatch):
    ours, theirs = os.pipe()
    os.close(ours)
    done = subprocess.run([sys.executable, "-c", QUICK], stdout=theirs, stderr=subprocess.PIPE, timeout=60)
    assert (done.returncode, done.stderr) == (141, b"")
    out = open(theirs, "w")  # noqa: SIM115, closing it fails
    monkeypatch.setattr(sys, "stdout", out)
    with pytest.raises(BrokenPipeError):  # for the start of the command, which makes 141 of it
        cli.main(["recipes", "--json"])
    with contextlib.suppress(BrokenPipeError):
        out.close()


@pytest.mark.parametrize(
    ("settings", "piped", "coloured"),
    [({}, False, True), ({"NO_COLOR": "1"}, False, False), ({"NO_COLOR": ""}, False, True), ({}, True, False)],
)
def test_colours_are_for_terminals_whose_owner_wants_them(settings, piped, coloured):
    pty = pytest.importorskip("pty")
    ours, theirs = pty.openpty()
    others = {name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "PYTHON_TYRO_ANSI_CODES")}
    environment = {**others, "TERM": "xterm", **settings}
    errors = subprocess.PIPE if piped else theirs
    subprocess.run([sys.executable, "-c", COLOURS], stdout=theirs, stderr=errors, env=environment, timeout=60)
    os.close(theirs)
    text = os.read(ours, 10_000).decode()
    os.close(ours)
    assert "--number" in text
    assert ("\x1b" in text) == coloured


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("import locallip, os; print(os.environ['OMP_WAIT_POLICY'])", "passive"),
        (
            "import os; os.environ['OMP_WAIT_POLICY'] = 'active'; import locallip; print(os.environ['OMP_WAIT_POLICY'])",
            "active",
        ),
        ("import torch, locallip, os; print(os.environ.get('OMP_WAIT_POLICY'))", "None"),
    ],
)
def test_threads_wait_quietly_unless_somebody_has_decided(code, expected):
    """Read when torch is loaded, so it says nothing afterwards; a setting of the user's stays."""
    environment = {name: value for name, value in os.environ.items() if name != "OMP_WAIT_POLICY"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.split() == [expected]
