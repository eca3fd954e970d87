"""What comes of a large message that was lost is said by handlers; other messages cannot be done without."""

from __future__ import annotations

import errno
from types import SimpleNamespace
from typing import Any

import pytest

from rpc.agent.dispatcher import Dispatcher
from rpc.errors import ProtocolError
from rpc.runtime.events import Events
from rpc.serialization.serializer import Serializer
from rpc.wire.frames import Frame, Kind, encode
from rpc.wire.reassembly import NoMemory
from tests.support.clockwork import Clockwork
from tests.support.members import peer

PEER: Any = SimpleNamespace(name="worker1")


def never(_seconds: float, _function: Any) -> None:
    raise AssertionError("nothing is to be done later")


def head(kind: int, call_id: int) -> bytes:
    return bytes(encode(kind, call_id, {}, [b"value"])[0][0])


@pytest.mark.parametrize(
    ("kind", "call_id", "outcome"),
    [(Kind.REPLY, 7, "answer 7"), (Kind.CALL, 8, "request 8"), (Kind.EXTENSION, 0, "worker1 is lost")],
    ids=["an answer", "a request", "what nobody waits for"],
)
def test_a_lost_message_goes_to_the_handler_of_its_kind(kind: int, call_id: int, outcome: str) -> None:
    activity: Any = SimpleNamespace(listener=None)
    found: list[str] = []
    dispatcher = Dispatcher(
        Serializer(),
        Events(),
        activity,
        list,
        lambda peer, _: found.append(f"{peer.name} is lost"),
        never,
    )
    dispatcher.on_lost((Kind.REPLY,), lambda _, call_id, __: found.append(f"answer {call_id}"))
    dispatcher.on_lost((None,), lambda _, call_id, __: found.append(f"request {call_id}"))
    dispatcher.message_lost(PEER, head(kind, call_id))
    assert found == [outcome]


FAILURES: dict[str, Exception] = {
    "memory": MemoryError(),
    "a message's memory": NoMemory("there is no memory for a frame"),
    "descriptors": OSError(errno.EMFILE, "Too many open files"),
    "a thread": RuntimeError("can't start new thread"),
}


class Desk:
    """A dispatcher whose handlers fail as often as the test says, for one call id."""

    def __init__(self, *failures: Exception) -> None:
        self.found: list[Any] = []
        self.clockwork = Clockwork()
        self._failures = list(failures)
        activity: Any = SimpleNamespace(listener=None)
        self.dispatcher = Dispatcher(
            Serializer(),
            Events(),
            activity,
            self.found.extend,
            lambda _, reason: self.found.append(reason),
            self.clockwork.call_later,
        )
        for kind in (Kind.CALL, Kind.REPLY, Kind.CONTROL, Kind.BULK):
            self.dispatcher.on(kind, self._handle, any_thread=True)
        self.dispatcher.on_failed(
            (Kind.REPLY,), lambda _, call_id, __: self.found.append(f"answer {call_id}")
        )
        self.dispatcher.on_failed((None,), lambda _, call_id, __: self.found.append(f"request {call_id}"))

    def _handle(self, _: Any, frame: Frame) -> None:
        if frame.call_id in (0, 7) and self._failures:
            raise self._failures.pop(0)
        self.found.append((frame.kind, frame.call_id))


@pytest.mark.parametrize("lacks", FAILURES)
@pytest.mark.parametrize("inline", [False, True], ids=["on the loop", "on a reading thread"])
def test_a_worker_that_lacks_resources_cuts_nobody_off_and_what_has_no_answer_is_handled_later(
    lacks: str, inline: bool
) -> None:
    desk, sender = Desk(*[FAILURES[lacks]] * 5), peer()
    numbers = {Kind.CALL: 7, Kind.REPLY: 7, Kind.CONTROL: 0, Kind.BULK: 7}
    frames = [Frame(kind, number, {}, []) for kind, number in numbers.items()]
    frames.append(Frame(Kind.CALL, 8, {}, []))
    if inline:
        desk.dispatcher.take_inline(sender, frames)
    else:
        desk.dispatcher.frames_received(sender, frames)
    assert desk.found == ["request 7", "answer 7", (Kind.CALL, 8)]
    assert sender.session.received == len(numbers) + 1
    del desk.found[:]
    desk.clockwork.advance(1)
    assert sorted(desk.found) == [(Kind.CONTROL, 0), (Kind.BULK, 7)]
    assert sender.session.received == len(numbers) + 1, "they were received once"


@pytest.mark.parametrize(
    ("failures", "reason"),
    [
        ([MemoryError("none left")] * 1000, "MemoryError: none left"),
        ([KeyError("key")], "KeyError: 'key'"),
        ([MemoryError(), ProtocolError("it comes twice")], "ProtocolError: it comes twice"),
    ],
    ids=["there is no memory for long", "a defect", "half of it was done"],
)
def test_a_worker_that_cannot_handle_what_has_no_answer_cuts_off_its_sender_and_says_that_it_has_failed(
    failures: list[Exception], reason: str
) -> None:
    desk = Desk(*failures)
    desk.dispatcher.frames_received(peer(), [Frame(Kind.CONTROL, 0, {}, [])])
    desk.clockwork.advance(10)
    assert desk.found == [f"this worker could not handle a message from it: {reason}"]
    assert not desk.clockwork.ringing()


def test_a_message_of_a_worker_that_is_lost_meanwhile_is_not_handled_later() -> None:
    desk, sender = Desk(MemoryError()), peer()
    desk.dispatcher.frames_received(sender, [Frame(Kind.CONTROL, 0, {}, [])])
    sender.gone("it is dead")
    desk.clockwork.advance(10)
    assert not desk.found


def test_references_in_a_message_that_cannot_be_handled_are_adopted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the sender would keep its references for ever."""
    desk, sender = Desk(MemoryError()), peer()
    arrived: list[Any] = []
    monkeypatch.setattr(desk.dispatcher, "_adopt", lambda header, _: arrived.append(header))
    monkeypatch.setattr(desk.dispatcher, "_brings_nothing", lambda header: not header)
    desk.dispatcher.frames_received(sender, [Frame(Kind.CALL, 7, {"refs": [1]}, [])])
    assert arrived == [{"refs": [1]}]
    assert desk.found == ["request 7"]


def test_a_violation_cuts_off_its_sender_and_the_rest_is_not_handled() -> None:
    found: list[str] = []

    def handle(_: Any, frame: Frame) -> None:
        found.append(f"handled {frame.call_id}")
        raise ProtocolError("no such thing")

    activity: Any = SimpleNamespace(listener=None)
    dispatcher = Dispatcher(
        Serializer(), Events(), activity, list, lambda _, reason: found.append(reason), never
    )
    dispatcher.on(Kind.CALL, handle)
    dispatcher.frames_received(peer(), [Frame(Kind.CALL, 7, {}, []), Frame(Kind.CALL, 8, {}, [])])
    assert found == ["handled 7", "it sent a malformed message: no such thing"]
