"""The order of the tests."""

from __future__ import annotations

import pytest

#: Files with single tests of minutes.
LONG = ("test_shipped_networks.py",)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Long tests first: at the end they would keep one process busy while the others wait."""
    items.sort(key=lambda item: item.path.name not in LONG)
