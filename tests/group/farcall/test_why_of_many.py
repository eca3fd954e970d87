"""``farcall why`` answers soon for a job of many workers, while it hangs and when all are dead."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import time
from typing import Any

import pytest

import rpc
from farcall.observe.installation import observer
from tests.group.farcall.test_hangs import job_of
from tests.support.workers import RunWorkers, Worker

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(400)]

WORKERS = 64
MAX_SECONDS = 2.0
"""Maximum CPU time of the command, in seconds: on a machine that does nothing else it takes little more."""


def wait_in_a_barrier(worker: Worker) -> None:
    with worker.group(rendezvous_timeout=200.0, lost_after=200.0):
        rpc.rpc_sync(f"worker{(worker.rank + 1) % worker.world_size}", len, args=("abc",))
        found = observer()
        assert found is not None
        found.look_now(60.0)
        worker.report("meets")
        if worker.rank == 1:
            worker.wait_for("nothing")
        rpc.barrier()


def ask_why(job: str) -> tuple[Any, float, float]:
    """The first finding, and the CPU time and the time that the command took."""
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", "farcall", "why", "--job", job, "--json"],
        check=True,
        capture_output=True,
        text=True,
        env=os.environ,
    )
    after, seconds = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic() - began
    used = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    found = json.loads(done.stdout)
    assert len(found["workers"]) == WORKERS
    return found["findings"][0] if found["findings"] else None, used, seconds


def test_why_of_64_workers_takes_2_seconds(run_workers: RunWorkers) -> None:
    workers = run_workers.start(wait_in_a_barrier, WORKERS, time_limit=300.0)
    workers.wait_for("meets")
    job = job_of(workers)
    assert job is not None
    found = None
    while found is None or found["waiting"] < WORKERS - 1:
        found, used, seconds = ask_why(job.id)
    print(f"while it hangs: {used:.2f} s of CPU time, {seconds:.2f} s")
    assert found["nodes"][0]["worker"] == "worker1"
    assert used < MAX_SECONDS
    for worker in workers:  # otherwise those that are killed later may see that others are gone
        worker.stop()
    for worker in workers:
        worker.kill()
    found, used, seconds = ask_why(job.id)
    print(f"when all are dead: {used:.2f} s of CPU time, {seconds:.2f} s")
    assert found["nodes"][0]["worker"] == "worker1"
    assert used < MAX_SECONDS
