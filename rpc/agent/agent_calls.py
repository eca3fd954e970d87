"""The calls of one agent, and the requests that it answers: their parts, and how these are connected."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from threading import Thread
from typing import Final

from rpc.agent.activity import Activity
from rpc.agent.border import Border
from rpc.agent.calls import Caller, CallTable
from rpc.agent.group import AgentGroup
from rpc.agent.hooks import Hooks
from rpc.agent.messages import Messages
from rpc.agent.received_requests import Answers, ReceivedRequests
from rpc.agent.slow_calls import SlowCalls
from rpc.agent.tape import Tracing
from rpc.options import AgentOptions
from rpc.runtime.events import Events
from rpc.runtime.executor import Executor
from rpc.serialization.serializer import Serializer

__all__ = ["Calls"]

_SHOWN: Final = 5
"""Maximum number of calls named in one log line."""


class Calls:
    """The calls of one agent, and the requests of other workers.

    Attributes:
        caller: makes calls, and the futures of calls.
        table: the calls under way.
        requests: the requests of other workers that are not answered yet; runs them.
        answers: answers requests.
        slow: reports calls without an answer.
        running: names what runs for other workers, by the threads of the executor.
    """

    def __init__(
        self,
        options: AgentOptions,
        group: AgentGroup,
        messages: Messages,
        hooks: Hooks,
        serializer: Serializer,
        tracing: Tracing,
        events: Events,
        activity: Activity,
        executor: Executor,
    ) -> None:
        loop, peers = group.loop_thread.loop, group.peers
        dispatcher, sender, control = messages.dispatcher, messages.sender, messages.control
        self._executor = executor
        self.table = table = CallTable(
            loop, serializer, tracing, events, activity, control.post, executor.submit_batch
        )
        self.caller = Caller(options.rpc_timeout, table, peers, sender, serializer, tracing, events)
        self.answers = answers = Answers(
            peers, serializer, tracing, events, sender.send, executor.submit_batch
        )
        self.requests = requests = ReceivedRequests(
            answers, peers, serializer, tracing, events, executor, activity
        )
        self.slow = SlowCalls(table, peers, loop, options.slow_call_seconds)
        self.running: Callable[[Iterable[Thread]], list[str]] = self._running
        table.register(dispatcher, sender)
        answers.register(dispatcher, sender)
        requests.register(dispatcher, control)
        activity.add(table.unanswered, lambda: table.opened)
        activity.serve(lambda: requests.begun)
        hooks.awaited.append(table.peers)
        hooks.gone.extend((lambda peer, _: table.lost(peer), requests.peer_gone))

    def put_border(self, border: Border) -> None:
        """Replace the border: what is done where messages come in and go out."""
        self.table.border = self.requests.border = border

    def describe(self) -> str:
        """Describe the calls that this worker waits for, and those that it runs."""
        made = [f"{call.asked} on worker '{call.peer.name}'" for call in self.table.waiting()]
        parts = [
            f"{words}: {', '.join(which[:_SHOWN])}"
            for words, which in (
                ("waiting for", made),
                ("running", self.running(self._executor.threads())),
            )
            if which
        ]
        return "; ".join(parts)

    def _running(self, _: Iterable[Thread]) -> list[str]:
        """Name the workers whose calls run. An observer, which looks at frames, names the functions."""
        return [f"a call of worker '{each.peer.name}'" for each in self.requests.entered()]
