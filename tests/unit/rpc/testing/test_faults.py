"""Faults on purpose: which message meets which rule, and what happens to it on a connection."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from rpc.testing.faults import Faults, FaultyConnection, InjectedFaultError
from rpc.testing.memory_transport import MemoryConnection, MemoryNetwork
from rpc.transport.base import ConnectionOwner
from rpc.wire.frames import Kind, encode_small


class Sending:
    """A sender that knows of one call, number 1, and keeps what is for later."""

    to = "there"

    def __init__(self) -> None:
        self.failed: list[BaseException] = []
        self.postponed: list[tuple[float, Callable[[], object]]] = []

    def asked(self, call_id: int) -> str:
        return "work"

    def fail(self, call_id: int, error: BaseException) -> bool:
        if call_id == 1:
            self.failed.append(error)
        return call_id == 1

    def later(self, seconds: float, function: Callable[[], object]) -> None:
        self.postponed.append((seconds, function))


def send(faults: Faults, *frames: bytes) -> tuple[MemoryConnection, Sending]:
    """Send frames with faults, in memory; the other end, and the sender."""
    network, sender = MemoryNetwork(), Sending()
    here, there = MemoryConnection("there", network, ""), MemoryConnection("here", network, "")
    here.other, there.other = there, here
    here.start(ConnectionOwner())
    connection = FaultyConnection.between(here, faults, sender)
    for frame in frames:
        connection.send_small(frame, 0)
    return there, sender


def call(number: int) -> bytes:
    return encode_small(Kind.CALL, number, {}, (b"x",))


def arrived(end: MemoryConnection) -> list[Any]:
    return [None if frame is None else frame.call_id for frame in end.inbox]


def test_a_control_message_is_known_by_its_topic_and_first_word() -> None:
    faults = Faults()
    faults.drop("rref.delete")
    frames = [
        encode_small(Kind.CONTROL, number, {"batch": [0, [["rref", [word, [1, 2]]]]]}, ())
        for number, word in enumerate(("confirm", "delete", "accepted"), 1)
    ]
    assert arrived(send(faults, *frames)[0]) == [1, 3]


def test_what_is_late_is_overtaken_and_what_is_doubled_comes_twice() -> None:
    faults = Faults()
    faults.delay("call", seconds=2, times=1)
    faults.duplicate("call", times=1)
    there, sender = send(faults, *map(call, (1, 2, 3)))
    assert arrived(there) == [2, 2, 3]
    ((seconds, late),) = sender.postponed
    assert seconds == 2
    late()
    assert arrived(there) == [2, 2, 3, 1]


def test_the_first_messages_may_be_let_through() -> None:
    faults = Faults()
    lost = faults.drop("call", skip=2, times=1)
    assert arrived(send(faults, *map(call, (1, 2, 3, 4)))[0]) == [1, 2, 4]
    assert lost.struck == 1


def test_what_relies_on_sessions_is_never_doubled() -> None:
    faults = Faults()
    doubled = faults.duplicate()
    there, _ = send(faults, encode_small(Kind.CONTROL, 7, {"batch": [0, []]}, ()), call(1))
    assert arrived(there) == [7, 1, 1]
    assert doubled.struck == 2


def test_a_request_that_fails_ends_and_what_has_no_answer_is_sent_again() -> None:
    faults = Faults()
    faults.fail(attempts=3)
    there, sender = send(faults, call(1), encode_small(Kind.CONTROL, 0, {"batch": [0, []]}, ()))
    assert arrived(there) == []
    assert [type(error) for error in sender.failed] == [InjectedFaultError]
    ((seconds, again),) = sender.postponed
    assert seconds == pytest.approx(0.05 * (1 + 2 + 4))
    again()
    assert arrived(there) == [0]


def test_a_connection_is_cut_in_place_of_a_message() -> None:
    faults = Faults()
    faults.cut("call")
    there, sender = send(faults, call(1))
    ((_, cut),) = sender.postponed
    cut()
    assert arrived(there) == [None]
