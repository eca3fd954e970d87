"""Workers on a virtual machine from which the host steals time keep their cores awake while they talk."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

import rpc
from rpc import awake
from rpc.awake.accounts import Usage
from rpc.awake.spinner import AVAILABLE
from tests.rpc.streams import SOON, until
from tests.workers import RunWorkers, Worker

pytestmark = pytest.mark.skipif(not AVAILABLE, reason="this system has no threads for that")


def keeps_awake() -> bool:
    """Whether a thread of this process runs only where nobody else does."""
    return any(
        os.sched_getscheduler(int(thread.name)) == os.SCHED_IDLE
        for thread in Path("/proc/self/task").iterdir()
    )


def pretend(share: float, *, limited: bool = False) -> None:
    """Have this process find that its host steals this share of the time."""
    vars(awake).update(
        is_limited=lambda: limited, usage=lambda: Usage(share * time.monotonic(), time.monotonic())
    )


def much_is_stolen() -> None:
    pretend(0.3)


def nothing_is_stolen() -> None:
    pretend(0.0)


def limited() -> None:
    pretend(0.3, limited=True)


def talk(worker: Worker, on_what: Callable[[], None], keep_awake: bool = True) -> bool:
    """Call the other worker again and again; returns whether it kept a core awake meanwhile, and this one."""
    on_what()
    with worker.group(keep_awake=keep_awake):
        if worker.rank:
            return False
        seen = False
        end = time.monotonic() + (SOON if on_what is much_is_stolen and keep_awake else 1.0)
        while not seen and time.monotonic() < end:
            theirs = rpc.rpc_sync("worker1", keeps_awake)
            seen = theirs and keeps_awake()
        if seen:
            until(lambda: not keeps_awake())
            assert not rpc.rpc_sync("worker1", keeps_awake)
        return seen


def test_both_ends_of_calls_stay_awake_and_sleep_when_there_are_none(run_workers: RunWorkers) -> None:
    assert run_workers(talk, 2, args=(much_is_stolen,)) == [True, False]


@pytest.mark.parametrize("on_what", [nothing_is_stolen, limited])
def test_elsewhere_nobody_stays_awake(run_workers: RunWorkers, on_what: Callable[[], None]) -> None:
    assert run_workers(talk, 2, args=(on_what,)) == [False, False]


def test_with_the_option_off_nobody_stays_awake(run_workers: RunWorkers) -> None:
    assert run_workers(talk, 2, args=(much_is_stolen,), kwargs={"keep_awake": False}) == [False, False]


def leave_while_awake(worker: Worker) -> bool:
    much_is_stolen()
    with worker.group():
        end = time.monotonic() + SOON
        while not keeps_awake() and time.monotonic() < end:
            rpc.rpc_sync("worker0", keeps_awake)
            rpc.rpc_sync("worker1", keeps_awake)
        was_awake = keeps_awake()
    until(lambda: not keeps_awake())
    return was_awake


def test_who_leaves_the_group_sleeps(run_workers: RunWorkers) -> None:
    assert run_workers(leave_while_awake, 2) == [True, True]
