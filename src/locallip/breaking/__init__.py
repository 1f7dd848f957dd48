"""Attacks on a whole data set: rows, a summary, and the comparison with certificates."""

from locallip.breaking.against import BrokenCertificate, Certified, read_certified
from locallip.breaking.rows import AttackRow, AttackSettings, read_attack_rows
from locallip.breaking.run import Attacked, AttackJob, Kind, attack_images, describe

__all__ = [
    "AttackJob",
    "AttackRow",
    "AttackSettings",
    "Attacked",
    "BrokenCertificate",
    "Certified",
    "Kind",
    "attack_images",
    "describe",
    "read_attack_rows",
    "read_certified",
]
