"""`locallip` as torchrun starts it in the tests: few images, a checkpoint after every epoch, and a process that may die."""

import os
import signal
import sys
import time
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch

from locallip import brought, cli, processes
from locallip.proofs import run as certifying
from locallip.training import fit, memory, run
from locallip.training.engine import Engine
from locallip_command import ended

TRAIN, TEST = 60, 24
#: "STEP RANK": the process of that number kills itself before that step, or that chunk of images, in its first life.
DIES = [int(word) for word in os.environ.get("DIES", "").split()]
#: "FIRST SECONDS": the chunk that begins with that image takes so long.
SLOW = [int(word) for word in os.environ.get("SLOW", "").split()]
#: Seconds that the first process takes more to read the data set that it certifies.
READS = float(os.environ.get("READS", "0"))
#: Seconds that every step takes more.
PAUSE = float(os.environ.get("PAUSE", "0"))
#: The numbers that process 1 has room for, whatever the others have.
UNLIKE = os.environ.get("UNLIKE", "")
processes.PATIENCE = timedelta(seconds=int(os.environ.get("PATIENCE", "3600")))
first_life = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"
rank = int(os.environ.get("RANK", "0"))
taken = 0


def count() -> None:
    global taken
    taken += 1
    if DIES and first_life and [taken, rank] == DIES:
        os.kill(os.getpid(), signal.SIGKILL)


def few(name: Any, split: Any, *root: Any, **settings: Any) -> Any:
    return whole(name, split, *root, **settings).take(torch.arange(TRAIN if split == "train" else TEST))


def step(self: Engine, *args: Any) -> None:
    count()
    time.sleep(PAUSE)
    plain_step(self, *args)


def plan(recipe: Any, *rest: Any) -> Any:
    alone = UNLIKE and rank == 1 and recipe.vectors == "auto"
    return plain_plan(replace(recipe, vectors=UNLIKE) if alone else recipe, *rest)


def chunk(*args: Any) -> Any:
    count()
    if SLOW and args[4].start == SLOW[0]:
        time.sleep(SLOW[1])
    return plain_chunk(*args)


def read(*args: Any, **settings: Any) -> Any:
    time.sleep(READS if rank == 0 else 0)
    return whole(*args, **settings)


whole, plain_step, plain_chunk = fit.load_images, Engine.step, certifying._certify_chunk
fit.load_images, Engine.step, certifying._certify_chunk = few, step, chunk  # type: ignore[assignment,method-assign]
plain_plan, memory._on_a_cpu = memory._on_a_cpu, plan
brought.load_images = read
run.CHECKPOINT_SECONDS = 0.0

if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.exit(ended(cli.main(sys.argv[1:])))
