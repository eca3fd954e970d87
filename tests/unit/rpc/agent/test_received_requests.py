"""Requests: what keeps one from running, inside of what it runs, and until when it counts as under way."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from rpc.agent.received_requests import Answers, ReceivedRequests, Request
from rpc.agent.tape import Tracing
from rpc.errors import MessageLostError, NotInitializedError
from rpc.runtime.events import Events
from rpc.runtime.tasks import Task
from rpc.serialization.payload import Payload
from rpc.wire.frames import Frame, Kind
from tests.support.noted_activity import NotedActivity


def answer(value: Any, error: BaseException | None) -> None:
    raise AssertionError("it was answered, though it has raised")


async def function() -> None:
    raise AssertionError("it must not run")


def make(
    activity: NotedActivity | None = None, serializer: Any = None, executor: Any = None, **answers: Any
) -> ReceivedRequests:
    """The requests of an agent that has what is given, and nothing else that is asked for here."""
    peers: Any = SimpleNamespace(own=SimpleNamespace(name="callee"))
    replies: Any = SimpleNamespace(unanswered={}, **answers)
    events = Events()
    return ReceivedRequests(
        replies, peers, serializer, Tracing(), events, executor, activity or NotedActivity()
    )


def test_after_stop_no_coroutine_begins() -> None:
    activity = NotedActivity()
    callee = make(activity)
    callee.stop()
    with pytest.raises(NotInitializedError, match="shutting down"):
        callee.start(function, (), {}, Request(None, None), answer)  # type: ignore[arg-type]
    assert activity.postponed.value == 0


class ReferenceCodec:
    def load_call(self, header: Any, buffers: Any, arrivals: Any, peer: Any, *, connect: Any) -> Any:
        return id, (arrivals["rref"][0],), {}


def test_a_request_that_has_been_read_keeps_no_reference_alive() -> None:
    callee = make(serializer=SimpleNamespace(codecs={0: ReferenceCodec()}))
    reference = object()
    peer: Any = SimpleNamespace(name="worker1")
    request = Request(peer, Frame(Kind.CALL, 1, {}, [b""], 0), {"rref": [reference]})
    assert callee.load(request)[1] == (reference,)
    assert request.arrivals is None


def test_a_request_that_cannot_begin_raises_its_error() -> None:
    callee = make()
    peer: Any = SimpleNamespace(name="worker1", lost=None)
    request = Request(peer, Frame(Kind.CALL, 1, {}, [b""], 0))
    request.fail(OSError("no device"))
    with pytest.raises(OSError, match="no device"):
        callee.load(request)


@pytest.mark.parametrize(("waiting", "together"), [(0, False), (16, False), (17, True)])
def test_answers_may_be_sent_together_while_many_tasks_wait(waiting: int, together: bool) -> None:
    sent: list[bool] = []
    codec = SimpleNamespace(
        load_call=lambda *_, **__: (int, (), {}), dumps=lambda *_, **__: Payload({}, [b"0"])
    )
    executor = SimpleNamespace(lend=lambda *_, **__: waiting)
    callee = make(
        serializer=SimpleNamespace(codecs={0: codec}),
        executor=executor,
        answer=lambda *_, coalesce: sent.append(coalesce),
    )
    caller: Any = SimpleNamespace(name="worker1", reader=None)
    callee.run(Request(caller, Frame(Kind.CALL, 1, {}, [b""], 0)))
    assert sent == [together]


# ---- requests that wait for objects


class Waiting:
    """A request that waits for objects, of an agent whose tasks run at once."""

    def __init__(self) -> None:
        self.ran: list[Request] = []
        self.peer: Any = SimpleNamespace(reader=None, lost=None)
        self.request = Request(self.peer, None, {"rref": []})  # type: ignore[arg-type]
        self.activity = NotedActivity()
        self._confirmations: list[Callable[[], object]] = []
        self.callee = make(
            self.activity,
            SimpleNamespace(ready=self._ready),
            SimpleNamespace(submit=self._run, lend=lambda *_, **__: 0),
        )

    def _ready(self, _: object, when_ready: Callable[[], object]) -> bool:
        self._confirmations.append(when_ready)
        return False

    def _run(self, task: Task) -> None:
        function, argument = task
        function(argument)
        self.activity.ended()

    def accept(self) -> None:
        assert self.callee.accept(self.request, self.ran.append) is None

    def confirm(self) -> None:
        """The objects are ready."""
        [confirm] = self._confirmations
        confirm()


def test_who_waits_to_leave_is_told_when_a_request_is_postponed_no_more() -> None:
    """The request may have ended before: what is told then comes too early."""
    waiting = Waiting()
    waiting.accept()
    assert (waiting.ran, waiting.activity.postponed.value) == ([], 1)
    waiting.confirm()
    assert waiting.ran == [waiting.request]
    assert waiting.activity.told[-1] == 0


@pytest.mark.parametrize("before", [False, True])
def test_a_cancelled_request_does_not_wait_for_objects_and_is_counted_no_more(before: bool) -> None:
    waiting = Waiting()
    if before:
        waiting.request.cancel()
    waiting.accept()
    if not before:
        waiting.callee.peer_gone(waiting.peer, "it has died")
    for _ in range(2):
        assert (waiting.ran, waiting.activity.postponed.value) == ([waiting.request], 0)
        assert waiting.request.cancelled
        waiting.confirm()


# ---- answers


def answers(**given: Any) -> Answers:
    """Answers of an agent that has what is given, and nothing else that is asked for here."""
    parts: dict[str, Any] = {"send": None, "run_soon": None, "serializer": None, "peers": None}
    return Answers(tracing=Tracing(), events=Events(), **(parts | given))


class Codec:
    """Writes nothing else."""

    def dumps(self, value: str, *_: Any, **__: Any) -> Payload:
        return Payload({}, [value.encode()], 7)


def test_an_answer_that_comes_later_is_in_the_codec_of_its_request() -> None:
    sent: list[tuple[int, int, list[bytes], int]] = []

    def send(_: object, kind: int, call_id: int, payload: Payload, **__: object) -> None:
        sent.append((kind, call_id, payload.buffers, payload.codec))

    serializer = SimpleNamespace(codecs={7: Codec()}, adopt=None)
    peer: Any = SimpleNamespace(name="caller", lost=None)
    request = Request(peer, Frame(Kind.CALL, 5, {}, [b"asked"], codec=7))
    later = answers(serializer=serializer, send=send).replier(request)
    later("value", None)
    assert sent == [(Kind.REPLY, 5, [b"value"], 7)]


def test_that_an_answer_was_lost_is_said_by_a_thread_that_may_wait() -> None:
    """The thread that hears of the loss reads, and acknowledgements make the room for which it would wait."""
    tasks: list[Task] = []
    failed: list[tuple[object, int, BaseException]] = []
    callee = answers(run_soon=tasks.extend)
    callee.fail = lambda *answer: failed.append(answer)  # type: ignore[method-assign]
    peer: Any = SimpleNamespace(name="worker1")
    callee.answer_lost(peer, 7, "it broke")
    assert not failed
    [(function, argument)] = tasks
    function(argument)
    [(to, call_id, error)] = failed
    assert (to, call_id, type(error)) == (peer, 7, MessageLostError)
