"""Workers on a virtual machine from which the host steals time keep their cores awake while they talk."""

from __future__ import annotations

import time

import pytest

import rpc
from rpc import awake
from rpc.awake import spinning
from rpc.awake.accounts import Usage
from rpc.awake.spinner import AVAILABLE
from tests.support.streams import SOON, until
from tests.support.workers import RunWorkers, Worker
from tests.unit.rpc.awake.threads import idle_threads

pytestmark = pytest.mark.skipif(not AVAILABLE, reason="this system has no threads for that")

MUCH = 0.3
LITTLE = 0.01


class Host:
    """What a process finds that its host steals: a share of the time, and little while a core is awake."""

    def __init__(self, share: float) -> None:
        self._share = share
        self._seen = time.monotonic()
        self._stolen = share

    def usage(self) -> Usage:
        now = time.monotonic()
        self._stolen += (now - self._seen) * (self._share * LITTLE if spinning else self._share)
        self._seen = now
        return Usage(self._stolen, now)


def pretend(share: float, *, limited: bool = False) -> None:
    vars(awake).update(is_limited=lambda: limited, usage=Host(share).usage)


def keeps_awake() -> bool:
    return bool(idle_threads())


def both_are_awake(seconds: float) -> bool:
    """Call the other worker again and again; returns whether both keep a core awake some time."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if rpc.rpc_sync("worker1", keeps_awake) and keeps_awake():
            return True
    return False


def talk_and_be_silent(worker: Worker) -> bool:
    pretend(MUCH)
    with worker.group(keep_awake=True):
        if worker.rank:
            until(keeps_awake)
        else:
            assert both_are_awake(SOON)
        until(lambda: not keeps_awake())
        return True


def test_both_ends_of_calls_stay_awake_until_there_are_none(run_workers: RunWorkers) -> None:
    assert run_workers(talk_and_be_silent, 2) == [True, True]


def talk(worker: Worker, share: float, limited: bool, keep_awake: bool) -> bool:
    pretend(share, limited=limited)
    with worker.group(keep_awake=keep_awake):
        return both_are_awake(0.6) if not worker.rank else keeps_awake()


@pytest.mark.parametrize(
    ("share", "limited", "keep_awake"),
    [(0.0, False, True), (LITTLE, False, True), (MUCH, True, True), (MUCH, False, False)],
    ids=["nothing is stolen", "little is stolen", "a limit", "the option is off"],
)
def test_elsewhere_cores_sleep(
    run_workers: RunWorkers, share: float, limited: bool, keep_awake: bool
) -> None:
    assert run_workers(talk, 2, args=(share, limited, keep_awake)) == [False, False]


def leave_while_awake(worker: Worker) -> bool:
    pretend(MUCH)
    with worker.group(keep_awake=True):
        end = time.monotonic() + SOON
        while not keeps_awake() and time.monotonic() < end:
            rpc.rpc_sync("worker0", keeps_awake)
            rpc.rpc_sync("worker1", keeps_awake)
        was_awake = keeps_awake()
    assert not spinning
    until(lambda: not keeps_awake())
    return was_awake


def test_who_leaves_the_group_sleeps(run_workers: RunWorkers) -> None:
    assert run_workers(leave_while_awake, 2) == [True, True]
