"""Buffers are taken back from threads that write to them, and that may send meanwhile: the function that
merges may, and so may a finalizer in any thread.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable

import numpy as np
import pytest

from rpc.bulk.transfer import Transfer
from rpc.errors import NotInitializedError, RpcError
from rpc.wire.chunking import CHUNK_BYTES
from rpc.wire.frames import Kind
from rpc.wire.targets import MergingTarget, Target
from tests.unit.rpc.bulk.wired import End, message

TAG = 7
SIZE = 3 * CHUNK_BYTES + 1000
SOON = 20

ENDS: dict[str, Callable[[End, Transfer], object]] = {
    "cancelled": lambda end, posted: posted.cancel(),
    "tag closed": lambda end, posted: end.bulk.close_tag(end.peer, TAG),
    "connection broken": lambda end, posted: end.bulk.peer_broke(end.peer),
    "worker lost": lambda end, posted: end.bulk.peer_gone(end.peer, "it died"),
    "shut down": lambda end, posted: end.bulk.close(),
}


def in_thread(function: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=function, daemon=True)
    thread.start()
    return thread


@pytest.mark.parametrize("way", ENDS)
@pytest.mark.parametrize("merges", [False, True], ids=["filled", "merged"])
def test_a_thread_that_writes_to_a_buffer_may_send_while_the_buffer_is_taken_back(
    way: str, merges: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    end = End("peer", 1)
    other = End("other", 2).peer
    posted = end.bulk.post(
        end.peer, TAG, np.zeros(SIZE, np.uint8), merge=(lambda begin, data: None) if merges else None
    )
    target = end.bulk.find_target(end.peer, Kind.BULK, TAG << 32, [1, SIZE])
    assert isinstance(target, MergingTarget if merges else Target)
    writing, wanted, sent = threading.Event(), threading.Event(), threading.Event()
    take_back = target.take_back

    def begin_to_take_back() -> None:
        wanted.set()
        take_back()

    monkeypatch.setattr(target, "take_back", begin_to_take_back)

    def write() -> None:
        target.enter()
        writing.set()
        try:
            assert wanted.wait(SOON)
            with contextlib.suppress(NotInitializedError):  # it has been shut down
                end.bulk.send(other, TAG + 1, b"from a finalizer")
            sent.set()
        finally:
            target.leave()

    writer = in_thread(write)
    assert writing.wait(SOON)
    taker = in_thread(lambda: ENDS[way](end, posted))
    assert sent.wait(SOON)
    for thread in (writer, taker):
        thread.join(SOON)
        assert not thread.is_alive()
    assert target.is_taken_back


def test_a_message_that_is_complete_before_its_buffer_is_taken_back_fills_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    end, buffer = End("peer", 1), np.zeros(SIZE, np.uint8)
    posted = end.bulk.post(end.peer, TAG, buffer)
    *first, last = message(TAG, 0, [np.ones(SIZE, np.uint8)])
    for data in first:
        end.receive(data)
    (arriving,) = end.decoder.arriving.open_messages.values()
    assert arriving.target is not None
    take_back = arriving.target.take_back

    def complete_first() -> None:
        end.receive(last)  # as another thread may, right here
        take_back()

    monkeypatch.setattr(arriving.target, "take_back", complete_first)
    assert not posted.cancel()
    posted.wait(1)
    assert (buffer == 1).all()


def test_a_post_that_is_merged_is_cancelled_once() -> None:
    end = End("peer", 1)
    posted = end.bulk.post(end.peer, TAG, np.zeros(SIZE, np.uint8), merge=lambda begin, data: None)
    target = end.bulk.find_target(end.peer, Kind.BULK, TAG << 32, [1, SIZE])
    assert isinstance(target, MergingTarget)
    target.merge(0, memoryview(bytes(8)))
    assert posted.cancel("enough")
    assert not posted.cancel("again")
    with pytest.raises(RpcError, match="enough"):
        posted.wait()
    assert target.is_taken_back
