"""Connections that are not made again."""

from __future__ import annotations

import threading

import rpc
from rpc.runtime.current import current_agent
from tests.support.cutting import cut
from tests.support.hangs.hang import hang
from tests.support.workers import Worker

EVENT = threading.Event()


def block_the_loop_of_connections() -> None:
    """From then on the kernel takes new connections, and nobody answers there."""
    current_agent().mailbox.call(EVENT.wait)


@hang("link", worker="worker0", options=(("lost_after", 300.0),))
def connection_is_not_made_again(worker: Worker) -> None:
    if worker.rank == 0:
        rpc.rpc_sync("worker1", block_the_loop_of_connections)
        cut("worker1")
        rpc.rpc_sync("worker1", int, timeout=0)  # culprit: connection_is_not_made_again
