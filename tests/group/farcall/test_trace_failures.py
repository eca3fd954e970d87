"""Traces of jobs of which workers are stopped or killed, and traces that cannot be written."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import rpc
from farcall.observe.format.jobs import jobs
from farcall.observe.reading.reader import read_job
from tests.support.chrome_trace import read_trace
from tests.support.streams import until
from tests.support.workers import RunWorkers, Worker, WorkerProcess

STOPPED, KILLED = 2, 3
MAX_KIB = 2
"""Maximum size of a file on the disk that is full."""

PAUSE_SECONDS = 0.005
"""Time between two calls: to write a trace of all that a worker can make takes long."""


def serve_until_told(worker: Worker) -> None:
    """Worker 0 calls worker 1 until it is told to leave."""
    os.environ["FARCALL_JOBS_DIR"] = str(worker.folder / "jobs")
    with worker.group(dynamic=True):
        if worker.rank == 0:
            worker.report("ready")
            worker.wait_for("all are there")
            while not (worker.folder / "leave").exists():
                rpc.rpc_sync("worker1", torch.add, args=(torch.ones(2), 1))
                threading.Event().wait(PAUSE_SECONDS)
            worker.report("calls no more")
        else:
            worker.report("ready")
            worker.wait_for("leave")


LIMITED = f"""
import resource, sys
from farcall.cli import main
resource.setrlimit(resource.RLIMIT_FSIZE, ({MAX_KIB} << 10, {MAX_KIB} << 10))
sys.exit(main(sys.argv[1:]))
"""


def command(folder: Path, *, seconds: float, limited: bool = False) -> subprocess.Popen[str]:
    program = ["-c", LIMITED] if limited else ["-m", "farcall"]
    return subprocess.Popen(
        [sys.executable, *program, "trace", "--seconds", str(seconds), "-o", "live.json"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=folder,
        env=os.environ | {"FARCALL_JOBS_DIR": str(folder / "jobs")},
    )


def job_of(
    run_workers: RunWorkers, folder: Path, count: int
) -> tuple[list[WorkerProcess], Callable[[], object]]:
    """Workers that run, and what ends them."""
    started = run_workers.start(serve_until_told, count)
    workers = [started[rank] for rank in range(count)]
    for each in workers:
        each.wait_for("ready")
    until(lambda: sum(len(read_job(job).living) for job in jobs(folder / "jobs")) == count)
    workers[0].tell("all are there")

    def end() -> None:
        (folder / "leave").touch()
        workers[0].wait_for("calls no more")
        for each in workers[1:]:
            if not each.ended:
                each.tell("leave")

    return workers, end


def test_a_trace_lacks_workers_that_are_stopped_or_killed_and_names_them(
    run_workers: RunWorkers, tmp_path: Path
) -> None:
    workers, end = job_of(run_workers, tmp_path, 4)
    workers[STOPPED].stop()
    try:
        with command(tmp_path, seconds=2) as tracing:
            until(lambda: bool(list((tmp_path / "jobs").glob("*/trace.order"))))
            workers[KILLED].kill()
            said, errors = tracing.communicate(timeout=60)
    finally:
        workers[STOPPED].resume()
        end()
    assert tracing.returncode == 0, errors
    assert "2 of 4 workers" in said
    missing = [line.partition(": ")[2] for line in said.splitlines() if line.startswith("missing: ")]
    assert sorted((line.split()[0], line.partition(": ")[2]) for line in missing) == [
        ("worker2", "it is stopped"),
        ("worker3", "it has died"),
    ]
    trace = read_trace(tmp_path / "live.json")
    assert trace.metadata["missing"] == missing
    assert trace.counts()["worker0", "call torch.add"]
    assert trace.counts()["worker1", "torch.add"]


def test_a_trace_that_does_not_fit_on_the_disk_is_an_error_and_leaves_nothing(
    run_workers: RunWorkers, tmp_path: Path
) -> None:
    _, end = job_of(run_workers, tmp_path, 2)
    try:
        with command(tmp_path, seconds=1, limited=True) as tracing:
            _, errors = tracing.communicate(timeout=60)
    finally:
        end()
    assert tracing.returncode == 1
    assert "the trace cannot be written: " in errors
    assert "File too large" in errors
    assert not list(tmp_path.glob("*.json*"))
    assert not list(tmp_path.glob(".live.json*"))


def leave_no_room(worker: Worker) -> str:
    with worker.group():
        if worker.rank:
            return ""
        with pytest.raises(OSError, match="No such file or directory"), rpc.trace("missing/run.json"):
            rpc.rpc_sync("worker1", torch.add, args=(torch.ones(2), 1))
        with pytest.raises(ZeroDivisionError), rpc.trace("missing/run.json"):
            rpc.rpc_sync("worker1", divmod, args=(1, 0))
        return "went on"


def test_a_programs_trace_that_cannot_be_written_does_not_hide_its_own_error(run_workers: RunWorkers) -> None:
    assert run_workers(leave_no_room, 2)[0] == "went on"
