"""The processes of workers on this machine: their start, what they report, and their end.

``spawn``, ``local_group`` and SPMD mode start their workers here; ``farcall launch``, whose workers are whole
programs, has ``farcall/launch/processes.py``. A process reports through a pipe: that it is about to join the
group, and at its end the value or the error of its main function. It ends when the process that started it
ends, however that happens.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import gc
import multiprocessing
import os
import pickle
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from multiprocessing.process import BaseProcess
from typing import Any, Final, Self

import cloudpickle
import torch

import farcall_guard
from rpc.errors import RpcError, WorkerLostError
from rpc.lifecycle import outcomes
from rpc.lifecycle.logs import show_log
from rpc.lifecycle.startup import init_rpc
from rpc.options import AgentOptions
from rpc.runtime.cpu_quota import usable_cores
from rpc.runtime.current import current_agent, is_initialized
from rpc.runtime.descendants import descendants, kill, mark, marked
from rpc.runtime.interrupts import interrupts_blocked
from rpc.runtime.notices import Notices, tell_of_start
from rpc.runtime.tracebacks import fold_uncaught

__all__ = ["WorkerProcesses", "run_worker"]

_GRACE_SECONDS: Final = 1.0
"""Time in seconds after a failure in which the other processes may notice it themselves and end."""

_RUN: Final = f"{__name__}.run_worker"

_BY_VALUE: Final = "by value"
"""Sent by a worker whose process lacks a function or class of its work: it asks for copies."""


# ---- in the parent


@dataclass(slots=True)
class _Worker:
    """One process.

    Attributes:
        end: a descriptor that is readable once the process has ended.
        mark: path that marks the processes that it starts.
        outcome: what it reported at its end: a value, or an error and its traceback.
        lost: whether it has ended without a report.
    """

    name: str
    process: SpawnProcess
    pipe: Connection
    end: int
    mark: str
    started: bool = False
    outcome: outcomes.Outcome | None = None
    lost: bool = False

    @property
    def died(self) -> bool:
        """Whether it has ended without ending its children."""
        return self.outcome is None or (self.process.exitcode or 0) < 0

    @property
    def failed(self) -> bool:
        return self.lost or (self.outcome is not None and len(self.outcome) > 1)

    def listen(self, by_value: Callable[[], bytes]) -> None:
        """Read its reports; ``by_value`` makes the pickle of its work that it may ask for."""
        ended = self.process.exitcode is not None  # before its reports are read: it has made them all then
        while (said := self._next_report()) != ():
            if said == _BY_VALUE:
                work = by_value()
                with contextlib.suppress(OSError):
                    self.pipe.send_bytes(work)
            elif said is None:
                self.started = True
            else:
                self.outcome = said
        self.lost = ended and self.outcome is None

    def _next_report(self) -> Any:
        """Return a report; () if there is none."""
        with contextlib.suppress(EOFError, OSError):
            if self.pipe.poll():
                return cloudpickle.loads(self.pipe.recv_bytes())
        return ()


class WorkerProcesses:
    """The processes of some workers; leaving the context ends those that are still running. For one thread.

    Args:
        names: names of the workers, by rank.
        world_size: number of workers of the group; this process may be one, with the last rank. None: the
            group is dynamic.
        options: options of the agents; ``init_method`` is set. Default: as for ``init_rpc``.
        threads: number of threads with which each computes. Default: its share of the usable cores.
        serves: whether each only serves this process: it does not import this process's script, prints its
            errors itself, and ignores SIGINT and SIGTERM, since this process ends it.
    """

    def __init__(
        self,
        names: Sequence[str],
        world_size: int | None,
        options: AgentOptions | None = None,
        *,
        threads: int = 0,
        serves: bool = False,
    ) -> None:
        if getattr(multiprocessing.current_process(), "_inheriting", False):
            raise SystemExit(
                "this script is being imported by a worker that it has started itself: put the code that "
                'starts workers under `if __name__ == "__main__":`'
            )
        self._names = names
        self._world_size = world_size
        self._options = options
        self._threads = threads or max(1, usable_cores() // (world_size or len(names)))
        self._serves = serves
        self._process = os.getpid()
        self._workers: list[_Worker] = []
        self._by_value: Callable[[], bytes] = bytes
        self._work = b""
        self._folder = tempfile.TemporaryDirectory(prefix="farcall-")

    def __enter__(self) -> Self:
        fold_uncaught()
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def end(self, patience: float = 0.0) -> None:
        """End those that do not end by themselves within ``patience`` seconds, and what they have started."""
        if os.getpid() == self._process:  # not in a forked child
            with _uninterrupted():
                self._join(patience)
                self._end()

    def _end(self) -> None:
        running = [worker.process.pid for worker in self._workers if worker.process.exitcode is None]
        theirs = descendants([pid for pid in running if pid is not None])
        try:
            for end in (SpawnProcess.terminate, SpawnProcess.kill):
                for worker in self._workers:
                    end(worker.process)
                self._join(_GRACE_SECONDS)
            kill(theirs)
            kill(marked([worker.mark for worker in self._workers if worker.died]))
        finally:
            for worker in self._workers:
                worker.pipe.close()
                os.close(worker.end)
            self._folder.cleanup()

    def options(self) -> AgentOptions:
        """Return the options for an agent of this group."""
        given = AgentOptions() if self._options is None else copy.copy(self._options)
        given.dynamic = self._world_size is None
        given.init_method = f"file://{self._folder.name}/rendezvous"
        return given

    def start(self, main: Callable[..., Any], args: tuple[Any, ...]) -> None:
        """Start all processes, without waiting."""
        if not is_initialized():  # or this process has a log already, under its name
            show_log("main process")
        work = main, args
        self._by_value = functools.cache(lambda: bytes(cloudpickle.dumps(work)))
        self._work = _by_name(work) or self._by_value()
        for rank, name in enumerate(self._names):
            self._workers.append(self._start(rank, name))

    def replace(self, rank: int, name: str) -> None:
        """End a process, if it has not ended yet, and start another worker in its place, in a dynamic group;
        waits until it is about to join.
        """
        old = self._workers[rank]
        with _uninterrupted():
            self._workers[rank] = self._start(rank, name)
            old.process.kill()
            old.process.join()
            kill(marked([old.mark]))
            old.pipe.close()
            os.close(old.end)
        self.started()

    def _start(self, rank: int, name: str) -> _Worker:
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        mark = f"{os.path.realpath(self._folder.name)}/{name}.started"
        options, size, serves = self.options(), self._world_size, self._serves
        start = _Start(
            name, -1 if size is None else rank, size, options, self._threads, self._work, mark, serves
        )
        run: Callable[..., None] = partial(farcall_guard.run, _RUN) if serves else run_worker
        given = pickle.dumps(start), theirs
        process = context.Process(target=run, args=given, name=name, daemon=True)
        try:
            with _interrupts_later(), _with_script(not serves):
                process.start()
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
        return _Worker(name, process, ours, _end_of(process), mark)

    def started(self) -> None:
        """Wait until all are about to join; the log names those that take long."""
        notices = Notices()
        self._wait(lambda worker: worker.started or worker.outcome is not None, notices)

    def results(self) -> list[Any]:
        """Wait until all have ended; returns their values, or raises the error of one."""
        self.started()
        self._wait(lambda worker: worker.outcome is not None)
        self._join(_GRACE_SECONDS)
        return [worker.outcome[0] for worker in self._workers if worker.outcome is not None]

    def _wait(self, done: Callable[[_Worker], bool], notices: Notices | None = None) -> None:
        while waiting := [worker for worker in self._workers if not done(worker)]:
            left = None if notices is None else max(0.0, notices.next - time.monotonic())
            wait([each for worker in waiting for each in (worker.pipe, worker.end)], left)
            self._listen()
            if any(worker.failed for worker in self._workers):
                self._settle()
                raise self._failure()
            if notices is not None and notices.due():
                tell_of_start([worker.name for worker in waiting if not done(worker)], notices.waited)

    def _listen(self) -> None:
        for worker in self._workers:
            worker.listen(self._by_value)

    def _settle(self) -> None:
        """Give the others a moment to end as well, since the first to report may not be the cause."""
        until = time.monotonic() + _GRACE_SECONDS
        while (left := until - time.monotonic()) > 0:
            running = [worker for worker in self._workers if worker.process.exitcode is None]
            if not running:
                break
            wait([worker.end for worker in running], left)
        self._listen()

    def _failure(self) -> BaseException:
        """Return the error to raise: a death by a signal, else an error that is not about another worker's
        end.
        """
        failed = sorted((worker for worker in self._workers if worker.failed), key=_consequence)
        worker, pid = failed[0], failed[0].process.pid
        if worker.outcome is None:
            code = worker.process.exitcode or 0
            how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with status {code}"
            hint = "" if worker.started else " while it started: see its output above"
            return RpcError(f"{worker.name} (process {pid}) {how}{hint}")
        return outcomes.failure(f"{worker.name} (process {pid})", worker.outcome)

    def _join(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        for worker in self._workers:
            if wait([worker.end], max(0.0, until - time.monotonic())):
                worker.process.is_alive()  # takes its exit status


def _end_of(process: BaseProcess) -> int:
    """Return a new descriptor that is readable once a process has ended. It is no sentinel of
    ``multiprocessing``, a pipe that the process's own children keep open, except on a kernel before 5.3.
    """
    try:
        return os.pidfd_open(process.pid or 0)
    except OSError:
        return os.dup(process.sentinel)


def _consequence(worker: _Worker) -> int:
    """How likely a failure is only the consequence of another."""
    if worker.outcome is None:
        return 0 if (worker.process.exitcode or 0) < 0 else 1
    return 2 if isinstance(worker.outcome[0], WorkerLostError) else 1


def _by_name(work: tuple[Callable[..., Any], Any]) -> bytes | None:
    """Return a pickle by which workers use their own functions and classes. None if that is impossible, and
    in a notebook. A worker that lacks one asks for copies: it does not import the ``__main__`` of a package
    or zipapp, and lacks what a script defines only ``if __name__ == "__main__":``.
    """
    if getattr(sys.modules["__main__"], "__file__", None) and not hasattr(sys, "ps1"):
        with contextlib.suppress(pickle.PicklingError, AttributeError, TypeError):
            return pickle.dumps(work)
    return None


@contextlib.contextmanager
def _with_script(wanted: bool) -> Iterator[None]:
    """Have ``multiprocessing`` make new processes run this process's script, if that is ``wanted`` and the
    script is a file, and not standard input, for example.
    """
    variables = vars(sys.modules["__main__"])
    path = variables.get("__file__")
    hidden = {} if wanted else {"__spec__": variables.get("__spec__")}
    if isinstance(path, str) and not (wanted and os.path.exists(path)):
        hidden["__file__"] = path
    variables.update(dict.fromkeys(hidden))
    try:
        yield
    finally:
        variables.update(hidden)


@contextlib.contextmanager
def _uninterrupted() -> Iterator[None]:
    """Ignore further ``KeyboardInterrupt`` during the clean-up, which is short."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


@contextlib.contextmanager
def _interrupts_later() -> Iterator[None]:
    """Postpone ``KeyboardInterrupt`` to the end of the block; a process started inside decides for itself."""
    resource_tracker.ensure_running()  # otherwise the first process starts it, which unblocks signals
    with interrupts_blocked():
        yield


# ---- in a worker


@dataclass(frozen=True, slots=True)
class _Start:
    """What a worker is given; for the names see ``WorkerProcesses``.

    Attributes:
        work: pickle of the main function and its arguments.
        mark: path of the file that marks what it starts.
    """

    name: str
    rank: int
    world_size: int | None
    options: AgentOptions
    threads: int
    work: bytes
    mark: str
    serves: bool


def run_worker(packed: bytes, pipe: Connection) -> None:
    """Run a worker, in its new process."""
    start: _Start = pickle.loads(packed)
    # To this process's parent it is a daemon, which ends with it; but it may have children, as a DataLoader's
    # workers.
    multiprocessing.current_process().daemon = False
    mark(start.mark)
    gc.enable()
    gc.freeze()  # collections need not visit what PyTorch has made at its import
    parent = os.getppid()
    watch = threading.Thread(target=_end_with_parent, args=(start.mark,), name="farcall-parent", daemon=True)
    watch.start()
    if start.serves:
        for each in (signal.SIGINT, signal.SIGTERM):
            signal.signal(each, signal.SIG_IGN)
    torch.set_num_threads(start.threads)
    status = 0
    try:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})  # before, the traceback would be internal
        main, args = _loaded(start.work, pipe)
        _say(pipe, None)
        init_rpc(start.name, None, start.rank, start.world_size, start.options)
        value = main(*args)
        if is_initialized():
            current_agent().shutdown()
        _say(pipe, outcomes.returned(value))
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # another one must not disturb the clean-up
        status = 130
    except SystemExit as end:
        status = 1 if end.code else 0
        _say(pipe, (end, "") if end.code else (None,))
    except BaseException as error:
        if start.serves:
            raise
        _say(pipe, outcomes.failed(error))
        status = 1
    if status and is_initialized():
        current_agent().shutdown(graceful=False)  # the others notice at once
    pipe.close()
    if os.getppid() != parent:
        watch.join()  # it removes what the parent has left, and ends this process
    sys.exit(status)


def _loaded(work: bytes, pipe: Connection) -> Any:
    try:
        return pickle.loads(work)
    except AttributeError:
        pipe.send_bytes(cloudpickle.dumps(_BY_VALUE))
        return pickle.loads(pipe.recv_bytes())


def _say(pipe: Connection, what: outcomes.Outcome | None) -> None:
    said = cloudpickle.dumps(None) if what is None else outcomes.pack(what)
    with contextlib.suppress(ConnectionError):
        pipe.send_bytes(said)


def _end_with_parent(mark_path: str) -> None:
    """End this worker and its children when the process that started it has ended, and remove its folder."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        end = _end_of(parent)
        if os.getppid() == parent.pid:  # or it has ended, and the descriptor may be another process's
            wait([end])
        kill(descendants([os.getpid()]))
        kill(marked([mark_path]))
        shutil.rmtree(os.path.dirname(mark_path), ignore_errors=True)
        os._exit(1)
