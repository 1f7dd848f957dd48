"""Repeat some rows of a certified data set: do weights and images agree, and does every verdict come out again?"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

from locallip.certify import Certifier, Verdict
from locallip.certify.prover import fingerprint
from locallip.data import ImageSet
from locallip.norms import Guarantee
from locallip.proofs.rows import Row, WrongRows, read_rows, read_settings
from locallip.proofs.run import data_checksum


def verify_rows(
    path: Path,
    model: nn.Module,
    images: ImageSet,
    *,
    sample: int = 20,
    device: torch.device | None = None,
    say: Callable[[str], None] = lambda line: None,
) -> list[str]:
    """What does not agree, one sentence each; an empty list confirms the sample.

    Weights and images must be those of the rows. Some rows, drawn anew each time, are certified again with random numbers
    of their own; a CERTIFIED row must be proved again, a MISCLASSIFIED one must have the same prediction. Rows without a
    proof may come out otherwise where the attack has better luck.
    """
    settings, rows = read_settings(path), read_rows(path)
    first = images.take(torch.arange(min(int(settings["images"]), len(images))))
    if data_checksum(first) != settings["data_sha256"]:
        raise WrongRows(
            f"{path} is about other images than these of {images.name} ({settings['data']}, {settings['split']})"
        )
    if fingerprint(model) != settings["fingerprint"]:
        raise WrongRows(f"{path} is about other weights: {settings['model']} with the fingerprint {settings['fingerprint']}")
    faults = _structure(rows, first)
    chosen = sorted(random.SystemRandom().sample(rows, min(sample, len(rows))), key=lambda row: row.index)
    device = device or torch.device("cpu")
    certifier = Certifier(
        model.to(device),
        first.shape,
        guarantee=Guarantee.parse(settings["guarantee"]),
        failure_prob=settings["failure_prob"] or 1e-9,
        attack_steps=int(settings["attack_steps"]),
        power_steps=int(settings["power_steps"]),
        device=device,
    )
    for row in chosen:
        faults += _again(row, certifier, first, str(settings["eps"]), device)
    say(f"{len(chosen)} of {len(rows)} rows repeated")
    return faults


def _structure(rows: list[Row], images: ImageSet) -> list[str]:
    """Every image once, with its own label."""
    faults = []
    if [row.index for row in rows] != list(range(len(images))):
        faults.append(f"there are {len(rows)} rows, which are not those of the images 0 to {len(images) - 1} in order")
    labels = images.labels.tolist()
    wrong = [row.index for row in rows if row.index < len(labels) and labels[row.index] != row.label]
    if wrong:
        faults.append(f"{len(wrong)} rows have another label than their image, the first is row {wrong[0]}")
    return faults


def _again(row: Row, certifier: Certifier, images: ImageSet, eps: str, device: torch.device) -> list[str]:
    if not 0 <= row.index < len(images):
        return []  # said already
    x = images.images[row.index : row.index + 1].to(device).float() / 255
    found = certifier(x, images.labels[row.index : row.index + 1], eps)
    verdict = found.verdicts[0]
    if found.predictions[0] != row.prediction:
        return [f"row {row.index}: the prediction is {found.predictions[0]}, not {row.prediction}"]
    settled = (Verdict.CERTIFIED, Verdict.MISCLASSIFIED)
    if row.verdict != verdict and (row.verdict in settled or verdict in settled):
        margins = f"margin {float(found.margin[0]):.3g}, was {row.margin}"
        return [f"row {row.index}: the verdict is {verdict}, not {row.verdict} ({margins})"]
    return []
