"""Elastic jobs whose replicas are several workers: a replica is lost, and comes back, as a whole."""

from __future__ import annotations

import signal
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import rpc
from spmd.elastic.errors import PutOut, StepFailedError
from spmd.elastic.job import Job, join
from spmd.elastic.replicas import replica
from spmd.elastic.sampling import Sampler
from tests.group.spmd.elastic.test_elastic import BATCH, LENGTH, data, model_of, trained_alone
from tests.support.workers import RunWorkers, Worker

PLACES = 2


def init(worker: Worker) -> None:
    """Join the group under the worker's rank, as with the launcher."""
    options = rpc.AgentOptions(init_method=worker.init_method, dynamic=True)
    rpc.init_rpc(worker.name, rank=worker.rank, rpc_backend_options=options)


def sharded_model(kind: str) -> Any:
    """A model whose parameters are cut over the workers of the replica."""
    model: Any = model_of()
    mesh = DeviceMesh.from_group(replica(PLACES), "cpu")
    if kind == "tensor parallel":
        return parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    fully_shard(model[0], mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def whole(model: nn.Module) -> torch.Tensor:
    """The weights, for which the replica's workers exchange their parts."""
    parts = [each.full_tensor() if isinstance(each, DTensor) else each for each in model.parameters()]
    return torch.cat([each.detach().flatten() for each in parts])


def wait_for_a_replica(job: Job) -> None:
    """Wait until another replica is there, or wants to join."""
    views = job._views
    with views.changed:
        assert views.changed.wait_for(lambda: job.size == 2 or bool(views.living_newcomers()), 60)


def train(worker: Worker, kind: str, *, stops: bool) -> Any:
    """Train on two replicas of two workers until one was lost, there are two again, and three more steps are
    committed.

    stops: whether this worker stops after two steps.
    """
    init(worker)
    model, (x, y) = sharded_model(kind), data()
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    sampler = Sampler(LENGTH, BATCH, seed=5)
    job = join(model=model, optimizer=optimizer, sampler=sampler, min_size=1, replica_size=PLACES)
    if kind == "fully sharded":
        for each in (model, model[0]):
            each.set_all_reduce_hook(job.all_reduce_hook)
    place, sizes = job.replica.rank(), list[int]()
    used: list[tuple[int, list[int]]] = []
    try:
        for attempt in job.attempts():
            with attempt:
                i, scale = attempt.indices, 1.0
                if kind == "fully sharded":  # each worker has its own samples, and gradients are averaged
                    i, scale = i[place::PLACES], float(PLACES)
                loss = nn.functional.mse_loss(model(x[i]), y[i], reduction="sum") * scale / attempt.batch_size
                loss.backward()  # type: ignore[no-untyped-call]
                if stops and sizes.count(2) == 2:
                    worker.report("in the middle of a step")
                    signal.pause()  # until it is killed
                if 2 in sizes and 1 in sizes[sizes.index(2) :] and sizes[-3:] == [2] * 3:
                    job.finish()
                optimizer.step()
            if attempt.committed:
                sizes.append(attempt.size)
                used.append((attempt.step, attempt.indices.tolist()))
            if sizes[-2:] == [1, 1]:
                if 2 in sizes:
                    worker.report("goes on alone")
                wait_for_a_replica(job)
    except PutOut as error:
        rpc.shutdown()
        return str(error)
    found = whole(model)
    job.leave()
    rpc.shutdown()
    torch.testing.assert_close(found, trained_alone(job.step), rtol=0, atol=1e-9)
    return found, job.step, used


@pytest.mark.parametrize("kind", ["tensor parallel", "fully sharded"])
def test_replica_is_lost_with_one_of_its_workers_and_comes_back_as_a_whole(
    run_workers: RunWorkers, kind: str
) -> None:
    def begin(worker: Worker) -> Any:
        return train(worker, kind, stops=worker.rank == 3)

    def begin_again(worker: Worker) -> Any:
        return train(worker, kind, stops=False)

    workers = run_workers.start(begin, 4, time_limit=200)
    workers[3].wait_for("in the middle of a step")
    workers[3].kill()
    assert "its replica has lost 'worker3'" in workers[2].result()
    for each in workers[:2]:
        each.wait_for("goes on alone")  # newcomers might be part of the next view already
    for rank in (2, 3):
        workers.add(begin_again, rank=rank)
    results = [workers[each].result() for each in (0, 1, 4, 5)]
    weights, steps, _ = results[0]
    for found, same_steps, _ in results[1:]:
        assert torch.equal(found, weights)
        assert same_steps == steps
    assert results[0][2] == results[1][2]  # the samples of a replica are those of all its workers
    sampler = Sampler(LENGTH, BATCH, seed=5)
    for step in (steps - 2, steps - 1):
        samples = dict(results[0][2])[step] + dict(results[2][2])[step]
        assert sorted(samples) == sorted(sampler.batch(step).tolist())


def end_early(worker: Worker, how: str) -> str:
    """End the only step of a job in a way that the others need to notice; returns what is raised."""
    init(worker)
    model: Any = sharded_model("fully sharded") if how == "skips the backward pass" else model_of()
    replicas = 2 if how == "skips the backward pass" else 1
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    job = join(
        model=model,
        optimizer=optimizer,
        sampler=Sampler(LENGTH, BATCH),
        min_size=replicas,
        replica_size=PLACES,
    )
    try:
        for attempt in job.attempts(until=1):
            with attempt:
                if how == "skips the backward pass":
                    for each in (model, model[0]):
                        each.set_all_reduce_hook(job.all_reduce_hook)
                    if job.rank == 0:
                        model(data()[0][:2]).sum().backward()
                    continue
                if how == "dies after the commit":
                    optimizer.step()
                if worker.rank == 1:
                    worker.report("in the block")
                    if how == "dies after the commit":
                        signal.pause()  # until it is killed
                    raise ValueError("a mistake in the block")
                job.replica.allreduce([torch.ones(1)]).wait()
    except Exception as error:
        worker.report("raised")
        if worker.rank == 1 and how == "raises":
            worker.wait_for("end")  # it lives until the other one has ended
        return f"{type(error).__name__}: {error}"
    finally:
        rpc.shutdown()
    return "ended"


def test_worker_whose_replica_is_lost_after_the_last_commit_does_not_end_as_if_all_was_well(
    run_workers: RunWorkers,
) -> None:
    workers = run_workers.start(end_early, 2, args=("dies after the commit",), time_limit=60)
    workers[1].wait_for("in the block")
    workers[1].kill()
    assert workers[0].result().startswith(("PutOut: ", "StateLostError: "))


def test_exception_in_one_block_ends_the_collectives_of_its_replica(run_workers: RunWorkers) -> None:
    workers = run_workers.start(end_early, 2, args=("raises",), time_limit=60)
    workers[0].wait_for("raised")
    workers[1].tell("end")
    first, second = workers.results()
    assert first.startswith(f"{StepFailedError.__name__}: ")
    assert second == "ValueError: a mistake in the block"


def test_replica_that_skips_the_backward_pass_is_an_error(run_workers: RunWorkers) -> None:
    results = run_workers.start(end_early, 4, args=("skips the backward pass",), time_limit=60).results()
    assert "ended" not in results
    assert any("CollectiveMismatchError" in each for each in results), results
