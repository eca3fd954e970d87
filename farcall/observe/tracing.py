"""Traces: ``rpc.trace`` in a program, ``farcall trace`` for a running job, ``FARCALL_TRACE`` for a whole run.

A program's trace is gathered through calls, from all workers, on all hosts. ``farcall trace`` orders the
workers of this host to write their parts to a folder (``orders``), where the command merges them. With
``FARCALL_TRACE`` each process writes its part beside the file when it ends, and merges all parts there.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

from farcall.observe.format.jobs import make_private
from farcall.observe.trace.merge import Trace, merge
from farcall.observe.trace.parts import Part, open_part, read_part
from farcall.observe.trace.recorder import Recorder
from rpc.agent.agent import Agent
from rpc.runtime.current import current_agent
from rpc.runtime.legible import legible

__all__ = [
    "BEGUN",
    "VARIABLE",
    "begin_tracing",
    "end_tracing",
    "follow_orders",
    "parts_in",
    "trace",
    "write_trace",
]

logger = logging.getLogger(__name__)

VARIABLE: Final = "FARCALL_TRACE"
"""Environment variable that names the file of a trace of the whole run."""

_SECONDS_TO_GATHER: Final = 60.0
"""Maximum time in seconds to wait for a worker to begin or end recording."""

MAX_SECONDS: Final = 3660.0
"""Maximum duration in seconds of a trace that ``farcall trace`` orders."""

BEGUN: Final = ".begun"
"""Suffix of the file with which a process reports that it records for ``farcall trace``."""

_lock: Final = threading.Lock()
_recorders: Final[dict[str, Recorder]] = {}
"""Recorders of traces that other workers have begun here, by the trace's identifier."""


@contextlib.contextmanager
def trace(path: str | os.PathLike[str]) -> Iterator[None]:
    """Trace all workers of the group for the duration of a ``with`` statement, into one file for Perfetto.

    The file has a track for each thread; spans for serializing, transfers, queueing, running, waiting,
    gradients, steps of optimizers, collectives and SPMD programs; and an arrow from each call to its run and
    back. Open it in https://ui.perfetto.dev. Clocks of hosts are aligned by the calls between them; the file
    gives the error under ``metadata``. If a worker cannot be traced, the log says so, and the file has the
    others.

    Args:
        path: the file; it is written at the end, by this worker.

    Raises:
        NotInitializedError: there is no agent.

    Example::

        with rpc.trace("run.json"):
            train_one_epoch()
    """
    agent: Agent = current_agent()
    identity = uuid.uuid4().hex
    names = [info.name for info in agent.get_worker_infos()]
    missing: dict[str, str] = {}
    begun = _on_all(agent, names, begin_tracing, identity, missing)
    try:
        yield
    except BaseException:
        with contextlib.suppress(OSError):  # the program's exception matters more
            _gather(agent, Path(path), list(begun), identity, missing)
        raise
    _gather(agent, Path(path), list(begun), identity, missing)


def _gather(agent: Agent, path: Path, names: list[str], identity: str, missing: dict[str, str]) -> None:
    """End recording on workers, and write what they have recorded."""
    parts = []
    names.sort(key=lambda name: name == agent.info.name)  # itself last: it records how the others end
    for name, packed in _on_all(agent, names, end_tracing, identity, missing).items():
        try:
            parts.append(read_part(packed))
        except ValueError as error:
            logger.warning("the trace lacks worker '%s': %s", name, legible(error))
            missing[name] = str(error)
    parts.sort(key=lambda part: (part.worker, part.pid))
    write_trace(path, merge(parts, [f"{name}: {why}" for name, why in missing.items()]))


def _on_all(
    agent: Agent,
    names: Iterable[str],
    function: Callable[..., Any],
    identity: str,
    missing: dict[str, str],
) -> dict[str, Any]:
    """Call a function on workers; returns the values of those that answered, and adds to ``missing`` why
    others did not.
    """
    calls, found = {}, {}
    for name in names:
        try:
            calls[name] = agent.calls.caller.call(name, function, (identity,), {}, _SECONDS_TO_GATHER)
        except Exception as error:
            logger.warning("the trace lacks worker '%s': %s", name, legible(error))
            missing[name] = str(error)
    for name, call in calls.items():
        try:
            call.wait()
            found[name] = call.result()
        except Exception as error:
            logger.warning("the trace lacks worker '%s': %s", name, legible(error))
            missing[name] = str(error)
    return found


def begin_tracing(identity: str) -> None:
    """Start to record this worker. Called remotely."""
    with _lock:
        _recorders[identity] = Recorder([current_agent()])


def end_tracing(identity: str) -> bytes:
    """End recording, and return the part of this worker. Called remotely."""
    with _lock:
        recorder = _recorders.pop(identity, None)
    return b"" if recorder is None else b"".join(recorder.stop())


def write_trace(path: Path, made: Trace) -> int:
    """Write a trace, whole or not at all; returns the number of its events."""
    written = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    count = 0
    try:
        with open(written, "x", encoding="ascii") as file:  # not a link that another user has put there
            about = json.dumps(made.metadata)
            file.write(f'{{"displayTimeUnit": "ns", "metadata": {about}, "traceEvents": [\n')
            for count, event in enumerate(made.events(), 1):
                file.write(f"{',' if count > 1 else ''}{json.dumps(event)}\n")
            file.write("]}\n")
        written.replace(path)
    finally:
        written.unlink(missing_ok=True)
    return count


# ---- parts in files


def follow_orders(
    agents: Callable[[], list[Agent]], on: Callable[[str, Callable[..., object]], object]
) -> None:
    """Record when ``farcall trace`` orders it.

    Args:
        agents: returns the agents of this process.
        on: ``Orders.on``.
    """

    def order(given: dict[str, Any]) -> None:
        until, folder = given.get("until"), given.get("parts")
        if not isinstance(until, int | float) or not isinstance(folder, str):
            return
        seconds = until - time.time()
        if not 0 < seconds <= MAX_SECONDS:
            return
        recorder = Recorder(agents())
        with contextlib.suppress(OSError):  # the command is gone, or its disk is full
            (Path(folder) / f"{os.getpid()}{BEGUN}").touch(mode=0o600)
        timer = threading.Timer(seconds, lambda: _leave_part(Path(folder), recorder))
        timer.daemon = True
        timer.name = "farcall-trace"
        timer.start()

    on("trace", order)


def install(agent: Agent) -> None:
    """Make an agent take part in traces; record from now until it has ended, if ``FARCALL_TRACE`` is set."""
    agent.serializer.allow_function(begin_tracing)
    agent.serializer.allow_function(end_tracing)
    named = os.environ.get(VARIABLE)
    if named:
        recorder = Recorder([agent])
        agent.lifecycle.hooks.closed.append(partial(_leave_whole, Path(named).absolute(), recorder))


def _leave_whole(path: Path, recorder: Recorder) -> None:
    folder = path.with_name(f"{path.name}.parts")
    try:
        make_private(folder)
        _leave_part(folder, recorder)
        flags = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        with open(os.open(folder / ".lock", flags, 0o600), "w", encoding="ascii") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            write_trace(path, merge(parts_in(folder)))
    except OSError as error:
        logger.warning("the trace %s lacks this worker: %s", path, error)
    except Exception:  # the agent ends in any case
        logger.exception("the trace %s could not be written", path)


def _leave_part(folder: Path, recorder: Recorder) -> None:
    pieces = recorder.stop()
    path = folder / f"{os.getpid()}.{uuid.uuid4().hex}.part"
    written = path.with_suffix(".new")
    try:
        descriptor = os.open(written, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with open(descriptor, "wb") as file:
            file.writelines(pieces)
        written.rename(path)
    except OSError as error:
        logger.warning("the trace of this worker is lost: %s", error)
        with contextlib.suppress(OSError):
            written.unlink(missing_ok=True)


def parts_in(folder: Path) -> Sequence[Part]:
    """Return all parts in a folder, which must stay; other files are logged and skipped."""
    parts = []
    for path in sorted(folder.glob("*.part")):
        try:
            parts.append(open_part(path))
        except (OSError, ValueError) as error:
            logger.warning("%s: %s", path, error)
    return sorted(parts, key=lambda part: (part.worker, part.pid))
