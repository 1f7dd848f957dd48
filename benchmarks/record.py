"""Results files: what was measured, by which command, on which commit and machine."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

RESULTS = Path(__file__).resolve().parent.parent / "results"


def hardware(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{_processor()}, {torch.get_num_threads()} threads"


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.machine()


def commit() -> str:
    """The commit that was measured, with "+" where the tree has changes beyond it.

    A copy of the tree without its history takes it from the environment variable LOCALLIP_COMMIT.
    """
    if "LOCALLIP_COMMIT" in os.environ:
        return os.environ["LOCALLIP_COMMIT"]
    try:
        root = RESULTS.parent
        head = subprocess.run(
            ["git", "rev-parse", "HEAD"], cwd=root, capture_output=True, text=True, check=True
        ).stdout.strip()
        status = ["git", "status", "--porcelain", "--untracked-files=no"]
        changed = subprocess.run(status, cwd=root, capture_output=True, text=True, check=True).stdout.strip()
        return head + ("+" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def _command() -> str:
    """What was called, without the folder that the result went to."""
    words = [Path(sys.argv[0]).name, *sys.argv[1:]]
    if "--out" in words:
        at = words.index("--out")
        del words[at : at + 2]
    return f"python benchmarks/{' '.join(words)}"


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
