"""Threads that read a connection themselves get what they wait for; all else goes to the loop, in order."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest

from rpc.runtime.loop import LoopThread
from rpc.transport.inline_read import reading
from rpc.wire.frames import Frame, Kind, encode
from tests.support.direct_end import REQUESTS, UNATTENDED, Call, End, Requests, frame
from tests.support.streams import SOON, Sockets, until

pytestmark = pytest.mark.skipif(not reading.AVAILABLE, reason="only the loop reads here")


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
    assert (call.outcome.kind, call.outcome.call_id, call.outcome.buffers) == (Kind.REPLY, 7, [b"mine"])
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
        assert call.outcome.buffers == segments
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
    assert (request.kind, request.call_id, request.buffers) == (Kind.CALL, 3, [b"work"])
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

    monkeypatch.setattr("rpc.transport.inline_read.reading.os.eventfd", none_left)
    end = End(loop, sockets())
    assert not end.direct.claim()
    call = Call(7)
    end.there.sendall(frame(Kind.REPLY, 7))
    end.direct.read_reply(call, end.deadline())
    assert end.next_of_loop(1) == [(Kind.REPLY, 7)]
    loop.call(end.connection.close, "end of the test")
