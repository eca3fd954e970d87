"""What a thread that stands by takes in itself, and what it leaves to the loop."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from rpc.agent.dispatcher import Dispatcher
from rpc.agent.idle_reader import Standby
from rpc.bulk.shared_memory.exchange import SharedMemory
from rpc.bulk.shared_memory.packing import Message, pack
from rpc.group.peer import Peer
from rpc.serialization.carriers import Carrier
from rpc.serialization.serializer import Serializer
from rpc.transport.inline_read.reading import DirectReading
from rpc.wire.frames import Frame, Kind

BRINGS = "test-standby"
"""The kind of a carrier: what a header with this key brings, the loop takes in."""

FOR_ANY_THREAD = Kind.EXTENSION
FOR_THE_LOOP = Kind.EXTENSION + 1


@pytest.fixture
def standby() -> Standby:
    agent: Any = SimpleNamespace(serializer=Serializer())
    agent.serializer.register_carrier(SimpleNamespace, cast("Carrier", SimpleNamespace(kind=BRINGS)))
    agent.dispatcher = Dispatcher(agent)
    agent.dispatcher.on(FOR_ANY_THREAD, lambda peer, frame: None, any_thread=True)
    agent.dispatcher.on(FOR_THE_LOOP, lambda peer, frame: None)
    agent.shared_memory = SimpleNamespace(outline=SharedMemory.outline)
    return Standby(agent, cast("Peer", None), cast("DirectReading", None))


def plain(kind: int, header: dict[str, Any]) -> Frame:
    return Frame(kind, 1, header, [b"pickle"])


def in_segment(kind: int, header: dict[str, Any]) -> Frame:
    return Frame(Kind.IN_SEGMENT, 1, {}, [pack(Message(kind, header, 1, 1, [1 << 20], b"pickle"))])


@pytest.mark.parametrize("form", [plain, in_segment])
@pytest.mark.parametrize("kind", [Kind.CALL, FOR_ANY_THREAD])
@pytest.mark.parametrize("header", [{}, {"autograd": [1, 2]}])
def test_requests_are_taken_whatever_their_header_says(
    standby: Standby, form: Any, kind: int, header: dict[str, Any]
) -> None:
    assert standby.takes(form(kind, header))


@pytest.mark.parametrize("form", [plain, in_segment])
@pytest.mark.parametrize(
    ("kind", "header"),
    [
        (Kind.CALL, {BRINGS: []}),
        (FOR_ANY_THREAD, {"autograd": [1, 2], BRINGS: []}),
        (FOR_THE_LOOP, {}),
        (Kind.REPLY, {}),
        (Kind.SEGMENTS, {}),
    ],
)
def test_what_needs_the_loop_is_left_to_it(
    standby: Standby, form: Any, kind: int, header: dict[str, Any]
) -> None:
    assert not standby.takes(form(kind, header))


@pytest.mark.parametrize(
    "frame",
    [
        Frame(Kind.IN_SEGMENT, 1, {}, []),
        Frame(Kind.IN_SEGMENT, 1, {}, [b"", b""]),
        Frame(Kind.IN_SEGMENT, 1, {}, [b"\x00"]),
        in_segment(Kind.IN_SEGMENT, {}),
        Frame(Kind.IN_SEGMENT, 1, {"more": 1}, in_segment(Kind.CALL, {}).buffers),
        Frame(Kind.IN_SEGMENT, 1, {}, [in_segment(Kind.CALL, {"autograd": [1, 2]}).buffers[0][:45]]),
    ],
    ids=[
        "no segment",
        "two segments",
        "too short",
        "in a segment in a segment",
        "with a header",
        "a header that is cut short",
    ],
)
def test_what_is_malformed_is_left_to_the_loop(standby: Standby, frame: Frame) -> None:
    assert not standby.takes(frame)
