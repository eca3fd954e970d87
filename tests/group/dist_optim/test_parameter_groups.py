"""Parameter groups: each has its own options wherever its parameters live, as in one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import optim
from torch.optim import lr_scheduler

import rpc
from dist_optim import DistributedOptimizer
from tests.group.dist_optim.models import PLACES, Spread, Tied, batches
from tests.support.serving import in_standing_group, in_worker0

OPTIMIZERS: list[tuple[Any, dict[str, Any], dict[str, Any]]] = [
    (optim.SGD, {"lr": 0.05, "momentum": 0.9}, {"lr": 0.01, "nesterov": True}),
    (optim.SGD, {"lr": 0.05, "foreach": False}, {"weight_decay": 0.5}),
    (optim.Adam, {"lr": 0.01}, {"betas": (0.5, 0.9), "amsgrad": True}),
    (optim.Adam, {"lr": 0.01, "fused": True}, {"lr": 0.1}),
    (optim.Adafactor, {"lr": 0.01}, {"lr": 0.1}),
]

UNEVEN = ("worker1", "worker1", "worker2")
"""Places of layers such that worker2 has nothing of the first group."""


def in_groups(parameters: list[Any], options: dict[str, Any]) -> list[dict[str, Any]]:
    """The biases and the last weight apart, with options of their own."""
    weights, biases = parameters[0::2], parameters[1::2]
    return [{"params": weights[:2]}, {"params": [*biases, weights[2]], **options}]


def grouped(
    model: Spread, optimizer_class: Any, defaults: dict[str, Any], options: dict[str, Any]
) -> tuple[DistributedOptimizer, optim.Optimizer]:
    """Optimizers for the spread model, and for the local one."""
    spread = DistributedOptimizer(optimizer_class, in_groups(model.references(), options), **defaults)
    single = optimizer_class(in_groups(list(model.local.parameters()), options), **defaults)
    return spread, single


@in_standing_group(world_size=3)
def test_each_group_is_trained_with_its_own_options() -> None:
    for places in (PLACES, UNEVEN):
        for optimizer_class, defaults, options in OPTIMIZERS:
            model = Spread(*places)
            spread, single = grouped(model, optimizer_class, defaults, options)
            model.train(spread, batches(3))
            model.train_local(single, batches(3))
            model.check_same()


@in_standing_group(world_size=3)
def test_a_schedule_may_treat_each_group_in_its_way() -> None:
    model = Spread(*UNEVEN)
    spread, single = grouped(model, optim.SGD, {"lr": 0.05}, {"lr": 0.01})
    options: dict[str, Any] = {"lr_lambda": [lambda epoch: 0.5**epoch, lambda epoch: 1 / (1 + epoch)]}
    scheduler = spread.lr_scheduler(lr_scheduler.LambdaLR, **options)
    local_scheduler = lr_scheduler.LambdaLR(single, **options)
    for epoch in range(3):
        model.train(spread, batches(1, epoch))
        model.train_local(single, batches(1, epoch))
        scheduler.step()
        local_scheduler.step()
        assert scheduler.get_last_lr() == local_scheduler.get_last_lr()
    model.check_same()


@in_standing_group(world_size=3)
def test_a_state_of_groups_is_loaded_wherever_it_comes_from() -> None:
    model = Spread(*UNEVEN)
    spread, single = grouped(model, optim.Adam, {"lr": 0.05}, {"lr": 0.01})
    model.train(spread, batches(2))
    model.train_local(single, batches(2))
    saved = spread.state_dict(), single.state_dict()  # the form is the same, and so are the numbers
    for seed, state in enumerate(saved):
        model = Spread(*UNEVEN)
        fresh, local = grouped(model, optim.Adam, {"lr": 5.0}, {"betas": (0.1, 0.1)})
        fresh.load_state_dict(state)
        local.load_state_dict(saved[1])
        model.train(fresh, batches(2, seed))
        model.train_local(local, batches(2, seed))
        model.check_same()


def weight_of(model: rpc.RRef[Tied]) -> rpc.RRef[torch.Tensor]:
    return rpc.RRef(model.local_value().weight)


@in_worker0()
def test_what_is_no_group_is_refused_with_what_is_wrong() -> None:
    tensor = rpc.remote("worker1", torch.ones, args=(2,))
    text = rpc.remote("worker1", str, args=("hello",))
    tied = rpc.remote("worker1", Tied)
    weights = [rpc.rpc_sync("worker1", weight_of, args=(tied,)) for _ in range(2)]
    bad: list[tuple[Any, type[Exception], str]] = [
        ({"params": [tensor]}, TypeError, r"one parameter group, not a list of them: pass \[params_rref\]"),
        ([{"params": [tensor]}, tensor], TypeError, r"params_rref\[1\] is a \w*RRef, not a parameter group"),
        ([tensor, {"params": [tensor]}], TypeError, r"params_rref\[0\] is a \w*RRef, not a parameter group"),
        ([{"lr": 0.1}], TypeError, r"params_rref\[0\] is a dict, not a parameter group"),
        ([{"params": []}], ValueError, r"params_rref\[0\] is a parameter group without parameters"),
        (
            [{"params": tensor}, {"params": [torch.ones(2)]}],
            TypeError,
            r"params_rref\[1\]\['params'\]\[0\] is a Tensor, not a reference",
        ),
        ([{"params": tensor}, {"params": text}], TypeError, "reference 1 of all groups refers to a str"),
        (
            [{"params": weights[0]}, {"params": weights[1]}],
            ValueError,
            "references 0 and 1 are to one parameter on worker 'worker1', in the parameter groups 0 and 1",
        ),
    ]
    for given, kind, message in bad:
        with pytest.raises(kind, match=message):
            DistributedOptimizer(optim.SGD, given, lr=0.1)
    optimizer = DistributedOptimizer(optim.SGD, [{"params": weights}], lr=0.1)  # twice in one group
    assert [group["params"] for group in optimizer.state_dict()["param_groups"]] == [[0]]
