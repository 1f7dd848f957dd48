"""Image files of the user's own, in a folder per class: whole and plain or refused, where Pillow lets much pass."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np

from locallip.data.errors import DamagedData
from locallip.data.png import check_png

#: More than this is not read into memory at once.
MOST_BYTES_PER_FILE = 2**26
#: The last chunk of a PNG file: no bytes, its name, its checksum.
_PNG_END = b"\0\0\0\0IEND\xaeB`\x82"
#: Cameras write behind the end of a JPEG image, if at all, not more than this.
_BEHIND_JPEG = 2**16


def png(content: bytes, reader: Any) -> Any:
    """Pillow's image of a PNG file; ValueError, or what else Pillow raises, where it is not whole."""
    if not content.endswith(_PNG_END):  # Pillow does not ask for it
        raise ValueError("it does not end like a PNG file: it is cut short")
    colours = check_png(content, MOST_BYTES_PER_FILE)
    image = reader.open(io.BytesIO(content), formats=("PNG",))
    if image.mode == "P" and colours is not None and np.asarray(image).max() >= colours:
        raise ValueError(f"a pixel has a colour that its palette of {colours} lacks")
    image.load()
    return image


def jpeg(content: bytes, reader: Any) -> Any:
    """Pillow's image of a JPEG file; ValueError, or what else Pillow raises, where it is not whole."""
    # Pillow fills up an image that lacks its end without a word, so the end mark is looked for first.
    if content[:2] != b"\xff\xd8" or b"\xff\xd9" not in content[-_BEHIND_JPEG:]:
        raise ValueError("it does not begin and end like a JPEG file: it is cut short")
    image = reader.open(io.BytesIO(content), formats=("JPEG",))
    image.load()
    return image


def is_plain(image: Any) -> bool:
    """Whether each pixel is one colour, and there is one image."""
    return not image.info.keys() & {"transparency"} and (image.format != "PNG" or getattr(image, "n_frames", 1) == 1)


def class_folders(path: Path) -> list[Path]:
    """The folders in a folder that holds one per class and nothing else."""
    entries = sorted(entry for entry in path.iterdir() if not entry.name.startswith("."))
    stray = next((entry for entry in entries if not entry.is_dir()), None)
    if stray is not None or not entries:
        what = f"{stray.name!r} is a file" if stray is not None else "it is empty"
        raise DamagedData(f"{path}: expected one folder per class and nothing else, and {what}")
    return entries
