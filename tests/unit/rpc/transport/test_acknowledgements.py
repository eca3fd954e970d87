"""What a write queue sends while messages are not acknowledged, and where it sends acknowledgements."""

from __future__ import annotations

import threading

import pytest

from rpc.transport.base import ConnectionClosed, QueueFull
from rpc.transport.session import Session
from rpc.wire.chunking import CHUNK_BYTES, WHOLE_BYTES
from rpc.wire.frames import Kind, encode, encode_small
from tests.support.streams import SOON, until
from tests.support.write_queues import LARGE, Queue


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
