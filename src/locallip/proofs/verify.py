"""Repeat rows of a certified data set: do they fit settings, weights and images, and does every verdict come again?"""

from __future__ import annotations

import math
import random
import secrets
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn

from locallip.arithmetic import autocast_off
from locallip.attacks import strong_attempts
from locallip.bounds import SLOPE_STEPS, Relax
from locallip.certify import BRANCHING, Certificate, Certifier, Verdict
from locallip.certify.confirm import confirmed
from locallip.certify.prover import LocalLayers
from locallip.data import ImageSet, pixels
from locallip.norms import Guarantee
from locallip.proofs.check import VERDICTS, contradictions
from locallip.proofs.journal import Say
from locallip.proofs.rows import Row, WrongRows, read_rows
from locallip.proofs.run import data_checksum
from locallip.proofs.settings import Settings, check_network, read_about
from locallip.proofs.summary import summarize

#: A margin so near to 0 that other random numbers change its sign is tried again.
ATTEMPTS = 5
#: Margins and bounds that are repeated may differ by this share of what the bound allows for on the ball.
TOLERANCE = 0.02
#: Attacks that look for what the run's own has found.
OTHERS = ("apgd-t", "apgd-ce")
#: How readily lines are taken for more promising than norms, at one attempt after the other.
LEANINGS = 1.0, 2.0, 0.0
#: Branch and bound is given so many times its time.
PATIENT = 4
#: Seconds between two lines of progress.
PATIENCE = 5.0


def verify_rows(
    path: Path,
    model: nn.Module,
    images: ImageSet,
    *,
    sample: int = 20,
    device: torch.device | None = None,
    say: Say = lambda line: None,
) -> list[str]:
    """What does not agree, one sentence each; an empty list confirms the rows, and the sample by proof.

    All rows must fit the settings, the labels and the summary. Some, drawn anew each time, are certified again with random
    numbers of their own: a CERTIFIED row must be proved again, with about the same margin and bound, in one of five
    attempts, an ATTACKED one broken again, and predictions must be the same. Radii that are not 0 must be proved at 0.98 of
    what the row says. UNKNOWN rows may come out otherwise where an attack or a proof has better luck, and a radius may be
    larger than its row says. The seed, the size of batches, times and hardware are not checked.
    """
    settings, summary = read_about(path)
    rows = read_rows(path)
    first = images.take(torch.arange(min(settings.images, len(images))))
    if len(first) < settings.images or data_checksum(first) != settings.data_sha256:
        raise WrongRows(
            f"{path} is about other images than these of {images.name}: {settings.images} of {settings.data!r}, "
            f"{settings.split}"
        )
    check_network(path, settings, model)
    faults = contradictions(rows, settings, first)
    if not faults and len(rows) < len(first):
        faults = [f"there are {len(rows)} rows for {len(first)} images: the run has not ended, or rows are missing"]
    if faults or summary != summarize(rows):
        return faults or ["the summary is not that of these rows"]
    device = device or torch.device("cpu")
    certifier = _certifier(settings, model.to(device), first, device)
    chosen = sorted(random.SystemRandom().sample(rows, min(sample, len(rows))), key=lambda row: row.index)
    say(f"{len(rows)} rows fit their settings; {len(chosen)} of them to repeat")
    told = _Told(say, len(chosen))
    found = []
    for row in chosen:
        found.append(
            (_again(row, certifier, first, settings, device), _radius_again(row, certifier, first, settings, device))
        )
        told.after(found)
    return [fault for again, _ in found for fault in again] + [fault for _, radius in found for fault in radius]


class _Told:
    """Says how far it is, after the first row, the last, and now and then between."""

    def __init__(self, say: Say, count: int):
        self.say, self.count = say, count
        self.start, self.spoken = time.perf_counter(), float("-inf")

    def after(self, found: Sequence[tuple[list[str], list[str]]]) -> None:
        now = time.perf_counter()
        if now - self.spoken < PATIENCE and len(found) < self.count:
            return
        self.spoken, left = now, (now - self.start) / len(found) * (self.count - len(found))
        wrong = sum(bool(again or radius) for again, radius in found)
        self.say(f"{len(found)} of {self.count} rows repeated, {wrong} came out otherwise, {left:.0f} s left")


def _certifier(settings: Settings, model: nn.Module, images: ImageSet, device: torch.device) -> Certifier:
    guarantee = Guarantee.parse(settings.guarantee)
    return Certifier(
        model,
        images.shape,
        guarantee=guarantee,
        failure_prob=settings.failure_prob if guarantee is Guarantee.HIGH_PROBABILITY else 1e-9,
        attack_steps=settings.attack_steps,
        power_steps=settings.power_steps,
        device=device,
        method=settings.method,  # type: ignore[arg-type]
        branch_seconds=PATIENT * settings.branch_seconds,  # another machine may be slower, or have more to do
        deployed_dtype=settings.deployed_dtype,
        norm=settings.norm,
    )


def _again(row: Row, certifier: Certifier, images: ImageSet, settings: Settings, device: torch.device) -> list[str]:
    x = pixels(images.images[row.index : row.index + 1], device)
    # Of rows that it has not decided nothing is asked that takes so long.
    certifier.branch_seconds = PATIENT * settings.branch_seconds if row.decided_by == BRANCHING else 0.0
    try:
        for attempt in range(ATTEMPTS):
            if row.verdict == Verdict.ATTACKED:  # other starts and more steps: the point is there, and has to be found
                certifier.seed_again(secrets.randbits(62))
                certifier.attack_steps = settings.attack_steps * 2**attempt
            _lean(certifier, attempt)
            found = certifier(x, images.labels[row.index : row.index + 1], settings.eps)
            if row.verdict == Verdict.ATTACKED and found.verdicts[0] is Verdict.UNKNOWN and _breaks(row, certifier, x):
                found = replace(found, verdicts=[Verdict.ATTACKED])
            reach = row.eps * certifier.prover.ball.stretch(x.numel())
            fault = _fault(row, found, certifier.global_lipschitz, reach) or _fault_of_bound(row, found, certifier, x)
            if fault is None:
                return []
            if found.predictions[0] != row.prediction:
                break  # nothing random is in it, so it would come out the same again
            if row.verdict == Verdict.ATTACKED and found.verdicts[0] is Verdict.CERTIFIED:
                break
    finally:
        certifier.attack_steps = settings.attack_steps
        _lean(certifier, 0)
    return [f"row {row.index}: {fault}"]


def _breaks(row: Row, certifier: Certifier, x: Tensor) -> bool:
    """Whether other attacks than the run's lose the label: its PGD may have had a start that one in twenty has."""
    generator = torch.Generator(x.device).manual_seed(secrets.randbits(62))
    prover, x, y = certifier.prover, x.double(), torch.tensor([row.label], device=x.device)
    eps = x.new_tensor([row.eps])
    for attempt in strong_attempts(prover.network, kinds=OTHERS, ball=prover.ball, generator=generator):
        with torch.inference_mode(False), autocast_off():
            points = attempt.search(x, y, eps)
        if bool(confirmed(prover, x, points, y, eps, None).broken):
            return True
    return False


def _lean(certifier: Certifier, attempt: int) -> None:
    """Look longer for slopes, and by lines or by norms alone: what decided a row may have been a matter of its company.

    Slopes are mostly searched in float32, which rounds otherwise beside other images, and whether lines promise more than
    norms is seen by norms that are random. Whatever is found is a proof.
    """
    certifier.prover.leaning = LEANINGS[attempt % len(LEANINGS)]
    certifier.prover.slope_steps = SLOPE_STEPS * 2 ** min(attempt, 3)
    certifier.prover.insists = attempt > 0 or certifier.prover.method == "thorough"


def _radius_again(row: Row, certifier: Certifier, images: ImageSet, settings: Settings, device: torch.device) -> list[str]:
    """Nothing, where the label is proved on a ball of about the row's radius."""
    if not row.radius or row.radius == row.eps:  # a verdict CERTIFIED, which is repeated as such
        return []
    certifier.branch_seconds = PATIENT * settings.branch_seconds
    x = pixels(images.images[row.index : row.index + 1], device)
    shorter = row.radius * (1 - TOLERANCE)
    try:
        for attempt in range(ATTEMPTS):
            _lean(certifier, attempt)
            found = certifier(x, images.labels[row.index : row.index + 1], shorter)
            if found.verdicts[0] is Verdict.CERTIFIED:
                return []
    finally:
        _lean(certifier, 0)
    return [f"row {row.index}: its radius is said to be {row.radius:.6g}, and at {shorter:.6g} it is {found.verdicts[0]}"]


def _fault(row: Row, found: Certificate, global_lipschitz: float, reach: float) -> str | None:
    """What does not agree; `reach` is the radius of the l2 ball that the bound is about."""
    verdict, margin, bound = found.verdicts[0], float(found.margin[0]), float(found.lipschitz[0])
    if found.predictions[0] != row.prediction:
        return f"the prediction is {found.predictions[0]}, not {row.prediction}"
    # A bound that overflows is kept as none, and certifies nothing.
    known = float("inf") if row.global_lipschitz is None else row.global_lipschitz
    again = global_lipschitz if math.isfinite(global_lipschitz) else float("inf")
    if known != again and not abs(known - again) <= TOLERANCE * again:
        return f"the bound over all inputs is {global_lipschitz:.6g}, not {row.global_lipschitz}"
    if row.verdict != Verdict.CERTIFIED:  # UNKNOWN says nothing that could be false
        stands = row.verdict != Verdict.UNKNOWN and verdict != row.verdict
        return f"it is said to be {row.verdict}, and {verdict} with a margin of {margin:.3g}" if stands else None
    if verdict is not Verdict.CERTIFIED:
        return f"the verdict is {verdict} with a margin of {margin:.3g}, not {row.verdict} with {row.margin}"
    assert row.margin is not None
    assert row.lipschitz is not None
    allowed = TOLERANCE * (margin + 2 * bound * reach)
    if row.decided_by == found.decided_by[0] == BRANCHING and row.margin <= (1 + TOLERANCE) * (margin + 2 * bound * reach):
        allowed = math.inf  # how much was proved follows from when it ended; none exceeds the lead at the image itself
    if row.decided_by != found.decided_by[0]:
        return _fault_of_other_check(row, found.decided_by[0], margin, bound, allowed, margin + 2 * bound * reach)
    if abs(row.lipschitz - bound) > TOLERANCE * bound or abs(row.margin - margin) > allowed:
        return f"margin and bound are {margin:.6g} and {bound:.6g}, not {row.margin} and {row.lipschitz}"
    return None


def _fault_of_bound(row: Row, found: Certificate, certifier: Certifier, x: Tensor) -> str | None:
    """A row by a later check than decides now may have a smaller bound, but none below those that its image has."""
    order = list(VERDICTS)
    if row.lipschitz is None or order.index(row.decided_by) <= order.index(found.decided_by[0]):
        return None
    least = _least_bound(certifier, x, row.eps)
    if row.lipschitz >= least * (1 - TOLERANCE):
        return None
    return f"its bound is {row.lipschitz}, and the smallest that {row.decided_by!r} can have {least:.6g}"


def _least_bound(certifier: Certifier, x: Tensor, eps: float) -> float:
    """The smallest bound that any check has for one image: by norms of all layers, with boxes sharpened by lines or not."""
    prover = certifier.prover
    local: LocalLayers = "closely" if prover.has_norms else "none"
    boxes: tuple[Relax | None, ...] = (None, *dict.fromkeys(("boxes", prover.boxes))) if prover.has_lines else (None,)
    radius = x.new_tensor([eps], dtype=torch.float64)
    bounds = [prover.trace(x.double(), radius, local=local, relax=relax).lipschitz for relax in boxes]
    return min(float(bound) for bound in bounds)


def _fault_of_other_check(row: Row, check: str, margin: float, bound: float, allowed: float, most: float) -> str | None:
    """Another check decides only where the first of both just succeeds or just fails; the later one has the smaller bound.

    No margin exceeds the lead at the image itself, which is at most what was proved now and what the bound took off it:
    `most`.
    """
    assert row.margin is not None
    assert row.lipschitz is not None
    order = list(VERDICTS)
    earlier = order.index(row.decided_by) < order.index(check)
    just = row.margin <= allowed if earlier else margin <= allowed and row.margin <= most
    near = row.lipschitz >= bound * (1 - TOLERANCE) if earlier else row.lipschitz <= bound * (1 + TOLERANCE)
    if just and near:
        return None
    return (
        f"it is proved by {check!r} with margin and bound {margin:.6g} and {bound:.6g}, "
        f"not by {row.decided_by!r} with {row.margin} and {row.lipschitz}"
    )
