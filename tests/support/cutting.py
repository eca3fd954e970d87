"""Breaks connections between living workers."""

from __future__ import annotations

import ctypes
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rpc.runtime.current import current_agent
from rpc.transport.base import Connection
from rpc.transport.byte_stream import SocketStream
from rpc.transport.stream import StreamConnection
from tests.support.streams import SOON

_UNSPECIFIED = bytes(16)
"""An address of no family."""


def cut(worker: str) -> None:
    """Close this worker's connection to another, with all that it has received and not read. Returns then."""
    _break(worker, lambda connection: connection.close("the test has cut it"))


def reset(worker: str) -> None:
    """Have the kernels on both sides reset this worker's TCP connection to another, as what is between two
    hosts may: the workers are told, and what either had sent and the other not read is gone.
    """
    _break(worker, _reset)


def _reset(connection: Connection) -> None:
    assert isinstance(connection, StreamConnection)
    stream = connection._stream
    assert isinstance(stream, SocketStream)
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.connect(stream.descriptor, _UNSPECIFIED, len(_UNSPECIFIED)):  # dissolves it; see connect(2)
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def _break(worker: str, how: Callable[[Connection], object]) -> None:
    agent = current_agent()
    done = threading.Event()

    def close() -> None:
        connection = agent.group.peers.find(worker).connection
        if connection is not None:
            how(connection)
        done.set()

    agent.group.on_loop(close)
    assert done.wait(SOON)


@contextmanager
def cutting(worker: str, pause: float, how: Callable[[str], None] = cut) -> Iterator[Callable[[], int]]:
    """Break the connection again and again meanwhile; yields what says how often."""
    over = threading.Event()
    cuts = 0

    def cut_all() -> None:
        nonlocal cuts
        while not over.wait(pause):
            how(worker)
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
