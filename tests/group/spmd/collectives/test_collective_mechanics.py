"""What tensors, callbacks and timeouts of collectives may be, beside the plain ones."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

import spmd
from rpc.errors import WorkerLostError
from spmd.collectives import formation
from spmd.collectives.errors import CollectiveError, CollectiveTimeoutError, RankLostError
from tests.support.default_device import not_on_devices
from tests.support.process_groups import by_messages, process_group
from tests.support.serving import in_all, in_standing
from tests.support.standing import Shared
from tests.support.workers import RunWorkers, Worker

PATHS = pytest.mark.parametrize("apart", [False, True], ids=["shared memory", "messages"])
LARGE = 100_000


def in_world(body: Callable[[Worker], Any], apart: bool, seconds: float, worker: Worker) -> Any:
    with process_group(worker, seconds=seconds, options=by_messages() if apart else None):
        return body(worker)


def on_hosts_of_their_own(worker: Worker) -> contextlib.AbstractContextManager[Any]:
    return process_group(worker, options=by_messages())


def on_each_path(world_size: int) -> Callable[[Callable[[Worker], None]], Callable[..., None]]:
    """Makes a test of a function that runs on each rank, over shared memory and by messages."""

    def decorate(body: Callable[[Worker], None]) -> Callable[..., None]:
        @PATHS
        def test(run_workers: RunWorkers, apart: bool) -> None:
            run_workers(Shared(on_hosts_of_their_own if apart else process_group, body), world_size)

        return test

    return decorate


# ---- tensors


@on_each_path(3)
def test_tensors_that_require_grad_are_reduced_in_place(worker: Worker) -> None:
    leaf, output = torch.ones(LARGE, requires_grad=True), torch.empty(4)
    for work in (dist.all_reduce(leaf), dist.all_reduce(leaf, async_op=True)):
        if work is not None:
            work.wait()
    dist.broadcast(leaf, 0)
    gathered = [torch.empty(LARGE) for _ in range(3)]
    dist.all_gather(gathered, leaf)
    dist.reduce_scatter_tensor(output, torch.ones(12, requires_grad=True), op=dist.ReduceOp.AVG)
    assert leaf.is_leaf
    assert leaf.requires_grad
    assert all(each.eq(9).all() for each in (leaf, *gathered))
    assert output.eq(1).all()
    assert not any(each.requires_grad for each in (output, *gathered))


@on_each_path(3)
def test_inference_tensors_are_reduced_and_moved_on_any_thread(worker: Worker) -> None:
    with torch.inference_mode():
        tensors = [torch.ones(LARGE // 100, 100) for _ in range(4)]
        received = torch.empty(100, LARGE // 100)
        works = [dist.all_reduce(each, async_op=True) for each in tensors[:3]]
        for work in works:
            assert work is not None
            assert work.get_future().wait()
    dist.all_reduce(tensors[3].t())
    other = {0: 1, 1: 0}.get(worker.rank)
    if other is not None:
        for moved in (dist.isend(tensors[0], other), dist.irecv(received.t(), other)):
            assert moved is not None
            moved.wait()
        tensors.append(received)
    assert all(each.eq(3).all() for each in tensors)


@on_each_path(2)
def test_results_can_be_used_in_autograd(worker: Worker) -> None:
    weight = torch.ones(3, requires_grad=True)
    tensor, sparse = torch.ones(3), torch.tensor([[1.0, 0, 2]]).to_sparse()
    dist.all_reduce(tensor)
    dist.all_reduce(sparse)
    assert not sparse.coalesce().values().is_inference()
    loss = (weight * tensor).sum() + (sparse.to_dense() * weight).sum()
    [gradient] = torch.autograd.grad(loss, [weight])
    assert gradient.tolist() == [4.0, 2.0, 6.0]


@on_each_path(3)
def test_the_output_of_a_reduce_scatter_may_be_a_part_of_its_input(worker: Worker) -> None:
    for size in (4, LARGE):
        inputs = torch.arange(size * 3.0) + worker.rank
        output = inputs.chunk(3)[worker.rank]
        expected = 3 * torch.arange(size * 3.0).chunk(3)[worker.rank] + 3
        dist.reduce_scatter_tensor(output, inputs)
        assert torch.equal(output, expected)


@on_each_path(2)
def test_bytes_for_a_rank_that_expects_none_are_an_error(worker: Worker) -> None:
    """Rank 1 expects nothing of rank 0, which has much for it."""
    group = dist.new_group()
    outputs = [torch.empty(1 - worker.rank), torch.empty(1)]

    def exchange() -> None:
        dist.all_to_all(outputs, [torch.ones(1), torch.ones(1 if worker.rank else LARGE)], group)
        dist.barrier(group)

    with pytest.raises(CollectiveError, match="rank 0 has 400000 bytes for rank 1, which expects 0"):
        exchange()


@on_each_path(2)
def test_the_profiler_shows_each_operation_once(worker: Worker) -> None:
    tensor, other = torch.ones(3, 4), 1 - worker.rank
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiler:
        dist.all_reduce(tensor)
        works = [dist.broadcast(tensor, 0, async_op=True), dist.isend(tensor, other)]
        works.append(dist.irecv(torch.empty(3, 4), other))
        for work in works:
            assert work is not None
            work.wait()
    found = {event.name: event for event in profiler.events() if event.name.startswith("farcall:")}
    assert set(found) == {f"farcall:{name}" for name in ("all_reduce", "broadcast", "send", "recv")}
    assert all(event.input_shapes == [[3, 4]] for event in found.values())


# ---- callbacks


@on_each_path(2)
def test_a_callback_may_wait_for_further_collectives(worker: Worker) -> None:
    """As DistributedDataParallel's hook of PowerSGD does."""

    def again(future: torch.futures.Future[Any]) -> torch.Tensor:
        work = dist.all_reduce(future.value()[0], async_op=True)
        assert work is not None
        result: torch.Tensor = work.get_future().wait()[0]
        dist.all_reduce(result)
        return result

    for _ in range(20):
        work = dist.all_reduce(torch.ones(4), async_op=True)
        assert work is not None
        assert work.get_future().then(again).wait().eq(8).all()


@not_on_devices("the callback's result, which others wait for, is not what it has received")
@in_standing(process_group, 2)
def test_a_callback_of_a_receive_may_block(worker: Worker) -> None:
    if worker.rank == 1:
        for tag in (1, 2):
            dist.send(torch.full((LARGE,), float(tag)), 0, tag=tag)
        return
    second = torch.empty(LARGE)
    work = dist.irecv(torch.empty(LARGE), 1, tag=1)
    assert work is not None
    work.get_future().then(lambda _: dist.recv(second, 1, tag=2)).wait()
    assert second.eq(2).all()


# ---- who does not receive, leaves, or dies


def send_to_nobody(worker: Worker) -> None:
    world: Any = dist.group.WORLD
    soon, later = timedelta(seconds=0.5), timedelta(seconds=20)
    if worker.rank == 0:
        world.set_timeout(soon)
        with pytest.raises(CollectiveTimeoutError, match="send of 400000 bytes to rank 1"):
            dist.send(torch.ones(LARGE), 1, tag=1)
        world.set_timeout(later)
        worker.report("over")
        dist.send(torch.full((LARGE,), 2.0), 1, tag=2)
    else:
        worker.wait_for("over")
        world.set_timeout(soon)
        late = dist.irecv(torch.empty(LARGE), 0, tag=1)
        world.set_timeout(later)
        tensor = torch.empty(LARGE)
        dist.recv(tensor, 0, tag=2)
        assert tensor.eq(2).all()
        assert late is not None
        with pytest.raises(dist.DistBackendError):
            late.wait()


def test_a_send_times_out_and_is_taken_by_no_later_receive(run_workers: RunWorkers) -> None:
    workers = run_workers.start(partial(in_world, send_to_nobody, False, 20.0), 2)
    workers[0].wait_for("over")
    workers[1].tell("over")
    workers.results()


def offer_and_leave(worker: Worker) -> None:
    group = dist.new_group([0, 1])
    if worker.rank == 1:
        dist.isend(torch.ones(LARGE), 0, group=group)
        dist.send(torch.ones(1), 0, tag=1, group=group)
        dist.destroy_process_group(group)
    else:
        dist.recv(torch.ones(1), 1, tag=1, group=group)  # the offer has come before
    dist.barrier()  # the farewell, too
    if worker.rank == 0:
        with pytest.raises(RankLostError):
            dist.recv(torch.empty(LARGE), 1, group=group)
    dist.barrier()


def test_a_receive_from_a_rank_that_has_left_before_sending_fails_at_once(run_workers: RunWorkers) -> None:
    run_workers(partial(in_world, offer_and_leave, False, 600.0), 2)


def gather_beside_a_process_that_ends(worker: Worker) -> None:
    tensor = torch.full((4,), float(worker.rank))
    if worker.rank == 1:
        dist.gather(tensor, None, 0)
        world: Any = dist.group.WORLD
        world.group.node.close()  # as when the process ends, without destroy_process_group
        return
    worker.wait_for("the end of rank 1")
    outputs = [torch.empty(4), torch.empty(4)]
    dist.gather(tensor, outputs, 0)
    assert outputs[1].eq(1).all()


def test_what_a_rank_has_sent_before_its_process_ends_is_received(run_workers: RunWorkers) -> None:
    workers = run_workers.start(partial(in_world, gather_beside_a_process_that_ends, True, 20.0), 2)
    workers[1].result()
    workers[0].tell("the end of rank 1")
    workers[0].result()


def pass_monitored_barriers(worker: Worker) -> None:
    group: Any = dist.group.WORLD
    group.monitored_barrier()
    if worker.rank == 2:
        with pytest.raises(CollectiveTimeoutError):
            dist.recv(torch.empty(1), 0)  # until the group has failed
        return
    words = {
        0: r"^Rank 2 failed to pass monitoredBarrier: .* waiting for rank 2 \(",
        1: "^Rank 1 successfully reached monitoredBarrier, but received errors .* from rank 0",
        3: "^Rank 3 successfully reached monitoredBarrier, but received errors .* from rank 0",
    }
    with pytest.raises(CollectiveTimeoutError, match=words[worker.rank]):
        group.monitored_barrier(timedelta(seconds=3))  # within which the other ranks come


@PATHS
def test_monitored_barrier_names_who_has_not_come(run_workers: RunWorkers, apart: bool) -> None:
    run_workers(partial(in_world, pass_monitored_barriers, apart, 20.0), 4)


# ---- forming


@in_standing(process_group, 2)
def test_a_timeout_of_0_is_no_limit(worker: Worker) -> None:
    group = dist.new_group([0, 1], timeout=timedelta(0))
    tensor = torch.ones(1)
    dist.all_reduce(tensor, group=group)
    assert tensor.item() == 2


def fail_to_form(*_: object) -> None:
    raise ZeroDivisionError


def gives_up(rank: int, *, or_has_left: bool = False) -> contextlib.AbstractContextManager[Any]:
    """What a rank is told; where rank 1 leaves the world at once, either of the two may be heard first."""
    if rank == 1:
        return pytest.raises(ZeroDivisionError)
    if or_has_left:
        told = r"rank 1 .* has given up forming the group|has left the process group"
        return pytest.raises((CollectiveError, WorkerLostError), match=told)
    return pytest.raises(CollectiveError, match=r"rank 1 .* has given up forming the group")


@in_all(2)
def test_what_a_failed_forming_has_left_does_not_disturb_the_next(worker: Worker) -> None:
    with pytest.MonkeyPatch.context() as patch:
        if worker.rank == 1:
            patch.setattr(formation, "_share", fail_to_form)
        with gives_up(worker.rank):
            spmd.init_process_group(timedelta(seconds=20))
    for _ in range(2):  # c10d gives the second the name of the one that has failed
        spmd.init_process_group(timedelta(seconds=20))
        tensor = torch.ones(1)
        dist.all_reduce(tensor)
        assert tensor.item() == 2
        dist.destroy_process_group()
