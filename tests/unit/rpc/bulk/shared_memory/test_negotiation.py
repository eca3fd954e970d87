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


@pytest.mark.parametrize("table", [SENDER, RECEIVER], ids=["sender", "receiver"])
def test_a_peer_may_be_gone_in_every_state_and_then_nothing_more_happens(table: Table) -> None:
    for state, events in table.items():
        assert events[Event.GONE] is OfferState.SOCKET, state
    assert set(table[OfferState.SOCKET]) == {Event.GONE}


@pytest.mark.parametrize("table", [SENDER, RECEIVER], ids=["sender", "receiver"])
def test_every_state_of_a_table_is_reached_and_has_a_row(table: Table) -> None:
    reached = {following for events in table.values() for following in events.values()}
    assert reached | {OfferState.NEW} == set(table)


def test_an_error_says_what_happened_where() -> None:
    with pytest.raises(ProtocolError, match="'proof' about shared memory, where nothing was said"):
        Negotiation(SENDER).on(Event.PROOF)
