"""Records what this process does, for a trace: events of its agents and spans of its threads, in memory."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from threading import get_ident
from time import monotonic, time
from typing import Any, Final

import msgpack

from rpc.agent.agent import Agent
from rpc.agent.calls import name_of
from rpc.runtime import events, spans
from rpc.wire.frames import Kind

__all__ = ["MAX_RECORDS", "Recorder"]

_FAILURE: Final = int(Kind.FAILURE)
_ANSWERS: Final = (int(Kind.REPLY), _FAILURE)

MAX_RECORDS: Final = 1_000_000
"""Maximum number of records of one process in a trace, about 100 bytes each; it is exceeded by the records of
calls that are in flight then.
"""

_MEAN_FIELDS: Final = 5
"""Mean number of fields of a record."""

_BATCH: Final = 50_000
"""Number of fields that are packed at once: the interpreter lock is held for a few milliseconds."""

_MAX_DETAIL: Final = 200
"""Maximum number of characters of a detail of a span."""


class Recorder:
    """Records until ``stop``. A record is a kind, a time on the monotonic clock, a thread, and more fields.

    Recorders are on the path of each call, so they do little, and their records are small: all records are in
    one list, field after field, since touching a fresh page of memory takes longer than a record. Only
    records that begin something check whether there is room.

    Args:
        agents: agents of this process, with their extensions.
        limit: maximum number of records.
    """

    def __init__(self, agents: list[Agent], limit: int = MAX_RECORDS) -> None:
        self._records: list[Any] = []
        self._limit = limit * _MEAN_FIELDS
        self._dropped = 0
        self._counted: int | None = None
        self._subscriptions = ExitStack()
        self._spans = spans.listen(self._span)
        self._threads = _Threads()
        self._agents: list[Agent] = []
        for agent in agents:
            self.follow(agent)

    def follow(self, agent: Agent) -> None:
        """Record the events of an agent, too."""
        own = len(self._agents)  # its name is known once it has joined its group
        self._agents.append(agent)
        records, threads, limit, full = self._records, self._threads, self._limit, self._full
        add = records.extend

        def serialized(to: str, what: object, seconds: float, size: int) -> None:
            add(("serialized", monotonic(), threads[get_ident()], name_of(what), seconds, size))

        def call(call_id: int, to: str, what: str, asked: object, how: str, header: object) -> None:
            add(("call", monotonic(), threads[get_ident()], own, call_id, to, what, how))
            if len(records) > limit:
                full()

        def sent(to: str, kind: int, size: int, call_id: int) -> None:
            if kind in _ANSWERS:
                failed = kind == _FAILURE
                add(("answered", monotonic(), threads[get_ident()], to, call_id, failed, size))
            elif call_id:
                add(("sent", monotonic(), threads[get_ident()], own, call_id, size))

        def called(
            call_id: int, to: str, what: str, seconds: float, error: BaseException | None, header: object
        ) -> None:
            why = "" if error is None else type(error).__name__
            add(("called", monotonic(), threads[get_ident()], own, call_id, why))

        def came(source: str, call_id: int) -> None:
            add(("came", monotonic(), threads[get_ident()], source, call_id))
            if len(records) > limit:
                full()

        def run(source: str, call_id: int, what: object, queued: float, loaded: float) -> None:
            add(("run", monotonic(), threads[get_ident()], source, call_id, name_of(what), queued, loaded))

        def ran(source: str, call_id: int) -> None:
            add(("ran", monotonic(), threads[get_ident()], source, call_id))

        for kind, recorder in (
            (events.CallSerialized, serialized),
            (events.CallBegun, call),
            (events.MessageSent, sent),
            (events.CallEnded, called),
            (events.RequestBegun, came),
            (events.RunBegun, run),
            (events.RunEnded, ran),
        ):
            self._subscriptions.enter_context(agent.events.record(kind, recorder))

    def stop(self) -> Iterator[bytes]:
        """End recording; returns the pieces of this process's part, for ``parts``."""
        self._subscriptions.close()
        self._spans.close()
        if self._counted is not None:
            self._dropped += self._count() - self._counted
        workers = [agent.info.name for agent in self._agents]
        header = {
            "worker": ", ".join(workers) or f"process {os.getpid()}",
            "workers": workers,
            "host": socket.gethostname(),
            "boot": _boot(),
            "pid": os.getpid(),
            "wall": time() - monotonic(),
            "threads": self._threads.names,
            "dropped": self._dropped,
        }
        return _packed(header, self._records)

    def _full(self) -> None:
        """Count calls, requests and spans only from now on, since there is no room for more."""
        self._subscriptions.close()
        self._counted = self._count()

    def _count(self) -> int:
        """Return the number of calls made and requests received so far."""
        calls = [agent.calls for agent in self._agents]
        return sum(each.table.opened + each.requests.begun for each in calls)

    def _span(self, ended: spans.Span) -> None:
        if len(self._records) > self._limit:
            self._dropped += 1
            return
        details = {name: _detail(value) for name, value in ended.details.items()}
        thread = self._threads[ended.thread]
        self._records.extend(("span", ended.began, thread, ended.name, ended.ended, ended.waits, details))


class _Threads(dict[int, int]):
    """Numbers of threads, by their identifiers. The first request for a thread is made on that thread.

    Attributes:
        names: names of threads, by number.
    """

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __missing__(self, ident: int) -> int:
        names = {each.ident: each.name for each in threading.enumerate()}
        self.names.append(names.get(ident) or _native_name())  # now, since it may be gone at the end
        self[ident] = number = len(self.names) - 1
        return number


def _packed(header: dict[str, Any], records: list[Any]) -> Iterator[bytes]:
    packer = msgpack.Packer(unicode_errors="backslashreplace", default=str)
    yield packer.pack(header)
    for first in range(0, len(records), _BATCH):
        yield packer.pack(records[first : first + _BATCH])
    yield packer.pack(None)  # a part without it is incomplete


def _detail(value: object) -> int | str:
    return value if type(value) is int and abs(value) < 1 << 63 else str(value)[:_MAX_DETAIL]


def _native_name() -> str:
    """Return the kernel's name of this thread, which Python has not started."""
    try:
        return Path(f"/proc/self/task/{threading.get_native_id()}/comm").read_text(errors="replace").strip()
    except OSError:
        return f"thread {get_ident()}"


def _boot() -> str:
    """Return the identifier of the host's monotonic clock."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            return file.read().strip()
    except OSError:
        return socket.gethostname()
