"""Process groups whose members change, as c10d's ``enable_reconfigure`` wants them from PyTorch 2.14 on."""

from __future__ import annotations

import inspect
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import FileStore, PrefixStore  # type: ignore[attr-defined]

import rpc
from rpc.errors import WorkerLostError
from spmd.collectives.creation import create
from spmd.collectives.errors import CollectiveError
from tests.support.workers import RunWorkers, Worker

CAN_C10D = "enable_reconfigure" in inspect.signature(dist.init_process_group).parameters
PATIENCE = timedelta(seconds=30)


class Member:
    """One worker's group, formed by handles that go through a store."""

    def __init__(self, worker: Worker, store: Any, group: Any) -> None:
        self.worker, self.store, self.group = worker, store, group

    def exchanged(self, name: str, count: int) -> list[str]:
        self.store.set(f"{name}/{self.worker.rank}", self.group.get_reconfigure_handle())
        return [self.store.get(f"{name}/{rank}").decode() for rank in range(count)]

    def form(self, uuid: int, handles: Sequence[str] | set[str], timeout: timedelta = PATIENCE) -> None:
        options = SimpleNamespace(uuid=uuid, handles=handles, timeout=timeout, hints={})
        self.group.reconfigure(options).wait()

    def sum(self) -> float:
        tensor = torch.tensor([1.0 + self.worker.rank])
        self.group.allreduce([tensor]).wait()
        return tensor.item()


@contextmanager
def member_of(worker: Worker) -> Iterator[Member]:
    store = FileStore(worker.init_method.removeprefix("file://") + ".handles", -1)
    options = SimpleNamespace(
        store=PrefixStore("group", store), group_rank=worker.rank, group_size=3, group_id="group",
        timeout=PATIENCE, global_ranks_in_group=[], enable_reconfigure=True,
    )  # fmt: skip
    group = create(options, None)
    try:
        yield Member(worker, store, group)
    finally:
        group.shutdown()


def go_through(worker: Worker) -> list[Any]:
    found: list[Any] = []
    with member_of(worker) as mine:
        group = mine.group
        assert (group.supports_reconfigure, group.size(), group.rank()) == (True, 3, worker.rank)
        with pytest.raises(CollectiveError, match="it has not been configured yet"):
            mine.sum()
        mine.form(100 + worker.rank, [group.get_reconfigure_handle()])
        found.append((group.size(), group.rank(), mine.sum()))  # alone
        with pytest.raises(RuntimeError, match="was already used"):
            mine.form(100 + worker.rank, [group.get_reconfigure_handle()])
        handles = mine.exchanged("all", 3)
        mine.form(1, handles)
        found.append((group.size(), group.rank(), mine.sum()))
        group.abort()
        mine.exchanged("aborted", 3)
        mine.form(2, handles[::-1])
        found.append((group.size(), group.rank(), mine.sum()))
        mine.form(3, set(handles))
        found.append((group.size(), mine.sum()))
        mine.exchanged("summed", 3)
        if worker.rank == 1:
            with pytest.raises(ValueError, match="is not among"):
                mine.form(4, [handles[0], handles[2]])
        else:
            mine.form(4, [handles[0], handles[2]])
            found.append((group.size(), group.rank(), mine.sum()))
        mine.exchanged("end", 3)
    with pytest.raises(CollectiveError):
        mine.form(5, [group.get_reconfigure_handle()])
    return found


def test_group_is_formed_anew_with_other_members(run_workers: RunWorkers) -> None:
    for rank, found in enumerate(run_workers.start(go_through, 3, time_limit=100).results()):
        expected: list[Any] = [(1, 0, 1.0 + rank), (3, rank, 6.0), (3, 2 - rank, 6.0), (3, 6.0)]
        if rank != 1:
            expected.append((2, rank // 2, 4.0))
        assert found == expected


def lose_one(worker: Worker) -> Any:
    """Go on without a member that is killed, and with one that comes later."""
    if worker.rank == 2:
        worker.wait_for("the loss")
    with member_of(worker) as mine:
        if worker.rank == 2:
            mine.exchanged("late", 0)
            mine.form(3, [mine.store.get("alive/0").decode(), mine.group.get_reconfigure_handle()])
            return mine.sum()
        handles = mine.exchanged("first", 2)
        mine.form(1, handles)
        if worker.rank == 1:
            worker.report("formed")
            signal.pause()
        with pytest.raises(CollectiveError, match="worker"):
            mine.sum()
        with pytest.raises((WorkerLostError, CollectiveError), match=r"lost|in time"):
            mine.form(2, handles, timedelta(seconds=5))
        with pytest.raises(CollectiveError, match="is not formed"):
            mine.sum()
        mine.store.set("alive/0", mine.group.get_reconfigure_handle())
        worker.report("goes on")
        late = mine.store.get("late/2").decode()
        mine.form(3, [mine.group.get_reconfigure_handle(), late])
        return mine.sum()


def test_group_goes_on_without_a_killed_member_and_with_a_late_one(run_workers: RunWorkers) -> None:
    workers = run_workers.start(lose_one, 3, time_limit=100)
    workers[1].wait_for("formed")
    workers[1].kill()
    workers[0].wait_for("goes on")
    workers[2].tell("the loss")
    assert (workers[0].result(), workers[2].result()) == (4.0, 4.0)


def use_the_rpc_group(worker: Worker) -> tuple[float, bool]:
    with worker.group():
        store = FileStore(worker.init_method.removeprefix("file://") + ".handles", -1)
        distributed: Any = dist
        distributed.init_process_group(
            "farcall", store=store, rank=worker.rank, world_size=2, timeout=PATIENCE, enable_reconfigure=True
        )
        try:
            assert distributed._supports_reconfigure()
            mine = Member(worker, store, dist.group.WORLD)
            handles = mine.exchanged("all", 2)
            distributed._reconfigure(1, handles).wait()
            tensor = torch.ones(1)
            dist.all_reduce(tensor)
            return tensor.item(), handles[worker.rank].startswith(f"farcall:{rpc.get_worker_info().name}/")
        finally:
            dist.destroy_process_group()


@pytest.mark.skipif(not CAN_C10D, reason="c10d has no enable_reconfigure")
def test_c10d_forms_a_group_of_the_workers_of_the_rpc_group(run_workers: RunWorkers) -> None:
    assert run_workers(use_the_rpc_group, 2) == [(2.0, True)] * 2
