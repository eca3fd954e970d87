"""Events: handlers are called in order until their subscription ends; their errors are logged."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from rpc.runtime.events import Events, PeerJoined
from tests.support.finalizers import ends_soon, running_in_locked_sections

EVENT = PeerJoined("worker1", 1)


def tell(events: Events) -> None:
    if events.peer_joined is not None:
        events.peer_joined(EVENT.name, EVENT.id)


def test_handlers_are_called_in_order_and_one_may_listen_twice() -> None:
    events, told = Events(), list[str]()

    def first(event: PeerJoined) -> None:
        told.append(f"first {event.name}")

    once = events.listen(PeerJoined, first)
    events.listen(PeerJoined, lambda event: told.append("second"))
    events.listen(PeerJoined, first)
    tell(events)
    once.close()
    once.close()
    tell(events)
    assert told == ["first worker1", "second", "first worker1", "second", "first worker1"]


def test_a_handler_that_fails_is_logged_and_keeps_nobody_from_hearing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    events, told = Events(), list[PeerJoined]()

    def fail(_: PeerJoined) -> None:
        raise ValueError("of the user's")

    events.listen(PeerJoined, fail)
    events.listen(PeerJoined, told.append)
    tell(events)
    assert told == [EVENT]
    assert "a handler of PeerJoined failed" in caplog.text


def test_a_handler_may_end_its_own_subscription() -> None:
    events, told = Events(), list[PeerJoined]()

    def once(event: PeerJoined) -> None:
        told.append(event)
        subscription.close()

    subscription = events.listen(PeerJoined, once)
    tell(events)
    tell(events)
    assert told == [EVENT]


@pytest.mark.parametrize("kind", [int, "PeerLost", Events])
def test_what_is_no_kind_of_event_is_refused_by_name(kind: object) -> None:
    with pytest.raises(TypeError, match=r"is no kind of event.*PeerLost"):
        Events().listen(kind, print)  # type: ignore[arg-type]


@pytest.mark.parametrize("change", ["begins", "ends"])
def test_a_finalizer_may_end_a_subscription_while_another_one_begins_or_ends(
    change: str,
) -> None:
    within: list[Callable[[], object]] = []
    with running_in_locked_sections(within):
        events = Events()
    told: list[str] = []
    of_garbage = events.listen(PeerJoined, lambda _: told.append("garbage"))
    other = events.listen(PeerJoined, lambda _: told.append("other"))
    events.listen(PeerJoined, lambda _: told.append("last"))
    within.append(of_garbage.close)
    if change == "ends":
        assert ends_soon(other.close)
    else:
        assert ends_soon(lambda: events.listen(PeerJoined, lambda _: told.append("new")))
    tell(events)
    assert told == (["last"] if change == "ends" else ["other", "last", "new"])
