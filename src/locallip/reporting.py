"""The command `locallip report`: its arguments are the options and its docstring the help."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Literal

import torch
from torch import nn

from locallip.brought import brought
from locallip.data import ImageSet
from locallip.files import write_atomically
from locallip.network import UnsupportedLayer
from locallip.norms import LayerTooLarge
from locallip.options import WrongOption, check, device_of
from locallip.report.explore import Explorer, chosen
from locallip.report.runs import EXPLORED, Run, check_used, read_run
from locallip.zoo import WrongModel


def report(
    runs: tuple[str, ...],
    /,
    out: Path = Path("report.html"),
    rows: tuple[Path, ...] = (),
    explore: int = 0,
    guarantee: Literal["high_probability", "deterministic", "estimate"] = "high_probability",
    layers: Literal["dense", "all"] | None = None,
    data_root: Path | None = None,
    download: bool = False,
    seed: int | None = None,
    device: str | None = None,
) -> None:
    """Make one HTML page of a run or several: figures of training and certificates, and an explorer of single images.

    For example:
      locallip report runs/mine
      locallip report runs/mine --explore 24 -o mine.html    with single images to explore
      locallip report runs/one runs/two mnist-4c3f-local-g   side by side

    Args:
        runs: Run folders, or names from `locallip models`; several stand side by side.
        out: Page to write, -o for short; it needs no other file and no network.
        rows: Files of `locallip certify --out` to show; those in a run folder are shown anyway.
        explore: Look into so many test images first, for the explorer; takes seconds an image on a CPU, and is kept in the
            run folder for the next report.
        guarantee: What the explorer's bounds rest on.
        layers: Layers whose norms the explorer takes anew for every image (default: all on a GPU, dense ones on a CPU).
        data_root: Folder that holds the data sets (default: LOCALLIP_DATA, or else ./data).
        download: Fetch missing data from its official place.
        seed: Start of every random draw of the explorer (default: proofs draw theirs and note it, which is safer).
        device: Such as cpu or cuda:1 (default: the first GPU, or else the CPU).
    """
    try:
        from locallip.report.build import write_report
    except ImportError:
        raise WrongOption(
            "a report needs the extra 'report': pip install 'locallip[report]', or '.[report]' in a clone"
        ) from None
    check(len(set(runs)) == len(runs), "a run is named twice")
    check(explore >= 0, f"--explore must be at least 0, got {explore}")
    check(out.suffix in (".html", ".htm"), f"--out {out}: a report is a file that ends in .html")
    check(out.parent.is_dir(), f"--out {out}: there is no folder {out.parent}")
    found = [read_run(name, rows) for name in runs]
    check_used(rows, found)
    if explore:
        place = device_of(device) or torch.device("cuda" if torch.cuda.is_available() else "cpu")
        local = layers or ("all" if place.type == "cuda" else "dense")
        for number, name in enumerate(runs):
            network, images, eps = _brought(found[number], name, data_root, download)
            explorer = Explorer(network, images, eps, guarantee, local, seed, place, _say)
            found[number] = _explored(found[number], name, explorer, explore)
    print(f"{out}: {write_report(found, out)}")
    if not any(run.explored for run in found):
        _say(f"no explorer: `locallip report {' '.join(runs)} --explore 24` looks into test images")


def _brought(run: Run, name: str, data_root: Path | None, download: bool) -> tuple[nn.Module, ImageSet, str]:
    data = run.recipe.get("data")
    return brought(name, str(data) if data else None, run.eps or None, "test", data_root, download)


def _explored(run: Run, name: str, explorer: Explorer, count: int) -> Run:
    """The run with what `count` test images show, kept in its folder."""
    rows = run.rows_about(explorer.images, explorer.eps, explorer.guarantee)
    if run.proofs is not None and not rows:
        _say(f"{name}: no certificates are about these images at eps {explorer.eps}, so it is explored without them")
    try:
        values = explorer.run(chosen(count, len(explorer.images), rows), {row.index: row for row in rows})
    except (UnsupportedLayer, LayerTooLarge) as error:
        raise WrongModel(f"{name}: {error}") from None
    except torch.OutOfMemoryError:
        raise WrongOption(
            f"{explorer.device} has too little memory to explore {name}: try --layers dense, or --device cpu"
        ) from None
    if Path(name).is_dir():
        write_atomically(Path(name) / EXPLORED, (json.dumps(values) + "\n").encode())
    return replace(run, explored=values)


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
