"""Pillow, which an extra brings: it is needed for image files alone, so it may be absent."""

from __future__ import annotations

import importlib
from typing import Any

from locallip.data.errors import MissingData


def pillow(why: str) -> Any:
    """Pillow's module of images; `why` begins the sentence that says what it is needed for."""
    try:
        return importlib.import_module("PIL.Image")
    except ImportError as error:
        raise MissingData(
            f"{why}, and reading them needs Pillow: pip install 'locallip[images]', or '.[images]' in a clone"
        ) from error


def versions(reader: Any) -> str:
    """Of Pillow and of what reads JPEG files for it: others may round differently."""
    return f"{reader.__version__} {importlib.import_module('PIL.features').version('jpg')}"
