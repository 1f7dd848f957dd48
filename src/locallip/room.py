"""How much memory is free: what plans of work are made for, on a GPU or beside it."""

from __future__ import annotations

import math
import os
from pathlib import Path

import torch

#: Where Linux says what the machine has left, and the control groups of this process what these may still take.
_MACHINE, _OWN, _GROUPS = Path("/proc/meminfo"), Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")


def free_bytes(device: torch.device) -> float:
    """Bytes that tensors on a device may still take; unlimited where nothing says."""
    return _free_on_gpu(device) if device.type == "cuda" else min(_free_on_machine(), _free_in_group())


def _free_on_gpu(device: torch.device) -> float:
    """What the driver has left, and what torch keeps for reuse, within the share of the GPU that the process may take."""
    index = torch.cuda.current_device() if device.index is None else device.index
    free, total = torch.cuda.mem_get_info(index)
    kept = torch.cuda.memory_reserved(index) - torch.cuda.memory_allocated(index)
    share = getattr(torch.cuda, "get_per_process_memory_fraction", None)
    allowed = math.inf if share is None else share(index) * total - torch.cuda.memory_allocated(index)
    return float(max(0.0, min(free + kept, allowed)))


def _free_on_machine() -> float:
    """What the kernel could give without swapping: caches of files count as free."""
    for line in _read(_MACHINE).splitlines():
        name, _, value = line.partition(":")
        if name == "MemAvailable":
            return float(value.split()[0]) * 1024
    try:
        return float(os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    except (AttributeError, OSError, ValueError):
        return math.inf


def _free_in_group() -> float:
    """The least that is left in the control group of this process or in one around it (version 2, else version 1)."""
    left = math.inf
    for line in _read(_OWN).splitlines():
        number, kinds, name = line.split(":", 2)
        if number == "0":
            base, files = _GROUPS, ("memory.max", "memory.current")
        elif "memory" in kinds.split(","):
            base, files = _GROUPS / "memory", ("memory.limit_in_bytes", "memory.usage_in_bytes")
        else:
            continue
        group = base / name.lstrip("/")
        for folder in (group, *group.parents):
            most, used = (_read(folder / file).strip() for file in files)
            if most.isdigit() and used.isdigit():
                left = min(left, float(max(0, int(most) - int(used))))
            if folder == base:
                break
    return left


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError:
        return ""


def in_words(count: float) -> str:
    """Bytes, for people."""
    return f"{count / 1e9:.2f} GB" if count >= 1e9 else f"{count / 1e6:.1f} MB"
