"""``farcall why`` names the culprit of each hang and its line, while it lasts and when all are dead."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from farcall.observe.format.jobs import JobFolder, jobs, jobs_folder
from farcall.observe.reading.reader import read_job
from farcall.observe.why.analysis import Report, analyze
from farcall.observe.why.words import in_words
from tests.support.hangs import HANGS, Hang
from tests.support.workers import RunWorkers, Workers

pytestmark = pytest.mark.processes

PATIENCE = 25.0
"""Maximum time until a hang is explained, in seconds."""

SILENT = 4.0
"""Time after which a worker is seen to have been silent before its end, in seconds."""


def job_of(workers: Workers) -> JobFolder | None:
    """The job of these workers."""
    pids = {str(worker.pid) for worker in workers}
    for job in jobs(jobs_folder(os.environ)):
        if any(file.name.split(".")[-3] in pids for file in job.state_files()):
            return job
    return None


def names(report: Report, hang: Hang, kinds: tuple[str, ...]) -> bool:
    """Whether the first finding names the culprit and its line."""
    if not report.findings:
        return False
    first = report.findings[0]
    return first.kind in kinds and any(
        node.worker == hang.worker
        and node.place is not None
        and (Path(node.place.file).name, node.place.line) == hang.culprit
        for node in first.nodes
    )


def is_settled(report: Report, hang: Hang) -> bool:
    """Whether all is seen: if a worker is silent before the others, that must have lasted."""
    beats = [each.beat.wall for each in report.job if each.name == hang.worker and each.beat is not None]
    return not hang.dead_kinds or not report.job.living or time.time() - beats[0] > SILENT


def until_named(workers: Workers, hang: Hang, kinds: tuple[str, ...]) -> Report:
    deadline = time.monotonic() + PATIENCE
    report = None
    while time.monotonic() < deadline:
        job = job_of(workers)
        if job is not None:
            report = analyze(read_job(job))
            if names(report, hang, kinds) and is_settled(report, hang):
                return report
        workers.server_news()
        time.sleep(0.1)
    shown = "nothing" if report is None else "\n".join(in_words(report, everything=True))
    pytest.fail(f"{hang.name} is not explained by {hang.culprit}:\n{shown}")


QUICK = [each for each in HANGS.values() if each.quick]
OTHERS = [each for each in HANGS.values() if not each.quick]


def name_of(hang: Hang) -> str:
    return hang.name


def check(run_workers: RunWorkers, hang: Hang) -> None:
    workers = run_workers.start(hang, hang.size, time_limit=90.0)
    report = until_named(workers, hang, hang.kind)
    assert "\n".join(in_words(report))
    for worker in workers:
        worker.signal(signal.SIGSTOP)  # none may see that another has ended
    for worker in workers:
        worker.kill()
    until_named(workers, hang, hang.dead_kinds or hang.kind)


@pytest.mark.parametrize("hang", QUICK, ids=name_of)
def test_culprit_is_named(run_workers: RunWorkers, hang: Hang) -> None:
    check(run_workers, hang)


@pytest.mark.nightly
@pytest.mark.parametrize("hang", OTHERS, ids=name_of)
def test_culprit_of_any_hang_is_named(run_workers: RunWorkers, hang: Hang) -> None:
    check(run_workers, hang)
