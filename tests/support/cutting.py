"""Breaks connections between living workers."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rpc.runtime.current import current_agent
from tests.support.streams import SOON


def cut(worker: str) -> None:
    """Close this worker's connection to another, with all that it has received and not read. Returns then."""
    agent = current_agent()
    closed = threading.Event()

    def close() -> None:
        connection = agent.peer(worker).connection
        if connection is not None:
            connection.close("the test has cut it")
        closed.set()

    agent.on_loop(close)
    assert closed.wait(SOON)


@contextmanager
def cutting(worker: str, pause: float) -> Iterator[Callable[[], int]]:
    """Cut the connection again and again meanwhile; yields what says how often."""
    over = threading.Event()
    cuts = 0

    def cut_all() -> None:
        nonlocal cuts
        while not over.wait(pause):
            cut(worker)
            cuts += 1

    thread = threading.Thread(target=cut_all)
    thread.start()
    try:
        yield lambda: cuts
    finally:
        over.set()
        thread.join(SOON)


def until_cut(cuts: Callable[[], int], count: int) -> bool:
    """Whether there have been fewer cuts, so that it is worth going on; yields the processor."""
    time.sleep(0)
    return cuts() < count
