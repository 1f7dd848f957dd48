"""Attacks on a whole data set: rows, a summary, and the comparison with certificates."""

from locallip.breaking.against import BrokenCertificate, Certified, compared, read_certified
from locallip.breaking.rows import AttackRow, AttackSettings, check_out, write_rows
from locallip.breaking.run import AttackJob, Kind, attack_images, describe

__all__ = [
    "AttackJob",
    "AttackRow",
    "AttackSettings",
    "BrokenCertificate",
    "Certified",
    "Kind",
    "attack_images",
    "check_out",
    "compared",
    "describe",
    "read_certified",
    "write_rows",
]
