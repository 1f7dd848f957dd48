"""What a run of certificates was asked for and what it was about, kept beside its rows and checked when read again."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Protocol

import torch
from torch import nn

from locallip.balls import L2, NORMS, said
from locallip.certify.inputs import as_eps
from locallip.certify.prover import fingerprint
from locallip.files import write_atomically
from locallip.norms import Guarantee
from locallip.proofs.rows import FORMATS, WrongRows, once


@dataclass(frozen=True)
class Settings:
    """Enough for a third party to repeat it.

    `images` is how many of the split's first images are meant, `data_sha256` the checksum of their pixels and labels,
    `failure_prob` that of one image, 0 for guarantees that know none. `radii` says whether rows have certified radii,
    `method`, `branch_seconds` and `deployed_dtype` are as in `certify`. `fingerprint` is of the weights, `structure` of what
    is done with them; empty where rows are from before it was noted. `chunk` images were worked on together, 0 in older
    files. `norm` is that of the balls.
    `hardware` and `environment` may differ where a run goes on, but not the version of locallip.
    """

    model: str
    fingerprint: str
    data: str
    split: str
    images: int
    data_sha256: str
    eps: str
    guarantee: str
    failure_prob: float
    attack_steps: int
    power_steps: int
    batch_size: int
    seed: int
    hardware: str
    environment: dict[str, Any]
    radii: bool = False
    method: str = "local"
    branch_seconds: float = 0.0
    deployed_dtype: str | None = None
    structure: str = ""
    chunk: int = 0
    norm: str = L2.norm

    @property
    def radius(self) -> float:
        """eps as a number, never below it."""
        return radius_of(self.eps)

    @property
    def shown_eps(self) -> str:
        """eps for people, with its norm where that is not l2."""
        return self.eps + said(self.norm)


def radius_of(eps: str) -> float:
    return float(as_eps(eps, 1, torch.device("cpu")))


class AnySettings(Protocol):
    """A dataclass with the settings of a run."""

    __dataclass_fields__: ClassVar[dict[str, Any]]


#: Settings that say where and how a run was carried out, and may differ where it goes on.
PLACES = ("hardware", "environment", "structure", "chunk")


def differences(now: AnySettings, before: AnySettings) -> list[str]:
    """Where the settings of another run are not these, apart from where it ran."""
    names = [field.name for field in dataclasses.fields(now) if field.name not in PLACES]
    pairs = {name: (getattr(before, name), getattr(now, name)) for name in names}
    pairs["locallip"] = tuple(settings.environment.get("locallip") for settings in (before, now))  # type: ignore[attr-defined]
    found = [f"{name} was {then!r} and is {today!r}" for name, (then, today) in pairs.items() if then != today]
    if not same_structure(getattr(now, "structure", ""), getattr(before, "structure", "")):
        found.append("the network has the same weights in another structure")
    return found


def compared(settings: AnySettings) -> dict[str, Any]:
    """What must be the same in all processes of a run, and in rows that it takes over."""
    kept = {field.name: getattr(settings, field.name) for field in dataclasses.fields(settings) if field.name not in PLACES}
    names = ("structure", "chunk")
    version = settings.environment.get("locallip")  # type: ignore[attr-defined]
    return {**kept, **{name: getattr(settings, name, None) for name in names}, "locallip": version}


def mark_of(settings: AnySettings) -> str:
    """A name for a run that no run of other settings, weights, images or seed has."""
    values = {name: value for name, value in compared(settings).items() if name != "chunk"}
    return hashlib.sha256(json.dumps(values, sort_keys=True, default=str).encode()).hexdigest()[:16]


def structure_of(model: nn.Module) -> str:
    """A checksum of the layers of a stored network, which describe themselves wholly."""
    return hashlib.sha256(repr(model).encode()).hexdigest()


def same_structure(one: str, other: str) -> bool:
    """Whether they agree, or one of them is not known."""
    return not one or not other or one == other


def check_network(path: Path, settings: Settings, model: nn.Module) -> None:
    """Refuse rows that are about another network than this one."""
    if fingerprint(model) != settings.fingerprint:
        raise WrongRows(f"{path} is about other weights: {settings.model!r}, with the fingerprint {settings.fingerprint!r}")
    if not same_structure(structure_of(model), settings.structure):
        raise WrongRows(f"{path} is about another network than this, {settings.model!r}, which has the same weights")


def is_text(value: object) -> bool:
    return isinstance(value, str) and bool(value)


def is_whole(least: int, most: int = 10**9) -> Callable[[object], bool]:
    return lambda value: type(value) is int and least <= value <= most


def is_bool(value: object) -> bool:
    return isinstance(value, bool)


def is_norm(value: object) -> bool:
    return value in NORMS


Checks = Mapping[str, Callable[[Any], bool]]
#: What every run on the images of a data set notes.
COMMON: Checks = {
    "model": is_text,
    "fingerprint": is_text,
    "data": is_text,
    "split": lambda value: value in ("train", "test"),
    "images": is_whole(1),
    "data_sha256": is_text,
    "eps": is_text,
    "batch_size": is_whole(1),
    "seed": is_whole(0, 2**62 - 1),
    "hardware": is_text,
    "environment": lambda value: isinstance(value, dict),
}
#: More for branch and bound on one image is a mistake, or made to keep those busy who verify.
MOST_SECONDS = 86400.0
#: The same for steps of an attack and of power iteration.
MOST_STEPS = 10**6
_CHECKS: Checks = {
    **COMMON,
    "guarantee": lambda value: value in [member.value for member in Guarantee],
    "failure_prob": lambda value: type(value) in (int, float) and (value == 0 or 1e-15 <= value < 1),
    "attack_steps": is_whole(0, MOST_STEPS),
    "power_steps": is_whole(1, MOST_STEPS),
    "radii": is_bool,
    "method": lambda value: value in ("auto", "thorough", "local", "lines"),
    "branch_seconds": lambda value: type(value) in (int, float) and 0 <= value <= MOST_SECONDS,
    "deployed_dtype": lambda value: value in (None, "float32"),
    "structure": lambda value: isinstance(value, str),
    "chunk": is_whole(0),
    "norm": is_norm,
}
#: What settings from before there were these mean.
_OLD = {
    "radii": False,
    "method": "local",
    "branch_seconds": 0.0,
    "deployed_dtype": None,
    "structure": "",
    "chunk": 0,
    "norm": L2.norm,
}


def about_file(path: Path) -> Path:
    """The file with settings and summary beside the rows."""
    if path.suffix not in FORMATS:
        raise WrongRows(f"{path}: rows are kept in files that end in {' or '.join(FORMATS)}")
    return path.with_suffix(".json")


def write_about(
    path: Path, settings: AnySettings, summary: Mapping[str, Any] | None, run: Mapping[str, Any] | None = None
) -> None:
    """`run` says how long it took from beginning to end, and what else the device was doing."""
    values = {"rows": path.suffix, "settings": dataclasses.asdict(settings), "summary": summary, "run": run}
    text = json.dumps(values, indent=1, allow_nan=False) + "\n"
    write_atomically(about_file(path), text.encode())


def read_about(path: Path) -> tuple[Settings, dict[str, Any] | None]:
    """Settings and summary of the rows in `path`; no summary where they are not complete."""
    values, summary = read_values(path)
    return _checked(values, about_file(path)), summary


def read_values(path: Path) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """The settings beside the rows in `path` as they were written, and the summary."""
    beside = about_file(path)
    try:
        values = json.loads(beside.read_text(encoding="utf-8"), object_pairs_hook=once)
    except OSError as error:
        if not path.exists() and not beside.exists():
            raise WrongRows(f"there is no {path}") from None
        raise WrongRows(
            f"cannot read {beside}: {error.strerror or error}; it belongs to {path.name} and has its settings"
        ) from None
    except (ValueError, RecursionError) as error:
        raise WrongRows(f"{beside} is not valid JSON, it is damaged or of something else: {error}") from None
    if not isinstance(values, dict) or not isinstance(values.get("settings"), dict):
        raise WrongRows(f"{beside} has no settings of {path.name}: it is damaged or of something else")
    if values.get("rows", path.suffix) != path.suffix:  # older files do not say
        raise WrongRows(f"{beside} is about rows in {values['rows']!r}, not about {path.name}: name another --out")
    summary = values.get("summary")
    if summary is not None and not isinstance(summary, dict):
        raise WrongRows(f"{beside}: its summary is none")
    return values["settings"], summary


def check_values(values: Mapping[str, Any], checks: Checks, where: Path) -> None:
    """Refuse settings that are missing or not what they should be."""
    for name, holds in checks.items():
        if name not in values:
            raise WrongRows(f"{where}: the setting {name} is missing")
        if not holds(values[name]):
            raise WrongRows(f"{where}: the setting {name} = {str(values[name])[:60]!r} is not what it should be")
    try:
        radius = radius_of(values["eps"])
    except ValueError as error:
        raise WrongRows(f"{where}: {error}") from None
    if not 0 < radius < math.inf:
        raise WrongRows(f"{where}: the setting eps = {values['eps']!r} is no radius")


def _checked(values: Mapping[str, Any], where: Path) -> Settings:
    values = {**_OLD, **values}
    check_values(values, _CHECKS, where)
    settings = Settings(**{name: values[name] for name in _CHECKS})
    if (settings.failure_prob > 0) != (settings.guarantee == Guarantee.HIGH_PROBABILITY.value):
        raise WrongRows(f"{where}: failure_prob = {settings.failure_prob} does not go with {settings.guarantee}")
    return settings
