"""Frames that come in go to whom they concern; malformed ones end their connection and nothing else."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from rpc.runtime.loop import LoopThread
from rpc.wire.frames import Frame, Kind
from tests.support.inline_end import ANYWHERE, ON_LOOP, End
from tests.support.members import peer
from tests.support.streams import Sockets


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


def test_a_kind_that_means_nothing_is_malformed_and_left_to_the_loop(end: End) -> None:
    frames = [Frame(200, 1, {}, []), Frame(ANYWHERE, 2, {}, [])]
    left = list(frames)
    assert end.dispatcher.take_inline(end.peer, left) is None
    assert left == frames
    end.loop.call(end.dispatcher.frames_received, end.peer, frames)
    assert end.agent.lost == [
        "it sent a malformed message: a frame of kind 200, which means nothing to this worker"
    ]
    assert end.taken == []


def test_an_answer_to_a_call_that_another_worker_got_is_malformed_and_the_call_goes_on(end: End) -> None:
    call = end.agent.calls.open(peer("other"), "what", 0)
    for count, _ in enumerate(both_ways(end, [Frame(Kind.REPLY, call.call_id, {}, [b""])]), 1):
        assert len(end.agent.lost) == count
        assert "an answer to a call that worker 'other' got" in end.agent.lost[-1]
    assert not call.done()
    assert list(end.agent.calls.waiting()) == [call]


def test_an_answer_that_comes_too_late_is_dropped(end: End) -> None:
    call = end.call()
    assert end.agent.calls.give_up(call)
    assert end.agent.calls.unanswered() == 1
    for _ in both_ways(end, [Frame(Kind.REPLY, call.call_id, {}, [b""])]):
        assert end.agent.calls.unanswered() == 0
    assert end.agent.lost == []


def test_what_a_frame_stands_for_is_taken_in_instead(end: End) -> None:
    end.dispatcher.unwrap(77, lambda peer, frame: frame._replace(kind=frame.buffers[0][0]))
    frames = [Frame(77, 1, {}, [bytes([ANYWHERE])]), Frame(77, 2, {}, [bytes([ON_LOOP])])]
    left = list(frames)
    assert end.dispatcher.take_inline(end.peer, left) is None
    assert (end.taken, [frame.kind for frame in left]) == ([1], [ON_LOOP])
    end.loop.call(end.dispatcher.frames_received, end.peer, left + frames)
    assert end.taken == [1, 2, 1, 2]
