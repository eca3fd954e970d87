"""Traces of groups: a program's, a running job's, and a whole run's."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import dist_autograd
import rpc
from dist_optim import DistributedOptimizer
from tests.support.chrome_trace import read_trace
from tests.support.worker_context import Worker
from tests.support.workers import RunWorkers

X = torch.ones(2)
STEPS = 3
PAUSE_SECONDS = 0.005
"""Time between two calls of a job that runs: to write and read a trace of all that it can make takes long."""


def events_of(path: Path, phase: str = "X") -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(path.read_text())["traceEvents"]
    return [event for event in found if event["ph"] == phase]


def calls_of(path: Path) -> Counter[int]:
    """How many calls of ``torch.add`` each process has made."""
    return Counter(event["pid"] for event in events_of(path) if event["name"] == "call torch.add")


def train(worker: Worker) -> None:
    with worker.group():
        if worker.rank:
            return
        layer = rpc.remote("worker1", nn.Linear, args=(2, 1))
        parameters = rpc.rpc_sync("worker1", references_of, args=(layer,))
        optimizer = DistributedOptimizer(torch.optim.SGD, parameters, lr=0.1)
        with rpc.trace("run.json"):
            for _ in range(STEPS):
                with dist_autograd.context() as context:
                    loss = rpc.rpc_sync("worker1", forward, args=(layer, X))
                    dist_autograd.backward(context, [loss])
                    optimizer.step(context)
            rpc.rpc_async("worker1", torch.add, args=(X, 1)).wait()


def references_of(layer: Any) -> list[Any]:
    return [rpc.RRef(each) for each in layer.local_value().parameters()]


def forward(layer: Any, x: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = layer.local_value()(x).sum()
    return result


def test_a_programs_trace_has_the_spans_of_all_workers_and_arrows_between_them(
    run_workers: RunWorkers, tmp_path: Path
) -> None:
    run_workers(train, 2)
    path = tmp_path / "run.json"
    slices = events_of(path)
    count = Counter((event["pid"], event["name"]) for event in slices)
    assert count[1, "call forward"] == count[2, "forward"] == count[2, "optimizer step"] == STEPS
    assert count[1, "serialize forward"] == count[2, "deserialize forward"] == STEPS
    assert count[1, "distributed backward"] == STEPS
    assert count[2, "gradients"] == STEPS
    runs = [event for event in slices if event["name"] == "forward"]
    began = {event["id"]: event for event in events_of(path, "s")}
    ended = {event["id"] for event in events_of(path, "f")}
    arrived = [event for event in events_of(path, "t") if event["pid"] == 2]
    for run in runs:
        (arrow,) = [
            each
            for each in arrived
            if each["tid"] == run["tid"] and run["ts"] <= each["ts"] <= run["ts"] + run["dur"]
        ]
        assert began[arrow["id"]]["pid"] == 1
        assert began[arrow["id"]]["ts"] <= arrow["ts"]
        assert arrow["id"] in ended
    transfers = [event for event in events_of(path, "b") if event["cat"] == "transfer"]
    requests = {
        event["args"]["call"]: event for event in transfers if event["name"] == "transfer of a request"
    }
    assert all(requests[run["args"]["call"]]["args"]["bytes"] > 0 for run in runs)
    read_trace(path)


def rounds(worker: Worker) -> None:
    import os

    os.environ["FARCALL_TRACE"] = "whole.json"
    with worker.group():
        rpc.rpc_sync(f"worker{1 - worker.rank}", torch.add, args=(X, worker.rank))


def test_a_whole_run_is_traced_if_the_environment_says_so(run_workers: RunWorkers, tmp_path: Path) -> None:
    run_workers(rounds, 2)
    names = [each["args"]["name"] for each in events_of(tmp_path / "whole.json", "M") if not each["tid"]]
    assert [name.partition(" ")[0] for name in names] == ["worker0", "worker1"]
    calls = Counter(
        event["pid"] for event in events_of(tmp_path / "whole.json") if event["name"] == "call torch.add"
    )
    assert calls == {1: 1, 2: 1}


def busy(worker: Worker) -> None:
    import os

    os.environ["FARCALL_JOBS_DIR"] = str(worker.folder / "jobs")
    with worker.group():
        worker.report("ready")
        while not (worker.folder / "traced").exists():
            rpc.rpc_sync(f"worker{1 - worker.rank}", torch.add, args=(X, 1))
            threading.Event().wait(PAUSE_SECONDS)


def test_a_job_that_runs_is_traced_from_outside(
    run_workers: RunWorkers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    workers = run_workers.start(busy, 2)
    for each in workers:
        each.wait_for("ready")
    monkeypatch.setenv("FARCALL_JOBS_DIR", str(tmp_path / "jobs"))
    try:
        done = subprocess.run(
            [sys.executable, "-m", "farcall", "trace", "--seconds", "2", "-o", str(tmp_path / "live.json")],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
    finally:
        (tmp_path / "traced").touch()
        for each in workers:
            each.result()
    assert done.returncode == 0, done.stderr
    assert "2 of 2 workers" in done.stdout
    calls = Counter(
        event["pid"] for event in events_of(tmp_path / "live.json") if event["name"] == "call torch.add"
    )
    assert set(calls) == {1, 2}
    read_trace(tmp_path / "live.json")
