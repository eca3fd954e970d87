"""The callee's side: in which codec a later answer is, what cannot begin is not under way, and what runs."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from rpc.agent.call_frames import running
from rpc.agent.request_runner import Request, RequestRunner
from rpc.agent.tape import Tracing
from rpc.errors import MessageLostError, NotInitializedError
from rpc.runtime.events import Events
from rpc.runtime.loop import LoopThread
from rpc.runtime.mailbox import Counter
from rpc.runtime.tasks import Task
from rpc.serialization.payload import Payload
from rpc.serialization.serializer import Serializer
from rpc.wire.frames import Frame, Kind


class Answered(Exception):
    """The call was answered, though it has raised."""


def answer(value: Any, error: BaseException | None) -> None:
    raise Answered


async def function() -> None:
    raise AssertionError("it must not run")


class Activity:
    """Notes how many requests are postponed when something ended."""

    def __init__(self) -> None:
        self.postponed = Counter()
        self.told: list[int] = []

    def ended(self) -> None:
        self.told.append(self.postponed.value)


def runner(**given: Any) -> RequestRunner:
    """A runner that has what is given, and nothing else that is asked for here."""
    parts: dict[str, Any] = {
        "peers": SimpleNamespace(own=SimpleNamespace(name="callee")),
        "serializer": Serializer(),
        "tracing": Tracing(),
        "events": Events(),
        "executor": None,
        "activity": Activity(),
        "send": None,
        "run_soon": None,
    }
    return RequestRunner(**(parts | given))


def make() -> tuple[RequestRunner, Counter]:
    activity = Activity()
    return runner(activity=activity), activity.postponed


class Codec:
    """Writes nothing else."""

    def dumps(self, value: str, *_: Any, **__: Any) -> Payload:
        return Payload({}, [value.encode()], 7)


def test_an_answer_that_comes_later_is_in_the_codec_of_its_request() -> None:
    sent: list[tuple[int, int, list[bytes], int]] = []

    def send(_: object, kind: int, call_id: int, payload: Payload) -> None:
        sent.append((kind, call_id, payload.buffers, payload.codec))

    serializer = SimpleNamespace(codecs={7: Codec()}, adopt=None)
    peer: Any = SimpleNamespace(name="caller", lost=None)
    later = runner(serializer=serializer, send=send).replier(
        Request(peer, Frame(Kind.CALL, 5, {}, [b"asked"], codec=7))
    )
    later("value", None)
    assert sent == [(Kind.REPLY, 5, [b"value"], 7)]


def test_after_stop_no_coroutine_begins() -> None:
    callee, postponed = make()
    callee.stop()
    with pytest.raises(NotInitializedError, match="shutting down"):
        callee.start(function, (), {}, Request(None, None), answer)  # type: ignore[arg-type]
    assert postponed.value == 0


def test_a_coroutine_whose_loop_has_just_ended_is_not_under_way(monkeypatch: pytest.MonkeyPatch) -> None:
    callee, postponed = make()
    ended = LoopThread("ended", "it does not run")
    assert ended.stop()
    monkeypatch.setattr(callee, "_coroutine_loop", lambda: ended.loop)
    with pytest.raises(RuntimeError):
        callee.start(function, (), {}, Request(None, None), answer)  # type: ignore[arg-type]
    assert postponed.value == 0


class Kept:
    pass


def test_whoever_asks_what_runs_is_not_kept_until_garbage_is_collected() -> None:
    def ask() -> weakref.ref[Kept]:
        kept = Kept()
        assert running(threading.enumerate()) == []
        return weakref.ref(kept)

    gc.disable()
    try:
        assert ask()() is None
    finally:
        gc.enable()


def test_what_runs_is_named_with_who_asked_for_it() -> None:
    begun, told = threading.Event(), threading.Event()

    def wait() -> None:
        begun.set()
        told.wait()

    peer: Any = SimpleNamespace(name="caller")
    request = Request(peer, Frame(Kind.CALL, 5, {}, [b"asked"], codec=7))
    runner, _ = make()
    thread = threading.Thread(target=runner.start, args=(wait, (), {}, request))
    thread.start()
    begun.wait()
    found = running([thread])
    told.set()
    thread.join()
    assert found == [f"{wait.__qualname__} for worker 'caller'"]


def test_who_waits_to_leave_is_told_when_a_request_is_postponed_no_more() -> None:
    """The request may have ended before: what is told then comes too early."""
    confirmations: list[Callable[[], object]] = []
    activity, serializer = Activity(), Serializer()

    def ready(_: object, when_ready: Callable[[], object]) -> bool:
        confirmations.append(when_ready)
        return False

    def run(task: Task) -> None:
        function, argument = task
        function(argument)
        activity.ended()

    serializer.ready = ready  # type: ignore[assignment]
    ran: list[Request] = []
    request = Request(SimpleNamespace(reader=None, lost=None), None, {"rref": []})  # type: ignore[arg-type]
    callee = runner(activity=activity, serializer=serializer, executor=SimpleNamespace(submit=run))
    assert callee.accept(request, ran.append) is None
    assert (ran, activity.postponed.value) == ([], 1)
    [confirm] = confirmations
    confirm()
    assert ran == [request]
    assert activity.told[-1] == 0


@pytest.mark.parametrize("before", [False, True])
def test_a_cancelled_request_does_not_wait_for_objects_and_is_counted_no_more(before: bool) -> None:
    confirmations: list[Callable[[], object]] = []
    activity, serializer = Activity(), Serializer()

    def ready(_: object, when_ready: Callable[[], object]) -> bool:
        confirmations.append(when_ready)
        return False

    serializer.ready = ready  # type: ignore[assignment]
    submitted: list[Task] = []
    lost: Any = SimpleNamespace(reader=None, lost=None)
    request = Request(lost, None, {"rref": []})  # type: ignore[arg-type]
    callee = runner(
        activity=activity, serializer=serializer, executor=SimpleNamespace(submit=submitted.append)
    )
    if before:
        request.cancel()
    assert callee.accept(request, print) is None
    if not before:
        callee.peer_gone(lost, "it has died")
    assert (len(submitted), activity.postponed.value, request.cancelled) == (1, 0, True)
    confirmations[0]()
    assert (len(submitted), activity.postponed.value) == (1, 0)


def test_that_an_answer_was_lost_is_said_by_a_thread_that_may_wait() -> None:
    """The thread that hears of the loss reads, and acknowledgements make the room for which it would wait."""
    tasks: list[Task] = []
    failed: list[tuple[object, int, BaseException]] = []
    callee = runner(run_soon=tasks.extend)
    callee.fail = lambda *answer: failed.append(answer)  # type: ignore[method-assign]
    peer: Any = SimpleNamespace(name="worker1")
    callee.answer_lost(peer, 7, "it broke")
    assert not failed
    [(function, argument)] = tasks
    function(argument)
    [(to, call_id, error)] = failed
    assert (to, call_id, type(error)) == (peer, 7, MessageLostError)
