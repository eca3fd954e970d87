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
TRAINERS = 2
MICRO_BATCHES = 4
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


class Server:
    """Parameters, and an optimizer that takes gradients of trainers."""

    def __init__(self) -> None:
        self.layer = nn.Linear(4, 4)
        self.optimizer = torch.optim.SGD(self.layer.parameters(), lr=0.1)

    def weights(self) -> dict[str, Tensor]:
        return {name: value.detach() for name, value in self.layer.state_dict().items()}

    def push(self, gradients: dict[str, Tensor]) -> None:
        for name, value in self.layer.named_parameters():
            value.grad = gradients[name]
        self.optimizer.step()


def serve_parameters(worker: Worker) -> None:
    """Worker 0 holds parameters, the others pull them, and push gradients."""
    with worker.group():
        if worker.rank:
            return
        server = RRef(Server())
        with rpc.trace("run.json"):
            trainers: list[Any] = [
                rpc.rpc_async(f"worker{rank}", train, args=(server,)) for rank in range(1, TRAINERS + 1)
            ]
            torch.futures.wait_all(trainers)


def train(server: RRef[Server]) -> None:
    layer = nn.Linear(4, 4)
    for _ in range(STEPS):
        layer.load_state_dict(server.rpc_sync().weights())
        layer.zero_grad()
        layer(X).sum().backward()
        server.rpc_sync().push({name: value.grad for name, value in layer.named_parameters()})


def test_a_parameter_servers_step(run_workers: RunWorkers, tmp_path: Path) -> None:
    run_workers(serve_parameters, TRAINERS + 1)
    trace = read_trace(tmp_path / "run.json")
    counts, ways = trace.counts(), trace.ways()
    assert counts["worker0", "Server.push"] == counts["worker0", "Server.weights"] == STEPS * TRAINERS
    assert counts["worker0", "deserialize Server.push"] == STEPS * TRAINERS
    for trainer in ("worker1", "worker2"):
        assert counts[trainer, "train"] == 1
        assert counts[trainer, "call Server.push"] == counts[trainer, "call Server.weights"] == STEPS
        assert counts[trainer, "serialize Server.push"] == STEPS
        assert ways[trainer, "worker0", trainer] == 2 * STEPS
        assert ways["worker0", trainer, "worker0"] >= 1
        assert requests(trace)[trainer, "worker0"] == 2 * STEPS
    check_arrows_end_at_runs(trace)


def requests(trace: ChromeTrace) -> Counter[tuple[str, str]]:
    """Number of requests that were transferred, by caller and callee."""
    transfers = [begin for begin, _ in trace.spans if begin["name"] == "transfer of a request"]
    assert all(each["args"]["bytes"] > 0 for each in transfers)
    return Counter((each["args"]["caller"], trace.worker(each["pid"])) for each in transfers)


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
        assert counts[stage, "Stage.forward"] == STEPS * MICRO_BATCHES
        assert counts[stage, "optimizer step"] == counts[stage, "LocalOptimizer.step"] == STEPS
        assert counts[stage, "part of a distributed backward"] == counts[stage, "gradients"] == STEPS
        # Micro-batches, the part of the backward, and the step of the optimizer.
        assert ways["worker0", stage, "worker0"] >= STEPS * (MICRO_BATCHES + 2)
    assert counts["worker0", "distributed backward"] == STEPS
    assert counts["worker2", "call RRef.to_here"] == STEPS * MICRO_BATCHES
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
