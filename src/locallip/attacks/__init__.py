"""Adversaries: what tries to break a classifier, and with it a certificate."""

from locallip.attacks.apgd import apgd_l2, apgd_targets
from locallip.attacks.ensemble import (
    Attempt,
    Attempts,
    Outcome,
    attack_in_turn,
    default_broken,
    strong_attack,
    strong_attempts,
)
from locallip.attacks.external import MissingAttack, autoattack_attempts
from locallip.attacks.pgd import margins, pgd_attack, pgd_l2, withstands

__all__ = [
    "Attempt",
    "Attempts",
    "MissingAttack",
    "Outcome",
    "apgd_l2",
    "apgd_targets",
    "attack_in_turn",
    "autoattack_attempts",
    "default_broken",
    "margins",
    "pgd_attack",
    "pgd_l2",
    "strong_attack",
    "strong_attempts",
    "withstands",
]
