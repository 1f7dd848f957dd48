"""What a command works on: a network, its images and the radius, from what the user named."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

from locallip.balls import L2
from locallip.data import READERS, ImageSet, Like, MissingData, load_images, load_own
from locallip.data.own_set import NAME as OWN
from locallip.onnx_model import load_onnx
from locallip.options import check, radius_of
from locallip.training.recipe import find
from locallip.training.recipe import names as recipe_names
from locallip.zoo import load_model, read_about

#: How files end that are read as ONNX.
ONNX = ".onnx"


def brought(
    model: str, data: str | Path | None, eps: str | None, split: str, root: Path | None, download: bool, norm: str = L2.norm
) -> tuple[nn.Module, ImageSet, str]:
    """A network, its images and the radius; what is not said is what the network was trained on and for, which is l2.

    `data` is the name of a data set, or the path of images of the user's own.
    """
    network, about = network_of(model)
    trained_on, trained_for = _training(about)
    check(
        (data is not None or trained_on in READERS) and (eps is not None or trained_for != ""),
        f"{model} does not say what it was trained on: name it with --data and --eps",
    )
    check(eps is not None or norm == L2.norm, f"--norm {norm}: say with --eps how large the balls are")
    if isinstance(data, Path):
        return network, _own(data, about, eps, split), eps or ""
    name = data if data is not None else trained_on
    check(name in READERS, f"--data {name or repr(name)}: choose one of {', '.join(READERS)}")
    radius = eps if eps is not None else trained_for
    radius_of(radius)
    wanted = tuple(about["input_shape"])
    say = partial(print, file=sys.stderr)
    try:
        images = load_images(name, split, root, download=download, say=say, **(_own_like(about) if name == OWN else {}))
    except MissingData as error:
        raise MissingData(f"{error}; --data embedded needs no files" if name == "mnist" else str(error)) from None
    check(images.shape == wanted, f"{model} takes images of {_sizes(wanted)}, those of {name} are {_sizes(images.shape)}")
    check(
        len(images.classes) == about["classes"],
        f"{model} tells {about['classes']} classes apart, and {name} has {len(images.classes)}",
    )
    return network, images, radius


def _training(about: dict[str, Any]) -> tuple[str, str]:
    """What a network was trained on and for, as its record says, or the recipe that the record names; else nothing."""
    recipe = str(about.get("recipe", ""))
    known = find(recipe) if recipe in recipe_names() else None
    data, eps = about.get("data", known.data if known else ""), about.get("eps", known.eps if known else "")
    return str(data), str(eps)


def _own_like(about: dict[str, Any]) -> dict[str, Any]:
    """How images of the user's own came to the training, as the network's record says; else by the network's shape alone."""
    shape, side, names = tuple(about["input_shape"]), about.get("side"), about.get("class_names")
    square = shape[1] if len(shape) == 3 and shape[1] == shape[2] else 0
    classes = tuple(names) if isinstance(names, list) and all(isinstance(name, str) for name in names) else ()
    if len(classes) == len(set(classes)) == about["classes"] and type(side) is int and side in (0, square):
        return {"side": side, "like": Like(shape, classes)}
    return {"side": square}


def network_of(model: str) -> tuple[nn.Module, dict[str, Any]]:
    """A network and its record; that of an ONNX file says what can be read off its graph."""
    if Path(model).suffix.lower() != ONNX:
        return load_model(model), read_about(model)
    network = load_onnx(model)
    return network, {"input_shape": network.input_shape, "classes": network.classes, "left_out": network.left_out}


def _own(path: Path, about: dict[str, Any], eps: str | None, split: str) -> ImageSet:
    check(eps is not None, f"--data {path}: say with --eps how large the balls around these images are")
    check(split == "test", f"--split {split} goes with the data sets; {path} is one set of images")
    radius_of(eps or "")
    return load_own(path, tuple(about["input_shape"]), about["classes"])


def name_of(model: str) -> str:
    """What a network is called in results: its name, or the last part of its path, whichever way it was written."""
    return Path(model).name or Path(model).resolve().name or model


def _sizes(shape: tuple[int, ...]) -> str:
    return " x ".join(map(str, shape))
