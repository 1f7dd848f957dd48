"""Readers of MNIST, CIFAR-10 and Tiny-ImageNet: right files give right images, wrong ones are named, none is executed."""

import gzip
import hashlib
import io
import os
import pickle
import shutil
import struct
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from locallip.data import DamagedData, ImageSet, MissingData, cifar10, hold_out, load_images, mnist, tiny_imagenet
from locallip.data import download as downloads
from locallip.data.cifar10 import load_cifar10
from locallip.data.download import Source, fetch
from locallip.data.files import Published
from locallip.data.mnist import load_mnist
from locallip.data.plain_pickle import NotPlain, as_array, read_plain
from locallip.data.tiny_imagenet import Counts, load_tiny_imagenet

SHARED = Path(__file__).parents[2] / "shared" / "data"
needs_shared = pytest.mark.skipif(not (SHARED / "unpack.py").is_file(), reason="the published files are not here")
COUNT = 20


def md5(content):
    return hashlib.md5(content, usedforsecurity=False).hexdigest()


def snapshot(folder):
    return {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture(autouse=True)
def no_network(monkeypatch):
    """A reader that was not asked to download must not try; tests of downloads use file addresses."""

    def refuse(*args, **kwargs):
        raise AssertionError("the network was used")

    monkeypatch.setattr("socket.create_connection", refuse)
    monkeypatch.delenv("LOCALLIP_DATA", raising=False)


# ---------------------------------------------------------------------------------------------------------- image sets


def small_set(sizes, classes=None):
    labels = torch.cat([torch.full((size,), label) for label, size in enumerate(sizes)])
    labels = labels[torch.randperm(len(labels), generator=torch.Generator().manual_seed(1))]
    images = torch.arange(len(labels), dtype=torch.uint8).reshape(-1, 1, 1, 1).expand(-1, 1, 2, 3).contiguous()
    return ImageSet("mnist", "train", images, labels, classes or tuple(map(str, range(len(sizes)))))


@pytest.mark.parametrize(
    ("images", "labels", "message"),
    [
        (torch.zeros(2, 1, 4, 4), torch.zeros(2, dtype=torch.int64), "uint8"),
        (torch.zeros(2, 4, 4, dtype=torch.uint8), torch.zeros(2, dtype=torch.int64), r"\(N, C, H, W\)"),
        (torch.zeros(2, 1, 4, 4, dtype=torch.uint8), torch.zeros(3, dtype=torch.int64), r"\(2,\) int64"),
        (torch.zeros(2, 1, 4, 4, dtype=torch.uint8), torch.zeros(2), r"\(2,\) int64"),
        (torch.zeros(2, 1, 4, 4, dtype=torch.uint8), torch.tensor([0, 2]), "2 classes"),
        (torch.zeros(2, 1, 4, 4, dtype=torch.uint8), torch.tensor([-1, 0]), "2 classes"),
    ],
)
def test_an_image_set_refuses_what_does_not_fit(images, labels, message):
    with pytest.raises(ValueError, match=message):
        ImageSet("x", "train", images, labels, ("a", "b"))


def test_held_out_images_are_balanced_and_nothing_is_lost():
    whole = small_set([30, 30, 30])
    train, validation = hold_out(whole, 10, seed=3)
    assert (train.split, validation.split, len(train), len(validation)) == ("train", "validation", 80, 10)
    assert sorted(validation.labels.bincount().tolist()) == [3, 3, 4]
    numbers = torch.cat([train.images[:, 0, 0, 0], validation.images[:, 0, 0, 0]])
    assert sorted(numbers.tolist()) == list(range(90))
    for part in (train, validation):
        assert part.images[:, 0, 0, 0].diff().gt(0).all()  # in the order of the whole
        assert torch.equal(part.labels, whole.labels[part.images[:, 0, 0, 0].long()])


def test_the_seed_decides_which_images_are_held_out():
    whole = small_set([40, 40])
    first, again, other = (hold_out(whole, 20, seed)[1].images for seed in (0, 0, 1))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    lonely = {int(hold_out(whole, 1, seed)[1].labels) for seed in range(20)}
    assert lonely == {0, 1}  # no class is favoured by its number


def test_a_class_that_runs_out_is_made_up_for_by_the_others():
    train, validation = hold_out(small_set([2, 50, 50, 0]), 32)
    assert validation.labels.bincount(minlength=4).tolist() == [2, 15, 15, 0]
    assert train.labels.bincount(minlength=4).tolist() == [0, 35, 35, 0]


def test_nothing_held_out_leaves_all():
    train, validation = hold_out(small_set([3, 3]), 0)
    assert (len(train), len(validation)) == (6, 0)


@pytest.mark.parametrize("count", [-1, 6, 7])
def test_an_impossible_number_held_out_is_refused(count):
    with pytest.raises(ValueError, match=f"cannot hold out {count} of 6"):
        hold_out(small_set([3, 3]), count)


# ------------------------------------------------------------------------------------------------------------ registry


def test_embedded_needs_no_root(monkeypatch, tmp_path):
    monkeypatch.setenv("LOCALLIP_DATA", str(tmp_path / "nowhere"))
    images = load_images("embedded", "test")
    assert (images.name, images.split, images.shape, len(images)) == ("embedded", "test", (1, 28, 28), 10_000)
    assert images.classes == tuple("0123456789")


def test_unknown_names_are_refused():
    with pytest.raises(ValueError, match=r"unknown data set 'cifar-10'.*did you mean 'cifar10'"):
        load_images("cifar-10", "train")
    with pytest.raises(ValueError, match="unknown split 'val'"):
        load_images("mnist", "val")


@pytest.mark.parametrize("name", ["mnist", "cifar10", "tiny-imagenet"])
def test_what_is_not_there_is_said_with_what_to_do(name, tmp_path, monkeypatch):
    remedy = "--data-root DIR.*--download"
    with pytest.raises(MissingData, match=f"(?s)was not found, looked for .*{tmp_path}.*{remedy}"):
        load_images(name, "train", tmp_path)
    with pytest.raises(MissingData, match=f"nowhere does not exist; .*{remedy}"):
        load_images(name, "test", tmp_path / "nowhere")
    (tmp_path / "file").write_text("x")
    with pytest.raises(MissingData, match=f"file is a file, not a folder; .*{remedy}"):
        load_images(name, "test", tmp_path / "file")
    with pytest.raises(MissingData, match="cannot be used"):
        load_images(name, "test", tmp_path / "file", download=True)
    monkeypatch.setenv("LOCALLIP_DATA", str(tmp_path / "elsewhere"))
    with pytest.raises(MissingData, match="elsewhere does not exist"):
        load_images(name, "test")
    monkeypatch.delenv("LOCALLIP_DATA")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(MissingData, match="the data root data does not exist"):
        load_images(name, "test")


# --------------------------------------------------------------------------------------------------------------- MNIST


def idx(values):
    return b"\0\0\x08" + bytes([values.ndim]) + struct.pack(f">{values.ndim}I", *values.shape) + values.tobytes()


def digits(seed=0, count=COUNT):
    random = np.random.default_rng(seed)
    return random.integers(0, 256, (count, 28, 28), np.uint8), random.integers(0, 10, count, np.uint8)


def write_mnist(folder, pixels, labels, split="train", packed=True):
    """Write the two files of a split and return the table that a reader checks them with."""
    folder.mkdir(parents=True, exist_ok=True)
    table = {}
    for name, values in zip(mnist.FILES[split], (pixels, labels), strict=True):
        content = idx(values)
        table[name] = Published(md5(content), COUNT)
        (folder / (f"{name}.gz" if packed else name)).write_bytes(gzip.compress(content) if packed else content)
    return table


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("folder", ["", "mnist", "MNIST/raw"])
@pytest.mark.parametrize("split", ["train", "test"])
def test_mnist_is_read_from_its_usual_places(tmp_path, folder, packed, split):
    pixels, labels = digits()
    table = write_mnist(tmp_path / folder, pixels, labels, split, packed)
    images = load_mnist(split, tmp_path, _published=table)
    assert (images.name, images.split, images.classes) == ("mnist", split, tuple("0123456789"))
    assert np.array_equal(images.images.numpy(), pixels[:, None])
    assert images.labels.tolist() == labels.tolist()


def test_the_environment_names_the_root(tmp_path, monkeypatch):
    table = write_mnist(tmp_path, *digits())
    monkeypatch.setenv("LOCALLIP_DATA", str(tmp_path))
    assert len(load_mnist("train", _published=table)) == COUNT


def damage_cut_gz(path):
    path.write_bytes(path.read_bytes()[:-30])


def damage_cut_inside(path):
    path.write_bytes(gzip.compress(gzip.decompress(path.read_bytes())[:-1]))


def damage_header_only(path):
    path.write_bytes(gzip.compress(b"\0\0\x08"))


def damage_empty(path):
    path.write_bytes(b"")


def damage_no_gz(path):
    path.write_bytes(b"<html>not found</html>")


def damage_one_bit(path):
    content = bytearray(gzip.decompress(path.read_bytes()))
    content[-1] ^= 1
    path.write_bytes(gzip.compress(content))


def damage_longer(path):
    path.write_bytes(gzip.compress(gzip.decompress(path.read_bytes()) + b"\0"))


def damage_bomb(path):
    path.write_bytes(gzip.compress(bytes(50_000_000)))


@pytest.mark.parametrize("which", [0, 1])
@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (damage_cut_gz, "cannot be unpacked"),
        (damage_no_gz, "cannot be unpacked"),
        (damage_empty, "does not begin like an idx file"),
        (damage_header_only, "does not begin like an idx file"),
        (damage_cut_inside, "ends after"),
        (damage_one_bit, "MD5"),
        (damage_longer, "more than the expected"),
        (damage_bomb, "more than the expected"),
    ],
)
def test_a_damaged_mnist_file_is_named(tmp_path, damage, message, which):
    table = write_mnist(tmp_path, *digits())
    name = f"{mnist.FILES['train'][which]}.gz"
    damage(tmp_path / name)
    before = snapshot(tmp_path)
    with pytest.raises(DamagedData, match=rf"{name} is damaged: .*{message}.*remove it.*--data-root DIR.*--download"):
        load_mnist("train", tmp_path, download=True, _published=table)
    assert snapshot(tmp_path) == before


def test_a_label_beyond_the_classes_is_found(tmp_path):
    pixels, labels = digits()
    labels[7] = 255
    table = write_mnist(tmp_path, pixels, labels)
    with pytest.raises(DamagedData, match=r"train-labels-idx1-ubyte\.gz is damaged: it holds the label 255"):
        load_mnist("train", tmp_path, _published=table)


def test_a_wrong_number_of_images_or_labels_is_found(tmp_path):
    pixels, labels = digits()
    table = write_mnist(tmp_path, pixels[:-1], labels)
    with pytest.raises(DamagedData, match=r"train-images.*shape \(19, 28, 28\), expected \(20, 28, 28\)"):
        load_mnist("train", tmp_path, _published=table)
    table = write_mnist(tmp_path, pixels, labels[:-1])
    with pytest.raises(DamagedData, match=r"train-labels.*shape \(19,\), expected \(20,\)"):
        load_mnist("train", tmp_path, _published=table)


def test_swapped_mnist_files_are_found(tmp_path):
    table = write_mnist(tmp_path, *digits())
    table |= write_mnist(tmp_path, *digits(1), split="test")
    images, labels = (tmp_path / f"{name}.gz" for name in mnist.FILES["train"])
    shutil.copy(tmp_path / "t10k-images-idx3-ubyte.gz", images)
    with pytest.raises(DamagedData, match=r"train-images.*MD5"):
        load_mnist("train", tmp_path, _published=table)
    shutil.copy(labels, images)
    with pytest.raises(DamagedData, match=r"train-images.*1 axes, expected 3|train-images.*like an idx file"):
        load_mnist("train", tmp_path, _published=table)


def test_the_missing_one_of_two_files_is_named(tmp_path):
    table = write_mnist(tmp_path, *digits())
    (tmp_path / "train-labels-idx1-ubyte.gz").unlink()
    with pytest.raises(MissingData, match=r"incomplete: train-labels-idx1-ubyte .*is missing.*--download"):
        load_mnist("train", tmp_path, _published=table)


# ------------------------------------------------------------------------------------------------------------- CIFAR-10


def python2_pickle(pixels, labels, extra=b"", shape=None, kind=b"u1", fortran=False):
    """The bytes that Python 2 wrote for a batch, opcode by opcode (protocol 2), as in the published files."""

    def text(value):
        return b"U" + bytes([len(value)]) + value

    raw = pixels.tobytes(order="F" if fortran else "C")
    rows, columns = shape or pixels.shape
    array = b"cnumpy.core.multiarray\n_reconstruct\nq\x07cnumpy\nndarray\nq\x08K\x00\x85" + text(b"b") + b"\x87Rq\x09"
    dtype = (
        b"cnumpy\ndtype\nq\x0a"
        + text(kind)
        + b"K\x00K\x01\x87Rq\x0b(K\x03"
        + text(b"|")
        + b"NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb"
    )
    size = b"J" + struct.pack("<i", rows) + b"M" + struct.pack("<H", columns) + b"\x86"
    array += b"(K\x01" + size + dtype + (b"\x88" if fortran else b"\x89") + b"T" + struct.pack("<i", len(raw)) + raw + b"tb"
    numbers = b"]q\x05(" + b"".join(b"K" + bytes([label]) for label in labels) + b"e"
    names = b"]r\x00\x01\x00\x00(" + b"".join(text(b"image_%d.png" % i) for i in range(len(labels))) + b"e"
    items = (
        text(b"batch_label") + b"q\x02" + text(b"training batch 1 of 5") + b"q\x03" + text(b"labels") + b"q\x04" + numbers
    )
    return b"\x80\x02}q\x01(" + items + text(b"data") + b"q\x06" + array + text(b"filenames") + names + extra + b"u."


def binary_batch(pixels, labels):
    return np.concatenate([labels[:, None], pixels], 1).tobytes()


def pictures(batch):
    random = np.random.default_rng(batch)
    return random.integers(0, 256, (COUNT, 3072), np.uint8), random.integers(0, 10, COUNT, np.uint8)


LAYOUTS = ["cifar-10-batches-bin", "cifar-10-batches-py", "cifar-10-binary.tar.gz", "cifar-10-python.tar.gz"]
BATCHES = [*cifar10.BATCHES["train"], "test_batch"]


def batches(layout):
    """The files of a layout by name."""
    binary = "bin" in layout
    encode = binary_batch if binary else python2_pickle
    return {f"{name}{'.bin' if binary else ''}": encode(*pictures(i)) for i, name in enumerate(BATCHES)}


def pack(path, folder, contents):
    with tarfile.open(path, "w:gz") as archive:
        for name, content in {"readme.html": b"hello", **contents}.items():
            member = tarfile.TarInfo(f"{folder}/{name}")
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))


def write_cifar10(root, layout, contents=None):
    """Write a layout and return the table that a reader checks it with; other layouts keep their published entries."""
    contents = batches(layout) if contents is None else contents
    table = dict(cifar10.PUBLISHED) | {name: Published(md5(content), COUNT) for name, content in contents.items()}
    if layout.endswith(".gz"):
        folder = "cifar-10-batches-bin" if "binary" in layout else "cifar-10-batches-py"
        pack(root / layout, folder, contents)
        table[layout] = Published(md5((root / layout).read_bytes()))
    else:
        (root / layout).mkdir(parents=True, exist_ok=True)
        for name, content in contents.items():
            (root / layout / name).write_bytes(content)
    return table


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_of_cifar10_gives_the_same_images(tmp_path, layout):
    table = write_cifar10(tmp_path, layout)
    test, train = (load_cifar10(split, tmp_path, _published=table) for split in ("test", "train"))
    assert (test.images.shape, train.images.shape) == ((COUNT, 3, 32, 32), (5 * COUNT, 3, 32, 32))
    pixels, labels = (np.concatenate(parts) for parts in zip(*(pictures(i) for i in range(5)), strict=True))
    assert np.array_equal(train.images.numpy().reshape(-1, 3072), pixels)
    assert train.labels.tolist() == labels.tolist()
    assert np.array_equal(test.images.numpy().reshape(-1, 3072), pictures(5)[0])
    assert (train.classes[0], train.classes[3], train.classes[9]) == ("airplane", "cat", "truck")
    train.images[0] = 0  # memory of its own, so that nothing warns or fails


@pytest.mark.parametrize("layout", LAYOUTS)
def test_cifar10_in_a_folder_of_its_own(tmp_path, layout):
    (tmp_path / "cifar10").mkdir()
    table = write_cifar10(tmp_path / "cifar10", layout)
    assert len(load_cifar10("test", tmp_path, _published=table)) == COUNT
    if not layout.endswith(".gz"):
        assert len(load_cifar10("test", tmp_path / "cifar10" / layout, _published=table)) == COUNT


def test_the_file_pickled_here_is_one_that_python_reads_alike():
    pixels, labels = pictures(0)
    batch = pickle.loads(python2_pickle(pixels, labels), encoding="latin1")
    assert np.array_equal(batch["data"], pixels)
    assert batch["labels"] == labels.tolist()
    assert len(batch["filenames"]) == COUNT


def test_an_array_stored_column_by_column_is_read_too():
    pixels, labels = pictures(0)
    content = python2_pickle(pixels, labels, fortran=True)
    assert np.array_equal(as_array(read_plain(content)["data"]), pixels)


class Runs:
    """Pickled, it is a call of os.system."""

    def __init__(self, command):
        self.command = command

    def __reduce__(self):
        return os.system, (self.command,)


def hostile(path):
    """Pickles that would make the file `path`, by each way in which a pickle can call something."""
    command = f"echo broken > {path}"
    call = f"(S'{command}'\n".encode()
    return {
        "protocol 0": pickle.dumps(Runs(command), 0),
        "protocol 2": pickle.dumps(Runs(command), 2),
        "protocol 4": pickle.dumps(Runs(command), 4),
        "inside a batch": python2_pickle(*pictures(0), extra=b"U\x01xcos\nsystem\n" + call + b"tR"),
        "INST": b"(S'" + command.encode() + b"'\nios\nsystem\n.",
        "OBJ": b"(cos\nsystem\nS'" + command.encode() + b"'\no.",
        "builtins": b"cbuiltins\neval\n(S'open(\"" + str(path).encode() + b'", "w")\'\ntR.',
        "old builtins": b"c__builtin__\neval\n(S'open(\"" + str(path).encode() + b'", "w")\'\ntR.',
        "numpy": b"cnumpy.testing._private.utils\nrunstring\n(S'open(\"" + str(path).encode() + b'", "w")\'\n}tR.',
        "dotted": b"\x80\x04\x8c\x05numpy\x8c\x09os.system\x93" + call + b"tR.",
        "NEWOBJ": b"\x80\x02csubprocess\nPopen\n(S'" + command.encode() + b"'\nt\x81.",
        "extension": b"\x80\x02\x82\x01(S'x'\ntR.",
        "persistent": b"Pos.system\n.",
    }


@pytest.mark.parametrize("kind", hostile("x"))
def test_a_hostile_pickle_is_refused_and_does_not_run(tmp_path, kind):
    mark = tmp_path / "ran"
    content = hostile(mark)[kind]
    with pytest.raises(NotPlain, match=r"nothing of it was executed"):
        read_plain(content)
    root = tmp_path / "root"
    contents = batches(LAYOUTS[1]) | {"data_batch_3": content}
    table = write_cifar10(root, LAYOUTS[1], contents)
    with pytest.raises(DamagedData, match=r"data_batch_3 is damaged: .*nothing of it was executed"):
        load_cifar10("train", root, _published=table)
    with pytest.raises(DamagedData, match="data_batch_3 is damaged: MD5"):
        load_cifar10("train", root, _published=table | {"data_batch_3": Published("0" * 32, COUNT)})
    assert not mark.exists()


def test_the_hostile_pickles_are_hostile(tmp_path):
    mark = tmp_path / "ran"
    pickle.loads(hostile(mark)["inside a batch"], encoding="latin1")
    assert mark.exists()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "not a whole pickle"),
        (b"hello", "pickle"),
        (b"\x80\x02}q\x01(U\x04data", "not a whole pickle"),
        (b"K\x01K\x02.", "not a whole pickle"),
        (b"h\x05.", "not a whole pickle"),
        (b"(K\x01\x86.", "value that is not there"),
        (b"}K\x01K\x02s.", "keys are not words"),
        (b"K\x01K\x02a.", "fills a int"),
        (b"]K\x01b.", "fills a list"),
        (b"K\x01)R.", "no function of numpy"),
        (b"e.", "not a whole pickle"),
    ],
)
def test_what_is_no_plain_pickle_is_refused(content, message):
    with pytest.raises(NotPlain, match=message):
        read_plain(content)


@settings(max_examples=300)
@given(st.data())
def test_changed_bytes_of_a_pickle_end_in_a_value_or_in_the_one_error(data):
    pixels, labels = pictures(0)
    content = bytearray(python2_pickle(pixels[:2, :4], labels[:2]))
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    try:
        value = read_plain(bytes(content[: data.draw(st.integers(1, len(content)))]))
        array = as_array(value["data"]) if isinstance(value, dict) and "data" in value else None
    except NotPlain:
        return
    assert array is None or array.dtype == np.uint8


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        (b"\x80\x02].", "no dictionary with `data` and `labels`"),
        (b"\x80\x02}(U\x04dataK\x01U\x06labels]u.", "no array where one is expected"),
        (python2_pickle(*pictures(1), kind=b"i1"), "something else than bytes"),
        (python2_pickle(*pictures(1), kind=b"O8"), "something else than bytes"),
        (python2_pickle(*pictures(1), shape=(COUNT + 1, 3072)), "shape that does not fit"),
        (python2_pickle(*pictures(1), shape=(-COUNT, 3072)), "shape that does not fit"),
        (python2_pickle(pictures(1)[0], pictures(1)[1][:-1]), "20.* pixels and 19 labels"),
        (python2_pickle(pictures(1)[0][:-1], pictures(1)[1]), "19.* pixels and 20 labels"),
        (python2_pickle(pictures(1)[0], [255] * COUNT), "label 255, beyond the 10 classes"),
        (python2_pickle(*pictures(1)).replace(b"labelsq\x04]q\x05(K", b"labelsq\x04]q\x05(NK"), "no list of small numbers"),
    ],
)
def test_a_python_batch_with_other_content_is_named(tmp_path, batch, message):
    table = write_cifar10(tmp_path, LAYOUTS[1], batches(LAYOUTS[1]) | {"data_batch_2": batch})
    with pytest.raises(DamagedData, match=f"data_batch_2 is damaged: .*{message}"):
        load_cifar10("train", tmp_path, _published=table)


def test_wrong_binary_batches_are_named(tmp_path):
    good = batches(LAYOUTS[0])
    table = write_cifar10(tmp_path, LAYOUTS[0])
    path = tmp_path / LAYOUTS[0] / "data_batch_4.bin"
    for content, message in (
        (good["data_batch_4.bin"][:-1], "61,459 bytes, expected 61,460"),
        (good["data_batch_4.bin"] + b"\0", "more than the expected 61,460 bytes"),
        (good["data_batch_3.bin"], "MD5"),
        (b"", "0 bytes"),
    ):
        path.write_bytes(content)
        with pytest.raises(DamagedData, match=rf"data_batch_4\.bin is damaged: .*{message}.*--data-root DIR.*--download"):
            load_cifar10("train", tmp_path, _published=table)
    pixels, labels = pictures(3)
    labels[0] = 255
    table = write_cifar10(tmp_path, LAYOUTS[0], good | {"data_batch_4.bin": binary_batch(pixels, labels)})
    with pytest.raises(DamagedData, match=r"data_batch_4\.bin is damaged: it holds the label 255"):
        load_cifar10("train", tmp_path, _published=table)


def test_a_missing_batch_is_named_and_a_whole_layout_preferred(tmp_path):
    contents = batches(LAYOUTS[0])
    del contents["data_batch_2.bin"]
    table = write_cifar10(tmp_path, LAYOUTS[0], contents)
    with pytest.raises(MissingData, match=r"incomplete: data_batch_2\.bin missing; .*--data-root DIR"):
        load_cifar10("train", tmp_path, _published=table)
    assert len(load_cifar10("test", tmp_path, _published=table)) == COUNT
    table |= {name: entry for name, entry in write_cifar10(tmp_path, LAYOUTS[3]).items() if not name.endswith(".bin")}
    assert len(load_cifar10("train", tmp_path, _published=table)) == 5 * COUNT


def test_an_empty_folder_and_a_file_in_its_place(tmp_path):
    (tmp_path / "cifar-10-batches-bin").mkdir()
    with pytest.raises(
        MissingData, match=r"cifar-10-batches-bin is incomplete: data_batch_1\.bin, .*data_batch_5\.bin missing"
    ):
        load_cifar10("train", tmp_path)
    (tmp_path / "cifar-10-batches-bin").rmdir()
    (tmp_path / "cifar-10-batches-bin").write_text("x")
    with pytest.raises(MissingData, match="CIFAR-10 was not found"):
        load_cifar10("train", tmp_path)


def with_md5(table, path):
    return table | {path.name: Published(md5(path.read_bytes()))}


@pytest.mark.parametrize("layout", LAYOUTS[2:])
def test_wrong_archives_are_named(tmp_path, layout):
    table = write_cifar10(tmp_path, layout)
    path = tmp_path / layout
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(DamagedData, match=f"{layout} is damaged: MD5"):
        load_cifar10("train", tmp_path, _published=table)
    with pytest.raises(DamagedData, match=f"{layout} is damaged: it cannot be unpacked"):
        load_cifar10("train", tmp_path, _published=with_md5(table, path))
    path.write_bytes(b"no archive")
    with pytest.raises(DamagedData, match=f"{layout} is damaged: it cannot be unpacked"):
        load_cifar10("train", tmp_path, _published=with_md5(table, path))
    contents = batches(layout)
    name = next(name for name in contents if "_5" in name)
    folder = "cifar-10-batches-bin" if "binary" in layout else "cifar-10-batches-py"
    pack(path, folder, {key: content for key, content in contents.items() if key != name})
    with pytest.raises(DamagedData, match=f"{name} missing in it"):
        load_cifar10("train", tmp_path, _published=with_md5(table, path))
    pack(path, folder, contents | {name: bytes(10_000_000)})
    with pytest.raises(DamagedData, match=f"{name} is damaged: it holds 10,000,000 bytes, expected at most"):
        load_cifar10("train", tmp_path, _published=with_md5(table, path))


def test_a_link_in_an_archive_is_not_followed(tmp_path):
    path = tmp_path / "cifar-10-binary.tar.gz"
    with tarfile.open(path, "w:gz") as archive:
        link = tarfile.TarInfo("cifar-10-batches-bin/test_batch.bin")
        link.type, link.linkname = tarfile.SYMTYPE, "../../secret"
        archive.addfile(link)
    with pytest.raises(DamagedData, match=r"test_batch\.bin missing in it"):
        load_cifar10("test", tmp_path, _published=with_md5(cifar10.PUBLISHED, path))
    assert [entry.name for entry in tmp_path.iterdir()] == [path.name]


# -------------------------------------------------------------------------------------------------------- Tiny-ImageNet

WNIDS = ("n03", "n01", "n02")
TINY = Counts(classes=3, train=4, test=2)


def jpeg(shade, size=(64, 64), mode="RGB", kind="JPEG"):
    colour = shade if mode == "L" else (shade, 255 - shade, 30)
    stream = io.BytesIO()
    Image.new(mode, size, colour).save(stream, kind, **({"quality": 95} if kind == "JPEG" else {}))
    return stream.getvalue()


def tiny_files():
    """The files of a small Tiny-ImageNet; the shade of an image tells its class and whether it is for training."""
    files = {"wnids.txt": "".join(f"{wnid}\n" for wnid in WNIDS).encode()}
    for label, wnid in enumerate(sorted(WNIDS)):
        for i in range(4):
            content = jpeg(20 + 50 * label, mode="L" if i == 3 else "RGB")
            files[f"train/{wnid}/images/{wnid}_{i}.JPEG"] = content
        files[f"train/{wnid}/{wnid}_boxes.txt"] = b"ignored"
    lines = []
    for i, wnid in enumerate(["n02", "n01", "n03", "n03", "n01", "n02"]):
        files[f"val/images/val_{i}.JPEG"] = jpeg(30 + 50 * sorted(WNIDS).index(wnid))
        lines.append(f"val_{i}.JPEG\t{wnid}\t0\t0\t62\t62\n")
    return files | {"val/val_annotations.txt": "".join(lines).encode()}


def write_tiny(root, changes=None):
    """Write the folder, with some files replaced, or left out where the change is None."""
    folder = root / "tiny-imagenet-200"
    for name, content in (tiny_files() | (changes or {})).items():
        if content is not None:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(content)
    return folder


def write_tiny_zip(root):
    path = root / "tiny-imagenet-200.zip"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("tiny-imagenet-200/train/", "")
        for name, content in tiny_files().items():
            archive.writestr(f"tiny-imagenet-200/{name}", content)
    return Counts(3, 4, 2, md5(path.read_bytes()))


@pytest.mark.parametrize("place", ["folder", "the folder itself", "zip"])
def test_tiny_imagenet_is_read_from_folder_and_archive(tmp_path, place):
    counts = TINY
    if place == "zip":
        counts = write_tiny_zip(tmp_path)
    else:
        write_tiny(tmp_path)
    root = tmp_path / "tiny-imagenet-200" if place == "the folder itself" else tmp_path
    train = load_tiny_imagenet("train", root, _counts=counts)
    assert (train.images.shape, train.classes) == ((12, 3, 64, 64), ("n01", "n02", "n03"))
    assert train.labels.tolist() == [0] * 4 + [1] * 4 + [2] * 4
    red, green = train.images[:, 0, 32, 32].int(), train.images[:, 1, 32, 32].int()
    shade = 20 + 50 * train.labels
    grey = torch.arange(12) % 4 == 3
    assert (red - shade).abs().max() <= 3  # JPEG rounds colours
    assert (green - torch.where(grey, shade, 255 - shade)).abs().max() <= 3
    test = load_tiny_imagenet("test", root, _counts=counts)
    assert (test.split, test.labels.tolist()) == ("test", [1, 0, 2, 2, 0, 1])
    assert (test.images[:, 0, 5, 60].int() - (30 + 50 * test.labels)).abs().max() <= 3


TRAIN_IMAGE, VAL_IMAGE, TABLE = "train/n02/images/n02_1.JPEG", "val/images/val_4.JPEG", "val/val_annotations.txt"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (jpeg(9)[:-2], "does not begin and end like a JPEG"),
        (jpeg(9)[: len(jpeg(9)) // 2], "does not begin and end like a JPEG"),
        (jpeg(9)[:300] + b"\xff\xd9", "cannot be read as JPEG"),
        (b"", "does not begin and end like a JPEG"),
        (b"\xff\xd8\xff\xd9", "cannot be read as JPEG"),
        (jpeg(9, kind="PNG"), "does not begin and end like a JPEG"),
        (b"\xff\xd8" + jpeg(9, kind="PNG") + b"\xff\xd9", "cannot be read as JPEG"),
        (jpeg(9, size=(64, 32)), "64 x 32 pixels, expected 64 x 64"),
        (jpeg(9, size=(5000, 5000)), "5000 x 5000 pixels"),
        (b"\xff\xd8" + bytes(2_000_000), "more than the expected 1,000,000 bytes"),
    ],
)
def test_a_damaged_jpeg_is_named(tmp_path, content, message):
    write_tiny(tmp_path, {TRAIN_IMAGE: content, VAL_IMAGE: content})
    for split, name in (("train", TRAIN_IMAGE), ("test", VAL_IMAGE)):
        with pytest.raises(DamagedData, match=f"{name} is damaged: .*{message}.*--data-root DIR"):
            load_tiny_imagenet(split, tmp_path, _counts=TINY)


@pytest.mark.parametrize(
    ("changes", "split", "message"),
    [
        ({TRAIN_IMAGE: None}, "train", "train/n02/images is damaged: it holds 3 images, expected 4"),
        ({"train/n02/images/n02_9.JPEG": jpeg(1)}, "train", "train/n02/images is damaged: it holds 5 images"),
        (
            {TRAIN_IMAGE: None, "train/n02/images/n01_1.JPEG": jpeg(1)},
            "train",
            "n01_1.JPEG is damaged: it is in the folder of n02",
        ),
        ({"wnids.txt": b"n01\nn02\n"}, "train", "wnids.txt is damaged: it names 2 classes, expected 3"),
        ({"wnids.txt": b"n01\nn02\nn02\n"}, "test", "wnids.txt is damaged: it names 2 classes, expected 3"),
        ({"wnids.txt": b"n01\nn02\nn03\nn03\n"}, "train", "wnids.txt is damaged: it names a class twice"),
        ({"wnids.txt": b"\xff\xfe\0"}, "test", "wnids.txt is damaged: it names 1 classes"),
        ({VAL_IMAGE: None}, "test", "val/images is damaged: 'val_4.JPEG' is missing"),
        ({TABLE: b"val_0.JPEG\tn09\t0\n"}, "test", "val_annotations.txt is damaged: line 1 .*n09"),
        ({TABLE: b"val_0.JPEG\tn01\nval_0.JPEG\tn01\n"}, "test", "val_annotations.txt is damaged: line 2"),
        ({TABLE: b"val_0.JPEG\n"}, "test", "val_annotations.txt is damaged: line 1"),
        ({TABLE: b"../../wnids.txt\tn01\n"}, "test", "'../../wnids.txt' is missing"),
        ({TABLE: b"val_0.JPEG\tn01\n"}, "test", "val_annotations.txt is damaged: it gives n01 1 images, expected 2"),
        ({TABLE: b""}, "test", "val_annotations.txt is damaged: it gives n01 0 images, expected 2"),
    ],
)
def test_wrong_folders_and_lists_are_named(tmp_path, changes, split, message):
    write_tiny(tmp_path, changes)
    with pytest.raises(DamagedData, match=message):
        load_tiny_imagenet(split, tmp_path, _counts=TINY)


@pytest.mark.parametrize("root", [".", "..", ""])
def test_the_folder_itself_may_be_the_data_root(tmp_path, monkeypatch, root):
    folder = write_tiny(tmp_path)
    monkeypatch.chdir(folder / "val" if root == ".." else folder)
    monkeypatch.setenv("LOCALLIP_DATA", ".")
    assert len(load_tiny_imagenet("train", root, _counts=TINY)) == 12
    assert (tmp_path / "tiny-imagenet-200-train.npy").is_file()


def test_missing_parts_of_tiny_imagenet_are_named(tmp_path):
    folder = write_tiny(tmp_path)
    shutil.rmtree(folder / "train" / "n03")
    (folder / TABLE).unlink()
    with pytest.raises(MissingData, match=r"train/n03/images is missing; .*--download"):
        load_tiny_imagenet("train", tmp_path, _counts=TINY)
    with pytest.raises(MissingData, match=r"val_annotations.txt is missing; .*--download"):
        load_tiny_imagenet("test", tmp_path, _counts=TINY)
    (folder / "wnids.txt").unlink()
    with pytest.raises(MissingData, match=r"tiny-imagenet-200 is incomplete: wnids.txt is missing"):
        load_tiny_imagenet("test", tmp_path, _counts=TINY)


def test_a_wrong_zip_is_named(tmp_path):
    counts = write_tiny_zip(tmp_path)
    path = tmp_path / "tiny-imagenet-200.zip"
    whole = path.read_bytes()
    path.write_bytes(whole[:-100])
    with pytest.raises(DamagedData, match=r"tiny-imagenet-200\.zip is damaged: MD5"):
        load_tiny_imagenet("test", tmp_path, _counts=counts)
    with pytest.raises(DamagedData, match=r"tiny-imagenet-200\.zip is damaged: it cannot be unpacked"):
        load_tiny_imagenet("test", tmp_path, _counts=Counts(3, 4, 2, md5(whole[:-100])))


def test_without_pillow_the_need_is_said(tmp_path, monkeypatch):
    write_tiny(tmp_path)
    monkeypatch.setitem(sys.modules, "PIL.Image", None)
    with pytest.raises(MissingData, match=r"locallip\[images\]"):
        load_tiny_imagenet("test", tmp_path, _counts=TINY)


def test_pillow_is_not_needed_for_the_rest():
    hidden = "import sys; sys.modules['PIL'] = None"
    code = f"{hidden}\nfrom locallip.data import load_images\nprint(len(load_images('embedded', 'test')))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.strip()) == (0, "10000"), done.stderr


# ------------------------------------------------------------------------------------------------------------ downloads


def source_of(path):
    content = path.read_bytes()
    return Source(path.as_uri(), md5(content), len(content))


@pytest.fixture
def offer(tmp_path):
    """A folder whose files stand for the official place."""
    folder = tmp_path / "official"
    folder.mkdir()
    return folder


def test_a_fetched_file_is_whole_and_alone(tmp_path, offer, capsys):
    (offer / "x.gz").write_bytes(os.urandom(3_000_000))
    path = fetch(source_of(offer / "x.gz"), tmp_path / "new" / "folder")
    assert path.read_bytes() == (offer / "x.gz").read_bytes()
    assert [entry.name for entry in path.parent.iterdir()] == ["x.gz"]
    assert "fetching file:" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"md5": "0" * 32}, "with MD5 .*, expected 00000"),
        ({"size": 999}, "more than the expected 999 bytes"),
        ({"size": 1001}, "broke off 1 bytes before the end"),
        ({"url": "file:///nowhere/x.gz"}, "could not be fetched"),
    ],
)
def test_a_broken_transfer_leaves_nothing(tmp_path, offer, change, message):
    (offer / "x.gz").write_bytes(bytes(1000))
    source = Source(**(vars(source_of(offer / "x.gz")) | change))
    with pytest.raises(MissingData, match=message):
        fetch(source, tmp_path / "new")
    assert list((tmp_path / "new").iterdir()) == []


def test_a_place_that_cannot_be_written_is_named(tmp_path, offer):
    (offer / "x.gz").write_bytes(b"x")
    (tmp_path / "file").write_text("")
    with pytest.raises(MissingData, match=r"could not be fetched to .*file/sub/x\.gz"):
        fetch(source_of(offer / "x.gz"), tmp_path / "file" / "sub")


def test_mnist_fetches_only_what_is_missing(tmp_path, offer, monkeypatch, capsys):
    table = write_mnist(offer, *digits())
    monkeypatch.setattr(mnist, "SOURCES", {name: source_of(offer / f"{name}.gz") for name in table})
    root = tmp_path / "data"
    with pytest.raises(MissingData, match="does not exist"):
        load_mnist("train", root, _published=table)
    assert len(load_mnist("train", root, download=True, _published=table)) == COUNT
    assert capsys.readouterr().err.count("fetching") == 2
    (root / "mnist" / "train-labels-idx1-ubyte.gz").unlink()
    assert len(load_mnist("train", root, download=True, _published=table)) == COUNT
    assert capsys.readouterr().err.count("fetching") == 1
    assert len(load_mnist("train", root, download=True, _published=table)) == COUNT
    assert capsys.readouterr().err == ""


def test_cifar10_and_tiny_imagenet_are_fetched_as_archives(tmp_path, offer, monkeypatch):
    root = tmp_path / "data"
    table = write_cifar10(offer, "cifar-10-binary.tar.gz")
    monkeypatch.setattr(cifar10, "SOURCE", source_of(offer / "cifar-10-binary.tar.gz"))
    assert len(load_cifar10("train", root, download=True, _published=table)) == 5 * COUNT
    counts = write_tiny_zip(offer)
    monkeypatch.setattr(tiny_imagenet, "SOURCE", source_of(offer / "tiny-imagenet-200.zip"))
    assert len(load_tiny_imagenet("test", root, download=True, _counts=counts)) == 6
    unpacked = ["tiny-imagenet-200-test.json", "tiny-imagenet-200-test.npy"]
    assert sorted(path.name for path in root.iterdir()) == ["cifar-10-binary.tar.gz", *unpacked, "tiny-imagenet-200.zip"]


def test_official_places_are_safe_addresses_with_the_names_the_readers_look_for():
    sources = [*downloads.MNIST.values(), downloads.CIFAR10, downloads.TINY_IMAGENET]
    hosts = {source.url.split("/")[2] for source in sources}
    assert hosts == {"storage.googleapis.com", "www.cs.toronto.edu", "cs231n.stanford.edu"}
    assert all(source.url.startswith("https://") and len(source.md5) == 32 for source in sources)
    assert all(f"{name}.gz" == source.name for name, source in downloads.MNIST.items())
    assert downloads.CIFAR10.name == cifar10.LAYOUTS[0].archive


# --------------------------------------------------------------------------------------------------- the published files


@needs_shared
def test_the_published_mnist(tmp_path):
    subprocess.run([sys.executable, SHARED / "unpack.py", tmp_path, "mnist"], check=True, capture_output=True)
    train, test = (load_images("mnist", split, tmp_path) for split in ("train", "test"))
    assert train.labels.bincount().tolist() == [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949]
    assert torch.equal(test.images, load_images("embedded", "test").images)
    assert torch.equal(train.labels[:10_000], load_images("embedded", "train").labels)
    for source in downloads.MNIST.values():
        content = (tmp_path / "mnist" / source.name).read_bytes()
        assert (md5(content), len(content)) == (source.md5, source.size)
    path = tmp_path / "mnist" / "t10k-images-idx3-ubyte.gz"
    path.write_bytes(path.read_bytes()[:-1000])
    with pytest.raises(DamagedData, match="t10k-images-idx3-ubyte"):
        load_images("mnist", "test", tmp_path)


@needs_shared
def test_the_published_cifar10_test_batch(tmp_path):
    source = tmp_path / "packed"
    source.mkdir()
    shutil.copy(SHARED / "cifar10" / "test_batch.medxz", source)
    command = [sys.executable, SHARED / "unpack.py", tmp_path, "cifar10", "--src", source]
    subprocess.run(command, check=True, capture_output=True)
    images = load_images("cifar10", "test", tmp_path)
    assert images.labels.bincount().tolist() == [1000] * 10
    assert [images.classes[label] for label in images.labels[:4]] == ["cat", "ship", "ship", "airplane"]
    with pytest.raises(MissingData, match=r"incomplete: data_batch_1\.bin"):
        load_images("cifar10", "train", tmp_path)
    path = tmp_path / "cifar-10-batches-bin" / "test_batch.bin"
    content = bytearray(path.read_bytes())
    content[12_345] ^= 4
    path.write_bytes(content)
    with pytest.raises(DamagedData, match=r"test_batch\.bin is damaged: MD5 .*, expected 803d5f7f"):
        load_images("cifar10", "test", tmp_path)


def test_tiny_imagenet_is_unpacked_once_and_again_where_a_file_has_changed(tmp_path):
    folder = write_tiny(tmp_path)
    first = load_tiny_imagenet("train", tmp_path, _counts=TINY)
    assert (tmp_path / "tiny-imagenet-200-train.npy").stat().st_size > 12 * 3 * 64 * 64
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiny_imagenet, "_decode", None)  # nothing is unpacked
        assert torch.equal(load_tiny_imagenet("train", tmp_path, _counts=TINY).images, first.images)
    (folder / TRAIN_IMAGE).write_bytes(jpeg(250))
    again = load_tiny_imagenet("train", tmp_path, _counts=TINY)
    assert (again.images != first.images).flatten(1).any(1).nonzero()[:, 0].tolist() == [5]
    (folder / TRAIN_IMAGE).write_bytes(b"no image")
    with pytest.raises(DamagedData, match=r"n02_1\.JPEG"):
        load_tiny_imagenet("train", tmp_path, _counts=TINY)
