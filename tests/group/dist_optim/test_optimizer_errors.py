"""``DistributedOptimizer``: what goes wrong names the worker where it did, and what was done elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import optim

import dist_autograd
import rpc
from dist_optim import DistributedOptimizer
from rpc.errors import AutogradError, RRefError, WorkerLostError
from tests.group.dist_optim.models import (
    PLACES,
    FailsOnWorker1,
    Held,
    Spread,
    batches,
    look_at_grad,
    notes_of,
)
from tests.support.serving import in_group, in_standing_group, in_worker0, open_gate, serve
from tests.support.workers import RunWorkers, Worker


class FailsToBegin(optim.SGD):
    def __init__(self, params: Any) -> None:
        super().__init__(params)
        raise ArithmeticError("no beginning")


@in_worker0(world_size=3)
def test_an_error_on_an_owner_is_raised_here_and_names_the_worker() -> None:
    model = Spread(*PLACES)
    with pytest.raises(ArithmeticError, match="no beginning") as caught:
        DistributedOptimizer(FailsToBegin, model.references())
    assert "making a FailsToBegin failed on worker 'worker1': ArithmeticError" in notes_of(caught.value)
    assert "Traceback on worker 'worker" in notes_of(caught.value)

    optimizer = DistributedOptimizer(FailsOnWorker1, model.references(), lr=0.1)
    before = model.values()
    with pytest.raises(ArithmeticError, match="no step here") as caught:
        model.train(optimizer, batches(1))
    assert "step failed on worker 'worker1': ArithmeticError: no step here" in notes_of(caught.value)
    assert "step was done on 'worker2'" in notes_of(caught.value)
    assert "in step" in notes_of(caught.value)
    changed = [not torch.equal(one, other) for one, other in zip(before, model.values(), strict=True)]
    assert changed == [False, False, True, True, False, False]
    first = model.remote[0].get_module_rref()
    assert rpc.rpc_sync("worker1", look_at_grad, args=(first,)) == [None, None]


@in_standing_group()
def test_wrong_arguments_of_an_optimizer_are_refused_here() -> None:
    weight = rpc.remote("worker1", torch.ones, args=((2, 2),))
    for optimizer_class in (optim.SGD, optim.Adam, optim.Muon):
        with pytest.raises(ValueError, match=r"(?i)learning rate") as caught:
            DistributedOptimizer(optimizer_class, [weight], lr=-0.1)
        assert not hasattr(caught.value, "__notes__")  # no owner was asked


@in_standing_group()
def test_an_error_on_the_only_owner_names_the_worker_too() -> None:
    weight = rpc.remote("worker1", torch.ones, args=(2,))
    optimizer = DistributedOptimizer(FailsOnWorker1, [weight], lr=0.1)
    with (
        dist_autograd.context() as context_id,
        pytest.raises(ArithmeticError, match="no step here") as caught,
    ):
        optimizer.step(context_id)
    assert "step failed on worker 'worker1': ArithmeticError: no step here" in notes_of(caught.value)
    assert "in step" in notes_of(caught.value)


def a_result() -> torch.Tensor:
    return torch.ones(2, requires_grad=True) * 2


def a_view_that_retains_its_gradient() -> torch.Tensor:
    view = torch.nn.Parameter(torch.ones(2))[:1]
    view.retain_grad()
    return view


@pytest.mark.parametrize("make", [a_result, a_view_that_retains_its_gradient])
@in_standing_group()
def test_a_tensor_that_gets_no_gradient_in_a_context_is_refused(make: Callable[[], torch.Tensor]) -> None:
    leaf, other = rpc.remote("worker1", torch.ones, args=(2,)), rpc.remote("worker1", make)
    local = rpc.RRef(make())
    bad: list[tuple[Any, str]] = [
        ([leaf, other], r"params_rref\[1\] .* worker 'worker1'"),
        (iter([leaf, local]), r"params_rref\[1\] .* worker 'worker0'"),
        ([{"params": [leaf]}, {"params": other, "lr": 1.0}], "reference 1 of all groups .* worker 'worker1'"),
    ]
    for references, where in bad:
        with pytest.raises(ValueError, match=f"can't optimize a non-leaf Tensor: {where}"):
            DistributedOptimizer(optim.SGD, references, lr=0.1)
    with pytest.raises(ValueError, match="non-leaf Tensor: params_rref"):
        DistributedOptimizer(optim.SGD, [other], lr=0.1, stale_gradients=False)


@in_standing_group()
def test_wrong_arguments_are_refused_with_what_is_wrong() -> None:
    tensor = rpc.remote("worker1", torch.ones, args=(2,))
    text = rpc.remote("worker1", str, args=("hello",))
    bad: list[tuple[Any, type[Exception], str]] = [
        ([], ValueError, "got an empty list of parameters"),
        ([tensor, torch.ones(2)], TypeError, r"params_rref\[1\] is a Tensor, not a reference: .* rpc\.RRef"),
        ([tensor, text], TypeError, r"params_rref\[1\] refers to a str on worker 'worker1'"),
        ([rpc.remote("worker1", [].pop)], IndexError, "pop from empty list"),
        (tensor, TypeError, r"one reference, .*, not a list of them: pass \[params_rref\]"),
    ]
    for references, kind, message in bad:
        with pytest.raises(kind, match=message):
            DistributedOptimizer(optim.SGD, references, lr=0.1)
    with pytest.raises(TypeError, match="each step of LBFGS needs a closure"):
        DistributedOptimizer(optim.LBFGS, [tensor])
    optimizer: Any = DistributedOptimizer(optim.SGD, [tensor], lr=0.1)
    with pytest.raises(AttributeError, match=r"no attribute 'zero_grad': .* belong to the context"):
        optimizer.zero_grad()
    over = -1
    with dist_autograd.context() as context_id:
        over = context_id
    attempts: list[Callable[[int], Any]] = [
        optimizer.step,
        lambda unknown: optimizer.clip_grad_norm_(unknown, 1.0),
    ]
    for attempt in attempts:
        for unknown in (over, 12345):
            with pytest.raises(AutogradError, match=f"autograd context with id: {unknown}"):
                attempt(unknown)


def step_with_a_lost_owner(worker: Worker) -> None:
    model = Spread(*PLACES)
    optimizer = DistributedOptimizer(Held, model.references())
    references = model.references()
    with pytest.raises(WorkerLostError, match="'worker2'") as caught:
        model.train(optimizer, batches(1))
    worker.report("raised")
    assert "step failed on worker 'worker2'" in notes_of(caught.value)
    assert "step is under way on 'worker1'" in notes_of(caught.value)
    attempts: list[Callable[[], Any]] = [
        lambda: DistributedOptimizer(optim.SGD, references),
        optimizer.state_dict,
        lambda: optimizer.lr_scheduler(optim.lr_scheduler.StepLR, 1),
    ]
    rpc.rpc_sync("worker1", open_gate)
    for attempt in attempts:
        with pytest.raises((WorkerLostError, RRefError), match="'worker2'"):
            attempt()


def test_an_owner_that_dies_fails_the_step_at_once_and_is_named(run_workers: RunWorkers) -> None:
    workers = run_workers.start([in_group(step_with_a_lost_owner), serve, serve])
    workers[1].wait_for("at the gate")
    workers[2].wait_for("at the gate")
    workers[2].kill()
    workers[0].wait_for("raised")  # though worker1 is still at the gate
    workers.results()
