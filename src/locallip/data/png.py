"""What Pillow lets pass in a PNG file: checksums, missing rows, 16 bits per channel, colours beyond the palette."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator

SIGNATURE = b"\x89PNG\r\n\x1a\n"
#: Chunks that readers must know.
_CRITICAL = (b"IHDR", b"PLTE", b"IDAT", b"IEND")
#: Channels by the colour type of the header: grey, RGB, palette, grey and RGB with transparency.
_CHANNELS = {0: 1, 2: 3, 3: 1, 4: 2, 6: 4}
#: First column and row, and the distance to the next, of the passes of an interlaced image.
_PASSES = ((0, 0, 8, 8), (4, 0, 8, 8), (0, 4, 4, 8), (2, 0, 4, 4), (0, 2, 2, 4), (1, 0, 2, 2), (0, 1, 1, 2))


def check_png(content: bytes, most: int) -> int | None:
    """The number of colours in the palette, None where there is none; ValueError where pixels would come out as others.

    More than `most` bytes of pixels are not unpacked.
    """
    if not content.startswith(SIGNATURE):
        raise ValueError("it does not begin like a PNG file")
    chunks = list(_chunks(content))
    names = [name for name, _ in chunks]
    if not chunks or names[0] != b"IHDR" or names.count(b"IHDR") > 1 or len(chunks[0][1]) != 13:
        raise ValueError("it has no header, or several")
    if names[-1] != b"IEND" or names.count(b"IEND") > 1:
        raise ValueError("it does not end like a PNG file")
    strange = [name for name in names if name[:1].isupper() and name not in _CRITICAL]
    if strange or b"tRNS" in names[names.index(b"IDAT") if b"IDAT" in names else 0 :]:
        raise ValueError("it holds what no reader may pass over")
    width, height, depth, kind, _, _, interlaced = struct.unpack(">IIBBBBB", chunks[0][1])
    if kind not in _CHANNELS or interlaced not in (0, 1) or depth not in (1, 2, 4, 8, 16):
        raise ValueError("its header is wrong")
    if depth == 16:
        raise ValueError("it has 16 bits per channel, and only 8 are read")
    expected = _size(width, height, depth * _CHANNELS[kind], bool(interlaced))
    if expected > most:
        raise ValueError(f"it is {width} x {height} pixels, too many")
    inflate, packed = zlib.decompressobj(), b"".join(data for name, data in chunks if name == b"IDAT")
    rows = inflate.decompress(packed, expected + 1)
    if len(rows) != expected or not inflate.eof or inflate.unused_data:
        raise ValueError("its rows are not all there, or there are too many")
    palettes = [data for name, data in chunks if name == b"PLTE"]
    if len(palettes) > 1 or (kind == 3 and not palettes):
        raise ValueError("it has no palette, or several")
    return len(palettes[0]) // 3 if kind == 3 else None


def _chunks(content: bytes) -> Iterator[tuple[bytes, bytes]]:
    place = len(SIGNATURE)
    while place < len(content):
        if place + 12 > len(content):
            raise ValueError("it is cut short")
        (length,) = struct.unpack_from(">I", content, place)
        name, data, end = content[place + 4 : place + 8], content[place + 8 : place + 8 + length], place + 12 + length
        if end > len(content) or zlib.crc32(name + data) != struct.unpack_from(">I", content, end - 4)[0]:
            raise ValueError("a checksum is wrong: it is damaged")
        yield name, data
        place = end


def _size(width: int, height: int, bits: int, interlaced: bool) -> int:
    """Bytes of all rows, each behind the number of its filter."""
    passes = _PASSES if interlaced else ((0, 0, 1, 1),)
    found = 0
    for left, top, across, down in passes:
        columns, rows = -(-(width - left) // across), -(-(height - top) // down)
        if columns > 0 and rows > 0:
            found += rows * (1 + -(-columns * bits // 8))
    return found
