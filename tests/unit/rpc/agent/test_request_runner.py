"""Running requests: one that cannot begin is not under way, and one that has been read keeps nothing."""

from __future__ import annotations

from queue import Queue
from types import SimpleNamespace
from typing import Any

import pytest

from rpc.agent.received_requests import Request
from rpc.agent.request_runner import LATER, RequestRunner
from rpc.agent.tape import Tracing
from rpc.errors import NotInitializedError
from rpc.runtime.events import Events
from rpc.runtime.mailbox import Counter
from rpc.serialization.payload import Payload
from rpc.wire.frames import Frame, Kind
from tests.support.noted_activity import NotedActivity
from tests.support.streams import SOON


class Answered(Exception):
    """The call was answered, though it has raised."""


def answer(value: Any, error: BaseException | None) -> None:
    raise Answered


async def function() -> None:
    raise AssertionError("it must not run")


def make(serializer: Any = None, executor: Any = None, answers: Any = None) -> tuple[RequestRunner, Counter]:
    """A runner of an agent that has what is given, and the number of requests that it has postponed."""
    activity = NotedActivity()
    peers: Any = SimpleNamespace(own=SimpleNamespace(name="callee"))
    parts: Any = (peers, serializer, Tracing(), Events(), executor, activity, answers)
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


class Enclosed:
    """Notes what is run inside of it."""

    def __init__(self) -> None:
        self.notes: list[str] = []

    def enclosing(self, function: Any) -> Any:
        def call(*args: Any) -> Any:
            self.notes.append("function")
            return function(*args)

        return call

    def later(self, coroutine: Any, answer: Any) -> tuple[Any, Any]:
        self.notes.append("coroutine")
        coroutine.close()
        return other(), answer


async def other() -> int:
    return 7


def test_a_request_runs_inside_of_its_enclosure() -> None:
    answers: Queue[tuple[Any, BaseException | None]] = Queue()
    at_once: Any = SimpleNamespace(submit=lambda task: task[0](task[1]))
    runner, _ = make(executor=at_once)
    request: Any = Request(None, None)  # type: ignore[arg-type]
    request.enclosure = enclosed = Enclosed()
    assert runner.start(int, ("5",), {}, request) == 5
    assert runner.start(function, (), {}, request, lambda *answer: answers.put(answer)) is LATER
    assert answers.get(timeout=SOON) == (7, None)
    assert enclosed.notes == ["function", "function", "coroutine"]
    runner.stop()


@pytest.mark.parametrize(("waiting", "together"), [(0, False), (16, False), (17, True)])
def test_answers_may_be_sent_together_while_many_tasks_wait(waiting: int, together: bool) -> None:
    sent: list[bool] = []
    codec = SimpleNamespace(
        load_call=lambda *_, **__: (int, (), {}), dumps=lambda *_, **__: Payload({}, [b"0"])
    )
    answers = SimpleNamespace(answer=lambda *_, coalesce: sent.append(coalesce))
    executor = SimpleNamespace(lend=lambda *_, **__: waiting)
    serializer = SimpleNamespace(codecs={0: codec})
    callee, _ = make(serializer, executor, answers)
    caller: Any = SimpleNamespace(name="worker1", reader=None)
    callee.run(Request(caller, Frame(Kind.CALL, 1, {}, [b""], 0)))
    assert sent == [together]
