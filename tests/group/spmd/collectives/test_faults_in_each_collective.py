"""A rank that is killed, stopped or interrupted in the middle of any operation ends it on all ranks.

There is a group for each operation, so that one run goes through all of them. The victim first does each
operation once, and counts the lines of ours that it runs; the fault then comes at a chosen one. Death and
SIGSTOP meet a whole process, so a thread for each operation goes up to its line, and the fault comes when all
are there.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from functools import partial
from types import FrameType
from typing import Any, Final, TypeAlias

import pytest
import torch
import torch.distributed as dist

from spmd.collectives.errors import CollectiveError, CollectiveTimeoutError, RankLostError
from tests.support.process_groups import by_messages, process_group
from tests.support.workers import RunWorkers, Worker

PATHS = pytest.mark.parametrize("apart", [False, True], ids=["shared memory", "messages"])
MOMENTS = pytest.mark.parametrize(
    "moment",
    [0.5, *(pytest.param(each, marks=pytest.mark.nightly) for each in (0.0, 0.2, 0.35, 0.7, 0.9, 1))],
)
VICTIM: Final = 1
SURVIVORS: Final = (0, 2)
MANY: Final = 600_000
"""Elements: several parts of a slot, and several messages."""
PATIENCE: Final = 1.5
"""Seconds that an operation may take where the victim is stopped."""

Outcome: TypeAlias = tuple[type[BaseException], str]


# ---- operations of three ranks


def ones() -> torch.Tensor:
    return torch.ones(MANY)


def one_each() -> list[torch.Tensor]:
    return [ones() for _ in range(3)]


def all_reduce(group: Any) -> None:
    dist.all_reduce(ones(), group=group)


def all_reduce_coalesced(group: Any) -> None:
    group.allreduce_coalesced([ones(), ones()]).wait()


def all_gather(group: Any) -> None:
    dist.all_gather(one_each(), ones(), group)


def reduce_scatter(group: Any) -> None:
    dist.reduce_scatter(ones(), one_each(), group=group)


def all_to_all(group: Any) -> None:
    dist.all_to_all(one_each(), one_each(), group)


def broadcast(root: int, group: Any) -> None:
    dist.broadcast(ones(), root, group)


def reduce(root: int, group: Any) -> None:
    dist.reduce(ones(), root, group=group)


def gather(root: int, group: Any) -> None:
    dist.gather(ones(), one_each() if group.rank() == root else None, root, group)


def scatter(root: int, group: Any) -> None:
    dist.scatter(ones(), one_each() if group.rank() == root else None, root, group)


def barrier(group: Any) -> None:
    dist.barrier(group)


def send_and_receive(group: Any) -> None:
    others = SURVIVORS if group.rank() == VICTIM else (VICTIM,)
    works = [group.send([ones()], other, 0) for other in others]
    works += [group.recv([ones()], other, 0) for other in others]
    for work in works:
        work.wait()


Operation: TypeAlias = Callable[[Any], None]

COLLECTIVES: Final[Mapping[str, Operation]] = {
    each.__name__: each
    for each in (all_reduce, all_reduce_coalesced, all_gather, reduce_scatter, all_to_all, barrier)
} | {
    f"{each.__name__}, root {root}": partial(each, root)
    for each in (broadcast, reduce, gather, scatter)
    for root in (0, VICTIM)
}
OPERATIONS: Final = {**COLLECTIVES, "send and receive": send_and_receive}


# ---- at a line


def at_line(
    number: int, files: Sequence[str], function: Callable[[], object], strike: Callable[[], object]
) -> int:
    """Run a function, again if need be, and ``strike`` before line ``number`` of these files is run, counted
    from 1; or when it fails. Returns the number of lines.
    """
    count = 0

    def trace(frame: FrameType, event: str, _: object) -> Any:
        nonlocal count
        folder, _, file = frame.f_code.co_filename.rpartition("/")
        if "/spmd/collectives" not in folder or file not in files:
            return None
        if event == "line":
            count += 1
            if count == number:
                strike()
        return trace

    sys.settrace(trace)
    try:
        function()
        while count < number:  # while it waits, it may run more lines at one time than at another
            function()
    finally:
        sys.settrace(None)
        if count < number:
            strike()
    return count


def lines_of(operation: Operation) -> Sequence[str]:
    """Where the lines that count are: what sends and receives does so on other threads."""
    if operation is send_and_receive:
        return ["process_group.py"]
    return ["local.py", "network.py", "hierarchy.py"]


def count_lines(groups: Mapping[str, Any]) -> dict[str, int]:
    """How many lines each operation has; all ranks do each once."""
    return {
        name: at_line(0, lines_of(each), partial(each, groups[name]), lambda: None)
        for name, each in OPERATIONS.items()
    }


# ---- what ranks do


def until_it_fails(operation: Operation, group: Any) -> Outcome:
    """What a survivor's operation ends in. It may have done its part before the victim is struck."""
    try:
        while True:
            operation(group)
    except CollectiveError as error:
        return type(error), str(error)


def in_all_operations(
    worker: Worker, apart: bool, moment: float, strike: Callable[[], None], patience: float
) -> dict[str, Outcome]:
    """A thread for each operation; the victim is struck when all of its are at their lines."""
    outcomes: dict[str, Outcome] = {}
    with process_group(worker, seconds=60, options=by_messages() if apart else None):
        groups = {name: dist.new_group() for name in OPERATIONS}
        lines = count_lines(groups)
        all_there = threading.Barrier(len(OPERATIONS), strike)

        def run(name: str, operation: Operation) -> None:
            group = groups[name]
            group.set_timeout(timedelta(seconds=patience))
            if worker.rank == VICTIM:
                number = max(1, round(moment * lines[name]))
                with contextlib.suppress(CollectiveError):  # which it gets once more
                    at_line(number, lines_of(operation), partial(operation, group), all_there.wait)
            outcomes[name] = until_it_fails(operation, group)

        dist.barrier()
        threads = [threading.Thread(target=run, args=each, daemon=True) for each in OPERATIONS.items()]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        worker.report("over")
        worker.wait_for("the end")
    return outcomes


def one_after_the_other(worker: Worker, apart: bool, moment: float) -> dict[str, Outcome]:
    """Ctrl-C comes to the main thread, so it is in one operation at a time."""
    outcomes: dict[str, Outcome] = {}
    with process_group(worker, seconds=60, options=by_messages() if apart else None):
        groups = {name: dist.new_group() for name in OPERATIONS}
        lines = count_lines(groups)
        dist.barrier()
        for name, operation in OPERATIONS.items():
            group = groups[name]
            if worker.rank != VICTIM:
                outcomes[name] = until_it_fails(operation, group)
                continue
            press = partial(signal.raise_signal, signal.SIGINT)
            try:
                number = max(1, round(moment * lines[name]))
                at_line(number, lines_of(operation), partial(operation, group), press)
            except KeyboardInterrupt as error:
                outcomes[name] = type(error), ""
            dist.destroy_process_group(group)
        worker.report("over")
        worker.wait_for("the end")
    return outcomes


def kill_myself() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def stop_myself() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


# ---- tests


@PATHS
@MOMENTS
def test_a_rank_that_is_killed_ends_each_operation(
    run_workers: RunWorkers, apart: bool, moment: float
) -> None:
    workers = run_workers.start(in_all_operations, 3, args=(apart, moment, kill_myself, 60.0))
    workers[VICTIM].death_intended = True
    for rank in SURVIVORS:
        workers[rank].wait_for("over")
    for rank in SURVIVORS:
        workers[rank].tell("the end")
        outcomes = workers[rank].result()
        assert outcomes.keys() == OPERATIONS.keys()
        for name, (kind, text) in outcomes.items():
            assert kind is RankLostError, (name, text)
            assert "rank 1 (worker 'rank1') is gone" in text, name


@PATHS
@MOMENTS
def test_a_rank_that_is_stopped_is_noticed_in_each_operation_by_the_timeout(
    run_workers: RunWorkers, apart: bool, moment: float
) -> None:
    workers = run_workers.start(in_all_operations, 3, args=(apart, moment, stop_myself, PATIENCE))
    for rank in SURVIVORS:
        workers[rank].wait_for("over")
    workers[VICTIM].resume()  # that all has ended, it learns as well
    workers[VICTIM].wait_for("over")
    workers.tell("the end")
    outcomes = workers.results()
    for rank in SURVIVORS:
        assert outcomes[rank].keys() == OPERATIONS.keys()
        for name, (kind, text) in outcomes[rank].items():
            assert kind is CollectiveTimeoutError, (name, text)
            assert " has timed out after 1.5 s" in text, name
    for name, (kind, text) in outcomes[VICTIM].items():
        if name in COLLECTIVES:  # of sends and receives, others have done what they could
            assert kind is CollectiveTimeoutError, (name, text)


@PATHS
@MOMENTS
def test_ctrl_c_ends_each_operation_on_all_ranks(run_workers: RunWorkers, apart: bool, moment: float) -> None:
    workers = run_workers.start(one_after_the_other, 3, args=(apart, moment))
    workers.wait_for("over")
    workers.tell("the end")
    outcomes = workers.results()
    assert [kind for kind, _ in outcomes[VICTIM].values()] == [KeyboardInterrupt] * len(OPERATIONS)
    for rank in SURVIVORS:
        for name, (kind, text) in outcomes[rank].items():
            if name in COLLECTIVES:
                assert kind is CollectiveError, (name, text)
                assert "at rank 1 (worker 'rank1') has ended in KeyboardInterrupt" in text, name
            else:  # nothing is wrong with a group in which one did not receive; that it leaves ends the wait
                assert kind is RankLostError, (name, text)
                assert "rank 1 (worker 'rank1') is gone: it has left the process group" in text
