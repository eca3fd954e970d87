"""The second copy of a store: whom the keeper chooses, what a put waits for, and what takes over."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

import rpc
from farcall.weights import WeightsError, successors
from farcall.weights.copies import Arrival, Copy, Source
from farcall.weights.layout import Layout, Spec
from farcall.weights.replication import Listing, SecondCopy
from rpc.agent.agent import Agent
from rpc.errors import NoMemoryError, WorkerLostError
from rpc.runtime.current import current_agent

NEAR, FAR, OTHER = 1, 2, 3


class Calls:
    """An agent that records its calls, which the test answers."""

    def __init__(self) -> None:
        self.made: list[tuple[str, int, list[int], torch.futures.Future[None]]] = []
        self.lifecycle = SimpleNamespace(closed=False, departure=SimpleNamespace(begun=False))
        self.calls = SimpleNamespace(completions=SimpleNamespace(run_soon=self._run))
        self.group = SimpleNamespace(peers=SimpleNamespace(view=self))
        self.info = SimpleNamespace(name="worker0")

    def find(self, incarnation: int) -> Any:
        return SimpleNamespace(name=f"worker{incarnation}")

    def call_async(self, name: str, function: Any, args: Any, kwargs: Any, timeout: float) -> Any:
        future: torch.futures.Future[None] = torch.futures.Future()
        callee, copy, _, what, listing = args
        assert copy == 10 * callee, "each worker has named its copy"
        serials = [serial for _, serial, _ in listing[1]] if what == "follow" else []
        self.made.append((what, callee, serials, future))
        return future

    def _run(self, functions: list[tuple[Any, Any]]) -> None:
        for function, argument in functions:
            function(argument)

    def answer(self, error: Exception | None = None) -> tuple[str, int, list[int]]:
        """Answer the first call; returns its function, callee, and the serials that it names."""
        function, callee, serials, future = self.made.pop(0)
        if error is None:
            future.set_result(None)
        else:
            future.set_exception(error)  # type: ignore[arg-type]  # as PyTorch means it
        return function, callee, serials


def listing(*serials: int, keep: int = 1) -> Listing:
    return Listing(keep, [[10 * serial, serial, {}] for serial in serials], {}, 0)


@pytest.fixture
def agent() -> Calls:
    return Calls()


@pytest.fixture
def second(agent: Calls) -> SecondCopy:
    return SecondCopy(cast("Agent", agent), "policy", "here")


def test_a_version_is_copied_though_the_keeper_shuts_down(agent: Calls, second: SecondCopy) -> None:
    agent.lifecycle.departure.begun = True
    second.offer(NEAR, "here", 10)
    second.update(listing(1))
    assert agent.made == [], "no put waits for it"
    waiting = second.wait(1)
    assert agent.answer() == ("follow", NEAR, [1])
    assert waiting.done()
    second.update(listing(1, 2))
    late = second.wait(2)
    assert not late.done()
    agent.lifecycle.closed = True
    second.close()
    assert late.done()


def test_a_put_waits_for_the_next_worker_if_one_is_lost(agent: Calls, second: SecondCopy) -> None:
    second.update(listing(1))
    second.offer(NEAR, "here", 10)
    second.offer(OTHER, "here", 30)
    waiting = second.wait(1)
    second.lost(NEAR)
    assert not waiting.done()
    agent.answer(WorkerLostError("it died"))
    assert not waiting.done()
    assert agent.answer() == ("follow", OTHER, [1])
    assert waiting.done()


def test_a_put_whose_version_is_dropped_does_not_wait_for_it(agent: Calls, second: SecondCopy) -> None:
    second.update(listing(1))
    second.offer(NEAR, "here", 10)
    agent.answer()
    second.update(listing(1, 2))
    waiting = second.wait(2)
    second.update(listing(1))
    agent.answer(WorkerLostError("the version has gone"))
    assert waiting.done(), "there is no other worker"
    second.offer(NEAR, "here", 10)
    agent.answer()
    second.update(listing(1, 2))
    waiting = second.wait(2)
    second.update(listing(1))
    assert waiting.done()


def test_a_worker_that_failed_releases_its_part_of_a_copy(agent: Calls, second: SecondCopy) -> None:
    second.offer(NEAR, "here", 10)
    second.update(listing(1))
    agent.answer()
    agent.answer()
    second.offer(FAR, "there", 20)
    assert agent.answer(NoMemoryError("none")) == ("follow", FAR, [1])
    assert agent.answer() == ("follow", NEAR, [1])
    assert agent.answer() == ("release_copy", FAR, [])
    second.update(listing(2))
    assert agent.answer() == ("follow", NEAR, [2])
    assert agent.made == []


class Lost:
    """A store that is lost while its copy gets version 2. Its versions have one tensor."""

    home = "worker0"

    def __init__(self) -> None:
        self.layout = Layout()
        self.layout.add({"w": Spec("float32", (2,))})

    @contextlib.contextmanager
    def reading(self, serial: int, copy_id: int) -> Iterator[Any]:
        if serial == 2:
            raise WorkerLostError("the store's worker is gone")
        yield self

    def changes(self, have: int) -> None:
        return None

    def fill(self, arrival: Arrival) -> None:
        for index, batch in enumerate(arrival.blocks):
            arrival.put(index, [torch.ones_like(local) for *_, local in batch])


@pytest.fixture
def own(tmp_path: Any) -> Iterator[Agent]:
    """The agent of a group of this process alone."""
    options = rpc.AgentOptions(init_method=f"file://{tmp_path}/meeting")
    rpc.init_rpc("worker1", rank=0, world_size=1, rpc_backend_options=options)
    try:
        yield cast("Agent", current_agent())
    finally:
        rpc.shutdown()


def test_earlier_versions_count_until_the_later_ones_are_here(own: Agent) -> None:
    copy = Copy("policy", own, cast("Source", Lost()), 5)
    copy.follow(*listing(1)._replace(tags={"best": 10}))
    with pytest.raises(WorkerLostError):
        copy.follow(*listing(2))
    copy.take_over()
    assert copy.versions() == [10]
    assert copy.usage()["tags"] == {"best": 10}
    assert successors.rank("worker0", "policy") == successors._TAKEN_OVER
    copy.release_copy()
    assert copy.versions() == [10], "it is the store by now"
    with pytest.raises(WeightsError, match="this copy is the store itself"):
        copy.bring(3, ["reader", 1], 1)
    copy.close()


def test_a_copy_that_is_not_needed_has_no_memory(own: Agent) -> None:
    copy = Copy("policy", own, cast("Source", Lost()), 5)
    copy.follow(*listing(1))
    copy.bring(1, ["reader", 1], 1)
    copy.release_copy()
    assert copy.usage()["bytes"] == 64, "a reader has a lease"
    copy.release(["reader", 1], 1, used=False)
    copy.release_copy()
    assert copy.usage()["bytes"] == 0
    with pytest.raises(WeightsError, match="has no copy of store 'policy' any more"):
        copy.take_over()
    copy.close()
