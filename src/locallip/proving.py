"""The commands `locallip certify` and `locallip verify`: their arguments are the options and their docstrings the help."""

from __future__ import annotations

import sys
from dataclasses import asdict
from json import dumps
from pathlib import Path
from typing import Literal

import torch

from locallip.answering import answer, check_alone
from locallip.brought import ONNX, brought, name_of
from locallip.data import READERS, DataName
from locallip.network import UnsupportedLayer
from locallip.norms import Guarantee, LayerTooLarge
from locallip.options import check, device_of
from locallip.processes import processes
from locallip.proofs import Job, WrongRows, certify_images, verify_rows
from locallip.proofs.rows import FORMATS
from locallip.proofs.settings import MOST_SECONDS, MOST_STEPS, Settings, about_file
from locallip.proofs.settings import read_about as read_settings
from locallip.proofs.summary import describe
from locallip.zoo import WrongModel


class Disagreement(Exception):
    """Rows that are not what their network gives; the message is for the user."""


def certify(
    model: str,
    /,
    data: DataName | Path | None = None,
    vnnlib: tuple[Path, ...] = (),
    eps: str | None = None,
    norm: Literal["2", "inf"] = "2",
    guarantee: Literal["high_probability", "deterministic", "estimate"] = "high_probability",
    data_root: Path | None = None,
    download: bool = False,
    split: Literal["test", "train"] = "test",
    limit: int | None = None,
    out: Path | None = None,
    resume: bool = False,
    radius: bool = False,
    method: Literal["auto", "thorough", "local", "lines"] = "auto",
    branch_seconds: float = 0.0,
    deployed_dtype: Literal["float32"] | None = None,
    failure_prob: float = 1e-9,
    attack_steps: int = 20,
    power_steps: int = 100,
    batch: int | None = None,
    chunk: int | None = None,
    seed: int | None = None,
    device: str | None = None,
    json: bool = False,
) -> None:
    """Certify the images of a data set: one verdict each, and what they come to.

    For example:
      locallip certify mnist-4c3f-local-g --data embedded --limit 50
      locallip certify cifar10-6c2f-local-b --data-root data --download --out rows.jsonl
      locallip certify runs/mine --guarantee deterministic --radius --json > summary.json
      locallip certify net.onnx --data images.npz --eps 36/255    a network and images of your own
      locallip certify net.onnx --data images.npz --eps 2/255 --norm inf
      locallip certify net.onnx --vnnlib one.vnnlib two.vnnlib.gz    a box of inputs each

    Args:
        model: A name from `locallip models`, a run folder, a .safetensors file or an .onnx file.
        data: Which images: a data set, where own is a folder test with one folder per class in --data-root, or the path of
            your own as an .npz file with images and labels, or as a folder with one of PNG files per class (default: those
            that the network was trained on).
        vnnlib: In place of images, VNN-LIB files that ask whether a class can be reached from within a box, packed with gzip
            or not; prints unsat (proved), sat with the point, or unknown for each.
        eps: Radius of the balls, for pixels in [0, 1]; a number or a fraction such as 36/255 (default:
            what the network was trained for).
        norm: 2 for l2 balls, inf for l-infinity balls: every pixel moves by at most eps.
        guarantee: What every bound rests on: a proof that may fail with the chance --failure-prob, a deterministic proof, or
            an estimate, which proves nothing.
        data_root: Folder that holds the data sets (default: LOCALLIP_DATA, or else ./data).
        download: Fetch missing data from its official place.
        split: Which images of the data set.
        limit: Only the first so many images (default: all).
        out: Rows to write, one per image: a file that ends in .jsonl or .csv, with settings and summary in .json beside it
            (default: no rows are kept).
        resume: Go on with the rows in --out, those of a run that was stopped.
        radius: Also look for the largest radius that can be certified for each image, and print certified accuracy over eps;
            takes several times as long.
        method: local is the paper's bound, lines linear relaxation (CROWN) alone; auto takes both, each where it pays, and
            also looks for slopes that pull the worst logits back through the network, where that does not look hopeless;
            thorough looks for them to the end, which takes longer and certifies a few images more.
        branch_seconds: Try branch and bound on what nothing else decides, for about so many seconds per image; the
            smaller the network, the more it decides. Radii are then looked for as long again.
        deployed_dtype: Certify what the program in float32 does as well, at every point that float32 can hold (default: the
            network in exact arithmetic alone).
        failure_prob: Under high_probability, the chance that one image's certificate, or its radius, is wrong.
        attack_steps: Steps of an attack before the proof, which images that it breaks are spared; 0 for no attack.
        power_steps: Under estimate, products with a layer and its transpose per norm.
        batch: Images looked at together (default: 32 on a CPU, 500 on a GPU).
        chunk: Images worked on and written together, which share their random draws (default: 4 batches, or 10 of 200 images
            and more; fewer where several processes share the work).
        seed: Start of every random draw (default: drawn and noted, which is safer).
        device: Such as cpu or cuda:1 (default: the first GPU, or else the CPU).
        json: Print the summary as JSON.
    """
    check(limit is None or limit > 0, f"--limit must be at least 1, got {limit}")
    check(batch is None or 0 < batch <= 10**6, f"--batch must lie between 1 and 1000000, got {batch}")
    check(chunk is None or 0 < chunk <= 10**6, f"--chunk must lie between 1 and 1000000, got {chunk}")
    check(
        0 <= branch_seconds <= MOST_SECONDS,
        f"--branch-seconds must lie between 0 and {MOST_SECONDS:g}, got {branch_seconds}",
    )
    check(not branch_seconds or method != "local", "--branch-seconds: --method local leaves branch and bound out")
    check(attack_steps >= 0, f"--attack-steps must be at least 0, got {attack_steps}")
    check(power_steps >= 1, f"--power-steps must be at least 1, got {power_steps}")
    check(seed is None or 0 <= seed < 2**62, f"--seed must be between 0 and {2**62 - 1}, got {seed}")
    check(1e-15 <= failure_prob < 1, f"--failure-prob must lie between 1e-15 and 1, got {failure_prob}")
    check(not radius or failure_prob >= 2e-15, f"--failure-prob must be at least 2e-15 with --radius, got {failure_prob}")
    check(attack_steps <= MOST_STEPS, f"--attack-steps must be at most {MOST_STEPS}, got {attack_steps}")
    check(power_steps <= MOST_STEPS, f"--power-steps must be at most {MOST_STEPS}, got {power_steps}")
    if out is not None:
        check(out.suffix in FORMATS, f"--out {out}: rows are kept in files that end in {' or '.join(FORMATS)}")
        check(out.parent.is_dir(), f"--out {out}: there is no folder {out.parent}")
        check(not out.is_dir(), f"--out {out} is a folder: name a file in it")
    check(out is not None or not resume, "--resume goes on with the rows of an earlier run: name them with --out")
    if vnnlib:
        where = {"data": data, "eps": eps, "data-root": data_root, "download": download, "limit": limit, "batch": batch}
        check_alone({**where, "out": out, "resume": resume, "radius": radius, "chunk": chunk, "split": split != "test"})
        check(guarantee != "estimate", "--guarantee estimate proves nothing: with --vnnlib, unsat is a proof")
        shared = {"guarantee": guarantee, "failure_prob": failure_prob, "method": method, "branch_seconds": branch_seconds}
        settings_of = {**shared, "deployed_dtype": deployed_dtype}
        answer(model, vnnlib, settings_of, attack_steps=attack_steps, seed=seed, device=device_of(device), json=json)
        return
    with processes() as together:
        with together.one_per_machine_first():
            network, images, asked = brought(model, data, eps, split, data_root, download, norm)
        place = together.device(device_of(device))
        job = Job(
            model_name=name_of(model),
            eps=asked,
            guarantee=Guarantee.parse(guarantee),
            failure_prob=failure_prob,
            attack_steps=attack_steps,
            power_steps=power_steps,
            limit=limit,
            batch_size=batch or (500 if place.type == "cuda" else 32),
            seed=seed,
            device=place,
            out=out,
            resume=resume,
            radii=radius,
            method=method,
            branch_seconds=branch_seconds,
            deployed_dtype=deployed_dtype,
            norm=norm,
            chunk=chunk,
            together=together,
        )
        try:
            _, settings, summary = certify_images(job, network, images, _to_stderr if together.first else _to_nobody)
        except (UnsupportedLayer, LayerTooLarge) as error:
            raise WrongModel(f"{model}: {error}") from None
    if not together.first:
        return
    if json:
        print(dumps({"settings": asdict(settings), "summary": summary}, indent=1))
    else:
        print(describe(summary, job.guarantee))
        if out is not None:
            print(f"rows in {out}, settings and summary in {about_file(out)}")


def verify(
    rows: Path,
    /,
    model: str | None = None,
    data: Path | None = None,
    data_root: Path | None = None,
    download: bool = False,
    sample: int = 20,
    device: str | None = None,
    json: bool = False,
) -> None:
    """Repeat some rows of `locallip certify` and say whether they agree; exit code 1 where they do not.

    Weights, images, labels, eps and summary must fit all rows; the sampled ones are proved or broken anew, margins and
    bounds to 2 per cent, radii at 0.98 of what the row says. The seed, the size of batches, times and hardware are not
    checked.

    For example:
      locallip verify rows.jsonl
      locallip verify rows.jsonl --model runs/mine --sample 100
      locallip verify rows.csv --data-root data --json
      locallip verify rows.jsonl --model net.onnx --data images.npz

    Args:
        rows: The .jsonl or .csv file, with its .json beside it.
        model: Where the network is, a run folder, a .safetensors file or an .onnx file (default: the name in the rows'
            settings, looked for beside the rows first).
        data: Where images of your own are, an .npz file or a folder (default: the name in the rows' settings, beside the
            rows or here).
        data_root: Folder that holds the data sets (default: LOCALLIP_DATA, or else ./data).
        download: Fetch missing data from its official place.
        sample: Repeat so many rows, drawn anew each time.
        device: Such as cpu or cuda:1 (default: the first GPU, or else the CPU).
        json: Print what was found as JSON.
    """
    check(sample >= 1, f"--sample must be at least 1, got {sample}")
    settings, _ = read_settings(rows)
    where = (_data_of(rows, settings, data), settings.eps, settings.split, data_root, download, settings.norm)
    named = _model_of(rows, settings) if model is None else model
    try:
        network, images, _ = brought(named, *where)
    except WrongModel as error:
        raise WrongModel(
            f"{error}. {rows} is about {settings.model!r}: say where that is with --model" if model is None else str(error)
        ) from None
    place = device_of(device) or torch.device("cuda" if torch.cuda.is_available() else "cpu")
    say = (lambda line: None) if json or not sys.stderr.isatty() else _to_stderr
    faults = verify_rows(rows, network, images, sample=sample, device=place, say=say)
    repeated = min(sample, settings.images)
    if json:
        about = {"rows": settings.images, "repeated": repeated, "eps": settings.eps, "norm": settings.norm}
        about["guarantee"] = settings.guarantee
        print(dumps({"agree": not faults, "faults": faults, **about}, indent=1))
    else:
        for fault in faults[:20]:
            print(fault)
    if faults:
        more = f": {len(faults)} faults" if len(faults) > 20 else ""
        raise Disagreement(f"{rows} does not agree with its settings, or with what its network does{more}")
    if not json:
        print(
            f"{settings.images} rows fit their settings, weights, images and summary; "
            f"{repeated} of them came out again (eps {settings.shown_eps}, guarantee {settings.guarantee})"
        )


def _data_of(rows: Path, settings: Settings, given: Path | None) -> str | Path:
    """The data set of some rows, or where the user's own images are: beside the rows or here, unless that is said."""
    if settings.data in READERS:
        check(given is None, f"--data {given}: {rows} is about images of {settings.data}, which --data-root finds")
        return settings.data
    if given is not None:
        return given
    name = Path(settings.data).name  # never a path that somebody else has written into the settings
    for place in (rows.parent / name, Path(name)):
        if name not in ("", "..") and place.exists():
            return place
    known = ", ".join(READERS)
    raise WrongRows(
        f"{about_file(rows)}: there is no data set {settings.data!r}; known are {known}. Where it is a file or folder of "
        "your own, name it with --data"
    )


def _model_of(rows: Path, settings: Settings) -> str:
    """The network of some rows by its name, or in their folder: that of its run, or a file beside the rows."""
    if rows.resolve().parent.name == settings.model:
        return str(rows.parent)
    beside = rows.parent / Path(settings.model).name
    return str(beside) if beside.suffix in (ONNX, ".safetensors") and beside.is_file() else settings.model


def _to_stderr(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _to_nobody(line: str) -> None:
    pass
