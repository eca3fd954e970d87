"""Rare reductions: members train locally, and a loss repeats the outer reduction only."""

from __future__ import annotations

import signal
from typing import Any

import pytest
import torch
from torch import nn

import rpc
from rpc.errors import InvalidOptionError
from spmd.elastic.errors import ElasticError
from spmd.elastic.job import join
from spmd.elastic.local_sgd import DiLoCo, LocalSGD
from spmd.elastic.sampling import Sampler, part_of
from tests.group.spmd.elastic.test_elastic import BATCH, LENGTH, data, init, model_of, weights
from tests.support.workers import RunWorkers, Worker

STEPS = 2
Used = list[list[list[int]]]


def optimizers(model: nn.Module) -> tuple[torch.optim.Optimizer, torch.optim.Optimizer]:
    outer = torch.optim.SGD(model.parameters(), 0.7, momentum=0.9, nesterov=True)
    return torch.optim.SGD(model.parameters(), 0.05), outer


def train(worker: Worker) -> tuple[torch.Tensor, Used]:
    """Train until three rounds after a loss in the middle of a round are committed."""
    init(worker)
    model, (x, y) = model_of(), data()
    inner, outer = optimizers(model)
    if worker.rank == 2:
        worker.wait_for("the others train")
    job = join(model=model, outer=outer, sampler=Sampler(LENGTH, BATCH, seed=5), min_size=2)
    local = DiLoCo(job, model, inner, outer, STEPS)
    used: Used = []
    sizes: list[int] = []
    for each in local.rounds():
        with each:
            samples = []
            for i in each.batches:
                inner.zero_grad()
                nn.functional.mse_loss(model(x[i]), y[i]).backward()  # type: ignore[no-untyped-call]
                inner.step()
                samples.append(i.tolist())
                if worker.rank == 2 and sizes.count(3) == 2:
                    worker.report("in the middle of a round")
                    signal.pause()  # until it is killed
            if worker.rank != 2 and sizes.count(3) == 2 and each.size == 3:
                worker.report("in the middle of a round")
                worker.wait_for("the loss")
            if sizes[-2:] == [2, 2] and 3 in sizes:
                job.finish()
        if each.committed:
            sizes.append(each.size)
            used.append(samples)
        if len(sizes) == 1:
            worker.report("trains")
    job.leave()
    rpc.shutdown()
    return weights(model), used


def replayed(first: Used, second: Used, third: Used) -> torch.Tensor:
    """The weights of one process that takes all members' local steps, given their samples by round."""
    model, (x, y) = model_of(), data()
    inner, outer = optimizers(model)
    parameters = list(model.parameters())
    for parts in zip(first, second, third, strict=True):
        begin = [each.detach().clone() for each in parameters]
        moved = [torch.zeros_like(each) for each in begin]
        total = sum(len(i) for part in parts for i in part)
        for part in parts:
            with torch.no_grad():
                for parameter, value in zip(parameters, begin, strict=True):
                    parameter.copy_(value)
            for i in part:
                inner.zero_grad()
                nn.functional.mse_loss(model(x[i]), y[i]).backward()  # type: ignore[no-untyped-call]
                inner.step()
            share = sum(map(len, part)) / total
            for total_move, before, parameter in zip(moved, begin, parameters, strict=True):
                total_move.add_(share * (before - parameter.detach()))
        for parameter, value, gradient in zip(parameters, begin, moved, strict=True):
            parameter.data.copy_(value)
            parameter.grad = gradient
        outer.step()
    return weights(model)


def test_loss_in_the_middle_of_a_round_repeats_no_local_step(run_workers: RunWorkers) -> None:
    workers = run_workers.start(train, 3, time_limit=120)
    for each in workers[:2]:
        each.wait_for("trains")
    workers[2].tell("the others train")
    workers.wait_for("in the middle of a round")  # others would begin it in the next view
    workers[2].kill()
    for each in workers[:2]:
        each.tell("the loss")
    (first, used), (second, also_used) = workers[0].result(), workers[1].result()
    assert torch.equal(first, second)
    assert len(used) == len(also_used)
    sampler = Sampler(LENGTH, BATCH, seed=5)
    used_by_third: Used = []
    for step, parts in enumerate(zip(used, also_used, strict=True)):
        mine = sorted(i for part in parts for samples in part for i in samples)
        assert len(set(mine)) == len(mine)
        batch = sampler.batch(step)
        parts_of_three = [batch[part_of(BATCH, rank, 3)] for rank in range(3)]
        third = [part for part in parts_of_three if not set(part.tolist()) & set(mine)]
        assert len(mine) == BATCH - sum(map(len, third))
        used_by_third.append([each.tolist() for part in third for each in part.tensor_split(STEPS)])
    lost = max(step for step, part in enumerate(used_by_third) if part)
    used_by_third[lost] = []  # the member was killed in this round, before it was averaged
    torch.testing.assert_close(first, replayed(used, also_used, used_by_third), rtol=0, atol=1e-9)


def misuse(worker: Worker) -> list[str]:
    init(worker)
    model, other, copy = model_of(), model_of(), model_of()
    inner, outer = optimizers(model)
    job = join(model=model, copy=copy, inner=inner, outer=outer, sampler=Sampler(LENGTH, BATCH))
    errors = []

    def attempt_to(what: Any) -> None:
        try:
            what()
        except (ElasticError, InvalidOptionError) as error:
            errors.append(f"{type(error).__name__}: {error}")

    attempt_to(lambda: LocalSGD(job, model, inner, 0))
    attempt_to(lambda: LocalSGD(job, other, inner, 2))
    attempt_to(lambda: DiLoCo(job, model, inner, optimizers(other)[1], 2))
    outer.param_groups[0]["params"] = outer.param_groups[0]["params"][:1]
    attempt_to(lambda: DiLoCo(job, model, inner, outer, 2))
    attempt_to(lambda: LocalSGD(job, model, inner, 2))
    copy.requires_grad_(False)
    attempt_to(lambda: LocalSGD(job, model, torch.optim.SGD([*model.parameters(), *other.parameters()]), 2))
    local = LocalSGD(job, model, inner, 2)
    attempt_to(lambda: LocalSGD(job, model, inner, 2))
    attempt_to(job.attempts)
    for each in local.rounds(until=1):
        with each:
            assert len(each.batches) == 2
            model(torch.ones(1, 4, dtype=torch.float64)).sum().backward()
            inner.step()
            attempt_to(outer.step)
            trained = weights(model)
    torch.testing.assert_close(weights(model), trained)  # the average of one member
    attempt_to(lambda: list(local.rounds(until=2)))
    rpc.shutdown()
    return errors


def test_misuse_of_local_training_is_one_clear_error(run_workers: RunWorkers) -> None:
    (errors,) = run_workers.start(misuse, 1, time_limit=60).results()
    expected = (
        "InvalidOptionError: LocalSGD: sync_every is 0; it must be a positive integer",
        "ElasticError: the model is not in the job's state",
        "ElasticError: DiLoCo: the outer optimizer is not in the job's state",
        "ElasticError: DiLoCo: the outer optimizer has 1 parameters",
        "ElasticError: another module of the state has a parameter of shape (8, 4) that requires gradients",
        "ElasticError: the optimizer has a parameter of shape (8, 4) that requires gradients",
        "ElasticError: local training begins before the first attempt of a job, and once",
        "ElasticError: this job trains locally: use the rounds",
        "ElasticError: the SGD of the state cannot take local steps",
        "ElasticError: <round 1, begun in view 1, rank 0 of 1> was not used",
    )
    assert len(errors) == len(expected), errors
    for error, beginning in zip(errors, expected, strict=True):
        assert error.startswith(beginning)


def test_average_of_no_samples_is_none() -> None:
    from spmd.elastic.local_sgd import _Sums

    class Alone:
        def start(self, tensor: torch.Tensor, *, blocks: bool = False) -> None: ...
        def finish(self) -> None: ...

    alone: Any = Alone()
    for weight in (0.0, 0.5):
        sums = _Sums([torch.tensor([3.0, 5.0]), torch.tensor([2.0], dtype=torch.float64)], weight)
        sums.begin(alone, counts=True)
        averages = sums.averages()
        if weight:
            assert averages is not None
            assert torch.equal(averages[0], torch.tensor([3.0, 5.0]))
            assert torch.equal(averages[1], torch.tensor([2.0], dtype=torch.float64))
        else:
            assert averages is None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_short_numbers_are_averaged_in_float32(dtype: torch.dtype) -> None:
    from spmd.elastic.local_sgd import _Sums

    sums = _Sums([torch.ones(2, dtype=dtype)], 1 / 3)
    assert [each.dtype for each in sums._mine] == [torch.float32]
