"""The command line: ``python -m tests.conformance [-k SUBSTRING] [--jobs N] [--backend torch]``."""

from __future__ import annotations

import argparse
import functools
import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.conformance.suites import Test


def main(arguments: list[str] | None = None) -> int:
    """Runs the suites; the exit status is 0 if all went as expected.

    Args:
        arguments: of the command line; default those of the process.
    """
    options = _parse(arguments)
    # Before PyTorch is imported: libraries' thread pools do not survive a fork, and workers share two cores.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ["PYTORCH_PRINT_REPRO_ON_FAILURE"] = "0"  # it would be what is shown of a failure
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        os.environ.pop(name, None)
    if options.backend == "farcall":
        import farcall.compat

        farcall.compat.install()
    try:
        return _run(options)
    except ModuleNotFoundError as error:
        if error.name != "expecttest":
            raise
        print("PyTorch's test suites need the package expecttest: pip install expecttest", file=sys.stderr)
        return 2


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tests.conformance", description="Run PyTorch's own RPC tests against farcall."
    )
    parser.add_argument("-k", metavar="SUBSTRING", action="append", help="only tests whose name contains it")
    parser.add_argument("--jobs", type=int, choices=(1, 2), default=2, help="tests at one time (default 2)")
    parser.add_argument("--limit", type=float, default=60, help="seconds a test may take (default 60)")
    parser.add_argument("--backend", choices=("farcall", "torch"), default="farcall", help="what is tested")
    parser.add_argument("--all", action="store_true", help="run those too that are listed as impossible")
    parser.add_argument("--list", action="store_true", help="only list the tests")
    parser.add_argument("--log-lines", type=int, default=0, help="lines shown of each log of a failed test")
    parser.add_argument("--logs", type=Path, help="keep the logs in this folder (must not exist)")
    return parser.parse_args(arguments)


def _run(options: argparse.Namespace) -> int:
    from rich.console import Console

    from tests.conformance import suites
    from tests.conformance.expected import BAR, CANNOT_HOLD
    from tests.conformance.processes import Ending, Pool
    from tests.conformance.report import Report

    console = Console()
    every = suites.tests()
    unknown = CANNOT_HOLD.keys() - {test.name for test in every}
    if unknown:
        console.print(f"expected.py names tests that do not exist: {', '.join(sorted(unknown))}")
        return 2
    chosen = [test for test in every if not options.k or any(part in str(test) for part in options.k)]
    listed: dict[Test, str] = {}
    if options.backend == "farcall":
        listed = {test: CANNOT_HOLD[test.name] for test in chosen if test.name in CANNOT_HOLD}
    if options.list:
        for test in chosen:
            console.print(
                str(test) + (f"  cannot hold: {listed[test]}" if test in listed else ""), highlight=False
            )
        return 0
    to_run = [test for test in chosen if options.all or test not in listed]
    unexpected, surprises = [], []
    # Not a TemporaryDirectory: that would be removed by each worker as it exits.
    folder = options.logs or Path(tempfile.mkdtemp(prefix="conformance-"))
    body = functools.partial(suites.run_rank, farcall=options.backend == "farcall")
    pool = Pool(body, folder, suites.workers_of, options.jobs, options.limit)
    try:
        with Report(console, len(to_run), options.log_lines) as report:
            for outcome in pool.run(to_run):
                expected = outcome.task not in listed
                report.add(outcome, expected)
                if expected and outcome.ending in (Ending.FAILED, Ending.TIMED_OUT):
                    unexpected.append(outcome.task)
                elif not expected and outcome.ending is Ending.PASSED:
                    surprises.append(outcome.task)
    finally:
        if not options.logs:
            shutil.rmtree(folder)
    report.summarize(unexpected, surprises, listed)
    passed = report.counts()[Ending.PASSED]
    console.print(f"{passed} of {len(chosen)} pass", style="bold")
    if not options.k and passed < BAR:
        console.print(f"at least {BAR} must", style="red")
        return 1
    return 1 if unexpected else 0


if __name__ == "__main__":
    sys.exit(main())
