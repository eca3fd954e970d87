"""The end of an agent: together with the rest of its group, at once, or in a forked child."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import ExitStack
from typing import Final

from rpc.agent.activity import Activity
from rpc.agent.agent_calls import Calls
from rpc.agent.departure import SHUT_DOWN, Departure
from rpc.agent.group import AgentGroup
from rpc.agent.hooks import Hooks
from rpc.agent.messages import Messages
from rpc.agent.platform import Platform
from rpc.errors import ForkedProcessError, RpcError
from rpc.runtime.blocking import check_may_block
from rpc.runtime.interrupts import interruptible, protected

__all__ = ["Lifecycle"]

_STOP_SECONDS: Final = 1.0
"""Time in seconds that ``close`` waits for running user code; its threads are daemons, and continue."""


class Lifecycle:
    """Starts and ends the work of an agent's parts.

    Args:
        forget: called when the agent is no longer the process's current one.

    Attributes:
        hooks: handlers for stages of the agent's life.
        activity: counts operations under way.
        departure: waits for the end of all work.
        closed: whether ``close`` has begun.
    """

    def __init__(
        self,
        hooks: Hooks,
        activity: Activity,
        group: AgentGroup,
        messages: Messages,
        calls: Calls,
        platform: Platform,
        forget: Callable[[], object],
    ) -> None:
        self.hooks = hooks
        self.activity = activity
        self.departure = Departure(
            activity, group.peers, group.connections, platform.loop_thread, hooks, calls.describe
        )
        self.departure.register(messages.dispatcher.on)
        self.closed = False
        self._group = group
        self._messages = messages
        self._calls = calls
        self._platform = platform
        self._forget = forget

    def begin(self) -> None:
        """Start, after the agent has joined its group. On the loop's thread."""
        self._messages.heartbeat.begin()
        self._calls.slow.begin()

    @protected  # except the waiting: once that has ended, in any way, nothing may keep it from closing
    def shutdown(
        self, graceful: bool, timeout: float, *, release_references: bool, raise_on_leaks: bool
    ) -> None:
        """Leave the group and end; see ``rpc.shutdown``."""
        if graceful:
            check_may_block()
            if self._platform.executor.owns_current_thread():
                raise RpcError("a callee cannot shut down gracefully: it would wait for its own call to end")
        timeout = self._calls.caller.effective_timeout(timeout)
        if graceful and not self.departure.claim():
            name = self._group.peers.own.name
            raise RpcError(f"worker '{name}' is being shut down by another thread already")
        try:
            if graceful:
                for leave in self.hooks.leaving:
                    leave()
                self.departure.wait_for_all(
                    timeout,
                    release=self.hooks.release if release_references else (),
                    check=self.hooks.check if raise_on_leaks else (),
                )
        finally:
            self._forget()
            self.close(SHUT_DOWN if graceful else "it has shut down without waiting")

    @protected
    def close(self, reason: str) -> None:
        """Leave immediately: say goodbye to all, fail what is under way, end the threads. Idempotent.

        An exception that interrupts a step, such as ``KeyboardInterrupt``, is raised after the last step.
        """
        if self.closed:
            return
        self.closed = True
        steps: tuple[Callable[[], object], ...] = (
            self._group.mailbox.close,
            *(functools.partial(_interruptibly, step) for step in self.hooks.close),
            functools.partial(self._leave_group, reason),
            self._calls.table.end,
            *self.hooks.closed,
            self._calls.requests.stop,
            functools.partial(self._platform.executor.stop, _STOP_SECONDS),
            self._platform.loop_thread.stop,
            self._platform.process.restore,
        )
        with ExitStack() as stack:
            for step in reversed(steps):
                stack.callback(step)

    def _leave_group(self, reason: str) -> None:
        if not self._platform.loop_thread.is_current():
            self._platform.loop_thread.wait_for(self.say_goodbye(reason))

    async def say_goodbye(self, reason: str) -> None:
        """The part of ``close`` on the loop's thread. If it is cancelled, it waits for no peer, and only
        closes what is open.
        """
        self._messages.heartbeat.stop()
        self._calls.slow.stop()
        try:
            await self._messages.bulk_streams.finish()
        finally:
            try:
                await self._group.connections.close(self._group.peers.all(), reason)
            finally:
                self._messages.shared_memory.close()
                await self._messages.bulk_streams.close()

    def abandon_after_fork(self) -> None:
        """Release the parent's connections without disturbing them, in a forked child.

        No lock may be taken: threads may hold it that do not exist here. Descriptors are closed, or the
        parent's peers would not notice its death while the child lives.
        """
        self.closed = True
        self._group.mailbox.close()
        for handler in self.hooks.forked:
            handler()
        for connection in self._group.connections.connections(self._group.peers.all()):
            connection.abandon()
        for call in self._calls.table.waiting():
            call.abandon(ForkedProcessError(f"this process was forked while {call.asked} was under way"))
        self._platform.process.restore(give_back=False)


@interruptible
def _interruptibly(step: Callable[[], object]) -> None:
    step()
