"""Control messages: in one frame where they come together, acknowledged, repeated, and never for the dead."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from rpc.errors import ProtocolError, WorkerLostError
from rpc.group.control import Control
from rpc.group.delivery import ACK_DELAY, RESEND_FIRST
from rpc.runtime.mailbox import Mailbox
from rpc.transport import INFINITE
from rpc.wire.frames import Frame, Kind, decode_one
from tests.support.clockwork import Clockwork


class Worker:
    """A worker's control messages: what it has heard, and whom it has lost."""

    def __init__(self, name: str, clockwork: Clockwork) -> None:
        self.name = name
        self.lost: list[tuple[str, str]] = []
        self.heard: list[tuple[str, Any]] = []
        loop: Any = clockwork
        self.control = Control(loop, Mailbox(loop), self.lose)
        self.control.on("news", lambda peer, body: self.heard.append((peer.name, body)))

    def lose(self, peer: Any, reason: str) -> None:
        self.lost.append((peer.name, reason))
        peer.lost = reason
        self.control.forget(peer)


class Road:
    """What one worker sees of another: frames travel when the test says, or not at all."""

    is_self = False

    def __init__(self, name: str) -> None:
        self.name = name
        self.lost: str | None = None
        self.frames: list[Frame] = []

    def send(
        self, buffers: Sequence[Any], size: int, *, aliased: bool = False, wait: float = INFINITE
    ) -> None:
        assert not wait, "the loop never waits"
        if self.lost:
            raise WorkerLostError("it is gone", self.name, self.lost)
        self.frames.append(decode_one(bytearray().join(buffers)))

    def deliver(self, to: Control, sender: Road) -> int:
        """Let everything arrive; returns how many frames it was."""
        frames, self.frames = self.frames, []
        for frame in frames:
            assert frame.kind == Kind.CONTROL
            to.received(sender, frame)  # type: ignore[arg-type]
        return len(frames)


class Own(Road):
    """The worker itself, as a peer."""

    is_self = True


@pytest.fixture
def clockwork(monkeypatch: pytest.MonkeyPatch) -> Clockwork:
    made = Clockwork()

    class Time:
        monotonic = staticmethod(lambda: made.now)

    monkeypatch.setattr("rpc.group.control.time", Time)
    return made


@pytest.fixture
def here(clockwork: Clockwork) -> Worker:
    return Worker("here", clockwork)


@pytest.fixture
def there(clockwork: Clockwork) -> Worker:
    return Worker("there", clockwork)


@pytest.fixture
def to_there() -> Any:
    return Road("there")


@pytest.fixture
def to_here() -> Any:
    return Road("here")


def test_messages_that_come_together_travel_in_one_frame(
    clockwork: Clockwork, here: Worker, there: Worker, to_there: Any, to_here: Any
) -> None:
    for number in range(100):
        here.control.post(to_there, "news", number)
    clockwork.advance(0)
    assert to_there.deliver(there.control, to_here) == 1
    assert there.heard == [("here", number) for number in range(100)]
    assert here.control.posted == 100


def test_an_acknowledgement_travels_alone_only_where_nothing_else_does(
    clockwork: Clockwork, here: Worker, there: Worker, to_there: Any, to_here: Any
) -> None:
    here.control.post(to_there, "news", 1)
    clockwork.advance(0)
    to_there.deliver(there.control, to_here)
    assert here.control.unacknowledged() == 1
    clockwork.advance(ACK_DELAY * 0.9)
    assert to_here.frames == []
    clockwork.advance(ACK_DELAY * 0.2)
    assert to_here.deliver(here.control, to_there) == 1
    assert here.control.unacknowledged() == 0
    there.control.post(to_here, "news", 2)  # an answer carries the acknowledgement
    here.control.post(to_there, "news", 3)
    clockwork.advance(0)
    to_there.deliver(there.control, to_here)
    there.control.post(to_here, "news", 4)
    clockwork.advance(0)
    to_here.deliver(here.control, to_there)
    assert here.control.unacknowledged() == 0


def test_what_is_not_acknowledged_is_sent_again_until_it_is(
    clockwork: Clockwork, here: Worker, there: Worker, to_there: Any, to_here: Any
) -> None:
    here.control.post(to_there, "news", 1)
    clockwork.advance(0)
    to_there.frames.clear()  # lost
    clockwork.advance(RESEND_FIRST * 1.01)
    assert to_there.deliver(there.control, to_here) == 1
    clockwork.advance(ACK_DELAY)
    to_here.frames.clear()  # the acknowledgement is lost
    clockwork.advance(RESEND_FIRST * 3)
    assert to_there.deliver(there.control, to_here) >= 1
    assert there.heard == [("here", 1)]  # once
    clockwork.advance(ACK_DELAY)
    assert to_here.deliver(here.control, to_there) == 1
    assert here.control.unacknowledged() == 0


def test_an_idle_link_sets_no_timer(
    clockwork: Clockwork, here: Worker, there: Worker, to_there: Any, to_here: Any
) -> None:
    here.control.post(to_there, "news", 1)
    clockwork.advance(0)
    to_there.deliver(there.control, to_here)
    clockwork.advance(ACK_DELAY * 1.01)
    to_here.deliver(here.control, to_there)
    clockwork.advance(60)
    assert clockwork.ringing() == []
    assert to_there.frames == to_here.frames == []


def test_a_worker_can_send_to_itself_without_a_frame(clockwork: Clockwork, here: Worker) -> None:
    own: Any = Own("here")
    here.control.post(own, "news", [1, "two"])
    assert here.heard == []  # not before the loop gets to it
    clockwork.advance(0)
    assert here.heard == [("here", [1, "two"])]
    assert own.frames == []


def test_messages_for_a_gone_worker_are_dropped(clockwork: Clockwork, here: Worker, to_there: Any) -> None:
    here.control.post(to_there, "news", 1)
    clockwork.advance(0)
    assert here.control.unacknowledged() == 1
    here.lose(to_there, "it died")
    here.control.post(to_there, "news", 2)
    clockwork.advance(60)
    assert here.control.unacknowledged() == 0
    assert len(to_there.frames) == 1
    assert clockwork.ringing() == []


def test_a_worker_that_goes_while_its_messages_are_being_sent_is_no_error(
    clockwork: Clockwork, here: Worker, to_there: Any
) -> None:
    here.control.post(to_there, "news", 1)
    to_there.lost = None
    clockwork.soon, pending = [], clockwork.soon
    for callback in pending:
        callback()  # queued, not yet sent
    to_there.lost = "it died just now"
    clockwork.advance(0)
    assert here.lost == []
    here.control.forget(to_there)
    clockwork.advance(60)
    assert clockwork.ringing() == []


def test_a_message_that_cannot_be_sent_loses_its_receiver_and_nobody_else(
    clockwork: Clockwork, here: Worker, there: Worker, to_there: Any, to_here: Any
) -> None:
    other: Any = Road("other")
    here.control.post(to_there, "news", object())
    here.control.post(other, "news", 1)
    clockwork.advance(60)
    ((name, reason),) = here.lost
    assert name == "there"
    assert reason.startswith("a control message to it cannot be sent: ")
    assert to_there.frames == []
    assert other.deliver(there.control, to_here) >= 1
    assert there.heard == [("here", 1)]


def test_texts_need_not_be_valid_unicode(
    clockwork: Clockwork, here: Worker, there: Worker, to_there: Any, to_here: Any
) -> None:
    here.control.post(to_there, "news", "lone \udcff surrogate")
    clockwork.advance(0)
    to_there.deliver(there.control, to_here)
    assert there.heard == [("here", "lone \udcff surrogate")]


def test_a_topic_belongs_to_one_handler(here: Worker) -> None:
    with pytest.raises(ValueError, match="topic 'news' is taken"):
        here.control.on("news", lambda peer, body: None)


@pytest.mark.parametrize(
    "message", [["gossip", 1], ["news"], ["news", 1, 2], [1, 1], "news", None, {"news": 1}], ids=str
)
def test_a_message_that_nobody_follows_or_that_cannot_be_is_a_violation(
    here: Worker, to_there: Any, message: object
) -> None:
    with pytest.raises(ProtocolError, match="control message"):
        here.control.received(to_there, Frame(Kind.CONTROL, 0, {"batch": [0, [], 1, [message]]}, []))


@pytest.mark.parametrize(
    "header", [{}, {"batch": None}, {"batch": [0, [], 1]}, {"batch": [5, [], 1, []]}], ids=str
)
def test_a_batch_that_cannot_be_is_a_violation(here: Worker, to_there: Any, header: dict[str, Any]) -> None:
    with pytest.raises(ProtocolError, match="a batch of control messages that cannot be"):
        here.control.received(to_there, Frame(Kind.CONTROL, 0, header, []))
