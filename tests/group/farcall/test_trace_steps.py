"""Traces of steps and of a whole run, read as a viewer reads them: what is in them is counted.

The same counts as queries for Perfetto's trace processor are in docs/observing.md.
"""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import dist_autograd
import rpc
import spmd
from dist_optim import DistributedOptimizer
from rpc import RRef
from tests.support.chrome_trace import ChromeTrace, read_trace
from tests.support.workers import RunWorkers, Worker

STEPS = 2
MICRO_BATCHES = 4
PARTS = STEPS * MICRO_BATCHES
X = torch.ones(8, 4)


class Stage(nn.Module):
    """Layers on a worker of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor | RRef[Tensor]) -> Tensor:
        x = x.to_here() if isinstance(x, RRef) else x
        result: Tensor = self.layer(x).relu()
        return result


def transfers(trace: ChromeTrace) -> Counter[tuple[str, str]]:
    """Number of requests that were transferred with arguments, by caller and callee."""
    found = [begin for begin, _ in trace.spans if begin["name"] == "transfer of a request"]
    return Counter(
        (each["args"]["caller"], trace.worker(each["pid"])) for each in found if each["args"]["bytes"] > 0
    )


def check_arrows_end_at_runs(trace: ChromeTrace) -> None:
    """Each arrow leads from a slice ``call f`` to the slice ``f``."""
    for arrow in trace.arrows.values():
        if [each["ph"] for each in arrow] == ["s", "t", "f"]:
            call, run, _ = (trace.slice_at(each)["name"] for each in arrow)
            assert call == f"call {run}" or run == "part of a distributed backward"


def run_pipeline(worker: Worker) -> None:
    """Worker 0 sends micro-batches through stages on workers 1 and 2."""
    with worker.group():
        if worker.rank:
            return
        stages = [rpc.remote(f"worker{rank}", Stage) for rank in (1, 2)]
        owned = [each for stage in stages for each in rpc.rpc_sync(stage.owner(), parameters_of, (stage,))]
        optimizer = DistributedOptimizer(torch.optim.SGD, owned, lr=0.1)
        with rpc.trace("run.json"):
            for _ in range(STEPS):
                step(stages, optimizer)


def parameters_of(stage: RRef[Stage]) -> list[RRef[Any]]:
    return [RRef(each) for each in stage.local_value().parameters()]


def step(stages: list[RRef[Stage]], optimizer: DistributedOptimizer) -> None:
    with dist_autograd.context() as context:
        first, second = stages
        outputs = [
            second.rpc_async().forward(first.remote().forward(part)) for part in X.chunk(MICRO_BATCHES)
        ]
        losses = [each.wait().sum() for each in outputs]
        dist_autograd.backward(context, [torch.stack(losses).sum()])
        optimizer.step(context)


def test_a_pipelines_step(run_workers: RunWorkers, tmp_path: Path) -> None:
    run_workers(run_pipeline, 3)
    trace = read_trace(tmp_path / "run.json")
    counts, ways = trace.counts(), trace.ways()
    for stage in ("worker1", "worker2"):
        assert counts[stage, "Stage.forward"] == counts[stage, "deserialize Stage.forward"] == PARTS
        assert counts[stage, "optimizer step"] == counts[stage, "LocalOptimizer.step"] == STEPS
        assert counts[stage, "part of a distributed backward"] == counts[stage, "gradients"] == STEPS
        # Micro-batches, the part of the backward, and the step of the optimizer.
        assert ways["worker0", stage, "worker0"] >= PARTS + 2 * STEPS
        assert transfers(trace)["worker0", stage] >= PARTS
    assert counts["worker0", "serialize Stage.forward"] == 2 * PARTS
    assert counts["worker0", "distributed backward"] == STEPS
    assert counts["worker2", "call RRef.to_here"] == PARTS
    fetches = [each for each in trace.slices if each["name"] == "call RRef.to_here"]
    assert {each["args"]["to"] for each in fetches} == {"worker1"}
    check_arrows_end_at_runs(trace)


def drive_spmd(worker: Worker) -> None:
    with worker.group():
        if worker.rank:
            return
        spmd.use_spmd()
        mesh = spmd.Mesh(list(range(2)), (2,), ("data",))
        weight = torch.ones(4, 4).to(spmd.device())
        with rpc.trace("run.json"):
            for _ in range(STEPS):
                x = X.to(spmd.device())
                spmd.mark_sharding(x, mesh, ("data", None))
                assert float((x @ weight).sum().cpu()) == 128.0
        spmd.shutdown()


def test_an_spmd_step(run_workers: RunWorkers, tmp_path: Path) -> None:
    run_workers(drive_spmd, 3)
    trace = read_trace(tmp_path / "run.json")
    counts, ways = trace.counts(), trace.ways()
    for worker in ("worker1", "worker2"):
        assert counts[worker, "SPMD program"] == counts[worker, "all_reduce(sum, float32[])"] == STEPS
        assert ways["worker0", worker, "worker0"] >= counts[worker, "ServedWorker.do"]
    lines = [each["args"]["lines"] for each in trace.slices if each["name"] == "an SPMD step"]
    assert sum("operations" in each and f"{__file__}:" in each for each in lines) == STEPS
    check_arrows_end_at_runs(trace)


def call_each_other(worker: Worker) -> None:
    os.environ["FARCALL_TRACE"] = "whole.json"
    with worker.group():
        rpc.rpc_sync(f"worker{1 - worker.rank}", torch.add, args=(X, worker.rank))


def test_a_whole_run_is_traced_if_the_environment_says_so(run_workers: RunWorkers, tmp_path: Path) -> None:
    run_workers(call_each_other, 2)
    counts = read_trace(tmp_path / "whole.json").counts()
    assert counts["worker0", "call torch.add"] == counts["worker1", "call torch.add"] == 1
