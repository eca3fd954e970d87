"""What comes in: a request that waits for what travels with it is under way until it runs."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from rpc.agent.dispatcher import Dispatcher
from rpc.agent.request_runner import Request
from rpc.errors import MessageLostError
from rpc.runtime.events import Events
from rpc.runtime.executor import Task
from rpc.runtime.mailbox import Counter
from rpc.serialization.serializer import Serializer
from rpc.wire.frames import Kind, encode


class Agent:
    """An agent's part: it runs tasks at once, and notes how many requests are postponed when it is told."""

    def __init__(self) -> None:
        self.postponed = Counter()
        self.serializer = Serializer()
        self.events = Events()
        self.activity = SimpleNamespace(listener=None)
        self.executor = SimpleNamespace(submit=self.run)
        self.told: list[int] = []

    def run(self, task: Task) -> None:
        function, argument = task
        function(argument)
        self.something_ended()

    def something_ended(self) -> None:
        self.told.append(self.postponed.value)


def test_who_waits_to_leave_is_told_when_a_request_is_postponed_no_more() -> None:
    """The request may have ended before: what is told then comes too early."""
    agent = Agent()
    confirmations: list[Callable[[], object]] = []

    def ready(_: object, when_ready: Callable[[], object]) -> bool:
        confirmations.append(when_ready)
        return False

    agent.serializer.ready = ready  # type: ignore[assignment]
    ran: list[Request] = []
    tasks: list[Task] = []
    request: Any = Request(None, None, {"rref": []})  # type: ignore[arg-type]
    Dispatcher(agent, ran.append, {}).accept(request, ran.append, tasks)  # type: ignore[arg-type]
    assert (ran, tasks, agent.postponed.value) == ([], [], 1)
    [confirm] = confirmations
    confirm()
    assert ran == [request]
    assert agent.told[-1] == 0


def test_that_an_answer_was_lost_is_said_by_a_thread_that_may_wait() -> None:
    """Who hears of the loss reads, and acknowledgements make the room for which it would wait."""
    agent: Any = Agent()
    failed: list[tuple[object, int, BaseException]] = []
    tasks: list[Task] = []
    agent.fail, agent.run_soon = lambda *answer: failed.append(answer), tasks.extend
    peer: Any = SimpleNamespace(name="worker1")
    head = bytes(encode(Kind.REPLY, 7, {}, [b"value"])[0][0])
    Dispatcher(agent, lambda _: None, {}).message_lost(peer, head)
    assert not failed
    [task] = tasks
    agent.run(task)
    [(to, call_id, error)] = failed
    assert (to, call_id, type(error)) == (peer, 7, MessageLostError)
