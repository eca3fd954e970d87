"""Running requests: one that cannot begin is not under way, and one that has been read keeps nothing."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from rpc.agent.received_requests import Request
from rpc.agent.request_runner import RequestRunner
from rpc.agent.tape import Tracing
from rpc.errors import NotInitializedError
from rpc.runtime.events import Events
from rpc.runtime.mailbox import Counter
from rpc.wire.frames import Frame, Kind
from tests.support.noted_activity import NotedActivity


class Answered(Exception):
    """The call was answered, though it has raised."""


def answer(value: Any, error: BaseException | None) -> None:
    raise Answered


async def function() -> None:
    raise AssertionError("it must not run")


def make(serializer: Any = None) -> tuple[RequestRunner, Counter]:
    """A runner of an agent that makes no answers, and the number of requests that it has postponed."""
    activity = NotedActivity()
    peers: Any = SimpleNamespace(own=SimpleNamespace(name="callee"))
    parts: Any = (peers, serializer, Tracing(), Events(), None, activity, None)
    return RequestRunner(*parts), activity.postponed


def test_after_stop_no_coroutine_begins() -> None:
    callee, postponed = make()
    callee.stop()
    with pytest.raises(NotInitializedError, match="shutting down"):
        callee.start(function, (), {}, Request(None, None), answer)  # type: ignore[arg-type]
    assert postponed.value == 0


class Codec:
    def load_call(self, header: Any, buffers: Any, arrivals: Any, peer: Any, *, connect: Any) -> Any:
        return id, (arrivals["rref"][0],), {}


def test_a_request_that_has_been_read_keeps_no_reference_alive() -> None:
    callee, _ = make(SimpleNamespace(codecs={0: Codec()}))
    reference = object()
    peer: Any = SimpleNamespace(name="worker1")
    request = Request(peer, Frame(Kind.CALL, 1, {}, [b""], 0), {"rref": [reference]})
    assert callee.load(request)[1] == (reference,)
    assert request.arrivals is None


def test_a_request_that_cannot_begin_raises_its_error() -> None:
    callee, _ = make()
    peer: Any = SimpleNamespace(name="worker1", lost=None)
    request = Request(peer, Frame(Kind.CALL, 1, {}, [b""], 0))
    request.fail(OSError("no device"))
    with pytest.raises(OSError, match="no device"):
        callee.load(request)
