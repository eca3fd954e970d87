"""Threads that read a connection get what they wait for; all else goes to the loop; nothing is lost."""

from __future__ import annotations

import errno
import itertools
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from rpc.agent import dispatcher
from rpc.agent.calls import PendingCall
from rpc.errors import WorkerLostError
from rpc.runtime.loop import LoopThread
from rpc.transport import inline_read
from rpc.transport.base import ConnectionClosed
from rpc.wire.frames import PREAMBLE, Kind
from tests.support.inline_end import ANYWHERE, ON_LOOP, End, frame
from tests.support.stepping import Step
from tests.support.streams import (
    SOON,
    TINY_BUFFER,
    Recorder,
    Sockets,
    open_connection,
    reset,
    send,
    until,
)


@pytest.fixture
def end(loop: LoopThread, sockets: Sockets) -> Iterator[End]:
    made = End(loop, sockets())
    yield made
    made.close()


# ---- waiting for a reply


def test_what_any_thread_may_take_in_is_taken_in_on_the_way(end: End) -> None:
    call, other = end.reserved(), end.call()
    replies = frame(Kind.REPLY, other.call_id) + frame(Kind.REPLY, call.call_id)
    end.there.sendall(frame(Kind.CALL, 70) + frame(ANYWHERE, 1) + replies)
    call.wait()
    assert other.done()
    assert (end.taken, end.agent.passed_on, end.frames) == ([1], [70], [])
    end.loop_reads()


def test_a_thread_leaves_the_reading_to_the_loop_where_others_replies_come_first(end: End) -> None:
    call, other = end.reserved(), end.call()
    end.meanwhile = lambda: end.there.sendall(frame(Kind.REPLY, call.call_id))
    end.there.sendall(frame(ANYWHERE, 1) + frame(Kind.REPLY, other.call_id))
    call.wait()
    assert other.done()
    assert end.taken == [1]
    assert [each.kind for each in end.frames] == [Kind.REPLY]
    end.loop_reads()


def test_a_thread_reads_on_after_the_acknowledgement_of_a_large_message(end: End) -> None:
    call = end.reserved()
    reply = frame(Kind.REPLY, call.call_id)
    end.dispatcher.on(Kind.ARRIVED, lambda *_: end.there.sendall(reply), any_thread=True)
    end.there.sendall(frame(Kind.ARRIVED, 1))
    call.wait()
    assert end.frames == []
    end.loop_reads()


def test_frames_that_need_the_loop_are_left_to_it_with_what_follows_in_order(end: End) -> None:
    call = end.reserved()
    end.there.sendall(
        frame(ANYWHERE, 1) + frame(ON_LOOP, 2) + frame(ANYWHERE, 3) + frame(Kind.REPLY, call.call_id)
    )
    call.wait()
    assert end.taken == [1, 2, 3]
    assert [each.kind for each in end.wait_for(3)] == [ON_LOOP, ANYWHERE, Kind.REPLY]
    end.loop_reads()


PARTS = {
    "a few bytes": (frame(ON_LOOP, 5), 3),
    "half a frame": (frame(ON_LOOP, 5), 30),
    "a whole one and a half": (frame(ANYWHERE, 4) + frame(ON_LOOP, 5), 70),
    "a large frame's beginning": (frame(ON_LOOP, 5, bytes(200_000)), 100_000),
}


@pytest.mark.parametrize("what", PARTS)
def test_a_frame_that_has_come_in_part_is_left_to_the_loop(end: End, what: str) -> None:
    data, cut = PARTS[what]
    call = end.reserved()
    end.there.sendall(data[:cut])
    threading.Timer(0.01, end.there.sendall, [data[cut:] + frame(Kind.REPLY, call.call_id)]).start()
    call.wait()
    until(lambda: end.taken[-1:] == [5])
    end.loop_reads()


def test_many_frames_at_once_are_left_to_the_loop(end: End) -> None:
    call = end.reserved()
    numbers = list(range(20))
    end.there.sendall(b"".join(frame(ANYWHERE, each) for each in numbers) + frame(Kind.REPLY, call.call_id))
    call.wait()
    assert end.taken == numbers
    end.loop_reads()


def test_one_thread_reads_and_others_sleep_until_it_has_read_their_replies(end: End) -> None:
    first = end.reserved()
    with ThreadPoolExecutor(3) as others:
        calls = [end.call() for _ in range(3)]
        waiting = [others.submit(call.result) for call in calls]
        end.there.sendall(b"".join(frame(Kind.REPLY, call.call_id) for call in [*calls, first]))
        first.wait()
        assert [each.result(SOON) for each in waiting] == [b"payload"] * 3
    end.loop_reads()


def test_a_thread_that_waits_for_room_does_not_keep_the_loop_from_reading(
    loop: LoopThread, sockets: Sockets
) -> None:
    end = End(loop, sockets(buffer_bytes=TINY_BUFFER), send_queue_bytes=1)
    end.meanwhile = end.there.close
    end.reserved()
    end.connection.send_small(bytes(50_000), SOON)  # the kernel does not take all of it
    threading.Timer(0.01, end.there.sendall, [frame(ANYWHERE, 1)]).start()
    with pytest.raises(ConnectionClosed):
        end.connection.send_small(b"waits for room", SOON)
    assert end.taken == [1]
    end.reader.leave()


# ---- a finalizer, or a signal handler, in the middle


def test_a_finalizer_may_wait_for_a_reply_that_its_thread_has_in_hand(end: End) -> None:
    call, nested = end.reserved(), end.call(timeout=5)
    end.meanwhile = nested.wait
    end.there.sendall(
        frame(ANYWHERE, 1)
        + frame(ON_LOOP, 2)
        + frame(Kind.REPLY, nested.call_id)
        + frame(Kind.REPLY, call.call_id)
    )
    call.wait()
    assert not isinstance(nested.outcome, Exception)
    assert not isinstance(call.outcome, Exception)
    assert end.taken == [1, 2]
    end.loop_reads()


class Creation(PendingCall):
    """A call that never reads for itself, as that of ``rpc.remote``."""

    keeps_place = True


def test_a_finalizer_may_wait_for_the_creation_of_an_object(end: End) -> None:
    call = end.reserved()
    nested = end.agent.calls.open(end.peer, "something", 5, Creation)
    end.meanwhile = nested.wait
    end.there.sendall(
        frame(ANYWHERE, 1) + frame(Kind.REPLY, nested.call_id) + frame(Kind.REPLY, call.call_id)
    )
    call.wait()
    assert not isinstance(nested.outcome, Exception)
    assert not isinstance(call.outcome, Exception)
    end.loop_reads()


@pytest.mark.parametrize("blocks", [True, False])
def test_a_signal_handler_may_make_a_call_before_any_instruction_and_each_frame_is_taken_in_once(
    end: End, blocks: bool
) -> None:
    files = {inline_read.__file__, dispatcher.__file__}

    def make_a_call() -> None:
        nested = end.call(timeout=SOON if blocks else 1e-9)
        if blocks:
            end.there.sendall(frame(Kind.REPLY, nested.call_id))
        nested.wait()
        assert isinstance(nested.outcome, Exception) is not blocks

    for number in itertools.count(1):
        call = end.reserved()
        end.taken.clear()
        end.agent.passed_on.clear()
        end.there.sendall(
            frame(ANYWHERE, 1) + frame(Kind.CALL, 70) + frame(ON_LOOP, 2) + frame(Kind.REPLY, call.call_id)
        )
        with Step(number, make_a_call, files=files) as step:
            call.wait()
        assert not isinstance(call.outcome, Exception), number
        until(lambda: len(end.taken) == 2 and end.agent.passed_on)
        assert (sorted(end.taken), end.agent.passed_on, end.agent.lost) == ([1, 2], [70], []), number
        if not step.taken:  # the turn has no more instructions
            break
    assert number > 150
    end.loop_reads()


# ---- idle threads


Idle = Callable[[], Callable[[float], int | None]]
"""Has an idle thread wait; returns a function that waits for the call that this thread is to run."""


@pytest.fixture
def idle(end: End) -> Iterator[Callable[[], int | None]]:
    """Waits on another thread that has nothing else to do; gives the next call that it is to run."""
    with ThreadPoolExecutor(1) as thread:

        def wait() -> Callable[[float], int | None]:
            end.ready()
            assert thread.submit(end.claim_idle).result()
            return thread.submit(end.next_task).result

        yield wait  # type: ignore[misc]


def test_an_idle_thread_gets_the_first_request_and_others_the_rest(end: End, idle: Idle) -> None:
    result = idle()
    end.there.sendall(frame(Kind.CALL, 3) + frame(Kind.CALL, 4))
    assert result(SOON) == 3
    assert end.agent.passed_on == [4]
    assert end.frames == []
    end.loop_reads()


def test_an_idle_thread_waits_on_when_there_was_nothing_to_do(end: End, idle: Idle) -> None:
    result = idle()
    end.meanwhile = lambda: end.there.sendall(frame(Kind.CALL, 3))
    end.there.sendall(frame(ANYWHERE, 1))
    assert result(SOON) == 3
    end.loop_reads()


def test_an_idle_thread_reads_an_expected_frame_before_it_runs_a_task(end: End, idle: Idle) -> None:
    def next_frame_comes() -> None:
        end.reader.expected = True
        end.there.sendall(frame(ANYWHERE, 1))

    end.called = next_frame_comes
    result = idle()
    end.there.sendall(frame(Kind.CALL, 70))
    assert result(SOON) == 70
    assert (end.taken, end.agent.passed_on) == ([1], [])
    end.loop_reads()


def test_an_idle_thread_that_expects_a_frame_leaves_to_the_loop_what_needs_it(end: End, idle: Idle) -> None:
    def next_frame_comes() -> None:
        end.reader.expected = True
        end.there.sendall(frame(ANYWHERE, 3))

    end.called = next_frame_comes
    result = idle()
    end.there.sendall(frame(Kind.CALL, 70) + frame(ON_LOOP, 2))
    assert result(SOON) == 70
    until(lambda: end.taken == [2, 3])
    end.loop_reads()


def test_an_idle_thread_leaves_to_the_loop_what_needs_it(end: End, idle: Idle) -> None:
    result = idle()
    end.there.sendall(frame(ON_LOOP, 1) + frame(Kind.CALL, 3))
    assert result(SOON) is None
    end.wait_for(2)
    assert (end.taken, end.agent.passed_on) == ([1], [3])
    end.loop_reads()


def test_what_an_idle_thread_leaves_to_the_loop_stays_when_it_wants_to_wait_again_before_the_loop_comes(
    end: End,
) -> None:
    assert end.claim_idle()
    loop_may_go_on = threading.Event()
    end.loop.loop.call_soon_threadsafe(loop_may_go_on.wait)
    end.there.sendall(frame(Kind.CALL, 3) + frame(ON_LOOP, 1))
    assert end.next_task() == 3
    end.there.sendall(frame(ON_LOOP, 2))
    if end.claim_idle():
        end.next_task(0)
    end.reader.leave()
    loop_may_go_on.set()
    until(lambda: end.taken == [1, 2])
    end.loop_reads()


def test_an_idle_thread_gives_way_to_who_waits_for_a_reply(end: End, idle: Idle) -> None:
    result = idle()
    call = end.call()
    threading.Timer(0.01, end.there.sendall, [frame(Kind.REPLY, call.call_id)]).start()
    call.wait()
    assert result(SOON) is None
    call = end.reserved()
    end.reader.leave()
    end.loop_reads()


def test_an_idle_thread_is_called_back_or_waits_for_a_while_only(end: End, idle: Idle) -> None:
    result = idle()
    end.reader.wake()
    assert result(SOON) is None
    end.ready()
    assert end.claim_idle()
    assert end.next_task(0.01) is None
    assert end.next_task() is None  # without a turn
    end.loop_reads()


# ---- the end


@pytest.mark.parametrize("idle_thread", [False, True])
@pytest.mark.parametrize("how", ["end", "reset", "close", "garbage"])
def test_a_thread_that_reads_is_woken_by_the_end_and_the_descriptor_goes_when_it_has_left(
    end: End, how: str, idle_thread: bool
) -> None:
    with ThreadPoolExecutor(1) as other:
        call = end.call()
        if idle_thread:
            waiting = other.submit(lambda: end.claim_idle() and end.next_task(None))
        else:
            waiting = other.submit(call.wait)
        until(end.reader.is_read_by_thread)
        if how == "end":
            end.there.close()
        elif how == "reset":
            send(end.connection, {})  # what is not read when it is closed
            end.there.close()
        elif how == "close":
            end.loop.call(end.connection.close, "this side")
        else:
            end.there.sendall(frame(Kind.CALL, 1)[:20] + b"\xff" * 100)
        assert end.reason()
        waiting.result(SOON)
    assert isinstance(call.outcome, WorkerLostError)
    until(lambda: end.here.fileno() == -1)


def test_a_thread_that_has_claimed_a_connection_which_is_lost_before_it_waits_lets_go_of_it(end: End) -> None:
    call = end.reserved()
    end.loop.call(end.connection.close, "lost")
    assert end.peer.connection is None
    assert end.here.fileno() >= 0
    call.wait()
    assert isinstance(call.outcome, WorkerLostError)
    assert end.here.fileno() == -1


def test_a_write_error_is_told_though_a_thread_reads(end: End) -> None:
    with ThreadPoolExecutor(1) as other:
        call = end.call()
        waiting = other.submit(call.wait)
        until(end.reader.is_read_by_thread)
        end.here.shutdown(1)
        send(end.connection, {})
        waiting.result(SOON)
    assert end.reason() == "the connection broke: Broken pipe"


@pytest.mark.parametrize("data", [b"", frame(ANYWHERE, 1)], ids=["nothing", "data"])
@pytest.mark.parametrize("idle_thread", [False, True])
def test_a_reset_that_comes_while_a_thread_reads_is_told_as_one(
    loop: LoopThread, sockets: Sockets, data: bytes, idle_thread: bool
) -> None:
    end = End(loop, sockets("tcp"), over_network=True)
    with ThreadPoolExecutor(1) as other:
        call = end.call()
        if idle_thread:
            waiting = other.submit(lambda: end.claim_idle() and end.next_task(None))
        else:
            waiting = other.submit(call.wait)
        until(end.reader.is_read_by_thread)
        end.there.sendall(data)
        reset(end.there)
        assert end.reason() == "the connection broke: Connection reset by peer"
        waiting.result(SOON)
    assert end.taken == ([1] if data else [])


def test_without_descriptors_left_the_loop_reads_and_it_is_not_tried_for_every_call(
    loop: LoopThread, sockets: Sockets, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object) -> int:
        raise OSError(errno.EMFILE, "Too many open files")

    here, there = sockets()
    owner = Recorder()
    connection = open_connection(loop, here, owner)
    assert connection.reader is not None
    with monkeypatch.context() as patched:
        patched.setattr(os, "eventfd", fail)
        for _ in range(500):
            assert connection.reader.claim() is None
            loop.call(int)
    there.sendall(PREAMBLE + frame(Kind.CALL, 1))
    owner.wait_for(1)
    assert 1 <= len(caplog.records) <= 10
    until(lambda: connection.reader and connection.reader.claim())
    connection.reader.leave()
    loop.call(connection.close, "end of the test")


def test_who_ends_the_call_otherwise_wakes_the_thread(end: End) -> None:
    with ThreadPoolExecutor(1) as other:
        call = end.call()
        waiting = other.submit(call.wait)
        until(end.reader.is_read_by_thread)
        call.settle(ValueError("ended"))
        waiting.result(SOON)
    end.loop_reads()
