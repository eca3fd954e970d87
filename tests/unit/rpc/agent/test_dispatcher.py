"""What comes of a large message that was lost is said by handlers; other messages cannot be done without."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from rpc.agent.dispatcher import Dispatcher
from rpc.runtime.events import Events
from rpc.serialization.serializer import Serializer
from rpc.wire.frames import Kind, encode

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
