"""`locallip certify --vnnlib`: the answers to VNN-LIB files, in the words of the competition VNN-COMP."""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping, Sequence
from json import dumps
from pathlib import Path
from typing import Any

import torch

from locallip.brought import name_of, network_of
from locallip.certify.prover import fingerprint
from locallip.network import UnsupportedLayer
from locallip.norms import LayerTooLarge
from locallip.options import check
from locallip.proofs.summary import shown
from locallip.provenance import environment
from locallip.vnnlib import Answer, Decider, WrongSpec, read_spec
from locallip.zoo import WrongModel


def answer(
    model: str,
    files: Sequence[Path],
    options: Mapping[str, Any],
    *,
    attack_steps: int,
    seed: int | None,
    device: torch.device | None,
    json: bool,
) -> None:
    """Decide every file and print the answers; `options` are those of a `Certifier`."""
    check(os.environ.get("WORLD_SIZE", "1") == "1", "--vnnlib is for one process: leave torchrun out")
    specs = {path: read_spec(path) for path in files}  # what is wrong with one is said before the first is decided
    network, about = network_of(model)
    place = device or torch.device("cuda" if torch.cuda.is_available() else "cpu")
    seed = secrets.randbits(62) if seed is None else seed
    found = []
    try:
        decider = Decider(network, about["input_shape"], about["classes"], place, seed=seed, **options)
        for path, spec in specs.items():
            try:
                decider.check(spec)
            except WrongSpec as error:
                raise WrongSpec(f"{path}: {error}") from None
        for path, spec in specs.items():
            found.append(decider(spec, attack_steps=attack_steps, seed=seed))
            if not json:
                print(_told(path, found[-1], options, about.get("left_out", "")), flush=True)
    except (UnsupportedLayer, LayerTooLarge) as error:
        raise WrongModel(f"{model}: {error}") from None
    if json:
        settings = {"model": name_of(model), "fingerprint": fingerprint(network), "attack_steps": attack_steps, "seed": seed}
        settings["outputs_before"] = about.get("left_out", "")
        answers = [{"file": path.name, **vars(each)} for path, each in zip(specs, found, strict=True)]
        print(dumps({"settings": {**settings, **options, "environment": environment()}, "answers": answers}, indent=1))


def _told(path: Path, found: Answer, options: Mapping[str, Any], left_out: str) -> str:
    """The word of the competition, then what it rests on; under sat the point. No name of a file makes a line of its own."""
    name = "".join(letter if letter.isprintable() else "?" for letter in path.name)
    if found.result == "sat":
        outputs = f", outputs are those before the {left_out} at the end" if left_out else ""
        return f"sat\n{found.witness()}\n; {name}: found by {found.by}, {found.seconds:.1f} s{outputs}"
    rests = f"by {found.by}, guarantee {options['guarantee']}" if found.result == "unsat" else "neither proved nor broken"
    lead = "" if found.margin is None else f", the label's lead at least {shown(found.margin)}"
    return f"{found.result}\n; {name}: {rests}{lead}, {found.seconds:.1f} s"


def check_alone(given: Mapping[str, object]) -> None:
    """Refuse options that have no meaning beside --vnnlib."""
    for name, value in given.items():
        check(not value, f"--{name} does not go with --vnnlib: its files say what is asked")
