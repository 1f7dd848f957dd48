"""Attempts to break certificates: what `locallip audit` makes, and what the tests make on broken certifiers."""

from locallip.audit.auditor import SEARCHES, SHARES, Auditor
from locallip.audit.claims import Claims, Issuer, IssuerOf, claims_of, largest_claims
from locallip.audit.judge import Judge
from locallip.audit.report import Break, Report, Tally

__all__ = [
    "SEARCHES",
    "SHARES",
    "Auditor",
    "Break",
    "Claims",
    "Issuer",
    "IssuerOf",
    "Judge",
    "Report",
    "Tally",
    "claims_of",
    "largest_claims",
]
