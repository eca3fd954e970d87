"""``to_here`` before and after the object is made: each fetch is answered once, whatever the object is."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, cast

import pytest
import torch

import rpc
from rpc.errors import RpcTimeoutError, SerializationError
from rpc.group.peer import Peer
from rpc.runtime.current import current_agent
from rpc.testing.faults import Faults
from rref.delayed_answers import DelayedAnswers
from rref.requests import CREATE
from tests.support.late_messages import holding_late_messages
from tests.support.serving import (
    WAIT_SECONDS,
    first_of,
    in_standing_group,
    in_worker0,
    open_gate,
    wait_at_gate,
)
from tests.support.workers import RunWorkers, Worker

MADE: dict[str, Any] = {
    "number": 42,
    "text": "x" * 100_000,
    "tensor": torch.arange(4.0),
    "large tensor": torch.ones(300_000),
    "list": [1, torch.ones(2)],
}


def make(kind: str) -> Any:
    """What is made once the gate is open."""
    wait_at_gate(kind)
    if kind == "nothing":
        raise LookupError("not today")
    return threading.Lock() if kind == "lock" else MADE[kind]


def same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, list):
        return all(map(same, one, other))
    return bool(one == other)


def fetch_before_it_is_made(_: Worker, kind: str) -> list[Any]:
    """What two fetches get that wait at the owner, and one that comes when the object is there."""
    rref = rpc.remote("worker1", make, args=(kind,))
    with ThreadPoolExecutor(2) as threads:
        waiting = [threads.submit(rref.to_here) for _ in range(2)]
        while rpc.rpc_sync("worker1", postponed) < 2:
            pass
        rpc.rpc_sync("worker1", open_gate, args=(kind,))
        outcomes = [each.exception() or each.result() for each in waiting]
    rref._get_future().wait() if kind != "nothing" else None
    try:
        outcomes.append(rref.to_here())
    except Exception as error:
        outcomes.append(error)
    assert current_agent().calls.table.unanswered() == 0
    while rpc.rpc_sync("worker1", postponed):  # the answer leaves before it is accounted for
        pass
    return outcomes


def postponed() -> int:
    return int(current_agent().lifecycle.activity.postponed.value)


@pytest.mark.parametrize("kind", MADE)
def test_fetches_that_come_before_the_object_get_it(run_workers: RunWorkers, kind: str) -> None:
    outcomes = first_of(run_workers, fetch_before_it_is_made, kind)
    assert len(outcomes) == 3
    assert all(same(outcome, MADE[kind]) for outcome in outcomes)


@pytest.mark.parametrize(("kind", "error"), [("nothing", LookupError), ("lock", SerializationError)])
def test_fetches_that_come_before_it_fails_are_told(
    run_workers: RunWorkers, kind: str, error: type[Exception]
) -> None:
    assert [type(each) for each in first_of(run_workers, fetch_before_it_is_made, kind)] == [error] * 3


@in_standing_group()
def test_an_object_whose_fetch_was_given_up_is_confirmed_all_the_same() -> None:
    """What becomes of an object whose fetch was given up before it was made."""
    rref = rpc.remote("worker1", wait_at_gate, args=("", 3))
    with pytest.raises(RpcTimeoutError):
        rref.to_here(timeout=0.02)
    rpc.rpc_sync("worker1", open_gate)
    rref._get_future().wait()
    while current_agent().calls.table.unanswered():  # the late answer to the fetch
        pass
    assert (rref.to_here(), rref.confirmed_by_owner(), rref.to_here()) == (3, True, 3)


@in_standing_group()
def test_a_creation_has_ended_when_its_object_was_fetched() -> None:
    for number in range(10):
        rref = rpc.remote("worker1", int, args=(number,))
        made = rref._get_future()
        assert rref.to_here() == number
        made.wait()
        assert rref.confirmed_by_owner()


promises: dict[int, torch.futures.Future[int]] = {}


@rpc.functions.async_execution
def promise(number: int) -> torch.futures.Future[int]:
    promises[number] = torch.futures.Future()
    return promises[number]


def keep_and_stay(number: int) -> None:
    """Makes an object by a future of which others know, and goes on with other things."""
    while number not in promises:
        pass
    promises[number].set_result(number)
    wait_at_gate(str(number))


@in_standing_group()
def test_requests_are_read_though_who_made_an_object_goes_on() -> None:
    fetched = []
    for number in range(4):
        for _warm_up in range(20):
            rpc.rpc_sync("worker1", int)
        rref = rpc.remote("worker1", promise, args=(number,))
        staying = rpc.rpc_async("worker1", keep_and_stay, args=(number,))
        rref._get_future().wait()
        fetched.append(rref.to_here(timeout=WAIT_SECONDS / 2))
        rpc.rpc_sync("worker1", open_gate, args=(str(number),))
        staying.wait()
    assert fetched == list(range(4))


def make_once_fetched(number: int) -> int:
    while not postponed():
        pass
    return number


def have_no_room_for(name: str) -> None:
    """From now on, who answers a fetch of that worker waits at the gate."""
    answer = DelayedAnswers.answer_fetch

    def wait_and_answer(self: Any, peer: Peer, *fetch: Any) -> None:
        if peer.name == name:
            wait_at_gate("room")
        answer(self, peer, *fetch)

    cast("Any", DelayedAnswers).answer_fetch = wait_and_answer  # in a process that ends with the test


@in_worker0(world_size=3)
def test_a_creator_is_heard_while_the_answer_to_another_waits_for_room() -> None:
    for _warm_up in range(20):
        rpc.rpc_sync("worker1", int)
    rpc.rpc_sync("worker1", have_no_room_for, args=("worker2",))
    rref = rpc.remote("worker1", make_once_fetched, args=(3,))
    fetched = rpc.rpc_async("worker2", rpc.RRef.to_here, args=(rref,))
    rref._get_future().wait()
    called = rpc.rpc_sync("worker1", int, args=(4,), timeout=WAIT_SECONDS / 2)
    rpc.rpc_sync("worker1", open_gate, args=("room",))
    assert (called, fetched.wait()) == (4, 3)


def make_late(owner: str) -> rpc.RRef[torch.Tensor]:
    """Return a reference that overtakes the message that creates its object, as it overtakes a large one."""
    with Faults() as faults:
        faults.delay(CREATE, seconds=0.3)
        return rpc.remote(owner, torch.ones, args=(2,))


_held: list[Callable[[], object]] = []


def make_later(owner: str) -> rpc.RRef[torch.Tensor]:
    """As ``make_late``; the creation is sent by ``send_creation``."""
    with holding_late_messages() as held:
        made = make_late(owner)
    _held.extend(held)
    return made


def send_creation() -> None:
    (send,) = _held
    send()


@in_standing_group()
def test_a_reference_of_the_owner_waits_for_a_creation_that_is_late() -> None:
    assert torch.equal(rpc.rpc_sync("worker1", make_late, args=("worker0",)).to_here(), torch.ones(2))
    late = rpc.rpc_sync("worker1", make_later, args=("worker0",))
    with pytest.raises(RpcTimeoutError, match=r"the message that creates the object of .* has not arrived"):
        late.to_here(timeout=0.01)
    rpc.rpc_sync("worker1", send_creation)
    assert torch.equal(late.local_value(), torch.ones(2))
    assert rpc.rpc_sync("worker1", make_late, args=("worker0",)).rpc_sync().sum() == 2
