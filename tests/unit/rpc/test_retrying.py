"""Calls that are made again, without a group."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from rpc import retrying
from rpc.agent.border import Arrival, Border
from rpc.agent.calls import PendingCall
from rpc.agent.futures import Future
from rpc.errors import MessageLostError
from tests.support.answering import Owner
from tests.support.streams import SOON, until


class Noting:
    """The arrival of a value; notes what was computed from the value before."""

    value: Any = None

    def join(self) -> None: ...

    def complete(self, complete: Callable[[Callable[[], Any]], None], decode: Callable[[], Any]) -> None:
        complete(decode)

    def call_back(self, callback: Callable[[], object]) -> None:
        callback()

    def following(self) -> Arrival:
        return Noting()

    def go_on(self, compute: Callable[[], Any], following: Any) -> Any:
        following.value = compute()
        return following.value


class Devices(Border):
    encloses = True

    def arrival(self) -> Arrival:
        return Noting()


class Caller:
    """An agent reduced to its calls, of a worker that is there."""

    rpc_timeout = 0.0

    def __init__(self, owner: Owner) -> None:
        self._owner = owner
        self.calls: list[PendingCall] = []

    def get_worker_info(self, worker: object = None) -> Any:
        return SimpleNamespace(name="caller" if worker is None else worker)

    def call_async(self, *_: object) -> Future[Any]:
        call, future = self._owner.future()
        self.calls.append(call)
        return future


def test_what_follows_a_call_runs_if_the_worker_got_devices_between_two_attempts(owner: Owner) -> None:
    agent: Any = Caller(owner)
    future = retrying.call_async(agent, "callee", int, (), {}, 0, 1)
    following = future.then(lambda done: done.value() + 1).then(lambda done: done.value() * 2)
    owner.border = Devices()
    owner.answer(agent.calls[0], MessageLostError("lost", "callee"))
    until(lambda: len(agent.calls) == 2)
    owner.answer(agent.calls[1], 20)
    assert following.wait(SOON) == 42
