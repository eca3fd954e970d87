"""Fuzzing of what others can say: codec, handshakes, sessions, control messages, references; and an agent.

::

    python -m tests.fuzz.hostile --minutes 10
    python -m tests.fuzz.hostile --minutes 1 --seed 7 --only references frames

One process runs mutated inputs through the pure parts, by turns, and keeps those that reach new lines; the
rest of the time it sends mutated connections to a real agent, in its own process. It fails if anything
raises what it should not, hangs, takes more memory than its limits, or breaks a rule. What fails is added to
``tests/fuzz/corpus``.
"""

from __future__ import annotations

import argparse
import os
import resource
import sys
import tempfile
import time
import warnings
from collections.abc import Sequence
from pathlib import Path

from tests.fuzz.hostile import corpus, members
from tests.fuzz.hostile.campaign import Campaign, Failure
from tests.fuzz.hostile.cores import TARGETS
from tests.fuzz.hostile.mutation import packed
from tests.support.fork_server import ForkServer
from tests.support.orders import ask
from tests.support.workers import TIME_LIMIT, RunWorkers, worker_main

TURN_SECONDS = 2.0
FLOOD_SECONDS = 20.0


def fuzz_cores(names: Sequence[str], seconds: float, seed: int) -> list[Failure]:
    """Run campaigns for the pure parts, by turns; prints what they came to."""
    campaigns = [Campaign(target, seed) for target in TARGETS if target.name in names]
    begun = {campaign.target.name: len(campaign.known) for campaign in campaigns}
    end = time.monotonic() + seconds
    while campaigns and time.monotonic() < end:
        for campaign in campaigns:
            campaign.run_for(min(TURN_SECONDS, seconds / len(campaigns)))
    for campaign in campaigns:
        name = campaign.target.name
        print(
            f"{name:12} {campaign.runs:8} inputs, {len(campaign.known):5} steps of code reached "
            f"({begun[name]} by what was known), {len(campaign.failures)} failures",
            flush=True,
        )
    return [failure for campaign in campaigns for failure in campaign.failures.values()]


def fuzz_agent(seconds: float, seed: int) -> list[Failure]:
    """Attack a real agent; prints what came of it."""
    server = ForkServer.start(worker_main)
    try:
        with tempfile.TemporaryDirectory(prefix="hostile-") as folder:
            runner = RunWorkers(server, Path(folder))
            failures = attack_agent(runner, seconds, seed)
            runner.close()
            return failures
    finally:
        server.stop()


def attack_agent(run_workers: RunWorkers, seconds: float, seed: int) -> list[Failure]:
    """Attack a real agent, and look what becomes of it."""
    failures: list[Failure] = []
    victim = members.Victim(run_workers, seconds + TIME_LIMIT)
    attack = members.Attack(victim.at, victim.honest_incarnation, seed)

    def look() -> None:
        attack.honest = victim.honest_incarnation
        if what := victim.wrong():
            failures.append(Failure(members.NAME, attack.sent[-1] if attack.sent else b"", what))
        else:
            attack.sent.clear()

    for data in list(attack.pool):
        attack.send(data)
    end = time.monotonic() + seconds
    flooding = min(FLOOD_SECONDS, seconds / 4)
    said = 0
    while not failures and time.monotonic() < end - flooding:
        attack.send_new(50)
        look()
    if not failures:
        said = attack.flood(flooding)
        look()
    if not failures:
        attack.send(packed([2, *members.EVICTION]))
        look()
    left = "" if failures else victim.left()
    if left:
        failures.append(Failure(members.NAME, b"", left))
    after = "" if failures else ask(victim.worker, members.state)
    print(
        f"an agent     {attack.connections:8} connections, {said} messages in floods, "
        f"{victim.evictions} evictions of the honest member, {len(failures)} failures"
    )
    print(f"             before: {victim.before}\n             after:  {after}")
    for failure in failures:
        print(victim.log()[-1000:])
        for data in attack.sent[-50:]:
            corpus.add_failure(f"suspects-{members.NAME}", data, failure.what)
    if not failures:
        victim.dismiss()
    return failures


def main(arguments: Sequence[str] | None = None) -> int:
    """The command."""
    names = [target.name for target in TARGETS]
    parser = argparse.ArgumentParser("python -m tests.fuzz.hostile", description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0, help="how long (default: 10)")
    parser.add_argument(
        "--seed", type=int, default=int(time.time()), help="of what is mutated (default: the time)"
    )
    parser.add_argument("--only", nargs="+", choices=[*names, members.NAME], help="which parts")
    options = parser.parse_args(arguments)
    warnings.simplefilter("ignore")
    print(f"seed {options.seed}", flush=True)
    only = options.only or [*names, members.NAME]
    cores = [name for name in only if name != members.NAME]
    seconds = 60 * options.minutes
    share = 0.0 if not cores else 1.0 if members.NAME not in only else 0.6
    failures = fuzz_cores(cores, share * seconds, options.seed) if cores else []
    if members.NAME in only:
        failures += fuzz_agent((1 - share) * seconds, options.seed)
    for failure in failures:
        print(f"FAILED {failure.target}: {failure.what[:1000]}\n  {failure.data[:300]!r}")
        if failure.data:
            corpus.add_failure(failure.target, failure.data, failure.what)
    largest = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
    print(f"{len(failures)} failures; this process had {largest} MiB at most")
    return 1 if failures else 0


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main())
