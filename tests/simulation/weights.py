"""Weight stores in simulated groups, in which any message of one worker may be its last.

The stores, their copies and the agents are real; time, threads and the network are not. A worker keeps the
store, two others put halves of three versions, and three read them, two of them on a host of their own.

python -m tests.simulation.weights --seeds 1000      # as many runs; the number of a failing one is printed
python -m tests.simulation.weights --seed 17 --trace # one, and all that happens in it
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import gc
import logging
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any, Final
from unittest import mock

import torch

from farcall.weights import (
    Block,
    Store,
    copies,
    figures,
    handle,
    keeper,
    memory,
    node,
    store,
    successors,
    transfer,
)
from farcall.weights.memory import Segment
from rpc.errors import RpcError, WorkerLostError
from rpc.options import AgentOptions
from rpc.runtime import current
from rpc.wire.frames import Frame
from tests.simulation.clock import Clock, WorkerLoop
from tests.simulation.clock import Handle as Step
from tests.simulation.network import SimulatedNetwork
from tests.simulation.threads import Threads
from tests.simulation.truth import Violation
from tests.simulation.worker import Worker

__all__ = ["Run", "main"]

_LOST_SECONDS: Final = 2.0
"""When a worker that is silent is lost."""

_KEEPALIVE_SECONDS: Final = 60.0
"""When the host of an idle worker is found to be gone."""

_LONGEST: Final = 400.0
"""Simulated seconds after which nothing may be waited for any more."""

_NUMBERS: Final = (1, 2, 3)
_LAST: Final = 9
_WIDTH: Final = 256
_MOST_MESSAGES: Final = 120
"""Maximum number of messages that the worker that dies has sent."""

KEEPER, WRITERS, READERS = 0, (1, 2), (3, 4, 5)


def state(number: int, rows: range = range(2)) -> dict[str, Block]:
    """A version, or some of its rows. Few of its elements differ from those of others."""
    values = torch.zeros(len(rows), _WIDTH)
    values[:, 0] = number
    return {
        "few": Block(values, (rows.start, 0), (2, _WIDTH)),
        "all": Block(torch.full((len(rows), 2), float(number)), (rows.start, 0), (2, 2)),
    }


class Network(SimulatedNetwork):
    """Its ``last`` message is the last one of a worker, which ``die`` is called for."""

    last: tuple[str, int] = "", 0
    die: Callable[[], object]

    def send(self, end: Any, frame: Frame | None) -> None:
        place, count = self.last
        if end.other.place == place:
            if count == 0:
                return  # it is dead
            super().send(end, frame)
            self.last = place, count - 1
            if count == 1:
                self.die()
            return
        super().send(end, frame)


class Lock:
    """A lock that a simulated thread waits for. Each worker has its own."""

    run: Run

    def __init__(self) -> None:
        self._held: set[WorkerLoop] = set()

    def __enter__(self) -> None:
        loop = self.run.loop
        while loop in self._held:  # another thread may have it by the time that this one goes on
            self.run.threads.wait(lambda: loop not in self._held)
        self._held.add(loop)

    def __exit__(self, *_: object) -> None:
        self._held.discard(self.run.loop)


class Run:
    """One run, which its seed decides; ``tell`` takes the lines of its trace."""

    def __init__(self, seed: int, tell: Callable[[str], object] | None = None) -> None:
        self.clock = Clock(seed)
        chance = self.clock.chance
        self.copies = chance.choice((1, 2, 2))
        self.victim = chance.randrange(6)
        self.network = Network(self.clock)
        self.network.latency = chance.choice((0.0002, 0.002, 0.02))
        self.network.die = self._die
        self.network.say = tell
        self.tell = tell or (lambda _: None)
        self.host_dies = chance.random() < 0.5
        self.threads = Threads()
        hosts = ["a", chance.choice("ab"), chance.choice("ab"), chance.choice("ab"), "c", chance.choice("cd")]
        self.hosts = dict(zip(range(6), hosts, strict=True))
        self.loop = self._world = WorkerLoop(self.clock, "-")  # type: ignore[abstract]
        self.workers: list[Worker] = []
        self._by_loop: dict[WorkerLoop, Worker] = {}
        self._busy: dict[str, int] = {}
        self._segments: list[Segment] = []
        self._opened: set[int] = set()
        self.whole: set[int] = set()
        """The versions of which a put has returned True."""
        self.tell(f"w{self.victim} dies, {self.copies} copies, {self.hosts}")
        self._left = 1 + chance.randrange(_MOST_MESSAGES)

    # ---- from the start to the end

    def run(self) -> int:
        """Returns how much has happened. ``Violation`` if a promise is broken."""
        with self._ruling():
            for number in range(6):
                self._add(number)
            for worker in self.workers:
                worker.join([each.member for each in self.workers], static=False)
            self.network.last = self.workers[self.victim].place, self._left
            writing = [partial(self._write, rank) for rank in (0, 1)]
            programs: list[Callable[[Worker], None]] = [self._keep, *writing, *[self._read] * 3]
            for worker, program in zip(self.workers, programs, strict=True):
                self._start(worker, program)
            self._until_all_have_ended("the programs")
            for worker in self._living:
                if worker is not self.workers[KEEPER]:
                    self._start(worker, self._look_again)
            self._until_all_have_ended("the last looks")
            self.clock.run(_KEEPALIVE_SECONDS + 3 * _LOST_SECONDS)
            self._start(self._survivor, self._look_at_leases)
            self._until_all_have_ended("the look at leases")
        return self.clock.happened

    @property
    def _living(self) -> list[Worker]:
        return [each for each in self.workers if each.alive]

    @property
    def _survivor(self) -> Worker:
        """The last worker that does not die: the victim, if it lives still, may be about to."""
        return [each for each in self.workers if each is not self.workers[self.victim]][-1]

    def _add(self, number: int) -> None:
        options = AgentOptions(lost_after=_LOST_SECONDS, reconnect_within=_LOST_SECONDS, slow_call_seconds=0)
        worker = Worker(self.network, number, 1 + self.clock.chance.getrandbits(40), options)
        self._by_loop[worker.loop] = worker
        self.workers.append(worker)
        executor: Any = worker.agent.executor

        def perform(step: Step) -> None:
            function, argument = executor._planned.pop(step)

            def task() -> None:
                try:
                    function(argument)
                finally:
                    executor._active -= 1

            self.threads.start(worker.loop, task)

        executor._perform = perform

    def _die(self) -> None:
        victim = self.workers[self.victim]
        self.tell(f"    {victim} dies{', and its host' if self.host_dies else ''}")
        victim.end()
        self._world.call_later(0.0, self._bury, victim)

    def _bury(self, victim: Worker) -> None:
        self.network.kill(victim.place, host=self.host_dies)
        self._close_descriptors(victim)

    def _start(self, worker: Worker, program: Callable[[Worker], None]) -> None:
        self._busy[worker.name] = self._busy.get(worker.name, 0) + 1

        def run() -> None:
            try:
                program(worker)
            except Violation as violation:
                self._violations.append(violation)
            except Exception as error:
                self._violations.append(
                    Violation(f"{worker} fails: {error!r}").with_traceback(error.__traceback__)
                )
            self._busy[worker.name] -= 1

        worker.loop.call_soon(self.threads.start, worker.loop, run)

    def _until_all_have_ended(self, what: str) -> None:
        end = self.clock.now + _LONGEST
        while busy := [each.name for each in self._living if self._busy.get(each.name)]:
            if self._violations:
                break
            if self.clock.now > end:
                raise Violation(f"{what} of {busy} do not end")
            self.clock.run(0.5)
        for violation in self._violations:
            raise violation

    # ---- what the workers do

    def _open(self, worker: Worker) -> Store:
        number = worker.member.info.id
        try:
            opened = Store("policy", on="w0", keep=5, copies=self.copies)
        finally:
            self._opened.add(number)  # the store may have been lost; the others do not wait for it then
        self.threads.wait(lambda: all(each.member.info.id in self._opened for each in self._living))
        return opened

    def _keep(self, worker: Worker) -> None:
        with self._losses():
            self._open(worker)

    @contextmanager
    def _losses(self) -> Iterator[None]:
        """An error that a death explains may be raised."""
        try:
            yield
        except RpcError as error:
            self.tell(f"    {self._by_loop[self.loop]}: {error}")
            if len(self._living) == 6:
                raise Violation(f"though no worker has died: {error!r}") from error
            if isinstance(error, WorkerLostError) and "w0" in str(error) and self.workers[KEEPER].alive:
                raise Violation(f"the store's worker lives: {error!r}") from error

    def _write(self, rank: int, worker: Worker) -> None:
        with self._losses():
            opened = self._open(worker)
            for number in _NUMBERS:
                if opened.put(number, state(number, range(rank, rank + 1)), part=(rank, 2)):
                    self.whole.add(number)

    def _read(self, worker: Worker) -> None:
        last = 0
        with self._losses():
            opened = self._open(worker)
            while last != _NUMBERS[-1]:
                last = self._get(opened, newer_than=last, timeout=100.0)
                if self.clock.chance.random() < 0.5:
                    with opened.lease(timeout=100.0) as lease:  # what was read may be gone, and not put again
                        self._check(lease.version, dict(lease))

    def _get(self, opened: Store, **wanted: Any) -> int:
        into = {name: torch.full(block.shape, -1.0) for name, block in state(0).items()}
        number = opened.get(into, **wanted)
        self._check(number, into)
        return number

    def _check(self, number: int, values: dict[str, torch.Tensor]) -> None:
        for name, block in state(number).items():
            if not torch.equal(values[name], block.tensor):
                raise Violation(f"version {number} is torn: {name!r} is {values[name]}")

    def _look_again(self, worker: Worker) -> None:
        """All versions that were whole are there after the death, and the store goes on. The death may come
        only now.
        """
        try:
            opened = Store("policy", on="w0", copies=self.copies)
            lost = self.whole.difference(opened.versions())
            if lost:
                raise Violation(f"versions {lost} were told whole, and are gone")
            for number in sorted(self.whole):
                self._get(opened, version=number)
            if worker is self._survivor and not opened.put(_LAST, state(_LAST)):
                raise Violation("a whole version is not whole")
            self._get(opened, version=_LAST, timeout=100.0)
        except WorkerLostError as error:  # there may be no other copy, or nothing to copy
            if "w0" not in str(error) or self.workers[KEEPER].alive or (self.copies == 2 and self.whole):
                raise

    def _look_at_leases(self, _: Worker) -> None:
        with contextlib.suppress(WorkerLostError):  # as before
            usage = Store("policy", on="w0", copies=self.copies).usage()
            if usage["leases"]:
                raise Violation(f"{usage['leases']} leases of {usage['holders']} are left")

    # ---- the world

    @contextmanager
    def _ruling(self) -> Iterator[None]:
        Lock.run = self
        self._violations: list[Violation] = []
        self.clock.enter, self.clock.after = self._enter, lambda step: self.threads.look(step.loop)
        locks = SimpleNamespace(Lock=Lock, Thread=threading.Thread)
        with ExitStack() as stack:
            stack.enter_context(self.clock.ruling())
            stack.enter_context(self.threads.ruling(lambda: self.loop))
            for module in (handle, keeper):
                stack.enter_context(mock.patch.object(module, "host_identity", self._host))
            for reader in (handle, keeper, figures, store):
                stack.enter_context(mock.patch.object(reader, "monotonic", self._now))
            for locking in (copies, store):
                stack.enter_context(mock.patch.object(locking, "threading", locks))
            stack.enter_context(mock.patch.object(successors, "_taking_over", Lock()))
            stack.enter_context(mock.patch.object(transfer, "_MESSAGE_BYTES", 512))
            stack.enter_context(mock.patch.object(memory, "AVAILABLE", new=False))
            stack.enter_context(mock.patch.object(memory, "Segment", self._segment))
            stack.enter_context(mock.patch.object(handle, "open_segment", self._open_segment))
            stack.enter_context(mock.patch.object(handle, "map_segment", self._map_segment))
            process = SimpleNamespace(close=lambda _: None, getpid=self._number)
            stack.enter_context(mock.patch.object(handle, "os", process))
            stack.enter_context(mock.patch.object(keeper, "has_ended", self._has_ended))
            try:
                yield
            finally:
                self.threads.end()
                current.agent = None
                for worker in self.workers:
                    worker.loop.dead = True
                    self._close_descriptors(worker)
                del Lock.run

    def _close_descriptors(self, worker: Worker) -> None:
        """Do what the kernel does when a process ends."""
        found = node.node_at(worker.incarnation)
        for kept in [] if found is None else found._take():
            kept.abandon()

    def _enter(self, loop: WorkerLoop) -> None:
        self.loop = loop
        worker = self._by_loop.get(loop)
        current.agent = None if worker is None else worker.agent

    def _segment(self, number: int, size: int) -> Segment:
        """Memory of this process, which other simulated processes can map."""
        segment = Segment(number, size)
        segment.place = [len(self._segments), []]
        self._segments.append(segment)
        return segment

    def _open_segment(self, _process: int, descriptor: int, _identity: object, size: int) -> int:
        if self._segments[descriptor].tensor.numel() != size:
            raise FileNotFoundError(errno.ENOENT, "the process that made it has closed it")
        return descriptor

    def _map_segment(self, descriptor: int, _size: int, access: memory.Access) -> memory.Mapped:
        shared = self._segments[descriptor].tensor
        data = shared.clone() if access is memory.Access.COPY else shared[:]
        return memory.Mapped(data, weakref.ref(data))

    def _now(self) -> float:
        return self.clock.now

    def _host(self) -> str:
        return self.hosts[self._number()]

    def _number(self) -> int:
        return self._by_loop[self.loop].member.info.id

    def _has_ended(self, number: int) -> bool:
        return not self.workers[number].alive


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what the command line asks for; returns how many runs have failed."""
    parser = argparse.ArgumentParser(prog="python -m tests.simulation.weights", description=__doc__)
    parser.add_argument("--seeds", type=int, default=100, help="how many runs")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--seed", type=int, help="this run only")
    parser.add_argument("--trace", action="store_true", help="print all that happens in it")
    asked = parser.parse_args(arguments)
    seeds = range(asked.first, asked.first + asked.seeds) if asked.seed is None else [asked.seed]
    logging.getLogger("farcall.weights").setLevel(logging.ERROR)
    logging.getLogger("rpc").setLevel(logging.ERROR)
    began, happened, failed = time.process_time(), 0, 0
    gc.freeze()
    for seed in seeds:
        try:
            happened += Run(seed, print if asked.trace else None).run()
        except Violation as violation:
            failed += 1
            print(f"seed {seed}: {violation}\n  python -m tests.simulation.weights --seed {seed} --trace")
    seconds = time.process_time() - began
    print(f"{len(seeds)} runs, {happened} steps, {failed} failed, {seconds:.1f} s of the processor")
    return failed


if __name__ == "__main__":
    sys.exit(main() > 0)
