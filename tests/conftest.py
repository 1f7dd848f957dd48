"""The order of the tests, and what several files of them use."""

from __future__ import annotations

import os

import pytest
from hypothesis import settings

from locallip import cli

#: Examples of properties that do not say how many: LOCALLIP_THOROUGH=1 has hypothesis's own number. That an example takes
#: long on a busy machine is no mistake.
settings.register_profile("quick", max_examples=30, deadline=None)
settings.register_profile("thorough", deadline=None)
settings.load_profile("thorough" if os.environ.get("LOCALLIP_THOROUGH") else "quick")

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
