"""Models served by workers: errors of their calls, and workers that die."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import rpc
from rpc.errors import SerializationError, WorkerLostError
from spmd.tensor_parallel import coordinator, parallelize_module
from spmd.tensor_parallel.errors import ParallelError, ShardLostError
from spmd.tensor_parallel.shard import ModelShard
from tests.support.default_device import placed
from tests.support.served import (
    MLP_PLAN,
    WIDTH,
    Mlp,
    groups_named_served,
    names,
    served,
    served_and_alone,
)
from tests.support.serving import in_worker0
from tests.support.workers import RunWorkers, Worker, current_worker

# ---- errors


@in_worker0(3)
def test_an_error_on_all_shards_is_raised_and_the_model_goes_on(worker: Worker) -> None:
    model, alone = served_and_alone(worker, Mlp, MLP_PLAN)
    with pytest.raises(ParallelError, match="last dimension is 8"):
        model(torch.ones(2, 3))
    with pytest.raises(TypeError, match="forward"):
        model(torch.ones(2, WIDTH), 3, 4)
    x = torch.randn(2, WIDTH)
    torch.testing.assert_close(model(x), alone(x))


class FailsOnOne(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        if dist.get_rank() == 1:
            raise KeyError("here")
        return x


def _fails_on_one() -> nn.Module:
    return nn.Sequential(FailsOnOne(), Mlp())


def be_impatient() -> None:
    """Ends the others soon, which wait for the one that failed."""
    coordinator._GRACE = 0.5  # type: ignore[misc]


@in_worker0(3)
def test_an_error_on_one_shard_ends_the_model(worker: Worker) -> None:
    rpc.rpc_sync("worker1", be_impatient)  # where rank 0 is
    model = served(worker, _fails_on_one, {"1": MLP_PLAN})
    for _ in range(2):
        with pytest.raises(ParallelError, match=r"rank 1 \(worker 'worker2'\).*KeyError: 'here'"):
            model(torch.ones(2, WIDTH))
    model.close()
    assert rpc.rpc_sync("worker1", groups_named_served) == 0


class Passed:
    """An argument that calls a function when a worker sends it, and one when a worker has received it."""

    def __init__(self, sent: Callable[[], object] = int, received: Callable[[], object] = int) -> None:
        self.sent, self.received = sent, received

    def __reduce__(self) -> tuple[Any, ...]:
        self.sent()
        return _received, (self.sent, self.received)


def _received(sent: Callable[[], object], received: Callable[[], object]) -> Passed:
    received()
    return Passed(sent, received)


class TakesMore(Mlp):
    def forward(self, x: Tensor, *more: object) -> Tensor:
        for each in self:
            x = each(x)
        return x


_sent_times = itertools.count(1)


def fail_at_rank_0(time: int) -> None:
    """Fail when rank 0 sends this for the given time in the process."""
    if current_worker().rank == 1 and next(_sent_times) == time:
        raise ValueError("not sent")


def fail_at(rank: int) -> None:
    if current_worker().rank == rank + 1:
        raise ValueError("not received")


@in_worker0(3)
def test_a_call_that_no_shard_was_sent_is_raised_and_the_model_goes_on(worker: Worker) -> None:
    model, alone = served_and_alone(worker, TakesMore, MLP_PLAN)
    x = torch.ones(2, WIDTH)
    with pytest.raises(SerializationError, match="not sent"):
        model(x, Passed(sent=partial(fail_at_rank_0, 1)))
    torch.testing.assert_close(model(x, Passed()), alone(x))
    model.close()


@pytest.mark.parametrize(
    ("rank", "said", "passed"),
    [
        (2, "not sent", {"sent": partial(fail_at_rank_0, 2)}),
        (1, "not received", {"received": partial(fail_at, 1)}),
    ],
    ids=["not sent", "not received"],
)
@in_worker0(4)
def test_a_call_that_one_shard_does_not_get_ends_the_model_and_it_can_be_closed(
    worker: Worker, rank: int, said: str, passed: dict[str, Any]
) -> None:
    rpc.rpc_sync("worker1", be_impatient)  # where rank 0 is
    model = served(worker, TakesMore, MLP_PLAN)
    for _ in range(2):
        with pytest.raises(ParallelError, match=rf"rank {rank} \(worker 'worker{rank + 1}'\).*{said}"):
            model(torch.ones(2, WIDTH), Passed(**passed))
    model.close()
    assert [rpc.rpc_sync(each, groups_named_served) for each in names(worker)] == [0, 0, 0]


@in_worker0(3)
def test_a_closed_model_says_so(worker: Worker) -> None:
    model = served(worker, Mlp, MLP_PLAN)
    model.close()
    model.close()
    with pytest.raises(ParallelError, match="closed"):
        model(torch.ones(2, WIDTH))


# ---- death


class DiesOnOne(nn.Module):
    """A worker dies in the middle of a call when it is told to, while others wait for it in a collective."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.rank = rank

    def forward(self, x: Tensor) -> Tensor:
        if dist.get_rank() == self.rank and x.isnan().any():
            current_worker().die()
        return x


def _dies(rank: int) -> nn.Module:
    return nn.Sequential(DiesOnOne(rank), Mlp())


def die() -> None:
    current_worker().die()


def serve_until_told(worker: Worker) -> None:
    worker.join(rpc_timeout=0)
    worker.wait_for("leave")
    rpc.shutdown(graceful=False)


def lose(rank: int, idle: bool, worker: Worker) -> None:
    worker.join(rpc_timeout=0)
    model = served(worker, partial(_dies, rank), {"1": MLP_PLAN})
    x = torch.randn(2, WIDTH)
    assert model(x).shape == x.shape
    if idle:
        with pytest.raises(WorkerLostError):
            rpc.rpc_sync(f"worker{rank + 1}", die)
    else:
        x = x / 0 * 0
    for use in (lambda: model(x), model.state_dict, lambda: model.save("checkpoint"), lambda: model(x)):
        with pytest.raises(ShardLostError, match=rf"rank {rank} \(worker 'worker{rank + 1}'\)") as caught:
            use()
        assert (caught.value.rank, caught.value.worker) == (rank, f"worker{rank + 1}")
    model.close()
    assert rpc.rpc_sync(f"worker{2 - rank}", groups_named_served) == 0
    worker.report("done")
    rpc.shutdown(graceful=False)


@pytest.mark.parametrize("idle", [False, True], ids=["in a call", "idle"])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_shard_that_dies_is_named_at_once_and_ever_after(
    run_workers: RunWorkers, rank: int, idle: bool
) -> None:
    """No call has a time limit here, so a worker that is not notified of the death hangs."""
    workers = run_workers.start([partial(lose, rank, idle), serve_until_told, serve_until_told])
    workers[0].wait_for("done")
    workers[2 - rank].tell("leave")
    workers.results()


def dies_when_made(rank: int) -> nn.Module:
    if current_worker().rank == rank + 1:
        die()
    return Mlp()


def dies_when_filled(rank: int, module: nn.Module) -> None:
    if dist.get_rank() == rank:
        die()


def die_before_joining() -> None:
    """What this worker does when it is to form a group is to die."""
    ModelShard._form = lambda *_: die()  # type: ignore[method-assign]


def lose_while_building(rank: int, when: str, worker: Worker) -> None:
    worker.join(rpc_timeout=0)
    if when == "joins":
        rpc.rpc_sync(f"worker{rank + 1}", die_before_joining)
    factory = partial(dies_when_made, rank) if when == "is made" else Mlp
    initialize = partial(dies_when_filled, rank) if when == "is filled" else None
    with pytest.raises(
        ShardLostError, match=rf"rank {rank} \(worker 'worker{rank + 1}'\) of the model is gone"
    ):
        served(worker, factory, MLP_PLAN, initialize=initialize)
    left = [each for each in names(worker) if each != f"worker{rank + 1}"]
    again = parallelize_module(Mlp, workers=[placed(each) for each in left], parallelize_plan=MLP_PLAN)
    assert again(torch.ones(2, WIDTH)).shape == (2, WIDTH)
    again.close()
    assert [rpc.rpc_sync(each, groups_named_served) for each in left] == [0] * len(left)
    worker.report("done")
    rpc.shutdown(graceful=False)


@pytest.mark.parametrize("when", ["is made", "joins", "is filled"])
@pytest.mark.parametrize("rank", [pytest.param(0, marks=pytest.mark.nightly), 1])
def test_a_worker_that_dies_while_a_model_is_built_is_named_and_the_others_can_build_another(
    run_workers: RunWorkers, rank: int, when: str
) -> None:
    workers = run_workers.start([partial(lose_while_building, rank, when), *[serve_until_told] * 3])
    workers[0].wait_for("done")
    for each in (1, 2, 3):
        if each != rank + 1:
            workers[each].tell("leave")
    workers.results()
