"""What can be wrong with data on a disk, told so that a user can mend it."""

from __future__ import annotations

#: The end of every message about files that a user keeps.
REMEDY = "name the folder that holds the data with --data-root DIR, or fetch it with --download"


class MissingData(RuntimeError):
    """Data, or what is needed to read it, is not there; the message says where it was looked for and what to do."""


class DamagedData(RuntimeError):
    """A file cannot be read or does not hold what it was published with; the message names it and says what to do."""


def damaged(path: object, reason: str, remedy: str = REMEDY) -> DamagedData:
    """The error for one wrong file of the user; nothing of theirs is overwritten, so they are told to remove it."""
    return DamagedData(f"{path} is damaged: {reason}; remove it, then {remedy}")
