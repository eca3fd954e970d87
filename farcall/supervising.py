"""The workers of a dynamic group on this machine: each is watched, and started again alone.

torchrun's elastic agent treats its processes as a unit: when one fails or a machine comes, it ends and starts
all. A dynamic group is for workers that live on when another dies, so of torchrun only what runs a process is
used here, once for each worker (``start_processes``: its streams, its record of an error, signals). Machines
do not wait for each other either: a worker joins when it comes.

The launcher serves the store where workers meet, so it outlives any of them, and each that is started again
finds the group there, under its old rank and name. ``WORLD_SIZE`` is not set, by which ``init_rpc`` knows
that the group is dynamic.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.elastic.multiprocessing import (
    DefaultLogsSpecs,
    PContext,
    SignalException,
    Std,
    start_processes,
)

from farcall.job import Job
from farcall.reporting import Failure, name_ranks, say
from rpc.rendezvous.init_method import open_store
from rpc.rendezvous.store import SharedStore

__all__ = ["supervise"]

_LOOK_SECONDS: Final = 0.1
_END_SECONDS: Final = 5.0
_STORE_SECONDS: Final = 30.0


def supervise(job: Job, command: Sequence[str], folder: str) -> Failure | None:
    """Run this machine's workers of a dynamic group until all have ended.

    Args:
        job: how many, where they meet, and how often in all one may be started again.
        command: what each runs.
        folder: for what they print, and record.

    Returns:
        The failure after which none could be started again; the others have been ended. None if all
        succeeded.

    Raises:
        RendezvousError: the store cannot be served where it should.
        SignalException: a signal has ended this process; all have been ended.
    """
    store, place = _serve(job)
    first = (job.node_rank or 0) * job.workers
    ranks = range(first, first + job.workers)
    workers = [_Worker(rank, job, place, command, folder) for rank in ranks]
    say(f"{name_ranks(ranks)} of a dynamic group run here; they meet at {place}")
    try:
        with _ended(workers):
            for worker in workers:
                worker.start()
            return _watch(workers, job.restarts)
    finally:
        del store  # it is served until now


def _serve(job: Job) -> tuple[SharedStore | None, str]:
    """The store where they meet, if it is this machine's, and HOST:PORT."""
    if job.rdzv and job.node_rank:
        return None, job.rdzv
    store = open_store(f"tcp://{job.rdzv or '127.0.0.1:0'}", 0, None, timeout=_STORE_SECONDS)
    assert isinstance(store.store, TCPStore)
    return store, job.rdzv or f"127.0.0.1:{store.store.port}"


def _watch(workers: Sequence[_Worker], restarts: int) -> Failure | None:
    running, used = list(workers), 0
    while running:
        time.sleep(_LOOK_SECONDS)
        ended = [worker for worker in running if worker.has_ended()]
        failures = {worker: failure for worker in ended if (failure := worker.failure)}
        if used + len(failures) > restarts:
            return Failure.first(failures.values())
        for worker, failure in failures.items():
            used += 1
            say(
                f"rank {failure.rank} (process {failure.pid}) {failure.what}; it is started again "
                f"({used} of {restarts} restarts)"
            )
            worker.start()
        running = [worker for worker in running if worker not in ended or worker in failures]
    return None


class _Worker:
    """One worker: a process, and those before it that it replaces."""

    def __init__(self, rank: int, job: Job, place: str, command: Sequence[str], folder: str) -> None:
        host, _, port = place.rpartition(":")
        self._rank = rank
        self._environment = {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank % job.workers),
            "LOCAL_WORLD_SIZE": str(job.workers),
            "GROUP_RANK": str(job.node_rank or 0),
            "MASTER_ADDR": host,
            "MASTER_PORT": port,
            "TORCHELASTIC_MAX_RESTARTS": str(job.restarts),
            "TORCHELASTIC_RUN_ID": job.name,
        }
        self._command = tuple(command)
        self._logs = DefaultLogsSpecs(log_dir=str(Path(folder) / str(rank)), tee=Std.ALL)
        self._starts = 0
        self._context: PContext | None = None
        self.failure: Failure | None = None

    def start(self) -> None:
        """Start a process, the first or another one."""
        self.failure = None
        environment = self._environment | {"TORCHELASTIC_RESTART_COUNT": str(self._starts)}
        self._starts += 1
        self._context = start_processes(
            name=f"rank{self._rank}",
            entrypoint=self._command[0],
            args={0: self._command[1:]},
            envs={0: environment},
            logs_specs=self._logs,
            log_line_prefixes={0: f"[{self._rank}] "},
        )

    def has_ended(self) -> bool:
        """Whether its process has; if it has not succeeded, ``failure`` says how."""
        assert self._context is not None
        result = self._context.wait(0)
        if result is None:
            return False
        for ended in result.failures.values():
            self.failure = Failure.of(
                self._rank, ended.pid, ended.exitcode, ended.timestamp, ended.error_file
            )
        return True

    def tell(self, number: signal.Signals) -> None:
        """Send a signal to its process, and to those that this has started."""
        if self._context is not None and self._context.wait(0) is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._context.pids()[0], number)

    def end(self, number: signal.Signals, seconds: float) -> None:
        """See to it that its process ends, with force when the time is up."""
        if self._context is not None:
            self._context.close(number, max(1, round(seconds)))


@contextlib.contextmanager
def _ended(workers: Sequence[_Worker]) -> Iterator[None]:
    """At the end no process is left. All get one signal at once: the one that ends us, if one does."""
    number = signal.SIGTERM
    try:
        yield
    except SignalException as end:
        number = signal.Signals(end.sigval)
        raise
    finally:
        for each in (signal.SIGINT, signal.SIGTERM):
            signal.signal(each, signal.SIG_IGN)  # another one does not disturb this
        until = time.monotonic() + _END_SECONDS
        for worker in workers:
            worker.tell(number)
        for worker in workers:
            worker.end(number, until - time.monotonic())
