"""Calls with bad input: each mistake is an error of that call alone, which says what is wrong."""

from __future__ import annotations

import asyncio
import copy
import gc
import math
import pickle
import sys
import threading
import types
from collections.abc import Callable
from typing import Any

import cloudpickle
import numpy as np
import pytest
import torch
from torch import nn

import rpc
from rpc.errors import (
    FunctionNotFoundError,
    RpcError,
    RpcTimeoutError,
    RRefError,
    SerializationError,
    with_article,
)
from tests.support.refusals import refused
from tests.support.serving import in_standing_group, in_worker0, open_gate, serve, wait_at_gate
from tests.support.tracked import Tracked
from tests.support.workers import RunWorkers, Worker

CALLS: tuple[Callable[..., Any], ...] = (rpc.rpc_sync, rpc.rpc_async, rpc.remote)


def my_name(*_: Any) -> str:
    return rpc.get_worker_info().name


# ---- what is no call


@in_standing_group()
def test_what_cannot_be_a_call_is_refused_before_anything_is_sent() -> None:
    for call in CALLS:
        for args in ("text", b"bytes", torch.ones(2), 3, np.ones(2), {"x": 1}, {1}, nn.Sequential(nn.ReLU())):
            said = refused(
                TypeError, r"args must be a tuple .* write args=\(x,\)", call, "worker1", abs, args
            )
            assert f"not {with_article(type(args))}:" in said
        refused(TypeError, "kwargs must be a dict .* not a list", call, "worker1", abs, kwargs=[1])
        refused(TypeError, "function should be callable, not str 'abs'", call, "worker1", "abs")
        for callee in (None, True, 1.0, ["worker1"]):
            refused(ValueError, "a callee is a name, an id or a WorkerInfo, not ", call, callee, abs)
        for error, timeout in (
            (TypeError, None),
            (TypeError, "1"),
            (TypeError, [1]),
            (ValueError, math.nan),
            (ValueError, -5),
        ):
            said = refused(
                error, "a timeout is a number of seconds", call, "worker1", my_name, timeout=timeout
            )
            assert str(timeout) in said
    for seconds in (-1, math.inf, math.nan):
        refused(ValueError, "must be a non-negative, finite number of sec", rpc.set_rpc_timeout, seconds)
    refused(TypeError, "must be a number of seconds, got str '1'", rpc.set_rpc_timeout, "1")
    refused(TypeError, "a timeout is a number of seconds", rpc.shutdown, timeout="1")
    refused(ValueError, "'worker0' gathers among .* without being one", rpc.all_gather, 1, ["worker1"])
    refused(ValueError, "find destination 'worker7'", rpc.all_gather, 1, ["worker0", "worker7"])
    counts = rpc.get_debug_info()
    assert [counts["agent.pending_calls"], counts["num_pending_futures"], counts["num_pending_users"]] == [
        0
    ] * 3
    assert str(rpc.rpc_sync("worker1", my_name)) == "worker1"


@in_standing_group()
def test_a_timeout_longer_than_clocks_go_is_none() -> None:
    rref = rpc.remote("worker1", my_name, timeout=1e300)
    own = rpc.RRef("own")
    answers: list[Any] = []
    for timeout in (math.inf, 1e300, threading.TIMEOUT_MAX + 1, 0):
        answers += [
            rpc.rpc_sync("worker1", my_name, timeout=timeout),
            rpc.rpc_async("worker1", my_name, timeout=timeout).wait(),
            rref.to_here(timeout=timeout),
            rref.rpc_sync(timeout=timeout).upper(),
            own.to_here(timeout=timeout),
        ]
    assert answers == ["worker1", "worker1", "worker1", "WORKER1", "own"] * 4


# ---- arguments that cannot be sent


class Locked:
    def __init__(self) -> None:
        self.lock = threading.Lock()


class Refuses:
    def __reduce__(self) -> Any:
        raise LookupError("not me")


@in_standing_group()
def test_what_cannot_be_sent_is_named_with_its_place_type_and_reason() -> None:
    lock = threading.Lock()
    cases: list[tuple[tuple[Any, ...], dict[str, Any], str]] = [
        ((1,), {"b": lock}, r"argument 'b', of type _thread.lock, cannot be sent: cannot pickle"),
        (({"x": [0, (1, Locked())]},), {}, r"argument 0, of type dict, .* of \['x'\]\[1\]\[1\].lock in it"),
    ]
    rref: rpc.RRef[list[Any]] = rpc.remote("worker1", list)
    for args, kwargs, text in cases:
        headline = "^cannot call tests.group.rpc.agent.test_bad_calls.my_name on worker 'worker1': "
        for call in CALLS:
            refused(SerializationError, f"{headline}{text}.*$", call, "worker1", my_name, args, kwargs)
        headline = r"^cannot call 'append' of UserRRef\(.*\) on worker 'worker1': "
        for append in (rref.rpc_sync().append, rref.remote().append):
            refused(SerializationError, f"{headline}{text}.*$", append, *args, **kwargs)
        refused(SerializationError, f"{headline}{text}.*$", rref.rpc_async().append(*args, **kwargs).wait)
    assert issubclass(SerializationError, TypeError)
    assert rref.to_here() == []


def fail_to_send(mine: rpc.RRef[Any], theirs: rpc.RRef[Any], stand_in: rpc.RRef[Any]) -> None:
    args = (mine, theirs, [mine, {"theirs": theirs}])
    for call in CALLS:
        for to in ("worker0", "worker1", "worker2"):
            refused(
                SerializationError,
                "argument 3, of type _thread.lock",
                call,
                to,
                abs,
                (*args, threading.Lock()),
            )
        for timeout in ("1", math.nan):
            refused(
                Exception, "a timeout is a number of seconds", call, "worker1", abs, args, timeout=timeout
            )
    for proxy in (stand_in.rpc_sync(), stand_in.remote()):
        refused(SerializationError, r"because of \[3\] in it.*not me", proxy.extend, [*args, Refuses()])
    for proxy in (stand_in.rpc_sync(timeout=math.nan), stand_in.remote(timeout=math.nan)):
        refused(ValueError, "a timeout is a number of seconds", proxy.extend, args)


def send_references_with_the_unsendable(worker: Worker) -> None:
    with worker.group():
        theirs = rpc.remote("worker2", Tracked, args=("theirs",))
        assert theirs.rpc_sync().say_name() == "theirs"
        mine = rpc.RRef(Tracked("mine"))
        fail_to_send(mine, theirs, rpc.remote("worker1", list))
        del mine, theirs
        gc.collect()
        worker.wait_for("done")


def test_references_among_the_arguments_of_a_failed_call_are_not_leaked(run_workers: RunWorkers) -> None:
    workers = run_workers.start([send_references_with_the_unsendable, serve, serve])
    assert workers[0].wait_for("freed") == "mine"
    assert workers[2].wait_for("freed") == "theirs"
    workers[0].tell("done")
    workers.results()


def gather_the_unsendable(worker: Worker, culprit: int) -> dict[str, Any]:
    with worker.group(rpc_timeout=0):
        given = threading.Lock() if worker.rank == culprit else worker.rank
        said = f"^worker 'worker{culprit}' cannot take part in _all_gather: .* of type _thread.lock"
        refused(SerializationError, said, rpc.all_gather, given)
        return rpc.all_gather(worker.rank)


@pytest.mark.parametrize("culprit", [0, 1])
def test_an_object_that_cannot_be_gathered_is_told_to_all_and_they_stay_in_step(
    run_workers: RunWorkers, culprit: int
) -> None:
    gathered = run_workers(gather_the_unsendable, 3, args=(culprit,))
    assert gathered == [{"worker0": 0, "worker1": 1, "worker2": 2}] * 3


# ---- functions and classes that the callee does not have


@in_worker0()
def test_a_function_or_class_that_the_callee_lacks_is_named() -> None:
    module = types.ModuleType("only_here")
    exec("def work(): pass\nclass Thing:\n    def method(self): pass", module.__dict__)
    sys.modules["only_here"] = module
    newer = types.FunctionType(my_name.__code__, {}, "newer")
    newer.__module__, newer.__qualname__ = __name__, "newer"
    globals()["newer"] = newer
    no_module, no_name = (
        "there is no module named 'only_here'",
        f"module '{__name__}' has no attribute 'newer'",
    )
    cases: list[tuple[Any, tuple[Any, ...], str]] = [
        (module.work, (), f"'only_here.work' .*{no_module}"),
        (my_name, (module.Thing(),), f"'only_here' .*{no_module}"),
        (my_name, ([newer],), f"'{__name__}.newer' .*{no_name}"),
    ]
    for function, args, text in cases:
        said = f"^cannot find {text}.*install the same module on both.*$"
        refused(FunctionNotFoundError, said, rpc.rpc_sync, "worker1", function, args)
        refused(FunctionNotFoundError, said, rpc.rpc_async("worker1", function, args).wait)
        refused(FunctionNotFoundError, said, rpc.remote("worker1", function, args).to_here)
    assert issubclass(FunctionNotFoundError, AttributeError)


# ---- references


class Account:
    def bank(self) -> str:
        return my_name()


def misuse_references() -> rpc.RRef[Any]:
    rref = rpc.remote("worker1", Account)
    said = refused(
        RRefError, r"can't call localValue\(\) on user WorkerInfo\(id=0, name=worker0\)", rref.local_value
    )
    assert "Call it on owner WorkerInfo(id=1, name=worker1), or fetch the object with to_here()" in said
    dumps: tuple[Callable[[Any], Any], ...] = (pickle.dumps, cloudpickle.dumps, copy.copy, copy.deepcopy)
    for dump in dumps:
        for each in (rref, rpc.RRef(1)):
            refused(RRefError, "can only be sent in RPC messages", dump, each)
    for close in (rref.rpc_sync().close, rref.remote().close, rref.rpc_async().close().wait):
        refused(AttributeError, "Account'?.* has no attribute 'close'", close)
    failed = rpc.remote("worker1", int, args=("seven",))
    for _ in range(2):
        refused(ValueError, "invalid literal for int", failed.to_here)
        refused(ValueError, "invalid literal for int", failed.rpc_sync().bit_length)
    return rref


def use_references_too_late(worker: Worker) -> None:
    with worker.group():
        user, own = misuse_references(), rpc.RRef(Account())
    too_late = "RRef.* is no longer usable: its agent is shut down"
    for use in (user.to_here, own.to_here, own.local_value, user.rpc_sync().bank, user.remote().bank):
        refused(RRefError, too_late, use)
    refused(RRefError, too_late, user.rpc_async().bank().wait)
    refused(RRefError, too_late, own.rpc_sync().bank)
    assert (user.owner_name(), user.is_owner(), own.is_owner()) == ("worker1", False, True)
    assert not user.confirmed_by_owner()
    worker.world_size = 1
    with worker.group():  # the new agent knows nothing of them
        for rref in (user, own):
            refused(RRefError, "no longer usable", rpc.rpc_sync, "worker0", my_name, args=(rref,))
            refused(RRefError, too_late, rref.to_here)


def test_references_say_what_they_cannot_be_used_for_and_when(run_workers: RunWorkers) -> None:
    run_workers([use_references_too_late, serve])


# ---- time-outs


class Slow:
    def __init__(self) -> None:
        wait_at_gate("making")

    def work(self) -> None:
        wait_at_gate("working")


def time_out_calls(too_soon: float) -> None:
    asked = (
        "^RPC ran for more than its timeout of 20 ms: {} on worker 'worker1' has not answered. "
        r"If it may take longer, pass a timeout in seconds: {} has no limit, "
        r"and rpc\.set_rpc_timeout\(0\) sets none for all calls\.$"
    )

    def function(how: str, name: str = "wait_at_gate") -> str:
        return asked.format(name, rf"rpc\.{how}\('worker1', {name}, \.\.\., timeout=0\)")

    async def call() -> Any:
        return await rpc.rpc_async("worker1", wait_at_gate, timeout=too_soon)

    for retries in ({}, {"retries": 1}):
        of_call: dict[str, Any] = {"timeout": too_soon, **retries}
        refused(RpcTimeoutError, function("rpc_sync"), rpc.rpc_sync, "worker1", wait_at_gate, **of_call)
        refused(
            RpcTimeoutError, function("rpc_async"), rpc.rpc_async("worker1", wait_at_gate, **of_call).wait
        )
    refused(RpcTimeoutError, function("rpc_async"), lambda: asyncio.run(call()))
    unmade, own = rpc.remote("worker1", Slow), rpc.remote("worker0", Slow)
    fetching = asked.format(r"RRef\.to_here", r"rref\.to_here\(timeout=0\)")
    refused(RpcTimeoutError, fetching, unmade.to_here, timeout=too_soon)
    refused(RpcTimeoutError, r"timeout.*OwnerRRef\(.* is still being made", own.to_here, timeout=too_soon)
    method = asked.format(
        r"(method 'work' of|the type of) the value of .*Slow\(\.\.\.\)",
        r"rref\.{}\(timeout=0\)\.method\(\.\.\.\)",
    )
    refused(RpcTimeoutError, method.format("rpc_sync"), unmade.rpc_sync(timeout=too_soon).work)
    refused(RpcTimeoutError, method.format("rpc_async"), unmade.rpc_async(timeout=too_soon).work().wait)
    refused(RpcTimeoutError, method.format("remote"), unmade.remote(timeout=too_soon).work)
    rpc.set_rpc_timeout(too_soon)
    refused(RpcTimeoutError, function("rpc_sync"), rpc.rpc_sync, "worker1", wait_at_gate)
    refused(RpcTimeoutError, function("remote", "Slow"), rpc.remote("worker1", Slow)._get_future().wait)
    assert issubclass(RpcTimeoutError, TimeoutError)


def time_out_everything(worker: Worker) -> None:
    worker.join()
    too_soon = 0.02
    given_up = rpc.remote("worker1", Slow, timeout=too_soon)
    refused(RpcTimeoutError, "Slow", given_up._get_future().wait)
    failed = "creation via rpc.remote on worker 'worker1' failed.*timeout of 20 ms: Slow on worker 'worker1'"
    for use in (given_up.to_here, given_up.rpc_sync().work, given_up.remote().work):
        refused(RpcError, failed, use)
    refused(RpcError, failed, rpc.rpc_sync, "worker1", my_name, (given_up,))
    gathering = r"'worker0' timed out in _all_gather after 0.02 seconds, .*\['worker1'\]"
    refused(RpcTimeoutError, gathering, rpc.all_gather, 1, timeout=too_soon)
    refused(RpcTimeoutError, gathering, rpc.barrier, timeout=too_soon)
    time_out_calls(too_soon)
    leaving = "'worker0' has left .*not in shutdown: worker 'worker1'"
    refused(RpcTimeoutError, leaving, rpc.shutdown, timeout=too_soon)
    assert not rpc.is_initialized()


def linger(worker: Worker) -> None:
    with worker.group():
        worker.wait_for("done")
        for gate in ("", "making", "working"):
            open_gate(gate)


def test_everything_that_waits_can_time_out_and_says_for_what(run_workers: RunWorkers) -> None:
    workers = run_workers.start([time_out_everything, linger])
    workers[0].result()
    workers[1].tell("done")
    workers.results()
