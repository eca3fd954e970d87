"""Checkpoints and learning-rate schedules of distributed optimizers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import optim
from torch.optim import lr_scheduler

from dist_optim import DistributedLRScheduler, DistributedOptimizer
from tests.group.dist_optim.models import PLACES, Spread, batches
from tests.support.serving import first_of, in_group, in_standing_group, in_worker0, serve
from tests.support.workers import RunWorkers, Worker

OPTIMIZERS: list[tuple[Any, dict[str, Any]]] = [
    (optim.SGD, {"lr": 0.01, "momentum": 0.9}),
    (optim.Adam, {"lr": 0.01, "amsgrad": True}),
    (optim.Adagrad, {"lr": 0.05}),
    (optim.Rprop, {"lr": 0.01}),
]


# ---- checkpoints


def train_and_save(worker: Worker) -> None:
    saved = []
    for optimizer_class, options in OPTIMIZERS:
        model = Spread(*PLACES)
        optimizer = DistributedOptimizer(optimizer_class, model.references(), **options)
        scheduler = optimizer.lr_scheduler(lr_scheduler.ExponentialLR, 0.5)
        model.train(optimizer, batches(3))
        scheduler.step()
        layers = [module.get_module_rref().rpc_sync().state_dict() for module in model.remote]
        saved.append(
            {"optimizer": optimizer.state_dict(), "scheduler": scheduler.state_dict(), "model": layers}
        )
    torch.save(saved, worker.folder / "checkpoint")


def load_and_go_on(worker: Worker, *places: str) -> None:
    saved = torch.load(worker.folder / "checkpoint")
    later = batches(3, seed=1)
    for (optimizer_class, options), checkpoint in zip(OPTIMIZERS, saved, strict=True):
        model = Spread(*places)
        for module, state in zip(model.remote, checkpoint["model"], strict=True):
            module.get_module_rref().rpc_sync().load_state_dict(state)
        optimizer = DistributedOptimizer(optimizer_class, model.references(), **options | {"lr": 77.0})
        optimizer.load_state_dict(checkpoint["optimizer"])
        scheduler = optimizer.lr_scheduler(lr_scheduler.ExponentialLR, 0.5)
        scheduler.load_state_dict(checkpoint["scheduler"])
        model.train(optimizer, later[:2])
        scheduler.step()
        model.train(optimizer, later[2:])
        local = optimizer_class(model.local.parameters(), **options)
        local_scheduler = lr_scheduler.ExponentialLR(local, 0.5)
        model.train_local(local, batches(3))
        local_scheduler.step()
        model.train_local(local, later[:2])
        local_scheduler.step()
        model.train_local(local, later[2:])
        model.check_same()


@pytest.mark.parametrize(
    "places", [PLACES, ("worker2", "worker2", "worker0")], ids=["as before", "elsewhere"]
)
def test_training_goes_on_exactly_from_a_checkpoint_in_a_new_group(
    run_workers: RunWorkers, places: tuple[str, ...]
) -> None:
    first_of(run_workers, train_and_save, world_size=3)
    first_of(run_workers, load_and_go_on, *places, world_size=3)


@in_worker0()
def test_a_state_is_a_copy_and_a_wrong_one_changes_nothing() -> None:
    model = Spread("worker0", "worker1", "worker1")
    optimizer = DistributedOptimizer(optim.SGD, model.references(), lr=0.01, momentum=0.9)
    model.train(optimizer, batches(1))
    state = optimizer.state_dict()
    before = state["state"][0]["momentum_buffer"].clone()
    model.train(optimizer, batches(2))
    assert torch.equal(state["state"][0]["momentum_buffer"], before)
    with pytest.raises(ValueError, match="the state is about 5 parameters"):
        optimizer.load_state_dict(state | {"param_groups": [{"lr": 0.1, "params": list(range(5))}]})
    with pytest.raises(ValueError, match="no optimizer's state"):
        optimizer.load_state_dict({})
    assert set(optimizer.state_dict()["state"]) == set(range(6))


@in_standing_group(world_size=3)
def test_the_state_of_a_single_optimizer_can_be_loaded() -> None:
    model = Spread(*PLACES)
    local = optim.Adam(model.local.parameters(), lr=0.01)
    model.train_local(local, batches(2))
    optimizer = DistributedOptimizer(optim.Adam, model.references(), lr=0.01)
    model.train(optimizer, batches(2))
    optimizer.load_state_dict(local.state_dict())
    model.train(optimizer, batches(1))
    model.train_local(local, batches(1))
    model.check_same()


# ---- schedules


def in_sequence(optimizer: optim.Optimizer) -> lr_scheduler.SequentialLR:
    """A schedule made of others needs the optimizer for each: a function can make it."""
    warm_up = lr_scheduler.LinearLR(optimizer, 0.1, total_iters=2)
    then = lr_scheduler.ExponentialLR(optimizer, 0.7)
    return lr_scheduler.SequentialLR(optimizer, [warm_up, then], milestones=[2])


SCHEDULES: list[tuple[Any, dict[str, Any], Callable[[int], tuple[Any, ...]]]] = [
    (lr_scheduler.StepLR, {"step_size": 2, "gamma": 0.5}, lambda _: ()),
    (lr_scheduler.LambdaLR, {"lr_lambda": lambda epoch: 1 / (1 + epoch)}, lambda _: ()),
    (lr_scheduler.OneCycleLR, {"max_lr": 0.1, "total_steps": 8}, lambda _: ()),
    (lr_scheduler.ReduceLROnPlateau, {"patience": 0, "factor": 0.3}, lambda epoch: (1.0 + epoch,)),
    (in_sequence, {}, lambda _: ()),
]


@pytest.mark.filterwarnings("ignore:The epoch parameter")
@in_standing_group(world_size=3)
def test_every_owner_follows_the_schedule() -> None:
    for schedule, options, metric in SCHEDULES:
        model = Spread(*PLACES)
        optimizer = DistributedOptimizer(optim.SGD, model.references(), lr=0.05, momentum=0.5)
        scheduler = optimizer.lr_scheduler(schedule, **options)
        assert isinstance(scheduler, DistributedLRScheduler)
        local = optim.SGD(model.local.parameters(), lr=0.05, momentum=0.5)
        local_scheduler = schedule(local, **options)
        for epoch in range(5):
            model.train(optimizer, batches(1, epoch))
            model.train_local(local, batches(1, epoch))
            scheduler.step(*metric(epoch))
            local_scheduler.step(*metric(epoch))
            assert scheduler.get_last_lr() == local_scheduler.get_last_lr()
            assert {group["lr"] for group in optimizer.state_dict()["param_groups"]} == {
                local.param_groups[0]["lr"]
            }
        model.check_same()


def schedule_badly(_: Worker) -> None:
    model = Spread(*PLACES)
    optimizer = DistributedOptimizer(optim.SGD, model.references(), lr=0.05)
    with pytest.raises(TypeError, match="step_size") as caught:
        optimizer.lr_scheduler(lr_scheduler.StepLR)
    assert "making a StepLR failed on worker 'worker1'" in "\n".join(caught.value.__notes__)
    plateau = optimizer.lr_scheduler(lr_scheduler.ReduceLROnPlateau)
    with pytest.raises(TypeError, match="metrics") as caught:
        plateau.step()
    assert "step failed on worker 'worker2'" in "\n".join(caught.value.__notes__)


def test_a_schedule_that_cannot_be_made_or_stepped_says_where(run_workers: RunWorkers) -> None:
    run_workers([in_group(schedule_badly), serve, serve])
