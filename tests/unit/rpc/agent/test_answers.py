"""Answers: in which codec a later one is, and which thread says that one was lost."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from rpc.agent.answers import Answers, Request
from rpc.agent.tape import Tracing
from rpc.errors import MessageLostError
from rpc.runtime.events import Events
from rpc.runtime.tasks import Task
from rpc.serialization.payload import Payload
from rpc.wire.frames import Frame, Kind


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
