"""The folder of one training run: what was asked for, where it ran, how it went, and checkpoints that survive a kill.

A checkpoint is two files: a .safetensors file with all tensors and a .json file with plain values, the name of the tensor
file and its SHA-256. Both are written under a temporary name, synced and renamed, the .json last: at every instant the
.json files that exist describe complete checkpoints. Nothing is unpickled.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import shutil
import warnings
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from locallip.files import PART, InUse, locked, rename, sync, write_atomically
from locallip.processes import launched
from locallip.provenance import environment
from locallip.training.tensor_file import layout, write_tensors

README = """This folder holds one training run of locallip.

config.json        the recipe: everything that decided what the run did
environment.json   command, commit, versions and hardware; under "resumed" the same for every later start
metrics.jsonl      one JSON object per epoch; tensorboard/ has the same where TensorBoard is installed
checkpoints/       the last two states, numbered by step: tensors in .safetensors, plain values in .json
model.safetensors  the trained network, there once the run is complete
lock               keeps a second process out while one trains here
result.json        what was trained, how long it took, and the figures of that network

locallip train RECIPE --out THIS_FOLDER --resume goes on with a run that was stopped.
"""

KEPT = 2
_NAME = re.compile(r"state-(\d+)\.json")


class RunFolderError(RuntimeError):
    """The run folder cannot be used as asked; the message is for the user."""


@dataclass(frozen=True)
class Checkpoint:
    """What `save` was given."""

    step: int
    tensors: dict[str, Tensor]
    values: dict[str, Any]


class RunFolder:
    """A run folder that exists; `create` makes one or opens it to go on."""

    def __init__(self, path: str | Path):
        self.path = Path(path)
        self.checkpoints = self.path / "checkpoints"
        self._metrics = self.path / "metrics.jsonl"

    @classmethod
    def create(
        cls, path: str | Path, recipe: Mapping[str, Any], resume: bool = False, defaults: Mapping[str, Any] | None = None
    ) -> RunFolder:
        """A new folder for this recipe, or with `resume` the one that is there, if its recipe is the same.

        `defaults` stand for fields that a stored recipe lacks because it is older than they are.
        """
        folder = cls(path)
        if resume:
            folder._check_recipe(recipe, defaults or {})
        else:
            folder._check_unused()
        with folder._reported("cannot be used as a run folder"):
            folder.checkpoints.mkdir(parents=True, exist_ok=True)
            for unfinished in (*folder.path.glob(f"*{PART}"), *folder.checkpoints.glob(f"*{PART}")):
                unfinished.unlink()
            write_atomically(folder.path / "environment.json", _as_json(folder._environment(resume)))
            # The recipe comes behind it: with the recipe the folder counts as a run, and must say whose it is.
            if not resume:
                write_atomically(folder.path / "config.json", _as_json(recipe))
            write_atomically(folder.path / "README.txt", README.encode())
        return folder

    def make(self) -> None:
        """The folder itself, for a run of its own: nothing is written that another process might be writing too."""
        self._check_unused()
        with self._reported("cannot be used as a run folder"):
            self.path.mkdir(parents=True, exist_ok=True)

    def _check_unused(self) -> None:
        with self._reported("cannot be used as a run folder"):
            if (self.path / "config.json").exists():
                raise RunFolderError(f"{self.path} already holds a run: --resume goes on with it, another --out starts anew")
            if self.path.exists() and not self.path.is_dir():
                raise RunFolderError(f"{self.path} is a file: choose another --out")
            known = {"checkpoints", "lock", "environment.json"}  # what a start that was killed at once leaves behind
            strange = [p.name for p in self.path.glob("*") if p.suffix != PART and p.name not in known]
        if strange:
            listed = ", ".join(sorted(strange)[:3]) + (", ..." if len(strange) > 3 else "")
            raise RunFolderError(f"{self.path} is not empty ({listed}) and holds no run: choose another --out")

    def _check_recipe(self, recipe: Mapping[str, Any], defaults: Mapping[str, Any]) -> None:
        config = self.path / "config.json"
        with self._reported("cannot be read"):
            if not config.is_file():
                raise RunFolderError(f"there is no run in {self.path} to resume: leave out --resume to start one")
            stored = {**defaults, **_read_json(config)}
        asked = json.loads(_as_json(recipe))
        names = [*stored, *(name for name in asked if name not in stored)]
        differ = [
            f"{name} is {_shown(stored, name)} there and {_shown(asked, name)} now"
            for name in names
            if name not in stored or name not in asked or stored[name] != asked[name]
        ]
        if differ:
            raise RunFolderError(
                f"the run in {self.path} has another recipe: {'; '.join(differ)}. Resume with the same recipe, or start "
                "anew with another --out"
            )

    def launched(self) -> str | None:
        """What torchrun called the run that began this folder; None where it is not known."""
        try:
            return _read_json(self.path / "environment.json").get("torchrun")
        except (OSError, ValueError, AttributeError):
            return None

    def _environment(self, resume: bool) -> dict[str, Any]:
        if not resume:
            return {**environment(), "torchrun": launched()}
        try:
            first = _read_json(self.path / "environment.json")
            earlier = list(first.get("resumed", []))
        except (OSError, ValueError, TypeError):  # lost, and nothing rests on it
            first, earlier = {}, []
        return {**first, "resumed": [*earlier, environment()]}

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Keep other processes out for a while: two runs in one folder would spoil each other's files."""
        with ExitStack() as held:
            with self._reported("cannot be used as a run folder"):
                try:
                    held.enter_context(locked(self.path / "lock"))
                except InUse:
                    raise RunFolderError(f"{self.path} is in use by another process that is training there") from None
            yield  # what goes wrong in here is not the folder's

    def check_space(self, bytes_needed: int) -> None:
        """Raise `RunFolderError` if a file cannot be written here or fewer than `bytes_needed` are free.

        While a checkpoint is saved the two before it are still there, so a run needs room for three; those that are there
        already count.
        """
        trial = self.checkpoints / f"trial{PART}"
        with self._reported("cannot be written to"):
            self.checkpoints.mkdir(parents=True, exist_ok=True)
            try:
                with open(trial, "wb") as file:
                    file.write(b"locallip")
                    sync(file)
            finally:
                trial.unlink(missing_ok=True)
            free = shutil.disk_usage(self.checkpoints).free
            taken = sum(path.stat().st_size for path in self.checkpoints.glob("state-*"))
        bytes_needed -= taken
        if free < bytes_needed:
            raise RunFolderError(f"{self.path} needs {_size(bytes_needed)} of disk space, {_size(free)} are free")

    def save(self, step: int, tensors: Mapping[str, Tensor], values: Mapping[str, Any]) -> None:
        """Write the checkpoint of a step; whatever happens, a complete one is on disk once there was one.

        `values` must be made of what JSON knows: tuples come back as lists, keys as text.
        """
        body = {"step": step, "values": json.loads(json.dumps(values))}
        header, order = layout(tensors)
        target = self.checkpoints / f"state-{step}.json"
        name = self._unused(f"state-{step}")
        try:
            with self._reported(f"could not take the checkpoint of step {step}", self._last_good):
                self.checkpoints.mkdir(parents=True, exist_ok=True)
                with open(_part(name), "wb") as file:
                    digest = write_tensors(file, header, order)
                    sync(file)
                rename(_part(name), name)
                body |= {"tensors": name.name, "sha256": digest, "sha256_values": _digest(body["values"])}
                write_atomically(target, _as_json(body))
        finally:
            self._remove([_part(name), name], unless_needed_by=[step])
        self._remove_all_but(step)

    def _unused(self, stem: str) -> Path:
        """A name for a tensor file: never that of an older one, which a .json file in place may still need."""
        path, count = self.checkpoints / f"{stem}.safetensors", 1
        while path.exists():
            count += 1
            path = self.checkpoints / f"{stem}-{count}.safetensors"
        return path

    def _remove_all_but(self, newest: int) -> None:
        """Keep `newest` and the one before it; later ones belong to a past that was abandoned."""
        kept = [step for step in self.saved_steps() if step <= newest][:KEPT]
        self._remove([self.checkpoints / f"state-{step}.json" for step in self.saved_steps() if step not in kept], [])
        self._remove(list(self.checkpoints.glob("state-*.safetensors")), unless_needed_by=kept)

    def _remove(self, paths: list[Path], unless_needed_by: list[int]) -> None:
        """Delete files, but no tensor file of these steps' checkpoints; in doubt, and on errors, they stay."""
        with suppress(OSError):
            needed = set()
            for step in unless_needed_by:
                with suppress(FileNotFoundError, ValueError, KeyError):
                    needed.add(_read_json(self.checkpoints / f"state-{step}.json")["tensors"])
            for path in paths:
                if path.name not in needed:
                    path.unlink(missing_ok=True)

    def saved_steps(self) -> list[int]:
        """The steps of the checkpoints that are there, newest first."""
        found = (_NAME.fullmatch(path.name) for path in self.checkpoints.glob("state-*.json"))
        return sorted((int(match[1]) for match in found if match), reverse=True)

    def _last_good(self) -> str:
        steps = self.saved_steps()
        if not steps:
            return "there is no earlier checkpoint"
        return (
            f"the last good checkpoint, {self.checkpoints / f'state-{steps[0]}.json'}, is kept, and --resume goes on from it"
        )

    def load(self, device: str | torch.device = "cpu") -> Checkpoint | None:
        """The newest checkpoint that is whole, with a warning for every damaged one passed over; None without any."""
        wrong = []
        for step in self.saved_steps():
            path = self.checkpoints / f"state-{step}.json"
            try:
                return self._read(path, torch.device(device))
            except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
                wrong.append(f"{path} cannot be used: {error if str(error) else type(error).__name__}")
                warnings.warn(f"{wrong[-1]}; looking for an earlier checkpoint", stacklevel=2)
        if wrong:
            raise RunFolderError(
                f"no checkpoint in {self.checkpoints} is whole: {'; '.join(wrong)}. Without that folder --resume starts anew"
            )
        return None

    def _read(self, path: Path, device: torch.device) -> Checkpoint:
        body = _read_json(path)
        for field in ("step", "values", "tensors", "sha256", "sha256_values"):
            if field not in body:
                raise ValueError(f"the field {field!r} is missing")
        if path.name != f"state-{body['step']}.json" or _digest(body["values"]) != body["sha256_values"]:
            raise ValueError("its values are not those that were saved")
        file = self.checkpoints / Path(body["tensors"]).name
        if not file.is_file():
            raise ValueError(f"its tensor file {file.name} is missing")
        with open(file, "rb") as content:
            found = hashlib.file_digest(content, "sha256").hexdigest()
        if found != body["sha256"]:
            raise ValueError(f"its tensor file {file.name} is damaged: SHA-256 {found}, expected {body['sha256']}")
        # A copy, as what safetensors returns may be a view of the file, which later checkpoints remove.
        with safe_open(file, framework="pt", device=str(device)) as stored:
            tensors = {name: stored.get_tensor(name).clone() for name in stored.keys()}  # noqa: SIM118 - not a dict
        return Checkpoint(body["step"], tensors, body["values"])

    def append_metrics(self, row: Mapping[str, Any]) -> None:
        """One more line of metrics.jsonl; NaN and infinities become null."""
        line = (json.dumps(_finite(row), allow_nan=False) + "\n").encode()
        with (
            self._reported("could not take another line of metrics.jsonl", self._last_good),
            open(self._metrics, "ab", buffering=0) as file,
        ):
            size = file.tell()
            try:
                if file.write(line) < len(line):  # on a disk that has just become full
                    raise OSError(None, "the line was cut short; is the disk full?")
            except OSError:
                with suppress(OSError):
                    file.truncate(size)
                raise

    def metrics(self) -> list[dict[str, Any]]:
        """All rows of metrics.jsonl; a line that a kill left half written is passed over."""
        if not self._metrics.exists():
            return []
        with self._reported("cannot be read"):
            lines = self._metrics.read_bytes().split(b"\n")
        rows = []
        for number, line in enumerate(lines[:-1], start=1):  # behind the last newline: nothing, or half a line
            try:
                row = json.loads(line)
                if not isinstance(row, dict):
                    raise ValueError("not an object")
                rows.append(row)
            except ValueError as error:
                warnings.warn(f"{self._metrics}, line {number}, is damaged and left out: {error}", stacklevel=2)
        return rows

    def truncate_metrics(self, epoch: int) -> None:
        """Drop the rows after `epoch` and any half-written line: what a resumed run will write again."""
        if not self._metrics.exists():
            return
        rows = [row for row in self.metrics() if not row.get("epoch", epoch) > epoch]
        with self._reported("could not take metrics.jsonl"):
            write_atomically(self._metrics, b"".join((json.dumps(row) + "\n").encode() for row in rows))

    @contextmanager
    def _reported(self, what: str, consequence: Any = None) -> Iterator[None]:
        """Errors of the operating system as `RunFolderError`, in words; `consequence` is asked only then."""
        try:
            yield
        except OSError as error:
            why = error.strerror or str(error)
            end = f"; {consequence()}" if consequence else ""
            raise RunFolderError(f"{self.path} {what}: {why}{end}") from error
        except ValueError as error:
            raise RunFolderError(f"{self.path} {what}: {error}") from error


def _part(path: Path) -> Path:
    return path.with_name(path.name + PART)


def _as_json(values: Mapping[str, Any]) -> bytes:
    return (json.dumps(values, indent=1) + "\n").encode()


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_bytes())
    except ValueError as error:
        raise ValueError(f"{path.name} is not valid JSON ({error})") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path.name} does not hold a JSON object")
    return content


def _digest(values: Any) -> str:
    """SHA-256 of plain values."""
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


def _finite(value: Any) -> Any:
    """The same plain values with null for NaN and infinities, which JSON does not know."""
    if isinstance(value, Mapping):
        return {key: _finite(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _shown(recipe: Mapping[str, Any], name: str) -> str:
    return repr(recipe[name]) if name in recipe else "absent"


def _size(count: int) -> str:
    for unit, width in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if count >= width:
            return f"{count / width:.1f} {unit} ({count:,} bytes)"
    return f"{count:,} bytes"
