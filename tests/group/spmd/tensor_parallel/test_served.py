"""A model that is cut over workers of the RPC group, behind one object."""

from __future__ import annotations

import resource
import threading
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import Replicate, Shard
from torch.nn import functional

import dist_autograd
import rpc
from dist_optim import DistributedOptimizer
from rpc.errors import UnknownWorkerError
from spmd.tensor_parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    SequenceParallel,
    ShardedModule,
    parallelize_module,
)
from spmd.tensor_parallel.coordinator import Coordinator
from spmd.tensor_parallel.errors import ParallelError, ParallelTypeError
from spmd.tensor_parallel.shard import Call, Outcome, Task
from spmd.workers.step_queue import StepQueue
from tests.support.default_device import MODE, not_on_devices, placed
from tests.support.served import (
    MLP_PLAN,
    PLAN,
    WIDTH,
    Mlp,
    Net,
    names,
    served,
    served_and_alone,
    words,
)
from tests.support.serving import WAIT_SECONDS, first_of, in_standing_group, in_worker0
from tests.support.workers import RunWorkers, Worker

SHARDS = pytest.mark.parametrize("shards", [2, pytest.param(4, marks=pytest.mark.nightly)])


@SHARDS
def test_a_call_gives_what_the_module_does(run_workers: RunWorkers, shards: int) -> None:
    def task(worker: Worker) -> None:
        model, alone = served_and_alone(worker)
        torch.testing.assert_close(model(words()), alone(words()))
        torch.testing.assert_close(model(words(), scale=2.0), alone(words(), 2.0))
        model.close()

    first_of(run_workers, task, world_size=shards + 1)


@pytest.mark.parametrize(("shards", "optimizer"), [(2, torch.optim.SGD), (4, torch.optim.AdamW)])
def test_training_gives_what_it_does_in_one_process(
    run_workers: RunWorkers, shards: int, optimizer: Any
) -> None:
    def task(worker: Worker) -> None:
        model, alone = served_and_alone(worker)
        before = nn.Linear(3, 1)
        ours = DistributedOptimizer(optimizer, [*model.remote_parameters(), rpc.RRef(before.weight)], lr=0.1)
        theirs_before = nn.Linear(3, 1)
        theirs_before.load_state_dict(before.state_dict())
        theirs = optimizer([*alone.parameters(), theirs_before.weight], lr=0.1)
        for step in range(3):
            scale = torch.randn(4, 5, 3)
            with dist_autograd.context() as context_id:
                loss = functional.cross_entropy(
                    model(words(seed=step), before(scale)).flatten(0, 1), words(seed=9).flatten()
                )
                dist_autograd.backward(context_id, [loss])
                ours.step(context_id)
            theirs.zero_grad()
            expected = functional.cross_entropy(
                alone(words(seed=step), theirs_before(scale)).flatten(0, 1), words(seed=9).flatten()
            )
            torch.autograd.backward(expected)
            theirs.step()
            torch.testing.assert_close(loss, expected)
        torch.testing.assert_close(model.state_dict(), state_of(alone))
        torch.testing.assert_close(before.weight, theirs_before.weight)

    first_of(run_workers, task, world_size=shards + 1)


def loss_there(outputs: Tensor) -> Tensor:
    return outputs.square().sum()


@in_standing_group(3)
def test_backward_and_step_trains_the_shard_of_a_worker_that_computes_the_loss(worker: Worker) -> None:
    model, alone = served_and_alone(worker, Mlp, MLP_PLAN)
    ours = DistributedOptimizer(torch.optim.SGD, model.remote_parameters(), lr=0.1)
    x = torch.randn(4, WIDTH)
    with dist_autograd.context() as context_id:
        loss = rpc.rpc_sync("worker1", loss_there, args=(model(x),))
        ours.backward_and_step(context_id, [loss + 0])
    torch.autograd.backward(alone(x).square().sum())
    torch.optim.SGD(alone.parameters(), lr=0.1).step()
    torch.testing.assert_close(model.state_dict(), state_of(alone))


@in_standing_group(3)
def test_clipping_counts_replicated_parameters_once(worker: Worker) -> None:
    model, alone = served_and_alone(worker)
    own = nn.Linear(WIDTH, WIDTH)  # of the driver's
    twin = nn.Linear(WIDTH, WIDTH)
    twin.load_state_dict(own.state_dict())
    parameters: list[Any] = [*model.remote_parameters(), *(rpc.RRef(each) for each in own.parameters())]
    optimizer = DistributedOptimizer(torch.optim.SGD, parameters, lr=0.1)
    theirs = torch.optim.SGD([*alone.parameters(), *twin.parameters()], lr=0.1)
    x = torch.randn(4, 5, WIDTH)
    with dist_autograd.context() as context_id:
        dist_autograd.backward(context_id, [model(words(), own(x)).square().sum()])
        norm = optimizer.clip_grad_norm_(context_id, 0.5)
        model.step(optimizer, context_id)
    torch.autograd.backward(alone(words(), twin(x)).square().sum())
    expected = nn.utils.clip_grad_norm_([*alone.parameters(), *twin.parameters()], 0.5)
    theirs.step()
    torch.testing.assert_close(norm, expected, check_device=False)
    torch.testing.assert_close(model.state_dict(), state_of(alone))
    torch.testing.assert_close(own.weight, twin.weight)


@in_standing_group(3)
def test_a_graph_that_is_retained_can_be_run_again(worker: Worker) -> None:
    model, alone = served_and_alone(worker, Mlp, MLP_PLAN)
    x = torch.randn(4, WIDTH, requires_grad=True)
    with dist_autograd.context() as context_id:
        loss = model(x).sum()
        dist_autograd.backward(context_id, [loss], retain_graph=True)
        dist_autograd.backward(context_id, [loss])
        torch.testing.assert_close(
            dist_autograd.get_gradients(context_id)[x], 2 * torch.autograd.grad(alone(x).sum(), x)[0]
        )
        with pytest.raises(RuntimeError, match="second time"):
            dist_autograd.backward(context_id, [loss])


@in_standing_group(3)
def test_without_a_context_results_have_no_history(worker: Worker) -> None:
    model = served(worker, Mlp, MLP_PLAN)
    x = torch.randn(4, WIDTH, requires_grad=True)
    assert not model(x).requires_grad
    with dist_autograd.context(), torch.no_grad():
        assert not model(x).requires_grad


@in_standing_group(3)
def test_sequence_parallel_models_come_whole(worker: Worker) -> None:
    plan = {
        "": PrepareModuleInput(input_layouts=Replicate(), desired_input_layouts=Shard(0)),
        "0": SequenceParallel(sequence_dim=0),
        "1": SequenceParallel(sequence_dim=0),
    }
    model, alone = served_and_alone(worker, partial(_norms), plan)
    x = torch.randn(4, WIDTH)
    torch.testing.assert_close(model(x), alone(x))


def _norms() -> nn.Module:
    return nn.Sequential(nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH))


@in_standing_group(3)
def test_all_shards_drop_the_same_elements(worker: Worker) -> None:
    """Each column of the result is computed by another shard, and is the sum of what is left."""
    model = served(worker, _dropping, {"1": ColwiseParallel(use_local_output=False)}, initialize=ones)
    x = torch.ones(64, WIDTH)
    sums = model(x)
    assert (sums == sums[:, :1]).all()
    assert len(set(sums[:, 0].tolist())) > 1
    assert not torch.equal(model(x), sums)
    assert (model.eval()(x) == WIDTH).all()


def _dropping() -> nn.Module:
    return nn.Sequential(nn.Dropout(0.5), nn.Linear(WIDTH, WIDTH, bias=False))


def ones(module: nn.Module) -> None:
    for parameter in module.parameters():
        nn.init.ones_(parameter)


# ---- several clients


def call_often(model: ShardedModule, seed: int) -> list[Tensor]:
    return [model(words(rows, seed)) for rows in range(1, 11)]


def train_often(model: ShardedModule, seed: int) -> list[Tensor]:
    """Gradients of the input, each time."""
    found = []
    for step in range(5):
        scale = torch.full((4, 5, 1), float(step), requires_grad=True)
        with dist_autograd.context() as context_id:
            dist_autograd.backward(context_id, [model(words(seed=seed), scale).square().sum()])
            found.append(dist_autograd.get_gradients(context_id)[scale])
    return found


@pytest.mark.parametrize("max_batch_size", [1, 20])
@in_worker0(4)
def test_several_clients_use_it_at_once(worker: Worker, max_batch_size: int) -> None:
    torch.manual_seed(0)
    alone = Net()
    model = parallelize_module(
        Net,
        workers=[placed("worker1"), placed("worker2")],
        parallelize_plan=PLAN,
        max_batch_size=max_batch_size,
    )
    model.load_state_dict(alone.state_dict())
    clients = [rpc.rpc_async("worker3", call_often, args=(model, seed)) for seed in range(4)]
    clients += [rpc.rpc_async("worker1", call_often, args=(model, 4))]
    trainer = "worker3" if MODE else "worker2"  # on a device, none of the model's own
    gradients = rpc.rpc_async(trainer, train_often, args=(model, 7))
    for seed, client in enumerate(clients):
        for rows, result in enumerate(client.wait(), start=1):
            torch.testing.assert_close(result, alone(words(rows, seed)))
    for step, gradient in enumerate(gradients.wait()):
        scale = torch.full((4, 5, 1), float(step), requires_grad=True)
        expected = torch.autograd.grad(alone(words(seed=7), scale).square().sum(), scale)[0]
        torch.testing.assert_close(gradient, expected)


@pytest.mark.skipif(not MODE, reason="on devices")
@in_standing_group(3)
def test_a_worker_with_a_shard_on_a_device_cannot_differentiate_it(worker: Worker) -> None:
    model = served(worker)
    with pytest.raises(ParallelError, match="'worker2' has a shard of this model on a device"):
        rpc.rpc_sync("worker2", train_often, args=(model, 7))
    assert rpc.rpc_sync("worker2", call_often, args=(model, 7))


def train_for_ever(model: ShardedModule) -> None:
    optimizer = DistributedOptimizer(torch.optim.SGD, model.remote_parameters(), lr=1.0)
    for _ in range(10):
        with dist_autograd.context() as context_id:
            dist_autograd.backward(context_id, [model(torch.ones(1, WIDTH)).sum()])
            model.step(optimizer, context_id)


@in_worker0(4)
def test_a_step_comes_between_two_calls_of_other_clients(worker: Worker) -> None:
    """Each step takes the same from all weights, so results tell whether both shards have."""
    plan = ColwiseParallel(use_local_output=False)
    factory = partial(nn.Linear, WIDTH, 2, bias=False)
    workers = [placed("worker1"), placed("worker2")]
    model = parallelize_module(factory, workers=workers, parallelize_plan=plan, initialize=ones)
    training = rpc.rpc_async("worker3", train_for_ever, args=(model,))
    while not training.done():
        left, right = model(torch.ones(1, WIDTH))[0].tolist()
        assert left == right
    training.wait()
    assert model(torch.ones(1, WIDTH))[0, 0] == WIDTH * (1 - 10)


def state_of(module: nn.Module) -> dict[str, Tensor]:
    """The state of a module on the CPU, where that of a served model is."""
    return {name: value.cpu() for name, value in module.state_dict().items()}


class Recording:
    """In place of a shard: notes how many rows each call has, and lets the first one wait."""

    failed = False

    def __init__(self) -> None:
        self.rows: list[int] = []
        self.began, self.go_on = threading.Event(), threading.Event()
        self.steps = StepQueue(self._do, "worker0", self.abort, RuntimeError)

    def do(self, task: Task) -> Any:
        return self.steps.put(task)

    def skip(self, number: int) -> None:
        self.steps.skip(number)

    def _do(self, task: Task) -> Any:
        return getattr(self, task.name)(*task.args)

    def abort(self, reason: str) -> None:
        raise AssertionError(reason)

    def forward(self, call: Call) -> Outcome:
        (given,) = call.args
        if given.isnan().any():
            raise ValueError("not a number")
        self.rows.append(len(given))
        self.began.set()
        assert self.go_on.wait(WAIT_SECONDS)
        return Outcome({"doubled": 2 * given}, (), 0)


@in_worker0(1)
def test_calls_that_wait_are_done_together() -> None:
    shard: Any = Recording()
    coordinator = Coordinator([rpc.RRef(shard)], ["worker0"], max_batch_size=6)

    def call(rows: int, width: int = 3, value: float = 1.0) -> Any:
        return coordinator.run("forward", (Call((torch.full((rows, width), value),), {}),))

    first = call(1)
    assert shard.began.wait(WAIT_SECONDS)
    wrong = call(1, value=torch.nan)
    futures = [first, call(2), call(3), call(3), call(3, width=4), call(7, width=4)]
    shard.go_on.set()
    for future, rows in zip(futures, (1, 2, 3, 3, 3, 7), strict=True):
        doubled = future.wait().value["doubled"]
        assert (doubled == 2).all()
        assert len(doubled) == rows
    with pytest.raises(ValueError, match="not a number"):
        wrong.wait()
    # Those that were to be done with the wrong one are done singly.
    assert shard.rows == [1, 2, 3, 3, 3, 7]
    shard.go_on.clear()
    shard.began.clear()
    shard.rows.clear()
    first = call(1)
    assert shard.began.wait(WAIT_SECONDS)
    futures = [first, call(2), call(3), call(3), call(3), call(3, width=4), call(7, width=4)]
    shard.go_on.set()
    for future in futures:
        future.wait()
    assert shard.rows == [1, 5, 6, 3, 7]


# ---- state


@SHARDS
def test_the_state_comes_whole_and_goes_back(run_workers: RunWorkers, shards: int) -> None:
    def task(worker: Worker) -> None:
        model, alone = served_and_alone(worker)
        torch.testing.assert_close(model.state_dict(), state_of(alone), rtol=0, atol=0)
        with pytest.raises(ParallelError, match=r"w1\.weight"):
            model.load_state_dict(dict(alone.state_dict()) | {"w1.weight": torch.ones(3, 3)})
        with pytest.raises(ParallelError, match="other"):
            model.load_state_dict(dict(alone.state_dict()) | {"other": torch.ones(3)})

    first_of(run_workers, task, world_size=shards + 1)


@in_worker0(4)
def test_a_checkpoint_is_read_by_other_shards(worker: Worker) -> None:
    model, alone = served_and_alone(worker)
    model.save("checkpoint")
    model.close()
    fewer = parallelize_module(Net, workers=[placed("worker3"), placed("worker1")], parallelize_plan=PLAN)
    fewer.load_state_dict("checkpoint")
    torch.testing.assert_close(fewer.state_dict(), state_of(alone), rtol=0, atol=0)
    torch.testing.assert_close(fewer(words()), alone(words()))


# ---- making it


@in_standing_group(3)
def test_parameters_are_filled_as_their_modules_do(worker: Worker) -> None:
    state = served(worker).state_dict()
    assert torch.equal(state["norm.weight"], torch.ones(WIDTH, device="cpu"))
    bound = WIDTH**-0.5
    assert state["w1.weight"].abs().max() <= bound
    assert len(set(state["w1.weight"].flatten().tolist())) == state["w1.weight"].numel()
    assert state["embedding.weight"] is not state["head.weight"]
    assert torch.equal(state["embedding.weight"], state["head.weight"])


class Own(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.full((1,), 3.0))

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.linear(x) * self.scale
        return result


def fill(module: nn.Module) -> None:
    for parameter in module.parameters():
        nn.init.constant_(parameter, 2.0)


@in_standing_group(3)
def test_what_constructors_compute_is_filled_by_a_function(worker: Worker) -> None:
    plan = {"linear": ColwiseParallel(use_local_output=False)}
    with pytest.raises(ParallelError, match=r"Own\. .*pass initialize"):
        served(worker, Own, plan)
    model = served(worker, Own, plan, initialize=fill)
    assert torch.equal(model(torch.ones(1, WIDTH)), torch.full((1, WIDTH), 2.0 * (2 * WIDTH + 2)))


def peak_kib() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


@not_on_devices("the memory of the simulated device is memory of its process, as is that of its copies")
@in_worker0(5)
def test_no_worker_ever_has_memory_for_a_whole_parameter(worker: Worker) -> None:
    """One parameter, of 256 MiB: 64 MiB for each."""
    before = [rpc.rpc_sync(each, peak_kib) for each in names(worker)]
    factory = partial(nn.Linear, 1024, 65536, bias=False)
    model = served(worker, factory, ColwiseParallel(use_local_output=False))
    model.save("checkpoint")
    model.load_state_dict("checkpoint")
    after = [rpc.rpc_sync(each, peak_kib) for each in names(worker)]
    assert max(then - now for then, now in zip(after, before, strict=True)) < 256 * 1024


@in_standing_group(3)
def test_what_cannot_be_a_model_is_refused(worker: Worker) -> None:
    with pytest.raises(ParallelTypeError, match=r"function that makes the module, .* got Mlp"):
        served(worker, Mlp())
    with pytest.raises(ParallelTypeError, match=r"return a torch\.nn\.Module, got dict"):
        served(worker, dict)
    with pytest.raises(ParallelError, match="names of workers, each once"):
        parallelize_module(Mlp, workers=[placed("worker1"), placed("worker1")], parallelize_plan=MLP_PLAN)
    with pytest.raises(UnknownWorkerError, match="worker9"):
        parallelize_module(Mlp, workers=["worker1", "worker9"], parallelize_plan=MLP_PLAN)
    with pytest.raises(ParallelError, match="could not be resolved"):
        served(worker, Mlp, {"5": ColwiseParallel()})


def rank_in_default_group() -> int | None:
    return dist.get_rank() if dist.is_initialized() else None


@in_worker0(4)
def test_models_share_workers_and_the_driver_is_in_no_process_group(worker: Worker) -> None:
    one, alone = served_and_alone(worker)
    other = parallelize_module(Mlp, workers=[placed("worker2"), placed("worker3")], parallelize_plan=MLP_PLAN)
    torch.testing.assert_close(one(words()), alone(words()))
    assert other(torch.ones(2, WIDTH)).shape == (2, WIDTH)
    assert [rpc.rpc_sync(each, rank_in_default_group) for each in names(worker)] == [0, 1, 2]
    assert not dist.is_initialized()
    with pytest.raises(ParallelError, match="'worker0': rank None"):
        parallelize_module(Mlp, workers=[placed("worker0"), placed("worker3")], parallelize_plan=MLP_PLAN)
