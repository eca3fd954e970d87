"""Contexts that end while they come: whoever is late, a context that is over stays on no worker."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest

from dist_autograd.contexts import OVER, Context, Contexts
from dist_autograd.propagation import Propagation
from rpc.agent.hooks import Hooks
from rpc.wire.frames import Frame

ME, CREATOR, BETWEEN = 1, 2, 3


class World:
    """An agent reduced to what contexts ask of it, and the workers that it knows."""

    def __init__(self) -> None:
        self.peers: dict[int, Any] = {
            each: SimpleNamespace(incarnation=each, lost=None) for each in (CREATOR, BETWEEN)
        }
        self.posted: list[tuple[int, Any]] = []
        self.handlers: dict[int, Callable[..., Any]] = {}
        hooks = Hooks()
        kinds: Any = SimpleNamespace(on=lambda kind, handler, **_: self.handlers.update({kind: handler}))
        workers: Any = SimpleNamespace(
            own=SimpleNamespace(name="me", member=SimpleNamespace(id=0)), by_incarnation=self.peers.get
        )
        control: Any = SimpleNamespace(
            on=lambda *_: None,
            post=lambda peer, _, message: self.posted.append((peer.incarnation, message)),
        )
        executor: Any = SimpleNamespace(submit=lambda task: task[0](task[1]))
        mailbox: Any = SimpleNamespace(
            gathered=lambda function, argument: None,
            call=lambda function, *arguments: function(*arguments),
        )
        self.when_made: Callable[[], object] = lambda: None
        send: Any = None
        answers: Any = SimpleNamespace(devices=None)
        self.contexts = Contexts(
            ME, answers, workers, kinds, control, send, hooks, mailbox, executor, self._make
        )
        [self._gone] = hooks.gone

    def _make(self) -> None:
        self.when_made()

    def die(self, incarnation: int) -> None:
        """A worker is gone, and the loop's thread hears of it."""
        self.peers[incarnation].lost = "killed"
        self._gone(self.peers[incarnation], "killed")

    def say_over(self, context_id: int = 7) -> None:
        """The creator says that a context is over."""
        task = self.handlers[OVER](self.peers[CREATOR], Frame(OVER, 0, {"over": [context_id]}, []))
        if task is not None:
            task[0](task[1])

    def join(self, context_id: int = 7) -> Context | None:
        return self.contexts.join(context_id, CREATOR, self.peers[BETWEEN])


@pytest.fixture
def world() -> World:
    return World()


def test_a_context_that_is_over_when_it_comes_is_not_known(world: World) -> None:
    world.say_over()
    assert world.join() is None
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


def test_a_context_that_nobody_leaves_is_released_by_a_finalizer(world: World) -> None:
    context = world.contexts.new()
    world.contexts.release_soon(context)
    assert context.over
    assert not len(world.contexts)


def test_an_answer_brings_no_context_back(world: World) -> None:
    propagation = Propagation(world.contexts)
    said, source = [7, CREATOR], cast("Any", world.peers[BETWEEN])
    assert propagation.answered(said, source) is None
    assert not len(world.contexts)
    assert propagation.received(said, source) is not None
    assert propagation.answered(said, source) is not None
