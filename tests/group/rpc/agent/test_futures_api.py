"""The futures of calls: PyTorch's own, that can also be awaited and collected."""

from __future__ import annotations

import logging
import threading
from typing import Any

import pytest
import torch

import dist_autograd
import rpc
from rref import RemoteModule
from tests.support.default_device import placed
from tests.support.serving import in_standing_group, in_worker0, open_gate, wait_at_gate
from tests.support.streams import SOON


def add(x: int, y: int) -> int:
    return x + y


def fail(message: str) -> None:
    raise LookupError(message)


def call(x: int, y: int = 1, to: str = "worker1") -> rpc.Future[int]:
    return rpc.rpc_async(to, add, args=(x, y))


def log_of(logger: str) -> list[str]:
    """What a logger of this process says from now on."""
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger(logger).addHandler(handler)
    return said


# ---- awaited


async def add_all(numbers: list[int], to: str) -> int:
    """An ``async def`` callee that awaits calls of its own."""
    total = 0
    for number in numbers:
        total = await rpc.rpc_async(to, add, args=(total, number))
    return total


@in_worker0(num_worker_threads=1)
def test_an_async_def_callee_awaits_calls() -> None:
    futures = [rpc.rpc_async("worker1", add_all, args=([n] * 5, "worker0")) for n in range(50)]
    assert [future.wait() for future in futures] == [5 * number for number in range(50)]


# ---- collected


@in_standing_group()
def test_wait_all_waits_for_the_calls_in_its_block_only() -> None:
    rref: rpc.RRef[list[Any]] = rpc.remote("worker1", list, args=([1, 2],))
    with rpc.wait_all():
        futures: list[rpc.Future[Any]] = [call(number) for number in range(10)]
        futures.append(rref.rpc_async().copy())
    assert all(future.done() for future in futures)
    future = rpc.rpc_async("worker1", wait_at_gate)
    assert not future.done()
    rpc.rpc_sync("worker1", open_gate)


@in_standing_group()
def test_torchs_wait_all_and_collect_all_fail_at_the_first_error() -> None:
    blocked = rpc.rpc_async("worker1", wait_at_gate)
    calls: list[torch.futures.Future[Any]] = [blocked, rpc.rpc_async("worker1", fail, args=("no data",))]
    with pytest.raises(LookupError, match="no data"):
        torch.futures.wait_all(calls)
    with pytest.raises(LookupError, match="no data"):
        torch.futures.collect_all(calls).wait()
    assert not blocked.done()
    rpc.rpc_sync("worker1", open_gate)
    theirs: torch.futures.Future[int] = torch.futures.Future()
    collected = torch.futures.collect_all([call(1), theirs])
    assert not collected.done()
    theirs.set_result(2)
    assert torch.futures.wait_all(collected.wait()) == [2, 2]
    assert torch.futures.wait_all(call(number) for number in range(3)) == [1, 2, 3]  # type: ignore[arg-type]  # which PyTorch accepts


@in_standing_group()
def test_wait_all_blocks_may_be_nested() -> None:
    with rpc.wait_all():
        outer = [rpc.rpc_async("worker1", wait_at_gate)]
        with rpc.wait_all():
            inner = call(1)
        assert inner.done()
        assert not outer[0].done()
        outer.append(call(2))
        rpc.rpc_async("worker1", open_gate)
    assert all(future.done() for future in outer)


@in_standing_group()
def test_wait_all_raises_without_waiting_for_the_others() -> None:
    held = []

    def fail_among_others() -> None:
        with rpc.wait_all():
            held.append(rpc.rpc_async("worker1", wait_at_gate))
            rpc.rpc_async("worker1", fail, args=("the first to fail",))

    def fail_in_the_block() -> None:
        with rpc.wait_all():
            held.append(rpc.rpc_async("worker1", wait_at_gate))
            raise ZeroDivisionError

    with pytest.raises(LookupError, match="the first to fail"):
        fail_among_others()
    with pytest.raises(ZeroDivisionError):
        fail_in_the_block()
    assert not any(future.done() for future in held)
    rpc.rpc_sync("worker1", open_gate)


# ---- with a timeout, and in the order of completion


@in_standing_group()
def test_a_wait_with_a_timeout_leaves_the_call_alone() -> None:
    future = rpc.rpc_async("worker1", wait_at_gate)
    for wait in (future.wait, future.result):
        with pytest.raises(TimeoutError, match="Future of wait_at_gate on worker 'worker1', under way"):
            wait(timeout=0.01)
    rpc.rpc_sync("worker1", open_gate)
    future.result(timeout=30)
    assert call(1).result() == 2
    assert repr(future) == "<Future of wait_at_gate on worker 'worker1', completed>"
    assert repr(rpc.Future()) == "<Future, under way>"
    cancelled = rpc.rpc_async("worker1", wait_at_gate, args=("never",))
    cancelled.cancel()
    assert repr(cancelled) == "<Future of wait_at_gate on worker 'worker1', cancelled>"
    failed = rpc.rpc_async("worker1", int, args=("one",))
    with pytest.raises(ValueError, match="one"):
        failed.wait()
    assert repr(failed) == "<Future of int on worker 'worker1', failed with ValueError>"
    rpc.rpc_sync("worker1", open_gate, args=("never",))


@in_standing_group()
def test_futures_come_as_they_are_completed() -> None:
    held, quick = rpc.rpc_async("worker1", wait_at_gate), call(1)
    assert rpc.wait_any([held, quick]) is quick
    coming = rpc.as_completed([held, quick, quick])
    assert next(coming) is quick
    with pytest.raises(TimeoutError, match="1 of 2 futures were not completed"):
        list(rpc.as_completed([held, quick], timeout=0.01))
    rpc.rpc_sync("worker1", open_gate)
    assert list(coming) == [held]


@in_standing_group()
def test_an_error_of_a_callback_is_in_the_log() -> None:
    said = log_of("rpc.agent.futures")
    failing = call(1).then(lambda _: fail("in the callback"))
    with pytest.raises(RuntimeError, match="in the callback"):
        failing.wait()
    passing_on = rpc.rpc_async("worker1", fail, args=("in the callee",)).then(lambda done: done.wait())
    with pytest.raises(RuntimeError, match="in the callee"):
        passing_on.wait()
    assert [text.rpartition(".")[2] for text in said] == ["<lambda>, given to then(), raised LookupError"]


@pytest.mark.parametrize("operation", [torch.clone, torch.t], ids=["contiguous", "transposed"])
@in_worker0()
def test_an_answer_that_needs_a_context_warns_once(operation: Any) -> None:
    said = log_of("rpc.serialization.pickle_codec")
    x = torch.ones(2, 3, requires_grad=True)
    with dist_autograd.context():
        rpc.rpc_sync("worker1", operation, args=(x,))
    rpc.rpc_sync("worker1", torch.ones, args=(2,), kwargs={"requires_grad": True})  # a leaf: nothing is lost
    assert said == []
    for _ in range(2):
        rpc.rpc_sync("worker1", operation, args=(x,))
    (text,) = said
    assert "outside of dist_autograd.context()" in text


@in_worker0()
def test_an_answer_to_a_call_under_no_grad_needs_no_context() -> None:
    said = log_of("rpc.serialization.pickle_codec")
    x = torch.ones(2, requires_grad=True)
    done = threading.Event()
    with torch.no_grad():
        rpc.rpc_sync("worker1", torch.mul, args=(x, 2))
        rpc.remote("worker1", torch.mul, args=(x, 2)).to_here()
        RemoteModule(placed("worker1"), torch.nn.Linear, (2, 2))(x)
        future = rpc.rpc_async("worker1", torch.mul, args=(x, 2))
    future.add_done_callback(lambda _: done.set())
    assert done.wait(SOON)  # on an executor thread, where gradients are on
    assert said == []


def fetched_history(rref: rpc.RRef[torch.Tensor]) -> tuple[bool, list[str]]:
    """Whether what is fetched requires grad, and what the log says of it."""
    said = log_of("rpc.serialization.pickle_codec")
    return rref.to_here().requires_grad, said


async def fetched_history_by_a_coroutine(rref: rpc.RRef[torch.Tensor]) -> tuple[bool, list[str]]:
    said = log_of("rpc.serialization.pickle_codec")
    return (await rref.rpc_async().mul(1)).requires_grad, said


@in_worker0(3)
def test_a_callee_needs_no_context_of_its_own() -> None:
    x = torch.ones(2, requires_grad=True)
    for callee in (fetched_history, fetched_history_by_a_coroutine):
        with torch.no_grad():
            rref = rpc.remote("worker1", torch.mul, args=(x, 2))
            assert rpc.rpc_sync("worker2", callee, args=(rref,)) == (True, [])


@in_standing_group()
def test_a_reference_says_what_it_is_and_what_to_call() -> None:
    rref: rpc.RRef[dict[str, int]] = rpc.remote("worker1", dict, args=({"a": 1},))
    with pytest.raises(AttributeError, match=r"rref\.rpc_sync\(\)\.get\("):
        rref.get  # type: ignore[attr-defined]  # noqa: B018
    assert rref.to_here() == {"a": 1}
    assert "to the value of dict(...), on worker 'worker1', made>" in repr(rref)
    rref._get_type()
    assert "to a dict, on worker 'worker1', made>" in repr(rref)
    assert "to an int, of this worker, 'worker0'>" in repr(rpc.RRef(1))
