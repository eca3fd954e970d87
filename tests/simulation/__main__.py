"""Simulate groups of workers, each decided by its seed.

python -m tests.simulation --seeds 10000            # as many runs; the number of a failing one is printed
python -m tests.simulation --seed 17 --trace        # one, and all that happens in it
python -m tests.simulation --seed 17 --shrink       # the fewest deeds with which it still fails
python -m tests.simulation --workers 1000           # one group of so many
"""

from __future__ import annotations

import argparse
import gc
import logging
import sys
import time
from collections.abc import Sequence
from dataclasses import replace

from tests.simulation.life import Life, Plan
from tests.simulation.membership import Membership
from tests.simulation.truth import Violation

__all__ = ["fails", "main", "shrink"]


def fails(plan: Plan) -> str | None:
    """The promise that a run of a plan breaks."""
    try:
        Life(plan).run()
    except Violation as violation:
        return str(violation)
    return None


def shrink(plan: Plan) -> Plan:
    """A part of a plan that fails, with as few deeds as can be found by leaving some out."""
    size = max(1, len(plan.deeds) // 2)
    while True:
        for begin in range(0, len(plan.deeds), size):
            smaller = replace(plan, deeds=plan.deeds[:begin] + plan.deeds[begin + size :])
            if fails(smaller):
                plan = smaller
                break
        else:
            if size == 1:
                return plan
            size //= 2


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what the command line asks for; returns how many runs have failed."""
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    parser.add_argument("--seeds", type=int, default=100, help="how many runs (with --workers: one)")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--seed", type=int, help="this run only")
    parser.add_argument("--trace", action="store_true", help="print all that happens in it")
    parser.add_argument("--shrink", action="store_true", help="leave out what its failure does not need")
    parser.add_argument("--workers", type=int, default=0, help="how many; default: as the seed says")
    asked = parser.parse_args(arguments)
    many = 1 if asked.workers else asked.seeds
    seeds = range(asked.first, asked.first + many) if asked.seed is None else [asked.seed]
    began, cpu, happened, failed = time.perf_counter(), time.process_time(), 0, 0
    gc.collect()
    gc.freeze()
    logging.getLogger("rpc.rendezvous").setLevel(logging.CRITICAL)  # which reports damage to the log
    for count, seed in enumerate(seeds):
        plan = Plan.of(seed, asked.workers)
        if asked.shrink and fails(plan):
            plan = shrink(plan)
        try:
            happened += Life(plan, print if asked.trace else None).run()
            if not asked.workers:
                happened += Life(Plan.of_backward(seed), print if asked.trace else None).run()
                Membership(seed).run()
        except Violation as violation:
            failed += 1
            print(f"seed {seed}: {violation}\n  python -m tests.simulation --seed {seed} --trace --shrink")
        if count % 1000 == 999:
            print(f"{count + 1} runs, {failed} failed, {time.perf_counter() - began:.0f} s", flush=True)
    seconds = time.perf_counter() - began
    cpu = time.process_time() - cpu
    print(
        f"{len(seeds)} runs, {happened} steps, {failed} failed, {seconds:.1f} s, {cpu:.1f} s of the processor"
    )
    return failed


if __name__ == "__main__":
    sys.exit(main() > 0)
