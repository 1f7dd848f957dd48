"""Spectral norms of masked operators, each with its guarantee."""

from locallip.norms.base import Guarantee, NormKey, NormRule
from locallip.norms.cholesky import CholeskyNorm, LayerTooLarge
from locallip.norms.exact import ExactNorm
from locallip.norms.lanczos import LanczosNorm
from locallip.norms.matrices import matrix_norms
from locallip.norms.power import PowerNorm
from locallip.norms.probed import ProbedNorm
from locallip.norms.ritz import RitzNorm
from locallip.norms.starts import BatchStarts, WarmStarts

__all__ = [
    "BatchStarts",
    "CholeskyNorm",
    "ExactNorm",
    "Guarantee",
    "LanczosNorm",
    "LayerTooLarge",
    "NormKey",
    "NormRule",
    "PowerNorm",
    "ProbedNorm",
    "RitzNorm",
    "WarmStarts",
    "matrix_norms",
]
