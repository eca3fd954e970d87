"""A tracer, written as a user would write one: it listens to the events of one agent, which calls itself."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
from torch.distributed import HashStore  # type: ignore[attr-defined]

import rpc
from rpc import events
from rpc.errors import RpcTimeoutError, SerializationError
from tests.support.streams import SOON, until


class Tracer:
    """Notes what happens, in order, on whatever thread."""

    KINDS = (
        events.CallBegun,
        events.CallEnded,
        events.RequestBegun,
        events.RequestEnded,
        events.MessageSent,
        events.MessageReceived,
    )

    def __init__(self) -> None:
        self.seen: list[object] = []
        self.subscriptions = [events.listen(kind, self.seen.append) for kind in self.KINDS]

    def ended(self) -> list[events.CallEnded]:
        return [event for event in self.seen if isinstance(event, events.CallEnded)]

    def close(self) -> None:
        for subscription in self.subscriptions:
            subscription.close()


@pytest.fixture
def tracer() -> Iterator[Tracer]:
    rpc.init_with_store(None, HashStore(), "alone", 0, 1)
    yield Tracer()
    rpc.shutdown()


def test_a_call_is_seen_from_its_beginning_to_its_end(tracer: Tracer) -> None:
    assert rpc.rpc_sync("alone", divmod, (7, 2)) == (3, 1)
    until(lambda: len(tracer.seen) == 8)  # the callee's thread tells of the end after the answer is sent
    begun, sent, received, request, *_ = tracer.seen
    assert isinstance(begun, events.CallBegun)
    assert (begun.to, begun.what) == ("alone", "divmod")
    assert isinstance(sent, events.MessageSent)
    assert isinstance(received, events.MessageReceived)
    assert (sent.to, sent.kind, sent.size) == (received.source, received.kind, received.size)
    assert request == events.RequestBegun("alone", begun.call_id)
    assert events.RequestEnded("alone", begun.call_id, failed=False) in tracer.seen
    (ended,) = tracer.ended()
    assert (ended.call_id, ended.to, ended.what, ended.error) == (begun.call_id, "alone", "divmod", None)
    assert 0 < ended.seconds < SOON


def test_an_exception_of_the_callees_is_an_answer(tracer: Tracer) -> None:
    with pytest.raises(ZeroDivisionError):
        rpc.rpc_sync("alone", divmod, (7, 0))
    until(lambda: any(isinstance(event, events.RequestEnded) and event.failed for event in tracer.seen))
    assert [call.error for call in tracer.ended()] == [None]


go_on = threading.Event()


def wait_to_go_on() -> bool:
    return go_on.wait(SOON)


def test_a_call_whose_time_is_over_ends_with_that_error(tracer: Tracer) -> None:
    with pytest.raises(RpcTimeoutError):
        rpc.rpc_sync("alone", wait_to_go_on, timeout=0.05)
    future = rpc.rpc_async("alone", wait_to_go_on, timeout=0.05)
    with pytest.raises(RpcTimeoutError):
        future.wait()
    assert [type(call.error) for call in tracer.ended()] == [RpcTimeoutError] * 2
    go_on.set()


def test_what_cannot_be_sent_is_no_call(tracer: Tracer) -> None:
    with pytest.raises(SerializationError):
        rpc.rpc_sync("alone", len, (threading.Lock(),))
    assert not tracer.seen


def test_a_call_that_began_before_anybody_listened_is_not_told_of(tracer: Tracer) -> None:
    tracer.close()
    go_on.clear()
    future = rpc.rpc_async("alone", wait_to_go_on)
    late = Tracer()
    go_on.set()
    assert future.wait()
    assert late.ended() == []
    late.close()
