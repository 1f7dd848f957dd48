"""Image files of the user's own, in a folder per class: whole and plain or refused, where Pillow lets much pass."""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from locallip.data.errors import DamagedData
from locallip.data.png import SIGNATURE, check_png

T = TypeVar("T")

#: More than this is not read into memory at once.
MOST_BYTES_PER_FILE = 2**26
#: The last chunk of a PNG file: no bytes, its name, its checksum.
_PNG_END = b"\0\0\0\0IEND\xaeB`\x82"
_JPEG_BEGIN, _JPEG_END = b"\xff\xd8", b"\xff\xd9"
#: Cameras write behind the end of a JPEG image, if at all, not more than this.
_BEHIND_JPEG = 2**16


def image_of(content: bytes, reader: Any, most: int) -> Any:
    """Pillow's image of a PNG or JPEG file with at most `most` bytes of pixels."""
    if content.startswith(SIGNATURE):
        return png(content, reader, most)
    if content.startswith(_JPEG_BEGIN):
        return jpeg(content, reader, most)
    raise ValueError("it is neither PNG nor JPEG")


def png(content: bytes, reader: Any, most: int = MOST_BYTES_PER_FILE) -> Any:
    """Pillow's image of a PNG file; ValueError, or what else Pillow raises, where it is not whole."""
    if not content.endswith(_PNG_END):  # Pillow does not ask for it
        raise ValueError("it does not end like a PNG file: it is cut short")
    colours = check_png(content, most)
    image = reader.open(io.BytesIO(content), formats=("PNG",))
    if image.mode == "P" and colours is not None and np.asarray(image).max() >= colours:
        raise ValueError(f"a pixel has a colour that its palette of {colours} lacks")
    image.load()
    return image


def jpeg(content: bytes, reader: Any, most: int) -> Any:
    """Pillow's image of a JPEG file; ValueError, or what else Pillow raises, where it is cut short or larger than `most`."""
    # Pillow fills up an image that lacks its end without a word, so the end mark is looked for first.
    if _JPEG_END not in content[-_BEHIND_JPEG:]:
        raise ValueError("it does not end like a JPEG file: it is cut short")
    image = reader.open(io.BytesIO(content), formats=("JPEG",))
    if image.width * image.height * 4 > most:  # up to four channels
        raise ValueError(f"it is {image.width} x {image.height} pixels, too many")
    image.load()
    return image


def is_plain(image: Any) -> bool:
    """Whether each pixel is one colour, and there is one image."""
    return not image.info.keys() & {"transparency"} and (image.format != "PNG" or getattr(image, "n_frames", 1) == 1)


def in_turns(by_class: Sequence[Sequence[T]]) -> Iterator[tuple[int, T]]:
    """Number of the class and entry: the first of every class, then the second of every class that has one, and so on.

    So the first so many are of all classes.
    """
    for turn in range(max(map(len, by_class), default=0)):
        yield from ((number, entries[turn]) for number, entries in enumerate(by_class) if turn < len(entries))


def class_folders(path: Path) -> list[Path]:
    """The folders in a folder that holds one per class and nothing else."""
    entries = sorted(entry for entry in path.iterdir() if not entry.name.startswith("."))
    stray = next((entry for entry in entries if not entry.is_dir()), None)
    if stray is not None or not entries:
        what = f"{stray.name!r} is a file" if stray is not None else "it is empty"
        raise DamagedData(f"{path}: expected one folder per class and nothing else, and {what}")
    return entries
