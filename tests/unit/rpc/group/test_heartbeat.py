"""The heartbeat's own clock: what has come is acknowledged soon, however patient a worker is with others."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest

from rpc.group.heartbeat import Heartbeat
from rpc.group.liveness import Liveness
from rpc.group.own_time import Neighbours
from rpc.group.peer import Peer
from rpc.runtime.process_signs import ProcessSigns
from rpc.transport.session import MAX_UNACKNOWLEDGED
from rpc.wire.frames import Frame, Kind, decode_one
from tests.support.clockwork import Clockwork
from tests.support.members import peer
from tests.support.streams import Recording

MESSAGE = bytes(1 << 18)


class FoundLate(Neighbours):
    """Finds a worker's process at the third look."""

    looks = 0

    def find(self, peer: Peer) -> None:
        self.looks += 1
        if self.looks == 3:
            peer.link.process = 4711


class Watched:
    """A heartbeat, and one worker with a connection."""

    def __init__(
        self, lost_after: float, signs: Callable[[], ProcessSigns] | None = None, *, is_found: bool = True
    ) -> None:
        """Args: ``signs`` returns the state of the worker's process, if it has one; unless ``is_found``, that
        is found at the third look only: the search is made now and then.
        """
        self.clock = Clockwork()
        self.peer, self.connection = peer(), Recording()
        self.peer.link.accept(0.0, 4711 if signs is not None and is_found else None)
        self.peer.established(self.connection)
        self.lost: list[str] = []
        loop: Any = self.clock
        self.heartbeat = Heartbeat(
            loop,
            lambda: [self.peer],
            self._lose,
            lambda *_: None,
            lambda _: None,
            lost_after,
            self.clock.time,
            FoundLate(look=lambda _: signs() if signs else None),
        )
        self.heartbeat.begin()

    def _lose(self, peer: Peer, reason: str) -> None:
        self.lost.append(reason)
        peer.gone(reason)

    def signs(self) -> list[Frame]:
        frames = [decode_one(bytearray(each)) for each in self.connection.sent]
        return [frame for frame in frames if frame.kind == Kind.ALIVE]


@pytest.mark.parametrize("lost_after", [0.0, 30.0, 1e9])
def test_what_has_come_is_acknowledged_within_seconds(lost_after: float) -> None:
    watched = Watched(lost_after)
    watched.peer.session.take_in()
    watched.clock.advance(2.6)
    assert [sign.call_id for sign in watched.signs()] == [1]


def test_who_lives_and_acknowledges_nothing_is_lost_when_too_much_is_kept() -> None:
    watched = Watched(30.0)
    while not watched.peer.session.is_full():
        watched.peer.session.note(MESSAGE)
    for _ in range(29):
        assert watched.lost == []
        watched.heartbeat.received(watched.peer, Frame(Kind.ALIVE, 0, {}, []))
        watched.peer.session.take_in_heartbeat()  # as the dispatcher counts
        watched.clock.advance(1.0)
    watched.clock.advance(4.0)
    (reason,) = watched.lost
    assert reason.startswith("it does not acknowledge what it gets: 257 messages (64 MiB) are kept for it")
    assert [sign.codec for sign in watched.signs()].count(1) >= 3  # it was asked to


@pytest.mark.parametrize("says", ["nothing", "something"])
def test_a_worker_that_computes_and_says_nothing_is_not_lost_for_what_it_does_not_acknowledge(
    says: str,
) -> None:
    """As where a function holds the interpreter for long; but one that speaks could acknowledge."""
    ticks = itertools.count()
    watched = Watched(30.0, lambda: ProcessSigns(False, False, next(ticks), 1))
    while not watched.peer.session.is_full():
        watched.peer.session.note(MESSAGE)
    for _ in range(100):
        if says == "something":
            watched.peer.session.take_in_heartbeat()
        watched.clock.advance(1.0)
    assert bool(watched.lost) is (says == "something")


def test_a_worker_that_sleeps_is_lost_for_what_it_does_not_acknowledge() -> None:
    watched = Watched(30.0, lambda: ProcessSigns(False, False, 5, 1))
    while not watched.peer.session.is_full():
        watched.peer.session.note(MESSAGE)
    watched.clock.advance(60.0)
    assert len(watched.lost) == 1


@pytest.mark.parametrize("waits_for_core", [True, False])
def test_before_a_silent_worker_is_lost_its_process_is_looked_for(waits_for_core: bool) -> None:
    watched = Watched(30.0, lambda: ProcessSigns(False, waits_for_core, 5, 1), is_found=False)
    watched.peer.session.note(MESSAGE)
    watched.clock.advance(45.0)
    assert not watched.lost
    watched.clock.advance(200.0)
    assert bool(watched.lost) is not waits_for_core


def test_who_acknowledges_late_is_not_lost() -> None:
    watched = Watched(30.0)
    session = watched.peer.session
    for _ in range(20):
        while not session.is_full():
            session.note(MESSAGE)
        watched.clock.advance(20.0)
        watched.heartbeat.received(watched.peer, Frame(Kind.ALIVE, session.first + 10, {}, []))
        watched.peer.session.take_in_heartbeat()
    assert watched.lost == []


def test_what_does_not_wait_has_a_bound_too() -> None:
    watched = Watched(0.0)
    while watched.peer.session.kept <= 4 * MAX_UNACKNOWLEDGED:
        watched.peer.session.note(MESSAGE)
    watched.clock.advance(2.6)
    (reason,) = watched.lost
    assert "it acknowledged too few" in reason


# ---- silence


A, B = 1, 2


def look_for(
    liveness: Liveness, seconds: float, signs: dict[int, int], start: float
) -> list[tuple[float, int]]:
    """Looks at every interval; when who was found to be silent."""
    found: list[tuple[float, int]] = []
    for index in range(1, round(seconds / liveness.interval) + 1):
        now = start + index * liveness.interval
        found += [(now - start, worker) for worker in liveness.look(now, signs)[1]]
    return found


def test_who_gives_no_sign_is_silent_within_the_bound_and_not_much_sooner() -> None:
    liveness = Liveness(30)
    liveness.look(100.0, {A: 5})
    found = look_for(liveness, 60, {A: 5}, 100.0)
    assert found[0][1] == A
    assert 25 <= found[0][0] <= 30


def test_any_sign_starts_the_silence_anew_and_only_who_says_nothing_is_asked() -> None:
    liveness = Liveness(12)
    asked: list[int] = []
    for second in range(100):
        ask, silent = liveness.look(float(second), {A: second, B: second // 8})
        asked += ask
        assert silent == []
    assert A not in asked
    assert B in asked


def test_nobody_is_silent_who_is_not_watched() -> None:
    liveness = Liveness(12)
    for second in range(100):
        watched = {A: 0} if second % 11 < 5 else {}
        assert liveness.look(float(second), watched)[1] == []


def test_time_in_which_this_process_stood_still_does_not_count() -> None:
    liveness = Liveness(12)
    liveness.look(0.0, {A: 1})
    liveness.look(1.0, {A: 1})
    assert liveness.look(1000.0, {A: 1})[1] == []


def test_who_is_excused_may_be_silent_for_as_long_again_and_never_is_where_there_is_no_bound() -> None:
    liveness = Liveness(12)
    liveness.look(0.0, {A: 1})
    assert look_for(liveness, 12, {A: 1}, 0.0) == [(11.0, A), (12.0, A)]
    liveness.excuse(A)
    assert look_for(liveness, 11, {A: 1}, 12.0) == []
    assert look_for(Liveness(0), 1000, {A: 1}, 0.0) == []
