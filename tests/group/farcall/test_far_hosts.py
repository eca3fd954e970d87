"""Workers on other hosts are seen through the workers of the job, by whoever looks on one host."""

from __future__ import annotations

import os
import socket
import threading
import time
from pathlib import Path

import pytest

import rpc
from farcall.observe.format.jobs import jobs
from farcall.observe.reading.gathered import gather
from farcall.observe.reading.reader import read_job
from farcall.observe.why.analysis import Report, analyze
from rpc.lifecycle import own_backend
from tests.support.workers import RunWorkers, Worker

pytestmark = pytest.mark.processes

EVENT = threading.Event()


def wait_here() -> None:
    EVENT.wait()


def be_on_host(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each rank on a host of its own: with another name, identity, and folder for jobs."""
    name = f"host{worker.rank}"
    monkeypatch.setenv("FARCALL_JOBS_DIR", str(worker.folder / name))
    monkeypatch.setattr(own_backend, "host_identity", lambda: name)
    monkeypatch.setattr(socket, "gethostname", lambda: name)


def hang(worker: Worker) -> None:
    with pytest.MonkeyPatch.context() as monkeypatch:
        be_on_host(worker, monkeypatch)
        worker.join(listen="127.0.0.1:0")
        worker.report("joined")
        if worker.rank == 0:
            rpc.rpc_sync("worker1", wait_here, timeout=0)
        worker.wait_for("nothing")


def seen_from(folder: Path, host: str) -> Report | None:
    """What is found out on a host."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(socket, "gethostname", lambda: host)
        for job in jobs(folder / host):
            gather(job.path, read_job(job, gathered=False))
            return analyze(read_job(job))
    return None


def names_culprit(report: Report | None) -> bool:
    if report is None or not report.findings:
        return False
    culprit = report.findings[0].culprit
    return (culprit.worker, culprit.host, culprit.kind) == ("worker1", "host1", "event")


@pytest.mark.nightly
def test_culprit_on_another_host_is_named(run_workers: RunWorkers, tmp_path: Path) -> None:
    workers = run_workers.start(hang, 2, time_limit=60.0)
    workers.wait_for("joined")
    until = time.monotonic() + 25
    report = None
    while time.monotonic() < until and not names_culprit(report):
        report = seen_from(tmp_path, "host0")
    assert report is not None
    assert names_culprit(report), report.to_json()
    assert [each.host for each in report.job] == ["host0", "host1"]
    for file in (tmp_path / "host0").rglob("*.gathered"):
        assert os.stat(file).st_mode & 0o777 == 0o600
    for worker in workers:
        worker.kill()


@pytest.mark.nightly
def test_worker_on_another_host_counts_for_metrics(run_workers: RunWorkers, tmp_path: Path) -> None:
    workers = run_workers.start(hang, 2, time_limit=60.0)
    workers.wait_for("joined")
    until = time.monotonic() + 25
    counting: dict[str, bool] = {}
    while time.monotonic() < until and not counting.get("worker1"):
        with pytest.MonkeyPatch.context() as monkeypatch:
            monkeypatch.setattr(socket, "gethostname", lambda: "host0")
            (job,) = jobs(tmp_path / "host0")
            gather(job.path, read_job(job, gathered=False), count=True)
            parts = {each.name: each.snapshot.get("counters") for each in read_job(job)}
            counting = {name: bool(part) and part["on"] for name, part in parts.items() if part}
    assert counting == {"worker0": False, "worker1": True}
    for worker in workers:
        worker.kill()
