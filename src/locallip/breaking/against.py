"""Attacks against certificates: no image that rows of `locallip certify` prove may be broken."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from locallip.balls import L2, as_ball
from locallip.breaking.rows import AttackRow
from locallip.certify import Verdict
from locallip.data import ImageSet
from locallip.norms import Guarantee
from locallip.proofs import Row, WrongRows, read_rows
from locallip.proofs.check import contradictions
from locallip.proofs.run import data_checksum
from locallip.proofs.settings import Settings, check_network, read_about


class BrokenCertificate(Exception):
    """A certified image that an attack broke: the worst that can happen here. The message is for the user."""


class Certified(NamedTuple):
    """Rows of `locallip certify` and what they rest on."""

    path: Path
    settings: Settings
    rows: list[Row]


def read_certified(path: Path, model: nn.Module, images: ImageSet, radius: float, norm: str = L2.norm) -> Certified:
    """Rows that an attack with this radius can contradict; refused where they are about something else."""
    settings, summary = read_about(path)
    ended = summary is not None
    rows = read_rows(path, whole=ended) if ended or path.exists() else []
    first = images.take(torch.arange(min(settings.images, len(images))))
    check_network(path, settings, model)
    if len(first) < settings.images or data_checksum(first) != settings.data_sha256:
        raise WrongRows(
            f"{path} is about other images ({settings.images} of {settings.data!r}, {settings.split}) than these of "
            f"{images.name}"
        )
    if settings.norm != norm:
        raise WrongRows(
            f"{path} is about {as_ball(settings.norm).words} balls, not {as_ball(norm).words} ones: attack with --norm "
            f"{settings.norm}"
        )
    if settings.radius < radius:
        raise WrongRows(
            f"{path} is about eps {settings.eps}, and an attack with eps {radius:g} goes beyond that, so it contradicts "
            f"nothing: attack with --eps {settings.eps}"
        )
    faults = contradictions(rows, settings, first)
    if faults:
        raise WrongRows(f"{path} does not fit its own settings: {faults[0]}")
    if not ended or len(rows) < len(first):
        raise WrongRows(
            f"{path} has {len(rows) or 'no'} rows for {len(first)} images: `locallip certify` has not ended, or rows are "
            "missing; give its command again with --resume, then attack"
        )
    return Certified(path, settings, rows)


def compared(certified: Certified, attacked: Sequence[AttackRow]) -> dict[str, Any]:
    """How many of the attacked images the rows call certified, and which of these are wrong or broken."""
    held = {row.index for row in certified.rows if row.verdict == Verdict.CERTIFIED}
    both = [row for row in attacked if row.index in held]
    wrong = [row.index for row in both if row.broken or (row.prediction is not None and row.prediction != row.label)]
    return {
        "rows": certified.path.name,
        "guarantee": certified.settings.guarantee,
        "eps": certified.settings.eps,
        "certified_and_attacked": len(both),
        "broken": wrong,
    }


def is_alarming(comparison: dict[str, Any]) -> bool:
    """Something was broken that is said to be proved; an estimate proves nothing."""
    return bool(comparison["broken"]) and comparison["guarantee"] != Guarantee.ESTIMATE.value


def outcome(comparison: dict[str, Any]) -> str:
    """For people, where there is no alarm."""
    fell, count, rows = len(comparison["broken"]), comparison["certified_and_attacked"], comparison["rows"]
    if comparison["guarantee"] == Guarantee.ESTIMATE.value:
        return f"of {count} images that are estimated robust in {rows} (no proof), {fell} were broken"
    return f"of {count} images that are certified in {rows}, none was broken"


def alarm(comparison: dict[str, Any]) -> str:
    """What to tell the world."""
    some = ", ".join(map(str, comparison["broken"][:20]))
    return (
        f"CERTIFICATES BROKEN: {len(comparison['broken'])} of {comparison['certified_and_attacked']} images that "
        f"{comparison['rows']} calls CERTIFIED ({comparison['guarantee']}, eps {comparison['eps']}) are not: {some}. "
        "The points were checked in float64 and lie inside the balls. Either the rows were changed or there is a bug in "
        "locallip: please report it with the rows, the network and this command"
    )
