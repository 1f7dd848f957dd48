"""What a person sees while a network trains, on stderr: a live line in a terminal, plain lines elsewhere."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, Protocol

#: Seconds between two plain lines, so that a log of hundreds of epochs stays readable.
QUIET = 10.0

HEADER = "  epoch    clean   robust*     eps    lambda      rate   local*   global*   s/epoch   left"
FOOTNOTE = "  * estimates by power iteration, on the training images as they pass; what is proved comes at the end"


class Display(Protocol):
    def say(self, line: str) -> None: ...

    def epoch(self, row: Mapping[str, Any]) -> None: ...

    def close(self) -> None: ...


def line(row: Mapping[str, Any]) -> str:
    """One epoch as a line under HEADER."""

    def number(name: str, form: str, scale: float = 1.0) -> str:
        value = row.get(name)
        return format(value * scale, form) if isinstance(value, (int, float)) and value == value else "-"

    return (
        f"  {number('epoch', '5.0f'):>5} {number('clean', '7.1f', 100):>7}% {number('robust', '7.1f', 100):>8}%"
        f" {number('eps', '7.4f'):>7} {number('mix', '9.2f'):>9} {number('learning_rate', '9.1e'):>9}"
        f" {number('local_bound', '8.3g'):>8} {number('global_bound', '9.3g'):>9}"
        f" {number('seconds', '9.2f'):>9} {duration(row.get('seconds_left', 0.0)):>6}"
    )


def duration(seconds: float) -> str:
    """Such as 45s, 3m20, 2h05."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}"
    return f"{whole // 3600}h{whole % 3600 // 60:02d}"


class PlainLines:
    """A line for the first and the last epoch, and one every few seconds between them."""

    def __init__(self, quiet: float = QUIET) -> None:
        self._header, self._last, self._waiting, self._quiet = False, 0.0, "", quiet

    def say(self, line: str) -> None:
        self._flush()
        print(line, file=sys.stderr, flush=True)

    def epoch(self, row: Mapping[str, Any]) -> None:
        if not self._header:
            print(HEADER, file=sys.stderr, flush=True)
            self._header = True
        self._waiting = line(row)
        if time.monotonic() - self._last >= self._quiet:
            self._flush()
            self._last = time.monotonic()

    def _flush(self) -> None:
        if self._waiting:
            print(self._waiting, file=sys.stderr, flush=True)
        self._waiting = ""

    def close(self) -> None:
        self._flush()


class LiveLine:
    """The header and every finished epoch that is worth keeping, with the newest one rewritten in place."""

    def __init__(self, quiet: float = QUIET) -> None:
        from rich.console import Console
        from rich.live import Live

        self._quiet = quiet
        self.console = Console(stderr=True, highlight=False, markup=False)
        self._live = Live("", console=self.console, refresh_per_second=4, auto_refresh=False)
        self._started, self._kept, self._newest = False, 0.0, ""

    def say(self, line: str) -> None:
        self.console.print(line, soft_wrap=True)

    def epoch(self, row: Mapping[str, Any]) -> None:
        if not self._started:
            self.say(HEADER)
            self._live.start()
            self._started = True
        self._newest = line(row)
        if time.monotonic() - self._kept >= self._quiet:
            self.say(self._newest)
            self._kept, self._newest = time.monotonic(), ""
        self._live.update(self._newest, refresh=True)

    def close(self) -> None:
        if self._started:
            self._live.stop()
            self._started = False


class Undeterred:
    """Another display until what it writes to is gone, such as a closed terminal or pipe; then none, and the run goes on."""

    def __init__(self, inner: Display) -> None:
        self.inner: Display = inner

    def say(self, line: str) -> None:
        self._do(lambda: self.inner.say(line))

    def epoch(self, row: Mapping[str, Any]) -> None:
        self._do(lambda: self.inner.epoch(row))

    def close(self) -> None:
        self._do(self.inner.close)

    def _do(self, show: Callable[[], None]) -> None:
        try:
            show()
        except OSError:
            self.inner = Silent()
            with suppress(OSError, ValueError):  # or what is still in the buffer would fail once more at the end
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())


class Silent:
    def say(self, line: str) -> None:
        pass

    def epoch(self, row: Mapping[str, Any]) -> None:
        pass

    def close(self) -> None:
        pass


def display(quiet: float = QUIET) -> Display:
    """The live line in a terminal where rich is installed, else plain lines; at most one line kept in `quiet` seconds."""
    if sys.stderr.isatty():
        try:
            return LiveLine(quiet)
        except ImportError:
            pass
    return PlainLines(quiet)
