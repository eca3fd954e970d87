"""Eight workers under load, while they are killed, stopped and interrupted and cut off, all at once.

::

    python -m tests.soak.failures --minutes 10
    python -m tests.soak.failures --minutes 10 --tcp       # as between hosts: connections are reset, too

Each worker calls the others, passes references round and runs backwards; the first four are ranks of a
process group as well, and run collectives. The last four are killed now and then, or stopped for longer than
``lost_after``, and others started under their names. Checked are: nothing is run twice; sums of what was
called for lie between what surely ran and that with what may have; gradients and collectives are exact; when
the load ends, no call is pending, and nothing is left over; the first four, which live through it all, have
no more descriptors, segments, threads or memory. With ``--tcp`` there is no shared memory, and large tensors
travel over bulk streams, to calls and in collectives. It prints a table.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import statistics
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Final

from tests.soak.load import (
    LOST_AFTER,
    QUIET_SECONDS,
    STAYERS,
    WORKERS,
    be_a_worker,
)
from tests.support.fork_server import ForkServer
from tests.support.workers import RunWorkers, WorkerProcess, Workers, WorkersFailed, worker_main

BRIEFLY: Final = 2.0
"""Maximum time in seconds for which the first workers are stopped: less than ``lost_after``."""

NOTICED_SECONDS: Final = 30.0
"""Timeout in seconds for a worker to notice a death; a loaded machine takes longer than usual."""

BULK_STREAMS: Final = 4
"""Bulk streams to each other worker over TCP, of which few may be open when descriptors are first counted."""

WARM_UP: Final = 40.0
"""Time in seconds in which cuts are the only faults."""

PARTS: Final = 10
"""Number of measurements of what the workers have. The last ones are compared with those before half the
time: at first, the memory that the allocator keeps grows with what has run.
"""


class Driver:
    """Starts workers, does them harm, and adds up."""

    def __init__(self, run_workers: RunWorkers, seed: int, minutes: float, *, tcp: bool) -> None:
        self.chance = random.Random(seed)
        self.seconds = 60 * minutes
        self.harm: Counter[str] = Counter()
        self.noticed: defaultdict[str, list[float]] = defaultdict(list)
        self.dead_since: dict[str, tuple[str, float]] = {}
        self.over_time: list[dict[str, dict[str, int]]] = []
        self.transports = ("tcp",) if tcp else None
        self.group: Workers = run_workers.start(
            [be_a_worker] * WORKERS, args=(self.transports,), time_limit=self.seconds + 6 * QUIET_SECONDS
        )
        self.workers: dict[str, WorkerProcess] = {each.name: each for each in self.group}
        self.incarnations = {name: each.wait_for("joined") for name, each in self.workers.items()}
        self.goers = list(self.workers)[STAYERS:]
        self.stayers = list(self.workers)[:STAYERS]
        self.reasons: Counter[str] = Counter()
        self.done: Counter[str] = Counter()
        self.errors: Counter[str] = Counter()

    def run(self) -> None:
        """All of it but the end."""
        begun = time.monotonic()
        self.go_on_until(begun + min(WARM_UP, self.seconds / 4), [(1, self.cut)])
        faults = [
            (8, self.kill),
            (3, self.stop_for_long),
            (25, self.stop_briefly),
            (34, self.cut),
            (30, self.interrupt),
        ]
        if self.transports:
            faults.append((34, self.reset))
        for each in range(1, PARTS + 1):
            self.go_on_until(begun + self.seconds * each / PARTS, faults)
            self.over_time.append(self.measure())

    def go_on_until(self, end: float, faults: Sequence[tuple[int, Callable[[], None]]]) -> None:
        while time.monotonic() < end:
            self.pause(self.chance.uniform(0.1, 0.8))
            weights, actions = zip(*faults, strict=True)
            self.chance.choices(actions, weights)[0]()

    def pause(self, seconds: float) -> None:
        """Let time pass, and hear what workers report."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            self.group.pump_until(lambda: True, "")
            self.hear()
            time.sleep(0.02)

    def hear(self) -> None:
        for worker in self.workers.values():
            lost = worker._events["lost"]
            while lost:
                name, when, reason = lost.popleft()
                self.reasons[_shortened(reason)] += 1
                if name in self.dead_since:
                    how, since = self.dead_since[name]
                    self.noticed[how].append(when - since)

    # faults

    def kill(self) -> None:
        name = self.chance.choice(self.goers)
        self.dead_since[name] = ("kill -9", time.monotonic())
        self.workers[name].kill()
        self.harm["kills"] += 1
        self.replace(name)

    def stop_for_long(self) -> None:
        """Longer than ``lost_after``: the others lose it, and it has to start again."""
        name = self.chance.choice(self.goers)
        self.dead_since[name] = ("SIGSTOP", time.monotonic())
        self.workers[name].stop()
        self.pause(LOST_AFTER + 3)
        self.workers[name].kill()
        self.workers[name].resume()
        self.harm["stops for long"] += 1
        self.replace(name)

    def replace(self, name: str) -> None:
        how, _ = self.dead_since[name]
        noticed, end = len(self.noticed[how]), time.monotonic() + NOTICED_SECONDS
        self.pause(self.chance.uniform(0.5, 2.0))
        old = self.workers[name]
        while not old.ended or (len(self.noticed[how]) == noticed and time.monotonic() < end):
            self.pause(0.1)  # its name is not free before
        del self.dead_since[name]
        new = self.group.add(
            be_a_worker, name=name, rank=old.rank, world_size=WORKERS, args=(self.transports,)
        )
        self.workers[name] = new
        self.incarnations[name] = new.wait_for("joined")
        self.harm["restarts"] += 1

    def stop_briefly(self) -> None:
        worker = self.chance.choice(list(self.workers.values()))
        worker.stop()
        self.pause(self.chance.uniform(0.1, BRIEFLY))
        worker.resume()
        self.harm["stops, brief"] += 1

    def cut(self) -> None:
        one, other = self.chance.sample(list(self.workers), 2)
        self.workers[one].tell("order", ("cut", other))
        self.harm["cuts"] += 1

    def reset(self) -> None:
        one, other = self.chance.sample(list(self.workers), 2)
        self.workers[one].tell("order", ("reset", other))
        self.harm["resets"] += 1

    def interrupt(self) -> None:
        worker = self.chance.choice(list(self.workers.values()))
        for _ in range(self.chance.randrange(1, 6)):
            worker.interrupt()
            self.harm["interrupts"] += 1
            time.sleep(self.chance.uniform(0.001, 0.02))

    # the end

    def measure(self) -> dict[str, dict[str, int]]:
        """What the workers that are never killed have, once the allocator has returned the freed memory that
        it keeps: some hundred MiB where many threads make large tensors.
        """
        for name in self.stayers:
            self.workers[name].tell("order", ("trim", None))
        for name in self.stayers:
            self.workers[name].wait_for("trimmed")
        return {name: measured(self.workers[name].pid) for name in self.stayers}

    def end(self) -> list[str]:
        """Stop the load, and check everything; what is wrong."""
        wrong: list[str] = []
        self.pause(1.0)
        for worker in self.workers.values():
            worker.tell("order", ("stop", None))
        results = {name: each.wait_for("stopped") for name, each in self.workers.items()}
        self.hear()
        for worker in self.workers.values():
            worker.tell("order", ("account", None))
        accounts = {name: each.wait_for("account") for name, each in self.workers.items()}
        self.over_time.append(self.measure())
        for worker in self.workers.values():
            worker.tell("order", ("leave", None))
        self.group.results()
        for caller, (me, done, errors, problems, certain, uncertain) in results.items():
            self.done += done
            self.errors += errors
            wrong += [f"{caller}: {problem}" for problem in problems]
            for name, (totals, _, _) in accounts.items():
                least = certain[self.incarnations[name]]
                if not least <= totals[me] <= least + uncertain[name]:
                    wrong.append(
                        f"{name} has {totals[me]} of {caller}, who knows of {least} + {uncertain[name]}"
                    )
        for name, (_, doubles, left) in accounts.items():
            if doubles:
                wrong.append(f"{name} has run {doubles} calls twice")
            if left:
                wrong.append(f"{name} has left over {left}")
        return wrong + self.leaks()

    def leaks(self) -> list[str]:
        found = []
        for name in self.stayers:
            before = _each(statistics.median, self.over_time[PARTS // 2 - 3 : PARTS // 2], name)
            after = _each(min, self.over_time[-3:], name)  # a leak is there each time, messages are not
            if after["RSS, MiB"] > 1.15 * before["RSS, MiB"] + 20:
                found.append(f"{name} has grown: {before} to {after}")
            if after["threads"] > before["threads"] + 12:
                found.append(f"{name} has more threads: {before} to {after}")
            streams = BULK_STREAMS * (WORKERS - 1) if self.transports else 0
            if (
                after["descriptors"] > before["descriptors"] + streams + 12
                or after["segments"] > before["segments"] + 12
            ):
                found.append(f"{name} has more open: {before} to {after}")
        return found

    def table(self) -> str:
        """All that was done, by what."""
        lines = [f"{what:28} {count:8}" for what, count in (*self.harm.items(), *sorted(self.done.items()))]
        lines += ["errors, by what was done:"]
        lines += [f"  {what:40} {count:8}" for what, count in sorted(self.errors.items())]
        lines += ["workers were lost, by what is said of them:"]
        lines += [f"  {count:6}  {what}" for what, count in self.reasons.most_common(8)]
        for how, seconds in self.noticed.items():
            lines.append(
                f"{how} noticed {len(seconds)} times, after {1000 * min(seconds):.0f} / "
                f"{1000 * statistics.median(seconds):.0f} / {1000 * max(seconds):.0f} ms (min / median / max)"
            )
        for name in self.stayers:
            lines += [
                f"{name}, {what}: {' '.join(str(each[name][what]) for each in self.over_time)}"
                for what in next(iter(self.over_time), {}).get(name, {})
            ]
        return "\n".join(lines)


def measured(pid: int) -> dict[str, int]:
    """Of a process: memory, descriptors, mapped segments, threads."""
    proc = Path(f"/proc/{pid}")
    pages = int((proc / "statm").read_text().split()[1])
    return {
        "RSS, MiB": pages * os.sysconf("SC_PAGE_SIZE") >> 20,
        "descriptors": len(list((proc / "fd").iterdir())),
        "segments": (proc / "maps").read_text().count("/memfd:"),
        "threads": len(list((proc / "task").iterdir())),
    }


def _each(
    of: Callable[[Iterable[int]], float], measurements: Sequence[dict[str, dict[str, int]]], name: str
) -> dict[str, int]:
    """Return the median, or the least, of each thing at some measurements of a worker."""
    found = [each[name] for each in measurements]
    return {what: int(of([each[what] for each in found])) for what in found[0]}


def _shortened(reason: str) -> str:
    for words in ("since about", "it cannot be reached at", "process ("):
        reason = reason.partition(words)[0]
    return reason[:110]


def main(arguments: Sequence[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser("python -m tests.soak.failures", description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0, help="how long (default: 10)")
    parser.add_argument("--seed", type=int, default=0, help="of what goes wrong when (default: 0)")
    parser.add_argument("--tcp", action="store_true", help="over TCP, and connections are reset as well")
    options = parser.parse_args(arguments)
    server = ForkServer.start(worker_main)
    try:
        with tempfile.TemporaryDirectory(prefix="failures-") as folder:
            runner = RunWorkers(server, Path(folder))
            try:
                driver = Driver(runner, options.seed, options.minutes, tcp=options.tcp)
                try:
                    driver.run()
                    wrong = driver.end()
                finally:
                    print(driver.table())
            except WorkersFailed as failure:
                wrong = [f"{each.worker} {each.reason}\n{each.details[-4000:]}" for each in failure.failures]
                for log in sorted(Path(folder).glob("*.log")):
                    print(f"the log of {log.stem}:\n{log.read_text()[-20000:]}")
            with contextlib.suppress(WorkersFailed):
                runner.close()
    finally:
        server.stop()
    print(*wrong, sep="\n")
    print(f"{len(wrong)} things are wrong")
    return 1 if wrong else 0


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main())
