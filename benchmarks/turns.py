"""Both sides' workers are there at once and measure in turn, batch by batch.

A machine's speed varies from second to second, by a factor of two where others use it too. So what is
compared lies as close in time as can be: while one side runs a batch, the other waits for its turn. Its
processes are stopped meanwhile, since idle ones may take a core: TensorPipe's look for messages all the time.
(Workloads that do not measure in batches, such as what an idle agent uses, take one turn as a whole.)
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection, wait
from typing import Any

__all__ = ["Failed", "Side", "go_by_turns", "pass_on", "referee"]


class Side:
    """A side's workers.

    Args:
        connection: to the one that measures.
        processes: all of them, by their ids.
    """

    def __init__(self, connection: Connection, processes: Sequence[int]) -> None:
        self.connection = connection
        self._processes = processes

    def stop(self) -> None:
        """Let them not run until ``go_on``."""
        self._signal(signal.SIGSTOP)

    def go_on(self) -> None:
        """Let them run."""
        self._signal(signal.SIGCONT)

    def _signal(self, number: int) -> None:
        for process in self._processes:
            with contextlib.suppress(ProcessLookupError):  # it has ended
                os.kill(process, number)


class Failed(Exception):
    """A side raised an error, died or took too long; the message has its traceback."""


_referee: list[Connection] = []
"""In the worker that measures: where it is told that it is its turn."""


def go_by_turns(connection: Connection) -> None:
    """In the worker that measures, once all have begun: wait for the first turn, and later in ``pass_on``."""
    _referee.append(connection)
    pass_on()


def pass_on() -> None:
    """Between two batches: let the other side measure, and return when it is this side's turn again."""
    for connection in _referee:
        connection.send(None)
        connection.recv()


def referee(sides: Mapping[str, Side], timeout: float) -> dict[str, Any]:
    """Give the turn to one side after the other, until all have sent their results.

    Args:
        sides: by name.
        timeout: seconds that all of it may take.

    Returns:
        What each side has sent: a dict.

    Raises:
        Failed: a side has sent a text, nothing in time, or is gone.
    """
    results: dict[str, Any] = {}
    deadline = time.monotonic() + timeout
    for name, side in sides.items():
        _await(name, side.connection, deadline)  # it has begun
        side.stop()
    left = dict(sides)
    while left:
        for name, side in list(left.items()):
            side.go_on()
            side.connection.send(None)
            outcome = _await(name, side.connection, deadline)
            if outcome is None:
                side.stop()
            else:
                results[name] = outcome
                del left[name]
    return results


def _await(side: str, connection: Connection, deadline: float) -> dict[str, float] | None:
    """What a side has to say: its results if it has done all."""
    try:
        if not wait([connection], max(0.0, deadline - time.monotonic())):
            raise Failed(f"{side}: no result in time")
        outcome: dict[str, float] | str | None = connection.recv()
    except (EOFError, OSError):
        raise Failed(f"{side}: a worker died") from None
    if isinstance(outcome, str):
        raise Failed(f"{side}: {outcome}")
    return outcome
