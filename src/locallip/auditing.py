"""The command `locallip audit`: its arguments are the options and its docstring the help."""

from __future__ import annotations

import secrets
import sys
import time
from json import dumps
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import save

from locallip.audit import Auditor, Break, Claims, IssuerOf, Report
from locallip.breaking import BrokenCertificate
from locallip.brought import brought, name_of
from locallip.certify import Certifier
from locallip.certify.inputs import as_eps
from locallip.certify.prover import fingerprint
from locallip.data import DataName, ImageSet, pixels
from locallip.files import check_writable, write_atomically
from locallip.network import UnsupportedLayer
from locallip.norms import LayerTooLarge
from locallip.options import WrongOption, check, device_of
from locallip.provenance import environment, hardware
from locallip.zoo import WrongModel

#: Where the points go that broke something, if there is no --out beside which to put them.
BROKEN = Path("locallip-broken.safetensors")


def audit(
    model: str,
    /,
    data: DataName | Path | None = None,
    eps: str | None = None,
    norm: Literal["2", "inf"] = "2",
    guarantee: Literal["high_probability", "deterministic"] = "high_probability",
    attempts: int = 10_000,
    data_root: Path | None = None,
    download: bool = False,
    split: Literal["test", "train"] = "test",
    limit: int = 100,
    batch: int | None = None,
    seed: int | None = None,
    device: str | None = None,
    out: Path | None = None,
    json: bool = False,
) -> None:
    """Try to break the certificates of a network, in many ways; exit code 1 where one breaks.

    Certificates are issued for the first images of a data set, each at the largest radius that is proved, and then attacked:
    by gradients, along the decision boundary, by single roundings, at random, and on networks derived from this one with
    rescaled, tied, denormal and huge weights.

    For example:
      locallip audit mnist-4c3f-local-g --data embedded --limit 10 --attempts 1000
      locallip audit cifar10-6c2f-local-b --data-root data --guarantee deterministic --out audit.json

    Args:
        model: A name from `locallip models`, a run folder, a .safetensors file or an .onnx file.
        data: Which images: a data set, where own is a folder test with one folder per class in --data-root, or the path of
            your own as an .npz file with images and labels, or as a folder with one of PNG files per class (default: those
            that the network was trained on).
        eps: The first radius to certify, for pixels in [0, 1]; a number or a fraction such as 36/255 (default:
            what the network was trained for).
        norm: 2 for certificates in l2 balls, inf for those in l-infinity balls.
        guarantee: What the certificates rest on.
        attempts: Make at least so many attempts; each is one point in a certified ball.
        data_root: Folder that holds the data sets (default: LOCALLIP_DATA, or else ./data).
        download: Fetch missing data from its official place.
        split: Which images of the data set.
        limit: Ask for certificates of the first so many images.
        batch: Attempts made together (default: 200 on a CPU, 5000 on a GPU).
        seed: Start of every random draw (default: drawn and noted).
        device: Such as cpu or cuda:1 (default: the first GPU, or else the CPU).
        out: Report to write, a file that ends in .json; a point that breaks a certificate goes into .safetensors beside it
            (default: no report is kept).
        json: Print the report as JSON.
    """
    check(attempts >= 1, f"--attempts must be at least 1, got {attempts}")
    check(limit >= 1, f"--limit must be at least 1, got {limit}")
    check(batch is None or 0 < batch <= 10**6, f"--batch must lie between 1 and 1000000, got {batch}")
    check(seed is None or 0 <= seed < 2**62, f"--seed must be between 0 and {2**62 - 1}, got {seed}")
    check(out is None or out.suffix == ".json", f"--out {out}: a report is kept in a file that ends in .json")
    check(out is None or out.parent.is_dir(), f"--out {out}: there is no folder {out.parent if out else ''}")
    check(out is None or not out.is_dir(), f"--out {out} is a folder: name a file in it")
    if out is not None:
        _check_out(out)
    network, images, radius = brought(model, data, eps, split, data_root, download, norm)
    place = device_of(device) or torch.device("cuda" if torch.cuda.is_available() else "cpu")
    network, seed = network.to(place), secrets.randbits(62) if seed is None else seed
    begin = time.perf_counter()
    auditor = Auditor(
        network,
        _issuer_of(images, guarantee, norm, seed, place),
        attempts=attempts,
        batch=batch or (5000 if place.type == "cuda" else 200),
        seed=seed % 2**31,
        say=_to_stderr,
    )
    try:
        claims = _claims(auditor, images, limit, radius, place)
        report = auditor.run(claims)
    except (UnsupportedLayer, LayerTooLarge) as error:
        raise WrongModel(f"{model}: {error}") from None
    except torch.OutOfMemoryError:
        raise WrongOption(f"{place} has too little memory for --batch {auditor.batch}: try a quarter of it") from None
    settings = {
        "model": name_of(model),
        "fingerprint": fingerprint(network),
        "data": images.name,
        "split": images.split,
        "images": min(limit, len(images)),
        "certificates": len(claims),
        "radii": [float(claims.radius.min()), float(claims.radius.max())],
        "eps": radius,
        "norm": norm,
        "guarantee": guarantee,
        "attempts": attempts,
        "steps": auditor.steps,
        "batch": auditor.batch,
        "seed": seed,
        "hardware": hardware(place),
        "environment": environment(),
    }
    result = {"settings": settings, "report": {**report.as_dict(), "seconds": round(time.perf_counter() - begin, 3)}}
    _tell(result, report, out, json)


def _check_out(out: Path) -> None:
    """Refuse a place that the report, or a point beside it, cannot go to, before anybody waits for them."""
    try:
        for there in (out, out.with_suffix(".safetensors")):
            check(not there.exists(), f"--out {out}: {there} is there already: name another one")
        check_writable(out)
    except OSError as error:
        raise WrongOption(f"--out {out} cannot be written: {error.strerror or error}") from None


def _issuer_of(images: ImageSet, guarantee: str, norm: str, seed: int, place: torch.device) -> IssuerOf:
    """No attack before the proof: what an attack would have spared is a certificate that must not come out either."""
    size = 500 if place.type == "cuda" else 32
    options: dict[str, Any] = {"guarantee": guarantee, "norm": norm, "batch_size": size, "seed": seed, "device": place}
    return lambda network: Certifier(network, images.shape, attack_steps=0, **options)


def _claims(auditor: Auditor, images: ImageSet, limit: int, eps: str, place: torch.device) -> Claims:
    count = min(limit, len(images))
    x = pixels(images.images[:count], place).double()
    claims = auditor.issue(x, images.labels[:count].to(place), as_eps(eps, count, place))
    check(len(claims) > 0, f"none of {count} images is certified near --eps {eps}, so there is nothing to break")
    low, high = float(claims.radius.min()), float(claims.radius.max())
    _to_stderr(f"{len(claims)} of {count} images certified, with radii from {low:.4g} to {high:.4g}")
    return claims


def _tell(result: dict[str, Any], report: Report, out: Path | None, json: bool) -> None:
    text = dumps(result, indent=1)
    if out is not None:
        write_atomically(out, (text + "\n").encode())
    if json:
        print(text)
    else:
        print(report.describe())
        seconds, made = result["report"]["seconds"], result["settings"]["certificates"]
        print(f"{report.tried:,} attempts on {made} certificates in {seconds:.0f} s: {report.broken} broken")
    if report.broken:
        beside = BROKEN if out is None else out.with_suffix(".safetensors")
        _save(report.breaks, beside)
        first = "; ".join(str(found) for found in report.breaks[:5])
        raise BrokenCertificate(
            f"{report.broken} CERTIFICATES BROKEN: {first}. The points are in {beside}: please report this"
        )


def _save(breaks: list[Break], path: Path) -> None:
    tensors = {}
    for number, found in enumerate(breaks):
        tensors[f"{number}.x"], tensors[f"{number}.point"] = found.x.contiguous(), found.point.clone().contiguous()
    write_atomically(path, save(tensors, metadata={str(number): str(found) for number, found in enumerate(breaks)}))


def _to_stderr(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
