"""``rpc_sync`` and ``rpc_async``: whom they call, with what, and the four ways in which a call ends."""

from __future__ import annotations

import threading
import traceback
from collections.abc import Callable
from typing import Any

import pytest
import torch

import rpc
from rpc.errors import RpcTimeoutError, UnknownWorkerError
from tests.support.serving import in_standing_group, open_gate, wait_at_gate

# ---- whom


def my_name() -> str:
    return rpc.get_worker_info().name


@in_standing_group()
def test_answers_do_not_wait_for_a_call_among_many_that_is_not_done() -> None:
    before = [rpc.rpc_async("worker1", my_name) for _ in range(100)]
    blocked = rpc.rpc_async("worker1", wait_at_gate, args=("among many",))
    behind = [rpc.rpc_async("worker1", my_name) for _ in range(100)]
    assert {future.wait() for future in (*before, *behind)} == {"worker1"}
    rpc.rpc_sync("worker1", open_gate, args=("among many",))
    blocked.wait()


# ---- with what


def fill(tensor: torch.Tensor, value: float) -> torch.Tensor:
    return tensor.fill_(value)


@in_standing_group()
def test_arguments_are_captured_and_belong_to_the_callee() -> None:
    sums = []
    for to in ("worker0", "worker1"):
        tensor = torch.ones(1000)
        returned = rpc.rpc_async(to, fill, args=(tensor, 3.0))
        unchanged = float(tensor.sum())
        future = rpc.rpc_async(to, torch.sum, args=(tensor,))
        tensor.zero_()  # too late to be seen
        sums += [unchanged, float(returned.wait().sum()), float(future.wait())]
    assert sums == [1000.0, 3000.0, 1000.0] * 2


# ---- many at once


# ---- how it ends: an exception


class Overdrawn(Exception):
    def __init__(self, account: str, missing: int) -> None:
        super().__init__(account, missing)
        self.account = account
        self.missing = missing


def withdraw(account: str) -> None:
    raise Overdrawn(account, 7)


@in_standing_group()
def test_an_exception_arrives_as_itself_with_the_remote_traceback() -> None:
    future = rpc.rpc_async("worker1", withdraw, args=("mine",))
    waits: list[Callable[[], Any]] = [
        lambda: rpc.rpc_sync("worker1", withdraw, args=("mine",)),
        future.wait,
        future.value,
    ]
    for wait in waits:
        with pytest.raises(Overdrawn) as raised:
            wait()
        error = raised.value
        assert (error.account, error.missing) == ("mine", 7)
        text = "".join(traceback.format_exception(error))
        assert "in withdraw" in text
        assert "worker1" in text


# ---- how it ends: a timeout


@in_standing_group()
def test_a_future_times_out_though_nobody_waits_for_it() -> None:
    done = threading.Event()
    future = rpc.rpc_async("worker1", wait_at_gate, timeout=0.05)
    future.add_done_callback(lambda _: done.set())
    assert done.wait(20)
    rpc.rpc_sync("worker1", open_gate)
    with pytest.raises(RpcTimeoutError) as caught:
        future.value()
    assert type(caught.value).__name__ == "RpcTimeoutError"


# ---- how it does not begin


@in_standing_group()
def test_an_unknown_callee_is_named_and_the_known_are_listed() -> None:
    for to in ("worker7", 7, rpc.WorkerInfo("worker1", 7), rpc.WorkerInfo("worker7", 1)):
        for call in (rpc.rpc_sync, rpc.rpc_async, rpc.remote):
            with pytest.raises(UnknownWorkerError) as caught:
                call(to, my_name)
            assert "7" in str(caught.value)
            assert "'worker0' (id 0), 'worker1' (id 1)" in str(caught.value)
    with pytest.raises(TypeError, match="callable"):
        rpc.rpc_sync("worker1", 3)  # type: ignore[call-overload]
