"""What goes wrong in a collective ends it on every rank, at once, in an error that says who did what."""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any, Final, NamedTuple

import pytest
import torch
import torch.distributed as dist

from rpc.errors import ForkedProcessError
from spmd.collectives.errors import (
    CollectiveError,
    CollectiveMismatchError,
    CollectiveTimeoutError,
    RankLostError,
)
from tests.support.default_device import not_on_devices
from tests.support.effort import EFFORT
from tests.support.process_groups import by_messages, process_group
from tests.support.streams import until
from tests.support.workers import RunWorkers, Worker

PATHS = pytest.mark.parametrize("apart", [False, True], ids=["shared memory", "messages"])
MANY = 3_000_000
"""Elements: several parts of a slot, so that a fault meets a collective in its middle."""
LIMIT = 3
"""Seconds after which a collective times out, within which the other ranks come to it."""


def in_world(
    body: Callable[[Worker], Any], apart: bool, worker: Worker
) -> tuple[type[BaseException] | None, str]:
    """Runs ``body`` on a rank, and returns what it has ended in."""
    with process_group(worker, options=by_messages() if apart else None):
        try:
            dist.all_reduce(torch.ones(2))  # which another may fail after its own end of it
            body(worker)
        except CollectiveError as error:
            return type(error), str(error)
    return None, ""


# ---- in groups of their own


class Case(NamedTuple):
    """A fault: what ranks do in a group, what it ends in, what the error says, and at which ranks."""

    do: Callable[[int, Any], Any]
    kind: type[CollectiveError]
    said: str
    ranks: Sequence[int] = (0, 1, 2)

    def fits(self, end: tuple[type[BaseException], str] | None) -> bool:
        return end is not None and end[0] is self.kind and bool(re.search(self.said, end[1], re.DOTALL))


def all_reduce_or_broadcast(rank: int, group: Any) -> None:
    if rank == 1:
        dist.broadcast(torch.ones(3), 0, group)
    else:
        dist.all_reduce(torch.ones(3), group=group)


def all_reduce_of_another_shape(rank: int, group: Any) -> None:
    dist.all_reduce(torch.ones(3 + (rank == 1)), group=group)


def all_reduce_of_another_dtype(rank: int, group: Any) -> None:
    dist.all_reduce(torch.ones(3, dtype=torch.float64 if rank == 1 else torch.float32), group=group)


def all_reduce_by_another_reduction(rank: int, group: Any) -> None:
    dist.all_reduce(torch.ones(3), dist.ReduceOp.MAX if rank == 1 else dist.ReduceOp.SUM, group)


def broadcast_from_another_root(rank: int, group: Any) -> None:
    """By messages a root has done its part when it has sent."""
    dist.broadcast(torch.ones(3), int(rank == 1), group)
    dist.barrier(group)


def gather_other_sizes(count: int, rank: int, group: Any) -> None:
    outputs = [torch.empty(count) for _ in range(group.size())]
    dist.all_gather(outputs, torch.ones(count + (rank == 1)), group)


def abort_at_rank_1(rank: int, group: Any) -> None:
    if rank == 1:
        group.abort()
    dist.all_reduce(torch.ones(3), group=group)


def fail_and_go_on(rank: int, group: Any) -> None:
    with pytest.raises(CollectiveMismatchError):
        all_reduce_of_another_shape(rank, group)
    dist.all_reduce(torch.ones(3), group=group)


def receive_what_does_not_fit(rank: int, group: Any) -> None:
    if rank == 0:
        dist.recv(torch.ones(3), 1, group)
    elif rank == 1:
        dist.send(torch.ones(4), 0, group)


def all_reduce_but_rank_1(rank: int, group: Any) -> None:
    group.set_timeout(timedelta(seconds=LIMIT))
    if rank != 1:
        dist.all_reduce(torch.ones(3), group=group)


def receive_with_a_limit(rank: int, group: Any) -> None:
    group.set_timeout(timedelta(seconds=1))
    if rank == 0:
        dist.recv(torch.ones(3), 1, group, tag=4)


def mismatch(ours: str, of_rank_1: str) -> str:
    return re.escape(f"called {ours}, but rank 1 {of_rank_1}")


CASES: Final[Sequence[Case]] = (
    *(
        Case(do, CollectiveMismatchError, mismatch("all_reduce(sum, float32[3])", other))
        for do, other in (
            (all_reduce_or_broadcast, "broadcast(float32[3], root 0)"),
            (all_reduce_of_another_shape, "all_reduce(sum, float32[4])"),
            (all_reduce_of_another_dtype, "all_reduce(sum, float64[3])"),
            (all_reduce_by_another_reduction, "all_reduce(maximum, float32[3])"),
        )
    ),
    Case(broadcast_from_another_root, CollectiveMismatchError, ""),
    *(
        Case(partial(gather_other_sizes, count), CollectiveError, rf"(?=.*{size}).*{size + 4} bytes")
        for count, size in ((4, 16), (MANY, 4 * MANY))
    ),
    Case(abort_at_rank_1, CollectiveError, r"rank 1 \(worker 'rank1'\): abort was called"),
    Case(fail_and_go_on, CollectiveMismatchError, r"^process group '[^']+' has failed: "),
    Case(
        receive_what_does_not_fit,
        CollectiveMismatchError,
        "rank 0 receives 12 bytes of torch.float32 with tag 0, but rank 1 has sent 16 bytes",
        (0,),
    ),
    Case(
        all_reduce_but_rank_1,
        CollectiveTimeoutError,
        r"all_reduce\(sum, float32\[3\]\) has timed out after 3 s.*waiting for.*rank 1 \(worker 'rank1'\)",
        (0, 2),
    ),
    Case(
        receive_with_a_limit,
        CollectiveTimeoutError,
        r"^receive of 12 bytes from rank 1 \(worker 'rank1'\), tag 4 has timed out after 1 s$",
        (0,),
    ),
)


def go_through_all(apart: bool, worker: Worker) -> list[tuple[type[BaseException], str] | None]:
    """What each fault ends in at this rank."""
    ends: list[tuple[type[BaseException], str] | None] = []
    with process_group(worker, options=by_messages() if apart else None):
        groups = [dist.new_group() for _ in CASES]
        for case, group in zip(CASES, groups, strict=True):
            dist.all_reduce(torch.ones(2), group=group)
            dist.barrier()  # which another fault may end after its own end of the all_reduce
            try:
                case.do(worker.rank, group)
            except CollectiveError as error:
                ends.append((type(error), str(error)))
            else:
                ends.append(None)
        dist.barrier()
    return ends


@PATHS
def test_each_fault_tells_all_ranks_what_has_happened(run_workers: RunWorkers, apart: bool) -> None:
    ends = run_workers(partial(go_through_all, apart), 3)
    wrong = [
        f"{case.do} ended at rank {rank} in {ends[rank][number]}"
        for number, case in enumerate(CASES)
        for rank in case.ranks
        if not case.fits(ends[rank][number])
    ]
    assert not wrong, "\n".join(wrong)


# ---- ranks that leave, or do not come


def all_reduce_but_rank_3(worker: Worker) -> None:
    if worker.rank == 3:
        worker.wait_for("the end")
        return
    world: Any = dist.group.WORLD
    world.set_timeout(timedelta(seconds=LIMIT))
    dist.all_reduce(torch.ones(3))


def test_a_timeout_names_who_has_not_come_and_not_who_waits_for_it(run_workers: RunWorkers) -> None:
    """Rank 0 waits for rank 2, which waits for rank 3."""
    workers = run_workers.start([partial(in_world, all_reduce_but_rank_3, True)] * 4, 4)
    for rank in range(3):
        kind, text = workers[rank].result()
        assert kind is CollectiveTimeoutError
        assert "rank 3 (worker 'rank3')" in text.partition("waiting for")[2]
    workers[3].tell("the end")


def all_reduce_at_rank_0(worker: Worker) -> None:
    worker.report("waiting")  # all have formed the group
    if worker.rank == 0:
        dist.all_reduce(torch.ones(3))
    else:
        worker.wait_for("the end")


@PATHS
def test_a_rank_that_dies_ends_a_collective_also_where_nobody_waits_for_it(
    run_workers: RunWorkers, apart: bool
) -> None:
    """Rank 0 waits for rank 1, which is still to come."""
    workers = run_workers.start([partial(in_world, all_reduce_at_rank_0, apart)] * 4, 4)
    for each in workers:
        each.wait_for("waiting")
    workers[3].kill()
    kind, text = workers[0].result()
    assert kind is RankLostError
    assert "rank 3 (worker 'rank3') is gone" in text
    workers[1].tell("the end")
    workers[2].tell("the end")


def all_reduce_or_leave(worker: Worker) -> None:
    if worker.rank != 1:
        dist.all_reduce(torch.ones(3))


@PATHS
def test_a_rank_that_leaves_is_not_waited_for(run_workers: RunWorkers, apart: bool) -> None:
    ends = run_workers(partial(in_world, all_reduce_or_leave, apart), 3)
    assert ends[1] == (None, "")
    for kind, text in (ends[0], ends[2]):
        assert kind is RankLostError
        assert "rank 1 (worker 'rank1') is gone" in text


# ---- fork


def forks(worker: Worker) -> None:
    if worker.rank == 1:
        child = os.fork()
        if child == 0:
            status = 1
            try:
                dist.all_reduce(torch.ones(3))
            except ForkedProcessError:
                status = 0
            finally:
                os._exit(status)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    tensor = torch.ones(3)
    dist.all_reduce(tensor)
    assert tensor.tolist() == [2.0, 2.0, 2.0]


@not_on_devices("a forked child has no devices")
@PATHS
def test_a_forked_child_cannot_use_the_group_and_does_it_no_harm(
    run_workers: RunWorkers, apart: bool
) -> None:
    assert run_workers(partial(in_world, forks, apart), 2) == [(None, "")] * 2


# ---- nothing is left


def many_collectives(worker: Worker) -> None:
    def use(count: int) -> None:
        small, large = torch.ones(4), torch.ones(100_000)
        for _ in range(count):
            dist.all_reduce(small)
            dist.broadcast(large, 0)
            work = dist.all_reduce(small, async_op=True)
            assert work is not None
            work.wait()
            dist.barrier()

    use(100)
    before = usage()
    use(1_000 * EFFORT)
    after = usage()
    assert after[0] - before[0] < 8 << 20, "memory"
    until(lambda: usage()[1] <= before[1])  # the observer opens files for a moment
    until(lambda: threading.active_count() <= before[2])  # one that was started as no other was idle ends


def usage() -> tuple[int, int, int]:
    with open("/proc/self/statm") as file:
        pages = int(file.read().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE"), len(os.listdir("/proc/self/fd")), threading.active_count()


@pytest.mark.timeout(90 * EFFORT)
def test_thousands_of_collectives_leave_nothing_behind(run_workers: RunWorkers) -> None:
    task = partial(in_world, many_collectives, False)
    assert run_workers(task, 2, time_limit=60.0 * EFFORT) == [(None, "")] * 2
