"""Storms of signals, in real processes with calls, references and autograd: is any connection wedged?

::

    python -m tests.soak.interrupts --storms 200

A storm is a second of signals on the main thread of one worker, or of all three, while these call each other,
make and drop references, and run backwards. The signal is Ctrl-C, SIGALRM or SIGUSR1, whose handlers raise
``KeyboardInterrupt``, an ``Exception`` and a ``TimeoutError``, in turn. Gaps are 1 to 50 ms on average; of
some storms each signal is followed by another within a millisecond, so that it comes while the first is being
dealt with; in some, finalizers run all the time; one in five comes during ``shutdown``. After each, every
worker calls every other, within ``PATIENCE``, and nothing may be left of what was interrupted: calls,
references, contexts, memory that is lent. It prints a table, and fails if anything is wedged or left.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import gc
import os
import random
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from types import FrameType
from typing import Any, Final

import torch

import dist_autograd
import rpc
from rpc.errors import NotInitializedError, RpcError
from rpc.runtime.current import current_agent
from rpc.runtime.interrupts import defer_interrupts, interruptible, protected, restore_interrupts
from tests.support.fork_server import ForkServer
from tests.support.interrupting import press
from tests.support.orders import follow_orders
from tests.support.streams import until
from tests.support.workers import RunWorkers, Worker, Workers, WorkersFailed, worker_main

WORKERS: Final = 3
SECONDS: Final = 1.0
"""Of one storm."""
PATIENCE: Final = 20.0
"""Seconds for each call of the check that follows."""
TIME_LIMIT: Final = 90.0
"""Seconds for a storm and all that is checked after it; what takes longer is wedged."""
DETAILS: Final = 6000
"""Characters of what a worker that failed has printed."""
GAPS: Final = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05)
EVERY_SHUTDOWN: Final = 5


class TooLong(Exception):
    """Raised by the handler of SIGALRM."""


RAISED: Final[dict[signal.Signals, type[BaseException]]] = {
    signal.SIGINT: KeyboardInterrupt,
    signal.SIGALRM: TooLong,
    signal.SIGUSR1: TimeoutError,
}


def raise_in_handler(number: int, frame: FrameType | None) -> None:
    raise RAISED[signal.Signals(number)]


@dataclass(frozen=True)
class Storm:
    """What comes down.

    Attributes:
        kind: ``calls``, ``doubles``, ``finalizers`` or ``shutdown``.
        gap: mean seconds between two.
        all_workers: whether it is on all, or on the first only.
        seed: of its moments.
        signal: the signal; its handler raises ``RAISED[signal]``.
    """

    kind: str
    gap: float
    all_workers: bool
    seed: int
    signal: signal.Signals


def storms(count: int, seed: int) -> list[Storm]:
    """Return ``count`` storms, of each kind and gap in turn."""
    kinds = ("calls", "doubles", "finalizers")
    return [
        Storm(
            "shutdown" if number % EVERY_SHUTDOWN == EVERY_SHUTDOWN - 1 else kinds[number % len(kinds)],
            GAPS[number // len(kinds) % len(GAPS)],
            number % 2 == 1,
            seed * 100_000 + number,
            tuple(RAISED)[number // EVERY_SHUTDOWN % len(RAISED)],
        )
        for number in range(count)
    ]


# ---- what is interrupted


class InCircle:
    """Is freed by the garbage collector only, and then drops a reference and memory that was received."""

    def __init__(self, *holds: Any) -> None:
        self.holds = holds
        self.me = self

    def __del__(self) -> None:
        self.holds = ()


def total(rref: rpc.RRef[torch.Tensor]) -> float:
    """To be called remotely, with a reference to an object of anybody's."""
    return float(rref.to_here().sum())


def triple(x: torch.Tensor) -> torch.Tensor:
    """To be called remotely."""
    return x * 3


def use_calls(to: str) -> None:
    assert rpc.rpc_sync(to, torch.add, args=(1, 2)) == 3
    assert rpc.rpc_async(to, torch.add, args=(1, 2)).then(lambda _: 4).wait() == 4
    assert rpc.rpc_sync(to, torch.ones, args=(100_000,)).sum() == 100_000
    several = [rpc.rpc_async(to, torch.add, args=(number, 1)) for number in range(20)]
    assert [future.wait() for future in several] == list(range(1, 21))


def use_references(to: str, third: str) -> None:
    mine, theirs = rpc.RRef(torch.ones(3)), rpc.remote(to, torch.ones, args=(2,))
    assert rpc.rpc_sync(to, total, args=(mine,)) == 3
    assert rpc.rpc_sync(third, total, args=(theirs,)) == 2
    assert float(theirs.rpc_sync().sum()) == 2


def use_autograd(to: str) -> None:
    x = torch.full((4,), 2.0, requires_grad=True)
    with dist_autograd.context() as context:
        y = rpc.rpc_sync(to, triple, args=(x * x,))
        dist_autograd.backward(context, [y.sum()])
        assert torch.equal(dist_autograd.get_gradients(context)[x], torch.full((4,), 12.0))


def make_garbage(to: str) -> None:
    for _ in range(10):
        InCircle(rpc.remote(to, torch.ones, args=(2,)), rpc.rpc_sync(to, torch.ones, args=(50_000,)))
    gc.collect()


def work(me: str, kind: str) -> None:
    """A round of everything, with every other worker."""
    others = [f"worker{rank}" for rank in range(WORKERS) if f"worker{rank}" != me]
    for to, third in zip(others, reversed(others), strict=True):
        use_calls(to)
        use_references(to, third)
        use_autograd(to)
        if kind == "finalizers":
            make_garbage(to)


# ---- the storm


@interruptible
def work_until(over: threading.Event, me: str, kind: str) -> None:
    while not over.is_set():
        work(me, kind)


@interruptible
def press_here(number: signal.Signals) -> None:
    press(number)


def pressing(storm: Storm, over: threading.Event) -> threading.Thread:
    """A thread that presses Ctrl-C for as long as the storm lasts; begun."""

    def press_again_and_again() -> None:
        chance, end = random.Random(storm.seed), time.monotonic() + SECONDS
        while time.monotonic() < end:
            time.sleep(chance.expovariate(1 / storm.gap))
            press(storm.signal)
            if storm.kind == "doubles" or chance.random() < 0.2:
                time.sleep(chance.uniform(0, 0.001))
                press(storm.signal)
        over.set()

    thread = threading.Thread(target=press_again_and_again)
    thread.start()
    return thread


@protected  # for a signal may come while the one before is being counted
def outlast(storm: Storm, work: Callable[[threading.Event], None]) -> tuple[int, list[str]]:
    """Do ``work`` until the storm is over; how often it was interrupted, and what it raised."""
    over, interrupts, raised = threading.Event(), 0, []
    before, expected = signal.signal(storm.signal, raise_in_handler), RAISED[storm.signal]
    presser = pressing(storm, over)
    while not over.is_set():
        try:
            work(over)
        except expected:
            interrupts += 1
        except Exception:
            raised.append(traceback.format_exc())
    presser.join()
    try:
        press_here(storm.signal)  # the last one may still be under way: it comes with this
    except expected:
        interrupts += 1
    signal.signal(storm.signal, before)
    return interrupts, raised[:1]


def stand(storm: Storm) -> tuple[int, list[str]]:
    """An order: stand in the storm."""
    me = rpc.get_worker_info().name
    return outlast(storm, lambda over: work_until(over, me, storm.kind))


def left_over() -> dict[str, int]:
    """What this worker has under way, or refers to, or lends: nothing, once all is done."""
    gc.collect()
    agent = current_agent()
    found: dict[str, int] = {
        **agent.extensions["rref"].counts(),
        "calls": agent.calls.table.unanswered(),
        "contexts": agent.get_debug_info()["num_autograd_contexts"],
        "lent bytes": agent.messages.shared_memory.usage()[1],
    }
    return {what: count for what, count in found.items() if count}


def check() -> list[str]:
    """An order: use every connection, both ways, within ``PATIENCE``; what is wrong."""
    me, wrong = rpc.get_worker_info().name, []
    others = [f"worker{rank}" for rank in range(WORKERS) if f"worker{rank}" != me]
    for to in others:
        try:
            assert rpc.rpc_sync(to, torch.add, args=(1, 2), timeout=PATIENCE) == 3
            assert rpc.rpc_sync(to, torch.ones, args=(100_000,), timeout=PATIENCE).sum() == 100_000
            assert rpc.rpc_sync(to, rpc.rpc_sync, args=(me, int), timeout=PATIENCE) == 0
        except RpcError as error:
            wrong.append(f"{me} to {to}: {error}")
    try:
        work(me, "finalizers")
    except RpcError as error:
        wrong.append(f"{me}: {error}")
    return wrong


def check_nothing_left() -> list[str]:
    """An order, when all have checked: wait until nothing is left; what is."""
    end = time.monotonic() + PATIENCE
    while left := left_over():
        if time.monotonic() > end:
            return [f"{rpc.get_worker_info().name} has left over {left}"]
        time.sleep(0.02)
    return []


# ---- during shutdown


@interruptible
def leave_until(over: threading.Event) -> None:
    while not over.is_set():
        try:
            rpc.shutdown()
        except NotInitializedError:
            over.wait()


def leave_in_storm(worker: Worker, storm: Storm) -> tuple[int, list[str]]:
    """Join, work, shut down in a storm; then start again alone, and leave nothing behind."""
    defer_interrupts()  # until the storm is over, which may be after the agent has ended
    worker.join()
    work(worker.name, "calls")
    worker.report("ready")
    worker.wait_for("storm")
    felt = outlast(storm, leave_until) if storm.all_workers or worker.rank == 0 else leave()
    restore_interrupts()
    assert not rpc.is_initialized()
    options = rpc.AgentOptions(init_method=f"file://{worker.folder}/alone{storm.seed}-{worker.rank}")
    rpc.init_rpc("alone", rank=0, world_size=1, rpc_backend_options=options)
    assert rpc.rpc_sync("alone", int, timeout=PATIENCE) == 0
    rpc.shutdown()
    until(lambda: not [each for each in threading.enumerate() if each.name.startswith("farcall")])
    return felt


def leave() -> tuple[int, list[str]]:
    """The others leave as ever, and may find that one has left without waiting."""
    rpc.shutdown()
    return 0, []


# ---- the command


class Weather:
    """Brings storms over groups of workers; a group that one has wedged is replaced."""

    def __init__(self, run_workers: RunWorkers) -> None:
        self._run_workers = run_workers
        self._group: Workers | None = None

    def bring(self, storm: Storm) -> tuple[int, list[str]]:
        """How often workers were interrupted, and what is wrong after it."""
        try:
            return self._over_shutdown(storm) if storm.kind == "shutdown" else self._over_work(storm)
        except WorkersFailed as failure:
            self._group = None
            return 0, [f"{each.worker} {each.reason}\n{each.details[-DETAILS:]}" for each in failure.failures]

    def _over_work(self, storm: Storm) -> tuple[int, list[str]]:
        if self._group is None:
            self._group = self._run_workers.start(follow_orders, WORKERS, time_limit=TIME_LIMIT)
            self._group.wait_for("ready")
        group = self._group
        group.restart_clock()
        stormed = list(group) if storm.all_workers else [group[0]]
        for worker in stormed:
            worker.tell("order", functools.partial(stand, storm))
        interrupts, wrong = _together([worker.wait_for("done") for worker in stormed])
        for order in (check, check_nothing_left):
            group.tell("order", order)
            wrong += [each for found in group.wait_for("done") for each in found]
        return interrupts, wrong

    def _over_shutdown(self, storm: Storm) -> tuple[int, list[str]]:
        group = self._run_workers.start(leave_in_storm, WORKERS, [storm], time_limit=TIME_LIMIT)
        group.wait_for("ready")
        group.tell("storm")
        return _together(group.results())

    def end(self) -> list[str]:
        """Let the last group leave; what is wrong."""
        if self._group is None:
            return []
        try:
            self._group.restart_clock()
            self._group.tell("order", None)
            self._group.results()
        except WorkersFailed as failure:
            return [f"the end: {failure}"]
        return []


def _together(felt: Sequence[tuple[int, list[str]]]) -> tuple[int, list[str]]:
    return sum(times for times, _ in felt), [each for _, raised in felt for each in raised]


def run(count: int, seed: int) -> int:
    """Run so many storms, print what came of them; how many left anything wrong."""
    interrupts: Counter[str] = Counter()
    done: Counter[str] = Counter()
    wrong = 0
    server = ForkServer.start(worker_main)
    try:
        with tempfile.TemporaryDirectory(prefix="interrupts-") as folder:
            runner = RunWorkers(server, Path(folder))
            weather = Weather(runner)
            for number, storm in enumerate(storms(count, seed)):
                times, problems = weather.bring(storm)
                interrupts[storm.kind] += times
                done[storm.kind] += 1
                if problems:
                    wrong += 1
                    print(f"storm {number}, {storm}:", *problems, sep="\n  ", flush=True)
            for problem in weather.end():
                wrong += 1
                print(problem)
            with contextlib.suppress(WorkersFailed):  # of groups that were given up
                runner.close()
    finally:
        server.stop()
    for kind, storms_of_kind in sorted(done.items()):
        print(f"{kind:12} {storms_of_kind:5} storms, {interrupts[kind]:7} interrupts")
    print(f"{done.total()} storms, {interrupts.total()} interrupts: {wrong} wedged or wrong")
    return wrong


def main(arguments: Sequence[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser("python -m tests.soak.interrupts", description=__doc__)
    parser.add_argument("--storms", type=int, default=200, help="how many (default: 200)")
    parser.add_argument("--seed", type=int, default=0, help="of their moments (default: 0)")
    options = parser.parse_args(arguments)
    return 1 if run(options.storms, options.seed) else 0


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(import_module("tests.soak.interrupts").main())  # where workers find all of this
