"""Merges what processes have recorded into one trace, in the JSON format that Perfetto and Chrome read. Pure.

Viewers drop a slice that begins inside of another one of its thread and ends after it, and an arrow that
begins or ends outside of slices. So times are whole nanoseconds, slices are made to nest before they are
given, outer ones first, and arrows are at slices. Perfetto drops arrows whose identifiers are no numbers.

Events of one process are held at a time, since there may be a million.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from farcall.observe.format.legible import legible
from farcall.observe.trace.clocks import align
from farcall.observe.trace.parts import Part

__all__ = ["MAX_EVENTS", "Trace", "merge"]

MAX_EVENTS: Final = 4_000_000
"""Maximum number of records that become events of one trace, about 200 bytes each in the file; each process
gets the same share, and later records are dropped."""

_MIN_NS: Final = 500
"""Shortest slice that is written, in nanoseconds, unless the next one begins before."""

_MAX_NAME: Final = 200
"""Maximum number of characters of a name."""

_CALL_BITS: Final = 40
"""Number of bits for the number of a call in the identifier of its arrows; viewers read 53 bits exactly."""

_Events = Iterable[dict[str, Any]]

_Key = tuple[str, int]
"""The caller, and the number of its call."""

_Begun = tuple[float, int, str, dict[str, Any]]
"""A call of this process: when and on which thread it began, what it asked for, and facts about it."""

_Sent = dict[tuple[str, str, int], tuple[str, float, int]]
"""The host, time and size in bytes of requests and answers that were sent: by the kind of the record that
they have arrived, "came" or "called", the caller, and the number of the call."""


@dataclass(frozen=True, slots=True)
class Trace:
    """A trace.

    Attributes:
        metadata: of the whole.
        parts: of processes.
        offsets: nanoseconds to add to the monotonic clock of each host.
        sent: see ``_Sent``.
        names: the functions that requests have run, by caller and number of the call.
        limit: maximum number of records of each process.
        callers: number of each caller, in the order in which their calls are found.
    """

    metadata: dict[str, Any]
    parts: Sequence[Part]
    offsets: dict[str, int]
    sent: _Sent
    names: dict[tuple[str, int], str]
    limit: int
    callers: dict[str, int] = field(default_factory=dict)

    def flow(self, caller: str, call_id: int) -> int:
        """Identifier of the arrows of a call: the number of the caller, then that of the call."""
        return (self.callers.setdefault(caller, len(self.callers)) << _CALL_BITS) | call_id

    def events(self) -> Iterator[dict[str, Any]]:
        """The events of all processes, one after another."""
        for number, part in enumerate(self.parts, 1):
            yield from _Process(self, part, number).events()


def merge(parts: Sequence[Part], missing: Sequence[str] = ()) -> Trace:
    """One trace of all parts.

    Args:
        missing: workers that have left no part, and why, as texts.
    """
    limit = MAX_EVENTS // max(1, len(parts))
    clocks = align(parts)
    sent: _Sent = {}
    names: dict[tuple[str, int], str] = {}
    begins: list[float] = []
    dropped: dict[str, int] = {}
    for part in parts:
        begin, count = _survey(part, sent, names, limit)
        begins.append(begin + clocks[part.boot].offset)
        if part.dropped or count > limit:
            dropped[part.worker] = part.dropped + max(0, count - limit)
    began = min((each for each in begins if math.isfinite(each)), default=0.0)
    hosts = {part.boot: part.host for part in reversed(parts)}
    metadata: dict[str, Any] = {
        "began": began,
        "clocks": {hosts[boot]: str(each) for boot, each in clocks.items()},
        "dropped": dropped,
        "missing": list(missing),
    }
    offsets = {boot: round((each.offset - began) * 1e9) for boot, each in clocks.items()}
    return Trace(metadata, parts, offsets, sent, names, limit)


def _survey(part: Part, sent: _Sent, names: dict[tuple[str, int], str], limit: int) -> tuple[float, int]:
    """The time at which a part begins, and the number of its records; adds what was sent, and what ran."""
    begin, count = math.inf, 0
    for count, (kind, at, _, *rest) in enumerate(part.records, 1):
        if count > limit:
            continue
        earliest = at
        if kind == "sent":
            sent["came", part.workers[rest[0]], rest[1]] = part.boot, at, rest[2]
        elif kind == "answered":
            sent["called", rest[0], rest[1]] = part.boot, at, rest[3]
        elif kind == "serialized":
            earliest -= rest[1]
        elif kind == "run":
            names[rest[0], rest[1]] = rest[2]
            earliest -= rest[3] + rest[4]
        begin = min(begin, earliest)
    return begin, count


@dataclass(slots=True, eq=False)
class _Slice:
    """A slice of a thread, with times in nanoseconds.

    Attributes:
        arrows: phase and identifier of those that begin or end here.
        momentary: it has no duration of its own.
    """

    name: str
    category: str
    begin: int
    end: int
    facts: dict[str, Any]
    arrows: list[tuple[str, int]] = field(default_factory=list)
    momentary: bool = False


def _nested(slices: Iterable[_Slice]) -> list[_Slice]:
    """Slices of one thread, outer ones first, which nest: one that does not ends with the one around it."""
    found = sorted(slices, key=lambda each: (each.begin, -each.end))
    around: list[_Slice] = []
    for each in found:
        while around:
            last = around[-1]
            if last.momentary and last.begin < each.begin < last.end:
                last.end = each.begin
            if each.begin < last.end:
                break
            around.pop()
        if around:
            each.end = min(each.end, around[-1].end)
        around.append(each)
    return found


class _Process:
    """The events of one process.

    Args:
        number: its identifier in the trace, as those of hosts may coincide.
    """

    def __init__(self, trace: Trace, part: Part, number: int) -> None:
        self._trace = trace
        self._part = part
        self._number = number
        self._threads: dict[int, list[_Slice]] = {}
        self._numbers: dict[int, int] = {}
        self._begun: dict[_Key, _Begun] = {}
        self._runs: dict[_Key, tuple[float, int, str]] = {}
        self._returned: dict[_Key, tuple[float, int, str]] = {}
        self._last_serialized: dict[int, _Slice] = {}
        self._last = 0.0

    def events(self) -> Iterator[dict[str, Any]]:
        part = self._part
        name = f"{part.worker} ({part.host}, process {part.pid})"
        yield self._named("process_name", 0, name)
        yield from self._read()
        for thread, place in self._numbers.items():
            yield self._named("thread_name", place, part.threads[thread])
        for thread, slices in self._threads.items():
            for each in _nested(slices):
                event = self._event("X", each.name, each.begin, thread, each.category)
                yield event | {"dur": (each.end - each.begin) / 1000, "args": each.facts}
                for phase, identity in each.arrows:
                    arrow = self._event(phase, "call", each.begin, thread, "flow")
                    yield arrow | {"id": identity, "bp": "e"}

    def _read(self) -> Iterator[dict[str, Any]]:
        """Collect the slices; yields the events that belong to no thread."""
        for kind, at, thread, *rest in itertools.islice(self._part.records, self._trace.limit):
            self._last = max(self._last, at)
            read = _READ.get(kind)
            if read is not None:
                yield from read(self, at, thread, *rest)
        for key, begun in self._begun.items():  # still under way
            yield from self._call(key, begun, self._last, begun[1], "not answered yet", answered=False)
        for key, (at, thread, what) in self._runs.items():  # still running
            facts = {"source": key[0], "call": key[1], "error": "not over yet"}
            self._lead(self._slice(what, at, self._last, thread, "run", **facts), key)

    # ---- the kinds of records

    def _span(
        self, at: float, thread: int, name: str, end: float, waits: bool, details: dict[str, Any]
    ) -> _Events:
        self._last = max(self._last, end)
        made = self._slice(name, at, end, thread, "wait" if waits else "span", **details)
        if "source" in details and "call" in details:
            self._lead(made, (details["source"], details["call"]))
        return ()

    def _serialized(self, at: float, thread: int, what: str, seconds: float, size: int) -> _Events:
        made = self._slice(f"serialize {what}", at - seconds, at, thread, "serialize", bytes=size)
        self._last_serialized[thread] = made
        return ()

    def _begin(
        self, at: float, thread: int, agent: int, call_id: int, to: str, what: str, how: str
    ) -> _Events:
        key = self._part.workers[agent], call_id
        self._begun[key] = at, thread, what, {"to": to, "call": call_id, "how": how}
        serialized = self._last_serialized.pop(thread, None)
        if serialized is not None and key in self._trace.names:
            serialized.name = f"serialize {self._trace.names[key]}"
        return ()

    def _sent(self, at: float, thread: int, agent: int, call_id: int, size: int) -> _Events:
        begun = self._begun.get((self._part.workers[agent], call_id))
        if begun is not None:
            begun[3]["bytes"] = size
        return ()

    def _called(self, at: float, thread: int, agent: int, call_id: int, error: str) -> _Events:
        key = self._part.workers[agent], call_id
        yield from self._transfer("called", key, at, thread)
        begun = self._begun.pop(key, None)
        if begun is not None:
            yield from self._call(key, begun, at, thread, error)

    def _came(self, at: float, thread: int, source: str, call_id: int) -> _Events:
        return self._transfer("came", (source, call_id), at, thread)

    def _run(
        self, at: float, thread: int, source: str, call_id: int, what: str, queued: float, loaded: float
    ) -> _Events:
        self._runs[source, call_id] = at, thread, what
        taken = at - loaded
        if loaded > 0:
            self._slice(f"deserialize {what}", taken, at, thread, "serialize", source=source)
        identity, facts = f"q/{source}/{call_id}", {"source": source}
        return self._apart("queue", f"queue {what}", identity, taken - queued, taken, thread, facts)

    def _ran(self, at: float, thread: int, source: str, call_id: int) -> _Events:
        run = self._runs.pop((source, call_id), None)
        if run is not None:
            begin, _, what = run
            self._returned[source, call_id] = at, thread, what
            made = self._slice(what, begin, at, thread, "run", source=source, call=call_id)
            self._lead(made, (source, call_id))
        return ()

    def _answered(
        self, at: float, thread: int, source: str, call_id: int, failed: bool, size: int
    ) -> _Events:
        returned = self._returned.pop((source, call_id), None)
        if returned is not None and returned[1] == thread:
            facts = {"source": source, "call": call_id, "failed": failed, "bytes": size}
            self._slice(f"answer {returned[2]}", returned[0], at, thread, "answer", **facts)
        return ()

    def _lead(self, made: _Slice, key: _Key) -> None:
        """Lead the arrow of a call to a slice, if the trace has the call."""
        if ("came", *key) in self._trace.sent:
            made.arrows.append(("t", self._trace.flow(*key)))

    def _call(
        self,
        key: _Key,
        begun: _Begun,
        end: float,
        thread: int,
        error: str,
        *,
        answered: bool = True,
    ) -> Iterator[dict[str, Any]]:
        """A call: a slice on the thread that waits for it; else one where it begins, and a span of its own.

        Where the answer comes, there is another slice: Perfetto draws arrows to begins of slices only.
        """
        at, caller, asked, facts = begun
        what = self._trace.names.get(key, asked)  # of a method of a remote object, the caller has less
        facts = {**facts, **({"error": error} if error else {})}
        name, flow = f"call {what}", self._trace.flow(*key)
        is_sync = facts["how"] == "sync"
        made = self._slice(name, at, end if is_sync else at, caller, "call", **facts)
        made.arrows.append(("s", flow))
        if not is_sync:
            yield from self._apart("call under way", name, f"c/{key[0]}/{key[1]}", at, end, caller, facts)
        if answered:
            made = self._slice(f"answer of {what}", end, end, thread, "call", call=key[1])
            made.arrows.append(("f", flow))

    def _transfer(self, kind: str, key: _Key, at: float, thread: int) -> Iterator[dict[str, Any]]:
        """The way of a message from its sender to here."""
        sent = self._trace.sent.get((kind, *key))
        if sent is None:
            return
        boot, when, size = sent
        offsets = self._trace.offsets
        shift = (offsets[boot] - offsets[self._part.boot]) / 1e9
        name = "transfer of a request" if kind == "came" else "transfer of an answer"
        facts = {"bytes": size, "caller": key[0], "call": key[1]}
        yield from self._apart("transfer", name, f"{kind}/{key[0]}/{key[1]}", when + shift, at, thread, facts)

    def _apart(
        self,
        category: str,
        name: str,
        identity: str,
        begin: float,
        end: float,
        thread: int,
        facts: dict[str, Any],
    ) -> Iterator[dict[str, Any]]:
        """A span that may overlap with others, on a track of its own."""
        last = self._ns(end)
        first = self._event("b", name, min(self._ns(begin), last), thread, category)
        yield first | {"id": identity, "args": facts}
        yield self._event("e", name, last, thread, category) | {"id": identity}

    def _slice(
        self, name: str, begin: float, end: float, thread: int, category: str, /, **facts: Any
    ) -> _Slice:
        first, last = self._ns(begin), self._ns(end)
        momentary = last - first < _MIN_NS
        made = _Slice(name, category, first, max(last, first + _MIN_NS), facts, momentary=momentary)
        self._number_of(thread)
        self._threads.setdefault(thread, []).append(made)
        return made

    def _ns(self, at: float) -> int:
        """Time on the common clock; the first record of the trace is at 0."""
        return max(0, round(at * 1e9) + self._trace.offsets[self._part.boot])

    def _named(self, kind: str, thread: int, name: str) -> dict[str, Any]:
        return {"ph": "M", "pid": self._number, "tid": thread, "name": kind, "args": {"name": _shown(name)}}

    def _event(self, phase: str, name: str, at: int, thread: int, category: str) -> dict[str, Any]:
        return {
            "ph": phase,
            "name": _shown(name),
            "cat": category,
            "ts": at / 1000,
            "pid": self._number,
            "tid": self._number_of(thread),
        }

    def _number_of(self, thread: int) -> int:
        """Identifier of a thread in the trace: what processes say is too large for some viewers."""
        return self._numbers.setdefault(thread, len(self._numbers) + 1)


_READ: Final[dict[str, Callable[..., _Events]]] = {
    "span": _Process._span,
    "serialized": _Process._serialized,
    "call": _Process._begin,
    "sent": _Process._sent,
    "called": _Process._called,
    "came": _Process._came,
    "run": _Process._run,
    "ran": _Process._ran,
    "answered": _Process._answered,
}
"""The method that reads each kind of record."""


def _shown(name: str) -> str:
    """A name for a viewer: of no more than a line, without control characters."""
    name = name if len(name) <= _MAX_NAME else f"{name[:_MAX_NAME]}…"
    return legible(name)
