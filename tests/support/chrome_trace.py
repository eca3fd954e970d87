"""A strict reader of the Chrome JSON trace format, and counts of what a viewer shows.

It refuses what Perfetto's importer drops, or Chrome's moves elsewhere: slices of a thread that overlap, ends
of spans without a beginning, arrows that begin or end outside of slices, or run backwards in time.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

__all__ = ["ChromeTrace", "read_trace"]

_PHASES = frozenset("XbestfM")
_NS = 1000


@dataclass
class ChromeTrace:
    """What a viewer shows of a trace.

    Attributes:
        metadata: of the whole.
        processes, threads: names, by number.
        slices: those of threads, in order of time.
        spans: begin and end of spans on tracks of their own.
        arrows: the events of each, in order of time, by identifier: a number, since Perfetto drops others.
    """

    metadata: dict[str, Any]
    processes: dict[int, str] = field(default_factory=dict)
    threads: dict[tuple[int, int], str] = field(default_factory=dict)
    slices: list[dict[str, Any]] = field(default_factory=list)
    spans: list[tuple[dict[str, Any], dict[str, Any]]] = field(default_factory=list)
    arrows: dict[int, list[dict[str, Any]]] = field(default_factory=dict)

    def worker(self, process: int) -> str:
        """The name of the worker that a process is."""
        return self.processes[process].partition(" ")[0]

    def counts(self) -> Counter[tuple[str, str]]:
        """Number of slices, by worker and name."""
        return Counter((self.worker(each["pid"]), each["name"]) for each in self.slices)

    def ways(self) -> Counter[tuple[str, ...]]:
        """Number of arrows, by the workers that they lead through."""
        return Counter(tuple(self.worker(each["pid"]) for each in arrow) for arrow in self.arrows.values())

    def slice_at(self, event: dict[str, Any]) -> dict[str, Any]:
        """The innermost slice that an event of an arrow is in."""
        found = _innermost(self.slices, event)
        assert found is not None, event
        return found


def _number(constant: str) -> float:
    raise ValueError(f"{constant} is not JSON")


def _innermost(slices: list[dict[str, Any]], event: dict[str, Any]) -> dict[str, Any] | None:
    found = None
    at = _ns(event["ts"])
    for each in slices:
        if (each["pid"], each["tid"]) != (event["pid"], event["tid"]):
            continue
        begin = _ns(each["ts"])
        if begin > at:
            break
        if at < begin + _ns(each["dur"]):
            found = each
    return found


def _ns(microseconds: float) -> int:
    exact = microseconds * _NS
    assert abs(exact - round(exact)) < 0.01, f"{microseconds} us is no whole number of nanoseconds"
    return round(exact)


def read_trace(path: Path) -> ChromeTrace:
    """Read a trace; fails on whatever a viewer would drop or move."""
    made = json.loads(path.read_text(), parse_constant=_number)
    assert isinstance(made, dict)
    assert isinstance(made["traceEvents"], list)
    trace = ChromeTrace(made["metadata"])
    open_spans: dict[tuple[int, str, str], dict[str, Any]] = {}
    arrows: dict[int, list[dict[str, Any]]] = defaultdict(list)
    for event in made["traceEvents"]:
        _check_fields(event)
        phase = event["ph"]
        key = (event["pid"], event.get("cat", ""), str(event.get("id")))
        if phase == "M":
            name = event["args"]["name"]
            if event["name"] == "process_name":
                assert trace.processes.setdefault(event["pid"], name) == name
            else:
                assert event["name"] == "thread_name"
                assert trace.threads.setdefault((event["pid"], event["tid"]), name) == name
        elif phase == "X":
            trace.slices.append(event)
        elif phase == "b":
            assert key not in open_spans, f"begun twice: {event}"
            open_spans[key] = event
        elif phase == "e":
            begin = open_spans.pop(key)
            assert (begin["ts"] <= event["ts"], begin["name"]) == (True, event["name"]), (begin, event)
            trace.spans.append((begin, event))
        else:
            arrows[event["id"]].append(event)
    assert not open_spans, f"without an end: {open_spans}"
    for event in made["traceEvents"]:
        assert event["pid"] in trace.processes
        assert event["ph"] == "M" or (event["pid"], event["tid"]) in trace.threads
    _check_nesting(trace.slices)
    trace.slices.sort(key=lambda each: (each["ts"], -each["dur"]))
    for identity, found in arrows.items():
        trace.arrows[identity] = sorted(found, key=lambda each: each["ts"])
    _check_arrows(trace)
    return trace


def _check_fields(event: dict[str, Any]) -> None:
    assert event["ph"] in _PHASES, event
    assert isinstance(event["name"], str), event
    assert event["name"].isprintable(), event
    assert type(event["pid"]) is int, event
    assert type(event["tid"]) is int, event
    assert isinstance(event.get("args", {}), dict), event
    if event["ph"] == "M":
        return
    assert isinstance(event["cat"], str), event
    assert event["ts"] >= 0, event
    _ns(event["ts"])
    if event["ph"] == "X":
        assert _ns(event["dur"]) > 0, event
    else:
        assert isinstance(event["id"], str if event["ph"] in "be" else int), event


def _check_nesting(slices: list[dict[str, Any]]) -> None:
    """Slices of a thread nest, and of two that begin at once, the outer one comes first in the file."""
    threads: dict[tuple[int, int], list[dict[str, Any]]] = defaultdict(list)
    for each in slices:
        threads[each["pid"], each["tid"]].append(each)
    for found in threads.values():
        around: list[dict[str, Any]] = []
        for each in sorted(found, key=lambda each: each["ts"]):  # stable, as in viewers
            begin = _ns(each["ts"])
            while around and _ns(around[-1]["ts"]) + _ns(around[-1]["dur"]) <= begin:
                around.pop()
            end = _ns(around[-1]["ts"]) + _ns(around[-1]["dur"]) if around else None
            assert end is None or begin + _ns(each["dur"]) <= end, (each, around[-1])
            around.append(each)


def _check_arrows(trace: ChromeTrace) -> None:
    threads: dict[tuple[int, int], list[dict[str, Any]]] = defaultdict(list)
    for each in trace.slices:
        threads[each["pid"], each["tid"]].append(each)
    begins = {thread: [_ns(each["ts"]) for each in found] for thread, found in threads.items()}
    for identity, arrow in trace.arrows.items():
        phases = "".join(each["ph"] for each in arrow)
        complete = phases[:1] == "s" and phases.count("s") == 1 and phases.count("f") <= 1
        assert complete or "s" not in phases, f"arrow {identity} goes {phases}"
        assert phases.rstrip("f").lstrip("s").strip("t") == "", f"arrow {identity} goes {phases}"
        for event in arrow:
            thread, at = (event["pid"], event["tid"]), _ns(event["ts"])
            before = threads[thread][: bisect_right(begins[thread], at)] if thread in threads else []
            assert any(at < _ns(each["ts"]) + _ns(each["dur"]) for each in reversed(before)), (
                f"arrow {identity} is at no slice: {event}"
            )
