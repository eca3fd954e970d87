"""Counters of an agent, for metrics: calls by function, bytes by transport, collectives, spans.

An extension of agents, whose counts are a part of each snapshot. Calls and messages are not counted until an
endpoint has requested it (order ``COUNT``), or ``FARCALL_METRICS=1`` is set: no subscriber exists for the
events before. The number of names is bounded: later names count as ``OTHERS``.
"""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from itertools import accumulate
from time import monotonic
from typing import Any, Final, TypeVar

from rpc.agent.agent import Agent
from rpc.agent.calls import name_of
from rpc.errors import RpcTimeoutError, WorkerLostError
from rpc.group.peer import Peer
from rpc.runtime import spans
from rpc.runtime.events import (
    CallEnded,
    MessageReceived,
    MessageSent,
    PeerJoined,
    PeerLost,
    RequestEnded,
    RunBegun,
)
from rpc.serialization.payload import EXCEPTION

__all__ = ["BOUNDS", "COUNT", "EXTENSION", "OTHERS", "SWITCH", "Counters"]

EXTENSION: Final = "counters"
"""Name of the extension, and of its part of snapshots."""

COUNT: Final = "count"
"""Order to the workers of a job to start counting."""

SWITCH: Final = "FARCALL_METRICS"
"""Environment variable; with "1" a worker counts from its start on."""

BOUNDS: Final = (0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0)
"""Upper bounds of the buckets of durations, in seconds; one more bucket has longer durations."""

OTHERS: Final = "(others)"
"""Name of all functions, operations and spans beyond the maximum number."""

_MAX_NAMES: Final = 40
"""Maximum number of functions, of operations and of spans that have counters of their own."""

_MAX_NAME: Final = 120
"""Maximum length of a name, in characters."""

_MAX_RUNNING: Final = 10_000
"""Maximum number of requests whose beginning is remembered."""

_MAX_PENDING: Final = 2000
"""Maximum number of collectives that have begun and not ended."""


T = TypeVar("T")


class _Durations:
    """Counts of durations by bucket, and their sum."""

    __slots__ = ("buckets", "total")

    def __init__(self) -> None:
        self.buckets = [0] * (len(BOUNDS) + 1)
        self.total = 0.0

    def add(self, seconds: float) -> None:
        self.buckets[bisect_left(BOUNDS, seconds)] += 1
        self.total += seconds

    def values(self) -> list[Any]:
        """The cumulative counts of the buckets, and the sum in seconds."""
        return [list(accumulate(self.buckets)), self.total]


class _Function:
    """Counters of one function."""

    __slots__ = ("durations", "outcomes")

    def __init__(self) -> None:
        self.outcomes: dict[str, int] = {}
        self.durations = _Durations()

    def add(self, outcome: str, seconds: float) -> None:
        self.outcomes[outcome] = self.outcomes.get(outcome, 0) + 1
        self.durations.add(seconds)

    def values(self) -> dict[str, Any]:
        return {"outcomes": dict(self.outcomes), "seconds": self.durations.values()}


class _Sum:
    """Number of operations, of failed ones, their bytes and their seconds."""

    __slots__ = ("count", "failed", "seconds", "size")

    def __init__(self) -> None:
        self.count = self.failed = self.size = 0
        self.seconds = 0.0

    def values(self) -> list[Any]:
        return [self.count, self.failed, self.size, self.seconds]


class Counters:
    """The counters of one agent. From any thread; ``observed`` from one.

    Args:
        agent: agent that has not joined its group yet.
    """

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self._lock = threading.RLock()  # a finalizer that runs while it is held may send
        self._subscriptions: ExitStack | None = None
        self._joined = self._lost = self._broken = self._made_again = 0
        self._down: set[Peer] = set()
        self._calls: dict[str, _Function] = {}
        self._requests: dict[str, _Function] = {}
        self._queued = _Durations()
        self._running: dict[tuple[str, int], tuple[str, float]] = {}
        self._sent: dict[str, int] = {}
        self._received: dict[str, int] = {}
        self._peers: dict[str, Peer] = {}
        self._spans: dict[str, _Sum] = {}
        self._collectives: dict[str, _Sum] = {}
        self._next_collective = 0
        self._pending: list[Any] = []
        agent.events.listen(PeerJoined, self._peer_joined)
        agent.events.listen(PeerLost, self._peer_lost)
        agent.lifecycle.hooks.broke.append(self._peer_broke)
        agent.lifecycle.hooks.closed.append(self.end)

    def begin(self) -> None:
        """Count calls, messages, spans and collectives from now on. Idempotent."""
        with self._lock:
            if self._subscriptions is not None:
                return
            self._subscriptions = ExitStack()
        listen = self._agent.events.listen
        for subscription in (
            listen(CallEnded, self._call_ended),
            listen(RunBegun, self._run_begun),
            listen(RequestEnded, self._request_ended),
            listen(MessageSent, self._message_sent),
            listen(MessageReceived, self._message_received),
            spans.listen(self._span_ended),
        ):
            self._subscriptions.enter_context(subscription)

    def end(self) -> None:
        """Stop counting."""
        if self._subscriptions is not None:
            self._subscriptions.close()

    def observed(self) -> dict[str, Any]:
        """Return all counts, as plain values."""
        calls, messages = self._agent.calls, self._agent.messages
        peers = [each for each in self._agent.group.peers.all() if not each.is_self]
        self._note_connections()
        found: dict[str, Any] = {
            "on": self._subscriptions is not None,
            "in_flight": [len(calls.table), len(calls.requests)],
            "peers": [self._joined, self._lost, self._broken, self._made_again],
            "memory": [
                *messages.shared_memory.usage(),
                messages.shared_memory.sent_bytes,
                messages.shared_memory.received_bytes,
            ],
            "send_queue": sum(getattr(each.connection, "queued_bytes", 0) for each in peers),
        }
        if self._subscriptions is not None:
            self._take_collectives()
            with self._lock:
                found |= {
                    "calls": {name: each.values() for name, each in self._calls.items()},
                    "requests": {name: each.values() for name, each in self._requests.items()},
                    "queued": self._queued.values(),
                    "sent": dict(self._sent),
                    "received": dict(self._received),
                    "spans": {name: each.values() for name, each in self._spans.items()},
                    "collectives": {name: each.values() for name, each in self._collectives.items()},
                }
        return found

    # ---- peers

    def _peer_joined(self, _: PeerJoined) -> None:
        self._joined += 1

    def _peer_lost(self, _: PeerLost) -> None:
        self._lost += 1

    def _peer_broke(self, peer: Peer) -> None:
        with self._lock:
            self._broken += 1
            self._down.add(peer)

    def _note_connections(self) -> None:
        with self._lock:
            for peer in list(self._down):
                if peer.connected or peer.lost is not None:
                    self._made_again += peer.lost is None
                    self._down.discard(peer)

    # ---- calls and requests

    def _call_ended(self, ended: CallEnded) -> None:
        outcome = _outcome(ended.error, ended.header)
        with self._lock:
            _entry(self._calls, ended.what, _Function).add(outcome, ended.seconds)

    def _run_begun(self, begun: RunBegun) -> None:
        now = monotonic()
        with self._lock:
            self._queued.add(begun.queued)
            if len(self._running) >= _MAX_RUNNING:  # some requests are answered in a way that no event shows
                self._running.pop(next(iter(self._running)))
            self._running[begun.source, begun.call_id] = name_of(begun.what), now

    def _request_ended(self, ended: RequestEnded) -> None:
        now = monotonic()
        with self._lock:
            name, began = self._running.pop((ended.source, ended.call_id), ("", 0.0))
            if name:
                outcome = "failed" if ended.failed else "ok"
                _entry(self._requests, name, _Function).add(outcome, now - began)

    # ---- messages

    def _message_sent(self, sent: MessageSent) -> None:
        transport = self._transport_to(sent.to)
        with self._lock:
            self._sent[transport] = self._sent.get(transport, 0) + sent.size

    def _message_received(self, received: MessageReceived) -> None:
        transport = self._transport_to(received.source)
        with self._lock:
            self._received[transport] = self._received.get(transport, 0) + received.size

    def _transport_to(self, name: str) -> str:
        """Return the scheme of the connection to a worker, or of the last one; "none" if there was none."""
        peer = self._peers.get(name)
        if peer is None or peer.lost is not None:
            self._peers = {each.name: each for each in self._agent.group.peers.all() if each.lost is None}
            peer = self._peers.get(name)
        return str(getattr(None if peer is None else peer.connection, "scheme", "")) or "none"

    # ---- spans and collectives

    def _span_ended(self, span: spans.Span) -> None:
        if "group" in span.details:
            return  # a collective, which the flight recorder has
        with self._lock:
            each = _entry(self._spans, span.name.partition("(")[0], _Sum)
            each.count += 1
            each.seconds += span.ended - span.began

    def _take_collectives(self) -> None:
        """Count the collectives of the flight recorder that have ended since the last call."""
        node = self._agent.extensions.get("spmd.node")
        if node is None:
            return
        new = node.recorder.since(self._next_collective)
        if new:
            self._next_collective = new[-1].number + 1
        pending, self._pending = [*self._pending, *new][-_MAX_PENDING:], []
        for record in pending:
            if not record.ended:
                self._pending.append(record)
                continue
            with self._lock:
                each = _entry(self._collectives, record.name.partition("(")[0].partition(" ")[0], _Sum)
                each.count += 1
                each.failed += not record.succeeded
                each.size += sum(shape.numel() * dtype.itemsize for shape, dtype in record.inputs)
                each.seconds += max(0, record.ended - (record.started or record.created)) / 1e9


def _entry(entries: dict[str, T], name: str, make: Callable[[], T]) -> T:
    """Return the entry of a name, or that of all further names if there are too many."""
    found = entries.get(name)
    if found is None:
        name = name[:_MAX_NAME] if len(entries) < _MAX_NAMES else OTHERS
        found = entries.get(name)
        if found is None:
            found = entries[name] = make()
    return found


def _outcome(error: BaseException | None, header: Mapping[str, Any] | None) -> str:
    """Return how a call has ended, in one word."""
    match error:
        case None:
            return "failed" if header and EXCEPTION in header else "ok"
        case RpcTimeoutError():
            return "timeout"
        case WorkerLostError():
            return "lost"
    return "cancelled" if "Cancelled" in type(error).__name__ else "error"
