"""The command `locallip attack`: its arguments are the options and its docstring the help."""

from __future__ import annotations

import sys
from json import dumps
from pathlib import Path
from typing import Literal

import torch

from locallip.breaking import (
    AttackJob,
    BrokenCertificate,
    attack_images,
    describe,
    read_certified,
)
from locallip.breaking.against import alarm, is_alarming, outcome
from locallip.brought import brought, name_of
from locallip.data import DataName
from locallip.network import UnsupportedLayer
from locallip.options import check, device_of, radius_of
from locallip.proofs.settings import about_file
from locallip.zoo import WrongModel


def attack(
    model: str,
    /,
    data: DataName | Path | None = None,
    eps: str | None = None,
    norm: Literal["2", "inf"] = "2",
    attack: Literal["pgd", "apgd", "strong", "autoattack"] = "strong",
    steps: int = 100,
    restarts: int = 1,
    pixels: bool = False,
    data_root: Path | None = None,
    download: bool = False,
    split: Literal["test", "train"] = "test",
    limit: int | None = None,
    out: Path | None = None,
    resume: bool = False,
    certified: Path | None = None,
    batch: int | None = None,
    seed: int | None = None,
    device: str | None = None,
    json: bool = False,
) -> None:
    """Try to break a network on the images of a data set: an upper bound of its robust accuracy, and no proof.

    For example:
      locallip attack mnist-4c3f-local-g --data embedded --limit 100
      locallip attack mnist-4c3f-local-g --data embedded --limit 100 --certified rows.jsonl
      locallip attack runs/mine --attack pgd --steps 20 --json > attack.json
      locallip attack runs/mine --out attack.jsonl --resume    goes on where it was stopped

    Args:
        model: A name from `locallip models`, a run folder, a .safetensors file or an .onnx file.
        data: Which images: a data set, where own is a folder test with one folder per class in --data-root, or the path of
            your own as an .npz file with images and labels, or as a folder with one of PNG files per class (default: those
            that the network was trained on).
        eps: Radius of the balls, for pixels in [0, 1]; a number or a fraction such as 36/255 (default:
            what the network was trained for).
        norm: 2 for l2 balls, inf for l-infinity balls: every pixel moves by at most eps.
        attack: pgd is PGD with steps of eps/4, as in the paper; apgd is APGD-CE and APGD-T; strong is all three, each on
            what is left; autoattack is the standard version of AutoAttack, by the extra 'attack'.
        steps: Steps of each run of an attack.
        restarts: Random starts of each attack.
        pixels: Keep the points of the attack in [0, 1], as pixels are; a certificate covers the others too. AutoAttack
            always does.
        data_root: Folder that holds the data sets (default: LOCALLIP_DATA, or else ./data).
        download: Fetch missing data from its official place.
        split: Which images of the data set.
        limit: Only the first so many images (default: all).
        out: Rows to write, one per image: a file that ends in .jsonl, with settings and summary in .json beside it (default:
            no rows are kept).
        resume: Go on with the rows in --out, those of a run that was stopped.
        certified: Rows that `locallip certify --out` wrote for this network and these images: exit code 1 if one that they
            call CERTIFIED is broken.
        batch: Images attacked together (default: 100 on a CPU, 500 on a GPU).
        seed: Start of every random draw (default: drawn and noted).
        device: Such as cpu or cuda:1 (default: the first GPU, or else the CPU).
        json: Print the summary as JSON.
    """
    check(limit is None or limit > 0, f"--limit must be at least 1, got {limit}")
    check(batch is None or 0 < batch <= 10**6, f"--batch must lie between 1 and 1000000, got {batch}")
    check(1 <= steps <= 10**6, f"--steps must lie between 1 and 1000000, got {steps}")
    check(1 <= restarts <= 1000, f"--restarts must lie between 1 and 1000, got {restarts}")
    check(seed is None or 0 <= seed < 2**62, f"--seed must be between 0 and {2**62 - 1}, got {seed}")
    check(
        attack != "autoattack" or (steps, restarts) == (100, 1),
        "--steps and --restarts do not go with --attack autoattack, whose standard version has its own",
    )
    check(out is None or out.suffix == ".jsonl", f"--out {out}: rows of an attack are kept in a file that ends in .jsonl")
    check(out is None or out.parent.is_dir(), f"--out {out}: there is no folder {out.parent if out else ''}")
    check(out is not None or not resume, "--resume goes on with the rows of an earlier run: name them with --out")
    network, images, radius = brought(model, data, eps, split, data_root, download, norm)
    held = None if certified is None else read_certified(certified, network, images, radius_of(radius), norm)
    place = device_of(device) or torch.device("cuda" if torch.cuda.is_available() else "cpu")
    job = AttackJob(
        model_name=name_of(model),
        eps=radius,
        norm=norm,
        kind=attack,
        steps=steps,
        restarts=restarts,
        pixels=pixels,
        limit=limit,
        batch_size=batch or (500 if place.type == "cuda" else 100),
        seed=seed,
        device=place,
        out=out,
        resume=resume,
    )
    try:
        found = attack_images(job, network, images, _to_stderr, held)
    except UnsupportedLayer as error:
        raise WrongModel(f"{model}: {error}") from None
    comparison = found.summary.get("against")
    if json:
        print(dumps(found.about(), indent=1))
    else:
        print(describe(found.summary, found.settings))
        if out is not None:
            print(f"rows in {out}, settings and summary in {about_file(out)}")
    if comparison is not None and is_alarming(comparison):
        raise BrokenCertificate(alarm(comparison))
    if comparison is not None and not json:
        print(outcome(comparison))


def _to_stderr(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
