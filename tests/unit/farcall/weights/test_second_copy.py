"""The second copy of a store: whom the keeper chooses, what a put waits for, and what takes over."""

from __future__ import annotations

import contextlib
import gc
import os
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar, cast

import pytest
import torch

import rpc
from farcall.weights import WeightsError, replication, successors
from farcall.weights.copies import Copy
from farcall.weights.handle import Handle
from farcall.weights.keeper import Keeper
from farcall.weights.layout import Layout, Spec
from farcall.weights.memory import AVAILABLE
from farcall.weights.node import done
from farcall.weights.replication import Listing, SecondCopy
from farcall.weights.transfer import Batch, Held
from farcall.weights.versions import Who
from rpc.agent.agent import Agent
from rpc.errors import NoMemoryError, WorkerLostError
from rpc.runtime.current import current_agent
from tests.support.streams import until

NEAR, FAR, OTHER = 1, 2, 3


class Calls:
    """An agent that records its calls, which the test answers."""

    def __init__(self) -> None:
        self.made: list[tuple[str, int, list[int], torch.futures.Future[None]]] = []
        self.lifecycle = SimpleNamespace(closed=False, departure=SimpleNamespace(begun=False))
        self.executor = SimpleNamespace(submit_batch=self._run)
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
            future.set_result(max(serials, default=0))  # type: ignore[arg-type]
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


def test_a_put_that_waits_in_vain_is_told_why(agent: Calls, second: SecondCopy) -> None:
    second.update(listing(1))
    assert second.wait(1).wait() == "no other worker has opened the store with copies=2"
    second.offer(NEAR, "here", 10)
    waiting = second.wait(1)
    agent.answer(NoMemoryError("there is no memory for it"))
    assert waiting.wait() == "there is no memory for it"
    second.update(listing(1, 2))
    waiting = second.wait(2)
    agent.answer()
    assert waiting.wait() is None


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


def test_a_worker_that_failed_is_asked_again_for_the_next_version(agent: Calls, second: SecondCopy) -> None:
    second.offer(NEAR, "here", 10)
    second.update(listing(1))
    agent.answer()
    agent.answer()
    second.update(listing(1, 2))
    assert agent.answer(NoMemoryError("none")) == ("follow", NEAR, [1, 2])
    assert second.wait(2).done(), "no worker is left"
    assert not second.is_whole()
    assert agent.made == []
    second.update(listing(2, 3))
    waiting = second.wait(3)
    assert not waiting.done()
    assert agent.answer() == ("follow", NEAR, [2, 3])
    assert waiting.done()
    assert second.is_whole()
    second.offer(OTHER, "here", 30)
    second.update(listing(3, 4))
    agent.answer(NoMemoryError("none"))
    assert agent.answer() == ("follow", OTHER, [3, 4]), "another one is chosen"
    assert agent.answer() == ("release_copy", NEAR, [])
    second.update(listing(4, 5))
    assert agent.answer() == ("follow", OTHER, [4, 5]), "it stays"
    second.lost(OTHER)
    assert agent.answer() == ("follow", NEAR, [4, 5])


def test_an_offer_of_a_worker_that_fails_is_taken(
    agent: Calls, second: SecondCopy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It comes between the failure and the next choice."""
    second.update(listing(1))
    second.offer(NEAR, "here", 10)
    waiting = second.wait(1)
    with monkeypatch.context() as patch:
        patch.setattr(replication.logger, "log", lambda *_: second.offer(NEAR, "here", 10))
        agent.answer(NoMemoryError("none"))
    assert agent.answer() == ("follow", NEAR, [1])
    assert waiting.done()


def test_a_put_waits_if_its_version_was_not_there_any_more(agent: Calls, second: SecondCopy) -> None:
    """A later one took its place while the worker was to get it: the worker has neither."""
    second.offer(NEAR, "here", 10)
    agent.answer()
    second.update(listing(1))
    waiting = second.wait(1)
    second.update(listing(2))
    _, _, _, future = agent.made.pop(0)
    future.set_result(0)  # type: ignore[arg-type]  # as PyTorch means it
    assert not waiting.done()
    agent.answer()
    assert waiting.done()


class Lost:
    """A store that is lost while its copy gets version 2; others that are ``gone`` it has no longer. Its
    versions have one tensor.
    """

    home = "worker0"
    at = 77
    name = "policy"
    who = ("worker1", 1)

    def __init__(self, agent: Agent, *gone: int) -> None:
        self.agent = agent
        self.gone = gone
        self.end_copy: Any = None
        self.layout = Layout()
        self.layout.add({"w": Spec("float32", (2,))})

    @contextlib.contextmanager
    def reading(self, serial: int) -> Iterator[Any]:
        if serial == 2:
            raise WorkerLostError("the store's worker is gone")
        yield None if serial in self.gone else Held(0, 10 * serial, self.layout, [], [], serial)

    def ask(self, what: str, *_: Any) -> None:
        assert what in ("changes", "source"), "there is no other version, and no other copy"

    def read(self, ticket: int, batch: Batch) -> Any:
        return done([torch.ones_like(local) for *_, local in batch])


def copy_of(own: Agent, *gone: int) -> Copy:
    return Copy(cast("Handle", Lost(own, *gone)), 5)


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
    copy = copy_of(own)
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
    with pytest.raises(WeightsError, match="this copy is the store itself"):
        copy.follow(*listing(4))
    assert (copy.versions(), copy.newest, copy.usage()["keep"]) == ([10], None, 1)
    copy.close()


def test_versions_that_are_gone_are_passed_over(own: Agent) -> None:
    copy = copy_of(own, 3, 5)
    assert copy.follow(*listing(3, 4, 5, keep=3)) == 4
    assert copy.versions() == [4]
    with pytest.raises(WeightsError, match="store 'policy' has that version no longer"):
        copy.bring(3, ["reader", 1], 1)
    copy.close()


def test_versions_that_readers_have_brought_do_not_make_a_copy_newer(own: Agent) -> None:
    """The store has told it of version 1 only; the listing of the later ones has failed, or is under way."""
    copy = copy_of(own)
    copy.follow(*listing(1))
    copy.bring(4, ["reader", 1], 1)
    assert copy.newest == 1
    with pytest.raises(WorkerLostError):
        copy.follow(*listing(2, keep=1))
    assert copy.newest == 1
    copy.close()


def test_versions_that_were_removed_before_are_known_to_the_one_that_takes_over(own: Agent) -> None:
    store = Keeper("policy", own)
    store.describe(1)
    for number in (10, 20):
        store.begin(number, [0, 1], [["w", "float32", [2], [[[0], [2]]]]], ["writer", 1], insist=False)
        store.written(number, 0, ["writer", 1])
    told = store._listing()
    copy = copy_of(own)
    with pytest.raises(WorkerLostError):
        copy.follow(*told)  # serial 2
    copy.take_over()
    with pytest.raises(WeightsError, match="has version 10 no longer"):
        copy.open(10, None, ["reader", 1], 1)
    assert copy.open(20, None, ["reader", 1], 1)[0] is None, "its writer puts it again"
    for each in (copy, store):
        each.close()


def test_a_wait_of_a_worker_that_was_lost_before_it_came_ends_at_once(own: Agent) -> None:
    store = Keeper("policy", own)
    state = store.wait(-1, ["reader", 1], 1).wait()
    assert not store.wait(state, ["reader", 1], 2).done()
    store._lose((Who("reader", 1), "its process has died"))
    assert store.wait(store._state, ["reader", 1], 3).done()
    store.close()


def mapped() -> int:
    """Return how many segments this process has mapped."""
    return sum("/memfd:" in line for line in Path("/proc/self/maps").read_text().splitlines())


@pytest.mark.skipif(not AVAILABLE, reason="processes cannot share memory here")
def test_a_copy_that_has_ended_uses_no_memory(own: Agent) -> None:
    before = mapped()
    copy = copy_of(own)
    copy.follow(*listing(1))
    copy.bring(1, ["reader", 1], 1)
    copy.release_copy()
    assert mapped() > before, "a reader has a lease"
    copy.release(["reader", 1], 1, used=False)
    copy.release_copy()
    until(lambda: mapped() == before)
    with pytest.raises(WeightsError, match="has no copy of store 'policy' any more"):
        copy.take_over()
    copy.follow(*listing(3))
    copy.close()
    assert mapped() == before
    with pytest.raises(WeightsError, match="has no copy"):  # readers ask the store then
        copy.bring(3, ["reader", 1], 1)
    ended = weakref.ref(copy)
    del copy
    gc.collect()
    assert ended() is None


def test_a_loss_does_not_wait_for_the_lock(own: Agent) -> None:
    """Losses are noticed on the thread of the event loop."""
    store = Keeper("policy", own)
    store.begin(1, [0, 1], [["w", "float32", [2], [[[0], [2]]]]], ["writer", 1], insist=False)
    peer: Any = SimpleNamespace(member=SimpleNamespace(name="writer"), incarnation=1)
    with store._lock:
        noticed = threading.Thread(target=store._peer_gone, args=(peer, "it died"))
        noticed.start()
        noticed.join(60)
        assert not noticed.is_alive()
    until(lambda: "is lost" in store.usage()["open"][1])
    store.close()


def test_memory_that_a_lost_reader_has_mapped_is_not_used_again_though_it_relays(own: Agent) -> None:
    """It keeps another host's copy, and has asked this one for its blocks."""
    copy = copy_of(own)
    copy.bring(1, ["reader", 1, os.getpid()], 1)
    copy.relay(1, ["reader", 1, None], 2)
    copy.release(["reader", 1, None], 2, used=False)
    copy._lose((Who("reader", 1), "it does not answer"))
    copy.bring(3, ["reader", 2, None], 1)
    assert copy.usage()["bytes"] == 64, "that of version 1 is kept for the next one"
    copy.close()


class Watched(torch.Tensor):
    """A tensor that calls ``copying`` when it is copied."""

    copying: ClassVar[Callable[[], object]]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.copy_:
            cls.copying()
        return super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]


def test_memory_to_which_blocks_of_a_lost_writer_are_copied_is_not_used_again(
    own: Agent, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Keeper("policy", own)
    specs, writer = [["w", "float32", [2], [[[0], [2]]]]], ["writer", 1, None]
    begun: Any = store.begin(1, [0, 1], specs, writer, insist=False)
    lose = lambda: store._lose((Who("writer", 1), "it died"))  # noqa: E731
    monkeypatch.setattr(Watched, "copying", lose, raising=False)
    store.write(1, 0, writer, [["w", [[0], [2]]]], [torch.ones(2).as_subclass(Watched)])
    assert "may still write" in store.usage()["open"][1]
    again: Any = store.begin(1, [0, 1], specs, ["writer", 2, None], insist=False)
    assert again[1] != begun[1], "it is in the same memory"
    store.close()
