"""``DistributedOptimizer``: spread parameters are trained as they would be in one process."""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch import Tensor, nn, optim

import dist_autograd
import rpc
from dist_optim import DistributedOptimizer
from rref import RemoteModule
from tests.group.dist_optim.models import PLACES, Spread, Tied, batches, look_at_grad
from tests.support.default_device import not_on_devices, placed
from tests.support.serving import in_standing_group

OPTIMIZERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "sgd": (optim.SGD, {"lr": 0.05}),
    "sgd with momentum": (optim.SGD, {"lr": 0.01, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
    "sgd one by one": (optim.SGD, {"lr": 0.05, "foreach": False}),
    "adam": (optim.Adam, {"lr": 0.01, "amsgrad": True}),
    "adam fused": (optim.Adam, {"lr": 0.01, "fused": True}),
    "adamw": (optim.AdamW, {"lr": 0.01}),
    "adamax": (optim.Adamax, {"lr": 0.01}),
    "nadam": (optim.NAdam, {"lr": 0.01}),
    "radam": (optim.RAdam, {"lr": 0.01}),
    "adadelta": (optim.Adadelta, {"rho": 0.95}),
    "adagrad": (optim.Adagrad, {"lr": 0.05}),
    "asgd": (optim.ASGD, {"lr": 0.01}),
    "rmsprop": (optim.RMSprop, {"lr": 0.01, "momentum": 0.5, "centered": True}),
    "rprop": (optim.Rprop, {"lr": 0.01}),
    "adafactor": (optim.Adafactor, {"lr": 0.01}),
}


@in_standing_group(world_size=3)
def test_every_optimizer_of_pytorch_trains_as_in_one_process() -> None:
    for optimizer_class, options in OPTIMIZERS.values():
        model = Spread(*PLACES)
        inputs = batches(3)
        model.train(DistributedOptimizer(optimizer_class, model.references(), **options), inputs)
        model.train_local(optimizer_class(model.local.parameters(), **options), inputs)
        model.check_same()


class Bag(nn.Module):
    """An embedding with sparse gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(10, 2, sparse=True)
        nn.init.ones_(self.table.weight)

    def forward(self, rows: Tensor) -> Tensor:
        found: Tensor = self.table(rows)
        return found


@not_on_devices("the simulated device has no sparse tensors")
@in_standing_group()
def test_sparse_gradients_are_clipped_and_used() -> None:
    rows = [torch.tensor([1, 2, 2]), torch.tensor([2, 7])]
    for optimizer_class in (optim.SparseAdam, optim.SGD):
        remote, local = RemoteModule(placed("worker1"), Bag), Bag()
        spread = DistributedOptimizer(optimizer_class, remote.remote_parameters(), lr=0.1)
        single: optim.Optimizer = optimizer_class(local.parameters(), lr=0.1)
        for each in rows:
            with dist_autograd.context() as context_id:
                dist_autograd.backward(context_id, [remote(each).square().sum()])
                total = spread.clip_grad_norm_(context_id, 1.0)
                spread.step(context_id)
            single.zero_grad()
            torch.autograd.backward(local(each).square().sum())
            [weight] = local.parameters()
            assert weight.grad is not None
            norm = weight.grad.to_dense().norm()
            torch.testing.assert_close(total, norm)
            weight.grad *= min(1.0, float(1.0 / (norm + 1e-6)))
            single.step()
        torch.testing.assert_close(remote.remote_parameters()[0].to_here().detach(), weight.detach())


def give_grad(model: rpc.RRef[nn.Module]) -> None:
    for parameter in model.local_value().parameters():
        parameter.grad = torch.full_like(parameter, 7.0)


@in_standing_group()
def test_gradients_of_the_context_are_used_and_those_in_grad_are_left_alone() -> None:
    model = Spread("worker1", "worker1", "worker0")
    optimizer = DistributedOptimizer(optim.SGD, model.references(), lr=0.05)
    inputs = batches(2)
    model.train(optimizer, inputs[:1])
    first, second, _third = [module.get_module_rref() for module in model.remote]
    assert rpc.rpc_sync("worker1", look_at_grad, args=(first,)) == [None, None]
    rpc.rpc_sync("worker1", give_grad, args=(second,))
    model.train(optimizer, inputs[1:])
    for gradient in rpc.rpc_sync("worker1", look_at_grad, args=(second,)):
        assert gradient is not None
        assert gradient.eq(7).all()
    model.train_local(optim.SGD(model.local.parameters(), lr=0.05), inputs)
    model.check_same()


@in_standing_group(world_size=3)
def test_parameters_without_a_gradient_in_the_context_are_left_alone() -> None:
    model = Spread(*PLACES)
    optimizer = DistributedOptimizer(optim.SGD, model.references(), lr=0.05, weight_decay=0.5)
    before = model.values()
    with dist_autograd.context() as context_id:
        dist_autograd.backward(context_id, [model.remote[0](batches(1)[0]).sum()])
        optimizer.step(context_id)
    changed = [not torch.equal(one, other) for one, other in zip(before, model.values(), strict=True)]
    assert changed == [True, True, False, False, False, False]


@in_standing_group(world_size=3)
def test_a_step_may_be_taken_on_another_thread() -> None:
    model = Spread(*PLACES)
    optimizer = DistributedOptimizer(optim.SGD, model.references(), lr=0.05)
    with dist_autograd.context() as context_id:
        dist_autograd.backward(context_id, [model.loss(batches(1)[0])])
        stepping = threading.Thread(target=optimizer.step, args=(context_id,))  # no context of its own
        stepping.start()
        stepping.join()
    model.train_local(optim.SGD(model.local.parameters(), lr=0.05), batches(1))
    model.check_same()


@in_standing_group()
def test_a_parameter_that_is_given_twice_is_optimized_once() -> None:
    remote, local, x = RemoteModule(placed("worker1"), Tied), Tied(), torch.ones(2, 3)
    references = [*remote.remote_parameters(), *remote.remote_parameters()]
    spread = DistributedOptimizer(optim.SGD, references, lr=0.1, momentum=0.9)
    single = optim.SGD(local.parameters(), lr=0.1, momentum=0.9)
    for _step in range(2):
        with dist_autograd.context() as context_id:
            dist_autograd.backward(context_id, [remote(x).sum()])
            norm = spread.clip_grad_norm_(context_id, 100.0)
            spread.step(context_id)
        single.zero_grad()
        torch.autograd.backward(local(x).sum())
        assert norm == nn.utils.clip_grad_norm_(local.parameters(), 100.0)
        single.step()
    torch.testing.assert_close(references[0].to_here().detach(), local.weight.detach())
    spread.load_state_dict(spread.state_dict())


class Descent:
    """Has what an optimizer needs, and no more."""

    def __init__(self, parameters: list[Tensor]) -> None:
        self.parameters = parameters

    def step(self) -> None:
        for parameter in self.parameters:
            assert parameter.grad is not None
            parameter.sub_(parameter.grad)


@in_standing_group(world_size=3)
def test_an_optimizer_of_the_program_s_own_needs_no_more_than_steps() -> None:
    model = Spread(*PLACES)
    of_ours: Any = Descent
    model.train(DistributedOptimizer(of_ours, model.references()), batches(1))
    model.train_local(optim.SGD(model.local.parameters(), lr=1.0), batches(1))
    model.check_same()
