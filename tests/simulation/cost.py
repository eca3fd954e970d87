"""What membership, heartbeat and references cost each worker, in groups of 10, 100 and 1,000.

python -m tests.simulation.cost [--workers 10 100 1000]

Counts the messages that workers send, per worker and for the one that sends most, and the bytes of memory
that each phase leaves allocated per worker (Python's allocator, as ``tracemalloc`` sees it). Fails if
anything grows faster than the group does: for the whole group, that is faster than by the square.
"""

from __future__ import annotations

import argparse
import gc
import logging
import sys
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

import rpc
from rpc.functions import async_execution
from rpc.group.workers import Member
from rpc.options import AgentOptions
from rpc.runtime import current
from rref.reference import RRef
from tests.simulation.clock import Clock, WorkerLoop
from tests.simulation.network import SimulatedNetwork
from tests.simulation.worker import Worker

__all__ = ["Cost", "main", "measure", "too_steep"]

NEIGHBOURS: Final = 3
"""Number of other workers that each worker communicates with."""

_SAMPLE: Final = 10
"""Number of workers for measuring the memory of membership: a thousand would take minutes."""

_STEEPNESS: Final = 2.0
"""How much faster than the group anything may grow, which starts from a few bytes or messages."""


@dataclass(frozen=True)
class Cost:
    """Of one phase, in one group."""

    phase: str
    workers: int
    messages: float
    """Per worker."""
    most: int
    """By the one that sends most."""
    memory: float
    """Bytes per worker."""


def measure(workers: int) -> list[Cost]:
    """What the phases cost in a group of so many."""
    return list(_Group(workers).phases())


def too_steep(costs: Sequence[Cost]) -> list[str]:
    """What grows faster than the group, in words."""
    found: list[str] = []
    for before, after in (
        (a, b) for a in costs for b in costs if a.phase == b.phase and a.workers < b.workers
    ):
        limit = after.workers / before.workers * _STEEPNESS
        for what in ("messages", "most", "memory"):
            low, high = getattr(before, what), getattr(after, what)
            if high > limit * max(low, 10.0):
                found.append(
                    f"{after.phase}: {what} from {low:.0f} at {before.workers} workers to {high:.0f} at "
                    f"{after.workers}"
                )
    return found


class _Group:
    def __init__(self, count: int) -> None:
        self._clock = Clock(count)
        self._network = SimulatedNetwork(self._clock)
        self._options = AgentOptions(slow_call_seconds=0)
        self._by_loop: dict[WorkerLoop, Worker] = {}
        self._workers: list[Worker] = []
        self._held: dict[Worker, list[RRef[Any]]] = {}
        self._count = count
        self._clock.enter = self._enter

    def _enter(self, loop: WorkerLoop) -> None:
        current.agent = self._by_loop[loop].agent

    def phases(self) -> Iterator[Cost]:
        try:
            with self._clock.ruling():
                yield self._membership()
                yield self._phase("contact", lambda: self._all(self._greet))
                yield self._phase("idle for 60 s", lambda: self._clock.run(60))
                yield self._phase("heartbeat for 60 s", self._await_for_a_minute)
                yield self._phase("references made", lambda: self._all(self._refer))
                yield self._phase("references dropped", lambda: self._all(self._drop))
                self._all(self._refer)
                yield self._phase("a death", self._die)
                yield self._phase("a worker joins", self._join)
        finally:
            current.agent = None
            for worker in self._workers:
                worker.loop.dead = True

    # ---- phases

    def _membership(self) -> Cost:
        """Each worker learns of all."""
        for _ in range(self._count):
            self._add()
        roster = [worker.member for worker in self._workers]
        sample = self._workers[:_SAMPLE]
        with _traced() as memory:
            for worker in sample:
                worker.join([Member.from_wire(member.to_wire()) for member in roster], static=False)
        for worker in self._workers[_SAMPLE:]:
            worker.join(roster, static=False)
        return Cost("membership", self._count, 0.0, 0, memory() / len(sample))

    def _phase(self, name: str, run: Callable[[], object]) -> Cost:
        before = {worker: self._sent_by(worker) for worker in self._workers}
        with _traced() as memory:
            run()
        sent = [self._sent_by(worker) - count for worker, count in before.items()]
        return Cost(name, self._count, sum(sent) / len(sent), max(sent), memory() / len(sent))

    def _sent_by(self, worker: Worker) -> int:
        return sum(self._network.sent[worker.place].values())

    def _all(self, what: Callable[[int, Worker], object]) -> None:
        for index, worker in enumerate(self._workers):
            worker.loop.call_soon(what, index, worker)
        self._clock.run(2.0)

    def _neighbours(self, index: int) -> list[str]:
        return [self._workers[(index + step) % self._count].name for step in range(1, NEIGHBOURS + 1)]

    def _greet(self, index: int, worker: Worker) -> None:
        for name in self._neighbours(index):
            rpc.rpc_async(name, _nothing)

    def _await_for_a_minute(self) -> None:
        """Each worker waits for its neighbours, which have not answered yet."""

        def ask(index: int, worker: Worker) -> None:
            for name in self._neighbours(index):
                rpc.rpc_async(name, _answer_after_a_minute, timeout=0)

        self._all(ask)
        self._clock.run(63.0)

    def _refer(self, index: int, worker: Worker) -> None:
        """Each worker has an object made at each neighbour, and passes the reference on to the next."""
        names = self._neighbours(index)
        refs = self._held[worker] = [rpc.remote(name, dict) for name in names]
        for ref, name in zip(refs, names[1:] + names[:1], strict=True):
            rpc.rpc_async(name, _keep, args=(ref, self._workers.index(worker)))

    def _drop(self, index: int, worker: Worker) -> None:
        self._held.pop(worker, None)
        _kept.pop(index, None)

    def _die(self) -> None:
        dead = self._workers.pop()
        self._held.pop(dead, None)
        dead.end()
        self._network.kill(dead.place, host=False)
        self._clock.run(10.0)

    def _join(self) -> None:
        new = self._add()
        current.agent = new.agent
        new.join([worker.member for worker in self._workers], static=False)
        for other in self._workers[:-1]:
            rpc.rpc_async(other.name, _nothing)
        self._clock.run(10.0)

    def _add(self) -> Worker:
        number = len(self._by_loop)
        worker = Worker(self._network, number, 1_000_000 + number, self._options)
        self._by_loop[worker.loop] = worker
        self._workers.append(worker)
        return worker


_kept: Final[dict[int, list[Any]]] = {}


def _nothing() -> None:
    """Called to make a connection."""


@async_execution
def _answer_after_a_minute() -> rpc.Future[None]:
    answer = rpc.Future[None]()
    current.current_agent().mailbox.later(60.0, lambda: answer.set_result(None))
    return answer


def _keep(ref: RRef[Any], index: int) -> None:
    _kept.setdefault(index, []).append(ref)


@contextmanager
def _traced() -> Iterator[Callable[[], int]]:
    """Afterwards, tells how many bytes were allocated meanwhile and are still."""
    gc.collect()
    tracemalloc.start()
    left = 0
    try:
        yield lambda: left
    finally:
        gc.collect()
        left = tracemalloc.get_traced_memory()[0]
        tracemalloc.stop()


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(prog="python -m tests.simulation.cost")
    parser.add_argument("--workers", type=int, nargs="+", default=[10, 100, 1000])
    logging.getLogger("rpc").setLevel(logging.ERROR)  # that one dies is told by many
    costs: list[Cost] = []
    print(f"{'':20} {'workers':>8} {'messages each':>14} {'most':>8} {'bytes each':>12}")
    for workers in parser.parse_args(arguments).workers:
        for cost in measure(workers):
            costs.append(cost)
            print(
                f"{cost.phase:20} {workers:8} {cost.messages:14.1f} {cost.most:8} {cost.memory:12.0f}",
                flush=True,
            )
        _kept.clear()
    steep = too_steep(costs)
    print(
        "\n".join(steep)
        or "nothing grows faster than the group: all of it together, no faster than the square"
    )
    return len(steep)


if __name__ == "__main__":
    sys.exit(main() > 0)
