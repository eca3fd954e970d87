"""Records what this process does, for a trace: events of its agents and spans of its threads, in memory."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable
from contextlib import ExitStack
from threading import get_ident
from time import monotonic, time
from typing import Any, Final, TypeVar

import msgpack

from rpc.agent.agent import Agent
from rpc.agent.calls import name_of
from rpc.runtime import spans
from rpc.runtime.events import (
    CallBegun,
    CallEnded,
    CallSerialized,
    MessageSent,
    RequestBegun,
    RequestEnded,
    RunBegun,
    RunEnded,
)

__all__ = ["MAX_RECORDS", "Recorder"]

MAX_RECORDS: Final = 1_000_000
"""Maximum number of records of one process in a trace; later ones are counted and dropped."""

E = TypeVar("E")


class Recorder:
    """Records until ``stop``. Each record is a tuple: kind, time on the monotonic clock, thread, and more.

    Args:
        agents: those of this process, with their extensions.
    """

    def __init__(self, agents: list[Agent], limit: int = MAX_RECORDS) -> None:
        self._records: list[tuple[Any, ...]] = []
        self._limit = limit
        self._dropped = 0
        self._began = monotonic()
        self._subscriptions = ExitStack()
        self._threads: dict[int, str] = {}
        self._agents: list[Agent] = []
        self._subscriptions.enter_context(spans.listen(self._span))
        for agent in agents:
            self.follow(agent)

    def follow(self, agent: Agent) -> None:
        """Record the events of an agent, too."""
        own = len(self._agents)  # its name is known once it has joined its group
        self._agents.append(agent)
        put = self._put

        def listen(kind: type[E], handler: Callable[[E], object]) -> None:
            self._subscriptions.enter_context(agent.events.listen(kind, handler))

        listen(CallSerialized, lambda e: put("serialized", name_of(e.what), e.seconds, e.size))
        listen(CallBegun, lambda e: put("call", own, e.call_id, e.to, e.what, e.how))
        listen(MessageSent, lambda e: put("sent", e.to, e.kind, e.size))
        listen(CallEnded, lambda e: put("called", own, e.call_id, e.seconds, _error(e.error)))
        listen(RequestBegun, lambda e: put("came", e.source, e.call_id, own))
        listen(RunBegun, lambda e: put("run", e.source, e.call_id, own, name_of(e.what), e.queued, e.loaded))
        listen(RunEnded, lambda e: put("ran", e.source, e.call_id, own))
        listen(RequestEnded, lambda e: put("answered", e.source, e.call_id, own, e.failed))

    def stop(self) -> bytes:
        """End recording; returns the records as bytes, for ``trace_merge``."""
        self._subscriptions.close()
        workers = [agent.info.name for agent in self._agents]
        names = {each.ident: each.name for each in threading.enumerate() if each.ident is not None}
        names |= self._threads
        return bytes(
            msgpack.packb(
                {
                    "worker": ", ".join(workers) or f"process {os.getpid()}",
                    "workers": workers,
                    "host": socket.gethostname(),
                    "boot": _boot(),
                    "pid": os.getpid(),
                    "began": self._began,
                    "ended": monotonic(),
                    "wall": time() - monotonic(),
                    "threads": {str(ident): name for ident, name in names.items()},
                    "records": self._records,
                    "dropped": self._dropped,
                },
                unicode_errors="backslashreplace",
                default=str,
            )
        )

    def _put(self, kind: str, *rest: Any) -> None:
        self._add((kind, monotonic(), get_ident(), *rest))

    def _add(self, record: tuple[Any, ...]) -> None:
        if len(self._records) >= self._limit:
            self._dropped += 1
            return
        if record[2] not in self._threads:  # now: the thread may be gone at the end
            self._threads[record[2]] = threading.current_thread().name
        self._records.append(record)

    def _span(self, ended: spans.Span) -> None:
        details = {name: str(value)[:200] for name, value in ended.details.items()}
        self._add(("span", ended.began, ended.thread, ended.name, ended.ended, ended.waits, details))


def _error(error: BaseException | None) -> str:
    return "" if error is None else type(error).__name__


def _boot() -> str:
    """Identifies the host's monotonic clock."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            return file.read().strip()
    except OSError:
        return socket.gethostname()
