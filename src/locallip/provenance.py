"""Where a result comes from: commit, machine and versions."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shlex
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

#: The top of the source tree, where this file lies in one.
ROOT = Path(__file__).resolve().parents[2]


def hardware(device: torch.device) -> str:
    """The name of the GPU, or of the processor with the number of threads in use."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{_processor()}, {torch.get_num_threads()} threads"


def others_gb(device: torch.device) -> float:
    """Memory of a GPU that is not held by this process's tensors: above 2 GB, somebody else computes there too."""
    if device.type != "cuda":
        return 0.0
    free, total = torch.cuda.mem_get_info(device)
    return (total - free - torch.cuda.memory_reserved(device)) / 1e9


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.machine()


def commit() -> str:
    """The commit of this source, with "+" where the tree has changes beyond it; "unknown" for an installed package.

    A copy of the tree without its history takes it from the environment variable LOCALLIP_COMMIT.
    """
    if "LOCALLIP_COMMIT" in os.environ:
        return os.environ["LOCALLIP_COMMIT"]
    if not (ROOT / ".git").exists():  # an installed package may lie inside somebody else's repository
        return "unknown"
    try:
        changed = _git("status", "--porcelain", "--untracked-files=no")
        return _git("rev-parse", "HEAD") + ("+" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def _git(*words: str) -> str:
    return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()


#: Options that name folders of one machine, which say nothing to others.
_PLACES = ("--out", "--data-root", "--networks", "--results", "--device", "--run", "--went-on")


def command(argv: list[str]) -> str:
    """What was called, without the folders that it read from and wrote to."""
    name = Path(argv[0]).name
    words = ["locallip" if name == "__main__.py" else name]
    rest = iter(argv[1:])
    for word in rest:
        option = word.partition("=")[0].replace("_", "-")
        if option not in _PLACES:
            words.append(Path(word).name if word.endswith((".toml", ".onnx", ".npz")) else word)
        elif "=" not in word:
            next(rest, None)
    return shlex.join(words)


def environment() -> dict[str, Any]:
    """What is needed to run the same thing again: command, commit, date, versions and hardware."""
    devices = [torch.device("cpu")] + [torch.device("cuda", i) for i in range(torch.cuda.device_count())]
    return {
        "command": command(sys.argv),
        "commit": commit(),
        "date": time.strftime("%Y-%m-%d %H:%M:%S%z"),
        "hardware": [hardware(device) for device in devices],
        "platform": platform.platform(),
        "python": platform.python_version(),
        "cuda": torch.version.cuda,
        **{name: _version(name) for name in ("locallip", "torch", "numpy", "safetensors")},
    }


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "unknown"
