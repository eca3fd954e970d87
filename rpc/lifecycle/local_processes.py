"""Workers as processes of this machine, from inside a program: ``spawn``, and ``local_group`` for notebooks.

The processes are started as ``multiprocessing`` does with *spawn*: each is a new Python that imports the
program's script under another name, so the code that starts them must be under ``if __name__ ==
"__main__":``. Functions of a notebook are sent by value. The processes end with this one, however it ends.
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
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from multiprocessing.process import BaseProcess
from types import FrameType
from typing import Any, Final, NoReturn, Self

import cloudpickle
import torch

from rpc.errors import AlreadyInitializedError, RpcError, WorkerLostError
from rpc.group.workers import check_name
from rpc.lifecycle import outcomes
from rpc.lifecycle.logs import show_log
from rpc.lifecycle.startup import init_rpc
from rpc.options import AgentOptions
from rpc.runtime.cpu_quota import usable_cores
from rpc.runtime.current import current_agent, is_initialized
from rpc.runtime.descendants import descendants, kill, mark, marked
from rpc.runtime.notices import Notices, tell_of_start
from rpc.runtime.tracebacks import fold_uncaught

__all__ = ["LocalGroup", "local_group", "spawn", "worker_names"]

_GRACE_SECONDS: Final = 1.0
"""Time in seconds after a failure in which the other processes may notice it themselves and end."""

_BY_VALUE: Final = "by value"
"""Sent by a worker whose process lacks a function or class of its work: it asks for copies."""


def spawn(main: Callable[..., Any], *args: Any, workers: int | Sequence[str] = 2) -> list[Any]:
    """Run a function on new workers, one process each, on this machine, and wait until all have returned.

    Each process joins the group, calls ``main(*args)``, and leaves gracefully, so that a worker whose
    function has returned serves the others until all have returned. If one fails, the others are ended.

    Args:
        main: function that each worker runs; it can find out which one by ``rpc.get_worker_info()``.
        args: arguments of ``main``.
        workers: number of workers; they are called ``worker0``, ``worker1`` and so on. Or their names, by
            rank.

    Returns:
        The return values of ``main``, by rank.

    Raises:
        RpcError: a worker failed; the text names it and has its traceback. ``__cause__`` is its exception.
        SystemExit: raised by a worker's ``main``, if its status is not 0.

    Example::

        def main():
            if rpc.get_worker_info().id == 0:
                print(rpc.rpc_sync("worker1", torch.add, args=(torch.ones(2), 1)))

        if __name__ == "__main__":
            rpc.spawn(main, workers=2)
    """
    names = worker_names(workers)
    with _Processes(names, world_size=len(names)) as processes, _terminated_like_interrupted():
        processes.start(main, args)
        return processes.results()


@dataclass(frozen=True, slots=True)
class LocalGroup:
    """The group that ``local_group`` has started.

    Attributes:
        names: names of the workers that it started, by rank.
        me: name of this process as a worker; its rank comes after theirs.
    """

    names: tuple[str, ...]
    me: str

    def __len__(self) -> int:
        return len(self.names)

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)


@contextlib.contextmanager
def local_group(
    workers: int | Sequence[str] = 2, *, name: str = "main", options: AgentOptions | None = None
) -> Iterator[LocalGroup]:
    """Start workers on this machine that serve inside the block; this process joins them. For notebooks and
    tests.

    Args:
        workers: number of workers; they are called ``worker0``, ``worker1`` and so on. Or their names, by
            rank.
        name: name of this process as a worker; its rank comes after theirs.
        options: options of the agents; ``init_method`` is set. Default: as for ``init_rpc``.

    Raises:
        AlreadyInitializedError: this process is a worker already.
        RpcError: a worker did not start.

    Example::

        with rpc.local_group(4) as group:
            for each in group:
                print(rpc.rpc_sync(each, os.getpid))
    """
    if is_initialized():
        raise AlreadyInitializedError("this process is a worker already: call rpc.shutdown() first")
    names = worker_names(workers)
    with _Processes(names, world_size=len(names) + 1, options=options) as processes:
        processes.start(_serve, ())
        processes.started()
        given = processes.options()
        init_rpc(name, rank=len(names), world_size=len(names) + 1, rpc_backend_options=given)
        try:
            yield LocalGroup(names, name)
        except BaseException:
            if is_initialized():
                current_agent().shutdown(graceful=False)
            raise
        if is_initialized():
            current_agent().shutdown()
        processes.results()


def _serve() -> None:
    """The main function of a worker of a local group; the others call it until it may leave."""


def worker_names(workers: int | Sequence[str]) -> tuple[str, ...]:
    """Return the names by rank: those given, or ``worker0``, ``worker1`` and so on for a number."""
    if isinstance(workers, str | bool) or not isinstance(workers, int | Sequence):
        raise TypeError(f"workers is a number or a list of names, not {workers!r}")
    names = [f"worker{rank}" for rank in range(workers)] if isinstance(workers, int) else list(workers)
    if not names:
        raise ValueError(f"there must be at least one worker, not {workers}")
    for name in names:
        check_name(name)
        if names.count(name) > 1:
            raise ValueError(f"worker names must be unique: {name!r} occurs {names.count(name)} times")
    return tuple(names)


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


class _Processes:
    """The processes of some workers; leaving the context ends those that are still running."""

    def __init__(self, names: Sequence[str], world_size: int, options: AgentOptions | None = None) -> None:
        if getattr(multiprocessing.current_process(), "_inheriting", False):
            raise SystemExit(
                "this script is being imported by a worker that it has started itself: put the code that "
                'starts workers under `if __name__ == "__main__":`'
            )
        self._names = names
        self._world_size = world_size
        self._options = options
        self._workers: list[_Worker] = []
        self._by_value: Callable[[], bytes] = bytes
        self._folder = tempfile.TemporaryDirectory(prefix="farcall-")

    def __enter__(self) -> Self:
        fold_uncaught()
        return self

    def __exit__(self, *_: object) -> None:
        with _uninterrupted():
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
        given.init_method = f"file://{self._folder.name}/rendezvous"
        return given

    def start(self, main: Callable[..., Any], args: tuple[Any, ...]) -> None:
        """Start all processes, without waiting."""
        if not is_initialized():  # or this process has a log already, under its name
            show_log("main process")
        context = multiprocessing.get_context("spawn")
        work = main, args
        self._by_value = functools.cache(lambda: bytes(cloudpickle.dumps(work)))
        sent = _by_name(work) or self._by_value()
        threads = max(1, usable_cores() // self._world_size)
        for rank, name in enumerate(self._names):
            ours, theirs = context.Pipe()
            mark = f"{os.path.realpath(self._folder.name)}/{rank}.started"
            given = (name, rank, self._world_size, self.options(), threads, sent, theirs, mark)
            process = context.Process(target=_run_worker, args=given, name=name, daemon=True)
            try:
                with _interrupts_later(), _without_missing_script():
                    process.start()
            except BaseException:
                ours.close()
                raise
            finally:
                theirs.close()
            self._workers.append(_Worker(name, process, ours, _end_of(process), mark))

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
def _without_missing_script() -> Iterator[None]:
    """Keep ``multiprocessing`` from having the new process run a script that is no file, such as standard
    input.
    """
    variables = vars(sys.modules["__main__"])
    path = variables.get("__file__")
    if not isinstance(path, str) or os.path.exists(path):
        yield
        return
    del variables["__file__"]
    try:
        yield
    finally:
        variables["__file__"] = path


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
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextlib.contextmanager
def _terminated_like_interrupted() -> Iterator[None]:
    """End the workers on SIGTERM, as on ``KeyboardInterrupt``."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(_number: int, _frame: FrameType | None) -> NoReturn:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


# ---- in a worker


def _run_worker(
    name: str,
    rank: int,
    world_size: int,
    options: AgentOptions,
    threads: int,
    work: bytes,
    pipe: Connection,
    mark_path: str,
) -> None:
    """The main function of a worker's process."""
    # To this process's parent it is a daemon, which ends with it; but it may have children, as a DataLoader's
    # workers.
    multiprocessing.current_process().daemon = False
    mark(mark_path)
    gc.freeze()  # collections need not visit what PyTorch has made at its import
    threading.Thread(target=_end_with_parent, args=(mark_path,), name="farcall-parent", daemon=True).start()
    torch.set_num_threads(threads)
    status = 0
    try:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})  # before, the traceback would be internal
        main, args = _loaded(work, pipe)
        _say(pipe, None)
        init_rpc(name, rank=rank, world_size=world_size, rpc_backend_options=options)
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
        _say(pipe, outcomes.failed(error))
        status = 1
    if status and is_initialized():
        current_agent().shutdown(graceful=False)  # the others notice at once
    pipe.close()
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
