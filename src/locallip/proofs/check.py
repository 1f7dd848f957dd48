"""Rows that contradict each other, their settings or their images: no proof is needed to see that."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

from locallip.certify import BRANCHING, Verdict
from locallip.data import ImageSet
from locallip.norms import Guarantee
from locallip.proofs.rows import Row
from locallip.proofs.settings import Settings

#: Which verdicts a check can give, in the order of the cascade.
VERDICTS: dict[str, tuple[Verdict, ...]] = {
    "clean logits": (Verdict.MISCLASSIFIED, Verdict.UNKNOWN),
    "global bound": (Verdict.CERTIFIED,),
    "attack": (Verdict.ATTACKED,),
    "lines": (Verdict.CERTIFIED,),
    "lines and local bound": (Verdict.CERTIFIED,),
    "local bound of dense layers": (Verdict.CERTIFIED,),
    "slopes": (Verdict.CERTIFIED,),
    "local bound": (Verdict.CERTIFIED,),
    "slopes and local bound": (Verdict.CERTIFIED,),
    BRANCHING: (Verdict.CERTIFIED,),
    "nothing": (Verdict.UNKNOWN,),
}
#: Which checks a method does without.
LEFT_OUT = {
    "local": tuple(check for check in VERDICTS if "slopes" in check or "lines" in check),
    "lines": tuple(check for check in VERDICTS if "slopes" in check or "local" in check),
}


class Numbered(Protocol):
    """A row that knows which image it is about."""

    @property
    def index(self) -> int: ...


def out_of_order(rows: Sequence[Numbered], images: ImageSet) -> list[str]:
    """A sentence, where rows are not those of the first images in their order."""
    if [row.index for row in rows] == list(range(len(rows))) and len(rows) <= len(images):
        return []
    return [f"the {len(rows)} rows are not those of the images 0, 1, 2, ... up to {len(images) - 1} in order"]


def contradictions(rows: Sequence[Row], settings: Settings, images: ImageSet) -> list[str]:
    """What is wrong with rows that should be the first ones of a run, one sentence each."""
    return out_of_order(rows, images) or faults(rows, settings, images)


def faults(rows: Sequence[Row], settings: Settings, images: ImageSet) -> list[str]:
    """What is wrong with some rows of a run, each by itself."""
    labels = images.labels.tolist()
    return [f"row {row.index}: {fault}" for row in rows for fault in _faults(row, settings, labels[row.index])]


def _faults(row: Row, settings: Settings, label: int) -> Iterator[str]:
    if row.label != label:
        yield f"its label is {row.label}, and that of the image {label}"
    if row.eps != settings.radius:
        yield f"its eps is {row.eps}, and that of the run {settings.eps}, which is {settings.radius} as a number"
    if row.norm != settings.norm:
        yield f"its ball is of the norm {row.norm}, and the run's of {settings.norm}"
    if (row.guarantee, row.failure_prob) != (settings.guarantee, settings.failure_prob):
        yield (
            f"it claims {row.guarantee} with failure probability {row.failure_prob}, "
            f"and the run was {settings.guarantee} with {settings.failure_prob}"
        )
    if row.verdict not in VERDICTS.get(row.decided_by, ()):
        yield f"{row.decided_by!r} does not make anything {row.verdict}"
    left_out = [*LEFT_OUT.get(settings.method, ())]
    left_out += [] if settings.attack_steps else ["attack"]
    left_out += [] if settings.branch_seconds else [BRANCHING]
    if row.decided_by in left_out:
        yield f"it was decided by {row.decided_by!r}, which the run left out"
    if row.decided_by == "clean logits" and (row.margin, row.lipschitz) != (None, None):
        yield f"it was decided without any bound, and has the margin {row.margin} and the bound {row.lipschitz}"
    if row.seconds < 0:
        yield f"it took {row.seconds} seconds"
    if row.verdict != Verdict.CERTIFIED and _leads(row):
        yield f"it is {row.verdict} with a margin of {row.margin}, which would prove it"
    if row.verdict == Verdict.CERTIFIED and not _bounded(row):
        bounds = f"the bound {row.lipschitz}, over all inputs {row.global_lipschitz}"
        yield f"it is CERTIFIED with a margin of {row.margin} and {bounds}"
    if row.verdict not in _fitting(row):
        yield f"it is {row.verdict} with prediction {row.prediction} and label {row.label}"
    if (row.radius is not None) != settings.radii:
        yield f"its radius is {row.radius}, and the run was {'with' if settings.radii else 'without'} radii"
    elif row.radius is not None and not _right_radius(row, row.radius):
        yield f"it is {row.verdict} by {row.decided_by!r} at eps {row.eps} with a certified radius of {row.radius}"


def _right_radius(row: Row, radius: float) -> bool:
    """At least eps where that is certified, below it elsewhere, and 0 where the image itself is not surely right."""
    if row.verdict == Verdict.CERTIFIED:
        return radius >= row.eps
    if row.decided_by == "clean logits":
        return radius == 0
    return 0 <= radius < row.eps


def _fitting(row: Row) -> tuple[str, ...]:
    """The verdicts that go with the prediction; without one the label may still be surely behind two others that tie."""
    if row.prediction is None:
        return Verdict.MISCLASSIFIED, Verdict.UNKNOWN
    if row.prediction != row.label:
        return (Verdict.MISCLASSIFIED,)
    return Verdict.CERTIFIED, Verdict.ATTACKED, Verdict.UNKNOWN


def _leads(row: Row) -> bool:
    """Whether its margin would be a proof; an UNKNOWN one whose bound overflowed to none proves nothing."""
    open_ended = row.verdict == Verdict.UNKNOWN and row.lipschitz is None
    return row.margin is not None and row.margin > 0 and not open_ended


def _bounded(row: Row) -> bool:
    """A proof has a margin above 0, and no local bound is above the one over all inputs."""
    if row.margin is None or row.lipschitz is None or row.global_lipschitz is None:
        return False
    slack = 1.05 if row.guarantee == Guarantee.ESTIMATE.value else 1 + 1e-9
    return row.margin > 0 and 0 <= row.lipschitz <= row.global_lipschitz * slack
