"""The embedded images: complete, unchanged, and refused when they are not."""

import gzip
import lzma
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

import locallip.data
from locallip.data import DamagedData, load_embedded

FOLDER = Path(locallip.data.__file__).parent
ORIGINALS = Path(__file__).parents[2] / "shared" / "data" / "mnist"
HISTOGRAM = {
    "train": [1001, 1127, 991, 1032, 980, 863, 1014, 1070, 944, 978],
    "test": [980, 1135, 1032, 1010, 982, 892, 958, 1028, 974, 1009],
}


@pytest.mark.parametrize("split", ["train", "test"])
def test_counts_shapes_and_labels(split):
    images, labels = load_embedded(split)
    assert images.shape == (10_000, 1, 28, 28)
    assert images.dtype == torch.uint8
    assert (labels.shape, labels.dtype) == ((10_000,), torch.int64)
    assert labels.bincount().tolist() == HISTOGRAM[split]
    assert (int(images.min()), int(images.max())) == (0, 255)


@pytest.mark.skipif(not ORIGINALS.is_dir(), reason="the original MNIST files are not here")
@pytest.mark.parametrize(("split", "name"), [("train", "train"), ("test", "t10k")])
def test_same_bytes_as_the_original_files(split, name):
    images, labels = load_embedded(split)
    pixels = gzip.decompress((ORIGINALS / f"{name}-images-idx3-ubyte.gz").read_bytes())[16:]
    digits = gzip.decompress((ORIGINALS / f"{name}-labels-idx1-ubyte.gz").read_bytes())[8:]
    assert images.numpy().tobytes() == pixels[: 10_000 * 784]
    assert labels.numpy().astype(np.uint8).tobytes() == digits[:10_000]


def test_small_enough_for_a_package():
    assert sum(path.stat().st_size for path in FOLDER.glob("*.xz")) < 3_000_000


def test_missing_file_is_named(tmp_path):
    with pytest.raises(DamagedData, match=r"mnist_test\.xz is missing"):
        load_embedded("test", tmp_path)


def test_truncated_file_is_named(tmp_path):
    whole = (FOLDER / "mnist_test.xz").read_bytes()
    (tmp_path / "mnist_test.xz").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(DamagedData, match=r"mnist_test\.xz cannot be unpacked"):
        load_embedded("test", tmp_path)


def test_file_with_other_bytes_is_named(tmp_path):
    content = bytearray(lzma.decompress((FOLDER / "mnist_test.xz").read_bytes()))
    content[-1] ^= 1
    (tmp_path / "mnist_test.xz").write_bytes(lzma.compress(content, preset=0))
    with pytest.raises(DamagedData, match=r"mnist_test\.xz is damaged: SHA-256"):
        load_embedded("test", tmp_path)


def test_exchanged_files_are_found_out(tmp_path):
    shutil.copy(FOLDER / "mnist_train.xz", tmp_path / "mnist_test.xz")
    with pytest.raises(DamagedData, match="damaged"):
        load_embedded("test", tmp_path)


def test_unknown_split_is_refused():
    with pytest.raises(ValueError, match="unknown split 'validation'"):
        load_embedded("validation")
