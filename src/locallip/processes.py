"""The processes of one run: one alone, or several that torchrun started together."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

T = TypeVar("T")

#: The others may wait so long for one that reads data or writes a checkpoint; one that has died is noticed at once.
PATIENCE = timedelta(hours=1)


class TooManyProcesses(ValueError):
    """More processes than GPUs; the message is for the user."""


class Disagreeing(ValueError):
    """The processes of a run were asked for different things; the message is for the user."""


class LostProcess(RuntimeError):
    """Another process of the run is gone, or cannot be reached; the message is for the user."""


class Processes:
    """One of `size` processes, number `rank`, and what they tell each other; alone, every call answers at once.

    All of them must make the same calls in the same order. Words go through the host (gloo), sums of tensors on GPUs from
    GPU to GPU (NCCL).
    """

    def __init__(self, rank: int = 0, size: int = 1, local_rank: int = 0, local_size: int = 1, restarts: int = 0):
        self.rank, self.size = rank, size
        self.local_rank, self.local_size = local_rank, local_size
        self.restarts = restarts  # how often torchrun has started these processes again
        self._wires: Any = None  # what sums of tensors go through: the default group, or that of NCCL
        self.store: Any = None  # where several processes count together

    @property
    def first(self) -> bool:
        """Whether this process writes files and speaks to people."""
        return self.rank == 0

    def device(self, asked: torch.device | None) -> torch.device:
        """The device asked for; else, or for a bare `cuda`, this machine's GPU of the process's own number."""
        if asked is not None and (asked.type != "cuda" or asked.index is not None):
            return asked
        if not torch.cuda.is_available():
            return torch.device("cpu")
        if self.size == 1:
            return asked or torch.device("cuda")
        found = torch.cuda.device_count()
        if self.local_rank >= found:
            raise TooManyProcesses(
                f"{self.local_size} processes on {socket.gethostname()}, which has {found} GPUs: start it with "
                f"--nproc-per-node {found}, or name a device that they share, such as --device cuda:0"
            )
        return torch.device("cuda", self.local_rank)

    def use(self, device: torch.device) -> None:
        """Choose how tensors on this device are summed; NCCL wants a GPU for each process."""
        if self.size == 1:
            return
        if device.type == "cuda":
            torch.cuda.set_device(device)
        here = self.all_gathered((socket.gethostname(), str(device)))
        if device.type == "cuda" and len(set(here)) == self.size:
            self._wires = dist.new_group(backend="nccl", timeout=PATIENCE)

    def add(self, values: Tensor) -> None:
        """Replace values by their sum over all processes."""
        if self.size > 1:
            with _heard():
                dist.all_reduce(values, group=self._wires)

    def any(self, flag: bool) -> bool:
        """Whether it is so in at least one process."""
        return self.sums(float(flag))[0] > 0

    def sums(self, *values: float) -> list[float]:
        """Each number added up over all processes, the same to the bit in all of them."""
        if self.size == 1:
            return list(values)
        added = torch.tensor(values, dtype=torch.float64)
        with _heard():
            dist.all_reduce(added)
        return added.tolist()

    def counted(self, name: str, more: int = 1) -> int:
        """Add to a count that all of several processes share, and say what it is now; nobody waits for anybody."""
        with _heard():
            return int(self.store.add(name, more))

    def wait_for_long(self, name: str) -> None:
        """Until all have come here, however long one of them works on; `name` is of this place alone.

        They ask the store: what goes through gloo gives up after a while (PATIENCE). torchrun ends those who wait for one
        that has died.
        """
        if self.size == 1:
            return
        waited = 0.0
        self.counted(name)
        while self.counted(name, 0) < self.size:
            waited = min(waited + 0.05, 2.0)
            time.sleep(waited)

    def wait(self) -> None:
        """Until all have come here."""
        self.any(False)

    def part(self) -> None:
        """All have come here, and what follows each does alone: they must not meet again, and may end when they like."""
        if self.size > 1:
            self.wait()
            dist.destroy_process_group()

    def from_first(self, value: T) -> T:
        """What the first process has; the others' values are not looked at."""
        if self.size == 1:
            return value
        box = [value]
        with _heard():
            dist.broadcast_object_list(box, 0)
        return box[0]

    def all_gathered(self, value: T) -> list[T]:
        """Every process's value, in the order of their numbers."""
        if self.size == 1:
            return [value]
        boxes: list[Any] = [None] * self.size
        with _heard():
            dist.all_gather_object(boxes, value)
        return boxes

    def tensors_from_first(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The first process's tensors, on the host where they come from another process."""
        if self.size == 1:
            return dict(tensors)
        known = self.from_first({name: (t.shape, t.dtype) for name, t in tensors.items()})
        found = {}
        for name, (shape, dtype) in known.items():
            here = tensors[name].cpu().contiguous() if self.first else torch.empty(shape, dtype=dtype)
            with _heard():
                dist.broadcast(_as_bytes(here), 0)
            found[name] = here
        return found

    def rows_to_first(self, rows: Tensor) -> list[Tensor]:
        """Every process's rows (n, width), which may be of different numbers; empty but in the first process."""
        if self.size == 1:
            return [rows]
        counts, here = self.all_gathered(len(rows)), rows.cpu().contiguous()
        others = [torch.empty(count, *rows.shape[1:], dtype=rows.dtype) for count in counts[1:]]
        with _heard():
            if not self.first:
                dist.send(_as_bytes(here), 0)
                return []
            for rank, theirs in enumerate(others, start=1):
                dist.recv(_as_bytes(theirs), rank)
        return [here, *others]

    def check_same(self, asked: Mapping[str, object]) -> None:
        """Refuse where another process was asked for something else, or has read other files under the same names."""
        everybody = self.all_gathered(dict(asked))
        for rank, theirs in enumerate(everybody):
            for name in {**everybody[0], **theirs}:
                here, there = everybody[0].get(name), theirs.get(name)
                if here != there:
                    raise Disagreeing(
                        f"the processes of a run differ: {name} is {here!r} in the first and {there!r} in process {rank}; "
                        "give all of them the same command, files and version"
                    )

    @contextmanager
    def one_per_machine_first(self) -> Iterator[None]:
        """One process of each machine does what stands inside, then the others: it leaves files that they find.

        To unpack a large data set may take hours. This can stand in one place of a command only.
        """
        if self.local_rank > 0:
            self.wait_for_long("one per machine")
        yield
        if self.local_rank == 0:
            self.wait_for_long("one per machine")


#: A process by itself.
ALONE = Processes()


@contextmanager
def processes() -> Iterator[Processes]:
    """This process among those that torchrun started with it; ALONE without torchrun, or with one process."""
    if os.environ.get("WORLD_SIZE", "1") == "1" or not {"RANK", "MASTER_ADDR", "MASTER_PORT"} <= os.environ.keys():
        restarts = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
        yield Processes(restarts=restarts) if restarts else ALONE
        return
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "TORCHELASTIC_RESTART_COUNT")
    numbers = [int(os.environ.get(name, "0")) for name in names]
    together = Processes(*numbers)
    with _heard():
        store, rank, size = next(dist.rendezvous("env://", timeout=PATIENCE))
        # torchrun keeps one store for all lives of a run, with the addresses of the dead.
        together.store = dist.PrefixStore(f"life-{together.restarts}", store)
        dist.init_process_group("gloo", store=together.store, rank=rank, world_size=size, timeout=PATIENCE)
    try:
        yield together
    finally:
        with suppress(Exception):  # the others may be gone
            if dist.is_initialized():
                dist.destroy_process_group()


def launched() -> str | None:
    """What torchrun calls the run that this process belongs to, the same after restarts; None where it has no name."""
    name = os.environ.get("TORCHELASTIC_RUN_ID", "none")
    return None if name == "none" else name


def restarts_left() -> int:
    """How often torchrun would start these processes again if they failed now."""
    most, used = (int(os.environ.get(f"TORCHELASTIC_{name}", "0")) for name in ("MAX_RESTARTS", "RESTART_COUNT"))
    return max(0, most - used)


def goes_on(together: Processes, began: str | None) -> bool:
    """Whether a run that is there already is that of this very torchrun, which `began` names, and so goes on unasked.

    Where torchrun has given no name, a process that it has started again takes what is there for its own.
    """
    name = launched()
    return together.restarts > 0 if name is None else name == began


@contextmanager
def _heard() -> Iterator[None]:
    """What torch says when another process does not answer, in a sentence."""
    try:
        yield
    except RuntimeError as error:
        raise LostProcess(
            f"another process of this run does not answer, it may have died ({str(error).splitlines()[0][:200]}). torchrun "
            "starts all of them again with --max-restarts; else the same command with --resume goes on"
        ) from None


def _as_bytes(values: Tensor) -> Tensor:
    """The same memory as bytes, which every dtype can be sent as."""
    return values.reshape(-1).view(torch.uint8)
