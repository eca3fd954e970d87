"""All processes of a job as one unit: when one fails, all end, and perhaps restart, on all machines."""

from __future__ import annotations

import queue
import signal
import time
from collections.abc import Callable
from typing import Any, Final

from farcall.launch.failures import Failure, signal_name
from farcall.launch.job import Job
from farcall.launch.link import Link, Lost, Plan
from farcall.launch.processes import WorkerProcess, WorkerProcesses
from farcall.launch.rounds import Kind, Order, Report, State
from farcall.launch.signals import ASKING, ENDING
from farcall.launch.terminal import ranks_run, say
from farcall.launch.watch import JobWatch
from rpc.runtime.notices import Notices
from rpc.runtime.preemption import REQUEUE_STATUS

__all__ = ["StaticGroup"]

_LOOK_SECONDS: Final = 0.05
_JOIN_SECONDS: Final = 1.0


class StaticGroup:
    """This machine's part of a job whose processes are one unit. For the main thread.

    Args:
        job: the job.
        make: makes the worker of a rank, on a machine with a name ("" if there is only one).
        news: receives the numbers of signals.
        watch: observes what the workers wait for.

    Attributes:
        let_go: whether no thread uses the store any more, once it has run.
    """

    def __init__(
        self,
        job: Job,
        make: Callable[[int, str], WorkerProcess],
        news: queue.SimpleQueue[Any],
        watch: JobWatch,
    ) -> None:
        self.let_go = False
        self._job = job
        self._make = make
        self._news = news
        self._link = Link(job, news)
        self._plan: Plan | None = None
        self._workers = WorkerProcesses([], job.grace)
        self._state, self._round = State.WAITING, 0
        self._is_to_stop = False
        self._unstarted: list[Failure] = []
        self._end: Order | None = None
        self._leaves = ""
        self._notices = Notices()
        self._watch = watch

    def run(self) -> Order:
        """Run until the job has ended; returns the last order. No process is left, and no other launcher
        waits for this one.
        """
        try:
            while self._end is None or self._workers.running:
                self._take_in_news()
                self._look_after_workers()
            if self._leaves and self._workers.want_requeue:
                return Order(Kind.END, status=REQUEUE_STATUS)
            return self._end
        except BaseException as error:
            self._leave(f"has failed: {type(error).__name__}: {error}", 1)
            raise
        finally:
            self._workers.kill()
            self._tell(State.LEFT)
            self._wait_for_other_launchers()

    # ---- news

    def _take_in_news(self) -> None:
        try:
            news = self._news.get(timeout=_LOOK_SECONDS)
        except queue.Empty:
            if not self._link.is_stuck:
                return
            news = Lost(f"the store at {self._job.rdzv}, where the launchers meet, does not answer any more")
        match news:
            case int():
                self._take_signal(news)
            case Plan():
                self._place(news)
            case Order() if self._end is None:
                self._follow(news)
            case Lost() if self._end is None:
                say(f"{news}{self._workers.ended_here()}")
                self._end = Order(Kind.END, status=1)
                self._workers.end()

    def _take_signal(self, number: int) -> None:
        if number == ASKING:
            self._watch.sum_up()
        elif number not in ENDING:
            self._workers.send(number)
        elif self._end is None:
            say(f"ended by {signal_name(number)}{self._workers.ended_here(with_grace=True)}")
            self._leave(f"was ended by {signal_name(number)}", 128 + number)
            self._workers.end(number)
        elif number == signal.SIGINT:
            self._workers.kill()

    def _leave(self, why: str, status: int) -> None:
        self._leaves, self._end = why, Order(Kind.END, status=status)
        self._tell(self._state)

    def _place(self, plan: Plan) -> None:
        self._plan = plan
        host, first = plan.me.host if plan.nodes > 1 else "", plan.me.first_rank
        workers = [self._make(rank, host) for rank in range(first, first + self._job.workers)]
        self._workers = WorkerProcesses(workers, self._job.grace)
        self._watch.begin(plan.job_id)

    def _follow(self, order: Order) -> None:
        failed = "" if order.failure is None else f"{order.failure.process} {order.failure.what}"
        match order.kind:
            case Kind.RUN:
                if failed:
                    count = f"{order.round} of {self._job.restarts} restarts"
                    say(f"{failed}; all are started again ({count})")
                self._start(order.round)
            case Kind.STOP:
                if self._state is State.DONE:
                    say(f"{failed}, after all ranks here had succeeded")
                elif self._state is State.RUNNING:
                    say(f"{failed}{self._workers.ended_here()}")
                self._is_to_stop = True
                self._workers.end()
            case Kind.END:
                if order.reason:
                    say(f"{order.reason}{self._workers.ended_here()}")
                self._end = order
                self._workers.end()

    # ---- workers

    def _start(self, number: int) -> None:
        assert self._plan is not None
        plan, me, job = self._plan, self._plan.me, self._job
        ranks = range(me.first_rank, me.first_rank + job.workers)
        again = f" (restart {number})" if number else ""
        say(f"{ranks_run(ranks, f'of {plan.world_size}')} here; they meet at {plan.place}{again}")
        self._round, self._is_to_stop, self._unstarted = number, False, []
        try:
            extra = self._watch.environment
            self._watch.restarted()
            self._workers.start({rank: _environment(job, plan, rank, number) | extra for rank in ranks})
            self._tell(State.RUNNING)
        except OSError as error:
            said = f"OSError: its process cannot be started: {error}"
            self._unstarted = [Failure(me.first_rank, 0, 1, time.time(), said)]
            self._fail()

    def _fail(self) -> None:
        self._workers.end()
        self._tell(State.FAILED)

    def _look_after_workers(self) -> None:
        self._workers.poll()
        if self._state is State.RUNNING:
            self._watch.failed(self._workers.failures)
            self._watch.look()
        if self._state is State.RUNNING and self._workers.failures:
            self._fail()
        elif self._state is State.RUNNING and not self._workers.running:
            self._tell(State.DONE)
            self._notices = Notices()
        elif self._is_to_stop and self._state is not State.STOPPED and not self._workers.running:
            self._tell(State.STOPPED)
        elif self._state is State.DONE and self._end is None and self._notices.due():
            say(f"all ranks here have succeeded; waiting for those elsewhere for {self._notices.waited}")

    def _tell(self, state: State) -> None:
        self._state = state
        failures = (*self._workers.failures, *self._unstarted)
        status = 0 if self._end is None else self._end.status
        self._link.report(Report(state, self._round, failures, self._leaves, status))

    def _wait_for_other_launchers(self) -> None:
        """Wait until the other launchers know that this one ends. The coordinator also waits for their end,
        while it serves the store.
        """
        notices, until = Notices(), time.monotonic() + _JOIN_SECONDS
        while not self._link.is_over and not self._link.is_stuck:
            if not self._link.is_placed and time.monotonic() > until:
                break
            if notices.due():
                say(f"waiting for the launchers of other machines to end for {notices.waited}")
            try:
                if self._news.get(timeout=_LOOK_SECONDS) == signal.SIGINT:
                    break
            except queue.Empty:
                continue
        self.let_go = self._link.close(_JOIN_SECONDS)


def _environment(job: Job, plan: Plan, rank: int, restart: int) -> dict[str, str]:
    """Return the environment variables of a worker, as under torchrun."""
    host, _, port = plan.place.rpartition(":")
    local = rank - plan.me.first_rank
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(local),
        "GROUP_RANK": str(plan.me.node_rank),
        "ROLE_RANK": str(rank),
        "ROLE_NAME": "default",
        "WORLD_SIZE": str(plan.world_size),
        "LOCAL_WORLD_SIZE": str(job.workers),
        "GROUP_WORLD_SIZE": str(plan.nodes),
        "ROLE_WORLD_SIZE": str(plan.world_size),
        "MASTER_ADDR": host,
        "MASTER_PORT": port,
        "TORCHELASTIC_RESTART_COUNT": str(restart),
        "TORCHELASTIC_MAX_RESTARTS": str(job.restarts),
        "TORCHELASTIC_RUN_ID": job.run_id,
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
