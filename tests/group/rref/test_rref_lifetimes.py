"""How long an owner keeps an object: while any worker refers to it, and no longer.

Each object here reports to the test when it is freed, and ``"freed"`` is only ever waited for, so these
tests hang until their time limit if an object is kept, and fail if one is freed too early.
"""

from __future__ import annotations

import gc
import threading
from typing import Any

import pytest

import rpc
from rpc.errors import RpcTimeoutError, SerializationError
from rpc.runtime.current import current_agent
from rref.protocol.machine import Protocol
from tests.support.orders import ask, dismiss, start_followers
from tests.support.serving import first_of, open_gate, serve, wait_at_gate
from tests.support.tracked import Tracked
from tests.support.workers import RunWorkers, Worker, current_worker

kept: list[Any] = []
"""What this worker keeps references in."""


def keep(*rrefs: rpc.RRef[Any]) -> None:
    kept.extend(rrefs)


def drop() -> None:
    current_worker().report("freed", "nothing yet")  # what an owner reports from here on was not freed before
    kept.clear()


def say_names() -> list[str]:
    return [rref.rpc_sync().say_name() for rref in kept]


def make_on(owner: str, *names: str) -> None:
    for name in names:
        rref = rpc.remote(owner, Tracked, args=(name,))
        rref.rpc_sync().say_name()
        kept.append(rref)


def give_to(to: str) -> None:
    rpc.rpc_sync(to, keep, args=tuple(kept))


# ---- users that let go


def test_an_object_is_freed_when_the_last_of_several_users_lets_go(run_workers: RunWorkers) -> None:
    workers = start_followers(run_workers, 4)
    ask(workers[0], make_on, "worker1", "shared")
    ask(workers[0], give_to, "worker2")
    ask(workers[2], give_to, "worker3")
    for rank in (0, 2):
        ask(workers[rank], drop)
        assert ask(workers[3], say_names) == ["shared"]
    ask(workers[1], drop)  # marks this moment in what the owner reports
    assert workers[1].wait_for("freed") == "nothing yet"
    ask(workers[3], drop)
    assert workers[1].wait_for("freed") == "shared"
    dismiss(workers)


def make_chain() -> None:
    """Each object holds a reference to the one before, on the other worker; only the last is kept here."""
    rref = rpc.remote("worker0", Tracked, args=("end",))
    for number in range(4):
        rref = rpc.remote(f"worker{number % 2}", Tracked, args=(str(number), rref))
    assert rref.rpc_sync().say_name() == "3"
    kept.append(rref)


def test_a_chain_of_objects_across_workers_is_freed(run_workers: RunWorkers) -> None:
    workers = start_followers(run_workers, 2)
    ask(workers[0], make_chain)
    ask(workers[0], drop)
    assert workers[0].wait_for("freed") == "nothing yet"
    assert [workers[1].wait_for("freed"), workers[0].wait_for("freed")] == ["3", "2"]
    assert [workers[1].wait_for("freed"), workers[0].wait_for("freed")] == ["1", "0"]
    assert workers[0].wait_for("freed") == "end"
    dismiss(workers)


def make_and_use() -> int:
    rref = rpc.remote("worker1", Tracked, args=("object", rpc.RRef(Tracked("argument"))))
    return len(rref.to_here().holds) + len(rref.rpc_sync().say_name())


def test_arguments_and_results_are_not_kept(run_workers: RunWorkers) -> None:
    workers = start_followers(run_workers, 2)
    assert ask(workers[0], make_and_use) == 1 + len("object")
    assert workers[1].wait_for("freed") == "object"
    assert workers[0].wait_for("freed") == "argument"
    dismiss(workers)


def make_many(count: int) -> None:
    for number in range(count):
        rpc.remote("worker1", Tracked, args=(str(number),))


def test_objects_never_asked_for_are_freed_too(run_workers: RunWorkers) -> None:
    workers = start_followers(run_workers, 2)
    ask(workers[0], make_many, 200)
    assert {workers[1].wait_for("freed") for _ in range(200)} == {str(number) for number in range(200)}
    assert ask(workers[1], rpc.get_debug_info)["num_owner_rrefs"] == 0
    dismiss(workers)


# ---- making fails or takes too long


def fail_with(thing: Tracked) -> None:
    raise LookupError(thing.name)


def make_and_fail() -> None:
    thing = Tracked("in the frame")
    fail_with(thing)


def ask_for_what_fails() -> None:
    rref = rpc.remote("worker1", make_and_fail)
    with pytest.raises(LookupError, match="in the frame"):
        rref.to_here()


def test_a_failed_creation_leaves_nothing_at_the_owner(run_workers: RunWorkers) -> None:
    workers = start_followers(run_workers, 2)
    ask(workers[1], gc.disable)
    ask(workers[0], ask_for_what_fails)
    assert workers[1].wait_for("freed") == "in the frame"
    dismiss(workers)


def make_slowly() -> Tracked:
    thing = Tracked("late")
    wait_at_gate()
    return thing


def time_out() -> None:
    kept.append(rpc.remote("worker1", make_slowly, timeout=0.2))
    future = kept[-1]._get_future()
    with pytest.raises(RpcTimeoutError):
        future.wait()


def owned_objects() -> int:
    return rpc.get_debug_info()["num_owner_rrefs"]


def wait_until_made() -> None:
    """The call that makes it has been answered, late; the owner counts the reference."""
    agent = current_agent()
    while agent.get_debug_info()["agent.given_up_calls"]:
        rpc.rpc_sync("worker1", int)
    assert rpc.rpc_sync("worker1", owned_objects) == 1


def fail_to_send(_: Worker) -> dict[str, int]:
    references = current_agent().extensions["rref"]
    for owner in ("worker0", "worker1"):
        with pytest.raises(SerializationError, match="over the limit"):
            rpc.remote(owner, len, args=(bytes(1 << 20),))
    counts: dict[str, int] = references.counts()
    return {kind: counts[kind] for kind in ("users", "local", "owned")}


def test_a_creation_that_cannot_be_sent_leaves_nothing(run_workers: RunWorkers) -> None:
    left = first_of(run_workers, fail_to_send, max_message_bytes=1 << 18)
    assert left == {"users": 0, "local": 0, "owned": 0}


@pytest.mark.parametrize("when", ["while it is made", "when it is made"])
def test_the_object_of_a_creation_that_timed_out_goes_with_the_reference(
    run_workers: RunWorkers, when: str
) -> None:
    workers = start_followers(run_workers, 2)
    ask(workers[0], time_out)
    workers[1].wait_for("at the gate")
    if when == "while it is made":
        ask(workers[0], drop)
    ask(workers[1], open_gate)
    if when == "when it is made":
        ask(workers[0], wait_until_made)
        ask(workers[0], drop)
    assert workers[1].wait_for("freed") == "late"
    dismiss(workers)


# ---- the end


def hold_to_the_end(worker: Worker) -> str:
    with worker.group():
        rref = rpc.remote("worker1", Tracked, args=("held to the end",))
        rref.rpc_sync().say_name()
    return str(rref.owner_name())


def serve_and_report(worker: Worker) -> None:
    serve(worker)
    worker.report("left")


def test_shutdown_gives_all_references_back(run_workers: RunWorkers) -> None:
    workers = run_workers.start([hold_to_the_end, serve_and_report])
    assert workers[1].wait_for("freed") == "held to the end"
    workers[1].wait_for("left")
    assert workers.results()[0] == "worker1"


# ---- own objects that could not be made


def fetch_what_failed() -> None:
    rref = rpc.remote("worker0", int, args=("no number",))
    with pytest.raises(ValueError, match="no number"):
        rref.to_here()


def objects_left(worker: Worker) -> int:
    with worker.group():
        fetch_what_failed()
        gc.collect()
        references = current_agent().extensions["rref"]
        while references.counts()["objects"]:
            pass
        return int(references.counts()["objects"])


def test_an_own_object_that_failed_is_freed_though_its_error_was_raised(run_workers: RunWorkers) -> None:
    assert run_workers(objects_left, 1) == [0]


# ---- calls whose reference is let go at once


def call_methods_and_let_go(worker: Worker) -> tuple[str, str, int]:
    """What methods return though no reference is left by the time that their messages are taken in."""
    with worker.group():
        agent = current_agent()
        rref = rpc.remote(agent.info, str, args=("text",))
        rref.to_here()
        free = threading.Event()
        agent.mailbox.call(free.wait)
        called, made = rref.rpc_async().upper(), rref.remote().title()
        del rref
        agent.extensions["rref"].debug_info()  # a step before which all that was let go is given up
        free.set()
        values = called.wait(), made.to_here()
        while (held := agent.extensions["rref"].counts()["objects"]) > 1:  # but no longer than that
            agent.extensions["rref"].debug_info()
        return *values, held


def test_a_method_of_an_own_object_is_called_though_the_reference_is_let_go(run_workers: RunWorkers) -> None:
    assert run_workers(call_methods_and_let_go, 1) == [("TEXT", "Text", 1)]


def lack_memory_for_messages(count: int) -> None:
    """Have the next ``count`` attempts to handle a message of the reference protocol fail here."""
    receive = Protocol.receive

    def scarce(protocol: Any, peer: int, message: Any) -> None:
        nonlocal count
        if count:
            count -= 1
            raise MemoryError("there is none left")
        receive(protocol, peer, message)

    Protocol.receive = scarce  # type: ignore[method-assign,assignment]


def test_an_owner_without_memory_for_a_message_handles_it_when_it_has_some(run_workers: RunWorkers) -> None:
    workers = start_followers(run_workers, 2)
    ask(workers[0], make_on, "worker1", "one", "two")
    ask(workers[1], drop)
    ask(workers[1], lack_memory_for_messages, 3)
    ask(workers[0], drop)
    assert workers[1].wait_for("freed") == "nothing yet"
    assert {workers[1].wait_for("freed") for _ in range(2)} == {"one", "two"}
    dismiss(workers)
