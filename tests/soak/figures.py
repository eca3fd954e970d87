"""The table of figures: how soon what fails is noticed, what is not taken for a failure, and what it costs to
be idle.

::

    python -m tests.soak.figures
    python -m tests.soak.figures --only killed idle --workers 64

Each line says what was measured, and the bar. Timings are worth what the machine is at that time: on one
with more to do than it has cores, see how late a sleeping thread wakes up, which is measured along.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import select
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, Final

import torch

import rpc
from rpc.errors import WorkerLostError
from rpc.group.link import LinkState
from rpc.runtime.current import current_agent
from tests.support.fork_server import ForkServer
from tests.support.serving import wait_at_gate
from tests.support.streams import until
from tests.support.workers import RunWorkers, Worker, WorkerProcess, WorkersFailed, worker_main

KILLED_BAR: Final = 0.05
LOST_AFTER: Final = 5.0
HELD_SECONDS: Final = 25.0
HELD_BOUND: Final = 60.0
IDLE_BAR: Final = 0.001
"""Of a CPU, for each agent."""
IDLE_SECONDS: Final = 30.0
PER_WORKER: Final = 0.15
"""GiB that a worker takes at most which was forked from a process that has PyTorch."""

Line = tuple[str, str, str, bool]
"""What, how much, the bar, and whether it is kept."""


def serve_until_told(worker: Worker, **options: Any) -> None:
    """A worker that does what others ask; the test tells it when to leave."""
    worker.join(**options)
    worker.report("joined")
    worker.wait_for("leave")
    rpc.shutdown(graceful=False)


def _late() -> float:
    """How much longer than asked a short sleep takes, in the median."""
    late = []
    for _ in range(50):
        begun = time.monotonic()
        time.sleep(0.005)
        late.append(time.monotonic() - begun - 0.005)
    return statistics.median(late)


# ---- who is gone


def wait_and_say_when(worker: Worker, **options: Any) -> None:
    """Waits for the second worker, again and again, and says when it hears that it is gone."""
    worker.join(rpc_timeout=0, **options)
    worker.report("joined")
    name = worker.wait_for("whom")
    future = rpc.rpc_async(name, wait_at_gate)
    worker.report("waits")
    try:
        future.wait()
    except WorkerLostError as error:
        worker.report("lost", (time.monotonic(), str(error)))
    rpc.shutdown(graceful=False)


def noticed(
    run_workers: RunWorkers, how: Callable[[WorkerProcess], None], **options: Any
) -> tuple[float, float, str]:
    """When it was begun, and when the other hears, and what."""
    workers = run_workers.start(
        [
            lambda worker: wait_and_say_when(worker, **options),
            lambda worker: serve_until_told(worker, rpc_timeout=0, **options),
        ],
        time_limit=120,
    )
    workers.wait_for("joined")
    workers[0].tell("whom", "worker1")
    workers[0].wait_for("waits")
    workers[1].wait_for("at the gate")
    begun = time.monotonic()
    how(workers[1])
    when, text = workers[0].wait_for("lost")
    workers[1].kill()
    workers.results()
    return begun, when, text


def killed(run_workers: RunWorkers) -> list[Line]:
    """``kill -9``, from the signal, and from when the kernel has ended the process."""
    late, times, beyond = _late(), [], []
    ended: list[float] = []

    def kill(worker: WorkerProcess) -> None:
        process = os.pidfd_open(worker.pid)
        worker.kill()
        select.select([process], [], [])
        ended.append(time.monotonic())
        os.close(process)

    for _ in range(20):
        begun, when, _ = noticed(run_workers, kill)
        times.append(when - begun)
        beyond.append(when - ended[-1])
    return [
        (
            f"kill -9 is noticed {after} (min / median / max of 20)",
            f"{' / '.join(_ms(each) for each in (min(some), statistics.median(some), max(some)))}{more}",
            f"{_ms(KILLED_BAR)} in the median",
            statistics.median(some) < KILLED_BAR,
        )
        for after, some, more in (
            ("after", times, f" (a sleeper is {_ms(late)} late)"),
            ("beyond what the kernel takes to end the process", beyond, ""),
        )
    ]


def stopped(run_workers: RunWorkers) -> list[Line]:
    """``SIGSTOP``, of a worker from which something is awaited."""
    begun, when, text = noticed(run_workers, lambda worker: worker.stop(), lost_after=LOST_AFTER)
    took = when - begun
    kept = took < LOST_AFTER + 0.5 and "is stopped" in text
    return [
        (
            f"SIGSTOP, lost_after {LOST_AFTER:g} s, is noticed after",
            f"{took:.2f} s",
            f"{LOST_AFTER:g} s",
            kept,
        )
    ]


# ---- who is not


def hold_interpreter(seconds: float) -> str:
    """A call into C that does not let go of the interpreter."""
    ctypes.PyDLL(None).usleep(int(seconds * 1e6))
    return "done"


def call_who_holds(worker: Worker) -> str:
    with worker.group(rpc_timeout=0, lost_after=HELD_BOUND):
        if worker.rank:
            return ""
        begun = time.monotonic()
        said = rpc.rpc_sync("worker1", hold_interpreter, args=(HELD_SECONDS,))
        return f"{said} after {time.monotonic() - begun:.1f} s"


def held(run_workers: RunWorkers) -> list[Line]:
    """A C function that holds the interpreter."""
    said = run_workers(call_who_holds, 2, time_limit=120)[0]
    what = f"a call into C holds the interpreter for {HELD_SECONDS:g} s, lost_after {HELD_BOUND:g} s"
    return [(what, said, "its answer", said.startswith("done"))]


def first_contact(worker: Worker) -> str:
    with worker.group(rpc_timeout=0):
        if worker.rank:
            worker.report("joined")
            worker.wait_for("leave")
            return ""
        worker.wait_for("call")
        begun = time.monotonic()
        future = rpc.rpc_async("worker1", torch.add, args=(torch.ones(1), 1))
        peer = current_agent().group.peers.find("worker1")
        until(lambda: peer.link.state is LinkState.HANDSHAKING)
        worker.report("calling")
        assert future.wait() == 2
        return f"answered after {time.monotonic() - begun:.1f} s"


def contacted(run_workers: RunWorkers) -> list[Line]:
    """A worker that is stopped when it is called for the first time, for 25 s."""
    workers = run_workers.start(first_contact, 2, time_limit=120)
    workers[1].wait_for("joined")
    workers[1].stop()
    workers[0].tell("call")
    workers[0].wait_for("calling")
    time.sleep(HELD_SECONDS)
    workers[1].resume()
    workers[1].tell("leave")
    said = workers.results()[0]
    return [(f"first contact with a worker that is stopped for {HELD_SECONDS:g} s", said, "its answer", True)]


# ---- idle agents


def greet_all(worker: Worker) -> None:
    """Be connected with all others, then do nothing until told."""
    worker.join(rendezvous_timeout=200.0)
    for rank in range(worker.rank):
        rpc.rpc_sync(rank, int)
    worker.report("greeted")
    worker.wait_for("leave")
    rpc.shutdown(graceful=False)


def idle(run_workers: RunWorkers, workers: int) -> list[Line]:
    """CPU time of agents that are all connected with each other and have nothing to do."""
    group = run_workers.start(greet_all, workers, time_limit=600)
    group.wait_for("greeted")
    time.sleep(5)  # what was freed is given back, what was delayed is acknowledged
    begun, before = time.monotonic(), [_cpu_seconds(each.pid) for each in group]
    time.sleep(IDLE_SECONDS)
    took = time.monotonic() - begun
    shares = [(_cpu_seconds(each.pid) - spent) / took for each, spent in zip(group, before, strict=True)]
    group.tell("leave")
    group.results()
    said = f"{100 * statistics.mean(shares):.3f} % of a CPU each, {100 * max(shares):.3f} % at most"
    what = f"idle agents, {workers} in a process each, all connected, for {IDLE_SECONDS:g} s"
    return [(what, said, f"{100 * IDLE_BAR:g} % each", statistics.mean(shares) < IDLE_BAR)]


def _cpu_seconds(pid: int) -> float:
    """Of all threads, to the nanosecond."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) / 1e9


def _room_for(workers: int) -> int:
    """How many workers there is memory for now, up to so many."""
    fields = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    free = int(fields["MemAvailable"].split()[0]) / (1 << 20)
    return max(2, min(workers, int((free - 2) / PER_WORKER)))


# ---- the command


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:.1f} ms"


FIGURES: Final = {"killed": killed, "stopped": stopped, "held": held, "contacted": contacted}


def main(arguments: Sequence[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser("python -m tests.soak.figures", description=__doc__)
    parser.add_argument("--only", nargs="+", choices=[*FIGURES, "idle"], help="which (default: all)")
    parser.add_argument(
        "--workers", type=int, default=64, help="how many are idle, where memory allows (default: 64)"
    )
    options = parser.parse_args(arguments)
    chosen = options.only or [*FIGURES, "idle"]
    wrong = 0
    server = ForkServer.start(worker_main)
    try:
        with tempfile.TemporaryDirectory(prefix="figures-") as folder:
            runner = RunWorkers(server, Path(folder))
            for name in chosen:
                try:
                    lines = (
                        FIGURES[name](runner) if name in FIGURES else idle(runner, _room_for(options.workers))
                    )
                except WorkersFailed as failure:
                    lines = [(name, str(failure)[:3000], "", False)]
                for what, figure, bar, kept in lines:
                    wrong += not kept
                    print(f"{what}: {figure}; bar: {bar}{'' if kept else '  MISSED'}", flush=True)
            runner.close()
    finally:
        server.stop()
    return 1 if wrong else 0


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(import_module("tests.soak.figures").main())  # where workers find all of this
