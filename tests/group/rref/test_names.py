"""Named objects: each worker finds them, also one that comes later, for as long as their owner is there."""

from __future__ import annotations

import functools
import re
from typing import Any
from unittest import mock

import pytest

import rpc
from rpc.errors import (
    BlockingCallError,
    InvalidNameError,
    NameTakenError,
    RpcTimeoutError,
    UnknownWorkerError,
    WorkerLostError,
)
from rpc.runtime.current import clear_current_agent, current_agent, set_current_agent
from rref import names
from tests.support.orders import add_follower, ask, dismiss, start_followers
from tests.support.serving import in_processes, in_worker0, wait_at_gate
from tests.support.streams import until
from tests.support.workers import RunWorkers, Worker


class Counter:
    def __init__(self, count: int = 0) -> None:
        if count < 0:
            raise ValueError("it counts from 0 on")
        self.count = count

    def add(self, by: int = 1) -> int:
        self.count += by
        return self.count


def make(owner: str, name: str = "counter", count: int = 0) -> None:
    rpc.remote(owner, Counter, args=(count,), name=name)._get_future().wait()


def add_to(name: str = "counter", **options: Any) -> int:
    return int(rpc.find(name, **options).rpc_sync().add())


def fail_to_find(name: str = "counter", **options: Any) -> str:
    with pytest.raises(RpcTimeoutError) as caught:
        rpc.find(name, timeout=0.05, **options)
    return str(caught.value)


def objects() -> int:
    """How many objects this worker keeps for references, once those that are released are gone."""
    return int(current_agent().extensions["rref"].counts()["objects"])


# ---- found by name


def test_every_worker_finds_an_object_and_also_one_that_joins_later(run_workers: RunWorkers) -> None:
    workers = start_followers(run_workers, 2, dynamic=True)
    ask(workers[0], make, "worker1", "a/Counter-1.b:c_d", 5)
    added = [ask(worker, add_to, "a/Counter-1.b:c_d") for worker in workers]
    added.append(ask(add_follower(workers, dynamic=True), add_to, "a/Counter-1.b:c_d"))
    assert added == [6, 7, 8]
    dismiss(workers)


@pytest.mark.parametrize("options", [{}, {"owner": "worker1"}])
def test_an_object_that_is_made_later_is_waited_for(run_workers: RunWorkers, options: dict[str, str]) -> None:
    workers = start_followers(run_workers, 1, dynamic=True)
    assert ask(workers[0], functools.partial(fail_to_find, **options))
    workers[0].tell("order", functools.partial(add_to, **options))
    owner = add_follower(workers, dynamic=True)
    ask(owner, make, "worker1", "counter", 3)
    assert workers[0].wait_for("done") == 4
    dismiss(workers)


@in_worker0(world_size=3)
def test_an_object_can_be_looked_for_at_one_worker_only() -> None:
    make("worker1")
    assert add_to(owner="worker1") == 1
    assert "'worker2'" in fail_to_find(owner="worker2")
    assert add_to(owner=rpc.get_worker_info("worker1")) == 2
    with pytest.raises(UnknownWorkerError):
        rpc.find("counter", owner="worker7")
    with pytest.raises(UnknownWorkerError):
        rpc.remove_name("counter", owner="worker7")


@in_worker0()
def test_the_name_keeps_the_object_until_it_is_removed() -> None:
    for owner in ("worker1", "worker0"):
        rref = rpc.remote(owner, Counter, args=(5,), name="kept")
        assert rref.rpc_sync().add() == 6
        del rref
        rref = rpc.find("kept")
        assert rref.owner_name() == owner
        assert rpc.remove_name("kept")
        assert not rpc.remove_name("kept")
        fail_to_find("kept")
        assert rref.rpc_sync().add() == 7
        rpc.remote(owner, Counter, name="kept").to_here()
        assert add_to("kept") == 1
        assert rpc.remove_name("kept", owner=owner)


@in_worker0()
def test_an_object_can_have_a_name_and_a_limit_of_concurrency() -> None:
    rpc.remote("worker1", Counter, name="counter", concurrency=1)
    futures = [rpc.find("counter").rpc_async().add() for _ in range(5)]
    assert sorted(future.wait() for future in futures) == [1, 2, 3, 4, 5]


# ---- names that are taken


@in_worker0()
def test_a_second_object_of_one_name_at_a_worker_fails_before_it_is_made() -> None:
    make("worker1", count=3)
    second = rpc.remote("worker1", wait_at_gate, name="counter")
    with pytest.raises(
        NameTakenError, match=r"worker 'worker1' has an object named 'counter' already.*Counter"
    ):
        second.to_here()
    assert add_to() == 4


@in_worker0(world_size=3)
def test_objects_of_one_name_at_two_workers_are_an_error_that_names_both() -> None:
    make("worker1")
    make("worker2")
    with pytest.raises(NameTakenError, match=r"2 workers .*'worker1'.*'worker2'"):
        rpc.find("counter")
    assert add_to(owner="worker2") == 1
    assert rpc.remove_name("counter", owner="worker1")
    assert add_to() == 2


@in_worker0()
def test_the_name_of_an_object_that_could_not_be_made_is_free() -> None:
    failed = rpc.remote("worker1", Counter, args=(-1,), name="counter")
    with pytest.raises(ValueError, match="from 0 on"):
        failed.to_here()
    fail_to_find()
    make("worker1")
    assert add_to() == 1


# ---- deaths


def test_the_name_ends_with_its_owner_and_is_found_again_when_a_new_owner_makes_it(
    run_workers: RunWorkers,
) -> None:
    workers = start_followers(run_workers, 2, dynamic=True)
    ask(workers[0], make, "worker1", "counter", 7)
    assert ask(workers[0], add_to) == 8
    workers[1].kill()
    workers[0].tell("order", functools.partial(add_to, timeout=50))
    back = add_follower(workers, dynamic=True, name="worker1", rank=1)
    ask(back, make, "worker1")
    assert workers[0].wait_for("done") == 1
    dismiss(workers)


def test_the_name_outlives_the_worker_that_has_created_the_object(run_workers: RunWorkers) -> None:
    workers = start_followers(run_workers, 3)
    ask(workers[2], make, "worker1")
    workers[2].kill()
    assert [ask(worker, add_to) for worker in (workers[0], workers[1])] == [1, 2]
    dismiss(workers)


def find_at_lost() -> str:
    with pytest.raises(WorkerLostError) as caught:
        rpc.find("counter", owner="worker1", timeout=0)
    until(lambda: "no object is named 'counter'" in fail_to_find())  # once others answer in this little time
    return caught.value.worker


def test_in_a_static_group_an_owner_that_is_lost_is_not_waited_for(run_workers: RunWorkers) -> None:
    workers = start_followers(run_workers, 2)
    workers[1].kill()
    assert ask(workers[0], find_at_lost) == "worker1"
    dismiss(workers)


def fail_to_find_as_calls_time_out() -> str:
    with mock.patch.object(names._Search, "_left", return_value=0.001):
        return fail_to_find("other")


def test_a_silent_worker_does_not_hide_an_object_that_is_found(run_workers: RunWorkers) -> None:
    workers = start_followers(run_workers, 3)
    ask(workers[0], make, "worker1")
    workers[2].stop()
    assert ask(workers[0], add_to) == 1
    until(lambda: "no answer has come from 'worker2'" in ask(workers[0], fail_to_find, "other"))
    assert re.search("no answer has come from .*'worker2'", ask(workers[0], fail_to_find_as_calls_time_out))
    workers[2].resume()
    dismiss(workers)


_left: list[Any] = []


def leave_halfway() -> None:
    """Brings this worker where one is that shuts down: it has no agent, and still answers calls."""
    _left.append(current_agent())
    clear_current_agent(_left[0])


def return_from_halfway() -> None:
    set_current_agent(_left.pop())


@in_worker0(world_size=3)
def test_a_worker_that_is_leaving_does_not_hide_an_object_that_is_found() -> None:
    make("worker1")
    rpc.rpc_sync("worker2", leave_halfway)
    assert add_to() == 1
    until(lambda: "no object is named 'other'" in fail_to_find("other"))
    assert rpc.remove_name("counter")
    rpc.rpc_sync("worker2", return_from_halfway)


# ---- hostile names, coroutines, safe mode

WRONG = ["", "a b", "\x1b[31mred", "<b>", "é", "a\n", "x" * 256, 3, None, b"name", {}, ["a"]]


def send_unchecked(name: Any) -> rpc.RRef[Any]:
    """Creates an object as a worker would whose own checks were removed."""
    shell = current_agent().extensions["rref"]
    peer = shell.workers.find("worker1")
    payload = shell.calls.dump_call(Counter, (), {}, peer)
    rref: rpc.RRef[Any] = shell.create(peer, {"name": name}, payload, 20.0, Counter, rpc.RRef._of)
    return rref


@in_worker0()
def test_names_with_other_characters_are_refused_on_both_sides() -> None:
    for name in WRONG:
        with pytest.raises(InvalidNameError, match="the name of an object has 1 to 255"):
            rpc.find(name)  # type: ignore[arg-type]
        with pytest.raises(InvalidNameError):
            rpc.remove_name(name)  # type: ignore[arg-type]
        if name is not None:
            with pytest.raises(InvalidNameError) as caught:
                rpc.remote("worker1", Counter, name=name)  # type: ignore[call-overload]
            assert str(caught.value).isprintable()
            with pytest.raises(InvalidNameError):
                send_unchecked(name).to_here()
    make("worker1", "x" * 255)
    assert add_to("x" * 255) == 1


async def find_in_coroutine() -> None:
    rpc.find("counter")


@in_worker0()
def test_a_coroutine_must_not_wait_for_an_object() -> None:
    with pytest.raises(BlockingCallError):
        rpc.rpc_sync("worker1", find_in_coroutine)


@in_processes(2)
def test_objects_are_found_by_name_in_safe_mode(worker: Worker) -> None:
    rpc.allow_class(Counter)
    rpc.allow_methods(Counter, "add")
    with worker.group(deserialization="safe"):
        if worker.rank == 0:
            make("worker1")
            assert add_to() == 1
            assert rpc.remove_name("counter")
