"""Whether a thread that waits looks again and again before it sleeps."""

from __future__ import annotations

import pytest

from rpc.transport import inline_read
from rpc.transport.inline_read import Backoff, Spinners, spin


class Clock:
    """Each look takes a while."""

    def __init__(self, *, sees_at: int = 1 << 30, seconds: float = 1e-6) -> None:
        self.now = 0.0
        self.looks = 0
        self._sees_at, self._seconds = sees_at, seconds

    def poll(self, milliseconds: int) -> list[int]:
        assert milliseconds == 0
        self.looks += 1
        self.now += self._seconds
        return [1] if self.looks == self._sees_at else []


def spun(
    clock: Clock, until: float, monkeypatch: pytest.MonkeyPatch, spinners: Spinners | None = None
) -> tuple[list[int], Backoff]:
    monkeypatch.setattr(inline_read, "monotonic", lambda: clock.now)
    backoff = Backoff()
    return spin(clock.poll, until, backoff, spinners or Spinners(1)), backoff


def test_a_thread_looks_until_it_sees_something(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(sees_at=50)
    seen, backoff = spun(clock, 1.0, monkeypatch)
    assert (seen, clock.looks, backoff.to_skip) == ([1], 50, 0)


def test_a_spin_in_vain_ends_in_time_and_has_not_paid(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    seen, backoff = spun(clock, 100.5e-6, monkeypatch)
    assert (seen, clock.looks) == ([], 101)
    assert backoff.to_skip > 0


def test_a_thread_whose_core_others_need_looks_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(seconds=0.001)
    seen, backoff = spun(clock, 1.0, monkeypatch)
    assert (seen, clock.looks) == ([], 2)
    assert backoff.to_skip > 0


@pytest.mark.parametrize("sees_at", [2, 1 << 30])
def test_after_a_late_look_the_threads_of_the_agent_look_once(
    monkeypatch: pytest.MonkeyPatch, sees_at: int
) -> None:
    """Also if it has seen something: it would have been woken sooner."""
    spinners = Spinners(1)
    spun(Clock(sees_at=sees_at, seconds=0.002), 1.0, monkeypatch, spinners)
    looks = []
    for _ in range(5):
        clock = Clock(sees_at=3)
        spun(clock, 1.0, monkeypatch, spinners)
        looks.append(clock.looks)
    assert looks == [1, 1, 1, 1, 3]


def skipped_by(backoff: Backoff) -> int:
    skipped = 0
    while not backoff.may_try():
        skipped += 1
    return skipped


def test_what_does_not_pay_is_left_alone_for_longer_each_time_but_not_for_ever() -> None:
    backoff = Backoff()
    assert backoff.may_try()
    skipped = []
    for _ in range(9):
        backoff.failed()
        skipped.append(skipped_by(backoff))
    assert skipped == [4, 8, 16, 32, 64, 128, 256, 256, 256]


def test_what_pays_again_is_tried_sooner() -> None:
    backoff = Backoff()
    for _ in range(4):
        backoff.failed()
    backoff.paid()
    assert skipped_by(backoff) == 16
    for _ in range(5):
        backoff.paid()
    backoff.failed()
    assert skipped_by(backoff) == 4


def test_where_enough_threads_spin_a_thread_looks_once_and_that_is_no_failure(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    spinners, nested = Spinners(1), Clock(sees_at=2)

    class Outer(Clock):
        def poll(self, milliseconds: int) -> list[int]:
            if self.looks == 1:  # this thread spins already
                assert spun(nested, 1.0, monkeypatch, spinners)[0] == []
                monkeypatch.setattr(inline_read, "monotonic", lambda: self.now)
            return super().poll(milliseconds)

    seen, backoff = spun(Outer(sees_at=3), 1.0, monkeypatch, spinners)
    assert (seen, nested.looks, backoff.to_skip) == ([1], 1, 0)
    assert spun(Clock(sees_at=2), 1.0, monkeypatch, spinners)[0] == [1]  # since it has ended
