"""Merges what processes have recorded into one trace, in the JSON format that Perfetto reads. Pure.

Processes of one host share a monotonic clock. The clocks of hosts are aligned by the calls between them: a
request cannot come before it was sent, nor an answer before it was given. Each call bounds the offset of two
clocks from one side, each answer from the other; the middle of the tightest bounds is taken, and half their
distance is the error. Hosts that have not called each other are aligned by the time of day.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import msgpack

__all__ = ["Alignment", "Part", "align", "merge", "read_part"]

_MIN_US: Final = 0.5
"""Shortest slice that is written, in microseconds: an arrow needs one to end at."""


@dataclass(frozen=True, slots=True)
class Part:
    """What one process has recorded; see ``trace_recorder.Recorder.stop``."""

    worker: str
    workers: list[str]
    host: str
    boot: str
    pid: int
    wall: float
    threads: dict[str, str]
    records: list[Any]
    dropped: int


@dataclass(frozen=True, slots=True)
class Alignment:
    """The clock of a host.

    Attributes:
        offset: seconds to add to its monotonic clock.
        error: largest possible error of it, in seconds; infinite if it is by the time of day.
    """

    offset: float
    error: float


def read_part(packed: bytes) -> Part:
    """What a process has recorded.

    Raises:
        ValueError: these bytes are nothing that a recorder has made.
    """
    try:
        found = msgpack.unpackb(packed, strict_map_key=False)
        return Part(**{name: found[name] for name in Part.__dataclass_fields__})
    except (msgpack.UnpackException, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"this is not a part of a trace: {error}") from error


def align(parts: Sequence[Part]) -> dict[str, Alignment]:
    """The clocks of all hosts, by their boot identifier; that of the first is the reference."""
    if not parts:
        return {}
    bounds = _bounds(parts)
    first = parts[0]
    found = {first.boot: Alignment(first.wall, 0.0)}
    walls = {part.boot: part.wall for part in reversed(parts)}
    missing = [boot for boot in walls if boot not in found]
    while missing:
        best: tuple[float, str, float] | None = None
        for known, alignment in found.items():
            for boot in missing:
                low = bounds.get((known, boot), -math.inf)
                high = -bounds.get((boot, known), -math.inf)
                error = alignment.error + abs(high - low) / 2
                if math.isfinite(error) and (best is None or error < best[0]):
                    best = error, boot, alignment.offset + (low + high) / 2
        if best is None:
            found |= {boot: Alignment(walls[boot], math.inf) for boot in missing}
            break
        error, boot, offset = best
        found[boot] = Alignment(offset, error)
        missing.remove(boot)
    return found


def _bounds(parts: Sequence[Part]) -> dict[tuple[str, str], float]:
    """For two hosts, the largest of ``sent at the one - received at the other``, on their own clocks."""
    seen: dict[tuple[str, int], dict[str, tuple[str, float]]] = {}
    for part in parts:
        for record in part.records:
            kind, at, _, *rest = record
            if kind in ("call", "called"):
                key = part.workers[rest[0]], rest[1]
            elif kind in ("came", "answered"):
                key = rest[0], rest[1]
            else:
                continue
            seen.setdefault(key, {}).setdefault(kind, (part.boot, at))
    found: dict[tuple[str, str], float] = {}
    for call in seen.values():
        for sent, received in (("call", "came"), ("answered", "called")):
            if sent in call and received in call and call[sent][0] != call[received][0]:
                hosts = call[sent][0], call[received][0]
                found[hosts] = max(found.get(hosts, -math.inf), call[sent][1] - call[received][1])
    return found


def merge(parts: Sequence[Part]) -> dict[str, Any]:
    """One trace of all parts."""
    clocks = align(parts)
    base = clocks[parts[0].boot].offset if parts else 0.0  # what is far from 0 loses digits
    sent: dict[tuple[str, str, int], tuple[float, int]] = {}
    for part in parts:
        sent |= _sent(part, clocks[part.boot].offset - base)
    events: list[dict[str, Any]] = []
    flows: dict[tuple[str, int], int] = {}
    for number, part in enumerate(parts, 1):
        events += _Process(part, number, clocks[part.boot].offset - base, flows, sent).events()
    begin = min((event["ts"] for event in events if "ts" in event), default=0.0)
    for event in events:
        if "ts" in event:
            event["ts"] = round(event["ts"] - begin, 3)
    hosts = {part.boot: part.host for part in reversed(parts)}
    return {
        "traceEvents": events,
        "displayTimeUnit": "ns",
        "metadata": {
            "began": base + begin / 1e6,
            "clocks": {
                hosts[boot]: "by the time of day" if math.isinf(each.error) else f"±{each.error * 1e6:.1f} us"
                for boot, each in clocks.items()
            },
            "dropped": {part.worker: part.dropped for part in parts if part.dropped},
        },
    }


def _sent(part: Part, offset: float) -> dict[tuple[str, str, int], tuple[float, int]]:
    """When requests and answers were sent, on the common clock, and their sizes in bytes: by the kind of the
    record that they have arrived, "came" or "called", the caller, and the number of the call.
    """
    found: dict[tuple[str, str, int], tuple[float, int]] = {}
    calls: dict[int, tuple[str, int]] = {}
    answers: dict[int, tuple[float, int]] = {}
    for kind, at, thread, *rest in part.records:
        if kind == "call":
            calls[thread] = part.workers[rest[0]], rest[1]
        elif kind == "sent":
            message = at + offset, rest[2]
            if thread in calls:
                found["came", *calls.pop(thread)] = message
            else:
                answers[thread] = message
        elif kind == "answered" and thread in answers:
            found["called", rest[0], rest[1]] = answers.pop(thread)
    return found


class _Process:
    """The events of one process.

    Args:
        number: its identifier in the trace, as those of hosts may coincide.
        offset: seconds to add to its clock.
        flows: identifiers of the arrows, by caller and call.
        sent: see ``_sent``.
    """

    def __init__(
        self,
        part: Part,
        number: int,
        offset: float,
        flows: dict[tuple[str, int], int],
        sent: dict[tuple[str, str, int], tuple[float, int]],
    ) -> None:
        self._sent = sent
        self._part = part
        self._number = number
        self._offset = offset
        self._flows = flows

    def events(self) -> Iterator[dict[str, Any]]:
        part = self._part
        yield self._named("process_name", 0, f"{part.worker} ({part.host}, process {part.pid})")
        threads = dict.fromkeys(int(record[2]) for record in part.records)
        numbers = {ident: place for place, ident in enumerate(threads, 1)}
        for ident, place in numbers.items():
            yield self._named("thread_name", place, part.threads.get(str(ident), f"thread {ident}"))
        for event in self._slices():
            event["tid"] = numbers[event["tid"]]
            yield event

    def _named(self, kind: str, thread: int, name: str) -> dict[str, Any]:
        return {"ph": "M", "pid": self._number, "tid": thread, "name": kind, "args": {"name": name}}

    def _slices(self) -> Iterator[dict[str, Any]]:
        begun: dict[tuple[str, int], Any] = {}
        runs: dict[tuple[str, int], Any] = {}
        returned: dict[tuple[str, int], Any] = {}
        last_call: dict[int, dict[str, Any]] = {}
        for record in self._part.records:
            kind, at, thread, *rest = record
            if kind == "span":
                name, end, waits, details = rest
                yield self._slice(name, at, end, thread, "wait" if waits else "span", **details)
            elif kind == "serialized":
                what, seconds, size = rest
                yield self._slice(f"serialize {what}", at - seconds, at, thread, "serialize", bytes=size)
            elif kind == "call":
                agent, call_id, to, what, how = rest
                facts = {"to": to, "call": call_id, "how": how}
                begun[self._part.workers[agent], call_id] = at, thread, what, facts
                last_call[thread] = facts
            elif kind == "sent" and thread in last_call:
                last_call.pop(thread)["bytes"] = rest[2]
            elif kind == "called":
                agent, call_id, _, error = rest
                key = self._part.workers[agent], call_id
                yield from self._transfer(kind, key, at, thread)
                found = begun.pop(key, None)
                if found is not None:
                    yield from self._call(key, found, at, thread, error)
            elif kind == "came":
                yield from self._transfer(kind, (rest[0], rest[1]), at, thread)
            elif kind == "run":
                source, call_id, _, what, queued, loaded = rest
                runs[source, call_id] = at, thread, what
                taken = at - loaded
                yield from self._waited((source, call_id), what, taken - queued, taken, thread)
                if loaded > 0:
                    yield self._slice(f"deserialize {what}", taken, at, thread, "serialize", source=source)
            elif kind == "ran":
                source, call_id, _ = rest
                run = runs.pop((source, call_id), None)
                if isinstance(run, tuple):
                    returned[source, call_id] = at, thread, run[2]
                    facts = {"source": source, "call": call_id}
                    yield self._slice(run[2], run[0], at, thread, "run", **facts)
                    yield self._arrow("t", (source, call_id), run[0], thread)
            elif kind == "answered":
                source, call_id, _, failed = rest
                run = returned.pop((source, call_id), None)
                if run is not None and run[1] == thread:
                    facts = {"source": source, "call": call_id, "failed": failed}
                    yield self._slice(f"answer {run[2]}", run[0], at, thread, "answer", **facts)
        end = max((record[1] for record in self._part.records), default=0.0)
        for key, found in begun.items():  # still under way
            yield from self._call(key, found, end, found[1], "not answered yet", answered=False)

    def _call(
        self,
        key: tuple[str, int],
        begun: tuple[float, int, str, dict[str, Any]],
        end: float,
        thread: int,
        error: str,
        *,
        answered: bool = True,
    ) -> Iterator[dict[str, Any]]:
        """A call: a slice on the thread that waits for it; else one where it begins, one where it ends, and a
        span of its own between them.
        """
        at, caller, what, facts = begun
        facts = {**facts, **({"error": error} if error else {})}
        name = f"call {what}"
        if facts["how"] == "sync":
            yield self._slice(name, at, end, caller, "call", **facts)
            yield self._arrow("s", key, at, caller)
            if answered:
                yield self._arrow("f", key, end - _MIN_US / 2e6, caller)
            return
        yield self._slice(name, at, at, caller, "call", **facts)
        yield self._arrow("s", key, at, caller)
        for phase, when in (("b", at), ("e", end)):
            event = self._event(phase, name, when, caller, "call under way")
            yield event | {"id": self._flow(key), **({"args": facts} if phase == "b" else {})}
        if answered:
            yield self._slice(f"answer of {what}", end, end, thread, "call", call=key[1])
            yield self._arrow("f", key, end, thread)

    def _waited(
        self, key: tuple[str, int], what: str, at: float, end: float, thread: int
    ) -> Iterable[dict[str, Any]]:
        name = f"queue {what}"
        identity = f"q{self._flow(key)}"
        begin = self._event("b", name, at, thread, "queue")
        return (
            begin | {"id": identity, "args": {"source": key[0]}},
            self._event("e", name, end, thread, "queue") | {"id": identity},
        )

    def _transfer(self, kind: str, key: tuple[str, int], at: float, thread: int) -> Iterator[dict[str, Any]]:
        """The way of a message from its sender to here."""
        sent = self._sent.get((kind, *key))
        if sent is None:
            return
        name = "transfer of a request" if kind == "came" else "transfer of an answer"
        identity = f"{kind}{self._flow(key)}"
        begin = self._event("b", name, min(sent[0] - self._offset, at), thread, "transfer")
        yield begin | {"id": identity, "args": {"bytes": sent[1], "caller": key[0], "call": key[1]}}
        yield self._event("e", name, at, thread, "transfer") | {"id": identity}

    def _flow(self, key: tuple[str, int]) -> int:
        return self._flows.setdefault(key, len(self._flows) + 1)

    def _arrow(self, phase: str, key: tuple[str, int], at: float, thread: int) -> dict[str, Any]:
        event = self._event(phase, "call", at + _MIN_US / 4e6, thread, "flow")
        return event | {"id": self._flow(key), "bp": "e"}

    def _slice(
        self, name: str, at: float, end: float, thread: int, category: str, /, **facts: Any
    ) -> dict[str, Any]:
        event = self._event("X", name, at, thread, category)
        return event | {"dur": round(max((end - at) * 1e6, _MIN_US), 3), "args": facts}

    def _event(self, phase: str, name: str, at: float, thread: int, category: str) -> dict[str, Any]:
        return {
            "ph": phase,
            "name": name,
            "cat": category,
            "ts": (at + self._offset) * 1e6,
            "pid": self._number,
            "tid": thread,
        }
