"""Switches of torch that change what a number is: autocast, TF32, flushing, gradients, inference mode. Held still."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

#: One thread at a time: the switches are torch's own and hold for all of them, and tracing a module with torch.fx replaces
#: how every module of the program is called; two threads at it would put back each other's replacement.
_ALONE = threading.RLock()


@contextmanager
def alone() -> Iterator[None]:
    """In no other thread that asks for it too."""
    with _ALONE:
        yield


@contextmanager
def exact_arithmetic() -> Iterator[None]:
    """No gradients unless asked for, no autocast, no TF32, no flushing: what is computed has the dtype it is written in."""
    with alone(), torch.inference_mode(False), torch.no_grad(), autocast_off(), tf32_off(), small_numbers_kept():
        yield


@contextmanager
def small_numbers_kept() -> Iterator[None]:
    """Numbers below 2e-308 are not taken for 0 (torch.set_flush_denormal); the caller's setting comes back."""
    flushed = sys.float_info.min / 2 == 0  # torch does not say what was set
    if flushed:
        torch.set_flush_denormal(False)
    try:
        yield
    finally:
        if flushed:
            torch.set_flush_denormal(True)


#: How many numbers torch gives to a thread at least.
_GRAIN = 2**15


def check_small_numbers(device: torch.device) -> None:
    """Refuse where other threads of torch, which have settings of their own, still take them for 0.

    They have that of the thread that began them, at any time. So many numbers that each of them gets some, and few of those
    are small, which processors are slow with.
    """
    for place in {torch.device("cpu"), device}:
        count = torch.get_num_threads() * _GRAIN if place.type == "cpu" else _GRAIN
        numbers = torch.ones(count, dtype=torch.float32, device=place)
        numbers[:: _GRAIN // 4] = torch.finfo(torch.float32).tiny
        if not bool((numbers / 2).all()):
            raise RuntimeError(
                "small numbers are taken for 0 (torch.set_flush_denormal), which no proof allows for; leave it off from the "
                "start of the program"
            )


@contextmanager
def autocast_off() -> Iterator[None]:
    with torch.autocast("cpu", enabled=False), torch.autocast("cuda", enabled=False):
        yield


@contextmanager
def tf32_off() -> Iterator[None]:
    """Products of float32 numbers in float32; the caller's settings come back.

    Torch has two generations of switches for it. The older one raises when read where the newer disagrees with it, and the
    newer is not there before torch 2.9; so both are set, and both put back.
    """
    newer = _precision_switches()
    saved = [switch.fp32_precision for switch in newer]
    products, convolutions = _older_switches()
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = False
    for switch in newer:
        switch.fp32_precision = "ieee"
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(products)
        torch.backends.cudnn.allow_tf32 = convolutions
        for switch, value in zip(newer, saved, strict=True):
            switch.fp32_precision = value


def _precision_switches() -> list[Any]:
    backends: Any = torch.backends
    if not hasattr(backends.cuda.matmul, "fp32_precision"):
        return []
    return [backends.cuda.matmul, backends.cudnn.conv, backends.cudnn.rnn, backends.mkldnn.matmul, backends.mkldnn.conv]


def _older_switches() -> tuple[str, bool]:
    """Their values, or torch's own defaults where only the newer ones were used."""
    try:
        products = torch.get_float32_matmul_precision()
    except RuntimeError:
        products = "highest"
    try:
        return products, torch.backends.cudnn.allow_tf32
    except RuntimeError:
        return products, True


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that there is no room: torch has a class of its own for that on a GPU, and none on a CPU."""
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or "can't allocate memory" in str(error)
