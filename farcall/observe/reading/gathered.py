"""The state of workers on other hosts, as files in the job's folder."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

import msgpack

from farcall.observe.format.frozen_stacks import Stack
from farcall.observe.format.layout import Beat, LayoutError
from farcall.observe.format.orders import give_order
from farcall.observe.reading.state import JobState, Process, WorkerState, items, number, whole

__all__ = ["GATHERED", "ORDER", "gather", "pack_states", "unpack_states"]

GATHERED: Final = ".gathered"
"""Suffix of the names of files with the state of another host."""

ORDER: Final = "gather"
"""Order to write them."""

_VERSION: Final = 1
_WAIT_SECONDS: Final = 4.0
"""Maximum time in seconds to wait for other hosts."""


def pack_states(job: JobState) -> bytes:
    """Pack the state of workers, for another host."""
    workers = [
        {
            "beat": None if each.beat is None else list(asdict(each.beat).values()),
            "snapshot": each.snapshot,
            "process": asdict(each.process),
            "now": each.now,
            "frozen": [
                [
                    ident,
                    [list(frame) for frame in stack.frames],
                    stack.name,
                    stack.holds_interpreter,
                    list(stack.native),
                ]
                for ident, stack in each.frozen.items()
            ],
        }
        for each in job
    ]
    return bytes(msgpack.packb([_VERSION, workers], unicode_errors="replace"))


def unpack_states(packed: bytes, age: float, file: str) -> list[WorkerState]:
    """Unpack the state of workers, ``age`` seconds later.

    Raises:
        LayoutError: it is malformed.
    """
    try:
        version, workers = msgpack.unpackb(packed, strict_map_key=False, unicode_errors="replace")
    except (ValueError, TypeError, msgpack.UnpackException, RecursionError) as error:
        raise LayoutError("it is not the state of another host") from error
    if version != _VERSION or not isinstance(workers, list):
        raise LayoutError(f"it has version {version!r:.20}, and this farcall reads version {_VERSION}")
    return [_worker(each, age, file) for each in workers if isinstance(each, Mapping)]


def _worker(found: Mapping[str, Any], age: float, file: str) -> WorkerState:
    snapshot = found.get("snapshot")
    told = found.get("process")
    told = told if isinstance(told, Mapping) else {}
    alive = told.get("alive")
    process = Process(
        alive=alive if isinstance(alive, bool) else None,
        stopped=told.get("stopped") is True,
        traced=whole(told.get("traced")),
        computes=told.get("computes") is True,
        memory=whole(told.get("memory")),
        share=number(told.get("share")),
    )
    now = number(found.get("now"))
    return WorkerState(
        Beat.of(found.get("beat")),
        snapshot if isinstance(snapshot, Mapping) else {},
        process,
        now + (age if process.alive else 0.0),
        dict(filter(None, map(_stack, items(found.get("frozen"))))),
        file=file,
    )


def _stack(value: object) -> tuple[int, Stack] | None:
    match value:
        case [int(ident), list(frames), str(name), bool(holds), list(native)]:
            places = [(f[0], f[1], f[2]) for f in frames if isinstance(f, list) and len(f) == 3]
            known = [each for each in places if list(map(type, each)) == [str, str, int]]
            functions = tuple(each for each in native if isinstance(each, str))
            return ident, Stack(ident, tuple(known), name, holds, functions)
    return None


def gather(folder: Path, job: JobState, *, count: bool = False) -> bool:
    """Put the state of the workers of other hosts into the folder, if there are any and a worker here can
    ask. Returns when it is there, or has not come in time: whether there is any.

    Args:
        count: whether the workers there must count, for metrics.
    """
    asker, hosts = None, set[str]()
    for worker in job:
        far = {
            str(peer.get("host")) for peer in worker.peers if peer.get("near") is False and "lost" not in peer
        }
        if far and worker.process.alive and not worker.process.stopped and not worker.is_frozen:
            asker, hosts = worker, far
            break
    if asker is None:
        return any(folder.glob(f"*{GATHERED}"))
    given = time.time()
    give_order(folder, ORDER, by=asker.pid, count=count)
    until = time.monotonic() + _WAIT_SECONDS
    while hosts and time.monotonic() < until:
        time.sleep(0.02)
        hosts = {host for host in hosts if _written(folder / f"{host}{GATHERED}") < given}
    return True


def _written(path: Path) -> float:
    try:
        return os.stat(path).st_mtime
    except OSError:
        return 0.0
