"""Contexts that end while they come: whoever is late, a context that is over stays on no worker."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from dist_autograd import api, contexts, following
from dist_autograd.contexts import Context, Contexts
from dist_autograd.following import Follower
from tests.support.ctrl_c import interrupted_at

ME, CREATOR, BETWEEN = 1, 2, 3


class World:
    """An agent reduced to what contexts ask of it, and the workers that it knows."""

    def __init__(self) -> None:
        self.peers = {each: SimpleNamespace(incarnation=each, lost=None, standby=None) for each in (2, 3)}
        self.posted: list[tuple[int, Any]] = []
        self.left_to_loop: list[tuple[Callable[..., object], tuple[Any, ...]]] = []
        agent: Any = SimpleNamespace(
            info=SimpleNamespace(id=0, name="me"),
            incarnation=ME,
            peer_by_incarnation=self.peers.get,
            on=lambda *_, **__: None,
            on_gone=self._note_handler,
            control=SimpleNamespace(
                on=lambda *_: None,
                post=lambda peer, _, message: self.posted.append((peer.incarnation, message)),
            ),
            executor=SimpleNamespace(submit=lambda task: task[0](task[1])),
            mailbox=SimpleNamespace(
                gathered=lambda function, argument: None,
                call=lambda function, *arguments: self.left_to_loop.append((function, arguments)),
            ),
        )
        self.when_made: Callable[[], object] = lambda: None
        self.contexts = Contexts(agent, self._make)
        self.contexts.when_released = lambda context: None

    def _make(self) -> None:
        self.when_made()

    def _note_handler(self, gone: Callable[[Any, str], None]) -> None:
        self._gone = gone

    def die(self, incarnation: int) -> None:
        """A worker is gone, and the loop's thread hears of it."""
        self.peers[incarnation].lost = "killed"
        self._gone(self.peers[incarnation], "killed")

    def join(self, context_id: int = 7) -> Context | None:
        return self.contexts.join(context_id, CREATOR, self.peers[BETWEEN])  # type: ignore[arg-type]

    def run_loop(self) -> None:
        """What was left to the loop's thread."""
        while self.left_to_loop:
            function, arguments = self.left_to_loop.pop()
            function(*arguments)


@pytest.fixture
def world() -> World:
    return World()


def test_a_context_that_comes_as_it_is_said_to_be_over_is_not_known_for_good(world: World) -> None:
    coming = threading.Thread(target=world.join)

    class Known(dict[int, Context]):
        def get(self, key: int, default: Any = None) -> Any:
            found = super().get(key, default)
            if not coming.ident:
                coming.start()
                coming.join(0.1)  # until it waits for the lock, or is through
            return found

    world.contexts._known = Known()
    assert world.contexts.are_over([7], world.peers[CREATOR]) == []  # type: ignore[arg-type]
    coming.join()
    assert not len(world.contexts)


def test_who_learns_of_a_context_through_the_dead_asks_its_creator(world: World) -> None:
    world.die(BETWEEN)
    context = world.join()
    assert context is not None
    assert world.posted == [(CREATOR, ["joined", 7])]


def test_a_context_whose_creator_dies_as_it_comes_is_over(world: World) -> None:
    world.when_made = lambda: world.die(CREATOR)
    assert world.join() is None
    assert not len(world.contexts)


def test_an_answer_brings_no_context_back(world: World) -> None:
    follower = Follower(world.contexts)
    said, source = [7, CREATOR], world.peers[BETWEEN]
    assert follower.answered(said, source) is None  # type: ignore[arg-type]
    assert not len(world.contexts)
    recorded = follower.received(said, source)  # type: ignore[arg-type]
    assert recorded is not None
    assert follower.answered(said, source) is not None  # type: ignore[arg-type]


@pytest.fixture
def in_world(world: World, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    """Users' contexts are those of that agent."""
    monkeypatch.setattr(api, "autograd", lambda: SimpleNamespace(contexts=world.contexts))
    yield world
    contexts.current.set(None)


def test_ctrl_c_at_any_line_leaves_the_thread_in_no_context_and_no_context_known(in_world: World) -> None:
    files = (api.__file__, contexts.__file__, following.__file__)
    for line in itertools.count(1):
        block = api.context()

        def enter_and_leave(block: api.context = block) -> None:
            with block:
                contexts.current.get()

        interrupted = interrupted_at(line, enter_and_leave, files.__contains__)
        del block, enter_and_leave
        in_world.run_loop()
        assert in_world.contexts.current() is None, line
        assert not len(in_world.contexts), line
        if not interrupted:
            break
    assert line > 20
