"""Both sides' workers are there at once and measure in turn, batch by batch.

A machine's speed varies from second to second, by a factor of two where others use it too. So what is
compared lies as close in time as can be: while one side runs a batch, the other waits for its turn.
(Workloads that do not measure in batches, such as what an idle agent uses, take one turn as a whole.)
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from multiprocessing.connection import Connection, wait
from typing import Any

__all__ = ["Failed", "go_by_turns", "pass_on", "referee"]


class Failed(Exception):
    """A side raised an error, died or took too long; the message has its traceback."""


_referee: list[Connection] = []
"""In the worker that measures: where it is told that it is its turn."""


def go_by_turns(connection: Connection) -> None:
    """In the worker that measures: have ``pass_on`` wait for turns, and wait for the first."""
    _referee.append(connection)
    connection.recv()


def pass_on() -> None:
    """Between two batches: let the other side measure, and return when it is this side's turn again."""
    for connection in _referee:
        connection.send(None)
        connection.recv()


def referee(sides: Mapping[str, Connection], timeout: float) -> dict[str, Any]:
    """Give the turn to one side after the other, until all have sent their results.

    Args:
        sides: by name, connections to the workers that measure.
        timeout: seconds that all of it may take.

    Returns:
        What each side has sent: a dict.

    Raises:
        Failed: a side has sent a text, nothing in time, or is gone.
    """
    results: dict[str, Any] = {}
    deadline = time.monotonic() + timeout
    left = dict(sides)
    while left:
        for side, connection in list(left.items()):
            outcome = _turn(side, connection, deadline)
            if outcome is not None:
                results[side] = outcome
                del left[side]
    return results


def _turn(side: str, connection: Connection, deadline: float) -> dict[str, float] | None:
    """One turn of a side; its results if it has done all."""
    try:
        connection.send(None)
        if not wait([connection], max(0.0, deadline - time.monotonic())):
            raise Failed(f"{side}: no result in time")
        outcome: dict[str, float] | str | None = connection.recv()
    except (EOFError, OSError):
        raise Failed(f"{side}: a worker died") from None
    if isinstance(outcome, str):
        raise Failed(f"{side}: {outcome}")
    return outcome
