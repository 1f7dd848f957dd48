"""Images of the user's own with a network of the user's own, through the commands and back: read, certified, verified."""

from __future__ import annotations

import json
import shutil
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import locallip as ll
from locallip.audit.variants import extreme
from locallip.data import DamagedData, MissingData, OwnImages, load_own, pixels
from locallip.proofs.settings import about_file, read_about
from tests.onnx_graphs import Graph, images_for, residual, written

SHAPE, CLASSES, COUNT, EPS = (2, 6, 6), 3, 8, "0.02"
IMAGES, LABELS = images_for((1, 3, 4), 5), np.arange(5) % 2
FEW = ("--eps", EPS, "--device", "cpu")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """net.onnx and images.npz with labels that the network gives but for the last, and floats.npz with the same points."""
    folder = tmp_path_factory.mktemp("own")
    path = written(residual(np.float32)[1], folder / "net.onnx")
    images = images_for(SHAPE, COUNT)
    network = ll.load_onnx(path)
    labels = network(pixels(torch.from_numpy(images))).argmax(1).numpy()
    labels[-1] = (labels[-1] + 1) % CLASSES
    np.savez(folder / "images.npz", images=images, labels=labels)
    np.savez_compressed(
        folder / "floats.npz", images=images.astype(np.float32) / np.float32(255), labels=labels.astype(np.uint8)
    )
    return folder


def rows_of(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def small(folder: Path) -> Path:
    """A dense network for images of 1 x 3 x 4, with IMAGES and the labels that it gives beside it."""
    graph = Graph("n", 1, 3, 4, kind=np.float32)
    z = graph.add("Relu", graph.add("Gemm", graph.add("Flatten", "x"), graph.weight(12, 6), graph.weight(6)))
    path = written(graph.model(graph.add("Gemm", z, graph.weight(6, 2), graph.weight(2))), folder / "small.onnx")
    network = ll.load_onnx(path)
    labels = network(pixels(torch.from_numpy(IMAGES))).argmax(1).numpy()
    np.savez(folder / "images.npz", images=IMAGES, labels=labels)
    return path


# The commands ----------------------------------------------------------------------------------------------------------


def test_certify_and_verify_a_network_and_images_of_ones_own(folder, tmp_path, command, monkeypatch):
    out = tmp_path / "rows.jsonl"
    args = ("certify", folder / "net.onnx", "--data", folder / "images.npz", *FEW, "--out", out)
    code, _, said = command(*args)
    assert code == 0, said
    rows, (settings, summary) = rows_of(out), read_about(out)
    assert (settings.model, settings.data, settings.split, settings.eps) == ("net.onnx", "images.npz", "test", EPS)
    assert len(rows) == COUNT == settings.images
    assert summary is not None
    assert str(folder) not in about_file(out).read_text()  # folders of one machine say nothing to others
    assert rows[-1]["verdict"] == "MISCLASSIFIED"
    assert sum(row["verdict"] == "CERTIFIED" for row in rows) > 2
    _check_certified(folder, rows)
    # Where the two files are is said, or found beside the rows, or here.
    there = ("--model", folder / "net.onnx", "--data", folder / "images.npz")
    code, printed, said = command("verify", out, *there, "--device", "cpu")
    assert (code, f"{COUNT} of them came out again" in printed) == (0, True), said
    code, _, said = command("verify", out, "--device", "cpu")
    assert code == 2
    assert "there is no data set 'images.npz'; known are embedded" in said
    assert "name it with --data" in said
    for name in ("net.onnx", "images.npz"):
        shutil.copy(folder / name, tmp_path / name)
    assert command("verify", out, "--sample", 2, "--device", "cpu")[0] == 0
    # Images that are others, in one pixel, are told apart; and so is another network.
    stored = dict(np.load(folder / "images.npz"))
    stored["images"][3, 0, 0, 0] ^= 1
    np.savez(tmp_path / "images.npz", **stored)
    code, _, said = command("verify", out, "--device", "cpu")
    assert (code, "is about other images than these of images.npz" in said) == (2, True)
    written(residual(np.float32, seed=1)[1], tmp_path / "net.onnx")
    code, _, said = command("verify", out, "--data", folder / "images.npz", "--device", "cpu")
    assert (code, "is about other weights" in said) == (2, True)


def _check_certified(folder: Path, rows: list[dict]) -> None:
    """No random point of a certified ball may have another class than its image."""
    network, stored = ll.load_onnx(folder / "net.onnx").double(), np.load(folder / "images.npz")
    x = pixels(torch.from_numpy(stored["images"])).double()
    generator = torch.Generator().manual_seed(0)
    for row in rows:
        if row["verdict"] == "CERTIFIED":
            step = torch.randn(50, *SHAPE, dtype=torch.float64, generator=generator)
            step *= row["eps"] / step.flatten(1).norm(dim=1).reshape(-1, 1, 1, 1)
            assert bool((network(x[row["index"]] + step).argmax(1) == row["label"]).all())


def test_a_stopped_run_goes_on_to_the_same_rows(folder, tmp_path, command):
    out = tmp_path / "rows.jsonl"
    seed = ("--seed", 1, "--batch", 2, "--chunk", 2, "--out", out)
    args = ("certify", folder / "net.onnx", "--data", folder / "images.npz", *FEW, *seed)
    assert command(*args)[0] == 0
    whole = [{**row, "seconds": 0} for row in rows_of(out)]
    out.write_text("".join(out.read_text().splitlines(keepends=True)[:4]))
    code, _, said = command(*args, "--resume")
    assert code == 0, said
    assert [{**row, "seconds": 0} for row in rows_of(out)] == whole
    code, _, said = command(
        *("certify", folder / "net.onnx", "--data", folder / "floats.npz", *FEW, *seed, "--resume"),
    )
    assert (code, "data was 'images.npz' and is 'floats.npz'" in said) == (2, True)


def test_bytes_and_floats_are_the_same_points(folder, command):
    network = ll.load_onnx(folder / "net.onnx")
    first, second = (load_own(folder / name, SHAPE, network.classes) for name in ("images.npz", "floats.npz"))
    assert torch.equal(pixels(first.images), pixels(second.images))
    assert torch.equal(first.labels, second.labels)
    assert first.classes == ("0", "1", "2")
    code, printed, said = command("certify", folder / "net.onnx", "--data", folder / "floats.npz", *FEW, "--json")
    assert (code, json.loads(printed)["settings"]["data"]) == (0, "floats.npz"), said


def test_attack_and_audit_take_them_too(tmp_path, command):
    rows = tmp_path / "rows.jsonl"
    path = small(tmp_path)
    mine = (path, "--data", tmp_path / "images.npz", *FEW)
    assert command("certify", *mine, "--out", rows)[0] == 0
    code, printed, said = command("attack", *mine, "--steps", 5, "--certified", rows)
    assert (code, "none was broken" in printed) == (0, True), said
    code, printed, said = command("audit", *mine, "--limit", 2, "--attempts", 10)
    assert (code, ": 0 broken" in printed) == (0, True), said


@pytest.mark.parametrize("ends", ["Add", "Mul"])
def test_an_audit_knows_networks_that_do_not_end_in_a_dense_layer(ends, tmp_path):
    """A last dense layer of 0 ties no classes where something follows it: a certificate then is not a broken one."""
    graph = Graph(1, 5)
    z = graph.add("Gemm", "x", graph.weight(5, 3), graph.weight(3))
    dense, behind = graph.model(z), graph.model(graph.add(ends, z, graph.weight(3)))
    tied = list(extreme(ll.load_onnx(written(dense, tmp_path / "dense.onnx"))))
    assert {variant.hopeless for variant in tied if variant.name == "last layer 0"} == {(0, 1, 2)}
    untied = list(extreme(ll.load_onnx(written(behind, tmp_path / "behind.onnx"))))
    assert len(untied) == len(tied)
    assert all(variant.hopeless == () for variant in untied)


def test_a_network_in_float64_is_attacked_in_float64(folder, tmp_path, command):
    path = written(residual(np.float64)[1], tmp_path / "net.onnx")
    code, _, said = command("attack", path, "--data", folder / "images.npz", *FEW, "--steps", 3, "--limit", 4)
    assert code == 0, said
    pytest.importorskip("pyautoattack")
    code, _, said = command("attack", path, "--data", folder / "images.npz", *FEW, "--attack", "autoattack")
    assert (code, "take the attack 'strong'" in said) == (3, True)


def test_a_shipped_network_takes_images_of_ones_own(tmp_path, command):
    np.savez(tmp_path / "digits.npz", images=images_for((1, 28, 28), 2), labels=[0, 1])
    args = ("certify", "mnist-4c3f-local-g", "--data", tmp_path / "digits.npz")
    code, _, said = command(*args)
    assert (code, "say with --eps how large the balls" in said) == (2, True)
    np.savez(tmp_path / "digits.npz", images=images_for((1, 28, 28), 2), labels=[0, 10])
    code, _, said = command(*args, "--eps", "1")
    assert (code, "labels run from 0 to 10, and the network tells 10 classes apart" in said) == (2, True)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--data", "images.npz"], "net.onnx does not say what it was trained on: name it with --data and --eps"),
        (["--eps", "1"], "name it with --data and --eps"),
        (["--data", "images.npz", "--eps", "0"], "--eps must be a positive number"),
        (["--data", "images.npz", "--eps", "1", "--split", "train"], "--split train goes with the data sets"),
        (["--data", "nowhere.npz", "--eps", "1"], "nowhere.npz: there is no such .npz file or folder of images"),
        (
            ["--data", "imgs", "--eps", "1"],
            "--data imgs: choose one of embedded, mnist, cifar10, tiny-imagenet, own or name a path",
        ),
        (["--data", "net.onnx", "--eps", "1"], "net.onnx cannot be read as .npz"),
        (["--data", "embedded", "--eps", "1"], "net.onnx takes images of 2 x 6 x 6, those of embedded are 1 x 28 x 28"),
    ],
)
def test_wrong_calls_are_answered_in_a_line(folder, command, monkeypatch, args, message):
    monkeypatch.chdir(folder)
    code, _, said = command("certify", "net.onnx", *args)
    assert (code, said.count("\n")) == (2, 1), said
    assert message in said


def test_verify_reads_no_path_that_the_settings_name(folder, tmp_path, command):
    """Rows come from others: a name in them is looked for beside the rows and here, and nowhere else."""
    out = tmp_path / "in" / "rows.jsonl"
    out.parent.mkdir()
    for name in ("net.onnx", "images.npz"):
        shutil.copy(folder / name, out.parent / name)
    assert command("certify", folder / "net.onnx", "--data", folder / "images.npz", *FEW, "--limit", 2, "--out", out)[0] == 0
    shutil.copy(folder / "images.npz", tmp_path / "secret.npz")
    about = json.loads(about_file(out).read_text())
    about["settings"]["data"] = "../secret.npz"
    about_file(out).write_text(json.dumps(about))
    code, _, said = command("verify", out)
    assert (code, "there is no data set '../secret.npz'" in said) == (2, True)
    about["settings"]["data"] = "embedded"
    about_file(out).write_text(json.dumps(about))
    code, _, said = command("verify", out, "--data", folder / "images.npz")
    assert (code, "is about images of embedded, which --data-root finds" in said) == (2, True)


# .npz files ------------------------------------------------------------------------------------------------------------


def own(path: Path, shape=(1, 3, 4), classes=2) -> OwnImages:
    return load_own(path, shape, classes)


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"images": IMAGES}, "has no array 'labels'"),
        ({"labels": LABELS}, "has no array 'images'"),
        ({"images": IMAGES[:4], "labels": LABELS}, "holds 4 images and 5 labels"),
        ({"images": IMAGES[:0], "labels": LABELS[:0]}, "at least one"),
        ({"images": IMAGES[:, 0], "labels": LABELS}, "its images are 3 x 4, and the network takes 1 x 3 x 4"),
        ({"images": IMAGES.transpose(0, 2, 3, 1), "labels": LABELS}, r"use images.transpose\(0, 3, 1, 2\)"),
        ({"images": IMAGES.astype(np.int64), "labels": LABELS}, "images are int64, expected uint8 from 0 to 255, or floats"),
        ({"images": IMAGES.astype(float), "labels": LABELS}, r"images run from .* to .*, expected floats in \[0, 1\]"),
        ({"images": IMAGES / 255 - 0.5, "labels": LABELS}, "images run from -0"),
        ({"images": IMAGES * np.nan, "labels": LABELS}, "NaN or infinite"),
        ({"images": IMAGES * np.inf, "labels": LABELS}, "NaN or infinite"),
        ({"images": IMAGES.astype(complex), "labels": LABELS}, "images are complex128"),
        ({"images": IMAGES, "labels": LABELS.astype(float)}, "labels are float64"),
        ({"images": IMAGES, "labels": LABELS.astype(bool)}, "labels are bool"),
        ({"images": IMAGES, "labels": LABELS[:, None]}, r"labels are int64 of shape \(5, 1\)"),
        ({"images": IMAGES, "labels": LABELS - 1}, "labels run from -1 to 0, and the network tells 2 classes apart"),
        ({"images": IMAGES, "labels": LABELS + 1}, "labels run from 1 to 2"),
        ({"images": IMAGES, "labels": LABELS.astype(np.uint64) + np.uint64(2**63)}, "labels run from 2147483648"),
        ({"images": np.array(5), "labels": LABELS}, "images is a single number"),
        ({"images": np.array([object()]), "labels": LABELS}, "cannot be read as .npz .*allow_pickle=False"),
        ({"images": IMAGES, "labels": np.array(["a"] * 5)}, "labels are <U1"),
    ],
)
def test_arrays_that_do_not_fit_are_refused(tmp_path, arrays, message):
    np.savez(tmp_path / "own.npz", **arrays)
    with pytest.raises(DamagedData, match=message):
        own(tmp_path / "own.npz")


def test_files_that_are_no_archives_are_refused(tmp_path):
    path = tmp_path / "own.npz"
    np.savez(path, images=IMAGES, labels=LABELS)
    whole = path.read_bytes()
    for content in (b"", b"PK\x03\x04", whole[: len(whole) // 2], whole[:200] + bytes(50) + whole[250:]):
        path.write_bytes(content)
        with pytest.raises(DamagedData, match=r"own\.npz cannot be read as \.npz"):
            own(path)
    with zipfile.ZipFile(path, "w") as archive:  # a shape that its bytes do not have
        archive.writestr("images.npy", b"\x93NUMPY\x01\x00\x76\x00" + _header("(1099511627776, 1, 3, 4)"))
    with pytest.raises(DamagedData, match=r"own\.npz cannot be read as \.npz"):
        own(path)
    with pytest.raises(MissingData, match=r"there is no such \.npz file or folder"):
        own(tmp_path / "nothing")


def _header(shape: str) -> bytes:
    return f"{{'descr': '|u1', 'fortran_order': False, 'shape': {shape}, }}".ljust(0x75).encode() + b"\n"


def test_other_layouts_of_the_same_numbers_are_read(tmp_path):
    floats = (IMAGES / 255).astype(np.float32)
    for images in (np.asfortranarray(floats), floats.astype(">f4"), floats.astype(np.float64)):
        np.savez(tmp_path / "own.npz", images=images, labels=LABELS.astype(">i2"))
        found = own(tmp_path / "own.npz")
        assert np.array_equal(found.images.numpy(), floats)
        assert found.labels.tolist() == LABELS.tolist()
    assert torch.equal(pixels(found.images), found.images)
    assert len(found.take(torch.arange(2))) == 2


def test_a_name_of_a_data_set_does_not_stand_for_it(tmp_path):
    np.savez(tmp_path / "mnist.npz", images=IMAGES, labels=LABELS)
    (tmp_path / "mnist.npz").rename(tmp_path / "mnist")
    assert own(tmp_path / "mnist").name == "./mnist"


def test_samples_may_be_vectors(tmp_path):
    np.savez(tmp_path / "own.npz", images=IMAGES.reshape(5, 12), labels=LABELS)
    assert own(tmp_path / "own.npz", shape=(12,)).shape == (12,)


# Folders ---------------------------------------------------------------------------------------------------------------


def picture(path: Path, image: np.ndarray, mode: str | None = None) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    made = Image.fromarray(image)
    (made if mode is None else made.convert(mode)).save(path, "PNG")


@pytest.mark.parametrize("names", [("0", "1"), ("000", "1"), ("cats", "dogs")])
def test_a_folder_is_read_in_turns_of_its_classes(tmp_path, names):
    for number, (image, label) in enumerate(zip(IMAGES, LABELS, strict=True)):
        picture(tmp_path / "own" / names[label] / f"{number}.png", image[0])
    (tmp_path / "own" / ".hidden").write_text("")
    found = own(tmp_path / "own")
    assert np.array_equal(found.images.numpy(), IMAGES)  # whose labels take turns
    assert found.labels.tolist() == LABELS.tolist()
    assert found.classes == ("0", "1")


def test_colours_are_kept_and_grey_becomes_three_channels(tmp_path):
    colours = images_for((3, 4, 3), 1)[0]
    picture(tmp_path / "0" / "a.png", colours)
    picture(tmp_path / "0" / "b.png", IMAGES[0, 0])
    found = own(tmp_path, shape=(3, 3, 4)).images.numpy()
    assert np.array_equal(found[0], colours.transpose(2, 0, 1))
    assert np.array_equal(found[1], np.repeat(IMAGES[0], 3, axis=0))


def test_a_folder_is_certified_and_verified(tmp_path, command, monkeypatch):
    small(tmp_path)
    for number, image in enumerate(IMAGES):
        picture(tmp_path / "digits" / str(number % 2) / f"{number}.png", image[0])
    monkeypatch.chdir(tmp_path)
    code, _, said = command("certify", "small.onnx", "--data", "digits", *FEW, "--out", "rows.csv")
    assert code == 0, said
    assert command("verify", "rows.csv", "--device", "cpu")[0] == 0
    picture(tmp_path / "digits" / "1" / "3.png", IMAGES[0, 0])
    code, _, said = command("verify", "rows.csv", "--device", "cpu")
    assert (code, "is about other images than these of digits" in said) == (2, True)


def broken(path: Path, kept: slice) -> None:
    picture(path, IMAGES[0, 0])
    path.write_bytes(path.read_bytes()[kept])


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda f: (f / "0").mkdir(), "holds 0 images and 0 labels"),
        (lambda f: None, "expected one folder per class and nothing else, and it is empty"),
        (lambda f: (f / "a.png").write_bytes(b""), "'a.png' is a file"),
        (lambda f: picture(f / "2" / "a.png", IMAGES[0, 0]), "labels run from 2 to 2"),
        (lambda f: picture(f / "-1" / "a.png", IMAGES[0, 0]), "has 1 folders, and the network tells 2 classes apart"),
        (lambda f: picture(f / "cats" / "a.png", IMAGES[0, 0]), "call folders by the numbers of their classes"),
        (lambda f: [(f / name).mkdir() for name in ("0", "00")], "two of its folders stand for one class"),
        (lambda f: picture(f / "0" / "a.jpg", IMAGES[0, 0]), r"a\.jpg: only .png files are read"),
        (lambda f: (f / "0" / "a.png").mkdir(parents=True), r"a\.png: only .png files are read"),
        (lambda f: picture(f / "0" / "a.png", IMAGES[0, 0].T), "is 3 x 4 pixels, and the network takes 4 x 3"),
        (
            lambda f: picture(f / "0" / "a.png", IMAGES[0, 0], "RGB"),
            "is of the kind 'RGB': only grey ones of 8 bits are read",
        ),
        (lambda f: picture(f / "0" / "a.png", IMAGES[0, 0], "LA"), "is of the kind 'LA': only grey"),
        (lambda f: picture(f / "0" / "a.png", IMAGES[0, 0].astype(np.uint16)), "it has 16 bits per channel"),
        (lambda f: broken(f / "0" / "a.png", slice(-20)), "does not end like a PNG file"),
        (lambda f: broken(f / "0" / "a.png", slice(20, None)), "cannot be read as PNG"),
        (lambda f: broken(f / "0" / "a.png", slice(0)), "does not end like a PNG file"),
    ],
)
def test_folders_that_do_not_fit_are_refused(tmp_path, make, message):
    (tmp_path / "own").mkdir()
    make(tmp_path / "own")
    with pytest.raises(DamagedData, match=message):
        own(tmp_path / "own")
