"""Traces: ``rpc.trace`` in a program, ``farcall trace`` for a running job, ``FARCALL_TRACE`` for a whole run.

A program's trace is gathered through calls, from all workers, on whatever hosts they are. ``farcall trace``
orders the workers of this host to leave their parts in a folder (``orders``), where the command merges them.
With ``FARCALL_TRACE`` each process leaves its part beside the file when it ends, and merges all parts there.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import threading
import uuid
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, Final

from farcall.observe.trace_merge import merge, read_part
from farcall.observe.trace_recorder import Recorder
from rpc.agent.agent import Agent
from rpc.runtime.current import current_agent

__all__ = ["VARIABLE", "begin_tracing", "end_tracing", "follow_orders", "merge_files", "trace", "write_trace"]

logger = logging.getLogger(__name__)

VARIABLE: Final = "FARCALL_TRACE"
"""Environment variable that names the file of a trace of the whole run."""

_SECONDS_TO_GATHER: Final = 60.0
"""Maximum time to wait for a worker to begin or end recording, in seconds."""

_MAX_SECONDS: Final = 3600.0

_lock: Final = threading.Lock()
_recorders: Final[dict[str, Recorder]] = {}
"""Recorders of traces that other workers have begun here, by the trace's identifier."""


@contextlib.contextmanager
def trace(path: str | os.PathLike[str]) -> Iterator[None]:
    """See ``rpc.trace``."""
    agent: Agent = current_agent()
    identity = uuid.uuid4().hex
    names = [info.name for info in agent.get_worker_infos()]
    begun = _on_all(agent, names, begin_tracing, identity)
    try:
        yield
    finally:
        ended = _on_all(agent, list(begun), end_tracing, identity)
        write_trace(Path(path), merge([read_part(each) for each in ended.values() if each]))


def _on_all(
    agent: Agent, names: Iterable[str], function: Callable[..., Any], identity: str
) -> dict[str, Any]:
    """Call a function on workers; returns the values of those that answered."""
    calls, found = {}, {}
    for name in names:
        try:
            calls[name] = agent.calls.caller.call(name, function, (identity,), {}, _SECONDS_TO_GATHER)
        except Exception as error:
            logger.warning("the trace lacks worker '%s': %s", name, error)
    for name, call in calls.items():
        try:
            call.wait()
            found[name] = call.result()
        except Exception as error:
            logger.warning("the trace lacks worker '%s': %s", name, error)
    return found


def begin_tracing(identity: str) -> None:
    """Called remotely: begin to record this worker."""
    with _lock:
        _recorders[identity] = Recorder([current_agent()])


def end_tracing(identity: str) -> bytes:
    """Called remotely: end that, and return the part of this worker."""
    with _lock:
        recorder = _recorders.pop(identity, None)
    return b"" if recorder is None else recorder.stop()


def write_trace(path: Path, made: dict[str, Any]) -> None:
    """Write a trace, whole or not at all."""
    written = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        written.write_text(json.dumps(made))
        written.replace(path)
    finally:
        written.unlink(missing_ok=True)


# ---- parts in files


def follow_orders(
    agents: Callable[[], list[Agent]], on: Callable[[str, Callable[..., object]], object]
) -> None:
    """Record when ``farcall trace`` orders it.

    Args:
        agents: returns those of this process.
        on: ``Orders.on``.
    """

    def order(given: dict[str, Any]) -> None:
        seconds, folder = given.get("seconds"), given.get("parts")
        if (
            not isinstance(seconds, int | float)
            or not 0 < seconds <= _MAX_SECONDS
            or not isinstance(folder, str)
        ):
            return
        recorder = Recorder(agents())
        timer = threading.Timer(seconds, lambda: _leave_part(Path(folder), recorder))
        timer.daemon = True
        timer.name = "farcall-trace"
        timer.start()

    on("trace", order)


def install(agent: Agent) -> None:
    """Have an agent take part in traces; record from now until it has ended, if ``FARCALL_TRACE`` says so."""
    agent.serializer.allow_function(begin_tracing)
    agent.serializer.allow_function(end_tracing)
    named = os.environ.get(VARIABLE)
    if named:
        recorder = Recorder([agent])
        agent.lifecycle.hooks.closed.append(partial(_leave_whole, Path(named).absolute(), recorder))


def _leave_whole(path: Path, recorder: Recorder) -> None:
    folder = path.with_name(f"{path.name}.parts")
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        _leave_part(folder, recorder)
        with open(folder / ".lock", "w", encoding="ascii") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            write_trace(path, merge_files(folder))
    except OSError as error:
        logger.warning("the trace %s lacks this worker: %s", path, error)
    except Exception:  # the agent ends all the same
        logger.exception("the trace %s could not be written", path)


def _leave_part(folder: Path, recorder: Recorder) -> None:
    packed = recorder.stop()
    path = folder / f"{uuid.uuid4().hex}.part"
    written = path.with_suffix(".new")
    try:
        descriptor = os.open(written, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with open(descriptor, "wb") as file:
            file.write(packed)
        written.rename(path)
    except OSError as error:
        logger.warning("the trace of this worker is lost: %s", error)


def merge_files(folder: Path) -> dict[str, Any]:
    """One trace of all parts in a folder; what is none is logged and skipped."""
    parts = []
    for path in sorted(folder.glob("*.part")):
        try:
            parts.append(read_part(path.read_bytes()))
        except (OSError, ValueError) as error:
            logger.warning("%s: %s", path, error)
    return merge(sorted(parts, key=lambda part: (part.worker, part.pid)))
