"""Many workers on few cores: they start, call each other, reduce, and leave; nobody may be lost.

::

    python -m tests.soak.crowd --workers 64 --load 100
    python -m tests.soak.crowd --workers 128 --tcp

``--load`` is the number of processes that compute beside the workers for the whole run. Each line says how
long a step took until the last worker had finished it; the last one, how much memory a worker takes (its
private pages).
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import rpc
import spmd
from tests.support.fork_server import ForkServer
from tests.support.workers import RunWorkers, Worker, Workers, WorkersFailed, worker_main

STEPS = ("start", "call all pairs", "form a process group", "all-reduce", "leave")


def take_part(worker: Worker, patience: float, *, tcp: bool) -> float:
    """Take each step when the test says so; returns the memory of this worker in bytes."""
    options: dict[str, Any] = {"transports": ("tcp",)} if tcp else {}
    worker.join(rendezvous_timeout=patience, rpc_timeout=patience, **options)
    worker.report("start")
    worker.wait_for("call all pairs")
    others = range(worker.world_size)
    futures = [rpc.rpc_async(rank, torch.add, args=(torch.tensor(rank), worker.rank)) for rank in others]
    found = [int(future.wait()) for future in futures]
    assert found == [rank + worker.rank for rank in others]
    worker.report("call all pairs")
    worker.wait_for("form a process group")
    spmd.init_process_group()
    worker.report("form a process group")
    worker.wait_for("all-reduce")
    total = torch.full((10_000,), float(worker.rank))
    dist.all_reduce(total)
    assert total.eq(sum(others)).all()
    worker.report("all-reduce")
    worker.wait_for("leave")
    memory = _private_bytes()
    dist.destroy_process_group()
    rpc.shutdown(timeout=patience)
    worker.report("leave")
    return memory


def _private_bytes() -> float:
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return 1024.0 * sum(int(line.split()[1]) for line in lines if line.startswith("Private_"))


@contextlib.contextmanager
def load(processes: int, seconds: float) -> Iterator[None]:
    """Processes that compute, until the block ends, this process ends, or ``seconds`` have passed. They begin
    when all of them are there: this process would get no core to start the others.
    """
    parent, deadline = os.getpid(), time.monotonic() + seconds
    gate, opener = os.pipe()
    children = []
    for _ in range(processes):
        child = os.fork()
        if child == 0:
            os.close(opener)
            os.read(gate, 1)
            while time.monotonic() < deadline and os.getppid() == parent:
                sum(range(100_000))
            os._exit(0)
        children.append(child)
    os.close(gate)
    os.close(opener)
    try:
        yield
    finally:
        for child in children:
            os.kill(child, 9)
        for child in children:
            os.waitpid(child, 0)


def run(group: Workers) -> None:
    """Have all workers take all steps, and print how long each took."""
    for step in STEPS:
        begun = time.monotonic()
        group.tell(step)
        group.wait_for(step)
        print(f"{step}: {time.monotonic() - begun:.1f} s", flush=True)
    memory = group.results()
    print(f"memory: {sum(memory) / len(memory) / (1 << 20):.0f} MiB a worker", flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser("python -m tests.soak.crowd", description=__doc__)
    parser.add_argument("--workers", type=int, default=64)
    parser.add_argument("--load", type=int, default=0, help="number of processes that compute (default: 0)")
    parser.add_argument("--tcp", action="store_true", help="connect by TCP instead of Unix sockets")
    parser.add_argument("--seconds", type=float, default=900.0, help="limit for the whole run (default: 900)")
    options = parser.parse_args(arguments)
    server = ForkServer.start(worker_main)
    try:
        with tempfile.TemporaryDirectory(prefix="crowd-") as folder:
            runner = RunWorkers(server, Path(folder))
            with load(options.load, options.seconds):
                group = runner.start(
                    lambda worker: take_part(worker, options.seconds, tcp=options.tcp),
                    options.workers,
                    time_limit=options.seconds,
                )
                run(group)
            runner.close()
    except WorkersFailed as failure:
        print(str(failure)[:20_000])
        return 1
    finally:
        server.stop()
    return 0


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(import_module("tests.soak.crowd").main())  # where workers find all of this
