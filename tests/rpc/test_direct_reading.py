"""Threads that read a connection themselves get what they wait for; all else goes to the loop, in order."""

from __future__ import annotations

import contextlib
import gc
import itertools
import math
import socket
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sized
from concurrent.futures import ThreadPoolExecutor
from threading import get_ident
from types import FrameType
from typing import Any, Self

import pytest

from rpc.loop import LoopThread
from rpc.transport import reading
from rpc.transport.promptness import Promptness
from rpc.transport.reading import DirectReading
from rpc.transport.stream import StreamConnection
from rpc.wire import PREAMBLE, Frame, Kind, encode
from tests.rpc.streams import SOON, Recorder, Sockets, open_connection, until

pytestmark = pytest.mark.skipif(not reading.AVAILABLE, reason="only the loop reads here")


UNATTENDED = 50
"""An answer that nobody waits for: any thread may take it in."""


class Call:
    """A call whose reply is waited for."""

    def __init__(self, call_id: int) -> None:
        self.call_id = call_id
        self.outcome: Any = None
        self.turn: Any = None
        self.looked: list[Sized] = []
        self.others: list[int] = []

    def take_in(self, frames: list[Frame]) -> bool:
        ids = [each.call_id for each in frames]
        if any("beside" in each.header or each.kind == Kind.CALL for each in frames):
            return False
        if not {self.call_id, UNATTENDED}.issuperset(ids):
            return False
        self.others += [each for each in ids if each == UNATTENDED]
        if self.call_id in ids:
            self.outcome = frames[ids.index(self.call_id)]
        return True

    def takes(self, header: dict[str, Any]) -> bool:
        return "beside" not in header

    def look(self, frame: Frame, taken: Sized) -> Frame | None:
        self.looked.append(taken)
        return (
            None if frame.segments == [b"malformed"] else Frame(Kind.REPLY, frame.call_id, {}, [b"elsewhere"])
        )

    def has_taken(self) -> int:
        """How many of the replies that it has looked at were taken."""
        return sum(map(bool, self.looked))


def frame(
    kind: int, call_id: int, payload: bytes = b"payload", header: dict[str, Any] | None = None
) -> bytes:
    return b"".join(encode(kind, call_id, header or {}, [payload])[0])


class Requests:
    """Takes requests as they are."""

    def takes(self, frame: Frame) -> bool:
        return frame.kind == Kind.CALL and "beside" not in frame.header

    def __init__(self) -> None:
        self.passed_on: list[int] = []

    def take(self, frames: list[Frame], *, busy: bool = False) -> Frame | None:
        if frames[0].header.get("malformed"):
            raise ValueError(frames[0].header)
        mine = None if busy else next((each for each in frames if each.call_id != UNATTENDED), None)
        self.passed_on += [each.call_id for each in frames if each is not mine]
        return mine

    def is_followed(self, frames: list[Frame]) -> bool:
        return "followed" in frames[-1].header


REQUESTS = Requests()


class End:
    """A connection whose other end is a bare socket in the hands of the test."""

    def __init__(self, loop: LoopThread, sockets: tuple[socket.socket, socket.socket]) -> None:
        self.loop = loop
        self.owner = Recorder()
        here, self.there = sockets
        self.connection: StreamConnection = open_connection(loop, here, self.owner)
        assert self.connection.direct is not None
        self.direct: DirectReading = self.connection.direct
        self.there.sendall(PREAMBLE)
        until(self.connection._decoder.is_between_frames)
        assert not self.direct.claim()  # has the loop prepare it
        loop.call(int)
        self.seen = 0

    def deadline(self) -> float:
        return time.monotonic() + SOON

    def since_the_last_look(self) -> list[tuple[int, int]]:
        """Kind and call of the frames that the loop has taken in since."""
        return [(each.kind, each.call_id) for each in self.owner.frames[self.seen :]]

    def arrived(self) -> list[tuple[int, int]]:
        """The same, and looks."""
        frames = self.owner.frames[self.seen :]
        self.seen += len(frames)
        return [(each.kind, each.call_id) for each in frames]

    def next_of_loop(self, count: int) -> list[tuple[int, int]]:
        """The same, once there are so many of them."""
        self.owner.wait_for(self.seen + count)
        return self.arrived()

    def loop_reads(self) -> None:
        """Whether the loop reads when no thread does."""
        self.there.sendall(frame(Kind.CALL, 999))
        until(lambda: self.owner.frames[self.seen :] and self.owner.frames[-1].call_id == 999)
        until(lambda: self.direct.role.holder() is None)

    def forgive(self) -> None:
        """Have the role tried again at once."""
        worth = self.direct.role.worth
        worth.was_of_use()
        while not worth.invites():
            pass
        self.direct._replies_soon = Promptness()
        self.direct._rests = 0


@pytest.fixture(params=["unix", "tcp"])
def end(loop: LoopThread, sockets: Sockets, request: pytest.FixtureRequest) -> Iterator[End]:
    made = End(loop, sockets(request.param))
    yield made
    loop.call(made.connection.close, "end of the test")
    until(lambda: made.connection._socket.fileno() < 0)


# ---- waiting for a reply


def test_a_look_at_a_socket_that_another_thread_polls_sees_nothing(end: End) -> None:
    def polled_by_another(_: float | None) -> list[tuple[int, int]]:
        raise RuntimeError("concurrent poll() invocation")

    direct = end.connection.direct
    assert direct is not None
    direct._poll = polled_by_another
    assert direct._look(end.deadline()) == []


def test_the_reply_that_a_thread_waits_for_is_its_own(end: End) -> None:
    call = Call(7)
    turn = end.direct.claim()
    end.there.sendall(frame(Kind.REPLY, 7, b"mine"))
    end.direct.read_reply(call, end.deadline(), turn)
    assert (call.outcome.kind, call.outcome.call_id, call.outcome.segments) == (Kind.REPLY, 7, [b"mine"])
    end.loop_reads()
    assert end.arrived() == [(Kind.CALL, 999)]


def test_a_reply_may_have_a_header_and_several_segments_or_none(end: End) -> None:
    call = Call(7)
    for segments in ([], [b"pickle", b"elements"]):
        turn = end.direct.claim()
        end.there.sendall(b"".join(encode(Kind.REPLY, 7, {"recorded": 1}, segments)[0]))
        call.outcome = None
        end.direct.read_reply(call, end.deadline(), turn)
        assert call.outcome.header == {"recorded": 1}
        assert call.outcome.segments == segments
    end.loop_reads()


def test_a_failure_is_a_reply(end: End) -> None:
    call = Call(7)
    turn = end.direct.claim()
    end.there.sendall(frame(Kind.FAILURE, 7))
    end.direct.read_reply(call, end.deadline(), turn)
    assert call.outcome.kind == Kind.FAILURE


def test_a_reply_whose_memory_lies_elsewhere_is_looked_at_and_taken(end: End) -> None:
    call = Call(7)
    turn = end.direct.claim()
    end.there.sendall(frame(Kind.IN_SEGMENT, 7))
    end.direct.read_reply(call, end.deadline(), turn)
    assert call.outcome == (Kind.REPLY, 7, {}, [b"elsewhere"])
    assert call.has_taken() == 1
    end.loop_reads()
    assert end.arrived() == [(Kind.CALL, 999)]


def test_answers_that_nobody_waits_for_are_taken_in_on_the_way(end: End) -> None:
    call = Call(7)
    turn = end.direct.claim()
    end.there.sendall(frame(Kind.REPLY, UNATTENDED) + frame(Kind.REPLY, UNATTENDED) + frame(Kind.REPLY, 7))
    end.direct.read_reply(call, end.deadline(), turn)
    assert call.outcome.call_id == 7
    assert call.others == [UNATTENDED] * 2
    end.loop_reads()
    assert end.arrived() == [(Kind.CALL, 999)]


def test_a_reply_and_the_turn_at_which_it_was_read_do_not_keep_each_other(end: End) -> None:
    call = Call(7)
    call.turn = end.direct.claim()  # as the calls of users do
    end.there.sendall(frame(Kind.IN_SEGMENT, 7))
    end.direct.read_reply(call, end.deadline(), call.turn)
    gone = weakref.ref(call)
    gc.disable()
    try:
        del call
        assert gone() is None
    finally:
        gc.enable()


def test_a_thread_waits_on_when_nothing_but_such_answers_came(end: End) -> None:
    class Answered(Call):
        def take_in(self, frames: list[Frame]) -> bool:
            taken = super().take_in(frames)
            if self.outcome is None:
                end.there.sendall(frame(Kind.REPLY, 7))
            return taken

    call = Answered(7)
    turn = end.direct.claim()
    end.there.sendall(frame(Kind.REPLY, UNATTENDED))
    end.direct.read_reply(call, end.deadline(), turn)
    assert call.outcome.call_id == 7
    assert call.others == [UNATTENDED]
    end.loop_reads()


OTHERS = {
    "a reply elsewhere that is none": [frame(Kind.IN_SEGMENT, 7, b"malformed")],
    "another call's reply elsewhere": [frame(Kind.IN_SEGMENT, 8)],
    "a request": [frame(Kind.CALL, 7)],
    "another call's reply": [frame(Kind.REPLY, 8)],
    "a reply with a header": [frame(Kind.REPLY, 7, header={"beside": 1})],
    "several frames": [frame(Kind.REPLY, 7), frame(Kind.CALL, 1), frame(Kind.REPLY, 8)],
    "many frames": [frame(Kind.REPLY, UNATTENDED)] * 9 + [frame(Kind.REPLY, 7)],
    "half a frame": [frame(Kind.REPLY, 7)[:30]],
    "a few bytes": [frame(Kind.REPLY, 7)[:3]],
    "a large frame's beginning": [frame(Kind.REPLY, 7, bytes(1_000_000))[:100_000]],
}


@pytest.mark.parametrize("what", OTHERS)
def test_whatever_else_comes_is_left_to_the_loop(end: End, what: str) -> None:
    call = Call(7)
    turn = end.direct.claim()
    end.there.sendall(b"".join(OTHERS[what]))
    end.direct.read_reply(call, end.deadline(), turn)
    assert call.outcome is None
    rest = {"half a frame": 30, "a few bytes": 3}.get(what)
    if rest is not None:
        end.there.sendall(frame(Kind.REPLY, 7)[rest:])
    elif what == "a large frame's beginning":
        end.there.sendall(frame(Kind.REPLY, 7, bytes(1_000_000))[100_000:])
    count = max(1, len(OTHERS[what]))
    frames = end.next_of_loop(count)
    assert len(frames) == count
    end.loop_reads()


def test_no_thread_reads_in_the_middle_of_a_frame(end: End) -> None:
    whole = frame(Kind.REPLY, 7)
    end.there.sendall(whole[:30])
    until(lambda: end.connection._decoder.scratch_offset)
    assert not end.direct.claim()
    end.there.sendall(whole[30:])
    assert end.next_of_loop(1) == [(Kind.REPLY, 7)]


def test_no_thread_reads_while_another_does(end: End) -> None:
    with ThreadPoolExecutor(1) as other:
        assert other.submit(end.direct.claim).result()
        assert not end.direct.claim()
        other.submit(end.direct.leave).result()
    assert end.direct.claim()
    end.direct.leave()


def test_the_deadline_ends_the_wait(end: End) -> None:
    call = Call(7)
    began = time.monotonic()
    end.direct.read_reply(call, began + 0.02)
    assert time.monotonic() - began >= 0.02
    assert call.outcome is None
    end.loop_reads()


def test_who_ends_the_call_otherwise_wakes_the_thread(end: End) -> None:
    call = Call(7)

    def settle() -> None:
        until(end.direct.is_read_by_thread)
        call.outcome = ConnectionError("lost")
        end.direct.release()

    with ThreadPoolExecutor(1) as other:
        ending = other.submit(settle)
        end.direct.read_reply(call, end.deadline())
        ending.result()
    assert isinstance(call.outcome, ConnectionError)
    end.loop_reads()


def test_a_release_that_comes_late_costs_one_turn_only(end: End) -> None:
    end.direct.release()
    call = Call(7)
    turn = end.direct.claim()
    end.there.sendall(frame(Kind.REPLY, 7))
    end.direct.read_reply(call, end.deadline(), turn)
    assert call.outcome is None
    assert end.next_of_loop(1) == [(Kind.REPLY, 7)]
    turn = end.direct.claim()
    end.there.sendall(frame(Kind.REPLY, 7))
    end.direct.read_reply(call, end.deadline(), turn)
    assert call.outcome is not None


# ---- waiting for a request


def test_who_stands_by_gets_the_next_request(end: End) -> None:
    assert end.direct.claim(stands_by=True)
    end.there.sendall(frame(Kind.CALL, 3, b"work"))
    request = end.direct.next_request(SOON, REQUESTS)
    assert request is not None
    assert (request.kind, request.call_id, request.segments) == (Kind.CALL, 3, [b"work"])
    end.loop_reads()
    assert end.arrived() == [(Kind.CALL, 999)]


def test_of_several_requests_the_first_is_for_who_stands_by(end: End) -> None:
    station = Requests()
    assert end.direct.claim(stands_by=True)
    end.there.sendall(frame(Kind.CALL, 3) + frame(Kind.CALL, 4))
    request = end.direct.next_request(SOON, station)
    assert request is not None
    assert (request.call_id, station.passed_on) == (3, [4])
    end.loop_reads()
    assert end.arrived() == [(Kind.CALL, 999)]


def test_who_stands_by_goes_on_when_there_was_nothing_to_do(end: End) -> None:
    class Answering(Requests):
        def take(self, frames: list[Frame], *, busy: bool = False) -> Frame | None:
            if frames[0].call_id == UNATTENDED:
                end.there.sendall(frame(Kind.CALL, 3))
            return super().take(frames, busy=busy)

    assert end.direct.claim(stands_by=True)
    end.there.sendall(frame(Kind.CALL, UNATTENDED))
    request = end.direct.next_request(SOON, Answering())
    assert request is not None
    assert request.call_id == 3
    end.loop_reads()


def test_what_follows_a_request_at_once_is_taken_in_before_it_is_run(
    end: End, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading, "_FOLLOWER_SECONDS", SOON)

    class Following(Requests):
        def take(self, frames: list[Frame], *, busy: bool = False) -> Frame | None:
            if not busy:
                end.there.sendall(frame(Kind.CALL, 4))
            return super().take(frames, busy=busy)

    station = Following()
    assert end.direct.claim(stands_by=True)
    end.there.sendall(frame(Kind.CALL, 3, header={"followed": 1}))
    request = end.direct.next_request(SOON, station)
    assert request is not None
    assert (request.call_id, station.passed_on) == (3, [4])
    end.loop_reads()
    assert end.arrived() == [(Kind.CALL, 999)]


def test_what_follows_a_request_and_is_not_for_who_stands_by_is_left_to_the_loop(
    end: End, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading, "_FOLLOWER_SECONDS", SOON)

    class Followed(Requests):
        def is_followed(self, frames: list[Frame]) -> bool:
            end.there.sendall(frame(Kind.REPLY, 4))
            return True

    assert end.direct.claim(stands_by=True)
    end.there.sendall(frame(Kind.CALL, 3))
    request = end.direct.next_request(SOON, Followed())
    assert request is not None
    assert request.call_id == 3
    assert end.next_of_loop(1) == [(Kind.REPLY, 4)]
    end.loop_reads()


@pytest.mark.parametrize(
    "other",
    [
        frame(Kind.REPLY, 3),
        frame(Kind.CALL, 3, header={"beside": 1}),
        frame(Kind.CALL, 3, header={"malformed": 1}),
        frame(Kind.CONTROL, 0),
    ],
)
def test_who_stands_by_leaves_other_frames_to_the_loop(end: End, other: bytes) -> None:
    assert end.direct.claim(stands_by=True)
    end.there.sendall(other)
    assert end.direct.next_request(SOON, REQUESTS) is None
    assert len(end.next_of_loop(1)) == 1
    end.loop_reads()


def test_who_stands_by_gives_way_to_who_waits_for_a_reply(end: End) -> None:
    with ThreadPoolExecutor(1) as other:
        assert other.submit(end.direct.claim, stands_by=True).result()
        standing_by = other.submit(end.direct.next_request, None, REQUESTS)
        assert not end.direct.claim()
        assert standing_by.result(SOON) is None
    end.forgive()
    assert end.direct.claim()
    end.direct.leave()


def test_who_stands_by_does_so_for_a_while_only(end: End) -> None:
    assert end.direct.claim(stands_by=True)
    assert end.direct.next_request(0.01, REQUESTS) is None
    end.loop_reads()


def test_without_the_role_there_is_no_next_request(end: End) -> None:
    assert end.direct.next_request(None, REQUESTS) is None


# ---- before it sleeps


def waits_of(end: End, arrives_at: int) -> list[float]:
    """How many milliseconds each look may take until the reply has come, which it does right before one."""
    poll = end.direct._poll
    assert poll is not None
    waits: list[float] = []

    def look(milliseconds: float | None) -> list[tuple[int, int]]:
        assert milliseconds is not None
        if len(waits) == arrives_at:
            end.there.sendall(frame(Kind.REPLY, 7))
        waits.append(milliseconds)
        return poll(milliseconds if len(waits) > arrives_at else 0)

    end.direct._poll = look
    call = Call(7)
    end.direct.read_reply(call, end.deadline())
    end.direct._poll = poll
    assert call.outcome is not None
    return waits


@pytest.fixture
def one_may_look(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a machine with two cores, whatever this one has."""
    monkeypatch.setattr(reading, "_MAY_LOOK", 1)
    monkeypatch.setattr(reading, "_LATE_SECONDS", SOON)
    monkeypatch.setattr(reading, "_computed_by_others", float)


@pytest.mark.usefixtures("one_may_look")
def test_a_thread_looks_again_for_a_moment_before_it_sleeps(
    end: End, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading, "_MOMENT_SECONDS", SOON)
    assert waits_of(end, arrives_at=3) == [0] * 4


@pytest.mark.usefixtures("one_may_look")
def test_a_thread_beside_others_that_compute_sleeps(end: End, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "_MOMENT_SECONDS", SOON)
    monkeypatch.setattr(reading, "_SAMPLE_SECONDS", 0.0)
    monkeypatch.setattr(reading, "_computed_by_others", itertools.count().__next__)
    *looks, wait = waits_of(end, arrives_at=3)
    assert looks == [0, 0, 0]
    assert wait > 0


@pytest.mark.usefixtures("one_may_look")
def test_a_thread_that_was_disturbed_sleeps_at_once_the_next_times(
    end: End, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading, "_MOMENT_SECONDS", SOON)
    monkeypatch.setattr(reading, "_LATE_SECONDS", 0.0)
    waits_of(end, arrives_at=2)
    monkeypatch.setattr(reading, "_LATE_SECONDS", SOON)
    for _ in range(reading._RESTS):
        (wait,) = waits_of(end, arrives_at=0)
        assert wait > 0
    assert waits_of(end, arrives_at=0) == [0]


@pytest.mark.usefixtures("one_may_look")
def test_a_thread_that_looked_in_vain_waits_for_the_rest_of_the_time_only(
    end: End, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading, "_MOMENT_SECONDS", 0.0)
    poll, waits = end.direct._poll, list[float | None]()
    now = 1000.0
    monkeypatch.setattr(reading, "monotonic", lambda: now)

    def late(milliseconds: float | None) -> list[tuple[int, int]]:
        nonlocal now
        waits.append(milliseconds)
        now += 0.02
        return []

    end.direct._poll = late
    end.direct.read_reply(Call(7), now + 0.01)
    end.direct._poll = poll
    assert waits == [0, 0]


@pytest.mark.usefixtures("one_may_look")
def test_waits_that_are_called_off_late_are_long(end: End, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "_MOMENT_SECONDS", 0.0)
    for _ in range(2):
        assert end.direct.claim(stands_by=True)
        end.direct.release()
        assert end.direct.next_request(SOON, REQUESTS) is None
    assert not end.direct._requests_soon.expected


@pytest.mark.usefixtures("one_may_look")
def test_a_thread_looks_no_longer_than_it_may_wait(end: End, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "_MOMENT_SECONDS", math.inf)
    call = Call(7)
    end.direct.read_reply(call, time.monotonic() + 0.01)
    assert call.outcome is None


@pytest.mark.usefixtures("one_may_look")
def test_beside_a_thread_that_spins_none_gives_way_or_takes_it_for_one_that_computes(
    end: End, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading, "spinning", {None: None})
    monkeypatch.setattr(reading, "_AWAKE_MOMENT_SECONDS", SOON)
    monkeypatch.setattr(reading, "_MOMENT_SECONDS", SOON)
    monkeypatch.setattr(reading, "_SAMPLE_SECONDS", 0.0)
    monkeypatch.setattr(reading, "_computed_by_others", itertools.count().__next__)
    gave_way: list[None] = []
    monkeypatch.setattr(reading, "_give_way", lambda: gave_way.append(None))
    assert waits_of(end, arrives_at=3) == [0] * 4
    assert not gave_way


@pytest.mark.usefixtures("one_may_look")
def test_beside_a_thread_that_spins_it_looks_for_a_shorter_moment(
    end: End, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading, "spinning", {None: None})
    monkeypatch.setattr(reading, "_AWAKE_MOMENT_SECONDS", 0.0)
    monkeypatch.setattr(reading, "_MOMENT_SECONDS", SOON)
    for _ in range(2):  # it does not rest after the first
        look, wait = waits_of(end, arrives_at=1)
        assert look == 0
        assert wait > 0


@pytest.mark.usefixtures("one_may_look")
def test_a_thread_whose_core_others_need_sleeps(end: End, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "_LATE_SECONDS", 0.0)
    monkeypatch.setattr(reading, "_MOMENT_SECONDS", SOON)
    *looks, wait = waits_of(end, arrives_at=2)
    assert looks == [0, 0]
    assert wait > 0


@pytest.mark.usefixtures("one_may_look")
def test_a_thread_whose_reply_takes_longer_sleeps_at_once_the_next_times(
    end: End, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading, "_MOMENT_SECONDS", 0.0)
    first, *others = [waits_of(end, arrives_at=index) for index in (1, 0, 0, 0, 0)]
    assert first[0] == 0
    assert len(first) == 2
    assert first[1] > 0
    assert all(len(waits) == 1 and waits[0] > 0 for waits in others)


@pytest.mark.usefixtures("one_may_look")
def test_a_thread_that_has_slept_three_times_for_a_moment_looks_again(
    end: End, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading, "_MOMENT_SECONDS", 0.0)
    for _ in range(3):
        waits_of(end, arrives_at=0)
    monkeypatch.setattr(reading, "_MOMENT_SECONDS", SOON)
    slept = [waits_of(end, arrives_at=0) for _ in range(3)]
    assert all(len(waits) == 1 and waits[0] > 0 for waits in slept)
    assert waits_of(end, arrives_at=0) == [0]


@pytest.mark.usefixtures("one_may_look")
def test_a_thread_sleeps_at_once_where_others_look_already(end: End, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "_looking", {0: None})
    look, wait = waits_of(end, arrives_at=1)
    assert look == 0
    assert wait > 0


@pytest.mark.usefixtures("one_may_look")
def test_a_thread_that_was_interrupted_as_it_looked_looks_again(
    end: End, monkeypatch: pytest.MonkeyPatch
) -> None:
    looking = dict.fromkeys([0, get_ident()])
    monkeypatch.setattr(reading, "_looking", looking)
    assert waits_of(end, arrives_at=0) == [0]
    assert get_ident() not in looking


# ---- the end


def test_a_thread_that_reads_notices_the_end_and_the_loop_tells_it(end: End) -> None:
    with ThreadPoolExecutor(1) as other:
        call = Call(7)
        waiting = other.submit(end.direct.read_reply, call, end.deadline())
        until(end.direct.is_read_by_thread)
        end.there.close()
        waiting.result(SOON)
    assert end.owner.reason() == "the connection was closed by the other side"
    assert call.outcome is None


def test_what_came_before_the_end_is_taken_in(end: End) -> None:
    with ThreadPoolExecutor(1) as other:
        waiting = other.submit(end.direct.read_reply, Call(7), end.deadline())
        until(end.direct.is_read_by_thread)
        end.there.sendall(frame(Kind.CALL, 1) + frame(Kind.CALL, 2))
        end.there.close()
        waiting.result(SOON)
    assert end.next_of_loop(2) == [(Kind.CALL, 1), (Kind.CALL, 2)]
    assert end.owner.reason()


def test_closing_wakes_the_thread_that_reads_and_the_descriptor_stays_until_it_has_left(end: End) -> None:
    go_on = threading.Event()
    poll = end.direct._poll
    assert poll is not None

    def slow(timeout: float | None) -> list[tuple[int, int]]:
        events = poll(timeout)
        go_on.wait(SOON)
        return events

    end.direct._poll = slow
    with ThreadPoolExecutor(1) as other:
        waiting = other.submit(end.direct.read_reply, Call(7), end.deadline())
        until(end.direct.is_read_by_thread)
        end.loop.call(end.connection.close, "closed under its hands")
        assert end.owner.reason() == "closed under its hands"
        assert end.connection._socket.fileno() >= 0
        go_on.set()
        waiting.result(SOON)
    assert end.connection._socket.fileno() < 0
    end.direct.release()
    assert not end.direct.claim()


def test_a_write_error_is_told_though_a_thread_reads(end: End) -> None:
    with ThreadPoolExecutor(1) as other:
        waiting = other.submit(end.direct.read_reply, Call(7), end.deadline())
        until(end.direct.is_read_by_thread)
        end.connection._fail(OSError(32, "Broken pipe"))
        waiting.result(SOON)
    assert end.owner.reason() == "the connection broke: Broken pipe"


def test_a_thread_that_waits_for_room_does_not_keep_the_role(loop: LoopThread, sockets: Sockets) -> None:
    end = End(loop, sockets())
    end.connection._queue_limit = 1
    with end.connection._send_lock:  # somebody is writing: what is sent now is queued
        end.connection.send([bytes(70_000)], 70_000, wait=False)
        with ThreadPoolExecutor(1) as other:

            def claim_and_send() -> None:
                assert end.direct.claim()
                end.connection.send([b"x"], 1)

            sending = other.submit(claim_and_send)
            until(lambda: end.connection._waiting_for_room)
            end.loop_reads()
            loop.call(setattr, end.connection, "_queue_limit", 1 << 30)
            with end.connection._count_lock:
                end.connection._room.notify_all()
            sending.result(SOON)
    loop.call(end.connection.close, "end of the test")


def test_without_descriptors_left_the_loop_goes_on_reading(
    loop: LoopThread, sockets: Sockets, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none_left(*_: object) -> int:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr("rpc.transport.reading.os.eventfd", none_left)
    end = End(loop, sockets())
    assert not end.direct.claim()
    call = Call(7)
    end.there.sendall(frame(Kind.REPLY, 7))
    end.direct.read_reply(call, end.deadline())
    assert end.next_of_loop(1) == [(Kind.REPLY, 7)]
    loop.call(end.connection.close, "end of the test")


# ---- in the middle of it


_MODULES = ("rpc.transport.reading", "rpc.transport.role", "rpc.transport.turn")
_CODE = tuple(name for name in (sys.modules[module].__file__ for module in _MODULES) if name is not None)


class Step:
    """Does something right before one of the instructions of the code under test: the ``number``-th."""

    def __init__(self, number: int, action: Callable[[], None]) -> None:
        self.number = number
        self.action = action
        self.taken = False
        self._count = 0

    def __enter__(self) -> Self:
        sys.settrace(self._called)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)

    def _called(self, called: FrameType, event: str, argument: object) -> Any:
        if called.f_code.co_filename not in _CODE:
            return None
        called.f_trace_opcodes = True
        return self._trace

    def _trace(self, traced: FrameType, event: str, argument: object) -> Any:
        if event == "opcode" and not self.taken:
            self._count += 1
            if self._count == self.number:
                self.taken = True
                self.action()
        return self._trace


class Interruption(BaseException):
    """What a signal handler raises."""


def interrupt() -> None:
    raise Interruption


@pytest.fixture
def one_look(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread looks once before it sleeps, so that it takes the same steps each time."""
    monkeypatch.setattr(reading, "_MOMENT_SECONDS", 0.0)
    monkeypatch.setattr(reading, "_MAY_LOOK", 1)


MINE = (Kind.REPLY, 7)
ELSEWHERE = (Kind.IN_SEGMENT, 7)

ARRIVALS = {
    "its reply": [MINE],
    "its reply elsewhere": [ELSEWHERE],
    "a request": [(Kind.CALL, 1)],
    "its reply and a request": [MINE, (Kind.CALL, 1)],
}


@pytest.mark.usefixtures("one_look")
@pytest.mark.parametrize("what", ARRIVALS)
@pytest.mark.parametrize("claimed", [True, False])
def test_an_exception_before_any_instruction_loses_nothing(
    loop: LoopThread, sockets: Sockets, what: str, claimed: bool
) -> None:
    end = End(loop, sockets())
    sent = b"".join(frame(*each) for each in ARRIVALS[what])
    step = Step(0, interrupt)
    while step.taken or not step.number:
        end.forgive()
        call = Call(7)
        step = Step(step.number + 1, interrupt)
        over = threading.Event()

        def talk(over: threading.Event = over) -> None:
            until(lambda: end.direct.is_read_by_thread() or over.is_set())
            end.there.sendall(sent)

        with ThreadPoolExecutor(1) as other:
            turn = end.direct.claim() if claimed else None
            assert turn is not None or not claimed
            talking = other.submit(talk)
            with contextlib.suppress(Interruption), step:
                end.direct.read_reply(call, end.deadline(), turn)
            if claimed:
                end.direct.leave()  # as who claims does in any case
            over.set()
            talking.result()
        end.there.sendall(frame(Kind.CALL, 1000))
        until(lambda: (Kind.CALL, 1000) in end.since_the_last_look())
        until(lambda: end.direct.role.holder() is None)
        taken_in = end.arrived()
        for each in [*ARRIVALS[what], (Kind.CALL, 1000)]:
            if each == ELSEWHERE:
                assert taken_in.count(each) + call.has_taken() == 1, step.number
                assert call.has_taken() == (call.outcome is not None), step.number
            elif each != MINE:
                assert taken_in.count(each) == 1, step.number
            elif call.outcome is None:
                assert each in taken_in, step.number
        assert taken_in[-1] == (Kind.CALL, 1000)
    assert step.number > 100
    loop.call(end.connection.close, "end of the test")


def test_an_exception_in_the_middle_of_a_claim_leaves_the_reading_to_the_loop(
    loop: LoopThread, sockets: Sockets
) -> None:
    end = End(loop, sockets())
    step = Step(0, interrupt)
    while step.taken or not step.number:
        step = Step(step.number + 1, interrupt)
        with contextlib.suppress(Interruption), step:
            end.direct.claim()
        end.direct.leave()  # as who claims does in any case
        end.loop_reads()
        assert end.arrived() == [(Kind.CALL, 999)]
    assert step.number > 30
    loop.call(end.connection.close, "end of the test")


def test_a_second_exception_while_the_role_is_given_up_is_made_good_by_the_next_wait(
    loop: LoopThread, sockets: Sockets
) -> None:
    end = End(loop, sockets())
    exceptions = [Interruption() for _ in range(4)]

    class Interrupted(DirectReading):
        __slots__ = ()

        def _end(self, turn: Any) -> None:
            if exceptions:
                raise exceptions.pop()
            super()._end(turn)

    end.direct.__class__ = Interrupted
    with pytest.raises(Interruption):
        end.direct.read_reply(Call(7), time.monotonic() + 0.01)
    exceptions.clear()
    assert end.direct.role.own_turn() is not None
    end.there.sendall(frame(Kind.CALL, 1))
    end.direct.read_reply(Call(8), time.monotonic() + 0.01)
    assert end.next_of_loop(1)[0] == (Kind.CALL, 1)
    end.loop_reads()
    loop.call(end.connection.close, "end of the test")


@pytest.mark.usefixtures("one_look")
@pytest.mark.parametrize("mine", [MINE, ELSEWHERE])
def test_a_signal_handler_may_wait_for_a_reply_of_its_own_before_any_instruction(
    loop: LoopThread, sockets: Sockets, mine: tuple[int, int]
) -> None:
    end = End(loop, sockets())
    step = Step(0, interrupt)
    while step.taken or not step.number:
        end.forgive()
        outer, inner = Call(7), Call(8)

        def call_from_handler(inner: Call = inner) -> None:
            sys.settrace(None)
            end.there.sendall(frame(Kind.REPLY, 8))
            end.direct.read_reply(inner, time.monotonic() + 0.05)
            # What this thread does not read, the loop must: the wait that was interrupted goes on later.
            until(lambda: inner.outcome or (Kind.REPLY, 8) in end.since_the_last_look())

        step = Step(step.number + 1, call_from_handler)
        turn = end.direct.claim()
        assert turn is not None
        end.there.sendall(frame(*mine))
        with step:
            end.direct.read_reply(outer, time.monotonic() + 0.05, turn)
        end.there.sendall(frame(Kind.CALL, 1000))
        until(lambda: (Kind.CALL, 1000) in end.since_the_last_look())
        until(lambda: end.direct.role.holder() is None)
        taken_in = end.arrived()
        assert outer.outcome is not None or mine in taken_in, step.number
        if mine == ELSEWHERE:
            assert taken_in.count(mine) + outer.has_taken() == 1, step.number
        assert taken_in.count((Kind.CALL, 1000)) == 1, step.number
    assert step.number > 100
    loop.call(end.connection.close, "end of the test")


@pytest.mark.usefixtures("one_look")
def test_a_signal_handler_may_wait_for_a_reply_in_the_middle_of_a_claim(
    loop: LoopThread, sockets: Sockets
) -> None:
    end = End(loop, sockets())
    step = Step(0, interrupt)
    while step.taken or not step.number:
        end.forgive()
        inner = Call(8)

        def call_from_handler(inner: Call = inner) -> None:
            sys.settrace(None)
            end.there.sendall(frame(Kind.REPLY, 8))
            end.direct.read_reply(inner, time.monotonic() + 0.05)
            until(lambda: inner.outcome or (Kind.REPLY, 8) in end.since_the_last_look())

        step = Step(step.number + 1, call_from_handler)
        with step:
            turn = end.direct.claim()
        end.direct.read_reply(Call(7), time.monotonic(), turn)
        end.loop_reads()
        assert end.arrived()[-1] == (Kind.CALL, 999), step.number
    assert step.number > 30
    loop.call(end.connection.close, "end of the test")
