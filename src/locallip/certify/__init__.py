"""Verdicts and radii for a user's model."""

from locallip.certify.cascade import BRANCHING, Certificate, Certifier, Verdict, certify
from locallip.certify.curve import certified_accuracy
from locallip.certify.lipschitz import global_lipschitz, local_lipschitz
from locallip.certify.radius import RadiusFinder, certified_radius

__all__ = [
    "BRANCHING",
    "Certificate",
    "Certifier",
    "RadiusFinder",
    "Verdict",
    "certified_accuracy",
    "certified_radius",
    "certify",
    "global_lipschitz",
    "local_lipschitz",
]
