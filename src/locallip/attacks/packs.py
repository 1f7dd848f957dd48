"""Many samples through an attack: who has fallen is dropped, the others are packed into full batches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

#: Tensors by name, all with one row per sample; "lost" (B,) bool says who has fallen.
State = dict[str, Tensor]
Progress = Callable[[int, int], None]


class Part(NamedTuple):
    """A part of an attack: how many points of each sample it looks at, and what it makes of the state of a batch."""

    points: int
    advance: Callable[[State], State]


def in_packs(state: State, parts: Sequence[Part], batch_size: int, progress: Progress | None = None) -> State:
    """The state behind all parts; of samples that fell, the state behind the part in which they did.

    `progress` is called before each batch with the points looked at so far and their number, if all went on to the end.
    """
    whole = {name: values.clone() for name, values in state.items()}
    alive = torch.arange(len(whole["lost"]), device=whole["lost"].device)
    left = sum(part.points for part in parts)
    done, total = 0, len(alive) * left
    for part in parts:
        for index in alive.split(batch_size) if len(alive) else ():
            if progress is not None:
                progress(done, total)
            for name, values in part.advance({name: values[index] for name, values in whole.items()}).items():
                whole[name][index] = values
            done += len(index) * part.points
        alive = alive[~whole["lost"][alive]]
        left -= part.points
        total = done + len(alive) * left
    return whole
