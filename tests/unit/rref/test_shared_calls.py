"""One call for objects on several workers: agents, on simulated time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

import rpc
from rpc.errors import RRefError, WorkerLostError
from rref.shared_calls import SharedCall
from tests.simulation.life import Life, Plan
from tests.simulation.worker import Worker

PLAN = Plan(
    seed=0, workers=3, static=False, lost_after=6.0, reconnect_within=5.0, latency=0.01, tail=0.0,
    excused=False, seconds=0.0, deeds=(), leave=True,
)  # fmt: skip


class Counted:
    """An argument that counts how often it is serialized."""

    times = 0

    def __reduce__(self) -> Any:
        Counted.times += 1
        return Counted, ()


class Object:
    def __init__(self, number: int) -> None:
        self.number = number

    def add(self, other: int, _: Counted) -> int:
        return self.number + other


class Caller:
    """A worker that refers to an object on each, its own first, and calls them."""

    def __init__(self, life: Life, workers: list[Worker]) -> None:
        self.life = life
        self.worker, *self.others = workers
        self.references: list[rpc.RRef[Any]] = self.do(
            lambda: [rpc.remote(each.name, Object, (number,)) for number, each in enumerate(workers)]
        )
        Counted.times = 0
        self.call = SharedCall("add", (10, Counted()))

    def do(self, function: Callable[[], Any]) -> Any:
        """Run a function on the worker, and let a second pass."""
        outcome = []
        self.worker.loop.call_soon(lambda: outcome.append(function()))
        self.life.clock.run(1.0)
        return outcome[0]

    def send(self, number: int) -> Any:
        return self.do(lambda: self.call.send(self.references[number]))

    def refused(self, number: int, error: type[Exception]) -> str:
        """Why no call is sent to an object."""

        def send() -> str:
            with pytest.raises(error) as caught:
                self.call.send(self.references[number])
            return str(caught.value)

        refusal: str = self.do(send)
        return refusal


@pytest.fixture
def caller() -> Iterator[Caller]:
    life = Life(PLAN)
    with life.begun() as workers:
        caller = Caller(life, workers)
        yield caller
        caller.references.clear()
        life.end()


def test_a_call_is_serialized_once_whoever_gets_it(caller: Caller) -> None:
    assert [caller.send(number).value() for number in (1, 2, 0, 1)] == [11, 12, 10, 11]
    assert Counted.times == 1


def test_an_object_that_is_gone_with_its_owner_gets_no_call_and_the_others_do(caller: Caller) -> None:
    gone, _ = caller.others
    gone.end()
    caller.life.network.kill(gone.place, host=True)
    under_way = caller.send(1)
    caller.life.clock.run(PLAN.lost_after + PLAN.reconnect_within)
    with pytest.raises(WorkerLostError, match=f"'{gone.name}'"):
        under_way.value()
    assert f"'{gone.name}'" in caller.refused(1, WorkerLostError)
    assert caller.send(2).value() == 12
    assert Counted.times == 1


def test_an_agent_that_shuts_down_sends_no_call(caller: Caller) -> None:
    caller.send(1)
    caller.life.leave(caller.worker)
    caller.life.clock.run(0.001)  # it gives its references back
    assert "its agent is shut down" in caller.refused(1, RRefError)
