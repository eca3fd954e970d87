"""The tables of states by which two workers come to share memory."""

from __future__ import annotations

import itertools

import pytest

from rpc.bulk.shared_memory.negotiation import RECEIVER, SENDER, Event, Negotiation, OfferState, Table
from rpc.errors import ProtocolError

LONGEST = 5


def reach(table: Table, events: tuple[Event, ...]) -> OfferState | None:
    """The state after some events; None if one of them cannot be."""
    end = Negotiation(table)
    try:
        for event in events:
            end.on(event)
    except ProtocolError:
        return None
    return end.state


@pytest.mark.parametrize(
    ("table", "way"),
    [
        (SENDER, (Event.NEED, Event.COME, Event.PROOF)),
        (RECEIVER, (Event.ASK, Event.ENTERED)),
    ],
    ids=["sender", "receiver"],
)
def test_there_is_one_way_to_shared_memory(table: Table, way: tuple[Event, ...]) -> None:
    for count in range(LONGEST):
        for events in itertools.product(Event, repeat=count):
            shared = reach(table, events) is OfferState.SHARED
            without_drops = tuple(event for event in events if event is not Event.DROP)
            assert not shared or without_drops == way
    assert reach(table, way) is OfferState.SHARED
