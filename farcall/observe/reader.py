"""Reads what the workers of a job have left, and what the kernel says of those that live.

Nothing of a file is believed before its checksum is right. A file of another user, a damaged one, or one that
is no state file at all, is skipped and named. Control characters in texts are escaped here, once for all.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import stat
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from farcall.observe.frozen_stacks import FROZEN_SECONDS, Stack, read_stacks
from farcall.observe.jobs import JobFolder
from farcall.observe.layout import (
    FILE_BYTES,
    HEADER_BYTES,
    LayoutError,
    unpack_beat,
    unpack_header,
    unpack_records,
    unpack_snapshot,
)
from farcall.observe.state import JobState, Process, WorkerState
from rpc.runtime.process_signs import ProcessSigns, computes, process_signs

__all__ = ["read_job", "read_worker", "settled"]

_MAX_BYTES: Final = 4 * FILE_BYTES
_MAX_STACKS_BYTES: Final = 4 << 20
_MAX_DEPTH: Final = 12

_SAMPLE_SECONDS: Final = 0.15
"""Time over which processes are watched to see whether they compute, in seconds."""

_DUMP_SECONDS: Final = 1.0
"""Maximum time to wait for stacks that were asked for, in seconds."""

_TICKS: Final = os.sysconf("SC_CLK_TCK")


def _legible(value: Any, depth: int = 0) -> Any:
    """A value whose texts have no control characters."""
    if isinstance(value, str):
        return value if value.isprintable() else "".join(map(_shown, value))
    if depth > _MAX_DEPTH:
        return None
    if isinstance(value, Mapping):
        return {_legible(key, depth + 1): _legible(each, depth + 1) for key, each in value.items()}
    if isinstance(value, list):
        return [_legible(each, depth + 1) for each in value]
    return value


def _shown(character: str) -> str:
    return character if character.isprintable() else repr(character)[1:-1]


def _read_file(path: Path, limit: int) -> bytes:
    """The content of a regular file of this user. Raises ``OSError`` or ``LayoutError``."""
    file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        known = os.fstat(file)
        if not stat.S_ISREG(known.st_mode):
            raise LayoutError("it is no file")
        if known.st_uid != os.getuid():
            raise LayoutError(f"it belongs to another user ({known.st_uid})")
        if known.st_size > limit:
            raise LayoutError(f"it has {known.st_size} bytes, more than any state file")
        parts = []
        while part := os.read(file, 1 << 20):
            parts.append(part)
        return b"".join(parts)
    finally:
        os.close(file)


def read_worker(path: Path, *, records: bool = True) -> WorkerState:
    """The state that a worker has written; what the kernel says is added by ``settled``.

    Raises:
        OSError, LayoutError: the file cannot be read; says why.
    """
    data = _read_file(path, _MAX_BYTES)
    unpack_header(data[:HEADER_BYTES])
    snapshot = unpack_snapshot(data)
    if snapshot is None:
        raise LayoutError("it has no whole snapshot")
    ring = unpack_records(data) if records else []
    ring = [replace(record, fields=_legible(record.fields)) for record in ring]
    return WorkerState(
        unpack_beat(data),
        _legible(snapshot),
        frozen=_read_stacks(path.with_suffix(".stacks")),
        records=tuple(ring),
        file=str(path),
    )


def _read_stacks(path: Path) -> Mapping[int, Stack]:
    try:
        text = _read_file(path, _MAX_STACKS_BYTES).decode(errors="replace")
    except (OSError, LayoutError):
        return {}
    return {} if not text else read_stacks("\n".join(map(_legible, text.splitlines())))


def read_job(folder: JobFolder, *, records: bool = False) -> JobState:
    """The state of all workers of a job that have run on this host. Takes a moment, to see who computes."""
    workers: list[WorkerState] = []
    skipped: list[tuple[str, str]] = []
    for path in folder.state_files():
        try:
            workers.append(read_worker(path, records=records))
        except LayoutError as error:
            skipped.append((_legible(path.name), str(error)))
        except OSError as error:
            skipped.append((_legible(path.name), error.strerror or str(error)))
    return JobState(folder.id, tuple(_newest(settled(workers))), tuple(skipped))


def _newest(workers: Sequence[WorkerState]) -> list[WorkerState]:
    """Of workers with the same name, or process, the newest."""
    newest: dict[object, WorkerState] = {}
    for each in sorted(workers, key=lambda each: each.beat.wall if each.beat else 0.0):
        newest[each.name] = each
    return sorted(newest.values(), key=lambda each: (each.rank if each.rank >= 0 else 1 << 30, each.name))


# ---- what the kernel says


def settled(workers: Sequence[WorkerState]) -> list[WorkerState]:
    """The workers with what the kernel says of their processes, and with stacks of those that are frozen."""
    here = socket.gethostname()
    before = {each.file: _signs(each, here) for each in workers}
    asked = [each for each, signs in ((each, before[each.file]) for each in workers) if _ask(each, signs)]
    if any(before.values()):
        time.sleep(_SAMPLE_SECONDS)
    until = time.monotonic() + _DUMP_SECONDS
    found = []
    for each in workers:
        stacks = each.frozen
        while each in asked and not stacks and time.monotonic() < until:
            stacks = _read_stacks(Path(each.file).with_suffix(".stacks"))
            time.sleep(0.01)
        found.append(_with_process(each, before[each.file], here, stacks))
    return found


def _signs(worker: WorkerState, here: str) -> ProcessSigns | None:
    """What can be seen of a worker's process; None if it is not here, or has ended."""
    if worker.host != here or not worker.pid:
        return None
    signs = process_signs(worker.pid)
    return signs if signs is not None and signs.start == worker.fact("start", 0) else None


def _ask(worker: WorkerState, signs: ProcessSigns | None) -> bool:
    """Ask a process that has not looked for a while for its stacks; returns whether it was asked."""
    silent = 0.0 if worker.beat is None else time.monotonic() - worker.beat.monotonic
    number = worker.fact("signal", 0)
    if signs is None or signs.stopped or silent < FROZEN_SECONDS or worker.frozen or worker.phase == "left":
        return False
    return isinstance(number, int) and ask_for_stacks(worker.pid, number)


def ask_for_stacks(process: int, number: int) -> bool:
    """Send the signal that has stacks written, if the process catches that one: others would end it."""
    caught = int(_status(process).get("SigCgt", "0"), 16)
    if not 0 < number <= signal.SIGRTMAX or not caught >> (number - 1) & 1:
        return False
    with contextlib.suppress(OSError):
        os.kill(process, number)
        return True
    return False


def _status(process: int) -> dict[str, str]:
    """The fields of ``/proc/PID/status``."""
    try:
        text = Path(f"/proc/{process}/status").read_text(errors="replace")
    except OSError:
        return {}
    return {name: value.strip() for name, _, value in (line.partition(":") for line in text.splitlines())}


def _with_process(
    worker: WorkerState, before: ProcessSigns | None, here: str, stacks: Mapping[int, Stack]
) -> WorkerState:
    beat = worker.beat
    if worker.host != here:
        age = time.time() - beat.wall if beat is not None else 0.0
        now = 0.0 if beat is None else beat.monotonic + max(0.0, age)
        return replace(worker, now=now)
    if before is None:
        return replace(worker, process=Process(alive=False), now=beat.monotonic if beat else 0.0)
    signs = process_signs(worker.pid)
    status = _status(worker.pid)
    if signs is None or signs.start != before.start:
        return replace(worker, process=Process(alive=False), now=beat.monotonic if beat else 0.0)
    ticks = signs.ticks - before.ticks
    memory = status.get("VmRSS", "0 kB").split()[0]
    process = Process(
        alive=True,
        stopped=signs.stopped,
        traced=int(status.get("TracerPid", "0") or 0),
        computes=computes(before, signs) and ticks > 0,
        memory=int(memory) * 1024 if memory.isdecimal() else 0,
        share=ticks / _TICKS / _SAMPLE_SECONDS,
    )
    return replace(worker, process=process, now=time.monotonic(), frozen=stacks)
