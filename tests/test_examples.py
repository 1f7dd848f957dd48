"""The examples run as a user runs them, and what they print fits together."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

EXAMPLES = Path(__file__).parent.parent / "examples"
CERTIFIED = re.compile(r"(\d+) of (\d+) inputs certified")


def output(script: str, *args: str) -> str:
    """What an example prints; it must end well and warn of nothing."""
    command = [sys.executable, str(EXAMPLES / script), *args]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert result.returncode == 0, result.stderr
    assert result.stderr == ""
    return result.stdout


def test_all_examples_are_tested() -> None:
    tested = re.findall(r'output\("(\w+\.py)"', Path(__file__).read_text(encoding="utf-8"))
    assert sorted(tested) == sorted(path.name for path in EXAMPLES.glob("*.py"))


def test_a_network_of_ones_own_is_certified() -> None:
    printed = output("certify_your_own.py")
    certified = CERTIFIED.search(printed)
    assert certified is not None
    assert int(certified[1]) > 16  # most of 32 images
    assert "global bound" in printed


def test_the_bound_plugs_into_a_plain_loop() -> None:
    printed = output("plug_in_training.py", "--images", "640", "--epochs", "5", "--certify", "40")
    epochs = re.findall(r"clean +([\d.]+)%  robust\* +([\d.]+)%  local\* +([\d.]+)  global\* +([\d.]+)", printed)
    assert len(epochs) == 5
    for clean, robust, local, everywhere in (map(float, epoch) for epoch in epochs):
        assert robust <= clean
        assert local <= everywhere
    assert float(epochs[-1][0]) > 60  # it learned: guessing is right in a tenth
    assert float(epochs[-1][1]) > float(epochs[0][1])  # and robustly, at a radius that grew
    certified = CERTIFIED.search(printed)
    assert certified is not None
    assert int(certified[1]) > 20  # of 40


def test_bounds_on_one_image_are_ordered_and_hold_what_the_attack_finds() -> None:
    number = r"(-?[\d.]+)"
    lines = output("compare_bounds.py").splitlines()[2:]
    proved = [re.search(rf"<= {number} +>= {number} +>= {number}$", line) for line in lines[:-1]]
    found = re.search(rf"^attack +>= {number} +<= {number} +<= {number}$", lines[-1])
    assert found is not None
    steepest, least, broken = map(float, found.groups())
    rows = [tuple(map(float, row.groups())) for row in proved if row is not None]
    everywhere, paper, sequential, slopes = rows
    assert everywhere[0] > paper[0] >= sequential[0] == slopes[0] >= steepest > 0
    assert everywhere[1] < paper[1] <= sequential[1] < slopes[1] <= least
    assert everywhere[2] <= paper[2] <= sequential[2] <= slopes[2] < broken
    assert slopes[2] == 1.5  # proved by slopes alone
    assert sequential[2] < 1.5
