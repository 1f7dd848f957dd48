"""A data set of the user's own: read from folders or .npz files, trained on, and certified and verified by its name."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import locallip as ll
from locallip.data import DamagedData, Like, MissingData, image_set, load_images, load_own
from locallip.data.own_set import load_own_set

CLASSES = ("cat", "dog", "eel")


def picture(seed: int, size: tuple[int, int] = (8, 8), channels: int = 3) -> np.ndarray:
    shape = (*size, channels) if channels > 1 else size
    return np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)


def write(path: Path, pixels: np.ndarray, **how: object) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).save(path, **how)  # type: ignore[arg-type]
    return path


def folders(root: Path, each: int = 3, size: tuple[int, int] = (8, 8), channels: int = 3, names=CLASSES) -> Path:
    """Training and test images, whose shade says the class."""
    for part, (split, count) in enumerate((("train", each), ("test", 2))):
        for label, name in enumerate(names):
            for number in range(count):
                pixels = picture(100 * part + 10 * label + number, size, channels) // 4 + np.uint8(60 * (label % 3))
                write(root / split / name / f"{number}.png", pixels)
    return root


def as_npz(root: Path, to: Path) -> Path:
    to.mkdir()
    for split in ("train", "test"):
        there = load_own_set(split, root)  # type: ignore[arg-type]
        np.savez(to / f"{split}.npz", images=there.images.numpy(), labels=there.labels.numpy())
    return to


# What is read ----------------------------------------------------------------------------------------------------------


def test_pixels_of_png_files_are_not_changed(tmp_path):
    root = folders(tmp_path)
    train, test = (load_images("own", split, root) for split in ("train", "test"))
    assert (train.shape, train.classes, len(train), len(test)) == ((3, 8, 8), CLASSES, 9, 6)
    assert train.labels.tolist() == [0, 1, 2] * 3  # in turns: the first few are of all classes
    for number, image in enumerate(test.images):
        file = root / "test" / CLASSES[number % 3] / f"{number // 3}.png"
        assert (np.asarray(Image.open(file)).transpose(2, 0, 1) == image.numpy()).all()
    assert torch.equal(load_images("own", "test", root, side=8).images, test.images)  # of that size already


def test_the_same_images_as_for_a_network_that_is_brought(tmp_path):
    root = folders(tmp_path, names=("0", "1", "2", *map(str, range(3, 11))))  # "10" comes behind "2"
    mine, brought = load_own_set("test", root), load_own(root / "test", (3, 8, 8), 11)
    assert torch.equal(mine.images, brought.images)
    assert torch.equal(mine.labels, brought.labels)


def test_arrays_give_the_same_as_folders(tmp_path):
    root = folders(tmp_path / "a")
    other = as_npz(root, tmp_path / "b")
    for split in ("train", "test"):
        mine, theirs = load_own_set(split, root), load_own_set(split, other)
        assert torch.equal(mine.images, theirs.images)
        assert torch.equal(mine.labels, theirs.labels)
    assert theirs.classes == ("0", "1", "2")


def test_the_middle_is_cut_out_and_resized(tmp_path):
    root = folders(tmp_path)
    wide = np.zeros((20, 60, 3), np.uint8)
    wide[:, 20:40] = (200, 100, 50)  # the square in the middle is of one colour
    write(root / "train" / "cat" / "wide.jpg", wide, quality=100, subsampling=0)
    write(root / "train" / "cat" / "tall.PNG", wide.transpose(1, 0, 2))
    train = load_own_set("train", root, side=10)
    assert train.shape == (3, 10, 10)
    names = sorted(os.listdir(root / "train" / "cat"))
    for name, slack in (("wide.jpg", 40), ("tall.PNG", 0)):  # JPEG smears across the edge
        found = train.images[train.labels == 0][names.index(name)].int()
        middle = found[:, 2:8, 2:8]
        assert (middle - torch.tensor([200, 100, 50])[:, None, None]).abs().max() <= min(slack, 4)
        assert (found - torch.tensor([200, 100, 50])[:, None, None]).abs().max() <= slack


def test_grey_images_have_one_channel_and_grey_among_coloured_three_equal_ones(tmp_path):
    grey = load_own_set("train", folders(tmp_path / "grey", channels=1))
    assert grey.shape == (1, 8, 8)
    root = folders(tmp_path / "mixed")
    pixels = picture(1, channels=1)
    write(root / "test" / "eel" / "0.png", pixels)
    test = load_own_set("test", root)
    assert all((test.images[2][channel].numpy() == pixels).all() for channel in range(3))


@pytest.mark.parametrize("mode", ["CMYK", "P", "1"])
def test_other_kinds_of_files_become_colours(tmp_path, mode):
    root = folders(tmp_path)
    image = Image.fromarray(picture(3)).convert(mode)
    image.save(root / "train" / "dog" / ("x.jpg" if mode == "CMYK" else "x.png"))
    found = load_own_set("train", root)
    stored = Image.open(root / "train" / "dog" / ("x.jpg" if mode == "CMYK" else "x.png"))
    last = found.images[found.labels == 1][-1]
    assert (last.numpy() == np.asarray(stored.convert("RGB")).transpose(2, 0, 1)).all()


def test_a_file_whose_name_says_the_other_kind_is_read(tmp_path):
    root = folders(tmp_path)
    shutil.move(root / "train" / "dog" / "0.png", root / "train" / "dog" / "0.JPEG")
    assert len(load_own_set("train", root)) == 9


def test_the_folder_of_the_test_may_be_called_val(tmp_path):
    root = folders(tmp_path)
    before = load_own_set("test", root)
    (root / "test").rename(root / "val")
    assert torch.equal(load_own_set("test", root).images, before.images)


def test_images_are_unpacked_once_for_each_size_until_a_file_changes(tmp_path, monkeypatch):
    root, said = folders(tmp_path), []
    first = load_own_set("train", root, side=6)
    assert {path.name for path in root.glob(".*.npy")} == {".locallip-train-6.npy"}

    def refuse(*args: object) -> None:
        raise AssertionError("a file was unpacked again")

    with monkeypatch.context() as patch:
        patch.setattr("locallip.data.own_set._decoded", refuse)
        assert torch.equal(load_own_set("train", root, side=6, say=said.append).images, first.images)
    write(root / "train" / "cat" / "0.png", picture(77))
    again = load_own_set("train", root, side=6)
    assert not torch.equal(again.images[0], first.images[0])
    assert torch.equal(again.images[1:], first.images[1:])


def test_another_file_of_the_same_name_size_and_time_is_noticed(tmp_path):
    root = folders(tmp_path)
    for split in ("train", "test"):
        for file in (root / split).rglob("*.png"):
            Image.fromarray(picture(len(file.parts[-2]) + ord(file.parts[-2][0]))).save(file, compress_level=0)
            os.utime(file, (1e9, 1e9))
    before = load_own_set("train", root).images.clone()
    (root / "train" / "cat").rename(root / "x")
    (root / "train" / "dog").rename(root / "train" / "cat")
    (root / "x").rename(root / "train" / "dog")
    after = load_own_set("train", root)
    assert torch.equal(after.images[after.labels == 0], before[1::3])
    assert torch.equal(after.images[after.labels == 1], before[0::3])


def test_a_folder_that_cannot_be_written_is_read(tmp_path, monkeypatch):
    root = folders(tmp_path)

    def full(*args: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    said: list[str] = []
    monkeypatch.setattr("locallip.data.unpacked.PATIENCE", -1.0)
    assert len(load_own_set("train", root, say=said.append)) == 9
    assert said[-1] == "unpacked 9 of 9 images"
    assert not list(root.glob(".*"))


# What is refused -------------------------------------------------------------------------------------------------------


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-30])


def _jpeg_cut(root: Path) -> None:
    _cut(write(root / "train" / "cat" / "b.jpg", picture(1, (40, 40))))


def _arrays(root: Path, images: np.ndarray) -> None:
    """As training and test images, of two classes."""
    for split in ("train", "test"):
        shutil.rmtree(root / split)
        np.savez(root / f"{split}.npz", images=images, labels=np.arange(len(images)) % 2)


def _labels(split: str, labels: list[int]):
    def change(root: Path) -> None:
        shutil.rmtree(root / split)
        for other in ("train", "test"):
            shutil.rmtree(root / other, ignore_errors=True)
            np.savez(root / f"{other}.npz", images=np.zeros((3, 1, 4, 4), np.uint8), labels=[0, 1, 2])
        np.savez(root / f"{split}.npz", images=np.zeros((3, 1, 4, 4), np.uint8), labels=labels)

    return change


WRONG = {
    "no folder": (lambda root: shutil.rmtree(root / "train"), MissingData, "has no train images of your own"),
    "a test missing": (lambda root: shutil.rmtree(root / "test"), MissingData, "expected test/ or val/ or validation/"),
    "a file beside": (lambda root: (root / "train" / "list.txt").touch(), DamagedData, "'list.txt' is a file"),
    "another file": (lambda root: (root / "train" / "cat" / "x.gif").touch(), DamagedData, "x.gif: only .png, .jpg"),
    "no images": (
        lambda root: [f.unlink() for f in (root / "train").rglob("*.png")],
        DamagedData,
        "holds no image: remove that folder",
    ),
    "cut short": (lambda root: _cut(root / "train" / "cat" / "1.png"), DamagedData, "1.png cannot be read"),
    "empty": (lambda root: (root / "train" / "cat" / "1.png").write_bytes(b""), DamagedData, "1.png cannot be read"),
    "a short JPEG": (_jpeg_cut, DamagedData, "b.jpg cannot be read"),
    "another size": (lambda root: write(root / "train" / "eel" / "x.png", picture(1, (8, 9))), DamagedData, "9 x 8 pixels"),
    "transparent": (
        lambda root: write(root / "train" / "eel" / "x.png", picture(1, channels=4)),
        DamagedData,
        "x.png is of the kind 'RGBA'",
    ),
    "a new class": (lambda root: write(root / "test" / "fox" / "x.png", picture(1)), DamagedData, "there is no class 'fox'"),
    "mixed names": (
        lambda root: [(root / "train" / "dog").rename(root / "train" / "1")],
        DamagedData,
        "those from 0 on, and no others among them",
    ),
    "an empty class": (lambda root: (root / "train" / "__MACOSX").mkdir(), DamagedData, "__MACOSX holds no image"),
    "one class": (
        lambda root: [shutil.rmtree(root / split / name) for split in ("train", "test") for name in ("cat", "dog")],
        DamagedData,
        "must be from 2 to 65,536 classes, and there are 1",
    ),
    "a test of another size": (
        lambda root: [write(file, picture(1, (9, 9))) for file in (root / "test").rglob("*.png")],
        DamagedData,
        "is 9 x 9 pixels, and images to train on or of this network are 8 x 8",
    ),
    "neither": (
        lambda root: (root / "train" / "cat" / "1.png").write_bytes(b"GIF89a" * 9),
        DamagedData,
        "it is neither PNG nor JPEG",
    ),
    "a broken link": (
        lambda root: (root / "train" / "cat" / "x.png").symlink_to(root / "nowhere"),
        DamagedData,
        "x.png is no file",
    ),
    "nothing in it": (
        lambda root: _arrays(root, np.zeros((6, 0, 8, 8), np.uint8)),
        DamagedData,
        "expected uint8 of shape",
    ),
    "channels last": (
        lambda root: _arrays(root, np.zeros((4, 8, 8, 3), np.uint8)),
        DamagedData,
        "channels seem to stand last in (4, 8, 8, 3): use images.transpose(0, 3, 1, 2)",
    ),
    "too many classes": (_labels("train", [0, 1, 70000]), DamagedData, "at most 65,535, not to 70,000"),
    "numbers": (
        lambda root: [(root / "train" / name).rename(root / "train" / str(i + 1)) for i, name in enumerate(CLASSES)],
        DamagedData,
        "must be those from 0 on",
    ),
    "two kinds": (
        lambda root: (shutil.rmtree(root / "test"), np.savez(root / "test.npz", images=[], labels=[])),
        DamagedData,
        "two folders, or two .npz files",
    ),
    "a label too high": (_labels("test", [0, 1, 3]), DamagedData, "labels run up to 3, and those trained on up to 2"),
    "a label below": (_labels("train", [0, 1, -3]), DamagedData, "labels from 0"),
    "a label missing": (_labels("train", [0, 1]), DamagedData, "3 images and 2 labels"),
}


def _both(root: Path) -> None:
    """As a training reads them."""
    train = load_images("own", "train", root)
    load_images("own", "test", root, like=Like(train.shape, train.classes))


@pytest.mark.parametrize(("change", "error", "words"), WRONG.values(), ids=WRONG)
def test_what_is_wrong_is_named(tmp_path, change, error, words):
    root = folders(tmp_path)
    change(root)
    with pytest.raises(error) as caught:
        _both(root)
    assert words in str(caught.value)


def test_a_coloured_image_among_grey_ones_is_refused(tmp_path):
    root = folders(tmp_path, channels=1)
    write(root / "test" / "cat" / "x.png", picture(1))
    with pytest.raises(DamagedData, match="of the kind 'RGB': only grey ones"):
        load_own_set("test", root)
    write(root / "train" / "cat" / "x.png", picture(1))
    assert load_own_set("train", root).shape == (3, 8, 8)


def test_what_makes_no_sense_is_refused(tmp_path):
    root = folders(tmp_path)
    with pytest.raises(MissingData, match="fetched from nowhere"):
        load_images("own", "train", root, download=True)
    with pytest.raises(MissingData, match="does not exist; name the folder with train/ and test/"):
        load_images("own", "train", tmp_path / "nowhere")
    with pytest.raises(ValueError, match="stay as they were published"):
        load_images("mnist", "train", root, side=8)
    other = as_npz(root, tmp_path / "arrays")
    with pytest.raises(DamagedData, match="are not resized"):
        load_own_set("train", other, side=6)
    np.savez(other / "train.npz", images=np.zeros((2, 3, 8, 8), np.float32), labels=[0, 1])
    with pytest.raises(DamagedData, match="expected uint8"):
        load_own_set("train", other)


# The commands ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["folders", "arrays"])
def test_trained_certified_and_verified_by_its_name(tmp_path, command, kind):
    root = folders(tmp_path / "photos", each=10, size=(12, 12) if kind == "arrays" else (20, 30))
    sized = ("--side", 12) if kind == "folders" else ()
    if kind == "arrays":
        root = as_npz(root, tmp_path / "arrays")
    run, rows = tmp_path / "run", tmp_path / "rows.jsonl"
    where = ("--data-root", root, "--device", "cpu")
    short = ("--data", "own", *sized, "--epochs", 12, "--batch", 10, "--eps", "0.1", "--eps-train", 0.1)
    code, _, said = command("train", "demo", *short, *where, "--out", run)
    assert code == 0, said
    result = json.loads((run / "result.json").read_text())
    assert (result["recipe"]["data"], result["evaluation"]["images"]) == ("own", 6)
    # The record of the network says what it was trained on and for, whatever the recipe of that name says.
    code, _, said = command("certify", run, *where, "--out", rows)
    assert code == 0, said
    settings = json.loads(rows.with_suffix(".json").read_text())["settings"]
    assert (settings["data"], settings["eps"], settings["images"]) == ("own", "0.1", 6)
    assert str(root) not in rows.with_suffix(".json").read_text()
    code, _, said = command("verify", rows, "--model", run, *where)
    assert code == 0, said
    if kind == "folders":
        write(root / "test" / "cat" / "0.png", picture(5, (20, 30)))
    else:
        np.savez(root / "test.npz", images=np.zeros((6, 3, 12, 12), np.uint8), labels=[0, 0, 1, 1, 2, 2])
    code, _, said = command("verify", rows, "--model", run, *where)
    assert code == 2
    assert "is about other images than these of own" in said


def test_a_wrong_call_is_one_plain_line(tmp_path, command):
    root = folders(tmp_path / "photos")
    for args, words in (
        (("--data", "own", "--side", -1), "side"),
        (("--side", 8), "only own are resized"),
        (("--data", "own", "--data-root", tmp_path / "none"), "name the folder with train/ and test/"),
        (("--data", "own", "--data-root", root, "--architecture", "8c2f"), "(3, 8, 8) is too small"),
        (("--data", "own", "--data-root", root, "--augment", "crop", "--crop-margin", 20), "8 pixels high"),
    ):
        code, _, said = command("train", "demo", *args, "--out", tmp_path / "run", "--device", "cpu")
        assert code == 2, said
        assert words in said
        assert "Traceback" not in said


def test_a_network_knows_the_classes_and_the_size_that_it_was_trained_on(tmp_path, command):
    root, run = folders(tmp_path / "photos", size=(10, 12)), tmp_path / "run"
    where = ("--data-root", root, "--device", "cpu")
    short = ("--epochs", 1, "--batch", 9, "--eps", "0.1", "--eps-train", 0.1, "--no-evaluate", "--out", run)
    assert command("train", "demo", "--data", "own", "--side", 8, *short, *where)[0] == 0
    # Without the training images, and without one of the classes, labels are the same.
    shutil.rmtree(root / "train")
    shutil.rmtree(root / "test" / "cat")
    rows = tmp_path / "rows.jsonl"
    code, _, said = command("certify", run, *where, "--out", rows)
    assert code == 0, said
    assert [json.loads(line)["label"] for line in rows.read_text().splitlines()] == [1, 2, 1, 2]
    # Other classes, even as many, are not taken for those.
    (root / "test" / "dog").rename(root / "test" / "ant")
    code, _, said = command("certify", run, *where)
    assert code == 2
    assert "there is no class 'ant' among those trained on, which are 'cat', 'dog', 'eel'" in said


def test_a_run_goes_on_with_its_own_images_alone(tmp_path, command):
    root, run, results = folders(tmp_path / "photos"), tmp_path / "run", tmp_path / "results"
    where = ("--data", "own", "--data-root", root, "--device", "cpu", "--epochs", 1, "--batch", 9, "--limit", 1)
    assert command("train", "demo", *where, "--out", run, "--results", results)[0] == 0
    for split in ("train", "test"):
        (root / split / "cat").rename(root / split / "zebra")
    code, _, said = command("train", "demo", *where, "--out", run, "--resume")
    assert code == 2
    assert "the training images are others than those that the run in" in said
    code, _, said = command("train", "demo", *where, "--out", tmp_path / "another", "--results", results)
    assert code == 2
    assert "its training images are others" in said


def test_figures_of_other_test_images_are_not_kept(tmp_path, command):
    """Neither in the run folder, where a figure of more images stays, nor where results are gathered."""
    root, run, results = folders(tmp_path / "photos"), tmp_path / "run", tmp_path / "results"
    where = ("--data", "own", "--data-root", root, "--device", "cpu", "--epochs", 1, "--batch", 9)
    assert command("train", "demo", *where, "--out", run, "--results", results)[0] == 0
    for name in CLASSES:
        (root / "test" / name / "1.png").unlink()
    assert command("train", "demo", *where, "--out", run, "--resume")[0] == 0
    assert json.loads((run / "result.json").read_text())["evaluation"]["images"] == 3
    code, _, said = command("train", "demo", *where, "--out", tmp_path / "another", "--results", results)
    assert code == 2
    assert "its test images are others" in said


def test_a_checksum_of_many_images_looks_at_all_classes(monkeypatch):
    images, labels = torch.zeros(64, 1, 2, 2, dtype=torch.uint8), torch.arange(64) % 4
    monkeypatch.setattr(image_set, "LARGEST_CHECKED", images.nbytes // 2)
    before = image_set.checksum(images, labels)
    for label in range(4):
        changed = images.clone()
        changed[labels == label] = 1
        assert image_set.checksum(changed, labels) != before


RECORDS = {
    "a truth": {"side": True},
    "below": {"side": -8},
    "huge": {"side": 10**21},
    "others": {"side": 3000},
    "names": {"class_names": ["cat", "cat", "eel"]},
    "numbers": {"class_names": [1, 2, 3]},
    "nothing": {"class_names": None},
}


@pytest.mark.parametrize("record", RECORDS.values(), ids=RECORDS)
def test_what_a_record_says_is_not_believed_where_it_makes_no_sense(tmp_path, command, record):
    root = folders(tmp_path / "photos")
    about = {"architecture": "small", "activation": "relu_theta", "input_shape": [3, 8, 8], "classes": 3, "data": "own"}
    known = {"eps": "0.1", "side": 0, "class_names": list(CLASSES)}
    path = tmp_path / "net.safetensors"
    ll.save_model(path, ll.build_model("small", (3, 8, 8), 3), {**about, **known, **record})
    code, _, said = command("certify", path, "--data-root", root, "--device", "cpu", "--limit", 1)
    assert code == 0, said
    assert not list(root.glob(".locallip-test-3000*"))


def test_a_network_of_other_channels_is_told_what_helps(tmp_path):
    root = folders(tmp_path)
    with pytest.raises(DamagedData, match=r"takes 2 channels, and files are images of 1 or 3: use \.npz files"):
        load_images("own", "test", root, like=Like((2, 8, 8), CLASSES))
    with pytest.raises(DamagedData, match=r"takes inputs of shape \(12,\)"):
        load_images("own", "test", root, like=Like((12,), CLASSES))
    with pytest.raises(ValueError, match="side = -8: expected a number of pixels"):
        load_images("own", "test", root, side=-8)


def test_test_images_without_labels_do_not_hide_those_with(tmp_path):
    """The usual folders of ImageNet have them."""
    root = folders(tmp_path)
    before = load_own_set("test", root)
    (root / "test").rename(root / "val")
    write(root / "test" / "1.png", picture(1))
    assert torch.equal(load_own_set("test", root).images, before.images)


def test_training_and_certifying_share_what_is_unpacked(tmp_path, monkeypatch):
    for root in (folders(tmp_path / "colour"), folders(tmp_path / "grey", channels=1)):
        train = load_own_set("train", root)
        with monkeypatch.context() as patch:
            patch.setattr("locallip.data.own_set._decoded", None)
            again = load_own_set("train", root, like=Like(train.shape, train.classes))
            assert torch.equal(load_own_set("train", root).images, again.images)


def test_nothing_is_unpacked_that_does_not_fit(tmp_path):
    root = folders(tmp_path)
    with pytest.raises(DamagedData, match="is 8 x 8 pixels, and images to train on or of this network are 9 x 8"):
        load_images("own", "test", root, like=Like((3, 8, 9), CLASSES))
    assert not list(root.glob(".*"))
