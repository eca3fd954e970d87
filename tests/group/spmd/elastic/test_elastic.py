"""Elastic jobs of real processes: members die, join and leave while others train."""

from __future__ import annotations

import re
import signal
from itertools import count
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn

import rpc
from rpc.runtime import waits
from spmd.elastic.entry import _Entry
from spmd.elastic.errors import ElasticError, Finished, JobMismatchError, StepFailedError
from spmd.elastic.job import Job, join
from spmd.elastic.reducer import DistributedDataParallel
from spmd.elastic.sampling import Sampler
from tests.support.workers import RunWorkers, Worker

LENGTH, BATCH = 96, 12


def model_of(seed: int = 0, width: int = 8) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, width), nn.Tanh(), nn.Linear(width, 1)).double()


def data() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(LENGTH, 4, generator=generator, dtype=torch.float64)
    return x, x.sum(1, keepdim=True)


def trained_alone(steps: int) -> torch.Tensor:
    """The weights after so many steps in one process: a worker, as SPMD mode, which other tests run in the
    tests' own process, takes no backward before it.
    """
    model, (x, y), sampler = model_of(), data(), Sampler(LENGTH, BATCH, seed=5)
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    for step in range(steps):
        i = sampler.batch(step)
        optimizer.zero_grad()
        (nn.functional.mse_loss(model(x[i]), y[i], reduction="sum") / BATCH).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    return weights(model)


def weights(model: nn.Module) -> torch.Tensor:
    return torch.cat([each.detach().flatten() for each in model.parameters()])


def init(worker: Worker) -> None:
    options = rpc.AgentOptions(init_method=worker.init_method, dynamic=True)
    rpc.init_rpc(worker.name, rpc_backend_options=options)


def train(worker: Worker, size: int, end: str | None) -> Any:
    """Train until ``size`` members have, one of them has gone, and three more steps are committed.

    end: how this member goes after two steps: "dies", "leaves", or None if it stays.
    """
    init(worker)
    model, (x, y) = model_of(), data()
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    used: list[tuple[int, list[int]]] = []
    sizes: list[int] = []
    job = join(model=model, optimizer=optimizer, sampler=Sampler(LENGTH, BATCH, seed=5))
    for attempt in job.attempts():
        with attempt:
            i = attempt.indices
            loss = nn.functional.mse_loss(model(x[i]), y[i], reduction="sum") / attempt.batch_size
            loss.backward()  # type: ignore[no-untyped-call]
            if end is not None and sizes.count(size) > 2:
                if end == "dies":
                    worker.report("in the middle of a step")
                    signal.pause()  # until it is killed
                job.leave()
            if size in sizes and sizes[-3:] == [size - 1] * 3:
                job.finish()
            optimizer.step()
        if attempt.committed:
            sizes.append(attempt.size)
            used.append((attempt.step, i.tolist()))
    observed = job._views.observed()
    assert observed["step"] == job.step
    if size == 3:
        assert (observed["losses"], observed["lost"]) == (1, "worker2")
    job.leave()
    rpc.shutdown()
    torch.testing.assert_close(weights(model), trained_alone(job.step), rtol=0, atol=1e-9)
    return weights(model), job.step, used


def test_survivors_of_a_death_have_equal_weights_and_use_each_sample_once(run_workers: RunWorkers) -> None:
    def begin(worker: Worker) -> Any:
        return train(worker, 3, "dies" if worker.rank == 2 else None)

    workers = run_workers.start(begin, 3, time_limit=120)
    workers[2].wait_for("in the middle of a step")
    workers[2].kill()
    (first, steps, used), (second, same_steps, also_used) = workers[0].result(), workers[1].result()
    assert torch.equal(first, second)
    assert steps == same_steps
    sampler = Sampler(LENGTH, BATCH, seed=5)
    for step in (steps - 2, steps - 1):  # which only two members have done
        samples = dict(used)[step] + dict(also_used)[step]
        assert sorted(samples) == sorted(sampler.batch(step).tolist())


def test_member_leaves_after_a_step_that_the_others_do_not_repeat(run_workers: RunWorkers) -> None:
    def begin(worker: Worker) -> Any:
        return train(worker, 2, "leaves" if worker.rank == 1 else None)

    (_, steps, _), (_, steps_then, _) = run_workers.start(begin, 2, time_limit=120).results()
    assert steps > steps_then


def fail_in_one(worker: Worker) -> str:
    init(worker)
    model = model_of()
    job = join(model=model, sampler=Sampler(LENGTH, BATCH), min_size=2)
    try:
        for attempt in job.attempts():
            with attempt:
                if worker.rank == 1 and attempt.step == 1:
                    raise ValueError("a mistake in the block")
                model(torch.ones(1, 4, dtype=torch.float64)).sum().backward()
    except ValueError:
        return "raised"
    except StepFailedError as error:
        return f"{error.worker}: {error}"
    finally:
        rpc.shutdown()
    return "ended"


def test_exception_in_one_block_ends_the_job_on_all_members(run_workers: RunWorkers) -> None:
    first, second = run_workers.start(fail_in_one, 2, time_limit=120).results()
    assert second == "raised"
    assert first.startswith("worker1: ")
    assert "ValueError: a mistake in the block" in first


def have_a_sparse_buffer(worker: Worker) -> str:
    init(worker)
    model = model_of()
    model.register_buffer("sparse", torch.eye(2).to_sparse())
    job = join(model=model, sampler=Sampler(LENGTH, BATCH))
    try:
        for attempt in job.attempts():
            with attempt:
                assert attempt.view == 1, "the step is repeated"
    except ValueError as error:
        return str(error)
    finally:
        rpc.shutdown()
    return "ended"


def test_optimizer_step_that_one_member_leaves_out_ends_the_job_on_all(
    run_workers: RunWorkers,
) -> None:
    def step_on_one_member(worker: Worker) -> str:
        init(worker)
        model = nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        job = join(model=model, optimizer=optimizer, sampler=Sampler(8, 4), min_size=2)
        for attempt in job.attempts(until=10):
            with attempt:
                model(torch.ones(len(attempt.indices), 2)).sum().backward()
                if attempt.step != 5 or worker.rank == 0:
                    optimizer.step()
        return "no error"

    def fails(worker: Worker) -> str:
        try:
            return step_on_one_member(worker)
        except ElasticError as error:
            return str(error)

    for text in run_workers(fails, 2):
        assert re.search(r"in step 5, members have called optimizer.step\(\) \[[01], [01]\] times", text)


class Experts(nn.Module):
    """Three layers, of which each call uses one."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(1, 1, bias=False).double() for _ in range(3)])
        for each in self.parameters():
            nn.init.ones_(each)

    def forward(self, x: torch.Tensor, which: int) -> torch.Tensor:
        return self.layers[which](x)  # type: ignore[no-any-return]


def use_different_layers(worker: Worker) -> list[float]:
    """Use the third layer on both members in two steps, then one of the others on each."""
    init(worker)
    model = DistributedDataParallel(Experts())
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.5, weight_decay=0.1)
    job = join(model=model, optimizer=optimizer, sampler=Sampler(8, 4), min_size=2)
    rows = []
    for attempt in job.attempts(until=5):
        with attempt:
            # The third one has momentum then. In the first step of a view, newcomers have no samples.
            which = 2 if attempt.step < 2 else attempt.rank
            model(torch.full((len(attempt.indices), 1), 1.0 + attempt.rank).double(), which).mean().backward()
            if attempt.step >= 2:
                rows.append([None if each.grad is None else each.grad.item() for each in model.parameters()])
            optimizer.step()
            if attempt.step == 1:
                before = weights(model)
    job.leave()
    rpc.shutdown()
    assert rows == [[0.5, 1.0, None]] * 3  # half of each member's mean
    after = weights(model)
    assert after[2] == before[2] != 1.0
    return after.tolist()


def test_layers_that_some_members_use_get_the_mean_gradient_and_others_do_not_change(
    run_workers: RunWorkers,
) -> None:
    expected = [nn.Parameter(torch.ones(1).double()) for _ in range(2)]
    optimizer = torch.optim.SGD(expected, 0.1, momentum=0.5, weight_decay=0.1)
    for _ in range(3):
        for each, gradient in zip(expected, (0.5, 1.0), strict=True):
            each.grad = torch.full((1,), gradient).double()
        optimizer.step()
    first, second = run_workers.start(use_different_layers, 2, time_limit=120).results()
    assert first == second
    assert first[:2] == pytest.approx([each.item() for each in expected])


def test_tensor_that_cannot_be_sent_ends_the_job_at_once(run_workers: RunWorkers) -> None:
    (error,) = run_workers.start(have_a_sparse_buffer, 1, time_limit=60).results()
    assert "takes dense tensors on the CPU" in error


def unfreeze(worker: Worker) -> str:
    init(worker)
    model = model_of()
    model.requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    job = join(model=model, optimizer=optimizer, sampler=Sampler(LENGTH, BATCH))
    try:
        for attempt in job.attempts():
            with attempt:
                if attempt.step == 1:
                    model.requires_grad_(True)
                    model(torch.ones(1, 4, dtype=torch.float64)).sum().backward()
                optimizer.step()
    except ElasticError as error:
        return f"{job.step} steps: {error}"
    finally:
        rpc.shutdown()
    return "ended"


def test_parameters_that_are_unfrozen_after_join_are_refused(run_workers: RunWorkers) -> None:
    (error,) = run_workers.start(unfreeze, 1, time_limit=60).results()
    assert error.startswith("1 steps: ")
    assert "has a gradient that is not summed over the members" in error


def come_too_late(worker: Worker) -> str:
    """End the job in the step in which the vote is for a view with a newcomer."""
    init(worker)
    model = model_of()
    if worker.rank == 1:
        worker.wait_for("go on")
        ask_all, calls = _Entry._ask_all, count()

        def ask_once(entry: _Entry) -> bool:  # it would be told later that the job has ended
            return ask_all(entry) if next(calls) == 0 else False

        try:
            with patch.object(_Entry, "_ask_all", ask_once):
                job = join(model=model, sampler=Sampler(LENGTH, BATCH))
            for _ in job.attempts():
                pass
        except Finished as error:
            return f"finished at {error.step}"
        finally:
            rpc.shutdown()
        return "trained"
    job = join(model=model, sampler=Sampler(LENGTH, BATCH))
    views = job._views
    for attempt in job.attempts():
        with attempt:
            if attempt.step == 1:
                worker.report("newcomers may come")
                with views.changed:
                    assert views.changed.wait_for(lambda: bool(views.newcomers), 60)
                job.finish()
        if attempt.step == 1:
            worker.report("has ended")
            worker.wait_for("go on")
    job.leave()
    rpc.shutdown()
    return f"ended at {job.step}"


def test_newcomer_of_a_job_that_ends_has_no_job(run_workers: RunWorkers) -> None:
    workers = run_workers.start(come_too_late, 2, time_limit=120)
    workers[0].wait_for("newcomers may come")
    workers[1].tell("go on")
    workers[0].wait_for("has ended")
    assert workers[1].result() == "finished at 2"
    workers[0].tell("go on")
    assert workers[0].result() == "ended at 2"


def misuse(worker: Worker) -> list[str]:
    """Make one mistake after the other in a job of one member."""
    init(worker)
    model = DistributedDataParallel(model_of())
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    sampler = Sampler(LENGTH, BATCH)
    errors = []

    def attempt_to(what: Any) -> None:
        try:
            what()
        except (ElasticError, TypeError) as error:
            errors.append(f"{type(error).__name__}: {error}")

    attempt_to(lambda: join(model=model, sampler=iter([1])))  # type: ignore[arg-type]
    attempt_to(lambda: join(model=model, other=3, sampler=sampler))
    attempt_to(lambda: join(model=model, part=model.module, sampler=sampler))
    attempt_to(lambda: join(optimizer=optimizer, sampler=sampler))
    job: Job = join(model=model, optimizer=optimizer, sampler=sampler)
    attempt_to(lambda: join(model=model, optimizer=optimizer, sampler=sampler))
    assert (model.reducer, len(optimizer._optimizer_step_pre_hooks)) == (job._reducers[0], 1)
    attempt_to(optimizer.step)
    attempt_to(lambda: nn.parallel.DistributedDataParallel(model_of(), process_group=job.group))
    with patch("rpc.runtime.waits.waiting", wraps=waits.waiting) as waiting:
        train_once(job, model, optimizer, attempt_to)
    shown = [each.args[0] for each in waiting.call_args_list]
    assert any(each.startswith("the vote on step 0 of the elastic job, view 1, all_gather") for each in shown)
    job.leave()
    attempt_to(lambda: join(model=model, optimizer=optimizer, sampler=sampler))
    assert (model.reducer, len(optimizer._optimizer_step_pre_hooks)) == (None, 0)
    assert not any(each._post_accumulate_grad_hooks for each in model.parameters())
    rpc.shutdown()
    return errors


def train_once(job: Job, model: nn.Module, optimizer: torch.optim.Optimizer, attempt_to: Any) -> None:
    for attempt in job.attempts():
        with attempt:
            with attempt.accumulate():
                model(torch.ones(2, 4, dtype=torch.float64)).mean().backward()
            model(torch.ones(2, 4, dtype=torch.float64)).mean().backward()
            optimizer.step()
            attempt_to(lambda: job.group.allreduce([torch.ones(1)]))
            job.finish()


def test_misuse_is_one_clear_error(run_workers: RunWorkers) -> None:
    (errors,) = run_workers.start(misuse, 1, time_limit=120).results()
    expected = (
        "TypeError: elastic.join: sampler is of type list_iterator",
        "TypeError: elastic.join: other is of type int",
        "ElasticError: elastic.join: parameter '0.weight' is part of two modules",
        "ElasticError: elastic.join: the SGD has a parameter of shape (8, 4) that is part of no module",
        "ElasticError: there is an elastic job in this process already",
        "ElasticError: optimizer.step() was called outside of an attempt",
        "ElasticError: the group of an elastic job is used within `with attempt:` only",
        "ElasticError: a collective was called in the block of step 0 after optimizer.step()",
        "ElasticError: a collective was called in the block of step 1 after optimizer.step()",
        "Finished: the elastic job has ended after 2 steps",
    )
    assert len(errors) == len(expected), errors
    for error, beginning in zip(errors, expected, strict=True):
        assert error.startswith(beginning)


def join_another_job(worker: Worker) -> str:
    init(worker)
    if worker.rank == 1:
        worker.wait_for("go on")
        with pytest.raises(JobMismatchError) as caught:
            join(model=model_of(width=9), sampler=Sampler(LENGTH, BATCH))
        rpc.shutdown()
        return str(caught.value)
    job = join(model=model_of(), sampler=Sampler(LENGTH, BATCH))
    worker.report("has joined")
    worker.wait_for("go on")
    job.leave()
    rpc.shutdown()
    return ""


def test_member_with_another_model_is_refused(run_workers: RunWorkers) -> None:
    workers = run_workers.start(join_another_job, 2, time_limit=120)
    workers[0].wait_for("has joined")
    workers[1].tell("go on")
    assert (
        "'model.0.weight: (8, 4), torch.float64' in place of 'model.0.weight: (9, 4)" in workers[1].result()
    )
    workers[0].tell("go on")
    workers[0].result()


@pytest.mark.parametrize("seed", [0, 1])
def test_samples_of_a_step_follow_from_its_number(seed: int) -> None:
    sampler = Sampler(10, 3, seed=seed)
    epoch = torch.cat([sampler.batch(step) for step in range(3)])
    assert len(epoch.unique()) == 9  # type: ignore[no-untyped-call]
    assert torch.equal(Sampler(10, 3, seed=seed).batch(1), sampler.batch(1))
