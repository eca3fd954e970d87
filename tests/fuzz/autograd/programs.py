"""Random programs, run over workers and compared with the same in one process.

``python -m tests.fuzz.autograd.programs --count 1000`` runs a thousand. ``--seed 17 --count 1`` runs a
single one, ``--show`` prints it. With ``--errors`` a hook or custom function raises in each. With ``--mode``
tensors are on devices of the workers. Exits with 1 if any went wrong.
"""

from __future__ import annotations

import argparse
import functools
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from tests.fuzz.autograd.faults import lead_through_errors
from tests.fuzz.autograd.generation import generate
from tests.fuzz.autograd.links import Link, by_link, link_of
from tests.fuzz.autograd.places import settle
from tests.fuzz.autograd.session import WORKERS, Outcome, lead
from tests.support.fork_server import ForkServer
from tests.support.serving import serve
from tests.support.workers import RunWorkers, Task, Worker, WorkersFailed, worker_main

PATIENCE = 60.0
"""Seconds without news after which the workers are aborted; a program that hangs is reported much earlier."""


def outcomes(
    run_workers: RunWorkers, seeds: Sequence[int], at_once: int = 1, mode: str | None = None
) -> Iterator[Outcome]:
    """Runs the programs of these seeds, link by link, each over one group of workers.

    A group that a program has spoilt is replaced by a new one.

    Args:
        at_once: so many programs at the same time.
        mode: of the streams of the devices on which tensors are; None: they are on the CPU.

    Raises:
        WorkersFailed: a worker crashed, or nothing was heard for too long.
    """
    for link, left in by_link(seeds):
        while left:
            workers = run_workers.start(_tasks(link, tuple(left), at_once, mode), time_limit=PATIENCE)
            hung = False
            while left and not hung:
                workers.restart_clock()
                outcome: Outcome = workers[0].wait_for("outcome")
                left.remove(outcome.seed)
                hung = outcome.hung
                yield outcome
            if hung:
                for worker in workers:
                    worker.kill()
            workers.results()


def outcomes_with_errors(run_workers: RunWorkers, seeds: Sequence[int]) -> Iterator[Outcome]:
    """In each program a hook or custom function raises; see ``faults``."""
    for link, some in by_link(seeds):

        def first(worker: Worker, link: Link = link, some: Sequence[int] = some) -> None:
            lead_through_errors(worker, link, some)

        others = [functools.partial(serve, **link.options)] * (WORKERS - 1)
        workers = run_workers.start([first, *others], time_limit=PATIENCE)
        for _ in some:
            workers.restart_clock()
            yield workers[0].wait_for("outcome")
        workers.results()


def _tasks(link: Link, seeds: Sequence[int], at_once: int, mode: str | None) -> list[Task]:
    def first(worker: Worker) -> None:  # of this module, which so is imported before workers are forked
        lead(worker, link, seeds, at_once, mode)

    def other(worker: Worker) -> None:
        serve(worker, **link.options, **settle(worker, mode))

    return [first, *[other] * (WORKERS - 1)]


def main(arguments: Sequence[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser("python -m tests.fuzz.autograd.programs", description=__doc__)
    parser.add_argument("--count", type=int, default=1000, help="how many programs (default: 1000)")
    parser.add_argument("--seed", type=int, default=0, help="of the first (default: 0)")
    parser.add_argument("--errors", action="store_true", help="an error is raised in each program")
    parser.add_argument("--at-once", type=int, default=1, help="how many at the same time (default: 1)")
    parser.add_argument(
        "--mode", choices=("eager", "random", "lazy"), help="tensors are on devices, whose streams run so"
    )
    parser.add_argument("--show", action="store_true", help="print the programs")
    options = parser.parse_args(arguments)
    links = by_link(range(options.seed, options.seed + options.count))
    seeds = [seed for _, some in links for seed in some]
    if options.show:
        print(*map(generate, seeds), sep="\n")
    server = ForkServer.start(worker_main)
    try:
        with tempfile.TemporaryDirectory(prefix="programs-") as folder:
            runner = RunWorkers(server, Path(folder))
            if options.errors:
                running = outcomes_with_errors(runner, seeds)
            else:
                running = outcomes(runner, seeds, options.at_once, options.mode)
            wrong = _show_all(running, seeds)
            runner.close()
    finally:
        server.stop()
    return 1 if wrong else 0


def _show_all(running: Iterator[Outcome], seeds: Sequence[int]) -> int:
    """Shows what goes wrong; how many programs did."""
    done: list[Outcome] = []
    try:
        for outcome in running:
            done.append(outcome)
            if outcome.problems:
                print(_title(outcome.seed), *outcome.problems, sep="\n", flush=True)
    except WorkersFailed as failure:
        missed = seeds[len(done)]
        print(_title(missed), failure, generate(missed), sep="\n")
    wrong, missing = sum(bool(outcome.problems) for outcome in done), len(seeds) - len(done)
    print(
        f"{len(done)} programs: {wrong} wrong, {sum(outcome.hung for outcome in done)} of them hanging; "
        f"{missing} did not end; {sum(outcome.exact for outcome in done)} compared bit by bit\n"
        f"{sum(outcome.nodes for outcome in done)} nodes run, gradients of "
        f"{sum(outcome.arrivals for outcome in done)} messages sent back, "
        f"{sum(outcome.seconds for outcome in done):.1f} s over the workers"
    )
    return wrong + missing


def _title(seed: int) -> str:
    return f"program {seed}, over {link_of(seed).value}"


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main())
