"""Collectives on tensors of devices: staged by farcall, or handed to the vendor's backend."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d

import spmd
from rpc.errors import InvalidOptionError
from rpc.runtime.current import current_agent
from spmd.collectives.errors import CollectiveError
from spmd.collectives.group import Group
from spmd.collectives.process_group import FarcallProcessGroup
from tests.support.device_groups import on_device_workers
from tests.support.devices import (
    COUNT,
    FIRST,
    KIND,
    SIZE,
    device_kind,
    is_all,
    late,
    mode,
    on_devices,
    used_bytes,
)
from tests.support.streams import until
from tests.support.workers import RunWorkers, Worker

__all__ = ["device_kind", "mode"]

LARGE = 100_000
"""Elements of a message that is offered before it is sent."""

with_a_vendor_of_ours = pytest.mark.skipif(KIND != "sim", reason="a GPU has a vendor's backend already")


@contextlib.contextmanager
def collectives(worker: Worker) -> Iterator[str]:
    """The workers' default process group; this rank's device. Ranks may share one, which NCCL refuses."""
    device = f"{KIND}:{worker.rank % COUNT}"
    torch.accelerator.set_device_index(worker.rank % COUNT)
    with worker.group():
        spmd.init_process_group(staged=KIND != "sim")
        yield device
        dist.destroy_process_group()


def made(device: str, count: int, value: float = -1.0) -> list[Tensor]:
    return [torch.full((SIZE,), value, device=device) for _ in range(count)]


def _all_reduce(rank: int, device: str) -> tuple[Any, list[tuple[Tensor, float]]]:
    tensor = late(rank + 1.0, device)
    return dist.all_reduce(tensor, async_op=True), [(tensor, 3.0)]


def _all_reduce_transposed(rank: int, device: str) -> tuple[Any, list[tuple[Tensor, float]]]:
    tensor = late(rank + 1.0, device).view(10, -1).T
    return dist.all_reduce(tensor, async_op=True), [(tensor, 3.0)]


def _coalesced(rank: int, device: str) -> tuple[Any, list[tuple[Tensor, float]]]:
    tensors = [late(rank + 1.0, device), late(rank + 2.0, device)]
    return dist.all_reduce_coalesced(tensors, async_op=True), list(zip(tensors, (3.0, 5.0), strict=True))


def _broadcast(rank: int, device: str) -> tuple[Any, list[tuple[Tensor, float]]]:
    tensor = late(rank + 5.0, device)
    return dist.broadcast(tensor, 1, async_op=True), [(tensor, 6.0)]


def _all_gather(rank: int, device: str) -> tuple[Any, list[tuple[Tensor, float]]]:
    outputs = made(device, 2)
    work = dist.all_gather(outputs, late(rank + 1.0, device), async_op=True)
    return work, list(zip(outputs, (1.0, 2.0), strict=True))


def _gather(rank: int, device: str) -> tuple[Any, list[tuple[Tensor, float]]]:
    outputs = made(device, 2) if rank == 0 else None
    work = dist.gather(late(rank + 1.0, device), outputs, 0, async_op=True)
    return work, list(zip(outputs or [], (1.0, 2.0), strict=False))


def _reduce(rank: int, device: str) -> tuple[Any, list[tuple[Tensor, float]]]:
    tensor = late(rank + 1.0, device)
    return dist.reduce(tensor, 0, async_op=True), [(tensor, 3.0 if rank == 0 else 2.0)]


def _all_gather_into(rank: int, device: str) -> tuple[Any, list[tuple[Tensor, float]]]:
    output = torch.zeros(2 * SIZE, device=device)
    work = dist.all_gather_into_tensor(output, late(rank + 1.0, device), async_op=True)
    return work, list(zip(output.chunk(2), (1.0, 2.0), strict=True))


def _scatter(rank: int, device: str) -> tuple[Any, list[tuple[Tensor, float]]]:
    (output,) = made(device, 1)
    work = dist.scatter(
        output, [late(7.0, device), late(8.0, device)] if rank == 0 else None, 0, async_op=True
    )
    return work, [(output, 7.0 + rank)]


def _reduce_scatter(rank: int, device: str) -> tuple[Any, list[tuple[Tensor, float]]]:
    (output,) = made(device, 1)
    work = dist.reduce_scatter(output, [late(1.0, device), late(2.0, device)], async_op=True)
    return work, [(output, 2.0 + 2 * rank)]


def _reduce_scatter_tensor(rank: int, device: str) -> tuple[Any, list[tuple[Tensor, float]]]:
    (output,) = made(device, 1)
    work = dist.reduce_scatter_tensor(output, late(rank + 1.0, device, 2 * SIZE), async_op=True)
    return work, [(output, 3.0)]


def _all_to_all(rank: int, device: str) -> tuple[Any, list[tuple[Tensor, float]]]:
    outputs = made(device, 2)
    given = [late(10.0 * rank, device), late(10.0 * rank + 1, device)]
    work = dist.all_to_all(outputs, given, async_op=True)
    return work, list(zip(outputs, (rank + 0.0, 10.0 + rank), strict=True))


def _all_to_all_single(rank: int, device: str) -> tuple[Any, list[tuple[Tensor, float]]]:
    output = torch.zeros(2 * SIZE, device=device)
    work = dist.all_to_all_single(output, late(rank + 1.0, device, 2 * SIZE), async_op=True)
    return work, list(zip(output.chunk(2), (1.0, 2.0), strict=True))


def _send(rank: int, device: str, size: int = SIZE) -> tuple[Any, list[tuple[Tensor, float]]]:
    if rank == 0:
        return dist.isend(late(4.0, device, size), 1), []
    tensor = torch.zeros(size, device=device)
    return dist.irecv(tensor, 0), [(tensor, 4.0)]


def _send_large(rank: int, device: str) -> tuple[Any, list[tuple[Tensor, float]]]:
    return _send(rank, device, LARGE)


class _AfterAStream:
    def __init__(self, stream: torch.Stream) -> None:
        self._stream = stream

    def wait(self) -> None:
        torch.accelerator.current_stream().wait_stream(self._stream)


def _blocking(rank: int, device: str) -> tuple[Any, list[tuple[Tensor, float]]]:
    tensor = late(rank + 1.0, device)
    dist.all_reduce(tensor)
    return _AfterAStream(torch.accelerator.current_stream()), [(tensor, 3.0)]


def _by_future(rank: int, device: str) -> tuple[Any, list[tuple[Tensor, float]]]:
    work: Any = dist.all_reduce(late(rank + 1.0, device), async_op=True)
    future = work.get_future().then(lambda future: future.value()[0] * 2)
    result = torch.zeros(SIZE, device=device)
    stream = torch.accelerator.current_stream()

    class Waits:
        def wait(self) -> None:
            result.copy_(future.wait())
            result.record_stream(stream)

    return Waits(), [(result, 6.0)]


OPERATIONS: dict[str, Callable[[int, str], tuple[Any, list[tuple[Tensor, float]]]]] = {
    "all_reduce": _all_reduce,
    "all_reduce of a transposed tensor": _all_reduce_transposed,
    "all_reduce_coalesced": _coalesced,
    "broadcast": _broadcast,
    "all_gather": _all_gather,
    "gather": _gather,
    "reduce": _reduce,
    "all_gather_into_tensor": _all_gather_into,
    "scatter": _scatter,
    "reduce_scatter": _reduce_scatter,
    "reduce_scatter_tensor": _reduce_scatter_tensor,
    "all_to_all": _all_to_all,
    "all_to_all_single": _all_to_all_single,
    "send": _send,
    "a large send": _send_large,
    "blocking": _blocking,
    "by a future": _by_future,
}


@with_a_vendor_of_ours
@on_device_workers()
def test_operations_wait_for_the_streams_of_their_tensors(worker: Worker) -> None:
    with collectives(worker) as device:
        for name, begin in OPERATIONS.items():
            with torch.Stream(device=device):
                work, expected = begin(worker.rank, device)
            with torch.Stream(device=device):
                work.wait()
                assert all(is_all(tensor, value) for tensor, value in expected), name
        objects: list[Any] = [None, None]
        dist.all_gather_object(objects, worker.rank)
        assert objects == [0, 1]
        dist.barrier()


@on_device_workers()
def test_memory_is_kept_until_it_is_reduced(worker: Worker) -> None:
    with collectives(worker) as device:
        for _ in range(3):
            tensor = late(worker.rank + 1.0, device)
            work: Any = dist.all_reduce(tensor, async_op=True)
            del tensor
            again = [torch.full((SIZE,), 9.0, device=device) for _ in range(4)]
            work.wait()
            assert all(is_all(each, 9.0) for each in again)
            del again, work
        gc.collect()
        before = used_bytes(device)
        for _ in range(5):
            dist.all_reduce(torch.ones(LARGE, device=device))
        gc.collect()
        until(lambda: used_bytes(device) <= before)  # another thread may still have the last one


@on_devices
def reduce_with_the_dying(worker: Worker) -> None:
    device = f"{KIND}:{worker.rank % COUNT}"
    worker.join(rpc_timeout=20.0)
    spmd.init_process_group(staged=KIND != "sim")
    tensor = late(1.0, device)
    dist.all_reduce(tensor)
    worker.report("reduced")
    if worker.rank:
        worker.wait_for("never")
    worker.wait_for("killed")
    before = used_bytes(device)
    for size in (SIZE, LARGE):
        given = late(2.0, device, size)
        with pytest.raises(CollectiveError):
            dist.all_reduce(given)
        received = torch.zeros(size, device=device)
        with pytest.raises(CollectiveError):
            dist.recv(received, 1)
    dist.destroy_process_group()
    del given, received
    gc.collect()
    until(lambda: used_bytes(device) <= before)


def test_the_death_of_a_rank_ends_operations_and_memory_comes_back(
    run_workers: RunWorkers, device_kind: str
) -> None:
    workers = run_workers.start(reduce_with_the_dying, 2, args=("random",))
    workers.wait_for("reduced")
    workers[1].kill()
    workers[0].tell("killed")
    workers[0].result()


def _of_a_vendor() -> list[str]:
    """Register a vendor's backend for the devices; the operations that it will have done."""
    done: list[str] = []

    def make(options: Any, _: Any) -> Any:
        agent: Any = current_agent()
        if dist.is_initialized():  # c10d may ask for a backend that NCCL would split
            world: Any = dist.group.WORLD
            assert not world.get_backend(torch.device(FIRST)).supports_splitting
        ranks = options.global_ranks_in_group or range(options.group_size)
        seconds = options.timeout.total_seconds()
        part = Group(agent.extensions["spmd.node"], ranks, options.group_rank, options.group_id, seconds)
        group: Any = FarcallProcessGroup(part, options.store)
        reduce = group.allreduce

        def allreduce(tensors: Any, opts: Any = None) -> Any:
            done.append("allreduce")
            return reduce(tensors, opts)

        group.allreduce = allreduce
        group.eager_connect_single_device = lambda _: None  # as of a backend of C++
        return group

    dist.Backend.register_backend("vendor", make, extended_api=True, devices=[KIND])
    return done


@on_device_workers(mode="lazy")
def test_the_vendors_backend_gets_the_tensors_of_its_devices(worker: Worker) -> None:
    done = _of_a_vendor()
    with worker.group():
        spmd.init_process_group()
        assert dist.get_backend_config() == "cpu:farcall,sim:vendor"
        half = dist.new_group([worker.rank], use_local_synchronization=True)
        tensor = late(worker.rank + 1.0)
        dist.all_reduce(tensor)
        assert is_all(tensor, 3.0)
        assert done == ["allreduce"]
        dist.all_reduce(torch.ones(3))
        dist.all_reduce(tensor, group=half)
        assert is_all(tensor, 3.0)
        assert done == ["allreduce"] * 2
        dist.destroy_process_group(half)
        dist.destroy_process_group()


@with_a_vendor_of_ours
@on_device_workers(3, "lazy")
def test_the_vendors_first_send_needs_two_ranks_only(worker: Worker) -> None:
    _of_a_vendor()
    tensor = late(worker.rank + 1.0)
    with worker.group():
        spmd.init_process_group(timedelta(seconds=20))
        if worker.rank == 0:
            dist.send(tensor, 1)
        elif worker.rank == 1:
            dist.recv(tensor, 0)
        dist.barrier()
        dist.destroy_process_group()
    assert is_all(tensor, [1.0, 1.0, 3.0][worker.rank])


@with_a_vendor_of_ours
@on_device_workers(3, "lazy")
def test_vendors_groups_meet_whatever_others_a_rank_is_in(worker: Worker) -> None:
    _of_a_vendor()
    with worker.group():
        spmd.init_process_group(timedelta(seconds=20))
        pair, _ = dist.new_group([0, 1]), dist.new_group([2])
        if worker.rank < 2:
            tensor = late(worker.rank + 1.0)
            dist.all_reduce(tensor, group=pair)
            assert is_all(tensor, 3.0)
        counted = dist.new_group([0, 1, 2], use_local_synchronization=True)
        more = [None, dist.new_group([0, 1])]  # which the third rank is not in
        for group in (*more, counted):
            if group is not dist.GroupMember.NON_GROUP_MEMBER:
                tensor = late(worker.rank + 1.0)
                dist.all_reduce(tensor, group=group)
                assert is_all(tensor, 3.0 if group is more[1] else 6.0)
        dist.destroy_process_group()


@with_a_vendor_of_ours
@on_device_workers(mode="lazy")
def test_groups_of_the_same_ranks_have_vendors_groups_of_their_own(worker: Worker) -> None:
    _of_a_vendor()
    with worker.group():
        spmd.init_process_group(timedelta(seconds=20))
        groups = [dist.new_group([0, 1]) for _ in range(2)]
        tensors = [late(worker.rank + 1.0), late(worker.rank + 3.0)]
        works: list[Any] = [None, None]
        for which in (0, 1) if worker.rank else (1, 0):
            works[which] = dist.all_reduce(tensors[which], group=groups[which], async_op=True)
        for work in works:
            work.wait()
        assert is_all(tensors[0], 3.0)
        assert is_all(tensors[1], 7.0)
        dist.destroy_process_group()


@with_a_vendor_of_ours
@on_device_workers(mode="lazy")
def test_a_group_with_a_bound_device_forms_the_vendors(worker: Worker) -> None:
    done = _of_a_vendor()
    with worker.group():
        spmd.init_process_group()
        world: Any = dist.group.WORLD
        world.bound_device_id = torch.device(FIRST)  # as of init_process_group(device_id=)
        tensor = late(worker.rank + 1.0)
        dist.all_reduce(tensor, group=dist.new_group([0, 1]))
        assert is_all(tensor, 3.0)
        assert done == ["allreduce"]
        dist.destroy_process_group()


@with_a_vendor_of_ours
@on_device_workers(mode="lazy")
def test_a_batch_of_sends_and_receives_is_coalesced_by_the_vendor(worker: Worker) -> None:
    _of_a_vendor()
    device, calls = torch.device(FIRST), list[Any]()
    with worker.group():
        spmd.init_process_group()
        world: Any = dist.group.WORLD
        vars(world.of_device(KIND)).update(
            supports_coalescing=True,
            _start_coalescing=lambda device: calls.append(("start", device.type)),
            _end_coalescing=lambda device: calls.append(("end", device.type)),
        )
        assert world.get_backend(device).supports_coalescing
        tensor, received = late(worker.rank + 1.0), torch.zeros(SIZE, device=device)
        # PyTorch 2.13 does not ask a group of Python whether it coalesces a batch_isend_irecv.
        with distributed_c10d._coalescing_manager(world, device, async_ops=True):
            works: list[Any] = [dist.isend(tensor, 1 - worker.rank), dist.irecv(received, 1 - worker.rank)]
        for work in works:
            work.wait()
        dist.destroy_process_group()
    assert is_all(received, 2.0 - worker.rank)
    assert calls == [("start", "sim"), ("end", "sim")]


@on_devices
def have_a_vendor_at_one_rank(worker: Worker) -> list[Any]:
    done = _of_a_vendor() if worker.rank == 0 else []
    with worker.group():
        spmd.init_process_group()
        tensor = late(worker.rank + 1.0)
        dist.all_reduce(tensor)
        found = [dist.get_backend_config(), is_all(tensor, 3.0), list(done)]
        dist.destroy_process_group()
    return found


@with_a_vendor_of_ours
def test_ranks_with_different_backends_stage_tensors(run_workers: RunWorkers, device_kind: str) -> None:
    found = run_workers(have_a_vendor_at_one_rank, 2, args=("lazy",), time_limit=60)
    assert found[0] == found[1]
    assert found[0][1:] == [True, []]


@with_a_vendor_of_ours
@on_device_workers(mode="lazy")
def test_a_vendors_backend_that_only_c10d_was_given_is_refused(worker: Worker) -> None:
    _of_a_vendor()
    with worker.group():
        store = dist.FileStore(f"{worker.folder}/store", 2)  # type: ignore[attr-defined]
        dist.init_process_group(f"cpu:farcall,{KIND}:vendor", store=store, rank=worker.rank, world_size=2)
        tensor, part = late(worker.rank + 1.0), dist.new_group([0, 1])
        for refused in (
            lambda: dist.all_reduce(tensor),
            lambda: dist.all_reduce(tensor, group=part),
            lambda: dist.send(tensor, 1 - worker.rank),
            lambda: dist.recv(tensor, 1 - worker.rank),
        ):
            with pytest.raises(InvalidOptionError) as caught:
                refused()
            assert "'cpu:farcall,sim:vendor'" in str(caught.value)
            assert "spmd.init_process_group()" in str(caught.value)
        dist.barrier()
        dist.destroy_process_group()


@on_devices
def lose_a_rank_of_the_vendors(worker: Worker) -> str:
    _of_a_vendor()
    worker.join(rpc_timeout=20.0)
    spmd.init_process_group()
    tensor = late(1.0)
    dist.all_reduce(tensor)
    worker.report("reduced")
    if worker.rank:
        worker.wait_for("never")
    with pytest.raises(CollectiveError):
        dist.all_reduce(tensor)  # the other rank is killed meanwhile, or was before
    dist.destroy_process_group()
    return "ended"


@with_a_vendor_of_ours
def test_the_death_of_a_rank_ends_the_vendors_operations(run_workers: RunWorkers, device_kind: str) -> None:
    workers = run_workers.start(lose_a_rank_of_the_vendors, 2, args=("eager",))
    workers.wait_for("reduced")
    workers[1].kill()
    assert workers[0].result() == "ended"
