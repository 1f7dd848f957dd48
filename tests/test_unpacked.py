"""Images that are unpacked once: the second reading takes the kept pixels, unless anything about them has changed."""

from __future__ import annotations

import hashlib
import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from locallip.data import unpacked
from locallip.data.unpacked import kept
from locallip.files import locked

COUNT, SHAPE = 5, (3, 4, 4)


class Source:
    """Images by number, and how many were asked for."""

    def __init__(self, shade: int = 0) -> None:
        self.shade, self.asked = shade, 0

    def __call__(self, index: int) -> np.ndarray:
        self.asked += 1
        return np.full(SHAPE, self.shade + index, dtype=np.uint8)


def read(path, source, mark="a", say=lambda line: None):
    return kept(path, mark, COUNT, SHAPE, source, say)


def test_the_second_reading_unpacks_nothing_and_gives_the_same(tmp_path):
    source, path = Source(), tmp_path / "images.npy"
    first = read(path, source)
    second = read(path, source)
    assert source.asked == COUNT
    assert torch.equal(first, second)
    assert first[3].unique().tolist() == [3]
    second[3] = 77  # changes nothing on disk
    assert torch.equal(read(path, source), first)
    assert {file.name for file in tmp_path.iterdir()} == {"images.npy", "images.json"}


def test_another_source_is_unpacked_anew(tmp_path):
    path, other = tmp_path / "images.npy", Source(100)
    read(path, Source())
    assert read(path, other, "b")[0].unique().tolist() == [100]
    assert other.asked == COUNT
    assert read(path, Source(), "b")[0].unique().tolist() == [100]


def flip(path):
    content = bytearray(path.read_bytes())
    content[-3] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize(
    "harm",
    [
        flip,
        lambda path: path.write_bytes(path.read_bytes()[:-7]),
        lambda path: path.unlink(),
        lambda path: path.with_suffix(".json").unlink(),
        lambda path: path.with_suffix(".json").write_text("{"),
        lambda path: path.with_suffix(".json").write_text("[]"),
        lambda path: path.with_suffix(".json").write_text("[" * 100_000),
        lambda path: np.save(path, np.zeros((COUNT, 3, 4, 5), dtype=np.uint8)),
    ],
)
def test_what_is_damaged_is_unpacked_anew(tmp_path, harm):
    path, source = tmp_path / "images.npy", Source(9)
    read(path, source)
    harm(path)
    assert read(path, source)[1].unique().tolist() == [10]
    assert source.asked == 2 * COUNT
    read(path, source)
    assert source.asked == 2 * COUNT


def test_a_pickle_in_its_place_is_not_opened(tmp_path):
    path = tmp_path / "images.npy"
    read(path, Source())
    np.save(path, np.array([{"a": 1}], dtype=object), allow_pickle=True)
    about = json.loads(path.with_suffix(".json").read_text())
    about["sha256"] = hashlib.sha256(path.read_bytes()).hexdigest()
    path.with_suffix(".json").write_text(json.dumps(about))
    assert read(path, Source(5))[0].unique().tolist() == [5]


@pytest.mark.parametrize("content", [b"", b"PK\5\6" + bytes(18), b"\x93NUMPY\1\0\x10\0{'descr': (((((("])
def test_what_numpy_reads_otherwise_is_unpacked_anew(tmp_path, content):
    path = tmp_path / "images.npy"
    read(path, Source())
    path.write_bytes(content)
    about = json.loads(path.with_suffix(".json").read_text())
    about["sha256"] = hashlib.sha256(path.read_bytes()).hexdigest()
    path.with_suffix(".json").write_text(json.dumps(about))
    assert read(path, Source(5))[0].unique().tolist() == [5]


def test_where_nothing_can_be_written_images_are_unpacked_every_time(tmp_path):
    source, nowhere = Source(), tmp_path / "absent" / "images.npy"
    for turn in (1, 2):
        assert read(nowhere, source)[4].unique().tolist() == [4]
        assert source.asked == turn * COUNT
    assert list(tmp_path.iterdir()) == []


def test_a_fault_leaves_nothing_half_written(tmp_path):
    def broken(index: int) -> np.ndarray:
        if index == 3:
            raise ValueError("image 3 is damaged")
        return np.zeros(SHAPE, dtype=np.uint8)

    with pytest.raises(ValueError, match="image 3 is damaged"):
        read(tmp_path / "images.npy", broken)
    assert list(tmp_path.iterdir()) == []


def test_who_waits_is_told(tmp_path, monkeypatch):
    monkeypatch.setattr(unpacked, "PATIENCE", -1.0)
    said: list[str] = []
    read(tmp_path / "images.npy", Source(), say=said.append)
    assert said[1].startswith("unpacked 2 of 5 images, once and for all in ")
    assert len(said) == COUNT


def test_what_a_killed_process_left_half_written_is_removed(tmp_path):
    path = tmp_path / "images.npy"
    dead, alive = (path.with_name(f".images.npy.{word}.part") for word in ("dead", "alive"))
    for left in (dead, alive):
        left.write_bytes(b"half")
    with locked(alive):
        read(path, Source())
    assert not dead.exists()
    assert alive.exists()


@pytest.mark.parametrize("threads", [1, 3])
def test_two_that_unpack_at_once_get_their_own_pixels(tmp_path, threads):
    """Catches: both write into one file, and one of them starts it anew."""
    path, started = tmp_path / "images.npy", threading.Event()

    def slowly(index: int) -> np.ndarray:
        started.set()
        time.sleep(0.03)
        return np.full(SHAPE, index, dtype=np.uint8)

    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(kept, path, "a", 20, SHAPE, slowly, print, threads)
        started.wait()
        time.sleep(0.1)
        second = pool.submit(kept, path, "a", 20, SHAPE, slowly, print, threads)
        for images in (first.result(), second.result()):
            assert images[:, 0, 0, 0].tolist() == list(range(20))
    assert {file.name for file in tmp_path.iterdir()} == {"images.npy", "images.json"}


def test_what_a_disk_refuses_late_is_unpacked_again(tmp_path, monkeypatch):
    def full(pixels: np.memmap) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(np.memmap, "flush", full)
    source = Source(3)
    assert read(tmp_path / "images.npy", source)[4].unique().tolist() == [7]
    assert source.asked == 2 * COUNT
    assert list(tmp_path.iterdir()) == []


def test_threads_keep_few_images_in_memory(tmp_path):
    """They stop where the one that writes does not keep up."""
    made, threads = [], 2
    images = unpacked._in_order(lambda index: made.append(index) or np.zeros(SHAPE, dtype=np.uint8), 100, threads)
    next(images)
    time.sleep(0.2)
    assert len(made) <= 2 * threads + 1
    images.close()
    assert len(list(unpacked._in_order(Source(), 100, threads))) == 100
