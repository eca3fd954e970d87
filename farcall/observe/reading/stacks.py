"""Stacks of the threads of workers, as lines."""

from __future__ import annotations

import socket
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby, takewhile

from farcall.observe.format.frozen_stacks import Stack
from farcall.observe.format.positions import Position
from farcall.observe.reading.native_stacks import native_stacks
from farcall.observe.reading.state import JobState, ThreadState, WorkerState
from rpc.runtime.code_folders import OURS

__all__ = ["chosen", "lines_of_all", "stack_lines"]


def chosen(job: JobState, names: Sequence[str]) -> list[WorkerState]:
    """Return the workers with these names or ranks; all if none are given.

    Raises:
        LookupError: there is no such worker; the text names those that exist.
    """
    if not names:
        return list(job)
    found = []
    for name in names:
        worker = next((each for each in job if name in (each.name, str(each.rank))), None)
        if worker is None:
            known = ", ".join(each.name for each in job)
            raise LookupError(f"job {job.id} has no worker {name!r}; there are: {known or 'none'}")
        found.append(worker)
    return found


def stack_lines(worker: WorkerState, *, everything: bool = False) -> Iterator[str]:
    """Yield the threads of a worker, the innermost frame of each first.

    Args:
        worker: the worker.
        everything: whether to include idle threads, each frame of this distribution, and those by which
            Python starts a thread or a program; otherwise the frames of this distribution that follow each
            other are one line.
    """
    if worker.is_frozen and worker.frozen:
        is_spied = any(each.native for each in worker.frozen.values())
        how = "as of now, by py-spy" if is_spied else "written without it"
        yield f"{worker.name}: its interpreter does not run; stacks {how}"
        names = {each.id: each.name for each in worker.threads}
        for stack in worker.frozen.values():
            yield from _stack(stack, names, everything=everything)
        return
    when = f"as of {worker.silent:.1f} s ago" if worker.process.alive else "at its last look"
    yield f"{worker.name} ({when})"
    idle = 0
    for thread in worker.threads:
        if thread.fields.get("idle") and not thread.waits and not everything:
            idle += 1
            continue
        yield f"  {thread.name}{_doing(thread)}"
        yield from _places(_whole(thread.fields.get("stack")), thread.folder, everything=everything)
    for request in worker.requests:
        if places := _whole(request.get("stack")):
            yield f"  coroutine for {request.get('from')}, {worker.age(request.get('began')):.1f} s"
            yield from _places(places, everything=everything)
    if idle:
        yield f"  and {idle} idle threads (--all)"


def _doing(thread: ThreadState) -> str:
    if thread.fields.get("computes"):
        return ": computes"
    doing = str(thread.fields.get("doing") or "")
    on = thread.fields.get("on") if doing.startswith("waits ") else None
    return f": {doing}{f' `{on}`' if on else ''}" if doing else ""


def _whole(stack: object) -> list[Position]:
    """Return the places of a stack in a snapshot, with whole paths."""
    places = (Position.of(each) for each in (stack if isinstance(stack, list) else ()))
    return [each for each in places if each is not None]


def _places(places: Sequence[Position], folder: str = "", *, everything: bool) -> Iterator[str]:
    prefix = folder.rstrip("/") + "/" if folder else ""
    if not everything:
        places = places[: len(places) - sum(1 for _ in takewhile(_starts, reversed(places[1:])))]
    for is_ours, group in groupby(places, lambda place: place.file.startswith(OURS)):
        same = list(group)
        if is_ours and not everything:
            yield f"    ... {len(same)} frame{'' if len(same) == 1 else 's'} of farcall (--all)"
            continue
        for place in same:
            yield f"    {place.function}  {place.file.removeprefix(prefix)}:{place.line}"


def _starts(place: Position) -> bool:
    """Whether Python starts a thread or a program in this frame."""
    function = place.function.removeprefix("Thread.")
    is_threads = place.file.endswith("/threading.py") and function in (
        "_bootstrap",
        "_bootstrap_inner",
        "run",
    )
    return is_threads or place.file == "<frozen runpy>"


def lines_of_all(workers: Iterable[WorkerState], *, native: bool, everything: bool) -> Iterator[str]:
    """Yield the stacks of several workers.

    Raises:
        OSError: in the end, if native stacks of some of them are not available; the text has the reasons.
    """
    reasons = []
    for worker in workers:
        try:
            yield from _native_stack_lines(worker) if native else stack_lines(worker, everything=everything)
        except OSError as error:
            reasons.append(str(error))
    if reasons:
        raise OSError("\n".join(dict.fromkeys(reasons)))


def _native_stack_lines(worker: WorkerState) -> Iterator[str]:
    """Yield the threads of a living worker with their frames of C and C++, from ``py-spy``.

    Raises:
        OSError: it is not installed, or cannot read the process; the text has the reason.
    """
    if worker.host != socket.gethostname():
        raise OSError(f"{worker.name} runs on {worker.host}: run `farcall stacks --native` there")
    names = {each.id: each.name for each in worker.threads}
    stacks = native_stacks(worker.pid)
    yield f"{worker.name} (now)"
    for stack in stacks:
        yield from _stack(stack, names, everything=True)


def _stack(stack: Stack, names: Mapping[int, str], *, everything: bool) -> Iterator[str]:
    name = names.get(stack.thread) or stack.name or f"thread {stack.thread:#x}"
    yield f"  {name}{': holds the interpreter lock' if stack.holds_interpreter else ''}"
    yield from _places([Position(*each) for each in stack.frames], everything=everything)
