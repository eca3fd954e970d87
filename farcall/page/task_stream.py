"""Calls and operations of groups over time, followed from one look at a job to the next. Pure.

The state files hold what was in flight at each look. A call that lasts over two looks has its true begin, and
ends between two looks; a shorter one is seen if a look happens while it runs, and counts as a sample.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from farcall.observe.reading.state import (
    JobState,
    WorkerState,
    kinds_of_objects,
    number,
    whole,
    with_class,
)

__all__ = ["Task", "TaskStream"]

MAX_TASKS: Final = 4000
"""Maximum number of tasks that are kept; the newest."""

_LATEST_SECONDS: Final = 1.0
"""A task counts as ended this long after the last look at which it was seen, or earlier, in seconds."""

_Key = tuple[int, int, int]


@dataclass(slots=True)
class Task:
    """A call, or a wait in an operation of a group.

    Attributes:
        kind: "call" or "group".
        lane: the worker that runs it.
        by: the worker that asked for it; "" for an operation of a group.
        what: the function, or the operation.
        began: in seconds since 1970.
        ended: the same; None while it lasts.
        how: how it ended or stands: "runs", "queued", "arriving", "done", "lost".
        version: grows with each change, over all tasks of a stream.
        number: tells it from other tasks of a stream.
        seen: time of the last look at which it was in flight, in seconds since 1970.
    """

    kind: str
    lane: str
    by: str
    what: str
    began: float
    ended: float | None = None
    how: str = "runs"
    version: int = 0
    number: int = 0
    seen: float = 0.0

    def to_json(self) -> list[Any]:
        """For the page: number, kind, lane, by, what, began, ended, how."""
        ended = None if self.ended is None else round(self.ended, 3)
        return [self.number, self.kind, self.lane, self.by, self.what, round(self.began, 3), ended, self.how]


class TaskStream:
    """The tasks of one job. For one thread.

    Attributes:
        version: that of the newest change.
    """

    def __init__(self) -> None:
        self.version = 0
        self._tasks: deque[Task] = deque(maxlen=MAX_TASKS)
        self._running: dict[object, Task] = {}
        self._looked: dict[int, float] = {}
        self._numbers = 0

    def follow(self, job: JobState) -> None:
        """Take in the state of a job."""
        states = _request_states(job)
        for worker in job:
            wall = number(worker.snapshot.get("wall"))
            is_over = worker.is_dead or worker.has_left
            if self._looked.get(worker.incarnation) == wall and not is_over:
                continue
            self._looked[worker.incarnation] = wall
            seen = dict(self._of(worker, states))
            for key, task in seen.items():
                self._see(key, task, wall)
            mine = (worker.incarnation, worker.pid)
            for key in [key for key in self._running if isinstance(key, tuple) and key[0] == mine]:
                if key not in seen or is_over:
                    self._end(key, wall, "done" if key not in seen else "lost")

    def since(self, version: int) -> list[Task]:
        """The tasks that have changed after a version."""
        return [each for each in self._tasks if each.version > version]

    def seed(self, job: JobState) -> None:
        """Take in the rings of workers: the calls that have begun and ended before the first look."""
        kinds = kinds_of_objects(job.workers)
        found = [task for worker in job for task in _of_ring(worker, kinds)]
        for task in sorted(found, key=lambda each: each.began)[-MAX_TASKS // 2 :]:
            self._add(task)

    def _of(self, worker: WorkerState, states: Mapping[_Key, str]) -> Iterator[tuple[object, Task]]:
        mine = (worker.incarnation, worker.pid)
        for call in worker.calls:
            which = (whole(call.get("incarnation")), whole(call.get("id")))
            how = states.get((which[0], worker.incarnation, which[1]), "runs")
            began = _wall(worker, call.get("began"))
            yield (
                (mine, *which),
                Task("call", str(call.get("to")), worker.name, str(call.get("what")), began, how=how),
            )
        for thread in worker.threads:
            for wait in thread.waits[-1:]:
                since = number(wait.get("since"))
                task = Task("group", worker.name, "", str(wait.get("what")), _wall(worker, since))
                yield (mine, "wait", thread.id, since), task

    def _see(self, key: object, task: Task, at: float) -> None:
        known = self._running.get(key)
        if known is None:
            known = self._running[key] = self._add(task)
        known.seen = at
        if known.how != task.how:
            known.how = task.how
            self._touch(known)

    def _end(self, key: object, at: float, how: str) -> None:
        task = self._running.pop(key)
        task.ended, task.how = max(min(at, task.seen + _LATEST_SECONDS), task.began), how
        self._touch(task)

    def _add(self, task: Task) -> Task:
        self._numbers += 1
        task.number = self._numbers
        self._tasks.append(task)
        self._touch(task)
        return task

    def _touch(self, task: Task) -> None:
        self.version += 1
        task.version = self.version


def _wall(worker: WorkerState, at: object) -> float:
    """A time on a worker's monotonic clock in seconds since 1970."""
    snapshot = worker.snapshot
    now = number(snapshot.get("monotonic"))
    return number(snapshot.get("wall")) - max(0.0, now - number(at, now))


def _request_states(job: JobState) -> dict[_Key, str]:
    """How requests stand, by callee, caller and number."""
    shown = {"queued": "queued", "arriving": "arriving"}
    return {
        (worker.incarnation, whole(each.get("incarnation")), whole(each.get("id"))): shown.get(
            str(each.get("state")), "runs"
        )
        for worker in job
        for each in worker.requests
    }


def _of_ring(worker: WorkerState, kinds: Mapping[str, str]) -> Iterator[Task]:
    begun: dict[tuple[object, object], Task] = {}
    for record in worker.records:
        fields = record.fields
        which = (fields.get("to"), fields.get("id"))
        match fields.get("kind"):
            case "call begun":
                began = min(_wall(worker, fields.get("began")), number(fields.get("at")))
                what, to = str(with_class(fields.get("what"), kinds)), str(fields.get("to"))
                begun[which] = Task("call", to, worker.name, what, began)
            case "call ended" if which in begun:
                task = begun.pop(which)
                task.ended, task.how = max(task.began, number(fields.get("at"))), "done"
                yield task
