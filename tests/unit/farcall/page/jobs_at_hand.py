"""States of workers for tests of the page: made here, of no process."""

from __future__ import annotations

from typing import Any

from farcall.observe.format.layout import Beat
from farcall.observe.reading.state import JobState, Process, WorkerState

__all__ = ["NOW", "WALL", "call", "job", "main_thread", "request", "worker"]

NOW = 100.0
"""Time of the looks on the workers' monotonic clocks."""

WALL = 5000.0
"""The same in seconds since 1970."""


def call(to: int, number: int, what: str = "work", began: float = NOW - 20) -> dict[str, Any]:
    return {"id": number, "to": f"worker{to}", "incarnation": 10 + to, "what": what, "began": began}


def request(by: int, number: int, state: str = "begun") -> dict[str, Any]:
    found = {"from": f"worker{by}", "incarnation": 10 + by, "id": number, "state": state}
    return found | {"began": NOW - 20}


def main_thread(**fields: Any) -> dict[str, Any]:
    place = ["f", "prog.py", 7]
    return {"id": 1, "name": "MainThread", "since": NOW - 30, "at": place, "stack": [place]} | fields


def worker(
    rank: int,
    *threads: dict[str, Any],
    process: Process | None = None,
    at: float = 0.0,
    **snapshot: Any,
) -> WorkerState:
    """One worker at a look, ``at`` seconds after ``NOW``."""
    identity = {"name": f"worker{rank}", "rank": rank, "host": "here", "pid": 100 + rank}
    identity |= {"incarnation": 10 + rank, "phase": "running", "program": "prog.py", "began": WALL - 60}
    found: dict[str, Any] = {"worker": identity, "monotonic": NOW + at, "wall": WALL + at, "moved": NOW - 30}
    found |= {"called": NOW - 30, "threads": list(threads)} | snapshot
    beat = Beat(1, NOW + at, WALL + at, int(10 * at), 0, 0.5 * at, 3.0, 4.0)
    return WorkerState(beat, found, process or Process(alive=True), NOW + at)


def job(*workers: WorkerState) -> JobState:
    return JobState("7c2f", workers)
