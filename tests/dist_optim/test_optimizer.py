"""``DistributedOptimizer``: spread parameters are trained as they would be in one process."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim

import dist_autograd
import rpc
from dist_optim import DistributedOptimizer
from rpc.errors import AutogradError, RRefError, WorkerLostError
from rref import RemoteModule
from tests.dist_optim.models import Spread, batches
from tests.serving import first_of, in_group, open_gate, serve, wait_at_gate
from tests.workers import RunWorkers, Worker

PLACES = ("worker1", "worker2", "worker1")

# ---- steps


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


def train_with_each(_: Worker) -> None:
    for optimizer_class, options in OPTIMIZERS.values():
        model = Spread(*PLACES)
        inputs = batches(3)
        model.train(DistributedOptimizer(optimizer_class, model.references(), **options), inputs)
        model.train_local(optimizer_class(model.local.parameters(), **options), inputs)
        model.check_same()


def test_every_optimizer_of_pytorch_trains_as_in_one_process(run_workers: RunWorkers) -> None:
    first_of(run_workers, train_with_each, world_size=3)


class Bag(nn.Module):
    """An embedding with sparse gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(10, 2, sparse=True)
        nn.init.ones_(self.table.weight)

    def forward(self, rows: Tensor) -> Tensor:
        found: Tensor = self.table(rows)
        return found


def train_sparse(_: Worker) -> None:
    rows = [torch.tensor([1, 2, 2]), torch.tensor([2, 7])]
    for optimizer_class in (optim.SparseAdam, optim.SGD):
        remote, local = RemoteModule("worker1", Bag), Bag()
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


def test_sparse_gradients_are_clipped_and_used(run_workers: RunWorkers) -> None:
    first_of(run_workers, train_sparse)


def look_at_grad(model: rpc.RRef[nn.Module]) -> list[Tensor | None]:
    return [parameter.grad for parameter in model.local_value().parameters()]


def give_grad(model: rpc.RRef[nn.Module]) -> None:
    for parameter in model.local_value().parameters():
        parameter.grad = torch.full_like(parameter, 7.0)


def step_beside_other_gradients(_: Worker) -> None:
    model = Spread("worker1", "worker1", "worker0")
    optimizer = DistributedOptimizer(optim.SGD, model.references(), lr=0.05)
    inputs = batches(2)
    model.train(optimizer, inputs[:1])
    first, second, _third = [module.get_module_rref() for module in model.remote]
    assert rpc.rpc_sync("worker1", look_at_grad, args=(first,)) == [None, None]
    rpc.rpc_sync("worker1", give_grad, args=(second,))
    model.train(optimizer, inputs[1:])
    for gradient in rpc.rpc_sync("worker1", look_at_grad, args=(second,)):
        assert gradient.eq(7).all()
    model.train_local(optim.SGD(model.local.parameters(), lr=0.05), inputs)
    model.check_same()


def test_gradients_of_the_context_are_used_and_those_in_grad_are_left_alone(run_workers: RunWorkers) -> None:
    first_of(run_workers, step_beside_other_gradients)


def leave_some_out(_: Worker) -> None:
    model = Spread(*PLACES)
    optimizer = DistributedOptimizer(optim.SGD, model.references(), lr=0.05, weight_decay=0.5)
    before = model.values()
    with dist_autograd.context() as context_id:
        dist_autograd.backward(context_id, [model.remote[0](batches(1)[0]).sum()])
        optimizer.step(context_id)
    changed = [not torch.equal(one, other) for one, other in zip(before, model.values(), strict=True)]
    assert changed == [True, True, False, False, False, False]


def test_parameters_without_a_gradient_in_the_context_are_left_alone(run_workers: RunWorkers) -> None:
    first_of(run_workers, leave_some_out, world_size=3)


def step_after(_: Worker) -> None:
    model = Spread(*PLACES)
    optimizer = DistributedOptimizer(optim.SGD, model.references(), lr=0.05)
    with dist_autograd.context() as context_id:
        dist_autograd.backward(context_id, [model.loss(batches(1)[0])])
        stepping = threading.Thread(target=optimizer.step, args=(context_id,))  # no context of its own
        stepping.start()
        stepping.join()
    model.train_local(optim.SGD(model.local.parameters(), lr=0.05), batches(1))
    model.check_same()


def test_a_step_may_be_taken_on_another_thread(run_workers: RunWorkers) -> None:
    first_of(run_workers, step_after, world_size=3)


class Tied(nn.Module):
    """Its input and output share a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3, 3))

    def forward(self, x: Tensor) -> Tensor:
        return (x @ self.weight).tanh() @ self.weight.t()


def train_tied(_: Worker) -> None:
    remote, local, x = RemoteModule("worker1", Tied), Tied(), torch.ones(2, 3)
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


def test_a_parameter_that_is_given_twice_is_optimized_once(run_workers: RunWorkers) -> None:
    first_of(run_workers, train_tied)


# ---- several trainers

STEPS = 20


class Counted(nn.Module):
    """The gradient of its parameter is the input, whatever the parameter is."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1000))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x


def train_often(module: RemoteModule, optimizer: DistributedOptimizer | None, value: float) -> None:
    if optimizer is None:
        optimizer = DistributedOptimizer(optim.SGD, module.remote_parameters(), lr=1.0)
    for _ in range(STEPS):
        with dist_autograd.context() as context_id:
            dist_autograd.backward(context_id, [module(torch.tensor(value)).sum()])
            optimizer.step(context_id)


@pytest.mark.parametrize("shared", [True, False], ids=["one optimizer", "one for each"])
def test_concurrent_steps_of_several_trainers_lose_nothing(run_workers: RunWorkers, shared: bool) -> None:
    def direct(_: Worker) -> list[float]:
        module = RemoteModule("worker0", Counted)
        optimizer = DistributedOptimizer(optim.SGD, module.remote_parameters(), lr=1.0) if shared else None
        values = (1.0, 64.0)
        calls = [
            rpc.rpc_async(f"worker{index + 1}", train_often, args=(module, optimizer, value))
            for index, value in enumerate(values)
            for _ in range(2)  # two threads of each worker
        ]
        for call in calls:
            call.wait()
        weight: Tensor = module.remote_parameters()[0].to_here()
        return sorted(set(weight.tolist()))

    assert first_of(run_workers, direct, world_size=3) == [-2.0 * STEPS * 65]


def overtake(stale_gradients: bool) -> Tensor:
    """A step comes between the forward and the backward of another context; the parameter that results."""
    module = RemoteModule("worker1", Tied)
    x = torch.ones(2, 3, requires_grad=True)
    references = module.remote_parameters()
    optimizer = DistributedOptimizer(optim.SGD, references, lr=0.1, stale_gradients=stale_gradients)
    with dist_autograd.context() as context_id:
        loss = module(x).sum()
        rpc.rpc_sync("worker0", step_once, args=(module, optimizer))
        dist_autograd.backward(context_id, [loss])
        optimizer.step(context_id)
    result: Tensor = references[0].to_here()
    return result


def step_once(module: RemoteModule, optimizer: DistributedOptimizer) -> None:
    taking = threading.Thread(target=step_alone, args=(module, optimizer))  # in a context of its own
    taking.start()
    taking.join()


def step_alone(module: RemoteModule, optimizer: DistributedOptimizer) -> None:
    with dist_autograd.context() as context_id:
        dist_autograd.backward(context_id, [module(torch.ones(2, 3)).sum()])
        optimizer.step(context_id)


def be_overtaken(_: Worker) -> None:
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        overtake(stale_gradients=False)
    assert overtake(stale_gradients=True).isfinite().all()


def test_a_step_before_anothers_backward_is_refused_or_allowed_as_asked(run_workers: RunWorkers) -> None:
    first_of(run_workers, be_overtaken)


# ---- clipping


def clip(_: Worker) -> None:
    for max_norm, norm_type in ((0.5, 2.0), (0.5, 1.0), (0.01, float("inf")), (1000.0, 2.0), (0.3, 3.0)):
        clip_to(max_norm, norm_type)


def clip_to(max_norm: float, norm_type: float) -> None:
    model, norms = Spread(*PLACES), list[Tensor]()
    spread = DistributedOptimizer(optim.SGD, model.references(), lr=0.1)
    inputs = batches(2)
    model.train(
        spread,
        inputs,
        lambda context_id: norms.append(spread.clip_grad_norm_(context_id, max_norm, norm_type)),
    )
    parameters = list(model.local.parameters())
    model.train_local(
        optim.SGD(parameters, lr=0.1),
        inputs,
        lambda: norms.append(nn.utils.clip_grad_norm_(parameters, max_norm, norm_type)),
    )
    model.check_same()
    torch.testing.assert_close(norms[:2], norms[2:])


def test_clipping_by_the_norm_over_all_owners_is_that_of_one_process(run_workers: RunWorkers) -> None:
    first_of(run_workers, clip, world_size=3)


class Pair(nn.Module):
    """Both parameters get one and the same tensor as their gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Parameter(torch.zeros(4))
        self.other = nn.Parameter(torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        return (self.one + self.other) * x


def clip_shared_gradient(_: Worker) -> list[list[float]]:
    module = RemoteModule("worker1", Pair)
    optimizer = DistributedOptimizer(optim.SGD, module.remote_parameters(), lr=1.0)
    with dist_autograd.context() as context_id:
        dist_autograd.backward(context_id, [module(torch.full((4,), 2.0)).sum()])
        assert optimizer.clip_grad_norm_(context_id, 8**0.5) == 32**0.5
        assert optimizer.clip_grad_norm_(context_id, 100.0).item() == pytest.approx(8**0.5)
        optimizer.step(context_id)
    return [reference.to_here().tolist() for reference in module.remote_parameters()]


def test_a_gradient_that_two_parameters_share_is_scaled_once(run_workers: RunWorkers) -> None:
    for weight in first_of(run_workers, clip_shared_gradient):
        assert weight == pytest.approx([-1.0] * 4)


def clip_infinite(_: Worker) -> None:
    module = RemoteModule("worker1", Pair)
    optimizer = DistributedOptimizer(optim.SGD, module.remote_parameters(), lr=1.0)
    with dist_autograd.context() as context_id:
        assert optimizer.clip_grad_norm_(context_id, 1.0) == 0  # nothing to clip yet
        dist_autograd.backward(context_id, [module(torch.full((4,), float("inf"))).sum()])
        with pytest.raises(RuntimeError, match=r"norm of order 2\.0 of the gradients is inf"):
            optimizer.clip_grad_norm_(context_id, 1.0, error_if_nonfinite=True)
        assert optimizer.clip_grad_norm_(context_id, 1.0) == float("inf")
        optimizer.step(context_id)
    assert module.remote_parameters()[0].to_here().isnan().all()  # as in PyTorch: infinity times zero


def test_a_norm_that_is_not_finite_is_told_and_can_be_refused(run_workers: RunWorkers) -> None:
    first_of(run_workers, clip_infinite)


# ---- what goes wrong


class FailsToBegin(optim.SGD):
    def __init__(self, params: Any) -> None:
        super().__init__(params)
        raise ArithmeticError("no beginning")


class FailsOnWorker1(optim.SGD):
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        if rpc.get_worker_info().name == "worker1":
            raise ArithmeticError("no step here")
        super().step(closure)


def notes_of(error: BaseException) -> str:
    return "\n".join(error.__notes__)


def fail_remotely(_: Worker) -> None:
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


def test_an_error_on_an_owner_is_raised_here_and_names_the_worker(run_workers: RunWorkers) -> None:
    first_of(run_workers, fail_remotely, world_size=3)


def give_badly(_: Worker) -> None:
    tensor = rpc.remote("worker1", torch.ones, args=(2,))
    text = rpc.remote("worker1", str, args=("hello",))
    bad: list[tuple[Any, type[Exception], str]] = [
        ([], ValueError, "got an empty list of parameters"),
        ([tensor, torch.ones(2)], TypeError, r"params_rref\[1\] is a Tensor, not a reference: .* rpc\.RRef"),
        ([tensor, text], TypeError, r"params_rref\[1\] refers to a str on worker 'worker1'"),
        ([rpc.remote("worker1", [].pop)], IndexError, "pop from empty list"),
    ]
    for references, kind, message in bad:
        with pytest.raises(kind, match=message):
            DistributedOptimizer(optim.SGD, references, lr=0.1)
    optimizer = DistributedOptimizer(optim.SGD, [tensor], lr=0.1)
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


def test_wrong_arguments_are_refused_with_what_is_wrong(run_workers: RunWorkers) -> None:
    first_of(run_workers, give_badly)


class Held(optim.SGD):
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        wait_at_gate()


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
