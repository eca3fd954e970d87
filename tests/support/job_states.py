"""States of jobs and their workers, made here, of no process."""

from __future__ import annotations

from typing import Any

from farcall.observe.format.frozen_stacks import Stack
from farcall.observe.format.layout import Beat
from farcall.observe.reading.state import JobState, Process, WorkerState

__all__ = [
    "MAIN",
    "NOW",
    "WALL",
    "call",
    "in_operation",
    "job",
    "main_thread",
    "place",
    "request",
    "thread",
    "worker",
]

MAIN = 1
"""Identifier of main threads."""

NOW = 100.0
"""Time of the looks on the workers' monotonic clocks."""

WALL = 1000.0
"""The same in seconds since 1970."""


def place(line: int, function: str = "f") -> list[Any]:
    return [function, "prog.py", line]


def thread(ident: int, **fields: Any) -> dict[str, Any]:
    """One thread; with a ``line``, it is there in the program."""
    line = fields.pop("line", None)
    found = {"id": ident, "name": "MainThread" if ident == MAIN else f"farcall-{ident}", "since": NOW - 30}
    found |= fields
    return found if line is None else found | {"at": place(line), "stack": [place(line)]}


def main_thread(**fields: Any) -> dict[str, Any]:
    return thread(MAIN, line=7, **fields)


def in_operation(what: str, line: int, *whom: str, **details: Any) -> dict[str, Any]:
    """A main thread that waits in an operation of a group."""
    wait = {"what": what, "since": NOW - 9, "details": details, "whom": list(whom)}
    return thread(MAIN, line=line, waits=[wait])


def call(to: int, number: int, what: str = "work", began: float = NOW - 20) -> dict[str, Any]:
    return {"id": number, "to": f"worker{to}", "incarnation": 10 + to, "what": what, "began": began}


def request(by: int, number: int, state: str = "begun", **fields: Any) -> dict[str, Any]:
    found = {"from": f"worker{by}", "incarnation": 10 + by, "id": number, "state": state}
    return found | {"began": NOW - 20} | fields


def worker(
    rank: int,
    *threads: dict[str, Any],
    process: Process | None = None,
    frozen: dict[int, Stack] | None = None,
    at: float = 0.0,
    wall: float = WALL,
    looked: float = NOW,
    phase: str = "running",
    error: str = "",
    groups: list[dict[str, Any]] | None = None,
    **snapshot: Any,
) -> WorkerState:
    """One worker, ``at`` seconds after ``NOW``.

    Args:
        wall, looked: time of its last look.
        groups: its process groups.
        snapshot: more of what it has written.
    """
    facts = {"name": f"worker{rank}", "rank": rank, "host": "here", "pid": 50 + rank, "phase": phase}
    facts |= {"incarnation": 10 + rank, "error": error, "program": "prog.py", "began": WALL - 60}
    found = {"worker": facts, "monotonic": NOW + at, "wall": wall + at, "threads": list(threads)}
    found |= {"moved": NOW - 30, "called": NOW - 30, "spmd.node": groups or []} | snapshot
    beat = Beat(1, looked + at, wall + at, int(10 * at), 0, 0.5 * at, 3.0, 4.0)
    return WorkerState(beat, found, process or Process(alive=True), NOW + at, frozen or {})


def job(*workers: WorkerState) -> JobState:
    return JobState("7c2f", workers)
