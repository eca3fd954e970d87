"""Reads what the workers of a job have written, and what the kernel reports of those that live.

A file of another user, a damaged one, or one that is not a state file, is skipped and named. Control
characters in texts are escaped here, for all users of the state.
"""

from __future__ import annotations

import contextlib
import math
import os
import socket
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from farcall.observe.format.frozen_stacks import FROZEN_SECONDS, Stack, read_stacks
from farcall.observe.format.job_files import read_facts, read_own
from farcall.observe.format.jobs import JobFolder, process_of
from farcall.observe.format.layout import MAX_FILE_BYTES, LayoutError, unpack_state
from farcall.observe.format.legible import legible
from farcall.observe.reading.gathered import GATHERED, unpack_states
from farcall.observe.reading.native_stacks import NativeStacksError, native_stacks, spy_program
from farcall.observe.reading.processes import Signs, ask_for_stacks, core_waits, signs_of
from farcall.observe.reading.state import JobState, Process, WorkerState, with_methods

__all__ = ["END", "read_job", "read_worker", "settled"]

END: Final = "end.json"
"""File in a job's folder in which its launcher notes how it has ended."""

_MAX_STACKS_BYTES: Final = 4 << 20
_MAX_GATHERED_BYTES: Final = 64 << 20
_MAX_DEPTH: Final = 12

_SAMPLE_SECONDS: Final = 0.15
"""Time in seconds over which processes are watched to see whether they compute."""

_MAX_CORE_WAIT: Final = 0.5
"""Maximum share of that time for which threads of a process that is asked for its stacks waited for cores."""

_MAX_SPIED: Final = 2
"""Maximum number of processes that ``py-spy`` reads at one time."""

_SPY_SECONDS: Final = 5.0
"""Maximum time in seconds that it may take for each."""

_DUMP_SECONDS: Final = 1.0
"""Maximum time in seconds to wait for stacks that were requested."""


def _legible(value: Any, depth: int = 0) -> Any:
    """Return a value whose texts have no control characters."""
    if isinstance(value, str):
        return legible(value)
    if depth > _MAX_DEPTH:
        return None
    if isinstance(value, Mapping):
        return {_legible(key, depth + 1): _legible(each, depth + 1) for key, each in value.items()}
    if isinstance(value, list):
        return [_legible(each, depth + 1) for each in value]
    return value


def read_worker(path: Path) -> WorkerState:
    """Return the state that a worker has written; ``settled`` adds what the kernel reports.

    Raises:
        OSError, LayoutError: the file cannot be read; the text has the reason.
    """
    state = unpack_state(read_own(path, MAX_FILE_BYTES))
    return WorkerState(
        state.beat,
        _legible(state.snapshot),
        earlier=_legible(state.earlier),
        frozen=_read_stacks(path.with_suffix(".stacks")),
        file=str(path),
    )


def _read_stacks(path: Path) -> Mapping[int, Stack]:
    try:
        text = read_own(path, _MAX_STACKS_BYTES).decode(errors="replace")
    except OSError:
        return {}
    return {} if not text else read_stacks("\n".join(map(_legible, text.splitlines())))


def read_job(
    folder: JobFolder,
    *,
    gathered: bool = True,
    native: bool = False,
    processes: Collection[int] | None = None,
) -> JobState:
    """Return the state of all workers of a job, from the files on this host. Takes a moment, to see which
    processes compute.

    Args:
        gathered: whether to include workers of other hosts whose state has been gathered here.
        native: whether to add the stacks of frozen workers from ``py-spy``, which stops each for a moment.
        processes: the only processes of this host whose files are read; default: all.
    """
    workers: list[WorkerState] = []
    skipped: list[tuple[str, str]] = []
    for path in folder.state_files():
        if processes is not None and process_of(path) not in processes:
            continue
        try:
            workers.append(read_worker(path))
        except (LayoutError, OSError) as error:
            skipped.append(_why_skipped(path, error))
    found = settled(workers, native=native)
    if gathered:
        found += _gathered(folder, {each.pid for each in found if each.host == socket.gethostname()}, skipped)
    end = _legible(read_facts(folder.path / END))
    return JobState(folder.id, with_methods(_newest(found)), tuple(skipped), end)


def _why_skipped(path: Path, error: LayoutError | OSError) -> tuple[str, str]:
    reason = error.strerror if isinstance(error, OSError) else None
    return _legible(path.name), reason or str(error)


def _gathered(folder: JobFolder, here: Collection[int], skipped: list[tuple[str, str]]) -> list[WorkerState]:
    """Return the workers of other hosts, as they were reported last."""
    found: list[WorkerState] = []
    for path in sorted(folder.path.glob(f"*{GATHERED}")):
        try:
            packed = read_own(path, _MAX_GATHERED_BYTES)
            age = max(0.0, time.time() - os.stat(path).st_mtime)
            told = unpack_states(packed, age, str(path))
        except (LayoutError, OSError) as error:
            skipped.append(_why_skipped(path, error))
        else:
            found += [
                replace(each, snapshot=_legible(each.snapshot), frozen=_legible_stacks(each.frozen))
                for each in told
            ]
    return [each for each in found if not (each.host == socket.gethostname() and each.pid in here)]


def _legible_stacks(stacks: Mapping[int, Stack]) -> Mapping[int, Stack]:
    return {
        ident: replace(
            stack,
            frames=tuple((_legible(function), _legible(file), line) for function, file, line in stack.frames),
            name=_legible(stack.name),
            native=tuple(map(_legible, stack.native)),
        )
        for ident, stack in stacks.items()
    }


def _newest(workers: Sequence[WorkerState]) -> list[WorkerState]:
    """Return the newest of several workers with the same name, or process."""
    newest: dict[object, WorkerState] = {}
    for each in sorted(workers, key=lambda each: each.beat.wall if each.beat else 0.0):
        newest[each.name] = each
    return sorted(newest.values(), key=lambda each: (each.rank if each.rank >= 0 else 1 << 30, each.name))


# ---- what the kernel says


def settled(workers: Sequence[WorkerState], *, native: bool = False) -> list[WorkerState]:
    """Add what the kernel reports of the workers' processes, and the stacks of those that are frozen."""
    here = socket.gethostname()
    before = [_signs(each, here) for each in workers]
    silent = {n: core_waits(each.pid) for n, each in enumerate(workers) if _is_silent(each, before[n])}
    if any(before):
        time.sleep(_SAMPLE_SECONDS)
    asked = {n for n, waits in silent.items() if _ask(workers[n], before[n], waits)}
    until = time.monotonic() + _DUMP_SECONDS
    found = []
    spied = 0
    for n, each in enumerate(workers):
        stacks = each.frozen
        while n in asked and not stacks and time.monotonic() < until:
            time.sleep(0.01)
            stacks = _read_stacks(Path(each.file).with_suffix(".stacks"))
        state = _with_process(each, before[n], here, stacks)
        if native and spied < _MAX_SPIED and state.process.alive and state.is_frozen and spy_program():
            spied += 1
            state = _with_native_stacks(state)
        found.append(state)
    return found


def _with_native_stacks(worker: WorkerState) -> WorkerState:
    """Add the stacks that ``py-spy`` sees to a worker, if the kernel allows it."""
    with contextlib.suppress(NativeStacksError):
        if not worker.process.stopped and not worker.process.traced:
            stacks = native_stacks(worker.pid, seconds=_SPY_SECONDS)
            return replace(worker, frozen={each.thread: each for each in stacks})
    return worker


def _signs(worker: WorkerState, here: str) -> Signs | None:
    """Return what is visible of a worker's process; None if it is not here, or has ended."""
    if worker.host != here or not worker.pid:
        return None
    signs = signs_of(worker.pid)
    return signs if signs is not None and signs.start == worker.fact("start", 0) else None


def _is_silent(worker: WorkerState, signs: Signs | None) -> bool:
    """Whether a process has not looked for a while, and has left no stacks since."""
    silent = 0.0 if worker.beat is None else time.monotonic() - worker.beat.monotonic
    is_still = signs is None or signs.is_stopped or worker.frozen or worker.has_left
    return silent >= FROZEN_SECONDS and not is_still


def _ask(worker: WorkerState, signs: Signs | None, waits: Mapping[str, float]) -> bool:
    """Ask a silent process for its stacks; returns whether it was asked.

    Nothing is sent to a process that may only wait for a core: its interpreter could run while the stacks are
    written, which can crash it. A thread that runs Python code lets the observing thread look within
    milliseconds; so if all threads had cores enough, and there was no look, the interpreter does not run.

    Args:
        waits: for how long each thread had waited for a core before the last ``_SAMPLE_SECONDS``.
    """
    number, thread = worker.fact("signal", 0), worker.fact("observer", 0)
    if signs is None or not isinstance(number, int) or not isinstance(thread, int) or not waits:
        return False
    now = core_waits(worker.pid)
    longest = max((seconds - waits.get(each, 0.0) for each, seconds in now.items()), default=math.inf)
    if longest > _MAX_CORE_WAIT * _SAMPLE_SECONDS:
        return False
    try:
        if read_worker(Path(worker.file)).beat != worker.beat:
            return False
        if 0 <= time.time() - os.stat(worker.file).st_mtime < FROZEN_SECONDS:
            return False  # it looks, but cannot write
    except (LayoutError, OSError):
        return False
    return ask_for_stacks(worker.pid, thread, signs, number)


def _with_process(
    worker: WorkerState, before: Signs | None, here: str, stacks: Mapping[int, Stack]
) -> WorkerState:
    beat = worker.beat
    last = 0.0 if beat is None else beat.monotonic
    if worker.host != here:
        age = time.time() - beat.wall if beat is not None else 0.0
        return replace(worker, now=last + max(0.0, age))
    signs = _signs(worker, here)
    if before is None or signs is None:
        return replace(worker, process=Process(alive=False), now=last)
    used = signs.seconds - before.seconds
    process = Process(
        alive=True,
        stopped=signs.is_stopped,
        traced=signs.tracer,
        computes=used > 0,
        memory=signs.memory,
        share=used / _SAMPLE_SECONDS,
    )
    return replace(worker, process=process, now=time.monotonic(), frozen=stacks)
