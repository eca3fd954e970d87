"""Whether a thread that reads directly looks again and again for a moment before it sleeps."""

from __future__ import annotations

import itertools
import math
import time
from threading import get_ident

import pytest

from rpc.transport.inline_read import reading
from rpc.wire.frames import Kind
from tests.support.direct_end import REQUESTS, Call, End, frame
from tests.support.streams import SOON

pytestmark = pytest.mark.skipif(not reading.AVAILABLE, reason="only the loop reads here")


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
