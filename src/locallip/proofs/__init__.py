"""Certificates for a whole data set: rows on disk, a summary, and their repetition by somebody else."""

from locallip.proofs.rows import Row, WrongRows, read_rows
from locallip.proofs.run import Job, certify_images
from locallip.proofs.verify import verify_rows

__all__ = ["Job", "Row", "WrongRows", "certify_images", "read_rows", "verify_rows"]
