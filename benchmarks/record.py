"""Results files: what was measured, by which command, on which commit and machine."""

from __future__ import annotations

import json
import platform
import sys
import time
from pathlib import Path
from typing import Any

import torch

from locallip.provenance import command, commit, hardware

RESULTS = Path(__file__).resolve().parent.parent / "results"


def _command() -> str:
    """What was called, without the folders that it read from and wrote to."""
    return f"python benchmarks/{command(sys.argv)}"


def write(
    name: str, measured: dict[str, Any], *, device: torch.device, seed: int, begin: float, folder: Path = RESULTS
) -> Path:
    """One JSON file `name` under `folder` with the figures and everything needed to repeat them."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.json"
    about = {
        "command": _command(),
        "commit": commit(),
        "date": time.strftime("%Y-%m-%d"),
        "hardware": hardware(device),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "seed": seed,
        "wall_seconds": round(time.perf_counter() - begin, 1),
    }
    path.write_text(json.dumps({"about": about, **measured}, indent=1) + "\n")
    return path
