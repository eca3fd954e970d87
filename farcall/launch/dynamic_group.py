"""The workers of a dynamic group on this machine, each of which is restarted alone, or with its replica.

A dynamic group is for workers that continue when another dies. Machines do not wait for each other either: a
worker joins when it starts.

The launcher of the first machine serves the store where workers meet. So the store outlives any of them, and
a restarted worker finds the group there, under its old rank and name. ``WORLD_SIZE`` is not set, which tells
``init_rpc`` that the group is dynamic.
"""

from __future__ import annotations

import os
import queue
import signal
from collections.abc import Callable, Sequence
from typing import Any, Final

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from farcall.launch.failures import signal_name
from farcall.launch.job import Job
from farcall.launch.processes import WorkerProcess, WorkerProcesses
from farcall.launch.rounds import Kind, Order
from farcall.launch.signals import ASKING, ENDING
from farcall.launch.spares import Spares
from farcall.launch.terminal import name_ranks, ranks_run, say
from farcall.launch.watch import JobWatch
from farcall.observe.format.jobs import job_id
from rpc.rendezvous.init_method import open_store
from rpc.rendezvous.store import SharedStore, StoreWait, start
from rpc.runtime.preemption import REQUEUE_STATUS

__all__ = ["DynamicGroup"]

_LOOK_SECONDS: Final = 0.05


class DynamicGroup:
    """This machine's workers of a dynamic group. For the main thread.

    Args:
        job: number of workers, their meeting place, and the maximum number of restarts, in total.
        make: makes the worker of a rank.
        news: receives the numbers of signals.
        watch: observes what the workers wait for.
        spares: processes that take the place of workers that fail, or None.
    """

    def __init__(
        self,
        job: Job,
        make: Callable[[int, str], WorkerProcess],
        news: queue.SimpleQueue[Any],
        watch: JobWatch,
        spares: Spares | None = None,
    ) -> None:
        self._spares = spares
        self._watch = watch
        self.let_go = True
        self._job = job
        self._news = news
        first = (job.node_rank or 0) * job.workers
        self._ranks = range(first, first + job.workers)
        made = [make(rank, "") for rank in self._ranks]
        self._replicas = [made[each : each + job.replica] for each in range(0, job.workers, job.replica)]
        self._workers = WorkerProcesses(made, job.grace)
        self._used = 0
        self._end: Order | None = None

    def run(self) -> Order:
        """Run until all workers have ended; returns the last order. No process is left.

        Raises:
            RendezvousError: the store cannot be served at its address.
        """
        opened = start(lambda _: _serve(self._job), StoreWait(self._job.timeout))
        while not opened.done():
            self._take_in_news()
            if self._end is not None:
                self.let_go = False
                return self._end
        store, place = opened.result()
        self._watch.begin(job_id(place, self._job.name, "" if self._job.rdzv else os.getpid()))
        say(f"{ranks_run(self._ranks, 'of a dynamic group')} here; they meet at {place}")
        try:
            self._workers.start({rank: self._environment(place, rank, 0) for rank in self._ranks})
            while self._workers.running:
                self._take_in_news()
                self._watch.look()
                if self._spares is not None and self._end is None:
                    self._spares.keep()
                ended = self._workers.poll()
                for replica in self._replicas:
                    failed = [each for each in replica if each in ended and each.failure is not None]
                    if failed and self._end is None:
                        self._start_again(replica, failed, place)
        finally:
            self._workers.kill()
            if self._spares is not None:
                self._spares.close()
            del store  # it is served until here
        if self._end is not None and self._workers.want_requeue:
            return Order(Kind.END, failure=self._end.failure, status=REQUEUE_STATUS)
        return self._end or Order(Kind.END)

    def _take_in_news(self) -> None:
        try:
            number = self._news.get(timeout=_LOOK_SECONDS)
        except queue.Empty:
            return
        if number == ASKING:
            self._watch.sum_up()
        elif number not in ENDING:
            self._workers.send(number)
        elif self._end is None:
            say(f"ended by {signal_name(number)}{self._workers.ended_here(with_grace=True)}")
            self._end = Order(Kind.END, status=128 + number)
            self._workers.end(number)
        elif number == signal.SIGINT:
            self._workers.kill()

    def _start_again(
        self, replica: Sequence[WorkerProcess], failed: Sequence[WorkerProcess], place: str
    ) -> None:
        """Restart a replica in which workers have failed; if no restart is left, end all workers."""
        failure = failed[0].failure
        assert failure is not None
        if self._used == self._job.restarts or failure.wants_requeue:
            self._watch.failed([failure])
            self._end = Order(Kind.END, failure=failure, status=failure.exit_status)
            self._workers.end()
            return
        self._used += 1
        count = f"{self._used} of {self._job.restarts} restarts"
        others = [each for each in replica if each.runs]
        with_them = f" with {name_ranks([each.rank for each in others])} of its replica" if others else ""
        say(f"{failure.process} {failure.what}; it is started again{with_them} ({count})")
        for each in others:
            each.kill()
        for each in others:
            each.wait()
        take_spare = None if self._spares is None else self._spares.take
        for each in sorted([*failed, *others], key=lambda worker: worker.rank):
            each.start(self._environment(place, each.rank, each.starts), take_spare)

    def _environment(self, place: str, rank: int, restart: int) -> dict[str, str]:
        host, _, port = place.rpartition(":")
        size = self._job.replica
        names = ("FARCALL_REPLICA", "FARCALL_REPLICA_PLACE", "FARCALL_REPLICA_SIZE")
        replica = zip(names, map(str, (rank // size, rank % size, size)), strict=True)
        return {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank % self._job.workers),
            "LOCAL_WORLD_SIZE": str(self._job.workers),
            "GROUP_RANK": str(self._job.node_rank or 0),
            "MASTER_ADDR": host,
            "MASTER_PORT": port,
            "TORCHELASTIC_RESTART_COUNT": str(restart),
            "TORCHELASTIC_MAX_RESTARTS": str(self._job.restarts),
            "TORCHELASTIC_RUN_ID": self._job.name,
            **dict(replica if size > 1 else ()),
            **self._watch.environment,
        }


def _serve(job: Job) -> tuple[SharedStore | None, str]:
    """Serve the store where workers meet, if it is this machine's; returns it, and HOST:PORT."""
    if job.rdzv and job.node_rank:
        return None, job.rdzv
    store = open_store(f"tcp://{job.rdzv or '127.0.0.1:0'}", 0, None, timeout=job.timeout)
    assert isinstance(store.store, TCPStore)
    return store, job.rdzv or f"127.0.0.1:{store.store.port}"
