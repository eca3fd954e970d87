"""Exactly-once delivery: what one end sends comes out of the other once, whatever the link does."""

import os
import textwrap
from itertools import pairwise
from typing import Any

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rpc.errors import ProtocolError
from rpc.group.delivery import (
    ACK_DELAY,
    ACK_EVERY,
    BATCH_MOST,
    RANGES_MOST,
    RESEND_FIRST,
    RESEND_MOST,
    WINDOW,
    Batch,
    Delivery,
)

EFFORT = int(os.environ.get("FARCALL_TEST_EFFORT", "1"))
NOW = float("-inf")


def batch_of(end: Delivery, now: float = 0.0) -> Batch:
    """The next batch, which there must be, as msgpack would deliver it."""
    batch = end.outgoing(now)
    assert batch is not None
    arrived: Batch = msgpack.unpackb(msgpack.packb(batch))
    return arrived


def test_messages_sent_together_travel_together() -> None:
    here, there = Delivery(), Delivery()
    for message in ("a", "b", "c"):
        here.send(message)
    assert here.next_due() == NOW
    assert there.received(batch_of(here), 0.0) == ["a", "b", "c"]
    assert here.outgoing(0.0) is None


def test_an_idle_link_sends_nothing() -> None:
    end = Delivery()
    assert end.next_due() is None
    assert end.outgoing(1000.0) is None


def test_an_acknowledgement_rides_on_messages_that_go_the_other_way() -> None:
    here, there = Delivery(), Delivery()
    here.send("question")
    there.received(batch_of(here), 0.0)
    there.send("answer")
    assert here.received(batch_of(there), 0.0) == ["answer"]
    assert here.unacknowledged == 0
    assert there.next_due() == RESEND_FIRST


def test_an_acknowledgement_goes_alone_after_a_short_delay() -> None:
    here, there = Delivery(), Delivery()
    here.send("a")
    there.received(batch_of(here), 10.0)
    assert there.next_due() == 10.0 + ACK_DELAY
    assert there.outgoing(10.0 + ACK_DELAY / 2) is None
    assert here.unacknowledged == 1
    here.received(batch_of(there, 10.0 + ACK_DELAY), 10.0 + ACK_DELAY)
    assert here.unacknowledged == 0
    assert here.next_due() is None
    assert there.next_due() is None


def test_an_acknowledgement_of_many_messages_does_not_wait() -> None:
    here, there = Delivery(), Delivery()
    for n in range(ACK_EVERY - 1):
        here.send(n)
    there.received(batch_of(here), 0.0)
    assert there.outgoing(0.0) is None
    here.send("one more")
    there.received(batch_of(here), 0.0)
    here.received(batch_of(there), 0.0)
    assert here.unacknowledged == 0


def test_a_message_that_comes_twice_is_handed_over_once_and_acknowledged_at_once() -> None:
    here, there = Delivery(), Delivery()
    here.send("a")
    batch = batch_of(here)
    assert there.received(batch, 0.0) == ["a"]
    assert there.received(batch, 0.0) == []
    here.received(batch_of(there), 0.0)
    assert here.unacknowledged == 0


def test_messages_are_handed_over_as_they_come_and_holes_are_filled_later() -> None:
    here, there = Delivery(), Delivery()
    batches = []
    for message in "abcde":
        here.send(message)
        batches.append(batch_of(here))
    assert there.received(batches[3], 0.0) == ["d"]
    assert there.received(batches[1], 0.0) == ["b"]
    acked, ranges, _, _ = batch_of(there, ACK_DELAY)
    assert (acked, ranges) == (0, [[2, 2], [4, 4]])
    assert [there.received(batches[n], 1.0) for n in (0, 1, 2, 3, 4)] == [["a"], [], ["c"], [], ["e"]]
    acked, ranges, _, _ = batch_of(there, 1.0)
    assert (acked, ranges) == (5, [])


def test_only_what_is_missing_is_sent_again() -> None:
    here, there = Delivery(), Delivery()
    for message in "abcd":
        here.send(message)
        batch = batch_of(here)
        if message in "bd":
            there.received(batch, 0.0)
    here.received(batch_of(there, ACK_DELAY), 0.5)
    assert here.next_due() == 0.5 + RESEND_FIRST
    assert here.outgoing(1.4) is None
    assert [there.received(batch_of(here, 1.5), 1.5) for _ in range(2)] == [["a"], ["c"]]
    assert here.outgoing(1.5) is None


def test_what_is_never_acknowledged_is_sent_again_ever_more_seldom() -> None:
    end = Delivery()
    end.send("a")
    times = [0.0]
    assert batch_of(end, 0.0)[3] == ["a"]
    while len(times) < 10:
        due = end.next_due()
        assert due is not None
        assert batch_of(end, due)[3] == ["a"]
        assert end.outgoing(due) is None
        times.append(due)
    waits = [later - sooner for sooner, later in pairwise(times)]
    assert waits[:5] == [RESEND_FIRST * 2**n for n in range(5)]
    assert set(waits[5:]) == {RESEND_MOST}


def test_progress_resets_the_back_off() -> None:
    here, there = Delivery(), Delivery()
    here.send("a")
    batch_of(here, 0.0)
    here.send("b")
    batch = batch_of(here, 0.0)
    for due in (1.0, 3.0, 7.0):
        batch_of(here, due)
    there.received(batch, 8.0)
    here.received(batch_of(there, 9.0), 9.0)
    assert here.next_due() == 9.0 + RESEND_FIRST


def test_a_new_connection_sends_at_once_what_the_old_one_may_have_lost() -> None:
    here, there = Delivery(), Delivery()
    here.send("a")
    batch_of(here, 0.0)
    here.reconnected(0.1)
    here.send("b")
    assert here.next_due() == NOW
    assert there.received(batch_of(here, 0.1), 0.1) == ["a"]
    assert there.received(batch_of(here, 0.1), 0.1) == ["b"]
    assert here.outgoing(0.1) is None


def test_an_acknowledgement_that_comes_while_resending_is_heeded() -> None:
    here, there = Delivery(), Delivery()
    for message in "ab":
        here.send(message)
    there.received(batch_of(here), 0.0)
    here.reconnected(0.0)
    here.received(batch_of(there, ACK_DELAY), 0.1)
    assert here.outgoing(0.1) is None
    assert here.unacknowledged == 0


def test_receiver_is_never_ahead_of_what_it_can_remember() -> None:
    here, there = Delivery(), Delivery()
    for n in range(2 * WINDOW):
        here.send(n)
    batches = []
    while (batch := here.outgoing(0.0)) is not None:
        batches.append(batch)
    assert sum(len(batch[3]) for batch in batches) == WINDOW
    assert here.next_due() == RESEND_FIRST
    received = [n for batch in reversed(batches[1:]) for n in there.received(batch, 0.0)]
    assert len(there._beyond) == WINDOW - BATCH_MOST
    received += there.received(batches[0], 0.0)
    assert not there._beyond
    assert sorted(received) == list(range(WINDOW))
    here.received(batch_of(there), 0.0)
    assert here.next_due() == NOW
    assert batch_of(here)[2] == WINDOW + 1


def test_acknowledgements_stay_small_however_many_holes() -> None:
    here, there = Delivery(), Delivery()
    for n in range(4 * RANGES_MOST):
        here.send(n)
        batch = batch_of(here)
        if n % 2:
            there.received(batch, 0.0)
    ranges = batch_of(there)[1]
    assert ranges == [[n, n] for n in range(2, 2 * RANGES_MOST + 1, 2)]
    here.received([0, ranges, 1, []], 0.0)
    assert here.unacknowledged == 3 * RANGES_MOST


@pytest.mark.parametrize(
    "batch",
    [
        None,
        [],
        7,
        [0, [], 1],
        [0, [], 1, [], 5],
        [-1, [], 1, []],
        [3, [], 1, []],  # acknowledges what was never sent
        [0, [[1, 3]], 1, []],
        [0, [[2, 1]], 1, []],
        [0, [[0, 1]], 1, []],
        [0, [[1]], 1, []],
        [0, [7], 1, []],
        [0, [["1", 2]], 1, []],
        [0, [[1, 1]] * (RANGES_MOST + 1), 1, []],
        [0, [], 0, ["a"]],
        [0, [], WINDOW + 1, ["a"]],
        [0, [], 10**30, ["a"]],
        [0, [], 1, ["a"] * (BATCH_MOST + 1)],
        [0, [], 1, "abc"],
        [0, [], "1", ["a"]],
        ["0", [], 1, ["a"]],
        {"0": 1},
    ],
)
def test_a_batch_that_cannot_be_is_refused_whole(batch: Any) -> None:
    end = Delivery()
    for message in "ab":
        end.send(message)
    batch_of(end)
    with pytest.raises(ProtocolError, match="cannot be"):
        end.received(batch, 0.0)
    assert end.unacknowledged == 2
    assert end.received([0, [], 1, ["a"]], 0.0) == ["a"]


def test_the_example_in_the_text_runs() -> None:
    exec(textwrap.dedent((Delivery.__doc__ or "").split("Example::")[1]), {"Delivery": Delivery})


@settings(max_examples=200 * EFFORT, derandomize=EFFORT == 1, database=None, deadline=None)
@given(
    course=st.lists(
        st.tuples(
            st.sampled_from(
                ["send", "send", "write", "write", "arrive", "arrive", "twice", "lose", "wait", "renew"]
            ),
            st.booleans(),
            st.integers(0, 1000),
        ),
        max_size=120,
    )
)
def test_everything_sent_arrives_once_over_a_link_that_loses_doubles_and_reorders(
    course: list[tuple[str, bool, int]],
) -> None:
    ends = {False: Delivery(), True: Delivery()}
    sent: dict[bool, list[int]] = {False: [], True: []}
    got: dict[bool, list[int]] = {False: [], True: []}
    flying: list[tuple[bool, bytes]] = []
    now = 0.0

    def arrive(index: int, keep: bool) -> None:
        to, batch = flying[index] if keep else flying.pop(index)
        got[to] += ends[to].received(msgpack.unpackb(batch), now)

    def write(end: bool) -> None:
        while (batch := ends[end].outgoing(now)) is not None:
            flying.append((not end, msgpack.packb(batch)))

    for what, end, number in course:
        match what:
            case "send":
                ends[end].send(len(sent[end]))
                sent[end].append(len(sent[end]))
            case "write":
                write(end)
            case "arrive" | "twice" if flying:
                arrive(number % len(flying), keep=what == "twice")
            case "lose" if flying:
                flying.pop(number % len(flying))
            case "wait":
                now += number / 200
            case "renew":
                flying.clear()
                ends[False].reconnected(now)
                ends[True].reconnected(now)
        assert all(len(set(numbers)) == len(numbers) for numbers in got.values())

    for _ in range(100):
        for end in ends:
            write(end)
        while flying:
            arrive(0, keep=False)
        dues = [due for each in ends.values() if (due := each.next_due()) is not None]
        if not dues:
            break
        now = max(now, min(dues))
    assert {end: sorted(numbers) for end, numbers in got.items()} == {True: sent[False], False: sent[True]}
    for each in ends.values():
        assert each.unacknowledged == 0
        assert not each._beyond
        assert each.next_due() is None
