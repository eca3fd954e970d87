"""The end of an agent: together with the rest of its group, at once, or in a forked child."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import ExitStack
from typing import Final

from rpc.agent.activity import Activity
from rpc.agent.caller import Caller
from rpc.agent.departure import SHUT_DOWN, Departure
from rpc.agent.futures import Completions
from rpc.agent.group import AgentGroup
from rpc.agent.hooks import Hooks
from rpc.agent.messages import Messages
from rpc.agent.platform import Platform
from rpc.agent.request_runner import RequestRunner
from rpc.agent.waiting import Waiting
from rpc.errors import ForkedProcessError, RpcError
from rpc.group.heartbeat import Heartbeat
from rpc.runtime.blocking import check_may_block
from rpc.runtime.interrupts import interruptible, protected
from rpc.runtime.mailbox import Mailbox

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
        departure: Departure,
        group: AgentGroup,
        messages: Messages,
        caller: Caller,
        runner: RequestRunner,
        completions: Completions,
        heartbeat: Heartbeat,
        waiting: Waiting,
        platform: Platform,
        mailbox: Mailbox,
        forget: Callable[[], object],
    ) -> None:
        self.hooks = hooks
        self.activity = activity
        self.departure = departure
        self.closed = False
        self._group = group
        self._messages = messages
        self._caller = caller
        self._runner = runner
        self._completions = completions
        self._heartbeat = heartbeat
        self._waiting = waiting
        self._platform = platform
        self._mailbox = mailbox
        self._forget = forget

    def begin(self) -> None:
        """Start, after the agent has joined its group. On the loop's thread."""
        self._heartbeat.begin()
        self._waiting.begin()

    @protected  # except the waiting: once that has ended, in any way, nothing may keep it from closing
    def shutdown(
        self, graceful: bool, timeout: float, *, release_references: bool, raise_on_leaks: bool
    ) -> None:
        """Leave the group and end; see ``rpc.shutdown``."""
        if graceful:
            check_may_block()
            if self._platform.executor.owns_current_thread():
                raise RpcError("a callee cannot shut down gracefully: it would wait for its own call to end")
        timeout = self._caller.effective_timeout(timeout)
        if graceful and not self.departure.claim():
            name = self._group.peers.own.name
            raise RpcError(f"worker '{name}' is being shut down by another thread already")
        try:
            if graceful:
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
            self._mailbox.close,
            *(functools.partial(_interruptibly, step) for step in self.hooks.close),
            functools.partial(self._leave_group, reason),
            self._caller.table.end,
            *self.hooks.closed,
            self._runner.stop,
            functools.partial(self._completions.stop, _STOP_SECONDS),
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
        self._heartbeat.stop()
        self._waiting.stop()
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
        self._mailbox.close()
        for handler in self.hooks.forked:
            handler()
        for connection in self._group.connections.connections(self._group.peers.all()):
            connection.abandon()
        for call in self._caller.table.waiting():
            call.abandon(ForkedProcessError(f"this process was forked while {call.asked} was under way"))
        self._platform.process.restore(give_back=False)


@interruptible
def _interruptibly(step: Callable[[], object]) -> None:
    step()
