"""``farcall top`` in a terminal."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import pytest

from tests.group.farcall.test_hangs import job_of
from tests.support.terminal import Terminal
from tests.support.workers import RunWorkers, Worker

pytestmark = [pytest.mark.processes, pytest.mark.timeout(120)]

ROOT = Path(__file__).resolve().parents[3]


def wait_for_the_end(worker: Worker) -> None:
    with worker.group():
        worker.report("joined")
        worker.wait_for("end")


def test_table_of_workers_is_sorted_by_the_key_that_is_pressed(run_workers: RunWorkers) -> None:
    workers = run_workers.start(wait_for_the_end, 2, time_limit=100.0)
    workers.wait_for("joined")
    job = job_of(workers)
    assert job is not None
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "farcall", "top", "--job", job.id]
    with Terminal(command, 80, environment) as terminal:
        terminal.read_until(r"worker0 .* running .*\r\n.*worker1 [\s\S]*q quits", 60)
        assert f"job {job.id}" in terminal.printed
        assert "n=name" in terminal.printed
        before = len(terminal.printed)
        workers[1].kill()
        terminal.read_until(r"worker1 .* dead ", 60)
        terminal.type("s")  # by state
        terminal.read_until(r"worker1 .* dead .*\r\n.*worker0 .* running ", 60)
        assert len(terminal.printed) > before
        terminal.type("q")
        assert terminal.end(60) == 0
        assert re.search(r"\x1b\[\?1049l", terminal.printed)  # the screen from before is shown again
    workers[0].kill()
