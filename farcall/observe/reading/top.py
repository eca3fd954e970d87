"""``farcall top``: the table of workers, refreshed, and sorted by the key that is pressed."""

from __future__ import annotations

import contextlib
import select
import sys
import termios
import tty
from collections.abc import Callable, Iterator
from typing import Final

from rich.console import Console
from rich.live import Live
from rich.text import Text

from farcall.observe.reading.figures import COLUMNS, job_lines, rows_of, table
from farcall.observe.reading.state import JobState

__all__ = ["top"]

_LOOK_SECONDS: Final = 1.0
_NAMES: Final = (f"{column.key}={column.title.lower().removesuffix('/s')}" for column in COLUMNS)
_KEYS: Final = f"sort: {' '.join(_NAMES)}  q quits"


def top(read: Callable[[], JobState], width: Callable[[], int]) -> None:
    """Show the table until ``q`` or Ctrl-C.

    Args:
        read: reads the job.
        width: width of the terminal.
    """
    order, earlier = COLUMNS[1], None
    console = Console(highlight=False)
    with _keys() as pressed, Live(console=console, screen=True, auto_refresh=False) as live:
        while True:
            job = read()
            rows = sorted(rows_of(job, earlier), key=order.by)
            names = job_lines(job, width())
            room = max(3, console.size.height - 3 - len(names))
            lines = [*names, "", *table(rows, width())[:room], "", _KEYS[: width()]]
            live.update(Text("\n".join(lines), no_wrap=True), refresh=True)
            earlier = job
            key = pressed()
            if key in ("q", "\x03", "\x04"):
                return
            order = next((column for column in COLUMNS if column.key == key), order)


@contextlib.contextmanager
def _keys() -> Iterator[Callable[[], str]]:
    """Return the key that is pressed within a moment, or ""."""
    terminal = sys.stdin.fileno()
    before = termios.tcgetattr(terminal)

    def pressed() -> str:
        readable, _, _ = select.select([terminal], [], [], _LOOK_SECONDS)
        return sys.stdin.read(1) if readable else ""

    try:
        tty.setcbreak(terminal)
        yield pressed
    finally:
        termios.tcsetattr(terminal, termios.TCSADRAIN, before)
