"""The command line, called as a user calls it: in a process of its own."""

import platform
import subprocess
import sys

import pytest
import torch

import locallip

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
def test_a_wrong_call_is_explained_and_exits_with_2(args, hint):
    done = call(*args)
    assert done.returncode == 2
    assert hint in done.stderr
    assert "Traceback" not in done.stderr


def test_without_the_extra_one_line_says_what_to_install():
    done = call("demo", code=WITHOUT_TYRO)
    assert done.returncode == 1
    assert done.stderr.strip().splitlines() == [
        "locallip: the command line needs the extra 'cli': pip install 'locallip[cli]', or '.[cli]' in a clone"
    ]


def test_version_needs_no_extra():
    done = call("--version", code=WITHOUT_TYRO)
    assert done.returncode == 0
    assert locallip.__version__ in done.stdout
