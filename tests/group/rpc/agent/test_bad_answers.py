"""Answers with bad content: results that cannot be sent, exceptions that cannot be pickled or rebuilt."""

from __future__ import annotations

import asyncio
import gc
import sys
import threading
import traceback
import types
import weakref
from typing import Any

import pytest
import torch

import rpc
from rpc.errors import RemoteError, SerializationError
from tests.support.refusals import refused
from tests.support.serving import in_standing_group


def my_name() -> str:
    return rpc.get_worker_info().name


# ---- results that cannot be sent


def make_locked() -> Any:
    return {"locks": [1, threading.Lock()]}


async def make_locked_slowly() -> Any:
    return make_locked()


@rpc.functions.async_execution
def promise_locked() -> torch.futures.Future[Any]:
    future: torch.futures.Future[Any] = torch.futures.Future()
    future.set_result(make_locked())
    return future


class Maker:
    def make(self) -> Any:
        return threading.Lock()


@in_standing_group()
def test_a_result_that_cannot_be_sent_is_named_and_stays() -> None:
    inside = r"because of \['locks'\]\[1\] in it, of type _thread.lock: cannot pickle '_thread.lock' object"
    inside += r"\. Create it on the worker that uses it, .*rpc\.remote makes one for a callee's result, .*"
    for function, name in (
        (make_locked, f" of {__name__}.make_locked"),
        (make_locked_slowly, " of make_locked_slowly"),
        (promise_locked, " of promise_locked"),
    ):
        text = f"^cannot send the result{name}, of type dict, to worker 'worker0', {inside}$"
        for to in ("worker0", "worker1"):
            refused(SerializationError, text, rpc.rpc_sync, to, function)
            refused(SerializationError, text, rpc.rpc_async(to, function).wait)
    maker = rpc.remote("worker1", Maker)
    result = f"result of {__name__}.Maker.make, of type _thread.lock, to worker 'worker0': cannot pickle"
    refused(SerializationError, f"^cannot send the {result}", maker.rpc_sync().make)
    lock = maker.remote().make()
    refused(
        SerializationError, "^cannot send the object, of type _thread.lock, to worker 'worker0'", lock.to_here
    )
    assert lock.rpc_sync().acquire() is True  # it is there all the same


# ---- exceptions that cannot be raised as themselves


class OddInit(Exception):
    def __init__(self, first: int, second: int) -> None:
        super().__init__("odd")


class OddText(Exception):
    def __str__(self) -> str:
        raise SystemExit("no text")


class OddPickle(Exception):
    def __reduce__(self) -> Any:
        raise SystemExit("no pickle")


class OddUnpickling(Exception):
    def __reduce__(self) -> Any:
        return int, ("not a number",)


class OddState(Exception):
    def __setstate__(self, state: Any) -> None:
        raise SystemExit("no state")


class OddAttribute(Exception):
    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.kept = 7
        self.lock = threading.Lock()


class OddNotes(Exception):
    __notes__ = None  # type: ignore[assignment]  # which is what is odd


def raise_odd(name: str) -> None:
    if name == "OddInit":
        raise OddInit(1, 2)
    error = globals()[name]("what happened")
    error.attribute = 1
    raise error


def raise_unknown() -> None:
    module = sys.modules["only_there"] = types.ModuleType("only_there")
    exec("class Unknown(ValueError): pass", module.__dict__)
    raise module.Unknown("what happened")


async def raise_odd_slowly(name: str) -> None:
    raise_odd(name)


@rpc.functions.async_execution
def promise_odd(name: str) -> torch.futures.Future[Any]:
    return rpc.rpc_async("worker1", my_name).then(lambda _: raise_odd(name))


@in_standing_group()
def test_an_exception_that_cannot_be_rebuilt_has_its_class_and_text_and_says_why() -> None:
    for function in (raise_odd, raise_odd_slowly):
        for name, why in {
            "OddPickle": "they cannot be pickled",
            "OddUnpickling": "ValueError: invalid literal for int",
            "OddState": "SystemExit: no state",
        }.items():
            with pytest.raises(globals()[name]) as caught:
                rpc.rpc_sync("worker1", function, args=(name,))
            assert str(caught.value) == "what happened"
            assert f"its arguments and attributes are missing: {why}" in caught.value.__notes__[0]
            printed = "".join(traceback.format_exception(caught.value))
            assert printed.count("Traceback on worker 'worker1':") == 1
            assert printed.count("in raise_odd\n") == 1
        with pytest.raises(OddInit) as init:
            rpc.rpc_sync("worker1", function, args=("OddInit",))
        assert init.value.args == ("odd",)
        with pytest.raises(OddText):
            rpc.rpc_sync("worker1", function, args=("OddText",))
        with pytest.raises(OddAttribute, match="what happened") as kept:
            rpc.rpc_sync("worker1", function, args=("OddAttribute",))
        assert kept.value.kept == 7
        assert "attribute 'lock' is missing: cannot send attribute 'lock'" in kept.value.__notes__[0]
        with pytest.raises((OddNotes, RemoteError), match="what happened"):
            rpc.rpc_sync("worker1", function, args=("OddNotes",))
    with pytest.raises(RuntimeError, match="OddState: what happened"):
        rpc.rpc_sync("worker1", promise_odd, args=("OddState",))


@in_standing_group()
def test_an_exception_whose_class_is_missing_here_still_tells_all() -> None:
    text = r"only_there.Unknown, .* 'worker1': what happened\n.*no module named"
    with pytest.raises(RemoteError, match=text) as caught:
        rpc.rpc_sync("worker1", raise_unknown)
    assert caught.value.remote_type == "only_there.Unknown"
    assert "in raise_unknown" in caught.value.remote_traceback
    printed = "".join(traceback.format_exception(caught.value))
    assert printed.count("Traceback on worker 'worker1':") == 1
    assert printed.count("in raise_unknown\n") == 1


def fail_to_rebuild() -> None:
    raise ValueError("not here")


class Unreadable:
    """Cannot be unpickled."""

    def __reduce__(self) -> Any:
        return fail_to_rebuild, ()


def make_unreadable() -> Unreadable:
    return Unreadable()


class Held:
    """What a caller has on its stack."""


@in_standing_group()
def test_an_answer_that_cannot_be_read_keeps_nothing_of_its_caller_and_says_where_it_failed() -> None:
    held = Held()
    reference = weakref.ref(held)

    def ask(_: Held) -> list[str]:
        future = rpc.rpc_async("worker1", make_unreadable)
        with pytest.raises(SerializationError, match="ValueError: not here") as caught:
            future.wait()
        return traceback.format_exception(caught.value)

    printed = "".join(ask(held))
    assert "in fail_to_rebuild\n" in printed
    del held
    gc.collect()
    assert reference() is None


def end_thread(kind: str) -> None:
    raise {"SystemExit": SystemExit(3), "KeyboardInterrupt": KeyboardInterrupt()}[kind]


async def end_thread_slowly(kind: str) -> None:
    end_thread(kind)


async def end_thread_in_task(kind: str) -> str:
    task = asyncio.create_task(end_thread_slowly(kind))
    await asyncio.wait([task])
    return type(task.exception()).__name__


@rpc.functions.async_execution
def end_thread_in_callback(kind: str) -> torch.futures.Future[Any]:
    return rpc.rpc_async("worker1", my_name).then(lambda _: end_thread(kind))


async def still_alive() -> str:
    return "alive"


@in_standing_group()
def test_a_callee_cannot_end_its_worker_nor_its_caller() -> None:
    for kind in ("SystemExit", "KeyboardInterrupt"):
        for function in (end_thread, end_thread_slowly):
            for to in ("worker0", "worker1"):
                with pytest.raises(RemoteError, match=f"was {kind}, raised by worker '{to}'"):
                    rpc.rpc_sync(to, function, args=(kind,))
        assert rpc.rpc_sync("worker1", end_thread_in_task, args=(kind,)) == kind
        with pytest.raises(RuntimeError, match=kind):
            rpc.rpc_sync("worker1", end_thread_in_callback, args=(kind,))
        with pytest.raises(RemoteError, match=kind):
            rpc.remote("worker1", end_thread, args=(kind,)).to_here()
        assert rpc.rpc_sync("worker1", still_alive) == "alive"
        assert rpc.rpc_sync("worker1", my_name) == "worker1"
