from __future__ import annotations

from concurrent.futures import Future

import pytest

from rpc.errors import RendezvousTimeoutError
from rpc.rendezvous.arrivals import Group
from rpc.rendezvous.meeting import meet
from rpc.rendezvous.store import Backoff, SharedStore, StoreWait
from tests.unit.rpc.rendezvous.conftest import Connect, Listening, Workers, in_thread, results


def group_of(me: Listening, everybody: list[Listening]) -> Group:
    return Group(me.member, tuple(each.member for each in everybody), "job/1", static=True)


def wait_for(store: SharedStore, key: str) -> None:
    backoff = Backoff(StoreWait(10))
    while not store.has(f"farcall/meeting/job/1/{key}"):
        assert backoff.pause()


def test_nobody_goes_on_before_all_are_there(connect: Connect, workers: Workers) -> None:
    everybody = workers(3)
    zero, one, two = (group_of(each, everybody) for each in everybody)
    futures: list[Future[None]] = [in_thread(meet, connect(), each, 20) for each in (zero, one)]
    wait_for(connect(), "ready/1")
    with pytest.raises(RendezvousTimeoutError, match=r"worker 'worker0' \(rank 0\) did not begin to serve"):
        meet(connect(), Group(two.me, two.members, "other/1", static=True), 0.1)
    assert not any(future.done() for future in futures)
    meet(connect(), two, 20)
    results(futures)


def test_who_has_not_come_is_named(memory: SharedStore, workers: Workers) -> None:
    everybody = workers(3)
    zero, one, _ = (group_of(each, everybody) for each in everybody)
    coordinating = in_thread(meet, memory, zero, 1)
    with pytest.raises(RendezvousTimeoutError, match="worker0"):
        meet(memory, one, 0.1)
    text = r"^the group was complete, but worker 'worker2' \(rank 2\) did not begin to serve"
    with pytest.raises(RendezvousTimeoutError, match=text):
        coordinating.result(20)


def test_the_dead_are_not_waited_for(memory: SharedStore, workers: Workers) -> None:
    everybody = workers(3)
    zero, one, _ = (group_of(each, everybody) for each in everybody)
    futures = [in_thread(meet, memory, each, 20) for each in (zero, one)]
    everybody[2].die()
    results(futures)
    orphan = in_thread(meet, memory, Group(one.me, one.members, "job/2", static=True), 20)
    everybody[0].die()
    results([orphan])
