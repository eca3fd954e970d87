"""What is queued goes out in order, whole, by whichever thread writes, as far as the stream takes it."""

from __future__ import annotations

import asyncio
import threading
from collections import deque

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rpc.transport.base import CAPTURED_BYTES, ConnectionClosed, QueueFull
from rpc.transport.session import Session
from rpc.transport.write_queue import CAPTURE_ALL, WriteQueue
from rpc.wire.chunking import CHUNK_BYTES, WHOLE_BYTES
from rpc.wire.frames import Kind, encode, encode_small
from tests.support.effort import PROFILE, examples
from tests.support.streams import SOON, until
from tests.support.write_queues import LARGE, Queue, Stream

# ---- order


@settings(PROFILE, max_examples=examples(60))
@given(
    sizes=st.lists(st.sampled_from([0, 9, 3000, 70_000, 300_000, 700_000]), min_size=1, max_size=12),
    rooms=st.lists(st.sampled_from([0, 1, 13, 5000, 66_000, 300_000]), max_size=12),
)
def test_whatever_the_stream_takes_at_a_time_all_arrives_and_what_is_small_in_order(
    sizes: list[int], rooms: list[int]
) -> None:
    queue, left = Queue(room=0), deque(rooms)
    for number, size in enumerate(sizes):
        queue.send(number, size)
        if left:
            queue.give_room(left.popleft())
    queue.give_room()
    frames = queue.arrived()
    assert sorted(frame.call_id for frame in frames) == list(range(len(sizes)))
    assert all(frame.buffers == [bytes([frame.call_id]) * sizes[frame.call_id]] for frame in frames)
    small = [number for number in queue.numbers() if sizes[number] <= 70_000]
    assert small == sorted(small)
    assert not queue.queue
    assert queue.stream.writer is None


@pytest.mark.parametrize("where", ["a finalizer", "another thread"])
@pytest.mark.parametrize("outer", [10, 100_000, LARGE])
@pytest.mark.parametrize("inner", [10, 100_000, LARGE])
def test_what_is_sent_while_a_thread_writes_is_not_cut_in_and_not_forgotten(
    where: str, outer: int, inner: int
) -> None:
    queue = Queue()

    def send_too() -> None:
        if where == "a finalizer":
            queue.send(2, inner)
            return
        thread = threading.Thread(target=queue.send, args=(2, inner))
        thread.start()
        thread.join(SOON)

    queue.stream.within = send_too
    queue.send(1, outer)
    queue.give_room()
    assert sorted(queue.numbers()) == [1, 2]
    assert not queue.queue


def test_while_the_stream_takes_nothing_only_the_loop_writes() -> None:
    queue = Queue(room=5)
    queue.send(1)
    queue.stream.room = 1000
    queue.send(2)
    assert queue.numbers() == []
    queue.give_room()
    assert queue.numbers() == [1, 2]


def test_the_loop_leaves_to_a_thread_that_has_the_lock_what_it_finds_it_writing() -> None:
    queue = Queue(room=5)
    queue.send(1)
    queue.loop.run()
    writer = queue.stream.writer
    assert writer is not None
    with queue.queue.lock:
        writer()
        assert queue.stream.writer is None  # else it would be called again and again
    queue.stream.room = 1000
    queue.queue.drain()
    assert queue.numbers() == [1]


# ---- coalescing


def test_coalesced_frames_leave_together_when_the_loop_gets_round_to_it() -> None:
    queue = Queue()
    for number in range(10):
        queue.coalesce(number)
    assert queue.stream.writes == []
    queue.loop.run()
    assert queue.numbers() == list(range(10))
    assert len(queue.stream.writes) == 1
    queue.coalesce(10)
    queue.loop.run()
    assert queue.numbers()[-1] == 10


def test_some_tens_do_not_wait_for_the_loop() -> None:
    queue = Queue()
    for number in range(64):
        queue.coalesce(number)
    assert queue.numbers() == list(range(64))


@pytest.mark.parametrize("size", [None, 10, 100_000, LARGE])
def test_a_flush_or_a_frame_that_is_sent_takes_them_along(size: int | None) -> None:
    queue = Queue()
    queue.coalesce(1)
    if size is None:
        queue.queue.drain()
    else:
        queue.send(2, size)
        queue.give_room()
    assert queue.numbers() == [1, 2][: 1 if size is None else 2]


# ---- large messages


def test_small_messages_overtake_large_ones_which_take_turns() -> None:
    queue = Queue(room=100_000)
    queue.send(1, LARGE)
    queue.send(2, LARGE // 4)
    for number in range(3, 50):
        queue.send(number)
    queue.give_room()
    assert queue.numbers() == [*range(3, 50), 2, 1]


def test_a_thread_leaves_the_rest_of_a_large_message_to_the_loop() -> None:
    queue = Queue()
    queue.send(1, 8 * LARGE)
    assert queue.numbers() == []
    assert sum(queue.stream.writes) < 2 * LARGE
    queue.give_room()
    assert queue.numbers() == [1]


def test_after_something_small_chunks_are_short() -> None:
    queue = Queue(room=1000)
    queue.send(1, 8 * CHUNK_BYTES)
    queue.send(2)
    queue.give_room()
    assert max(queue.stream.writes[2:]) < CHUNK_BYTES


def test_after_something_small_that_is_patient_chunks_are_long() -> None:
    queue = Queue(room=1000)
    queue.send(1, 8 * CHUNK_BYTES)
    queue.queue.send_small(b"".join(encode(Kind.CALL, 2, {}, [b"x"])[0]), 0, patient=True)
    queue.give_room()
    assert sum(count >= CHUNK_BYTES for count in queue.stream.writes) >= 6
    assert sorted(queue.numbers()) == [1, 2]


@pytest.mark.parametrize("size", [10, 300_000, LARGE])
def test_the_last_frame_is_last(size: int) -> None:
    queue = Queue(room=100)
    queue.send(1, LARGE)
    queue.send(9, size, last=True)
    queue.send(2, 10)
    queue.give_room()
    assert queue.numbers() == [2, 1, 9]


def test_the_last_frame_does_not_overtake_what_a_thread_has_just_begun_to_send() -> None:
    queue = Queue()
    queue.stream.within = lambda: queue.send(9, last=True)
    queue.send(1, LARGE)
    queue.give_room()
    assert queue.numbers() == [1, 9]


# ---- the memory of callers


@pytest.mark.parametrize("others_wait", [False, True])
@pytest.mark.parametrize(
    ("size", "captured", "is_captured"),
    [
        (100_000, CAPTURED_BYTES, True),
        (CAPTURED_BYTES, CAPTURED_BYTES, True),
        (LARGE, CAPTURED_BYTES, False),
        (LARGE, CAPTURE_ALL, True),
    ],
)
def test_memory_may_change_once_it_is_sent_unless_it_is_long(
    size: int, captured: int, is_captured: bool, others_wait: bool
) -> None:
    queue = Queue(room=5000, captured=captured)
    if others_wait:
        queue.send(1, LARGE)
    memory = bytearray(size)
    queue.send_memory(2, memory)
    memory[-1] = 255
    queue.give_room()
    (frame,) = [frame for frame in queue.arrived() if frame.call_id == 2]
    assert frame.buffers[1][-1] == (0 if is_captured else 255)


# ---- the limit


@pytest.mark.parametrize("size", [10, 100_000, LARGE])
def test_a_caller_waits_while_too_much_of_the_kind_is_queued_and_the_loop_does_not(size: int) -> None:
    queue = Queue(room=0, limit=1)
    queue.send(1, size)
    with pytest.raises(QueueFull, match="the peer does not take what is queued for it"):
        queue.send(2, size, wait=0.01)
    queue.send(3, size, wait=0)
    waiting = threading.Thread(target=queue.send, args=(4, size))
    waiting.start()
    until(lambda: queue.told == ["waits"] * 2)
    queue.give_room()
    waiting.join(SOON)
    queue.give_room()
    assert queue.numbers() == [1, 3, 4]


def test_small_messages_do_not_wait_for_the_room_that_large_ones_want() -> None:
    queue = Queue(room=0, limit=LARGE)
    queue.send(1, 2 * LARGE)
    with pytest.raises(QueueFull):
        queue.send(2, 2 * LARGE, wait=0.01)
    queue.send(3, wait=0.01)
    queue.give_room()
    assert queue.numbers() == [3, 1]


@pytest.mark.parametrize("size", [10, LARGE])
def test_who_waits_for_room_is_told_when_it_is_closed(size: int) -> None:
    queue = Queue(room=0, limit=1)
    queue.send(1, size)
    refused: list[ConnectionClosed] = []

    def send() -> None:
        with pytest.raises(ConnectionClosed, match="the connection to the peer is closed") as caught:
            queue.send(2, size)
        refused.append(caught.value)

    waiting = threading.Thread(target=send)
    waiting.start()
    until(lambda: queue.told)
    with queue.queue.lock:
        queue.queue.close()
    waiting.join(SOON)
    assert len(refused) == 1
    assert not queue.queue


# ---- the end


@pytest.mark.parametrize("size", [10, 100_000, LARGE])
@pytest.mark.parametrize("writes", ["caller", "loop"])
def test_after_an_error_the_loop_is_told_once_and_what_is_not_written_remains(size: int, writes: str) -> None:
    queue = Queue(room=0 if writes == "loop" else 1000)
    if writes == "loop":
        queue.send(1, size)
    queue.stream.error = BrokenPipeError(32, "Broken pipe")
    if writes == "caller":
        queue.send(1, size)
    queue.give_room()
    assert queue.told == ["failed"]
    assert queue.queue.error is queue.stream.error
    queue.send(2, size)  # which is not an error: what came before it is still being read
    assert queue.told == ["failed"]
    assert len(queue.queue.remains()) == (0 if size == LARGE else 2)  # for the next connection
    assert not queue.queue.remains()


@pytest.mark.parametrize("size", [10, 100_000, LARGE])
def test_who_waits_until_all_is_written_is_told(size: int) -> None:
    queue = Queue(room=0)
    assert not queue.queue.finish()
    queue.send(1, size)
    assert queue.queue.finish()
    queue.give_room(5)
    assert queue.told == []
    queue.give_room()
    assert queue.told == ["emptied"]
    assert queue.numbers() == [1]


def test_who_waits_until_all_is_written_is_told_though_another_thread_wrote_it() -> None:
    queue = Queue()
    queue.coalesce(1)
    assert queue.queue.finish()
    queue.queue.drain()
    assert queue.stream.writer is not None
    queue.stream.writer()
    assert queue.told == ["emptied"]


def test_when_the_loop_has_ended_nothing_raises() -> None:
    ended = asyncio.new_event_loop()
    ended.close()
    queue = WriteQueue(
        ended, Stream(5), "the peer", 1, CAPTURE_ALL, before_waiting=int, failed=int, emptied=int
    )  # fmt: skip
    queue.send_small(bytes(100), SOON)


# ---- messages that are not acknowledged, and acknowledgements


def full_session() -> Session:
    """One for which a single small message is too much."""
    session, message = Session(), bytes(WHOLE_BYTES)
    for _ in range((64 << 20) // len(message)):
        session.note(message)
    return session


def test_callers_wait_while_too_much_is_not_acknowledged_and_others_do_not() -> None:
    here = Queue()
    session = full_session()
    here.queue.carry(session)
    here.send(1)
    with pytest.raises(QueueFull, match="does not acknowledge what it got: 257 messages"):
        here.send(2, wait=0.01)
    here.send(3, wait=0)
    waiting = threading.Thread(target=here.send, args=(4,))
    waiting.start()
    until(lambda: "waits" in here.told[1:])
    session.acknowledged(2)
    waiting.join(SOON)
    assert here.numbers() == [1, 3, 4]


def test_a_large_message_that_finds_the_connection_broken_is_for_the_next() -> None:
    """Not lost: who resumes after it would not know of it."""
    here, session = Queue(), Session()
    here.queue.carry(session)
    here.stream.error = BrokenPipeError(32, "Broken pipe")
    here.send(1)
    for _ in range(2):
        with pytest.raises(ConnectionClosed):
            here.send(2, LARGE)
        assert not session.large
        here.queue.remains()


def alive(count: int) -> bytes:
    return encode_small(Kind.ALIVE, count, {}, (), 0)


def test_signs_for_who_does_not_read_take_the_place_of_each_other() -> None:
    here = Queue(room=0)
    here.send(1)
    for count in range(1000):
        here.queue.send_unnumbered(alive(count), newest=True)
    here.send(2)
    assert len(here.queue._queue) + len(here.queue._acknowledgement) == 3
    here.give_room()
    assert [frame.call_id for frame in here.arrived() if frame.kind == Kind.ALIVE] == [999]


@pytest.mark.parametrize("begun", [0, 7])
def test_an_acknowledgement_goes_out_before_all_frames_but_the_one_in_progress(begun: int) -> None:
    here = Queue(room=begun)
    for number in (1, 2, 3):
        here.send(number)
    here.queue.send_unnumbered(alive(9), newest=True)
    here.give_room()
    assert here.numbers() == ([1, 9, 2, 3] if begun else [9, 1, 2, 3])


def test_an_acknowledgement_waits_for_no_more_of_a_large_message_than_a_chunk() -> None:
    here = Queue(room=1000)
    here.send(1, 8 * CHUNK_BYTES)
    here.send(2)
    here.queue.send_unnumbered(alive(9), newest=True)
    here.give_room(CHUNK_BYTES + 1000)
    assert here.numbers() == [9, 2]
    here.give_room()
    assert sorted(here.numbers()) == [1, 2, 9]


def test_an_acknowledgement_that_comes_while_a_frame_is_written_is_left_to_its_writer() -> None:
    here = Queue()
    here.stream.within = lambda: here.queue.send_unnumbered(alive(9), newest=True)
    here.queue.send_small(b"".join(encode(Kind.CALL, 1, {}, [b"x"])[0]), SOON)
    assert here.numbers() == [1, 9]


@pytest.mark.parametrize("room", range(1, 100, 7))
def test_a_sign_that_was_begun_to_be_written_is_not_changed(room: int) -> None:
    here = Queue(room=0)
    here.send(1)
    here.queue.send_unnumbered(alive(1), newest=True)
    here.give_room(room)
    here.queue.send_unnumbered(alive(2), newest=True)
    here.give_room()
    said = [frame.call_id for frame in here.arrived() if frame.kind == Kind.ALIVE]
    assert said in ([1, 2], [2])


def test_who_waits_for_acknowledgements_is_told_when_it_is_closed() -> None:
    here, errors = Queue(), list[BaseException]()
    here.queue.carry(full_session())
    here.send(1)

    def send() -> None:
        try:
            here.send(2)
        except ConnectionClosed as error:
            errors.append(error)

    waiting = threading.Thread(target=send)
    waiting.start()
    until(lambda: "waits" in here.told)
    with here.queue.lock:
        here.queue.close()
    waiting.join(SOON)
    assert len(errors) == 1
