"""Frames that are gathered: they leave in order, together, soon, and whatever happens meanwhile."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from rpc.runtime.loop import LoopThread
from rpc.transport import sending, syscalls
from tests.support.streams import SOON, Pair, Sockets, frame_bytes, headers, send


def gather(pair: Pair, index: int) -> None:
    pair.here.send_small(frame_bytes({"index": index}), SOON, gather=True)


def indices(pair: Pair, count: int) -> list[int]:
    """Of the frames that have arrived, as soon as there are so many."""
    return [header["index"] for header in headers(pair.there_owner.wait_for(count))]


@pytest.fixture
def pair(loop: LoopThread, other_loop: LoopThread, sockets: Sockets) -> Iterator[Pair]:
    made = Pair(loop, sockets(), other_loop)
    yield made
    made.close()


@pytest.fixture
def other_loop() -> Iterator[LoopThread]:
    made = LoopThread("other-loop", "a test's")
    yield made
    made.stop()


@contextlib.contextmanager
def busy(loop: LoopThread) -> Iterator[None]:
    """The loop has something else to do."""
    begun, enough = threading.Event(), threading.Event()

    def work() -> None:
        begun.set()
        enough.wait(SOON)

    loop.loop.call_soon_threadsafe(work)
    assert begun.wait(SOON)
    try:
        yield
    finally:
        enough.set()


def test_a_gathered_frame_is_sent_though_nothing_follows(pair: Pair) -> None:
    for index in range(5):
        gather(pair, index)
        assert indices(pair, index + 1) == list(range(index + 1))


def test_frames_gathered_while_the_loop_is_busy_leave_together(
    pair: Pair, loop: LoopThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[bytes] = []
    send_noting = syscalls.send_noting

    def noted(descriptor: int, data: bytes, counts: list[int]) -> None:
        written.append(data)
        send_noting(descriptor, data, counts)

    monkeypatch.setattr(syscalls, "send_noting", noted)
    with busy(loop):
        for index in range(10):
            gather(pair, index)
        assert not written
    assert indices(pair, 10) == list(range(10))
    assert len(written) == 1


def test_some_tens_of_frames_do_not_wait_for_the_loop(pair: Pair, loop: LoopThread) -> None:
    with busy(loop):
        for index in range(sending._GATHERED_FRAMES):
            gather(pair, index)
        assert len(indices(pair, sending._GATHERED_FRAMES)) == sending._GATHERED_FRAMES


def test_a_flush_does_not_wait_for_the_loop(pair: Pair, loop: LoopThread) -> None:
    with busy(loop):
        gather(pair, 0)
        pair.here.flush()
        assert indices(pair, 1) == [0]


@pytest.mark.parametrize("size", [10, 1_000_000])
def test_what_is_sent_after_gathered_frames_arrives_after_them(
    pair: Pair, loop: LoopThread, size: int
) -> None:
    with busy(loop):
        gather(pair, 0)
        gather(pair, 1)
        send(pair.here, {"index": 2}, b"x" * size)
    assert indices(pair, 3) == [0, 1, 2]


@pytest.mark.parametrize("step", ["_enqueue", "_tell_loop"])
@pytest.mark.parametrize("after", [False, True])
def test_ctrl_c_while_gathering_keeps_back_no_other_frame(
    pair: Pair, step: str, after: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    function: Callable[..., Any] = getattr(pair.here, step)
    interruptions = [KeyboardInterrupt]

    def interrupted(*args: Any) -> None:
        if after or not interruptions:
            function(*args)
        if interruptions:
            raise interruptions.pop()

    gather(pair, 0)
    assert indices(pair, 1) == [0]
    monkeypatch.setattr(pair.here, step, interrupted)
    with pytest.raises(KeyboardInterrupt):
        gather(pair, 1)
    sent = [] if step == "_enqueue" and not after else [1]
    gather(pair, 2)
    assert indices(pair, 2 + len(sent)) == [0, *sent, 2]
