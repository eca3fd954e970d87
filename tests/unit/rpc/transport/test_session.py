"""Sessions: over any number of broken connections, what one end sends the other takes in once, in order."""

from __future__ import annotations

import random

import pytest

from rpc.errors import ProtocolError
from rpc.transport.session import MAX_UNACKNOWLEDGED, SHORT_BYTES, Session


def test_whatever_breaks_each_message_is_taken_in_once_and_in_order() -> None:
    for seed in range(50):
        break_often(seed)


def break_often(seed: int) -> None:
    dice = random.Random(seed)
    session, queue, wire, taken = Session(), list[bytes](), list[bytes](), list[bytes]()
    made = 0
    for _ in range(500):
        match dice.randrange(5):
            case 0:
                queue.append(b"%d" % made)
                made += 1
            case 1 if queue:
                session.note(queue[0])
                wire.append(queue.pop(0))
            case 2 if wire:
                taken.append(wire.pop(0))
            case 3:
                session.acknowledged(dice.randint(0, len(taken)))
            case 4 if dice.random() < 0.1:  # the connection breaks, with all that is on its way
                wire.clear()
                queue = session.resume(len(taken), queue)
    taken += session.resume(len(taken), queue)
    assert taken == [b"%d" % number for number in range(made)]


def test_an_acknowledgement_may_come_before_its_writer_has_noted_the_message() -> None:
    session = Session()
    session.note(b"1")
    session.acknowledged(2)
    session.note(b"2")
    session.acknowledged(2)
    assert session.resume(2, [b"3"]) == [b"3"]


def test_large_messages_are_lost_that_began_on_an_earlier_connection_and_have_not_arrived() -> None:
    session = Session()
    session.connections = 1
    arrived, _ = session.begin_large(b"a"), session.begin_large(b"b")
    session.large.pop(arrived)
    session.connections = 2
    session.begin_large(b"c")
    assert session.take_lost() == [b"b"]
    assert session.take_lost() == []


def broken_after(*sent: bytes) -> Session:
    session = Session()
    for message in sent:
        session.note(message)
    return session


def test_a_message_that_arrived_before_its_writer_was_told_is_not_sent_again() -> None:
    """As with TLS, which takes several at once, and may have written only the first when the link breaks."""
    session = broken_after(b"1")
    assert session.resume(2, [b"2", b"3"]) == [b"3"]
    assert session.first == 2


@pytest.mark.parametrize("count", [0, 4])
def test_a_count_that_cannot_be_is_refused(count: int) -> None:
    session = broken_after(b"1", b"2")
    session.acknowledged(1)
    with pytest.raises(ProtocolError, match="it has taken in"):
        session.resume(count, [b"3"])


@pytest.mark.parametrize("size", [0, 1 << 18], ids=["many messages", "large ones"])
def test_what_is_kept_is_bounded_and_an_acknowledgement_makes_room(size: int) -> None:
    session, told = Session(), list[str]()
    session.got_room = lambda: told.append("room")
    message = bytes(size)
    while not session.is_full():
        assert told == []
        session.note(message)
    assert session.kept - MAX_UNACKNOWLEDGED <= max(size, SHORT_BYTES)
    session.note(message)
    session.acknowledged(len(session.sent) // 2)
    session.note(message)
    session.acknowledged(session.first + 1)
    assert told == ["room"]
    assert session.kept < 0.6 * MAX_UNACKNOWLEDGED


def test_what_is_sent_again_counts_once() -> None:
    session = broken_after(bytes(100), bytes(100))
    for message in session.resume(1, [bytes(100)]):
        session.note(message)
    session.acknowledged(3)
    assert session.kept == 0
