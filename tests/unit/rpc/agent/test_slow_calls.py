"""Which calls are due and when, on a clock of the test's."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest

from rpc.agent.slow_calls import Schedule, SlowCalls

SLACK = 0.25


@dataclass
class Made:
    call_id: int = 1
    timeout: float = 0.0
    deadline: float = float("inf")
    keeps_place: bool = False


Call: Any = Made


def times(schedule: Schedule, call: Made, until: float) -> list[tuple[float, bool]]:
    """When a call that is made at 100 is asked about, in seconds since then; and whether for a report."""
    found = []
    calls: Any = [call]
    for step in range(int(until / SLACK)):
        now = step * SLACK
        found += [(now, due.report) for due in schedule.look(100 + now, calls, SLACK)]
    return found


def test_reports_come_at_growing_intervals() -> None:
    assert times(Schedule(30.0), Call(), 300) == [(30.0, True), (90.0, True), (210.0, True)]


def test_age_counts_from_the_making_where_the_call_has_a_timeout() -> None:
    schedule = Schedule(30.0)
    call = Call(timeout=300.0, deadline=390.0)  # made at 90
    due = [due for now in (100, 119, 121) for due in schedule.look(now, [call], SLACK)]
    assert [(each.age, each.report) for each in due] == [(31, True)]


@pytest.mark.parametrize(("timeout", "asked_at"), [(60.0, 48.0), (5.0, 4.0), (2.0, 1.5), (1.9, None)])
def test_call_is_asked_about_once_before_its_timeout(timeout: float, asked_at: float | None) -> None:
    asked = times(Schedule(1000.0), Call(timeout=timeout, deadline=100 + timeout), timeout)
    if asked_at is None:
        assert not asked
    else:
        assert len(asked) == 1
        at, report = asked[0]
        assert asked_at - SLACK < at <= asked_at
        assert not report


def test_calls_that_end_are_forgotten() -> None:
    schedule = Schedule(1.0)
    schedule.look(100.0, [Call()], SLACK)
    assert not schedule.look(102.0, [], SLACK)
    assert not schedule.look(103.0, [Call()], SLACK), "as if it were another one"


def test_making_of_a_remote_object_is_not_reported() -> None:
    assert not times(Schedule(1.0), Call(keeps_place=True), 10)


class Table(list[Any]):
    """A table of calls."""

    def waiting(self) -> Iterator[Any]:
        return iter(self)


def test_without_an_observer_each_slow_call_has_a_line(caplog: pytest.LogCaptureFixture) -> None:
    loop = asyncio.new_event_loop()
    peer = SimpleNamespace(name="worker1", lost=None)
    call = SimpleNamespace(
        call_id=1, timeout=60.0, deadline=loop.time() + 20, keeps_place=False, peer=peer, asked="step"
    )
    peers: Any = SimpleNamespace(own=SimpleNamespace(name="worker0"))
    table: Any = Table([call])
    slow = SlowCalls(table, peers, loop, 30.0)
    slow.begin()
    loop.call_later(0.5, loop.stop)  # after the first look, however late that is
    loop.run_forever()
    slow.stop()
    loop.close()
    (line,) = [each.getMessage() for each in caplog.records]
    assert re.fullmatch(r"worker0 has had no answer for 4\d(\.\d)? s from worker1: step", line)
