"""The command reference: the help of every subcommand, as the command itself prints it.

python -m locallip.commands docs/commands.md     writes it
"""

from __future__ import annotations

import contextlib
import io
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from locallip.cli import COMMANDS, main
from locallip.files import write_atomically

#: Columns of the help, so that it comes out alike in every terminal.
WIDTH = 100
#: A recipe whose help stands for that of all: the fields are the same, the defaults are its own.
RECIPE = "demo"

HEAD = """# Commands

What `locallip --help` and the help of every subcommand print. This page is made from the command by
`python -m locallip.commands docs/commands.md`; a test fails where it is behind. The [user guide](guide.md) goes through
them in the order in which they are needed; completion, exit codes and `--json` are in
[the command line](command_line.md).
"""


def reference() -> str:
    """The page in Markdown."""
    sections = [("locallip", _help())]
    for name in sorted({*COMMANDS, "train"}):
        sections.append((f"locallip {name}", _help(name)))
        if name == "train":
            sections.append((f"locallip train {RECIPE}", _help(name, RECIPE)))
    return "\n".join([HEAD, *(f"## {title}\n\n```text\n{text}\n```\n" for title, text in sections)])


def _help(*words: str) -> str:
    """What a call with --help prints, without colours, every line without spaces at its end."""
    printed = io.StringIO()
    with _plain_terminal(), contextlib.redirect_stdout(printed), contextlib.suppress(SystemExit):
        main([*words, "--help"])
    lines = [line.rstrip() for line in printed.getvalue().splitlines()]
    return "\n".join(lines).strip()


@contextlib.contextmanager
def _plain_terminal() -> Iterator[None]:
    """The environment of a terminal of WIDTH columns that knows no colours."""
    wanted = {"COLUMNS": str(WIDTH), "NO_COLOR": "1", "TERM": "dumb"}
    forced = ("FORCE_COLOR", "CLICOLOR_FORCE")
    before = {name: os.environ.get(name) for name in (*wanted, *forced)}
    os.environ.update(wanted)
    for name in forced:
        os.environ.pop(name, None)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def write(argv: Sequence[str]) -> int:
    """Write the page; the exit code is 0, 1 where that failed and 2 where it was called wrongly."""
    if len(argv) != 1 or argv[0].startswith("-"):
        print("usage: python -m locallip.commands DOCUMENT", file=sys.stderr)
        return 2
    try:
        write_atomically(Path(argv[0]), reference().encode())
    except OSError as error:
        print(f"locallip: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(write(sys.argv[1:]))
