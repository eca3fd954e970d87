"""A peer: what is kept for it until there is a connection."""

from __future__ import annotations

import contextlib

from rpc.errors import WorkerLostError
from tests.support.finalizers import Memory, is_free
from tests.support.members import peer


def test_what_is_kept_for_a_worker_that_is_lost_is_released_without_the_lock() -> None:
    lost, found, memory = peer(), list[bool](), Memory()

    def send() -> None:
        with contextlib.suppress(WorkerLostError):
            lost.send((b"another",), 7)

    memory.release = lambda: found.append(is_free(send))
    lost.send((memory,), len(memory))
    del memory
    lost.gone("it died")
    assert found == [True]
