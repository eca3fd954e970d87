"""Control messages: in one frame where they come together, acknowledged, and never for the dead."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from rpc.errors import ProtocolError, WorkerLostError
from rpc.group.control import ACK_EVERY, ACK_SECONDS, BATCH_MOST, Control
from rpc.runtime.mailbox import Mailbox
from rpc.transport.base import INFINITE
from rpc.wire.frames import Frame, Kind, decode_one
from tests.support.clockwork import Clockwork


class Road:
    """What one worker sees of another: frames travel when the test says."""

    def __init__(self, name: str, *, is_self: bool = False) -> None:
        self.name = name
        self.is_self = is_self
        self.lost: str | None = None
        self.frames: list[Frame] = []

    def send(
        self, buffers: Sequence[Any], size: int, *, aliased: bool = False, wait: float = INFINITE
    ) -> None:
        assert not wait, "the loop never waits"
        if self.lost:
            raise WorkerLostError("it is gone", self.name, self.lost)
        self.frames.append(decode_one(bytearray().join(buffers)))


class Worker:
    """A worker's control messages: what it has heard, and whom it has lost."""

    def __init__(self, name: str, clockwork: Clockwork) -> None:
        self.lost: list[tuple[str, str]] = []
        self.heard: list[tuple[str, Any]] = []
        self.seen_as: Any = Road(name)
        """How the other sees it."""
        loop: Any = clockwork
        self.control = Control(loop, Mailbox(loop), self.lose)
        self.control.on("news", lambda peer, body: self.heard.append((peer.name, body)))

    def lose(self, peer: Any, reason: str) -> None:
        self.lost.append((peer.name, reason))
        peer.lost = reason
        self.control.forget(peer)

    def receive(self, sender: Worker) -> int:
        """Let everything arrive that was sent to this worker; returns how many frames it was."""
        frames, self.seen_as.frames = self.seen_as.frames, []
        for frame in frames:
            assert frame.kind == Kind.CONTROL
            self.control.received(sender.seen_as, frame)
        return len(frames)


@pytest.fixture
def clockwork() -> Clockwork:
    return Clockwork()


@pytest.fixture
def here(clockwork: Clockwork) -> Worker:
    return Worker("here", clockwork)


@pytest.fixture
def there(clockwork: Clockwork) -> Worker:
    return Worker("there", clockwork)


def test_an_acknowledgement_travels_alone_only_where_nothing_else_does(
    clockwork: Clockwork, here: Worker, there: Worker
) -> None:
    here.control.post(there.seen_as, "news", 1)
    clockwork.advance(0)
    there.receive(here)
    assert here.control.unacknowledged() == 1
    clockwork.advance(ACK_SECONDS * 0.9)
    assert here.receive(there) == 0
    clockwork.advance(ACK_SECONDS * 0.2)
    assert here.receive(there) == 1
    assert here.control.unacknowledged() == 0
    here.control.post(there.seen_as, "news", 3)
    clockwork.advance(0)
    there.receive(here)
    there.control.post(here.seen_as, "news", 4)  # carries the acknowledgement
    clockwork.advance(0)
    here.receive(there)
    assert here.control.unacknowledged() == 0


def test_a_worker_can_send_to_itself_without_a_frame(clockwork: Clockwork, here: Worker) -> None:
    own: Any = Road("here", is_self=True)
    here.control.post(own, "news", [1, "two"])
    assert here.heard == []  # not before the loop gets to it
    clockwork.advance(0)
    assert here.heard == [("here", [1, "two"])]
    assert own.frames == []


def test_messages_for_a_gone_worker_are_dropped(clockwork: Clockwork, here: Worker, there: Worker) -> None:
    here.control.post(there.seen_as, "news", 1)
    clockwork.advance(0)
    assert here.control.unacknowledged() == 1
    here.lose(there.seen_as, "it died")
    here.control.post(there.seen_as, "news", 2)
    clockwork.advance(60)
    assert here.control.unacknowledged() == 0
    assert there.receive(here) == 1


def test_a_worker_that_goes_while_its_messages_are_being_sent_is_no_error(
    clockwork: Clockwork, here: Worker, there: Worker
) -> None:
    here.control.post(there.seen_as, "news", 1)
    clockwork.soon, pending = [], clockwork.soon
    for callback in pending:
        callback()  # queued, not yet sent
    there.seen_as.lost = "it died just now"
    clockwork.advance(60)
    assert here.lost == []


def test_a_topic_belongs_to_one_handler(here: Worker) -> None:
    with pytest.raises(ValueError, match="topic 'news' is taken"):
        here.control.on("news", lambda peer, body: None)


@pytest.mark.parametrize(
    "message", [["gossip", 1], ["news"], ["news", 1, 2], [1, 1], "news", None, {"news": 1}], ids=str
)
def test_a_message_that_nobody_follows_or_that_cannot_be_is_a_violation(
    here: Worker, there: Worker, message: object
) -> None:
    with pytest.raises(ProtocolError, match="control message"):
        here.control.received(there.seen_as, Frame(Kind.CONTROL, 0, {"batch": [0, [message]]}, []))


def test_an_acknowledgement_of_many_messages_does_not_wait(
    clockwork: Clockwork, here: Worker, there: Worker
) -> None:
    for number in range(ACK_EVERY):
        here.control.post(there.seen_as, "news", number)
    clockwork.advance(0)
    there.receive(here)
    clockwork.advance(0)
    assert here.receive(there) == 1
    assert here.control.unacknowledged() == 0


def test_more_messages_than_a_frame_may_have_go_in_several(
    clockwork: Clockwork, here: Worker, there: Worker
) -> None:
    for number in range(BATCH_MOST + 1):
        here.control.post(there.seen_as, "news", number)
    clockwork.advance(0)
    assert there.receive(here) == 2
    assert there.heard == [("here", number) for number in range(BATCH_MOST + 1)]


def test_a_large_batch_that_is_overtaken_does_not_take_an_acknowledgement_back(
    clockwork: Clockwork, here: Worker, there: Worker
) -> None:
    here.control.post(there.seen_as, "news", 1)
    here.control.post(there.seen_as, "news", 2)
    clockwork.advance(0)
    for acknowledged in (2, 0):
        here.control.received(there.seen_as, Frame(Kind.CONTROL, 0, {"batch": [acknowledged, []]}, []))
    assert here.control.unacknowledged() == 0


@pytest.mark.parametrize(
    "batch",
    [
        *(None, [], 7, {"0": 1}, [0], [0, [], 5], [0, "abc"], ["0", []], [-1, []]),
        [3, []],  # acknowledges what was never sent
        [0, [["news", 1]] * (BATCH_MOST + 1)],
    ],
    ids=lambda batch: str(batch)[:20],
)
def test_a_malformed_batch_is_refused_whole(
    clockwork: Clockwork, here: Worker, there: Worker, batch: object
) -> None:
    here.control.post(there.seen_as, "news", 1)
    here.control.post(there.seen_as, "news", 2)
    clockwork.advance(0)
    here.control.post(there.seen_as, "news", 3)  # still here
    with pytest.raises(ProtocolError, match="malformed batch"):
        here.control.received(there.seen_as, Frame(Kind.CONTROL, 0, {"batch": batch}, []))
    assert here.heard == []
    clockwork.advance(0)
    assert here.control.unacknowledged() == 3


def test_messages_that_could_not_be_handled_are_left_in_their_frame_and_only_the_others_are_acknowledged(
    clockwork: Clockwork, here: Worker, there: Worker
) -> None:
    failures = [MemoryError(), MemoryError()]

    def scarce(_: Any, body: Any) -> None:
        if body == 1 and failures:
            raise failures.pop()
        there.heard.append(("scarce", body))

    there.control.on("scarce", scarce)
    for topic in ("news", "scarce", "news", "scarce", "scarce"):
        here.control.post(there.seen_as, topic, len(here.heard))
        here.heard.append(("posted", topic))
    clockwork.advance(0)
    (frame,) = there.seen_as.frames
    numbers = [body for _, body in frame.header["batch"][1]]
    assert numbers == [0, 1, 2, 3, 4]
    for _ in range(2):
        with pytest.raises(MemoryError):
            there.control.received(here.seen_as, frame)
    assert frame.header["batch"][1] == [["scarce", 1], ["scarce", 3], ["scarce", 4]]
    clockwork.advance(ACK_SECONDS)
    here.receive(there)
    assert here.control.unacknowledged(), "a shutdown waits for them"
    there.control.received(here.seen_as, frame)
    assert there.heard == [("here", 0), ("here", 2), ("scarce", 1), ("scarce", 3), ("scarce", 4)]
    clockwork.advance(ACK_SECONDS)
    here.receive(there)
    assert here.control.unacknowledged() == 0


def test_texts_need_not_be_valid_unicode(clockwork: Clockwork, here: Worker, there: Worker) -> None:
    here.control.post(there.seen_as, "news", "lone \udcff surrogate")
    clockwork.advance(0)
    there.receive(here)
    assert there.heard == [("here", "lone \udcff surrogate")]


def test_who_is_idle_sets_no_timer(clockwork: Clockwork, here: Worker, there: Worker) -> None:
    here.control.post(there.seen_as, "news", 1)
    clockwork.advance(0)
    there.receive(here)
    clockwork.advance(ACK_SECONDS * 1.01)
    here.receive(there)
    clockwork.advance(60)
    assert clockwork.ringing() == []
    assert here.receive(there) == there.receive(here) == 0


def test_a_message_that_cannot_be_sent_loses_its_receiver_and_nobody_else(
    clockwork: Clockwork, here: Worker, there: Worker
) -> None:
    other: Any = Road("other")
    here.control.post(other, "news", object())
    here.control.post(there.seen_as, "news", 1)
    clockwork.advance(60)
    ((name, reason),) = here.lost
    assert name == "other"
    assert reason.startswith("a control message to it cannot be sent: ")
    assert other.frames == []
    there.receive(here)
    assert there.heard == [("here", 1)]
