"""The thread of each process that looks at the process at intervals, and writes the result to the state file.

No call writes anything, since that would cost each of them too much. Calls that are in flight when the
process hangs, or is killed, were recorded by a look; the interval of the looks is the shortest hang that is
surely recorded. The file has the identity of the process before others can reach it: ``start`` and
``look_now`` return when that is written. If the file cannot be written, the process works without it.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from time import monotonic, process_time, time
from typing import Any, Final

from farcall.observe.format.frozen_stacks import FrozenStacks
from farcall.observe.format.jobs import jobs_folder, remove_old
from farcall.observe.format.layout import Beat
from farcall.observe.format.orders import Orders
from farcall.observe.reading.processes import start_of
from farcall.observe.worker.frames import copies_kept
from farcall.observe.worker.looks import LEAST_WAIT_SECONDS, Looker
from farcall.observe.worker.state_file import StateFile
from rpc.runtime import waits

__all__ = ["Observer"]

logger = logging.getLogger(__name__)

_LOOK_SECONDS: Final = 0.5
"""Time in seconds between two looks while anything is in flight, or moves."""

_IDLE_SECONDS: Final = 1.0
"""Time in seconds between two looks while nothing moves."""

_MAX_LOOK_SECONDS: Final = 1.5
"""Maximum time in seconds between two looks, however long a look takes."""

_MAX_SHARE: Final = 0.01
"""Maximum share of the time that looks take; with many threads, looks are less frequent."""

_LEAST_COMPUTED: Final = 0.02
"""Minimum share of a core, used since the last look, from which a process counts as computing."""

_MAX_TASKS: Final = 64
"""Maximum number of tasks that wait for the observing thread, the newest."""

_LOOK_NOW_SECONDS: Final = 1.0
"""Maximum time in seconds for which a thread waits for a look: its file system may be slow."""

_NOT_WRITTEN: Final = "the state file %s, which commands such as `farcall why` read, cannot be written: %s"

_MAX_SEEN: Final = 2000
"""Maximum number of calls and requests that are followed until they end."""

_KEEP_SECONDS: Final = 10.0
"""Time in seconds for which the state from before the end of a wait for other workers stays in the file. If
the wait has ended because one of them failed, the launcher reads that state once its process has ended.
"""


class Observer:
    """Observes this process. From any thread.

    Args:
        identity: name, rank, host and so on of this process; more is added by ``identify``.
        job: name of the job, if it is known.
    """

    def __init__(self, identity: dict[str, Any], job: str) -> None:
        self.identity = identity
        self.job = job
        self.orders = Orders()
        self._agents: list[Any] = []
        self._tasks: deque[Callable[[], object]] = deque(maxlen=_MAX_TASKS)
        self._lock = threading.Lock()
        self._wake = threading.Event()
        self._looks = threading.Condition()
        self._looks_begun = self._looks_written = 0
        self._stopping = self._closed = False
        self._changed = True
        self._file: StateFile | None = None
        self._stacks: FrozenStacks | None = None
        self._number = 0
        self._calls_before = self._requests_before = 0
        self._counted = (0, 0)
        self._looked_at = monotonic()
        self._used = 0.0
        self._moved_at = self._called_at = monotonic()
        self._awaited: set[tuple[Any, ...]] = set()
        self._kept_at = -math.inf
        self._looker = Looker()
        self._seen: set[tuple[str, int, int]] = set()
        self._thread = threading.Thread(target=self._run, name="farcall-observer", daemon=True)

    @property
    def agents(self) -> list[Any]:
        """The agents of this process."""
        return list(self._agents)

    @property
    def path(self) -> Path | None:
        """The state file; None if there is none."""
        return None if self._file is None else self._file.path

    def start(self) -> None:
        """Start to look; returns when the first look is in the file."""
        self._thread.start()
        self.look_now()

    def look_now(self, seconds: float = _LOOK_NOW_SECONDS) -> bool:
        """Make the observing thread look, and wait until that look is in the file.

        Args:
            seconds: maximum time to wait.

        Returns:
            Whether it is in the file: false if that took longer, or the file cannot be written.
        """
        with self._looks:
            self._changed = True
            self._wake.set()
            return self.next_look(seconds)

    def next_look(self, seconds: float) -> bool:
        """Wait until a look that begins from now on is in the file. Like ``look_now``, but the look is made
        when it is due.
        """
        with self._looks:
            before = self._looks_begun
            self._looks.wait_for(lambda: self._closed or self._looks_written > before, seconds)
            return self._looks_written > before

    def add(self, agent: Any) -> None:
        """Observe an agent, too."""
        with self._lock:
            self._agents.append(agent)
        self._changed = True

    def remove(self, agent: Any) -> bool:
        """Remove an agent that has ended; returns whether none is left."""
        with self._lock:
            if agent in self._agents:
                self._agents.remove(agent)
                calls, requests = _counts([agent])
                self._calls_before += calls
                self._requests_before += requests
            return not self._agents

    def identify(self, job: str | None = None, **facts: Any) -> None:
        """Add to the identity of this process. A ``job`` moves the file to the folder of that job."""
        with self._lock:
            self.identity = self.identity | facts
            if job is not None and job != self.job:
                self.job = job
                try:
                    self._move()
                except OSError as error:  # what was written stays where it is
                    logger.info(_NOT_WRITTEN, self.path, error)
        self._changed = True
        self._wake.set()

    def soon(self, task: Callable[[], object]) -> None:
        """Call a function on the observing thread."""
        self._tasks.append(task)
        self._wake.set()

    def stop(self, phase: str) -> None:
        """Write the last snapshot and end the thread."""
        self.identify(phase=phase)
        self._stopping = True
        self._wake.set()
        if self._thread is not threading.current_thread() and self._thread.is_alive():
            self._thread.join(2.0)

    def abandon(self) -> None:
        """Give up the file in a forked child: the thread is not there, and the file is the parent's."""
        self._stopping = True
        self._agents = []

    # ---- the thread

    def _run(self) -> None:
        with copies_kept():
            self._look_until_stopped()

    def _look_until_stopped(self) -> None:
        try:
            self._open()
            failed = has_removed = False
            while True:
                with self._looks:
                    self._looks_begun += 1
                is_last = self._stopping  # one that began before that may have missed the reason
                try:
                    interval = self._look()
                except OSError as error:  # a full disk, for example, may have room again later
                    logger.log(logging.DEBUG if failed else logging.INFO, _NOT_WRITTEN, self.path, error)
                    interval, failed, self._changed = _MAX_LOOK_SECONDS, True, True
                    if self._file is not None:
                        self._file.touch()
                else:
                    with self._looks:
                        self._looks_written = self._looks_begun
                        self._looks.notify_all()
                if is_last:
                    break
                is_hurried = self._wake.wait(interval)
                self._wake.clear()
                if not is_hurried and not has_removed and self.identity["phase"] == "running":
                    remove_old(jobs_folder(os.environ), self.job)
                    has_removed = True
        except OSError as error:
            logger.info("this process cannot be observed: its state file: %s", error)
        except Exception:  # the program goes on without it
            logger.exception("observing this process failed, and has ended")
        finally:
            self._close()

    def _open(self) -> None:
        job = self.job
        path = self._path(jobs_folder(os.environ), job)
        file, stacks = StateFile(path), FrozenStacks(path.with_suffix(".stacks"))
        facts = {
            "start": start_of(os.getpid()),
            "signal": stacks.signal,
            "observer": threading.get_native_id(),
        }
        with self._lock:  # not while files are made: that can take as long as a disk does
            self._file, self._stacks = file, stacks
            self.identity = self.identity | facts
            if job != self.job:
                self._move()
        self._looker.ignored.add(threading.get_ident())

    def _path(self, folder: Path, job: str) -> Path:
        host = "".join(each if each.isalnum() or each in "-." else "_" for each in str(self.identity["host"]))
        return folder / job / f"{host[:80]}.{os.getpid()}.{self.identity['number']}.state"

    def _close(self) -> None:
        if self._stacks is not None:
            self._stacks.close()
        with self._looks:
            self._closed = True
            self._looks.notify_all()

    def _look(self) -> float:
        """Look once; returns the seconds until the next look."""
        assert self._file is not None
        assert self._stacks is not None
        now = monotonic()
        agents = self.agents
        calls, requests = _counts(agents)
        busy = any(len(agent.calls.table) or len(agent.calls.requests) for agent in agents)
        waiting = [each for each in waits.current() if each.what != "shutdown"]
        busy = busy or bool(waiting)
        used = process_time()
        computes = used - self._used >= _LEAST_COMPUTED * (now - self._looked_at)
        self._used = used
        moved = self._looker.moved(now) or computes
        counted = (calls + self._calls_before, requests + self._requests_before)
        before, seconds = self._counted, max(1e-6, now - self._looked_at)
        rates = [max(0, new - old) / seconds for new, old in zip(counted, before, strict=True)]
        self._looked_at = now
        progress = counted != self._counted
        if progress:
            self._counted, self._moved_at, self._called_at = counted, now, now
        self.orders.look(self._file.path.parent)
        if busy or moved or self._changed or self._stopping:
            self._changed = False
            self._write(agents, now, progress=progress)
            self._stacks.clear()
        self._number += 1
        self._file.beat(Beat(self._number, now, time(), *counted, used, *rates))
        interval = _LOOK_SECONDS if busy or moved else _IDLE_SECONDS
        interval = min(max(interval, (monotonic() - now) / _MAX_SHARE), _MAX_LOOK_SECONDS)
        while self._tasks:  # these read what has just been written
            self._tasks.popleft()()
        return interval

    def _move(self) -> None:
        """Move the files to their current folder. With the lock."""
        if self._file is None or self._stacks is None:
            return
        path = self._path(self._file.path.parent.parent, self.job)
        self._file.move(path)
        before = self._stacks.path.parent
        self._stacks.move(path.with_suffix(".stacks"))
        with contextlib.suppress(OSError):
            before.rmdir()  # if nothing else is there

    def _write(self, agents: list[Any], now: float, *, progress: bool) -> None:
        """Write a snapshot."""
        assert self._file is not None
        snapshot: dict[str, Any] = {
            "worker": self.identity | {"job": self.job},
            "monotonic": now,
            "wall": time(),
            **self._looker.look(agents, now, progress=progress),
        }
        if self._follow(snapshot):
            self._moved_at = self._called_at = now
        at_work = [each for each in snapshot["threads"] if "idle" not in each]
        moved_at = max((now if "computes" in each else each["since"] for each in at_work), default=-math.inf)
        self._moved_at = max(self._moved_at, moved_at)
        if now - moved_at < LEAST_WAIT_SECONDS:
            self._changed = True  # otherwise the description of a thread on its way to a wait would stay
        snapshot["moved"], snapshot["called"] = self._moved_at, self._called_at
        for agent in agents:
            for name, part in list(agent.extensions.items()):
                observed = getattr(part, "observed", None)
                if observed is not None:
                    snapshot[name] = _part(observed)
        is_ending = self.identity["phase"] in ("leaving", "left")
        awaited = set(_awaited(snapshot["threads"], now))
        has_wait_ended = not self._awaited <= awaited
        keep = not has_wait_ended and (is_ending or now - self._kept_at < _KEEP_SECONDS)
        while not self._file.snapshot(snapshot, keep=keep):
            # Too large: stacks of idle threads are left out first.
            threads = snapshot["threads"]
            if not threads:
                raise OSError("a snapshot is too large")
            for each in threads:
                each.pop("stack", None)
            snapshot["threads"] = sorted(threads, key=lambda each: "idle" in each)[: len(threads) // 2]
        self._awaited = awaited
        if has_wait_ended:
            self._kept_at = now

    def _follow(self, snapshot: dict[str, Any]) -> bool:
        """Whether calls or requests have begun or ended since the last look."""
        before = self._seen
        self._seen = {
            (key, each["incarnation"], each["id"])
            for key in ("calls", "requests")
            for each in snapshot[key][:_MAX_SEEN]
        }
        return before != self._seen


def _part(observed: Callable[[], Any]) -> Any:
    """Return a part of a snapshot."""
    try:
        return observed()
    except Exception as error:  # the state that it reads changes while it is read
        return {"unknown": type(error).__name__}


def _awaited(threads: Iterable[dict[str, Any]], now: float) -> Iterator[tuple[Any, ...]]:
    """Yield the waits of threads for other workers: in operations of a group, and for long calls."""
    for thread in threads:
        for each in thread.get("waits", ()):
            yield thread["id"], each["what"], each["since"]
        if "call" in thread and now - thread["since"] >= LEAST_WAIT_SECONDS:
            yield thread["id"], *thread["call"]


def _counts(agents: list[Any]) -> tuple[int, int]:
    """Return the numbers of calls made and requests received by agents."""
    return sum(agent.calls.table.opened for agent in agents), sum(
        agent.calls.requests.begun for agent in agents
    )


def program_name() -> str:
    """Return the name of the program that this process runs, for people."""
    with contextlib.suppress(AttributeError, IndexError):
        return os.path.basename(sys.argv[0])
    return ""
