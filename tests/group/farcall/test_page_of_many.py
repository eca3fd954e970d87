"""A real group of 128 workers, its page open and ``farcall why`` asked: both answer, and the job goes on."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

import rpc
from farcall.observe.format.jobs import JobFolder
from farcall.observe.reading.reader import read_worker
from tests.group.farcall.test_hangs import job_of
from tests.group.farcall.test_page import events
from tests.support.browser import served_page
from tests.support.workers import RunWorkers, Worker

pytest.importorskip("aiohttp")
pytestmark = [pytest.mark.processes, pytest.mark.nightly, pytest.mark.timeout(590)]

WORKERS = 128
WINDOW_SECONDS = 10.0
"""Time over which calls are counted, in seconds."""

MIN_SHARE = 0.6
"""Minimum rate of calls with the page open and ``why`` asked, as a share of that without: the page takes a
tenth of a core at most, and ``why`` some seconds of CPU time.
"""


def call_the_next(worker: Worker) -> None:
    with worker.group(rendezvous_timeout=400.0, lost_after=400.0):
        worker.report("meets")
        following = f"worker{(worker.rank + 1) % worker.world_size}"
        while not (worker.folder / "over").exists():
            rpc.rpc_sync(following, len, args=("abc",))
            time.sleep(0.05)


def calls_made(job: JobFolder) -> int:
    beats = [read_worker(file).beat for file in job.state_files()]
    return sum(each.calls for each in beats if each is not None)


def rate(job: JobFolder) -> float:
    """Calls per second over a window."""
    before, began = calls_made(job), time.monotonic()
    time.sleep(WINDOW_SECONDS)
    return (calls_made(job) - before) / (time.monotonic() - began)


def test_page_and_why_of_128_workers_do_not_stop_them(run_workers: RunWorkers, tmp_path: Path) -> None:
    workers = run_workers.start(call_the_next, WORKERS, time_limit=500.0)
    workers.wait_for("meets")
    job = job_of(workers)
    assert job is not None
    look_at(job, tmp_path)
    (tmp_path / "over").touch()
    workers.results()


def look_at(job: JobFolder, folder: Path) -> None:
    before = rate(job)
    with served_page(folder, job.id) as address:
        shown = events(address)
        assert len(next(shown)["view"]["workers"]) == WORKERS
        command = [sys.executable, "-m", "farcall", "why", "--job", job.id, "--json"]
        asked = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ)
        watched = rate(job)
        view = next(shown)["view"]
        said = json.loads(asked.communicate(timeout=120)[0])
    after = rate(job)
    share = watched / min(before, after)
    print(f"calls per second: {before:.0f}, with the page open {watched:.0f}, {after:.0f}: {share:.2f}")
    assert len(said["workers"]) == WORKERS
    assert view["job"]["living"] == WORKERS
    # 128 processes on few cores: one that had no core for 3 s counts as frozen.
    assert {each["state"] for each in view["workers"]} <= {"running", "frozen"}
    assert share > MIN_SHARE
