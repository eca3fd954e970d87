"""Exactly-once delivery: what one end sends comes out of the other once, in whatever order batches come."""

from __future__ import annotations

import textwrap
from typing import Any

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rpc.errors import ProtocolError
from rpc.group.delivery import ACK_EVERY, BATCH_MOST, WINDOW, Batch, Delivery
from tests.support.effort import EFFORT, PROFILE


def batch_of(end: Delivery, *, acknowledge: bool = False) -> Batch:
    """The next batch, which there must be, as msgpack would deliver it."""
    batch = end.outgoing(acknowledge=acknowledge)
    assert batch is not None
    arrived: Batch = msgpack.unpackb(msgpack.packb(batch))
    return arrived


def sending(*messages: Any) -> Delivery:
    end = Delivery()
    for message in messages:
        end.send(message)
    return end


def test_an_idle_end_sends_nothing() -> None:
    end = Delivery()
    assert not end.is_due
    assert end.outgoing(acknowledge=True) is None


def test_an_acknowledgement_rides_on_messages_that_go_the_other_way() -> None:
    here, there = sending("question"), Delivery()
    there.received(batch_of(here))
    there.send("answer")
    assert here.received(batch_of(there)) == ["answer"]
    assert here.unacknowledged == 0
    assert not there.owes


def test_an_acknowledgement_goes_alone_when_asked_for() -> None:
    here, there = sending("a"), Delivery()
    there.received(batch_of(here))
    assert [there.owes, there.outgoing()] == [True, None]
    assert here.received(batch_of(there, acknowledge=True)) == []
    assert here.unacknowledged == 0
    assert [here.owes, there.owes] == [False, False]  # an acknowledgement is not acknowledged


def test_an_acknowledgement_of_many_messages_does_not_wait() -> None:
    here, there = sending(*range(ACK_EVERY - 1)), Delivery()
    there.received(batch_of(here))
    assert not there.is_due
    here.send("one more")
    there.received(batch_of(here))
    here.received(batch_of(there))
    assert here.unacknowledged == 0


def test_a_message_that_comes_twice_is_handed_over_once_and_acknowledged_at_once() -> None:
    here, there = sending("a"), Delivery()
    batch = batch_of(here)
    assert there.received(batch) == ["a"]
    assert there.received(batch) == []
    here.received(batch_of(there))
    assert here.unacknowledged == 0


def test_no_more_is_on_its_way_than_the_receiver_remembers() -> None:
    here, there = sending(*range(2 * WINDOW)), Delivery()
    batches = []
    while (batch := here.outgoing()) is not None:
        batches.append(batch)
    assert [len(batch[2]) for batch in batches] == [BATCH_MOST] * (WINDOW // BATCH_MOST)
    received = [message for batch in reversed(batches) for message in there.received(batch)]
    assert sorted(received) == list(range(WINDOW))
    here.received(batch_of(there))
    assert here.is_due
    assert batch_of(here)[1] == WINDOW + 1


@pytest.mark.parametrize(
    "batch",
    [
        None,
        [],
        7,
        [0, 1],
        [0, 1, [], 5],
        [-1, 1, []],
        [3, 1, []],  # acknowledges what was never sent
        [0, 0, ["a"]],
        [0, WINDOW + 1, ["a"]],
        [0, 10**30, ["a"]],
        [0, 1, ["a"] * (BATCH_MOST + 1)],
        [0, 1, "abc"],
        [0, "1", ["a"]],
        ["0", 1, ["a"]],
        {"0": 1},
    ],
)
def test_a_batch_that_cannot_be_is_refused_whole(batch: Any) -> None:
    end = sending("a", "b")
    batch_of(end)
    with pytest.raises(ProtocolError, match="cannot be"):
        end.received(batch)
    assert end.unacknowledged == 2
    assert end.received([0, 1, ["a"]]) == ["a"]


def test_the_example_in_the_text_runs() -> None:
    exec(textwrap.dedent((Delivery.__doc__ or "").split("Example::")[1]), {"Delivery": Delivery})


@settings(PROFILE, max_examples=200 * EFFORT)
@given(
    course=st.lists(
        st.tuples(
            st.sampled_from(["send", "send", "write", "write", "acknowledge", "arrive", "again"]),
            st.booleans(),
            st.integers(0, 1000),
        ),
        max_size=120,
    )
)
def test_everything_sent_arrives_once_where_batches_come_twice_and_in_any_order(
    course: list[tuple[str, bool, int]],
) -> None:
    ends = {False: Delivery(), True: Delivery()}
    sent: dict[bool, list[int]] = {False: [], True: []}
    got: dict[bool, list[int]] = {False: [], True: []}
    flying: list[tuple[bool, bytes]] = []

    def arrive(index: int, again: bool = False) -> None:
        to, batch = flying[index] if again else flying.pop(index)
        got[to] += ends[to].received(msgpack.unpackb(batch))

    def write(end: bool, *, acknowledge: bool) -> None:
        while (batch := ends[end].outgoing(acknowledge=acknowledge)) is not None:
            flying.append((not end, msgpack.packb(batch)))

    for what, end, number in course:
        match what:
            case "send":
                ends[end].send(len(sent[end]))
                sent[end].append(len(sent[end]))
            case "write" | "acknowledge":
                write(end, acknowledge=what == "acknowledge")
            case "arrive" | "again" if flying:
                arrive(number % len(flying), what == "again")

    for _ in range(4):
        for end in ends:
            write(end, acknowledge=True)
        while flying:
            arrive(0)
    assert {end: sorted(numbers) for end, numbers in got.items()} == {True: sent[False], False: sent[True]}
    assert all(end.unacknowledged == 0 and not end.is_due for end in ends.values())
