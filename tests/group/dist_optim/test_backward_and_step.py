"""``DistributedOptimizer.backward_and_step``: each owner steps at the end of its part of the backward."""

from __future__ import annotations

import collections
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim

import dist_autograd
import rpc
from dist_optim import DistributedOptimizer
from rpc import events
from rpc.errors import AutogradError, BackwardError, WorkerLostError
from rref import RemoteModule
from tests.group.dist_optim.models import PLACES, FailsOnWorker1, Held, Spread, batches, notes_of
from tests.support.default_device import placed
from tests.support.serving import (
    in_group,
    in_standing_group,
    in_worker0,
    open_gate,
    report,
    serve,
    wait_at_gate,
    wait_for_arrivals,
)
from tests.support.workers import RunWorkers, Worker

EVERYWHERE = ("worker1", "worker2", "worker0")


def changed(before: list[Tensor], after: list[Tensor]) -> list[bool]:
    return [not torch.equal(one, other) for one, other in zip(before, after, strict=True)]


@pytest.mark.parametrize("places", [PLACES, EVERYWHERE])
@in_standing_group(world_size=3)
def test_it_trains_as_backward_and_step_do(places: tuple[str, ...]) -> None:
    model, inputs = Spread(*places), batches(4)
    optimizer = DistributedOptimizer(optim.Adam, model.references(), lr=0.01)
    for batch in inputs[:2]:
        with dist_autograd.context() as context_id:
            optimizer.backward_and_step(context_id, [model.loss(batch)])
    model.train(optimizer, inputs[2:])
    model.train_local(optim.Adam(model.local.parameters(), lr=0.01), inputs)
    model.check_same()


def count_steps(optimizer: optim.Optimizer, *_: Any) -> None:
    report("stepped")


class Counted(optim.SGD):
    """Reports each step, also one without gradients."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, lr=0.1)
        self.register_step_post_hook(count_steps)


def step_where_the_backward_does_not_come(worker: Worker) -> None:
    model = Spread(*PLACES)
    optimizer = DistributedOptimizer(Counted, model.references())
    before = model.values()
    with dist_autograd.context() as context_id:
        optimizer.backward_and_step(context_id, [model.remote[0](batches(1)[0]).sum()])
    assert changed(before, model.values()) == [True, True, False, False, False, False]


def test_owners_that_the_backward_does_not_reach_step_as_well(run_workers: RunWorkers) -> None:
    workers = run_workers.start([in_group(step_where_the_backward_does_not_come), serve, serve])
    workers[1].wait_for("stepped")
    workers[2].wait_for("stepped")
    workers.results()


def messages_of(step: Callable[[int, Tensor], Any], model: Spread) -> collections.Counter[str]:
    """The number of requests that a step sends to each worker after its forward."""
    sent: collections.Counter[str] = collections.Counter()
    with dist_autograd.context() as context_id:
        loss = model.remote[0](batches(1)[0]).sum()
        with events.listen(
            events.MessageSent, lambda message: sent.update([message.to] if message.call_id else [])
        ):
            step(context_id, loss)
    return sent


@in_standing_group()
def test_it_sends_no_message_beside_those_of_the_backward() -> None:
    model = Spread("worker1", "worker0", "worker0")
    owned = model.remote[0].remote_parameters()
    optimizer = DistributedOptimizer(optim.SGD, owned, lr=0.1)
    backward = messages_of(lambda number, loss: dist_autograd.backward(number, [loss]), model)
    together = messages_of(lambda number, loss: optimizer.backward_and_step(number, [loss]), model)
    assert together["worker1"] == backward["worker1"] == 1


class WaitsInBackward(nn.Linear):
    """Its backward waits at the gate."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        hook = functools.partial(wait_at_gate, "backward")
        self.weight.register_hook(hook)  # type: ignore[no-untyped-call]


class Arrives(optim.SGD):
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step(closure)
        wait_at_gate("step")


@in_worker0(world_size=3)
def test_an_owner_steps_while_another_computes_its_gradients() -> None:
    first = RemoteModule(placed("worker1"), WaitsInBackward)
    second = RemoteModule(placed("worker2"), nn.Linear, args=(4, 4))
    parameters = second.remote_parameters()
    rpc.rpc_sync("worker2", open_gate, args=("step",))
    optimizer = DistributedOptimizer(Arrives, parameters, lr=0.1)
    other = rpc.rpc_async("worker2", wait_for_arrivals, args=(1, "step"))
    other.then(lambda _: rpc.rpc_sync("worker1", open_gate, args=("backward",)))
    with dist_autograd.context() as context_id:
        optimizer.backward_and_step(context_id, [second(first(torch.ones(1, 4))).sum()])
    other.wait()


@in_standing_group(world_size=3)
def test_the_error_of_an_optimizer_names_its_worker() -> None:
    model = Spread(*PLACES)
    optimizer = DistributedOptimizer(FailsOnWorker1, model.references(), lr=0.1)
    before = model.values()
    with dist_autograd.context() as context_id, pytest.raises(BackwardError, match="no step here") as caught:
        optimizer.backward_and_step(context_id, [model.loss(batches(1)[0])])
    assert caught.value.worker == "worker1"
    assert isinstance(caught.value.__cause__, ArithmeticError)
    assert changed(before, model.values())[:2] == [False, False]


@pytest.mark.parametrize(
    ("concurrency", "why"), [(None, "is still being made"), (1, "was made with concurrency=")]
)
@in_standing_group()
def test_an_optimizer_that_a_call_would_wait_for_is_refused(concurrency: int | None, why: str) -> None:
    model = Spread("worker1", "worker0", "worker0")
    optimizer = DistributedOptimizer(optim.SGD, model.remote[0].remote_parameters(), lr=0.1)
    optimizer.local_optimizers["worker1"] = rpc.remote("worker1", wait_at_gate, concurrency=concurrency)
    rpc.rpc_sync("worker1", wait_for_arrivals, args=(1,))
    with dist_autograd.context() as context_id, pytest.raises(BackwardError, match=why) as caught:
        optimizer.backward_and_step(context_id, [model.remote[0](batches(1)[0]).sum()])
    assert isinstance(caught.value.__cause__, AutogradError)
    rpc.rpc_sync("worker1", open_gate)


class FailsInBackward(nn.Linear):
    def __init__(self) -> None:
        super().__init__(4, 4)
        self.weight.register_hook(self.fail)  # type: ignore[no-untyped-call]

    def fail(self, gradient: Tensor) -> None:
        raise ArithmeticError("no gradient")


@in_standing_group(world_size=3)
def test_no_owner_steps_whose_part_of_the_backward_fails() -> None:
    first = RemoteModule(placed("worker1"), FailsInBackward)
    second = RemoteModule(placed("worker2"), nn.Linear, args=(4, 4))
    references = [*first.remote_parameters(), *second.remote_parameters()]
    optimizer = DistributedOptimizer(optim.SGD, references, lr=0.1)
    before = [each.to_here().detach() for each in first.remote_parameters()]
    with dist_autograd.context() as context_id, pytest.raises(BackwardError, match="no gradient") as caught:
        optimizer.backward_and_step(context_id, [second(first(torch.ones(1, 4))).sum()])
    assert caught.value.worker == "worker1"
    assert "'worker2'" in notes_of(caught.value)
    after = [each.to_here().detach() for each in first.remote_parameters()]
    assert changed(before, after) == [False, False]


@in_standing_group()
def test_wrong_arguments_are_refused() -> None:
    weight = rpc.remote("worker1", torch.ones, args=(2,))
    optimizer = DistributedOptimizer(optim.SGD, [weight], lr=0.1)
    root: Any = torch.ones((), requires_grad=True) * 2
    with (
        dist_autograd.context() as context_id,
        pytest.raises(TypeError, match=r"_step\(\): .* a list of tensors"),
    ):
        optimizer.backward_and_step(context_id, root)
    with pytest.raises(AutogradError, match=f"context with id: {context_id}"):
        optimizer.backward_and_step(context_id, [torch.ones(1)])


def lose_the_owner_that_steps(worker: Worker) -> None:
    model = Spread("worker1", "worker0", "worker0")
    optimizer = DistributedOptimizer(Held, model.remote[0].remote_parameters())
    with dist_autograd.context() as context_id, pytest.raises(WorkerLostError, match="'worker1'") as caught:
        optimizer.backward_and_step(context_id, [model.remote[0](batches(1)[0]).sum()])
    assert "step is under way on 'worker1'" in notes_of(caught.value)
    worker.report("raised")


def test_an_owner_that_dies_in_its_step_is_named(run_workers: RunWorkers) -> None:
    workers = run_workers.start([in_group(lose_the_owner_that_steps), serve])
    workers[1].wait_for("at the gate")
    workers[1].kill()
    workers[0].wait_for("raised")
    workers.results()
