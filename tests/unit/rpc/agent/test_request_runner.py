"""The callee's side: in which codec a later answer is, what cannot begin is not under way, and what runs."""

from __future__ import annotations

import gc
import threading
import weakref
from types import SimpleNamespace
from typing import Any

import pytest

from rpc.agent.request_runner import Request, RequestRunner, running
from rpc.errors import NotInitializedError
from rpc.runtime.events import Events
from rpc.runtime.loop import LoopThread
from rpc.runtime.mailbox import Counter
from rpc.serialization.payload import Payload
from rpc.wire.frames import Frame, Kind


class Answered(Exception):
    """The call was answered, though it has raised."""


def answer(value: Any, error: BaseException | None) -> None:
    raise Answered


async def function() -> None:
    raise AssertionError("it must not run")


def make() -> tuple[RequestRunner, Counter]:
    postponed = Counter()
    agent: Any = SimpleNamespace(postponed=postponed, something_ended=lambda: None)
    return RequestRunner(agent), postponed  # all that it asks of an agent here


class Codec:
    """Writes nothing else."""

    def dumps(self, value: str, *_: Any, **__: Any) -> Payload:
        return Payload({}, [value.encode()], 7)


def test_an_answer_that_comes_later_is_in_the_codec_of_its_request() -> None:
    sent: list[tuple[int, int, list[bytes], int]] = []

    def send(_: object, kind: int, call_id: int, payload: Payload) -> None:
        sent.append((kind, call_id, payload.buffers, payload.codec))

    agent: Any = SimpleNamespace(
        serializer=SimpleNamespace(codecs={7: Codec()}), tape=None, events=Events(), send=send
    )
    peer: Any = SimpleNamespace(name="caller", lost=None)
    later = RequestRunner(agent).replier(Request(peer, Frame(Kind.CALL, 5, {}, [b"asked"], codec=7)))
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
