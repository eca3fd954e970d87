"""The fixture ``run_workers``: real worker processes, forked in milliseconds, that a test commands.

A worker runs a function of the test module, which gets a :class:`~tests.support.worker_context.Worker`::

    def add_on_next(worker: Worker) -> torch.Tensor:
        with worker.group():
            return rpc.rpc_sync(f"worker{(worker.rank + 1) % worker.world_size}", torch.add, args=(ONE, ONE))

    def test_every_worker_can_call_the_next(run_workers: RunWorkers) -> None:
        assert run_workers(add_on_next, 4) == [torch.tensor(2)] * 4

A test that interferes starts the workers, waits for events that they report, and acts on one of them::

    def test_call_to_a_killed_worker_fails(run_workers: RunWorkers) -> None:
        workers = run_workers.start([call_and_catch, serve], 2)
        workers[0].wait_for("calling")
        workers[1].kill()
        assert workers[0].result() == "WorkerLostError"

If a worker raises, the test fails with its traceback and the end of its output. What hangs is killed when
the time limit is over, and the stacks of all its threads are printed.
"""

from __future__ import annotations

import functools
import itertools
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing import Pipe
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, TypeAlias, overload

import cloudpickle
import pytest

from tests.support import backend, default_device, leftovers
from tests.support.fork_server import ForkServer
from tests.support.standing import Shared, Standing
from tests.support.worker_context import Worker, WorkerSpec, current_worker, worker_main
from tests.support.worker_process import Failure, WorkerProcess, WorkersFailed

__all__ = [
    "RunWorkers",
    "Worker",
    "WorkerProcess",
    "Workers",
    "WorkersFailed",
    "current_worker",
    "worker_main",
]

Task: TypeAlias = Callable[..., Any]
"""A function that runs in a worker: ``task(worker, *args, **kwargs)``."""

TIME_LIMIT = 60.0
"""Seconds that a run may take, unless the test says otherwise."""

_GRACE = 2.0  # seconds that the others have to end by themselves once a worker has failed
_LAST_SECONDS = 20.0  # in which workers must have ended after the test
PRELOADED = (
    "torch",
    "torch.distributed",
    "torch._dynamo",  # which the first optimizer imports
    "uvloop",
    "pytest",
    "cloudpickle",
    "rpc",
    "rref",
    "dist_autograd",
    "farcall",
    "farcall.compat",
    "farcall.observe.installation",
    "spmd",
    "spmd.engine.driver.start",
    *backend.PRELOADED,
    *default_device.PRELOADED,
)


class Workers:
    """The workers of one run, in the order of their start."""

    def __init__(self, server: ForkServer, folder: Path, init_method: str, time_limit: float) -> None:
        self._server = server
        self._folder = folder
        self._init_method = init_method
        self._time_limit = time_limit
        self._deadline = 0.0
        self._workers: list[WorkerProcess] = []
        self._failure_raised = False
        self.restart_clock()

    @overload
    def __getitem__(self, index: int) -> WorkerProcess: ...
    @overload
    def __getitem__(self, index: slice) -> list[WorkerProcess]: ...
    def __getitem__(self, index: int | slice) -> WorkerProcess | list[WorkerProcess]:
        return self._workers[index]

    def __iter__(self) -> Iterator[WorkerProcess]:
        return iter(self._workers)

    def __len__(self) -> int:
        return len(self._workers)

    def add(
        self,
        task: Task,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        *,
        name: str | None = None,
        rank: int | None = None,
        world_size: int | None = None,
    ) -> WorkerProcess:
        """Starts one more worker: a late joiner, or one that comes back under the name of a killed one, once
        that has ended: before, it has the name.

        Args:
            task: what it runs, as ``task(worker, *args, **kwargs)``.
            args: positional arguments after the worker.
            kwargs: keyword arguments.
            name: default ``worker<rank>``.
            rank: default the number of workers started so far.
            world_size: what the worker is told; default that number plus one.
        """
        rank = len(self) if rank is None else rank
        spec = WorkerSpec(
            name=name or f"worker{rank}",
            rank=rank,
            world_size=world_size or len(self) + 1,
            init_method=self._init_method,
            folder=self._folder,
        )
        for each in self:
            if each.name == spec.name and each.death_intended:
                each.result()
        mine, theirs = Pipe()
        with theirs, open(self._folder / f"{spec.name}.log", "ab") as log:
            modules = [*PRELOADED, _module_of(task)]
            pid = self._server.fork(theirs.fileno(), log.fileno(), modules)
        worker = WorkerProcess(self, spec, mine, pid)
        self._workers.append(worker)
        mine.send_bytes(cloudpickle.dumps((task, tuple(args), dict(kwargs or {}))))
        mine.send_bytes(cloudpickle.dumps(spec))
        return worker

    def restart_clock(self, time_limit: float | None = None) -> None:
        """The time limit counts from now; it may be another one."""
        self._time_limit = time_limit or self._time_limit
        self._deadline = time.monotonic() + self._time_limit

    def wait_for(self, event: str) -> list[Any]:
        """Waits until every worker has reported the event; their values, by rank."""
        __tracebackhide__ = True
        return [worker.wait_for(event) for worker in self]

    def tell(self, event: str, value: object = None) -> None:
        """Releases every worker from ``worker.wait_for(event)``."""
        for worker in self:
            worker.tell(event, value)

    def results(self) -> list[Any]:
        """Waits for the end of all; what each function returned, ``None`` for a killed worker's.

        Raises:
            WorkersFailed: a worker failed, or time is up.
        """
        __tracebackhide__ = True
        self.pump_until(lambda: all(worker.ended for worker in self), "every worker ends")
        return [worker.result() for worker in self]

    def pump_until(self, done: Callable[[], bool], what: str) -> None:
        """Takes in messages and ends of workers until ``done()``.

        Raises:
            WorkersFailed: one has failed (the others are given a moment to end, then aborted), or time is up.
        """
        __tracebackhide__ = True
        while True:
            self._collect(0)
            if failures := self._failures():
                raise self._abort(failures)
            if done():
                return
            patience = self._deadline - time.monotonic()
            if patience <= 0:
                reason = f"the time limit of {self._time_limit:g} s was over before {what}"
                raise self._abort([Failure("run_workers", reason)], grace=0)
            self._collect(patience)

    def server_news(self) -> None:
        """Takes in which workers have ended, without waiting."""
        self._collect(0)

    def close(self) -> list[Failure]:
        """Waits for workers to end, kills those that don't; failures not raised before."""
        if self._failure_raised:
            return []
        self._collect_for(_LAST_SECONDS, self._workers)
        failures = self._failures()
        return failures + self._kill_running()

    def _failures(self) -> list[Failure]:
        return [failure for worker in self if (failure := worker.failure())]

    def _kill_running(self) -> list[Failure]:
        running = [worker for worker in self if not worker.ended]
        for signals in ((signal.SIGABRT, signal.SIGCONT), (signal.SIGKILL,)):
            for worker in running:
                for number in signals:  # on SIGABRT faulthandler prints the stacks, then the process dies
                    worker.signal(number)
            self._collect_for(_GRACE, running)
        return [
            Failure(worker.name, "had not ended; stacks of its threads:", worker.output())
            for worker in running
        ]

    def _abort(self, failures: list[Failure], grace: float = _GRACE) -> WorkersFailed:
        self._failure_raised = True
        self._collect_for(grace, self._workers)
        known = {failure.worker for failure in failures}
        failures += [failure for failure in self._failures() if failure.worker not in known]
        failures += self._kill_running()
        error = WorkersFailed(failures)
        error.__cause__ = next((failure.error for failure in failures if failure.error), None)
        return error

    def _collect_for(self, seconds: float, workers: Sequence[WorkerProcess]) -> None:
        until = time.monotonic() + seconds
        while not all(worker.ended for worker in workers) and (patience := until - time.monotonic()) > 0:
            self._collect(patience)

    def _collect(self, patience: float) -> None:
        channels = [worker.channel for worker in self if not worker.channel.closed]
        if self._server.fileno() in wait([*channels, self._server.fileno()], patience):
            self._server.read_news()
        for worker in self:
            worker.read()
            status = self._server.exit_status(worker.pid)
            if status is not None and not worker.ended:
                worker.end(status)


class RunWorkers:
    """What the fixture ``run_workers`` gives to a test: call it, or :meth:`start` for more control."""

    def __init__(self, server: ForkServer, folder: Path, standing: Standing | None = None) -> None:
        self._server = server
        self._folder = folder
        self._standing = standing
        self._runs: list[Workers] = []
        self._numbers = itertools.count()

    def __call__(
        self,
        task: Task | Sequence[Task] | Shared,
        world_size: int | None = None,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        *,
        time_limit: float = TIME_LIMIT,
    ) -> list[Any]:
        """Runs ``task(worker, *args, **kwargs)`` in every worker and returns the results, by rank.

        Args:
            task: one function for all, a sequence with one for each rank, or one for workers that stay.
            world_size: how many workers; default the length of that sequence.
            args: positional arguments after the worker, the same for all.
            kwargs: keyword arguments.
            time_limit: seconds until what still runs is killed.

        Raises:
            WorkersFailed: a worker raised, crashed or hung.
        """
        __tracebackhide__ = True
        if isinstance(task, Shared):
            assert self._standing is not None, "only the fixture has workers that stay"
            return self._standing.run(task, world_size or 1, args, kwargs, time_limit)
        return self.start(task, world_size, args, kwargs, time_limit=time_limit).results()

    def start(
        self,
        task: Task | Sequence[Task],
        world_size: int | None = None,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        *,
        time_limit: float = TIME_LIMIT,
    ) -> Workers:
        """Starts the workers and returns at once, for tests that wait on events and interfere."""
        tasks = [task] * (world_size or 1) if callable(task) else list(task)
        if world_size is not None and len(tasks) != world_size:
            raise ValueError(f"{len(tasks)} tasks for {world_size} workers")
        init_method = f"file://{self._folder / f'rendezvous{next(self._numbers)}'}"
        run = Workers(self._server, self._folder, init_method, time_limit)
        self._runs.append(run)
        for each in tasks:
            run.add(each, args, kwargs, world_size=len(tasks))
        run.restart_clock()  # the first run waits for the server's imports
        return run

    def close(self) -> None:
        """Ends every run. A worker or a process of its making that is still there is a failure."""
        runs, self._runs = self._runs, []
        failures = [failure for run in runs for failure in run.close()]
        strays = leftovers.processes()
        failures += [Failure("run_workers", f"a worker left a process behind: {stray}") for stray in strays]
        for stray in strays:
            stray.kill()
        if failures:
            raise WorkersFailed(failures)


def _module_of(task: Task) -> str:
    """What a worker imports for its task: the module of a partial one's function, unless it names another."""
    while isinstance(task, functools.partial) and "__module__" not in vars(task):
        task = task.func
    return getattr(task, "__module__", "builtins")


@pytest.fixture(scope="module")
def standing_workers(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Standing]:
    """Workers that stay for all tests of the module."""
    server = request.config.stash[fork_server_key]
    standing = Standing(lambda: RunWorkers(server, tmp_path_factory.mktemp("standing")))
    yield standing
    standing.close()


@pytest.fixture
def run_workers(
    request: pytest.FixtureRequest, tmp_path: Path, standing_workers: Standing
) -> Iterator[RunWorkers]:
    """Forks real workers for a test; see the head of this module."""
    runner = RunWorkers(request.config.stash[fork_server_key], tmp_path, standing_workers)
    yield runner
    runner.close()


fork_server_key = pytest.StashKey[ForkServer]()
