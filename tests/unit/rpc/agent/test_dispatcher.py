"""What comes of a large message that was lost is said by handlers; other messages cannot be done without."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from rpc.agent.calls import PendingCall
from rpc.agent.dispatcher import Dispatcher
from rpc.errors import ProtocolError
from rpc.runtime.events import Events
from rpc.runtime.loop import LoopThread
from rpc.serialization.serializer import Serializer
from rpc.wire.frames import Frame, Kind, encode
from rpc.wire.reassembly import NoMemory
from tests.support.clockwork import Clockwork
from tests.support.inline_end import ANYWHERE, ON_LOOP, End
from tests.support.members import peer
from tests.support.streams import Sockets

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


def test_references_in_a_message_that_cannot_be_handled_are_adopted() -> None:
    """Otherwise the sender would keep its references for ever."""
    desk, sender = Desk(MemoryError()), peer()
    arrived: list[Any] = []

    def adopt(header: dict[str, Any], source: Any) -> None:
        arrived.append(header)

    desk.dispatcher._adopt = adopt
    desk.dispatcher._brings_nothing = lambda header: not header
    desk.dispatcher.frames_received(sender, [Frame(Kind.CALL, 7, {"refs": [1]}, [])])
    assert arrived == [{"refs": [1]}]
    assert desk.found == ["request 7"]


# ---- frames that come in


@pytest.fixture
def end(loop: LoopThread, sockets: Sockets) -> Iterator[End]:
    made = End(loop, sockets())
    yield made
    made.close()


def both_ways(end: End, frames: list[Frame]) -> Iterator[None]:
    """Takes the frames in on the loop's thread, and then on this one."""
    end.loop.call(end.dispatcher.frames_received, end.peer, list(frames))
    yield
    end.dispatcher.take_inline(end.peer, list(frames))
    yield


def test_a_kind_has_one_handler(end: End) -> None:
    for kind in (Kind.CALL, Kind.REPLY, Kind.FAILURE, ON_LOOP):
        with pytest.raises(ValueError, match=f"message kind {kind} is taken"):
            end.dispatcher.on(kind, lambda peer, frame: None)
        with pytest.raises(ValueError, match=f"message kind {kind} is taken"):
            end.dispatcher.unwrap(kind, lambda peer, frame: frame)


def test_an_answer_to_a_call_that_another_worker_got_is_malformed_and_the_call_goes_on(end: End) -> None:
    call = end.agent.calls.open(peer("other"), "what", 0, PendingCall)
    frames = [Frame(Kind.REPLY, call.call_id, {}, [b""]), Frame(ANYWHERE, 2, {}, [])]
    for count, _ in enumerate(both_ways(end, frames), 1):
        assert len(end.agent.lost) == count
        assert "an answer to a call that worker 'other' got" in end.agent.lost[-1]
    assert end.taken == [], "what follows it is not handled"
    assert not call.done()
    assert list(end.agent.calls.waiting()) == [call]


def test_what_a_frame_stands_for_is_taken_in_instead(end: End) -> None:
    end.dispatcher.unwrap(77, lambda peer, frame: frame._replace(kind=frame.buffers[0][0]))
    frames = [Frame(77, 1, {}, [bytes([ANYWHERE])]), Frame(77, 2, {}, [bytes([ON_LOOP])])]
    left = list(frames)
    assert end.dispatcher.take_inline(end.peer, left) is None
    assert (end.taken, [frame.kind for frame in left]) == ([1], [ON_LOOP])
    end.loop.call(end.dispatcher.frames_received, end.peer, left + frames)
    assert end.taken == [1, 2, 1, 2]
