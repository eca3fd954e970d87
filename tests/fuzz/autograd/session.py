"""Runs program after program over one group of workers: starting processes for each would take too long."""

from __future__ import annotations

import sys
import threading
import time
import traceback
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import rpc
from rpc.errors import RpcTimeoutError
from tests.fuzz.autograd.distribution import dismiss, introduce, leftovers, name_of, run_over_workers
from tests.fuzz.autograd.generation import generate
from tests.fuzz.autograd.links import Link
from tests.fuzz.autograd.observations import is_exact, mismatches
from tests.fuzz.autograd.places import settle
from tests.fuzz.autograd.program import Program
from tests.fuzz.autograd.reference import run_in_one_process
from tests.support.workers import Worker

WORKERS = 4
"""How many the group has; a program uses two to four of them."""

QUICK_SEEDS = range(60)
"""The programs of `make test-more`; together they contain everything."""

TIME_LIMIT = 20.0
"""Seconds for one program, which takes about 50 ms: what takes longer hangs."""


@dataclass(frozen=True)
class Outcome:
    """How one program went.

    Attributes:
        seed: the program's.
        problems: what was wrong, in sentences; the program itself comes last.
        hung: it had not ended in time, so that the group is not fit for further programs.
        exact: numbers were compared bit by bit.
        arrivals: how many messages' gradients came back.
        nodes: how many nodes of the graph ran.
        seconds: how long it took over the workers.
    """

    seed: int
    problems: tuple[str, ...]
    hung: bool
    exact: bool
    arrivals: int
    nodes: int
    seconds: float


def lead(worker: Worker, link: Link, seeds: Sequence[int], at_once: int = 1, mode: str | None = None) -> None:
    """What the first worker runs, while the others serve: reports an ``Outcome`` for each seed.

    Args:
        link: what the group is connected by.
        at_once: so many programs are run at the same time.
        mode: of the streams of the devices on which tensors are; None: they are on the CPU.
    """
    with worker.group(**link.options, **settle(worker, mode)):
        for other in range(worker.world_size):
            rpc.rpc_sync(name_of(other), introduce, args=(worker.world_size,))
        with ThreadPoolExecutor(at_once) as threads:
            for outcome in threads.map(lambda seed: check(generate(seed)), seeds):
                worker.report("outcome", outcome)
                if outcome.hung:
                    worker.wait_for("end")  # which is a violent one
        for other in range(worker.world_size):
            rpc.rpc_sync(name_of(other), dismiss)
        assert leftovers(range(worker.world_size)) == []


def check(program: Program) -> Outcome:
    """Runs a program both ways and compares."""
    expected, expected_shared = run_in_one_process(program)
    exact = is_exact(expected) and is_exact(expected_shared)
    started = time.perf_counter()
    problems, hung = [], False
    try:
        runs, shared = run_over_workers(program, TIME_LIMIT)
    except RpcTimeoutError:
        problems, hung = [f"it hangs; stacks of all threads:\n{stacks_of_all(program.workers)}"], True
    except Exception:
        problems = [traceback.format_exc()]
    else:
        for number, run in enumerate(runs):
            found = mismatches(expected, run, exact=exact)
            problems += [f"run {number}: {problem}" for problem in found]
        problems += mismatches(expected_shared, shared, exact=exact)
    if problems:
        problems.append(str(program))
    return Outcome(
        program.seed,
        tuple(problems),
        hung,
        exact,
        sum(count > 0 for count in expected.arrivals.values()),
        sum(expected.executions.values()),
        time.perf_counter() - started,
    )


def stacks_of_all(workers: int) -> str:
    """Where every thread of every worker is, for a program that hangs."""
    return "\n".join(
        f"{name_of(worker)}:\n{rpc.rpc_sync(name_of(worker), stacks)}" for worker in range(workers)
    )


def stacks() -> str:
    """Where this process's threads are. To be called remotely."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    return "\n".join(
        f"thread {names.get(ident, ident)}:\n{''.join(traceback.format_stack(frame))}"
        for ident, frame in sys._current_frames().items()
        if ident != threading.get_ident()
    )
