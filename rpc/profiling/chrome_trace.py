"""Adds calls, and what their callees did, to the Chrome traces that PyTorch's profilers export."""

from __future__ import annotations

import json
import os
from bisect import bisect_left
from collections.abc import Callable
from typing import Any, Final

from rpc.profiling.calls import REMOTE, Gathered, Span

__all__ = ["exporting"]

_CATEGORY: Final = "cpu_op"

_ROUNDING: Final = 0.01
"""Maximum error in microseconds of a time that is written with three digits."""

_CLOCKS_DIFFER: Final = 1000.0
"""Maximum difference in microseconds between PyTorch's clock and that of calls, once the difference at the
beginning of a call is taken off, on a busy host."""


def exporting(theirs: Callable[..., Any], gathered: Gathered) -> Callable[..., Any]:
    """A profile's ``export_chrome_trace`` that adds the calls that were gathered to the file."""

    def export_chrome_trace(path: str | os.PathLike[str], *args: Any, **kwargs: Any) -> Any:
        value = theirs(path, *args, **kwargs)
        if gathered.spans:
            with open(path, encoding="utf-8") as file:
                trace = json.load(file)
            _add_calls(trace, gathered)
            with open(path, "w", encoding="utf-8") as file:
                json.dump(trace, file)
        return value

    return export_chrome_trace


def _add_calls(trace: dict[str, Any], gathered: Gathered) -> None:
    """Add calls to a trace, whose times are microseconds since ``baseTimeNanoseconds``."""
    events: list[dict[str, Any]] = trace["traceEvents"]
    began = trace.get("baseTimeNanoseconds", 0) / 1000
    keys = {span.key for span in gathered.spans}
    places: dict[str, list[dict[str, Any]]] = {}
    for event in events:
        if event.get("ph") == "X" and event.get("name") in keys:
            places.setdefault(event["name"], []).append(event)
    for found in places.values():
        found.sort(key=lambda event: float(event["ts"]))
    starts = _starts_by_thread(events)
    processes: set[str] = set()
    for number, span in enumerate(sorted(gathered.spans, key=lambda span: span.start)):
        marks = places.get(span.key)
        mark = marks.pop(0) if marks else None
        if span.end is None:
            continue
        base = began if mark is None else began - _ahead(float(mark["ts"]) + began, span)
        remote = gathered.remote_events(span, base)
        if mark is not None and span.how == "sync":  # the thread has waited; others went on
            until = _before_next(starts, mark, span.end - base)
            mark["dur"] = max(mark["dur"], round(until - mark["ts"], 3))
            latest = max(mark["ts"], mark["ts"] + mark["dur"] - _ROUNDING)
            for event in remote:
                for key in ("start", "end"):
                    event[key] = min(max(event[key], mark["ts"]), latest)
        for event in remote:
            process = f"worker {event['node_id']}, called from here"
            processes.add(process)
            facts = {"node_id": event["node_id"], "call": span.key}
            if event["input_shapes"]:
                facts["Input Dims"] = event["input_shapes"]
            events.append(
                {
                    "ph": "X",
                    "cat": _CATEGORY,
                    "name": event["name"].removeprefix(span.key + REMOTE),
                    "pid": process,
                    "tid": event["thread"],
                    "ts": round(event["start"], 3),
                    "dur": round(max(0.0, event["end"] - event["start"]), 3),
                    "args": facts,
                }
            )
        if mark is not None and remote:
            first = min(remote, key=lambda event: float(event["start"]))
            arrow = {"cat": "rpc", "name": "rpc", "id": f"rpc {number}"}
            callee = f"worker {first['node_id']}, called from here"
            events.append(arrow | {"ph": "s", "pid": mark["pid"], "tid": mark["tid"], "ts": mark["ts"]})
            end = {"pid": callee, "tid": first["thread"], "ts": round(first["start"], 3)}
            events.append(arrow | end | {"ph": "f", "bp": "e"})
    for process in sorted(processes):
        named = {"ph": "M", "name": "process_name", "pid": process, "tid": 0, "args": {"name": process}}
        events.append(named)


def _ahead(mark: float, span: Span) -> float:
    """Return the microseconds by which PyTorch's clock is at least ahead of that of calls, where it has the
    mark of a call's beginning; negative if it is behind.
    """
    return min(max(0.0, mark - span.marked), mark - span.start)


def _starts_by_thread(events: list[dict[str, Any]]) -> dict[Any, list[float]]:
    starts: dict[Any, list[float]] = {}
    for event in events:
        if event.get("ph") == "X":
            starts.setdefault((event["pid"], event["tid"]), []).append(float(event["ts"]))
    for found in starts.values():
        found.sort()
    return starts


def _before_next(starts: dict[Any, list[float]], mark: dict[str, Any], end: float) -> float:
    """Return ``end``, or when the thread of a mark begins its next event if that is a moment earlier."""
    found = starts[mark["pid"], mark["tid"]]
    position = bisect_left(found, max(float(mark["ts"]) + float(mark["dur"]), end - _CLOCKS_DIFFER))
    return min(end, found[position]) if position < len(found) else end
