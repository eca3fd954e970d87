"""Processes that no longer write their state: the reason, their last place in the program, and the thread of
a frozen process that holds the interpreter lock. Pure.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from farcall.observe.reading.native_stacks import is_native
from farcall.observe.reading.state import JobState, Position, ThreadState, WorkerState

__all__ = [
    "InterpreterHolder",
    "innermost_own_place",
    "interpreter_holder",
    "last_place",
    "silence_in_words",
    "silence_kind",
]

_MAX_NATIVE: Final = 4
"""Maximum number of functions in C that are named, the innermost."""

_EARLIER_SECONDS: Final = 3.0
"""Seconds by which the last heartbeat of a worker of a finished job must precede those of the others for the
worker to count as having ended before them.
"""


def silence_kind(worker: WorkerState, job: JobState) -> str:
    """Return why a worker makes no progress as a process: "failed", "left", "dead", "ended first", "traced",
    "stopped", "frozen" or "unreachable"; "" if it runs.
    """
    process = worker.process
    if worker.error and (worker.has_left or worker.is_dead):
        return "failed"
    if worker.has_left:
        return "left"
    if worker.is_dead:
        wall = 0.0 if worker.beat is None else worker.beat.wall
        newest = max((each.beat.wall for each in job if each.beat is not None), default=wall)
        alone = any(each.process.alive is not False for each in job)
        if not alone and newest - wall <= _EARLIER_SECONDS:
            return "frozen" if worker.frozen else ""
        if not alone:
            return "frozen" if worker.frozen else "ended first"
        return "dead"
    if process.traced:
        return "traced"
    if process.stopped:
        return "stopped"
    if worker.is_frozen:
        return "frozen"
    return "unreachable" if process.alive is None and worker.silent > 10 * _EARLIER_SECONDS else ""


def silence_in_words(kind: str, worker: WorkerState) -> str:
    """Describe a silent worker; ``kind`` is its ``silence_kind``, other than "frozen"."""
    process = f"process {worker.pid}"
    match kind:
        case "dead":
            return f"is dead: its {process} has ended"
        case "failed":
            return f"has failed: its {process} raised {worker.error}"
        case "left":
            return f"has left: its {process} has called shutdown()"
        case "ended first":
            return f"gave no sign for a while before the end: its {process} was stopped, or died"
        case "traced":
            return f"is held by a debugger (process {worker.process.traced}): {process}"
        case "stopped":
            return f"is stopped by a signal (SIGSTOP, Ctrl-Z): {process}; SIGCONT continues it"
    return f"has given no sign of life for {worker.silent:.0f} s: {process} on {worker.host}"


def last_place(worker: WorkerState) -> Position | None:
    """Return where a worker's main thread was last, or else any of its threads, in code of the program."""
    threads = sorted(worker.threads, key=lambda each: (each.name != "MainThread", each.request is None))
    return next((each.at for each in threads if each.at is not None), None)


def innermost_own_place(places: list[Position], worker: WorkerState) -> Position | None:
    """Return the innermost place in the program's own code, or else the innermost in Python."""
    places = [place for place in places if not is_native(place.file)]
    own = [place for place in places if not worker.is_library(place.file)]
    return own[0] if own else places[0] if places else None


@dataclass(frozen=True, slots=True)
class InterpreterHolder:
    """The thread of a frozen process that most likely holds the interpreter lock.

    Attributes:
        thread: its name.
        stack: the places of its stack, innermost first.
        native: the functions in C that it is in, innermost first; empty if they are not known.
    """

    thread: str
    stack: list[Position]
    native: tuple[str, ...]

    def native_in_words(self) -> str:
        """The innermost functions in C; "" if they are not known."""
        return f"in C: {' ← '.join(self.native[:_MAX_NATIVE])}" if self.native else ""


def interpreter_holder(worker: WorkerState) -> InterpreterHolder | None:
    """Find the thread of a frozen process that holds the interpreter lock, in C code; None if no thread is
    likely to.
    """
    known = {each.id: each for each in worker.threads}
    best_score, best = 0, None
    for ident, stack in worker.frozen.items():
        places = [Position(name, _short(file, worker.folder), line) for name, file, line in stack.frames]
        thread = known.get(ident)
        score = _likelihood(places, thread, worker) + 100 * stack.holds_interpreter
        if score > best_score:
            name = thread.name if thread is not None else stack.name or f"thread {ident}"
            best_score, best = score, InterpreterHolder(name, places, stack.native)
    return best


def _likelihood(places: list[Position], thread: ThreadState | None, worker: WorkerState) -> int:
    """Score how likely a thread of a frozen process is to hold the interpreter lock."""
    places = [place for place in places if not is_native(place.file)]
    if not places:
        return 0
    before = [] if thread is None else thread.stack
    same_place = bool(before) and (before[0].function, before[0].line) == (places[0].function, places[0].line)
    waited = thread is not None and bool(thread.waits or thread.call or thread.fields.get("on"))
    score = 0
    if not worker.is_library(places[0].file):
        score += 3  # the program itself has called C code
    if not same_place:
        score += 2
    if same_place and (waited or (thread is not None and thread.fields.get("idle"))):
        score -= 4
    return score


def _short(file: str, folder: str) -> str:
    return file.removeprefix(folder.rstrip("/") + "/") if folder else file
