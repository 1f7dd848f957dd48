"""`locallip` as torchrun starts it in the tests: few images, a checkpoint after every epoch, and a process that may die."""

import os
import signal
import sys
from typing import Any

import torch

from locallip import cli
from locallip.proofs import run as certifying
from locallip.training import fit, run
from locallip.training.engine import Engine
from locallip_command import ended

TRAIN, TEST = 60, 24
#: "STEP RANK": the process of that number kills itself before that step, or that chunk of images, in its first life.
DIES = [int(word) for word in os.environ.get("DIES", "").split()]
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
    plain_step(self, *args)


def chunk(*args: Any) -> Any:
    count()
    return plain_chunk(*args)


whole, plain_step, plain_chunk = fit.load_images, Engine.step, certifying._certify_chunk
fit.load_images, Engine.step, certifying._certify_chunk = few, step, chunk  # type: ignore[assignment,method-assign]
run.CHECKPOINT_SECONDS = 0.0

if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.exit(ended(cli.main(sys.argv[1:])))
