"""Lines of a launcher's own on the terminal."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Sequence

from farcall.observe.format.legible import legible

__all__ = ["name_ranks", "ranks_run", "say"]


def say(text: str) -> None:
    """Print one line to standard error, beside the lines of the workers. Control characters, which errors and
    names may contain, are escaped.
    """
    with contextlib.suppress(BrokenPipeError):  # nothing reads it any more; the job goes on
        print("farcall:", legible(text, kept="\n"), file=sys.stderr, flush=True)


def name_ranks(ranks: Sequence[int]) -> str:
    """Return ``rank 0``, ``ranks 0 to 3`` or ``ranks 0, 2, 3``."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    if list(ranks) == list(range(ranks[0], ranks[0] + len(ranks))):
        return f"ranks {ranks[0]} to {ranks[-1]}"
    return f"ranks {', '.join(map(str, ranks))}"


def ranks_run(ranks: Sequence[int], remark: str) -> str:
    """Return ``rank 0 REMARK runs`` or ``ranks 0 to 3 REMARK run``."""
    return f"{name_ranks(ranks)} {remark} run{'s' if len(ranks) == 1 else ''}"
