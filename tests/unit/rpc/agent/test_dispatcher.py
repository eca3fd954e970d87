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
from tests.support.members import peer

PEER: Any = SimpleNamespace(name="worker1")


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
        Serializer(), Events(), activity, list, lambda peer, _: found.append(f"{peer.name} is lost")
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


@pytest.mark.parametrize("lacks", FAILURES)
@pytest.mark.parametrize("inline", [False, True], ids=["on the loop", "on a reading thread"])
def test_a_worker_that_lacks_resources_drops_the_message_and_cuts_nobody_off(
    lacks: str, inline: bool
) -> None:
    found: list[Any] = []

    def handle(_: Any, frame: Frame) -> None:
        if frame.call_id == 7:
            raise FAILURES[lacks]
        found.append(f"handled {frame.call_id}")

    activity: Any = SimpleNamespace(listener=None)
    dispatcher = Dispatcher(Serializer(), Events(), activity, list, lambda *_: found.append("lost"))
    for kind in (Kind.CALL, Kind.REPLY, Kind.BULK):
        dispatcher.on(kind, handle, any_thread=True)
    dispatcher.on_failed((Kind.REPLY,), lambda _, call_id, error: found.append(("answer", call_id, error)))
    dispatcher.on_failed((None,), lambda _, call_id, error: found.append(("request", call_id, error)))
    sender = peer()
    frames = [Frame(kind, 7, {}, []) for kind in (Kind.CALL, Kind.REPLY, Kind.BULK)]
    frames.append(Frame(Kind.CALL, 8, {}, []))
    if inline:
        dispatcher.take_inline(sender, frames)
    else:
        dispatcher.frames_received(sender, frames)
    assert found == [("request", 7, FAILURES[lacks]), ("answer", 7, FAILURES[lacks]), "handled 8"]
    assert sender.session.received == 4


def test_a_violation_cuts_off_its_sender_and_the_rest_is_not_handled() -> None:
    found: list[str] = []

    def handle(_: Any, frame: Frame) -> None:
        found.append(f"handled {frame.call_id}")
        raise ProtocolError("no such thing")

    activity: Any = SimpleNamespace(listener=None)
    dispatcher = Dispatcher(Serializer(), Events(), activity, list, lambda _, reason: found.append(reason))
    dispatcher.on(Kind.CALL, handle)
    dispatcher.frames_received(peer(), [Frame(Kind.CALL, 7, {}, []), Frame(Kind.CALL, 8, {}, [])])
    assert found == ["handled 7", "it sent a malformed message: no such thing"]
