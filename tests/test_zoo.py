"""Networks on disk: what is stored is what is loaded, and anything else is refused with a message that helps."""

from __future__ import annotations

import hashlib
import json
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from locallip import listing, zoo
from locallip.models import build_model
from locallip.training.recipe import find
from locallip.zoo import WrongModel, add_to_zoo, load_model, model_cards, read_about, save_model

ABOUT: dict[str, Any] = {"architecture": "4c3f", "activation": "relu_theta", "input_shape": [1, 28, 28], "classes": 10}
KNOWN = {"recipe": "mnist-4c3f-local-b", "eps": "1.58", "data": "mnist"}


def network(activation: str = "relu_theta") -> nn.Sequential:
    torch.manual_seed(0)
    return build_model("4c3f", (1, 28, 28), 10, activation)


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("stored") / "model.safetensors"
    save_model(path, network(), ABOUT | KNOWN, torch.float16)
    return path.read_bytes()


@pytest.fixture
def shelf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder of shipped networks."""
    folder = tmp_path / "weights"
    folder.mkdir()
    (folder / "index.json").write_text("{}\n")
    monkeypatch.setattr(zoo, "WEIGHTS", folder)
    return folder


def shipped(folder: Path, stored: bytes, **changes: Any) -> tuple[Path, Path]:
    """A run's two files; `changes` go to the result's model section."""
    model, result = folder / "model.safetensors", folder / "result.json"
    model.write_bytes(stored)
    evaluation = {"split": "test", "images": 10_000, "eps": "1.58", "clean": 93.5, "pgd": 70.0, "pgd_steps": 100}
    evaluation |= {"estimate": 50.5, "certified": 50.25, "guarantee": "high_probability"}
    values = {
        "about": {"hardware": "One GPU"},
        "recipe": {"name": "mnist-4c3f-local-b", "data": "mnist", "eps": "1.58", "seed": 0},
        "training": {"seconds": 300.0, "epochs": 300, "seconds_per_epoch": 1.0},
        "evaluation": evaluation | {"global_lipschitz": 3.0, "local_lipschitz": 2.0},
        "model": {"sha256": hashlib.sha256(stored).hexdigest(), "dtype": "float16"} | changes,
    }
    result.write_text(json.dumps(values))
    return result, model


@pytest.mark.parametrize("activation", ["relu", "relu_theta", "maxmin", "clipped_maxmin"])
def test_a_network_comes_back_exactly(tmp_path: Path, activation: str):
    model, path = network(activation), tmp_path / "model.safetensors"
    save_model(path, model.to(memory_format=torch.channels_last), ABOUT | {"activation": activation})
    before = torch.get_rng_state()
    loaded = load_model(path)
    assert torch.equal(torch.get_rng_state(), before), "loading draws no random numbers"
    assert not loaded.training
    state = loaded.state_dict()
    assert all(torch.equal(state[name], value) for name, value in model.state_dict().items())
    assert all(parameter.requires_grad and parameter.device.type == "cpu" for parameter in loaded.parameters())
    x = torch.rand(2, 1, 28, 28)
    assert torch.equal(loaded(x), network(activation)(x))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_sixteen_bits_round_once_and_load_as_float32(tmp_path: Path, dtype: torch.dtype):
    model, path = network(), tmp_path / "model.safetensors"
    save_model(path, model, ABOUT, dtype)
    assert {value.dtype for value in load_file(path).values()} == {dtype}
    state = load_model(path).state_dict()
    for name, value in model.state_dict().items():
        assert state[name].dtype == torch.float32
        assert torch.equal(state[name], value.to(dtype).float())
    save_model(tmp_path / "again.safetensors", load_model(path), ABOUT, dtype)
    assert (tmp_path / "again.safetensors").read_bytes() == path.read_bytes()


def test_equal_networks_give_equal_files(tmp_path: Path):
    for name in ("a", "b"):
        save_model(tmp_path / name, network(), ABOUT | KNOWN)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_the_record_says_everything_it_was_given(tmp_path: Path):
    save_model(tmp_path / "m.safetensors", network(), ABOUT | KNOWN)
    assert read_about(tmp_path / "m.safetensors") == ABOUT | KNOWN


def test_a_run_folder_loads_and_one_without_weights_is_named(tmp_path: Path, stored: bytes):
    with pytest.raises(WrongModel, match=r"holds no model\.safetensors"):
        load_model(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(stored)
    assert isinstance(load_model(str(tmp_path)), nn.Sequential)


def test_a_write_that_fails_leaves_the_old_file_and_no_rubbish(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = tmp_path / "model.safetensors"
    save_model(path, network(), ABOUT)
    old = path.read_bytes()

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        save_model(path, network("maxmin"), ABOUT | {"activation": "maxmin"})
    assert path.read_bytes() == old
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    ("about", "message"),
    [
        ({"activation": "relu"}, "has no place for .*raw_theta"),
        ({"activation": "tanh"}, "unknown activation 'tanh'"),
        ({"architecture": "5c5f"}, "unknown architecture '5c5f'"),
        ({"classes": 100}, r"is \(10, 512\), expected \(100, 512\)"),
        ({"classes": "10"}, "expected .* a whole number"),
        ({"input_shape": [28, 28]}, "input_shape = .28, 28."),
        ({"input_shape": [1, 2, 2]}, "too small"),
        ({"note": float("nan")}, "cannot be written as JSON"),
        ({"note": object()}, "cannot be written as JSON"),
    ],
)
def test_a_record_that_does_not_fit_is_refused_before_anything_is_written(
    tmp_path: Path, about: dict[str, Any], message: str
):
    with pytest.raises(WrongModel, match=message):
        save_model(tmp_path / "model.safetensors", network(), ABOUT | about)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("missing", list(ABOUT))
def test_a_record_that_lacks_something_is_named(tmp_path: Path, missing: str):
    about = {key: value for key, value in ABOUT.items() if key != missing}
    with pytest.raises(WrongModel, match=f"lacks {missing}"):
        save_model(tmp_path / "m.safetensors", network(), about)
    save_file(network().state_dict(), tmp_path / "m.safetensors", metadata={"locallip": json.dumps(about)})
    with pytest.raises(WrongModel, match=rf"m\.safetensors: the record lacks {missing}"):
        load_model(tmp_path / "m.safetensors")


def test_weights_that_are_not_finite_are_refused_both_ways(tmp_path: Path):
    model, path = network(), tmp_path / "m.safetensors"
    model[0].bias.data[3] = float("nan")
    with pytest.raises(WrongModel, match=r"0\.bias holds values that are not finite"):
        save_model(path, model, ABOUT)
    save_file(model.state_dict(), path, metadata={"locallip": json.dumps(ABOUT)})
    with pytest.raises(WrongModel, match=r"m\.safetensors: 0\.bias holds values that are not finite"):
        load_model(path)
    model[0].bias.data[3] = 1e6
    with pytest.raises(WrongModel, match=r"0\.bias .* not finite in torch\.float16"):
        save_model(tmp_path / "large.safetensors", model, ABOUT, torch.float16)


@pytest.mark.parametrize("dtype", [torch.float64, torch.int8])
def test_other_kinds_of_numbers_are_refused(tmp_path: Path, dtype: torch.dtype):
    with pytest.raises(WrongModel, match="cannot be stored as"):
        save_model(tmp_path / "m.safetensors", network(), ABOUT, dtype)
    save_file(
        {name: value.to(dtype) for name, value in network().state_dict().items()},
        tmp_path / "m",
        {"locallip": json.dumps(ABOUT)},
    )
    with pytest.raises(WrongModel, match=f"is {dtype}, expected one of"):
        load_model(tmp_path / "m")


def test_a_float64_network_is_not_rounded_in_silence(tmp_path: Path):
    with pytest.raises(WrongModel, match=r"is torch\.float64"):
        save_model(tmp_path / "m.safetensors", network().double(), ABOUT)


def test_tensors_of_another_network_are_refused(tmp_path: Path):
    state, path = network().state_dict(), tmp_path / "m.safetensors"
    metadata = {"locallip": json.dumps(ABOUT)}
    save_file({name: value for name, value in state.items() if name != "0.weight"}, path, metadata)
    with pytest.raises(WrongModel, match=r"lacks 0\.weight"):
        load_model(path)
    save_file(state | {"0.weight": torch.zeros(32, 1, 5, 5)}, path, metadata)
    with pytest.raises(WrongModel, match=r"0\.weight is \(32, 1, 5, 5\), expected \(32, 1, 3, 3\)"):
        load_model(path)


def test_a_file_without_a_record_is_refused(tmp_path: Path):
    save_file(network().state_dict(), tmp_path / "m.safetensors")
    with pytest.raises(WrongModel, match="was not written by locallip"):
        load_model(tmp_path / "m.safetensors")
    for record in ("{", "[1]"):
        save_file(network().state_dict(), tmp_path / "m.safetensors", {"locallip": record})
        with pytest.raises(WrongModel, match=r"m\.safetensors: its record"):
            load_model(tmp_path / "m.safetensors")


@pytest.mark.parametrize("length", [0, 5, 9, 400, 100_000, -1])
def test_a_truncated_file_is_named(tmp_path: Path, stored: bytes, length: int):
    (tmp_path / "cut.safetensors").write_bytes(stored[:length])
    with pytest.raises(WrongModel, match=r"cut\.safetensors is no file of weights, or is damaged"):
        load_model(tmp_path / "cut.safetensors")


def test_a_file_that_is_too_large_to_map_is_named(tmp_path: Path):
    """A terabyte that takes no room on the disk, with a header that fits it."""
    about = {"__metadata__": {"locallip": json.dumps(ABOUT)}}
    header = json.dumps({**about, "x": {"dtype": "F32", "shape": [2**38], "data_offsets": [0, 2**40]}}).encode()
    path = tmp_path / "large.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header)
    os.truncate(path, 8 + len(header) + 2**40)
    with pytest.raises(WrongModel, match=r"large\.safetensors (is no file of weights|lacks)"):
        load_model(path)


class Trap:
    """Unpickling this makes a file."""

    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self) -> Any:
        return (Path.touch, (self.path,))


@pytest.mark.parametrize("name", ["m.pt", "m.pth", "m.pkl", "m.bin", "m.safetensors", "m"])
@pytest.mark.parametrize("protocol", [2, 5])
def test_a_pickle_is_refused_and_not_run(tmp_path: Path, name: str, protocol: int):
    (tmp_path / name).write_bytes(pickle.dumps(Trap(tmp_path / "sprung"), protocol))
    with pytest.raises(WrongModel, match="unpickling runs whatever it contains"):
        load_model(tmp_path / name)
    assert not (tmp_path / "sprung").exists()


def test_what_torch_save_writes_is_refused_under_any_name(tmp_path: Path):
    torch.save(network().state_dict(), tmp_path / "m.safetensors")
    with pytest.raises(WrongModel, match="unpickling"):
        load_model(tmp_path / "m.safetensors")


def test_a_header_whose_length_looks_like_a_pickle_still_loads(tmp_path: Path):
    path = tmp_path / "m.safetensors"
    for pad in range(2000):
        save_model(path, network(), ABOUT | {"note": "x" * pad * 8})
        if path.read_bytes()[:1] == b"\x80":
            break
    assert path.read_bytes()[:1] == b"\x80"
    assert isinstance(load_model(path), nn.Sequential)


def test_a_shipped_network_loads_by_name_and_is_listed(shelf: Path, tmp_path: Path, stored: bytes):
    card = add_to_zoo(*shipped(tmp_path, stored))
    assert model_cards() == [card]
    assert (shelf / "mnist-4c3f-local-b.safetensors").read_bytes() == stored
    (tmp_path / "other.safetensors").write_bytes(stored)
    expected = load_model(tmp_path / "other.safetensors").state_dict()
    state = load_model("mnist-4c3f-local-b").state_dict()
    assert all(torch.equal(state[name], value) for name, value in expected.items())
    head, line, note = listing.model_list().splitlines()
    assert "certified*" in head
    assert note.startswith("* by the paper's bound")
    assert line.split()[:5] == ["mnist-4c3f-local-b", "1.58", "93.50", "70.00", "50.25"]
    assert line.index("93.50") == head.index("clean")


def test_a_second_network_joins_the_index_under_a_name_of_its_own(shelf: Path, tmp_path: Path, stored: bytes):
    files = shipped(tmp_path, stored)
    add_to_zoo(*files, name="second")
    add_to_zoo(*files)
    add_to_zoo(*files)
    assert [card.name for card in model_cards()] == ["mnist-4c3f-local-b", "second"]
    assert sorted(path.name for path in shelf.iterdir()) == [
        *("index.json", "mnist-4c3f-local-b.safetensors", "second.safetensors"),
    ]


def test_an_unknown_name_gets_the_nearest_one_and_the_list(shelf: Path, tmp_path: Path, stored: bytes):
    with pytest.raises(WrongModel, match="'mnist-4c3f-localb'; no networks come with this version"):
        load_model("mnist-4c3f-localb")
    add_to_zoo(*shipped(tmp_path, stored))
    with pytest.raises(WrongModel, match=r"did you mean 'mnist-4c3f-local-b'\?\); the networks .* are mnist-4c3f-local-b"):
        load_model("mnist-4c3f-localb")


def test_a_shipped_file_that_changed_is_refused(shelf: Path, tmp_path: Path, stored: bytes):
    add_to_zoo(*shipped(tmp_path, stored))
    path = shelf / "mnist-4c3f-local-b.safetensors"
    path.write_bytes(stored[:-1] + bytes([stored[-1] ^ 1]))
    with pytest.raises(WrongModel, match="is damaged: its checksum is"):
        load_model("mnist-4c3f-local-b")
    path.unlink()
    with pytest.raises(WrongModel, match=r"cannot read .*install the package again"):
        load_model("mnist-4c3f-local-b")


def test_only_the_weights_that_were_measured_are_shipped(shelf: Path, tmp_path: Path, stored: bytes):
    with pytest.raises(WrongModel, match=r"has the checksum .* was measured with"):
        add_to_zoo(*shipped(tmp_path, stored, sha256="0" * 64))
    result, model = shipped(tmp_path, stored)
    save_model(model, network(), ABOUT | {"recipe": "another"})
    values = json.loads(result.read_text())
    values["model"]["sha256"] = hashlib.sha256(model.read_bytes()).hexdigest()
    result.write_text(json.dumps(values))
    with pytest.raises(WrongModel, match="is of the recipe 'another'"):
        add_to_zoo(result, model)
    with pytest.raises(WrongModel, match="is no name for a network"):
        add_to_zoo(*shipped(tmp_path, stored), name="../up")
    assert [path.name for path in shelf.iterdir()] == ["index.json"]


def test_a_name_that_is_no_path_is_unknown(shelf: Path):
    for name in ("x" * 5000, "a\0b"):
        with pytest.raises(WrongModel, match="there is no network, folder or file"):
            load_model(name)


CARD = {"sha256": "0", "recipe": "r", "training": {"seconds": 1.0}, "hardware": "h", "model": {}}
FIGURES = {"split": "test", "images": 10, "clean": 90.0, "pgd": None, "pgd_steps": None, "estimate": None, "certified": None}
FIGURES |= {"guarantee": None, "global_lipschitz": None, "local_lipschitz": None}


@pytest.mark.parametrize(
    "content",
    [
        *("", "[1]", "[]", '{"a": {}}', '{"a": 3}', "[" * 100_000),
        json.dumps({"a": CARD | {"evaluation": []}}),
        json.dumps({"a": CARD | {"evaluation": FIGURES | {"clean": "x"}}}),
        json.dumps({"a": CARD | {"evaluation": {key: FIGURES[key] for key in FIGURES if key != "clean"}}}),
        json.dumps({"a": CARD | {"evaluation": FIGURES, "training": {}}}),
        json.dumps({"a": CARD | {"evaluation": FIGURES, "training": []}}),
    ],
    ids=lambda content: content[:40],
)
def test_a_damaged_index_is_named(shelf: Path, content: str):
    (shelf / "index.json").write_text(content)
    with pytest.raises(WrongModel, match=r"index\.json is damaged"):
        model_cards()


def test_the_shipped_files_are_those_of_the_index_and_load():
    assert {path.stem for path in zoo.WEIGHTS.glob("*.safetensors")} == {card.name for card in model_cards()}
    for card in model_cards():
        recipe, about = find(card.recipe), read_about(zoo.WEIGHTS / f"{card.name}.safetensors")
        assert (about["architecture"], about["activation"]) == (recipe.architecture, recipe.activation)
        assert not load_model(card.name).training


@pytest.mark.parametrize("sizes", [[1, 10**9, 10**9], [1, 10**30, 4], [10**6, 4, 4]])
def test_sizes_beyond_reason_are_refused(tmp_path, sizes):
    path = tmp_path / "net.safetensors"
    about = {"architecture": "small", "activation": "relu", "input_shape": sizes, "classes": 2}
    save_file({"x": torch.zeros(1)}, path, {"locallip": json.dumps(about)})
    with pytest.raises(WrongModel, match="input_shape"):
        load_model(path)
