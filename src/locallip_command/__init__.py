"""The start of the command `locallip`: what needs no torch, whose import takes seconds, is answered here at once."""

from __future__ import annotations

import difflib
import os
import sys
from collections.abc import Sequence

#: Every command with the line that the overview shows of it.
SUMMARIES = {
    "demo": "train and certify a small network on digits that come along, and write a report",
    "certify": "prove for the images of a data set that no small change alters the answer",
    "verify": "repeat some rows of certify and say whether they agree",
    "attack": "try to break a network on the images of a data set",
    "audit": "try to break the certificates of a network, in many ways",
    "report": "make one page to look at of runs, their certificates and single images",
    "train": "train a network by a recipe",
    "recipes": "list what can be trained",
    "models": "list the trained networks that come along",
    "table": "print the paper's tables beside our own results",
    "completion": "print a script that completes commands and options in bash, zsh or fish",
}

OVERVIEW = """usage: locallip COMMAND [options]

Image classifiers whose robustness to bounded changes is proved.

{commands}

For example:
  locallip demo
  locallip certify mnist-4c3f-local-g --data embedded --limit 50
  locallip train fast-mnist-4c3f-local-g --data-root data --download

`locallip COMMAND --help` has the options of a command and examples, such as `locallip demo --help`;
`locallip --version` says what is installed, and with --json says it for scripts.
Exit codes: 0 done; 1 the answer is no; 2 called wrongly, or with a wrong or missing file; 3 failed on the way;
130 stopped by Ctrl-C or --stop-after; 141 nobody reads the output any more.
"""


def overview() -> str:
    """What `locallip` alone prints."""
    width = max(map(len, SUMMARIES))
    return OVERVIEW.format(commands="\n".join(f"  {name:<{width}}  {line}" for name, line in SUMMARIES.items()))


def nearest(word: str, known: Sequence[str]) -> str:
    """A question whether something else was meant, or nothing."""
    close = difflib.get_close_matches(word, known, n=1, cutoff=0.65)
    return f" (did you mean {close[0]!r}?)" if close else ""


def answered(args: Sequence[str]) -> int | None:
    """The exit code where no torch is needed to answer; None for everything else."""
    first = args[0] if args else "--help"
    if first in ("-h", "--help") or list(args) == ["help"]:
        print(overview(), end="")
        return 0
    if first in SUMMARIES or first in ("help", "--version"):
        return None
    what = "option" if first.startswith("-") else "command"
    hint = nearest(first, [*SUMMARIES, "--help", "--version"])
    print(f"locallip: there is no {what} {first!r}{hint}; `locallip --help` lists the commands", file=sys.stderr)
    return 2


def without_colours() -> None:
    """Keep tyro from colours where NO_COLOR is set or where something else than a terminal reads; to be called before it."""
    if os.environ.get("NO_COLOR") or not (sys.stdout.isatty() and sys.stderr.isatty()):
        os.environ.setdefault("PYTHON_TYRO_ANSI_CODES", "False")


def ended(code: int) -> int:
    """Ends one of several processes at once: threads of torch's can abort one that ends in the usual way, its work done."""
    if os.environ.get("WORLD_SIZE", "1") != "1":
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    return code


def main() -> int:
    """What the shell calls."""
    try:
        try:
            code = answered(sys.argv[1:])
            if code is not None:
                return code
            # Threads that wait must not keep a processor busy that somebody else needs; read when torch is loaded.
            os.environ.setdefault("OMP_WAIT_POLICY", "passive")
            from locallip.cli import main as run

            return ended(run())
        finally:
            sys.stdout.flush()
    except BrokenPipeError:  # whoever read our output has closed it, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except KeyboardInterrupt:  # while torch is imported
        return 130
