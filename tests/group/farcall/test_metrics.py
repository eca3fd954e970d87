"""``farcall metrics``: what real workers count, at one address behind a token."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from prometheus_client.parser import text_string_to_metric_families

import rpc
from farcall.observe.installation import observer
from rpc.runtime.current import current_agent
from tests.group.farcall.test_hangs import job_of
from tests.support.serving import WAIT_SECONDS
from tests.support.workers import RunWorkers, Worker

pytestmark = [pytest.mark.processes, pytest.mark.timeout(180)]

ROOT = Path(__file__).resolve().parents[3]

Sample = tuple[str, frozenset[tuple[str, str]]]
Samples = dict[Sample, float]


def sample(name: str, worker: int, **labels: str) -> Sample:
    return name, frozenset({"worker": f"worker{worker}", **labels}.items())


COUNTED = (
    sample("farcall_function_calls_total", 0, function="torch.add", outcome="ok"),
    sample("farcall_function_requests_total", 1, function="torch.add", outcome="ok"),
    sample("farcall_function_requests_total", 1, function="fail", outcome="failed"),
)
"""What is waited for: a callee counts requests when it has answered them."""


def fail() -> None:
    raise LookupError("as it should")


def call_when_counted(worker: Worker) -> None:
    with worker.group():
        place = f"{worker.init_method}-c10d"
        dist.init_process_group("farcall", init_method=place, rank=worker.rank, world_size=worker.world_size)
        found = observer()
        assert found is not None
        assert found.look_now(WAIT_SECONDS)
        worker.report("joined")
        while not current_agent().extensions["counters"].observed()["on"]:
            assert found.next_look(30.0)
        dist.barrier()  # both count
        if worker.rank == 0:
            for _ in range(5):
                rpc.rpc_sync("worker1", torch.add, args=(torch.ones(2), 1))
            with pytest.raises(LookupError):
                rpc.rpc_sync("worker1", fail)
            rpc.rpc_sync("worker1", torch.numel, args=(torch.ones(1 << 18),))
        dist.all_reduce(torch.ones(1000))
        assert found.look_now(WAIT_SECONDS)
        worker.report("done")
        worker.wait_for("end")
        dist.destroy_process_group()


def scrape(address: str, token: str | None) -> Samples:
    headers = {} if token is None else {"Authorization": f"Bearer {token}"}
    with urllib.request.urlopen(urllib.request.Request(address, headers=headers), timeout=30) as answer:
        text = answer.read().decode()
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_endpoint_has_what_all_workers_count(run_workers: RunWorkers) -> None:
    workers = run_workers.start(call_when_counted, 2, time_limit=150.0)
    workers.wait_for("joined")
    job = job_of(workers)
    assert job is not None
    command = [sys.executable, "-m", "farcall", "metrics", "--job", job.id]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as endpoint:
        try:
            assert endpoint.stdout is not None
            said = endpoint.stdout.readline()
            address = next(word for word in said.split() if word.startswith("http://127.0.0.1:")).rstrip(",")
            file = Path(said.split()[-1])
            assert file.stat().st_mode & 0o777 == 0o600
            token = file.read_text()
            for wrong in (None, "", token[:-1], "\u00e9"):
                with pytest.raises(urllib.error.HTTPError, match="401"):
                    scrape(address, wrong)
            scrape(address, token)  # has the workers count
            workers.wait_for("done")
            while [(found := scrape(address, token)).get(each) for each in COUNTED] != [5, 5, 1]:
                pass
        finally:
            endpoint.send_signal(signal.SIGINT)
    assert endpoint.returncode == 0
    workers.tell("end")
    workers.results()

    def value(name: str, worker: int, **labels: str) -> float:
        return found[sample(name, worker, **labels)]

    assert value("farcall_function_calls_total", 0, function="fail", outcome="failed") == 1
    assert value("farcall_function_call_seconds_count", 0, function="torch.add") == 5
    assert value("farcall_request_queued_seconds_count", 1) >= 7
    assert value("farcall_worker_up", 0) == value("farcall_worker_up", 1) == 1
    assert value("farcall_connected_peers", 0) == 1
    for worker in (0, 1):
        assert value("farcall_collectives_total", worker, operation="all_reduce", outcome="ok") == 1
        assert value("farcall_collective_bytes_total", worker, operation="all_reduce") == 4000
    sent = sum(size for (name, _), size in found.items() if name == "farcall_sent_bytes_total")
    assert sent >= 4 << 18
