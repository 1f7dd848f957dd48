"""The order of the tests, and what several files of them use."""

from __future__ import annotations

import os

import pytest
from hypothesis import settings

from locallip import cli

#: Examples of properties that do not say how many: LOCALLIP_THOROUGH=1 has hypothesis's own number.
settings.register_profile("quick", max_examples=30)
if not os.environ.get("LOCALLIP_THOROUGH"):
    settings.load_profile("quick")

#: Files with single tests of minutes.
LONG = ("test_shipped_networks.py",)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Long tests first: at the end they would keep one process busy while the others wait."""
    items.sort(key=lambda item: item.path.name not in LONG)


@pytest.fixture
def command(capsys):
    """The command inside this process: code, stdout and stderr; whatever else than an exit gets out is a traceback."""

    def called(*args):
        try:
            code = cli.main([str(arg) for arg in args])
        except SystemExit as exit:  # the parser of options leaves this way
            code = exit.code
        found = capsys.readouterr()
        return code, found.out, found.err

    return called
