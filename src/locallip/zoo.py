"""Networks on disk: safetensors files that say how to build themselves, and the trained ones that come with the package.

Nothing is ever unpickled. A file holds the weights and, in its metadata, one JSON record: architecture, activation,
input_shape and classes, by which the network is built again, and whatever else is known about it. The record is a single
string because safetensors writes several in no fixed order: equal networks give equal files and checksums.
"""

from __future__ import annotations

import copy
import difflib
import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor, nn

from locallip.files import write_atomically
from locallip.models import build_model
from locallip.network import Digests, UnsupportedLayer, described, lower
from locallip.results import check_evaluation, read_result

WEIGHTS = Path(__file__).resolve().parent / "weights"
MODEL_FILE = "model.safetensors"

#: What a file may store; all three turn into float32 without rounding.
STORED = (torch.float32, torch.float16, torch.bfloat16)

_RECORD = "locallip"
_NEEDED = ("architecture", "activation", "input_shape", "classes")
#: Files that torch writes with pickles in them; .ts is TorchScript, which holds code besides.
PICKLE_SUFFIXES = (".pt", ".pth", ".pkl", ".pickle", ".ckpt", ".bin", ".ts")


class WrongModel(ValueError):
    """A network that is missing, damaged or not ours; the message is for the user."""


@dataclass(frozen=True)
class ModelCard:
    """A network that comes with the package, and what was measured with just these weights (accuracies in per cent)."""

    name: str
    sha256: str
    recipe: str
    evaluation: Mapping[str, Any]
    training: Mapping[str, Any]
    hardware: str
    model: Mapping[str, Any]


#: More channels, pixels a side or classes than this are a mistake or worse.
LARGEST_SIDE = 2**16


def save_model(path: str | Path, model: nn.Module, about: Mapping[str, Any], dtype: torch.dtype | None = None) -> None:
    """Write the weights and `about` to a safetensors file, whole or not at all.

    `about` needs architecture (one that `build_model` knows), activation, input_shape and classes. `dtype` (float16 or
    bfloat16) rounds the weights for storage: then it is the loaded network that should be certified, not this one.
    """
    path = Path(path)
    if dtype not in (None, *STORED):
        raise WrongModel(f"weights cannot be stored as {dtype}: choose one of {', '.join(map(str, STORED))}")
    tensors = {name: _storable(name, value, dtype) for name, value in model.state_dict().items()}
    skeleton = _skeleton(about, "about")
    _check_weights(tensors, skeleton, "this network")
    _check_function(model, skeleton, tensors, about["input_shape"], dtype)
    write_atomically(path, save(tensors, metadata={_RECORD: _encode(about)}))


def load_model(name_or_path: str | Path) -> nn.Module:
    """A network in eval mode and float32, its weights exactly those stored.

    Takes the name of a network that comes with the package, a run folder or a .safetensors file; a name wins over a
    folder of the same name, which `./name` reaches.
    """
    return _load_file(_file_of(name_or_path))


def read_about(name_or_path: str | Path) -> dict[str, Any]:
    """The record in a network's file, which `load_model` finds by the same names."""
    return _read(_file_of(name_or_path))[0]


def _file_of(name_or_path: str | Path) -> Path:
    path, name = Path(name_or_path), str(name_or_path)
    cards = {card.name: card for card in model_cards()}
    if name in cards:
        return _shipped(cards[name])
    try:
        is_folder, is_file = path.is_dir(), path.is_file()
    except (OSError, ValueError):  # too long for a path, or not one
        is_folder = is_file = False
    if is_folder:
        if not (path / MODEL_FILE).is_file():
            raise WrongModel(f"the folder {path} holds no {MODEL_FILE}: has its training ended?")
        return path / MODEL_FILE
    if is_file:
        return path
    raise WrongModel(_unknown(name if len(name) < 200 else name[:200] + "...", cards))


def model_cards() -> list[ModelCard]:
    """The networks that come with the package, by name."""
    index = WEIGHTS / "index.json"
    try:
        entries = json.loads(index.read_text(encoding="utf-8"))
        if not isinstance(entries, dict):
            raise ValueError("it names no networks")
        cards = [ModelCard(name=name, **entries[name]) for name in sorted(entries)]
        for card in cards:
            check_evaluation(card.evaluation, f"evaluation of {card.name}")
            if not isinstance(card.training.get("seconds"), (int, float)):
                raise ValueError(f"training of {card.name} lacks its seconds")
        return cards
    except OSError as error:
        raise WrongModel(f"cannot read {index}: {error.strerror or error}") from None
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        raise WrongModel(f"{index} is damaged: {error}") from None


def add_to_zoo(result: str | Path, model: str | Path, name: str | None = None) -> ModelCard:
    """Ship a trained network: copy its file and put the figures of its result file into the index.

    Args:
        result: The result file of the run.
        model: The file that was evaluated; its checksum must be the one in the result.
        name: What `load_model` shall call it; the recipe's name unless given.
    """
    found, data, path = read_result(Path(result)), Path(model).read_bytes(), Path(model)
    about = _read(path)[0]
    checksum = hashlib.sha256(data).hexdigest()
    if checksum != found.model["sha256"]:
        raise WrongModel(f"{path} has the checksum {checksum}, but {result} was measured with {found.model['sha256']}")
    if about.get("recipe") != found.name:
        raise WrongModel(f"{path} is of the recipe {about.get('recipe')!r}, but {result} is of {found.name!r}")
    name = name or found.name
    if not name.replace("-", "").replace(".", "").isalnum():
        raise WrongModel(f"{name!r} is no name for a network: use letters, digits, '-' and '.'")
    _load_file(path)
    training = {key: found.training[key] for key in ("seconds", "epochs", "others_gb") if key in found.training}
    card = ModelCard(name, checksum, found.name, found.evaluation, training, str(found.about["hardware"]), found.model)
    entries = {known.name: _entry(known) for known in model_cards()} | {name: _entry(card)}
    # The weights go first: between the two writes an old entry meets new weights, and the checksum says so.
    write_atomically(WEIGHTS / f"{name}.safetensors", data)
    text = json.dumps(dict(sorted(entries.items())), indent=1) + "\n"
    write_atomically(WEIGHTS / "index.json", text.encode())
    return card


def _entry(card: ModelCard) -> dict[str, Any]:
    return {key: value for key, value in vars(card).items() if key != "name"}


def _shipped(card: ModelCard) -> Path:
    """The file behind a card, its checksum verified."""
    path = WEIGHTS / f"{card.name}.safetensors"
    try:
        with open(path, "rb") as file:
            checksum = hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise WrongModel(f"cannot read {path}: {error.strerror or error}; install the package again") from None
    if checksum != card.sha256:
        raise WrongModel(f"{path} is damaged: its checksum is {checksum}, expected {card.sha256}; install the package again")
    return path


def _load_file(path: Path) -> nn.Module:
    about, tensors = _read(path)
    model = _skeleton(about, str(path))
    _check_weights(tensors, model, str(path))
    model.load_state_dict({name: value.float() for name, value in tensors.items()}, assign=True)
    return model.eval()


def _read(path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The record and the tensors as stored."""
    _refuse_pickle(path)
    if path.suffix.lower() == ".onnx":
        raise WrongModel(f"{path} is an ONNX file and has no record of ours: locallip.load_onnx reads it")
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118, it is not a mapping
    except (OSError, RuntimeError, MemoryError, SafetensorError) as error:  # torch maps the file, which may be too large
        raise WrongModel(f"{path} is no file of weights, or is damaged: safetensors says {error}") from None
    try:
        about = json.loads(metadata[_RECORD])
    except KeyError:
        raise WrongModel(f"{path} does not say what network it holds: it was not written by locallip") from None
    except (ValueError, RecursionError) as error:
        raise WrongModel(f"{path}: its record is not valid JSON: {error}") from None
    if not isinstance(about, dict):
        raise WrongModel(f"{path}: its record names no fields")
    return about, tensors


def _refuse_pickle(path: Path) -> None:
    """Loading a pickle runs what it contains; a safetensors file has an opening brace behind its 8 bytes of length."""
    try:
        with open(path, "rb") as file:
            head = file.read(9)
    except OSError as error:
        raise WrongModel(f"cannot read {path}: {error.strerror or error}") from None
    if path.suffix.lower() in PICKLE_SUFFIXES or is_pickle(head):
        raise WrongModel(
            f"{path} is a pickle or TorchScript or meant to be one, and unpickling runs whatever it contains. Only "
            ".safetensors and .onnx files are loaded: export the network with torch.onnx.export, or save its state dict as "
            "safetensors, load that into the network yourself and certify it in Python"
        )


def is_pickle(head: bytes) -> bool:
    """Whether a file that begins with these 9 bytes is a pickle, or an archive as torch.save and TorchScript write it."""
    return head.startswith((b"PK\x03\x04", b"\x80")) and head[8:] != b"{"


def _skeleton(about: Mapping[str, Any], where: str) -> nn.Module:
    """The network of a record, without memory for weights and without drawing random numbers."""
    missing = [key for key in _NEEDED if key not in about]
    if missing:
        raise WrongModel(f"{where}: the record lacks {', '.join(missing)}")
    shape, classes = about["input_shape"], about["classes"]
    sizes = [*shape, classes] if isinstance(shape, (list, tuple)) else []
    if len(sizes) != 4 or not all(type(size) is int and 0 < size <= LARGEST_SIDE for size in sizes):
        raise WrongModel(f"{where}: input_shape = {shape!r}, classes = {classes!r}: expected (C, H, W) and a whole number")
    try:
        with torch.device("meta"):
            return build_model(str(about["architecture"]), tuple(shape), classes, str(about["activation"]))
    except (ValueError, RuntimeError) as error:
        raise WrongModel(f"{where}: {error}") from None


def _storable(name: str, value: Tensor, dtype: torch.dtype | None) -> Tensor:
    if value.dtype not in STORED:
        raise WrongModel(f"{name} is {value.dtype}: networks are stored in {', '.join(map(str, STORED))}")
    # A copy: parts of one storage, or a channels-last layout, cannot be written.
    return value.detach().to("cpu", dtype or value.dtype).contiguous().clone(memory_format=torch.contiguous_format)


def _check_weights(tensors: Mapping[str, Tensor], model: nn.Module, where: str) -> None:
    expected = model.state_dict()
    for word, names in (("lacks", expected.keys() - tensors.keys()), ("has no place for", tensors.keys() - expected.keys())):
        if names:
            raise WrongModel(f"{where} {word} {_some(names)}: its weights are not of the network that its record names")
    for name, value in tensors.items():
        if value.shape != expected[name].shape:
            raise WrongModel(f"{where}: {name} is {tuple(value.shape)}, expected {tuple(expected[name].shape)}")
        if value.dtype not in STORED:
            raise WrongModel(f"{where}: {name} is {value.dtype}, expected one of {', '.join(map(str, STORED))}")
        if not bool(value.isfinite().all()):
            raise WrongModel(f"{where}: {name} holds values that are not finite in {value.dtype}")


def _check_function(
    model: nn.Module, skeleton: nn.Module, tensors: Mapping[str, Tensor], shape: Iterable[int], dtype: torch.dtype | None
) -> None:
    """Refuse a record by which another network would be built of the same weights, such as one of another activation.

    What is read back is lowered, and so is the network itself with its weights rounded alike: their layers must be the same,
    for values at some points do not tell all networks apart.
    """
    own = copy.deepcopy(model).to("cpu", dtype).float().eval()
    skeleton.load_state_dict({name: value.float() for name, value in tensors.items()}, assign=True)
    x = 10 * torch.randn(2, *shape, generator=torch.Generator().manual_seed(0), dtype=torch.float32)
    with torch.no_grad():
        given, named = own(x), skeleton.eval()(x)
    allowed = 1e-4 * float(named.abs().max())
    same = given.shape == named.shape and torch.allclose(given, named, 1e-4, allowed, equal_nan=True)
    try:
        digest = Digests()
        same = same and described(lower(own, x.shape[1:]), digest) == described(lower(skeleton, x.shape[1:]), digest)
    except UnsupportedLayer:  # such as one without a rule, and build_model has none of these
        same = False
    if not same:
        raise WrongModel(
            "this network computes something else than the one that its record names: give the architecture and activation "
            "that it has; networks that build_model does not know cannot be stored"
        )


def _encode(about: Mapping[str, Any]) -> str:
    try:
        return json.dumps(dict(about), sort_keys=True, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise WrongModel(f"about cannot be written as JSON: {error}") from None


def _some(names: Iterable[str]) -> str:
    ordered = sorted(names)
    return ", ".join(ordered[:3]) + (f" and {len(ordered) - 3} more" if len(ordered) > 3 else "")


def _unknown(name: str, cards: Mapping[str, ModelCard]) -> str:
    close = difflib.get_close_matches(name, list(cards), n=1)
    hint = f" (did you mean {close[0]!r}?)" if close else ""
    known = f"the networks that come with locallip are {', '.join(cards)}" if cards else "no networks come with this version"
    return f"there is no network, folder or file {name!r}{hint}; {known}"
