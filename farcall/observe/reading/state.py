"""The state of a job and its workers: plain values, read from state files or reported by other hosts."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

from farcall.observe.format.frozen_stacks import FROZEN_SECONDS, Stack
from farcall.observe.format.layout import Beat
from farcall.observe.format.positions import Position

__all__ = [
    "JobState",
    "Position",
    "Process",
    "ThreadState",
    "WorkerState",
    "kinds_of_objects",
    "owned_objects",
    "with_class",
    "with_methods",
]

_METHOD_OF_OBJECT: Final = re.compile(r"method '(.+)' of object (.+ #\d+)")
"""How a caller describes a method of an object of unknown type."""


@dataclass(frozen=True, slots=True)
class Process:
    """What the kernel reports of a worker's process now; of one on another host, or that has ended, nothing.

    Attributes:
        alive: whether it exists; None if that is not visible from here.
        stopped: whether it is stopped by a signal.
        traced: process number of its debugger; 0 if there is none.
        computes: whether its CPU time moves.
        memory: resident memory, in bytes.
        share: CPU time used per second, over the moment for which it was watched.
    """

    alive: bool | None = None
    stopped: bool = False
    traced: int = 0
    computes: bool = False
    memory: int = 0
    share: float = 0.0


@dataclass(frozen=True, slots=True)
class ThreadState:
    """One thread of a worker at its last look: the fields of the snapshot."""

    fields: Mapping[str, Any]
    folder: str = ""

    @property
    def id(self) -> int:
        return whole(self.fields.get("id"))

    @property
    def name(self) -> str:
        return str(self.fields.get("name", "a thread"))

    @property
    def at(self) -> Position | None:
        """The innermost position in the program's own code."""
        return Position.of(self.fields.get("at"), self.folder)

    @property
    def stack(self) -> list[Position]:
        """The whole stack, innermost frame first."""
        stack = self.fields.get("stack")
        places = [Position.of(each, self.folder) for each in stack] if isinstance(stack, list) else []
        return [each for each in places if each is not None]

    @property
    def call(self) -> tuple[int, int] | None:
        """The call that it waits for: incarnation of the callee, and number."""
        return pair(self.fields.get("call"))

    @property
    def request(self) -> tuple[int, int] | None:
        """The request that it runs: incarnation of the caller, and number."""
        return pair(self.fields.get("request"))

    @property
    def waits(self) -> list[Mapping[str, Any]]:
        """The operations of a group in which it waits, the outermost first."""
        return mappings(self.fields.get("waits"))


def pair(value: object) -> tuple[int, int] | None:
    """Return two numbers, or None."""
    match value:
        case [int(first), int(second)]:
            return int(first), int(second)
    return None


def mappings(value: object) -> list[Mapping[str, Any]]:
    """Return the mappings in a list; anything else is dropped."""
    return [each for each in value if isinstance(each, Mapping)] if isinstance(value, list) else []


def items(value: object) -> list[Any]:
    """Return the items of a list; none of anything else."""
    return value if isinstance(value, list) else []


def whole(value: object, default: int = 0) -> int:
    """Return a whole number, or the default for anything else."""
    return value if isinstance(value, int) else default


def number(value: object, default: float = 0.0) -> float:
    """Return a finite number, or the default for anything else."""
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else default


@dataclass(frozen=True, slots=True)
class WorkerState:
    """One process of a job: what it has written, and what the kernel reports of it.

    Attributes:
        beat: its last heartbeat; None if that is torn.
        snapshot: its last snapshot.
        process: see ``Process``.
        now: time of reading on the worker's own monotonic clock; of a dead one, that of its last heartbeat.
        frozen: stacks that were written without its interpreter, by thread.
        file: the state file, for people.
        earlier: the snapshot before the last one; None if it was not read.
    """

    beat: Beat | None
    snapshot: Mapping[str, Any]
    process: Process = Process()
    now: float = 0.0
    frozen: Mapping[int, Stack] = field(default_factory=dict)
    file: str = ""
    earlier: Mapping[str, Any] | None = None

    def as_of(self, then: float) -> WorkerState:
        """Return the state when another worker failed, as far as it was read. A worker that has ended since,
        or that left just before, counts as running: most likely it did so because of the failure.

        Args:
            then: time of the failure, in seconds since 1970.
        """
        known = [self] if self.earlier is None else [self, replace(self, snapshot=self.earlier)]
        found = next((each for each in known if each._is_from_before(then)), known[-1])
        lived = self.beat is not None and self.beat.wall >= then - FROZEN_SECONDS
        return replace(found, process=Process(alive=True)) if found.is_dead and lived else found

    def _is_from_before(self, then: float) -> bool:
        if self.phase in ("leaving", "left"):
            then -= FROZEN_SECONDS
        return number(self.snapshot.get("wall"), math.inf) <= then

    @property
    def _identity(self) -> Mapping[str, Any]:
        found = self.snapshot.get("worker")
        return found if isinstance(found, Mapping) else {}

    def fact(self, name: str, default: Any = "") -> Any:
        """Return a property that the worker reports of itself."""
        return self._identity.get(name, default)

    @property
    def name(self) -> str:
        """Its name; before it has one, its rank or process."""
        name = str(self.fact("name")) or str(self._joining().get("name", ""))
        if name:
            return name
        rank = self.rank
        return f"rank {rank}" if rank >= 0 else f"process {self.pid}"

    @property
    def rank(self) -> int:
        rank = whole(self.fact("rank"), -1)
        return rank if rank >= 0 else whole(self._joining().get("rank"), -1)

    def _joining(self) -> Mapping[str, Any]:
        """What the rendezvous reports of it, while it is in one."""
        if self.phase != "joining":
            return {}
        details = [wait.get("details") for each in self.threads for wait in each.waits]
        return next((each for each in details if isinstance(each, Mapping)), {})

    @property
    def host(self) -> str:
        return str(self.fact("host"))

    @property
    def pid(self) -> int:
        return whole(self.fact("pid"))

    @property
    def phase(self) -> str:
        """Its phase: "joining", "running", "leaving" or "left"."""
        return str(self.fact("phase"))

    @property
    def incarnation(self) -> int:
        return whole(self.fact("incarnation"))

    @property
    def folder(self) -> str:
        return str(self.fact("folder"))

    def is_library(self, file: str) -> bool:
        """Whether code of this file is not the program's own."""
        folders = self.fact("libraries", [])
        known = tuple(each for each in folders if isinstance(each, str)) if isinstance(folders, list) else ()
        return file.startswith((*known, "<"))

    @property
    def is_dead(self) -> bool:
        """Whether its process has ended without leaving."""
        return self.process.alive is False and self.phase != "left"

    @property
    def has_left(self) -> bool:
        return self.phase == "left"

    @property
    def error(self) -> str:
        """The exception that has ended its program; "" if there was none."""
        return str(self.fact("error"))

    @property
    def silent(self) -> float:
        """Seconds since its last heartbeat."""
        return max(0.0, self.now - self.beat.monotonic) if self.beat is not None else 0.0

    @property
    def is_frozen(self) -> bool:
        """Whether its interpreter does not run, though its process lives, or did not run at its end."""
        if self.process.alive is True and self.silent < FROZEN_SECONDS:
            return False
        return bool(self.frozen) or (
            self.process.alive is True and self.silent > 2 * FROZEN_SECONDS and not self.fact("observer", 0)
        )

    @property
    def threads(self) -> list[ThreadState]:
        return [ThreadState(each, self.folder) for each in mappings(self.snapshot.get("threads"))]

    @property
    def calls(self) -> list[Mapping[str, Any]]:
        """The calls that it has made and that are not answered."""
        return mappings(self.snapshot.get("calls"))

    @property
    def requests(self) -> list[Mapping[str, Any]]:
        """The requests of others that it has not answered."""
        return mappings(self.snapshot.get("requests"))

    @property
    def peers(self) -> list[Mapping[str, Any]]:
        return mappings(self.snapshot.get("peers"))

    @property
    def still(self) -> float:
        """Seconds since anything has moved."""
        return max(0.0, self.now - number(self.snapshot.get("moved"), self.now))

    @property
    def quiet(self) -> float:
        """Seconds since a call has begun or ended."""
        return max(0.0, self.now - number(self.snapshot.get("called"), self.now))

    def age(self, since: object) -> float:
        """Seconds since a time on the worker's monotonic clock."""
        return max(0.0, self.now - number(since, self.now))


@dataclass(frozen=True, slots=True)
class JobState:
    """A job.

    Attributes:
        id: its name.
        workers: its workers, by rank; of one that was restarted, only the newest.
        skipped: files that were not read, and the reasons.
        end: what its launcher has written at its end: the time ``ended``, the exit ``status``, and the
            ``failure``; empty if it has not, or there is no launcher.
    """

    id: str
    workers: tuple[WorkerState, ...]
    skipped: tuple[tuple[str, str], ...] = ()
    end: Mapping[str, Any] = field(default_factory=dict)

    @property
    def began(self) -> float:
        """Time when its first worker began, in seconds since 1970; 0 if that is not known."""
        return min((at for each in self if (at := number(each.fact("began")))), default=0.0)

    @property
    def has_failed(self) -> bool:
        """Whether it is over, and a worker has raised an exception or its launcher has noted a failure."""
        return not self.living and (whole(self.end.get("status")) != 0 or any(each.error for each in self))

    def end_in_words(self) -> str:
        """Describe how and after what time it has ended, as far as that is known."""
        status, ended = self.end.get("status"), number(self.end.get("ended"))
        last = ended or max((each.beat.wall for each in self if each.beat is not None), default=0.0)
        seconds = max(0.0, last - self.began) if self.began else 0.0
        after = f" after {seconds:.0f} s" if seconds < 600 else f" after {seconds / 60:.0f} min"
        raised = next((f"{each.name} raised {each.error}" for each in self if each.error), "")
        why = str(self.end.get("failure") or raised)
        if not isinstance(status, int):
            how = "failed" if raised else "ended" if all(each.has_left for each in self) else ""
            return f"{how}{after}{f': {why}' if why else ''}" if how else ""
        how = f"failed with status {status}" if status else "succeeded"
        return f"{how}{after}{f': {why}' if status and why else ''}"

    def as_of(self, then: float) -> JobState:
        """Return the state when a worker failed; see ``WorkerState.as_of``."""
        return replace(self, workers=tuple(each.as_of(then) for each in self.workers))

    @property
    def living(self) -> list[WorkerState]:
        return [each for each in self.workers if not each.is_dead and not each.has_left]

    @property
    def still(self) -> float:
        """Seconds since anything has moved in any of its workers."""
        return min((each.still for each in self.living or self.workers), default=0.0)

    @property
    def quiet(self) -> float:
        """Seconds since a call has begun or ended in any of its workers."""
        return min((each.quiet for each in self.living or self.workers), default=0.0)

    def __iter__(self) -> Iterator[WorkerState]:
        return iter(self.workers)


def with_methods(workers: Iterable[WorkerState]) -> tuple[WorkerState, ...]:
    """Return the workers with the calls of methods described as their callees do, by class and name: callers
    do not know the classes of all objects.
    """
    workers = tuple(workers)
    known = {
        (callee.incarnation, whole(each.get("incarnation")), whole(each.get("id"))): each["what"]
        for callee in workers
        for each in callee.requests
        if isinstance(each.get("what"), str)
    }
    kinds = kinds_of_objects(workers)

    def described(caller: WorkerState) -> WorkerState:
        calls = [
            {**call, "what": with_class(known.get(_key(call, caller), call.get("what")), kinds)}
            for call in caller.calls
        ]
        return replace(caller, snapshot={**caller.snapshot, "calls": calls})

    return tuple(described(each) if each.calls else each for each in workers) if known or kinds else workers


def kinds_of_objects(workers: Sequence[WorkerState]) -> dict[str, str]:
    """Return the types of the objects that workers own, by creator and number."""
    return {name: str(each.get("type")) for _, name, each in owned_objects(workers) if each.get("type")}


def with_class(what: object, kinds: Mapping[str, str]) -> object:
    """Describe a method of an object of unknown type by class and name, if ``kinds`` has its type."""
    found = _METHOD_OF_OBJECT.fullmatch(what) if isinstance(what, str) else None
    return what if found is None or found[2] not in kinds else f"{kinds[found[2]]}.{found[1]}"


def owned_objects(workers: Sequence[WorkerState]) -> Iterator[tuple[WorkerState, str, Mapping[str, Any]]]:
    """Yield the objects that workers own for references: the owner, creator and number, and what is known."""
    names = {each.incarnation: each.name for each in workers}
    for worker in workers:
        part = worker.snapshot.get("rref")
        for each in mappings(part.get("owned")) if isinstance(part, Mapping) else ():
            creator = names.get(whole(each.get("creator")), "a worker that is gone")
            yield worker, f"{creator} #{whole(each.get('number'))}", each


def _key(call: Mapping[str, Any], caller: WorkerState) -> tuple[int, int, int]:
    return whole(call.get("incarnation")), caller.incarnation, whole(call.get("id"))
