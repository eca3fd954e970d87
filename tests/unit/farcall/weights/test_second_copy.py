"""The second copy of a store: whom the keeper chooses, what a put waits for, and what takes over."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from farcall.weights import copies, keeper, replication, store, successors
from farcall.weights.copies import HostCopy
from farcall.weights.handle import Handle
from farcall.weights.replication import Listing, SecondCopy
from rpc.agent.agent import Agent
from rpc.errors import NoMemoryError, WorkerLostError

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
        serials = [serial for _, serial, _ in args[1][1]] if function is replication.follow else []
        self.made.append((function.__name__, args[0][-1], serials, future))
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
    return SecondCopy(cast("Agent", agent), ("worker0", "policy", 5), "here")


def test_a_version_is_copied_though_the_keeper_shuts_down(agent: Calls, second: SecondCopy) -> None:
    agent.lifecycle.departure.begun = True
    second.offer(NEAR, "here")
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
    second.offer(NEAR, "here")
    second.offer(OTHER, "here")
    waiting = second.wait(1)
    second.lost(NEAR)
    assert not waiting.done()
    agent.answer(WorkerLostError("it died"))
    assert not waiting.done()
    assert agent.answer() == ("follow", OTHER, [1])
    assert waiting.done()


def test_a_put_whose_version_is_dropped_does_not_wait_for_it(agent: Calls, second: SecondCopy) -> None:
    second.update(listing(1))
    second.offer(NEAR, "here")
    agent.answer()
    second.update(listing(1, 2))
    waiting = second.wait(2)
    second.update(listing(1))
    agent.answer(WorkerLostError("the version has gone"))
    assert waiting.done(), "there is no other worker"
    second.offer(NEAR, "here")
    agent.answer()
    second.update(listing(1, 2))
    waiting = second.wait(2)
    second.update(listing(1))
    assert waiting.done()


def test_a_worker_that_failed_releases_its_part_of_a_copy(agent: Calls, second: SecondCopy) -> None:
    second.offer(NEAR, "here")
    second.update(listing(1))
    agent.answer()
    agent.answer()
    second.offer(FAR, "there")
    assert agent.answer(NoMemoryError("none")) == ("follow", FAR, [1])
    assert agent.answer() == ("follow", NEAR, [1])
    assert agent.answer() == ("release", FAR, [])
    second.update(listing(2))
    assert agent.answer() == ("follow", NEAR, [2])
    assert agent.made == []


class Copy:
    """A host's copy, whose store is lost while it gets version 2."""

    def __init__(self) -> None:
        self.taken_over: Listing | None = None

    def follow(self, keep: int, serials: list[int]) -> None:
        if 2 in serials:
            raise WorkerLostError("the store's worker is gone")

    def take_over(self, name: str, listing: Listing) -> Any:
        self.taken_over = listing
        return SimpleNamespace(versions=lambda: [10])


def test_earlier_versions_count_until_the_later_ones_are_here(
    agent: Calls, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keeper, "enter", lambda *_: None)
    copy = Copy()
    follower = successors.Follower(
        ("worker0", "policy", 5, 1),
        cast("Agent", agent),
        lambda: False,
        lambda: cast("HostCopy", copy),
        lambda: None,
    )
    follower.follow(listing(1)._replace(tags={"best": 10}))
    with pytest.raises(WorkerLostError):
        follower.follow(listing(2))
    follower.take_over()
    assert copy.taken_over == listing(1, 2)._replace(tags={"best": 10})


def test_the_worker_of_a_store_finds_the_one_that_it_has_taken_over(
    agent: Calls, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(successors, "current_agent", lambda: agent)
    monkeypatch.setattr(successors, "_own", lambda found: found)
    monkeypatch.setattr(successors, "find", lambda *_: "worker0")
    assert successors.opened(keeper.GROUP, "policy", None, 2) == "worker0"


class Kept:
    """A host's copy, and the follower that has it."""

    def __init__(self, *, ended: bool) -> None:
        self.keeper = self
        self.agent = SimpleNamespace(extensions={})
        self.ended = ended
        self.closed = self.released = False

    def close(self) -> None:
        self.closed = True

    def release(self) -> None:
        self.released = True


@pytest.mark.parametrize("ended", [False, True])
def test_a_copy_ends_when_another_worker_has_taken_the_store_over(
    monkeypatch: pytest.MonkeyPatch, *, ended: bool
) -> None:
    """A copy that is the store itself by now stays."""
    kept: Any = Kept(ended=ended)
    monkeypatch.setitem(replication.followers, ("worker0", "policy", 5, NEAR), kept)
    monkeypatch.setitem(copies._copies, ("policy", 5, NEAR), kept)
    monkeypatch.setattr(store, "Handle", lambda *_: None)
    monkeypatch.setattr(successors, "find", lambda *_: "worker1")
    gone: Any = object.__new__(Handle)
    gone.agent, gone.copies, gone.epoch = SimpleNamespace(incarnation=NEAR), 2, 5
    gone.name, gone.on, gone.home, gone._scope = "policy", "worker0", "worker0", keeper.GROUP
    gone._copy, gone._lock, gone._maps = None, threading.Lock(), {}
    opened: Any = object.__new__(store.Store)
    opened.name, opened._following, opened._handle = "policy", threading.Lock(), gone
    assert opened._follow(gone)
    assert (kept.released, kept.closed) == (True, not ended)
    assert ("policy", 5, NEAR) not in copies._copies
