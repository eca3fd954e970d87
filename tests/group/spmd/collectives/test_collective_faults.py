"""What goes wrong in a collective ends it on every rank, at once, in an error that says who did what."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

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
from tests.support.process_groups import by_messages, process_group
from tests.support.streams import until
from tests.support.workers import RunWorkers, Worker

PATHS = pytest.mark.parametrize("apart", [False, True], ids=["shared memory", "messages"])
MANY = 3_000_000
"""Elements: several parts of a slot, so that a fault meets a collective in its middle."""


def in_world(
    body: Callable[[Worker], Any], worker: Worker, apart: bool, seconds: float = 20.0
) -> tuple[type[BaseException] | None, str]:
    """Runs ``body`` on a rank, and returns what it has ended in."""
    with process_group(worker, seconds=seconds, options=by_messages() if apart else None):
        try:
            dist.all_reduce(torch.ones(2))  # which another may fail after its own end of it
            worker.report("formed")
            body(worker)
        except (CollectiveError, KeyboardInterrupt) as error:
            return type(error), str(error)
    return None, ""


def all_in_world(
    run_workers: RunWorkers, body: Callable[[Worker], Any], apart: bool, world_size: int = 3, **options: Any
) -> list[tuple[type[BaseException] | None, str]]:
    task = partial(_task, body, apart, options)
    return run_workers(task, world_size)


def _task(body: Callable[[Worker], Any], apart: bool, options: dict[str, Any], worker: Worker) -> Any:
    return in_world(body, worker, apart, **options)


# ---- mismatches


def all_reduce_or_broadcast(worker: Worker) -> None:
    if worker.rank == 1:
        dist.broadcast(torch.ones(3), 0)
    else:
        dist.all_reduce(torch.ones(3))


def all_reduce_of_another_shape(worker: Worker) -> None:
    dist.all_reduce(torch.ones(3 + (worker.rank == 1)))


def all_reduce_of_another_dtype(worker: Worker) -> None:
    dist.all_reduce(torch.ones(3, dtype=torch.float64 if worker.rank == 1 else torch.float32))


def all_reduce_by_another_reduction(worker: Worker) -> None:
    dist.all_reduce(torch.ones(3), op=dist.ReduceOp.MAX if worker.rank == 1 else dist.ReduceOp.SUM)


def broadcast_from_another_root(worker: Worker) -> None:
    dist.broadcast(torch.ones(3), int(worker.rank == 1))
    dist.barrier()


@PATHS
@pytest.mark.parametrize(
    ("body", "called"),
    [
        (all_reduce_or_broadcast, ("all_reduce(sum, float32[3])", "broadcast(float32[3], root 0)")),
        (all_reduce_of_another_shape, ("all_reduce(sum, float32[3])", "all_reduce(sum, float32[4])")),
        (all_reduce_of_another_dtype, ("all_reduce(sum, float32[3])", "all_reduce(sum, float64[3])")),
        (all_reduce_by_another_reduction, ("all_reduce(sum, float32[3])", "all_reduce(maximum, float32[3])")),
    ],
)
def test_a_mismatch_tells_every_rank_what_two_ranks_have_called(
    run_workers: RunWorkers, body: Callable[[Worker], Any], called: tuple[str, str], apart: bool
) -> None:
    for kind, text in all_in_world(run_workers, body, apart):
        assert kind is CollectiveMismatchError
        assert f"called {called[0]}, but rank 1 {called[1]}" in text


@PATHS
def test_ranks_that_name_another_root_all_learn_of_it_with_the_next_collective(
    run_workers: RunWorkers, apart: bool
) -> None:
    """By messages a root has done its part when it has sent."""
    for kind, _ in all_in_world(run_workers, broadcast_from_another_root, apart):
        assert kind is CollectiveMismatchError


def gather_other_sizes(worker: Worker, count: int) -> None:
    outputs = [torch.empty(count) for _ in range(worker.world_size)]
    dist.all_gather(outputs, torch.ones(count + (worker.rank == 1)))


@PATHS
@pytest.mark.parametrize("count", [4, 3_000_000], ids=["short", "long"])
def test_a_rank_that_gives_more_than_others_expect_ends_the_gathering_everywhere(
    run_workers: RunWorkers, apart: bool, count: int
) -> None:
    for kind, text in all_in_world(run_workers, partial(gather_other_sizes, count=count), apart):
        assert kind is CollectiveError
        assert f"{4 * count + 4} bytes" in text
        assert str(4 * count) in text


# ---- ranks that leave, or do not come


def all_reduce_but_rank_1(worker: Worker) -> None:
    if worker.rank == 1:
        worker.wait_for("the end")
    else:
        dist.all_reduce(torch.ones(3))


@PATHS
def test_a_rank_that_does_not_come_in_time_is_named_everywhere(run_workers: RunWorkers, apart: bool) -> None:
    task = partial(_task, all_reduce_but_rank_1, apart, {"seconds": 1.0})
    workers = run_workers.start([task] * 3, 3)
    for rank in (0, 2):
        kind, text = workers[rank].result()
        assert kind is CollectiveTimeoutError
        assert "all_reduce(sum, float32[3]) has timed out after 1 s" in text
        assert "rank 1 (worker 'rank1')" in text.partition("waiting for")[2]
    workers[1].tell("the end")


def all_reduce_but_rank_3(worker: Worker) -> None:
    if worker.rank == 3:
        worker.wait_for("the end")
    else:
        dist.all_reduce(torch.ones(3))


def test_a_timeout_names_who_has_not_come_and_not_who_waits_for_it(run_workers: RunWorkers) -> None:
    """Rank 0 waits for rank 2, which waits for rank 3."""
    workers = run_workers.start([partial(_task, all_reduce_but_rank_3, True, {"seconds": 1.0})] * 4, 4)
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


def test_a_rank_that_dies_ends_a_collective_also_where_nobody_waits_for_it(run_workers: RunWorkers) -> None:
    """Rank 0 waits for rank 1, which is still to come."""
    workers = run_workers.start([partial(_task, all_reduce_at_rank_0, True, {})] * 4, 4)
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
    ends = all_in_world(run_workers, all_reduce_or_leave, apart)
    assert ends[1] == (None, "")
    for kind, text in (ends[0], ends[2]):
        assert kind is RankLostError
        assert "rank 1 (worker 'rank1') is gone" in text


def aborted_at_rank_1(worker: Worker) -> None:
    dist.barrier()  # now all are here
    if worker.rank == 1:
        assert dist.group.WORLD is not None
        dist.group.WORLD.abort()
    dist.all_reduce(torch.ones(3))


@PATHS
def test_abort_ends_what_is_under_way_everywhere(run_workers: RunWorkers, apart: bool) -> None:
    for kind, text in all_in_world(run_workers, aborted_at_rank_1, apart):
        assert kind is CollectiveError
        assert "rank 1 (worker 'rank1'): abort was called" in text


def fail_and_go_on(worker: Worker) -> None:
    with pytest.raises(CollectiveMismatchError):
        all_reduce_of_another_shape(worker)
    dist.all_reduce(torch.ones(3))


def test_a_group_that_has_failed_says_why_ever_after(run_workers: RunWorkers) -> None:
    for kind, text in all_in_world(run_workers, fail_and_go_on, False):
        assert kind is CollectiveMismatchError
        assert text.startswith("process group '0' has failed: ")


def asynchronous_works_of_a_dying_world(worker: Worker) -> None:
    count = 19 if worker.rank == 1 else 20  # so that the last one cannot have ended when rank 1 dies
    works = [dist.all_reduce(torch.ones(MANY), async_op=True) for _ in range(count)]
    worker.report("begun")
    for work in works:
        assert work is not None
        work.wait()
    worker.wait_for("the end")


def test_asynchronous_works_end_when_a_rank_dies(run_workers: RunWorkers) -> None:
    workers = run_workers.start([partial(_task, asynchronous_works_of_a_dying_world, False, {})] * 3, 3)
    workers.wait_for("begun")
    workers[1].kill()
    assert [workers[rank].result()[0] for rank in (0, 2)] == [RankLostError, RankLostError]


# ---- sends and receives


def receive_from_rank_1(worker: Worker) -> None:
    if worker.rank == 0:
        worker.report("receiving")
        dist.recv(torch.ones(3), 1)
    else:
        worker.wait_for("the end")


def test_a_receive_from_a_rank_that_dies_fails(run_workers: RunWorkers) -> None:
    workers = run_workers.start([partial(_task, receive_from_rank_1, False, {})] * 3, 3)
    workers[0].wait_for("receiving")
    workers[1].kill()
    kind, text = workers[0].result()
    assert kind is RankLostError
    assert "rank 1 (worker 'rank1') is gone" in text
    workers[2].tell("the end")


def receive_with_a_limit(worker: Worker) -> None:
    if worker.rank == 0:
        dist.recv(torch.ones(3), 1, tag=4)
    worker.report("over")
    worker.wait_for("the end")


def test_a_receive_times_out_and_says_from_whom(run_workers: RunWorkers) -> None:
    workers = run_workers.start([partial(_task, receive_with_a_limit, False, {"seconds": 1.0})] * 2, 2)
    kind, text = workers[0].result()
    assert kind is CollectiveTimeoutError
    assert text == "receive of 12 bytes from rank 1 (worker 'rank1'), tag 4 has timed out after 1 s"
    workers[1].tell("the end")


def receive_what_does_not_fit(worker: Worker) -> None:
    if worker.rank == 0:
        dist.recv(torch.ones(3), 1)
    else:
        dist.send(torch.ones(4), 0)


def test_a_receive_of_another_size_says_what_was_sent(run_workers: RunWorkers) -> None:
    kind, text = all_in_world(run_workers, receive_what_does_not_fit, False, 2)[0]
    assert kind is CollectiveMismatchError
    assert "rank 0 receives 12 bytes of torch.float32 with tag 0, but rank 1 has sent 16 bytes" in text


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
    assert all_in_world(run_workers, forks, apart, 2) == [(None, "")] * 2


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
    use(2_500)
    after = usage()
    assert after[0] - before[0] < 8 << 20, "memory"
    assert after[1] <= before[1], "descriptors"
    until(lambda: threading.active_count() <= before[2])  # one that was started as no other was idle ends


def usage() -> tuple[int, int, int]:
    with open("/proc/self/statm") as file:
        pages = int(file.read().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE"), len(os.listdir("/proc/self/fd")), threading.active_count()


def test_ten_thousand_collectives_leave_nothing_behind(run_workers: RunWorkers) -> None:
    assert all_in_world(run_workers, many_collectives, False, 2) == [(None, "")] * 2
