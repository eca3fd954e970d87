"""Models under ``DistributedDataParallel`` in contexts: what they wait for, and what others do meanwhile."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch import distributed as c10d
from torch._C._distributed_c10d import HashStore
from torch.nn.parallel import DistributedDataParallel

import dist_autograd
import rpc
from dist_autograd.ddp import Models
from dist_optim import DistributedOptimizer
from dist_optim.local_optimizer import LocalOptimizer
from rpc.errors import AutogradError
from tests.fuzz.autograd.guarded import apply_guarded
from tests.support import default_device
from tests.support.serving import WAIT_SECONDS, in_group, in_standing_group, open_gate
from tests.support.workers import RunWorkers, Worker

_models: dict[str, DistributedDataParallel] = {}
# Whoever frees a gloo group waits, interpreter in hand, for its threads, which need the interpreter to free
# what a model's backward has noted for its all-reduce: a deadlock of PyTorch's own, in one of a hundred ends.
_never_freed: list[Any] = []


@contextmanager
def process_group_of_one() -> Iterator[None]:
    c10d.init_process_group(default_device.backend("gloo"), store=HashStore(), rank=0, world_size=1)
    _never_freed.append(c10d.group.WORLD)
    try:
        yield
    finally:
        _models.clear()
        c10d.destroy_process_group()


def averaged(factor: float = 2.0, **options: Any) -> DistributedDataParallel:
    layer = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.constant_(layer.weight, factor)
    return DistributedDataParallel(layer, **options)


def serve_model(worker: Worker) -> None:
    """Has a model until all are done."""
    with process_group_of_one():
        _models["model"] = averaged()
        with worker.group():
            pass


def through_model(x: Tensor) -> Tensor:
    result: Tensor = _models["model"](x)
    return result


def through_gate(x: Tensor) -> Tensor:
    return apply_guarded(x)


def gradient_of_model(context_id: int) -> float:
    return dist_autograd.get_gradients(context_id)[_models["model"].module.weight].item()


def there_between(outer: str, inner: str, gradients_of: Callable[[int], Any]) -> Any:
    """A backward in which ``outer`` takes part before and after ``inner``, both with their models."""
    with dist_autograd.context() as context_id:
        x = torch.ones(1, 1, requires_grad=True)
        for worker, function in ((outer, through_model), (inner, through_model), (outer, through_gate)):
            x = rpc.rpc_sync(worker, function, args=(x,))
        dist_autograd.backward(context_id, [x.sum()])
        return gradients_of(context_id)


def cross(worker: Worker) -> None:
    def both(context_id: int) -> list[float]:
        return [rpc.rpc_sync(to, gradient_of_model, args=(context_id,)) for to in ("worker1", "worker2")]

    with ThreadPoolExecutor(2) as threads:
        crossing = [
            threads.submit(there_between, outer, inner, both)
            for outer, inner in (("worker1", "worker2"), ("worker2", "worker1"))
        ]
        worker.wait_for("both are under way")
        for to in ("worker1", "worker2"):
            rpc.rpc_sync(to, open_gate, args=("backward",))
        assert [each.result(WAIT_SECONDS) for each in crossing] == [[2.0, 2.0], [2.0, 2.0]]


def test_backwards_that_need_each_others_models_do_not_block_each_other(run_workers: RunWorkers) -> None:
    workers = run_workers.start([in_group(cross), serve_model, serve_model], 3)
    workers[1].wait_for("at the gate")
    workers[2].wait_for("at the gate")
    workers[0].tell("both are under way")
    workers.results()


class Reporting(torch.optim.SGD):
    """Says when it is in the middle of a step, and goes on when it is told to."""

    stepping = threading.Event()
    may_go_on = threading.Event()

    def step(self, closure: Any = None) -> Any:
        self.stepping.set()
        assert self.may_go_on.wait(WAIT_SECONDS)
        return super().step(closure)


class Pausing(torch.autograd.Function):
    """Its backward says that it has come, and goes on when it is told to."""

    reached = threading.Event()
    may_go_on = threading.Event()

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 1

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        Pausing.reached.set()
        assert Pausing.may_go_on.wait(WAIT_SECONDS)
        return gradient


apply_pausing: Callable[[Tensor], Tensor] = Pausing.apply


@in_standing_group(1)
def test_a_step_on_a_models_parameters_does_not_mix_with_its_backward() -> None:
    with process_group_of_one(), dist_autograd.context() as first:
        model = averaged()
        weight = model.module.weight
        optimizer = LocalOptimizer(Reporting, [weight], (), {"lr": 1.0})
        dist_autograd.backward(first, [model(torch.full((1, 1), 3.0)).sum()])
        lent = dist_autograd.get_gradients(first)[weight]
        found: list[Tensor] = []

        def other_backward() -> None:
            with dist_autograd.context() as second:
                loss = apply_pausing(model(torch.full((1, 1), 5.0))).sum()
                dist_autograd.backward(second, [loss])
                found.append(dist_autograd.get_gradients(second)[weight])

        backward = threading.Thread(target=other_backward)
        backward.start()
        assert Pausing.reached.wait(WAIT_SECONDS)
        step = threading.Thread(target=optimizer.step, args=(first,))
        step.start()
        Reporting.stepping.wait(0.2)  # it may begin now, or wait for the backward: both must come out right
        Pausing.may_go_on.set()
        backward.join(WAIT_SECONDS)
        Reporting.may_go_on.set()
        step.join(WAIT_SECONDS)
        assert [lent.item(), *map(Tensor.item, found)] == [3.0, 5.0]
        assert weight.item() == 2.0 - 3.0
        assert weight.grad is None


@in_standing_group(1)
def test_a_step_in_a_hook_that_would_wait_for_its_own_backward_is_refused() -> None:
    with process_group_of_one(), dist_autograd.context() as context_id:
        model = averaged()
        weight = model.module.weight
        optimizer = DistributedOptimizer(torch.optim.SGD, [rpc.RRef(weight)], lr=1.0)
        hook = weight.register_hook(lambda _: optimizer.step(context_id))
        with pytest.raises(AutogradError, match=r"step was called by a hook .* could wait for ever"):
            dist_autograd.backward(context_id, [model(torch.full((1, 1), 3.0)).sum()])
        hook.remove()
        assert weight.grad is None
        dist_autograd.backward(context_id, [model(torch.full((1, 1), 3.0)).sum()])
        optimizer.step(context_id)
        assert weight.item() == 2.0 - 3.0


def through_worker1(x: Tensor) -> Tensor:
    result: Tensor = rpc.rpc_sync("worker1", torch.mul, args=(x, 1))
    return result


@pytest.mark.parametrize("pass_through", [torch.clone, through_worker1], ids=["while it runs", "at the end"])
@in_standing_group()
def test_gradients_in_a_models_buckets_outlast_its_next_backward(
    pass_through: Callable[[Tensor], Tensor],
) -> None:
    with process_group_of_one():
        model = averaged(gradient_as_bucket_view=True)
        weight = model.module.weight
        torch.autograd.backward(model(torch.full((1, 1), 7.0)).sum())
        with dist_autograd.context() as context_id:
            found: list[Tensor] = []
            for value in (3.0, 5.0):
                dist_autograd.backward(context_id, [pass_through(model(torch.full((1, 1), value))).sum()])
                found.append(dist_autograd.get_gradients(context_id)[weight])
        torch.autograd.backward(model(torch.full((1, 1), 11.0)).sum())
        assert [*map(Tensor.item, found), weight.grad.item()] == [3.0, 8.0, 18.0]


def test_whoever_begins_to_watch_for_models_finds_that_their_forward_is_noted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    unwatched, models, wraps = DistributedDataParallel.forward, Models(), functools.wraps
    found: list[Any] = []

    def watch_too() -> None:
        models.watch()
        found.append(DistributedDataParallel.forward)

    other = threading.Thread(target=watch_too)

    def let_another_go_first(forward: Callable[..., Any]) -> Callable[..., Any]:
        other.start()
        other.join(0.1)
        return wraps(forward)

    monkeypatch.setattr("dist_autograd.ddp.functools.wraps", let_another_go_first)
    models.watch()
    other.join()
    models.stop()
    assert found[0] is not unwatched
    assert DistributedDataParallel.forward is unwatched
