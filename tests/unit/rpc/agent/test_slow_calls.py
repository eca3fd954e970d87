"""Which calls are asked about and when, on a clock of the test's; and the words for what is found out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from rpc.agent.slow_calls import (
    Answer,
    AwaitedCall,
    Hop,
    Schedule,
    chain_in_words,
    hop_in_words,
    read_answer,
    write_answer,
)
from rpc.errors import ProtocolError

SLACK = 0.25


@dataclass
class Call:
    call_id: int = 1
    timeout: float = 0.0
    deadline: float = float("inf")
    keeps_place: bool = False


def times(schedule: Schedule, call: Call, until: float) -> list[tuple[float, bool]]:
    """When a call that is made at 100 is asked about, in seconds since then; and whether for a report."""
    found = []
    for step in range(int(until / SLACK)):
        now = step * SLACK
        found += [(now, due.report) for due in schedule.look(100 + now, [call], SLACK)]
    return found


def test_reports_come_at_growing_intervals() -> None:
    assert times(Schedule(30.0), Call(), 300) == [(30.0, True), (90.0, True), (210.0, True)]


def test_age_counts_from_the_making_where_the_call_has_a_timeout() -> None:
    schedule = Schedule(30.0)
    call = Call(timeout=300.0, deadline=390.0)  # made at 90
    due = [due for now in (100, 119, 121) for due in schedule.look(now, [call], SLACK)]
    assert [(each.age, each.report) for each in due] == [(31, True)]


@pytest.mark.parametrize(
    ("timeout", "asked_at"), [(60.0, 48.0), (5.0, 4.0), (2.0, 1.5), (1.0, 0.5), (0.9, None)]
)
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


# ---- answers

ANSWER = Answer("running", "farcall-3", "step", "train.py:7", "sleeps", 0, AwaitedCall(5, 6, "block"))


def test_answers_travel() -> None:
    for answer in (ANSWER, Answer("queued", ahead=7), Answer("unknown")):
        assert read_answer(write_answer(answer)) == answer


def test_long_texts_are_cut_by_their_writer() -> None:
    answer = read_answer(write_answer(Answer("running", place="/long" * 100 + "/end.py:7")))
    assert answer.place.endswith("/end.py:7")
    assert len(answer.place) == 200


def test_what_a_peer_says_stays_on_its_line() -> None:
    message = write_answer(
        Answer("running", "t\n", "f\x1b[2J", "x.py:1\r", "a\tb", 0, AwaitedCall(1, 2, "\nERROR"))
    )
    words = chain_in_words("worker0", [Hop("worker1", read_answer(message), "worker2")], closed=False)
    assert words.isprintable()


MALFORMED: tuple[Any, ...] = (
    None,
    [],
    "running",
    ["running"],
    ["flying", "", "", "", "", 0, None],
    ["running", b"", "", "", "", 0, None],
    ["running", "x" * 201, "", "", "", 0, None],
    ["running", "", "", "", "", -1, None],
    ["running", "", "", "", "", 1.5, None],
    ["running", "", "", "", "", 0, [1]],
    ["running", "", "", "", "", 0, [-1, 2, ""]],
    ["running", "", "", "", "", 0, [1, "2", ""]],
    ["running", "", "", "", "", 0, [1, 2, "x" * 201]],
    ["running", "", "", "", "", 0, None, None],
    {"state": "running"},
)


@pytest.mark.parametrize("message", MALFORMED)
def test_malformed_answers_are_refused(message: Any) -> None:
    with pytest.raises(ProtocolError):
        read_answer(message)


# ---- words

WORDS = (
    (Answer("queued", ahead=1), "w has it queued behind 1 task: all of its threads are busy"),
    (Answer("queued", ahead=9), "w has it queued behind 9 tasks: all of its threads are busy"),
    (Answer("arriving"), "w waits for its arguments, which are still arriving"),
    (
        Answer("running", "farcall-1", "f", "x.py:3", "sleeps"),
        "w runs it on farcall-1 at x.py:3 in f, which sleeps",
    ),
    (Answer("running", "farcall-1"), "w runs it on farcall-1"),
    (ANSWER, "w runs it on farcall-3 at train.py:7 in step, which waits for v: block"),
    (Answer("postponed"), "w has run it, and waits for the future that it returned"),
    ("does not answer", "w does not answer"),
)


@pytest.mark.parametrize(("answer", "words"), WORDS)
def test_answer_in_words(answer: Answer | str, words: str) -> None:
    assert hop_in_words(Hop("w", answer, "v")) == words


def test_way_back_is_named_while_there_is_one() -> None:
    there, back, elsewhere = Hop("b", ANSWER, "a"), Hop("a", Answer("running")), Hop("c", Answer("running"))
    moved_on = Hop("a", Answer("unknown"))
    assert chain_in_words("a", [there, back], closed=False).endswith("; the calls lead back to a: a → b → a")
    assert chain_in_words("a", [there], closed=True).endswith("; this is a cycle of calls: a → b → a")
    for hops in ([there, elsewhere], [back], [elsewhere], [there, moved_on]):
        assert "→" not in chain_in_words("a", hops, closed=False)
