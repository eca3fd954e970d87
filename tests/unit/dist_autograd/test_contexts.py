"""Contexts that end while they come: a context that is over stays on no worker, and one that a loss has ended
cannot be used.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest

from dist_autograd.contexts import OVER, Context, Contexts, current
from dist_autograd.propagation import Propagation, Recorded
from rpc.agent.hooks import Hooks
from rpc.errors import WorkerLostError
from rpc.serialization.payload import Payload
from rpc.wire.frames import Frame

ME, CREATOR, BETWEEN = 1, 2, 3


class Known:
    """What contexts know of a worker."""

    is_self = False

    def __init__(self, incarnation: int) -> None:
        self.incarnation = incarnation
        self.name = f"worker {incarnation}"
        self.lost: str | None = None


class World:
    """An agent reduced to what contexts ask of it, and the workers that it knows."""

    def __init__(self, me: int = ME) -> None:
        self.peers: dict[int, Any] = {each: Known(each) for each in (CREATOR, BETWEEN)}
        self.posted: list[tuple[int, Any]] = []
        self.handlers: dict[int, Callable[..., Any]] = {}
        hooks = Hooks()
        workers: Any = SimpleNamespace(
            own=SimpleNamespace(name="me", member=SimpleNamespace(id=0)), by_incarnation=self.peers.get
        )
        control: Any = SimpleNamespace(
            on=lambda *_: None,
            post=lambda peer, _, message: self.posted.append((peer.incarnation, message)),
        )
        messages: Any = SimpleNamespace(
            on=lambda kind, handler, **_: self.handlers.update({kind: handler}),
            control=control,
            sender=SimpleNamespace(send=self._send),
        )
        executor: Any = SimpleNamespace(submit=lambda task: task[0](task[1]))
        self.executor = executor
        mailbox: Any = SimpleNamespace(
            gathered=lambda function, argument: function(argument),
            call=lambda function, *arguments: function(*arguments),
            later=lambda seconds, function: self.due.append(function),
        )
        self.due: list[Callable[[], object]] = []
        self.when_first: Callable[[], object] = lambda: None
        self.sent: list[tuple[int, Any]] = []
        answers: Any = SimpleNamespace()
        self.contexts = Contexts(me, answers, workers, messages, hooks, mailbox, executor, self._make)
        [self._gone] = hooks.gone
        self.release = hooks.release

    def _make(self) -> None:
        self.when_first()

    def _send(self, peer: Any, kind: int, call_id: int, payload: Payload, **_: Any) -> None:
        self.sent.append((peer.incarnation, payload.header))

    def die(self, incarnation: int) -> None:
        """A worker is gone, and the loop's thread hears of it."""
        self.peers[incarnation].lost = "killed"
        self._gone(self.peers[incarnation], "killed")

    def say_over(self, context_id: int = 7, by: int = CREATOR, **loss: list[str]) -> None:
        """The creator, or another worker, says that a context is over."""
        task = self.handlers[OVER](self.peers[by], Frame(OVER, 0, {"over": [context_id], **loss}, []))
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


def test_a_context_whose_creator_is_unknown_is_over_with_the_worker_that_it_came_through(
    world: World,
) -> None:
    stranger = 99
    assert world.contexts.join(7, stranger, world.peers[BETWEEN]) is not None
    world.die(BETWEEN)
    assert not len(world.contexts)


def test_a_context_whose_creator_dies_as_it_comes_is_over(world: World) -> None:
    world.when_first = lambda: world.die(CREATOR)
    with pytest.raises(WorkerLostError, match="worker 2' is gone: killed"):
        world.join()
    assert not len(world.contexts)


@pytest.mark.parametrize("is_known", [True, False])
def test_nothing_goes_unrecorded_in_a_context_whose_creator_is_gone(world: World, is_known: bool) -> None:
    propagation = Propagation(world.contexts)
    said, between = [7, CREATOR], cast("Any", world.peers[BETWEEN])
    context = world.join() if is_known else None
    world.die(CREATOR)
    uses: list[Callable[[], object]] = [world.join, lambda: propagation.received(said, between)]
    if context is not None:
        token = current.set(context)
        uses += [
            lambda: propagation.calling(between),
            lambda: propagation.answered(said, between),
            lambda: world.contexts.get(7),
            world.contexts.current,
        ]
    for use in uses:
        with pytest.raises(WorkerLostError, match="worker 2' is gone: killed") as caught:
            use()
        assert caught.value.worker == "worker 2"
    if context is not None:
        current.reset(token)


def test_a_worker_that_loses_a_creator_says_so_to_those_that_may_not_have_lost_it(world: World) -> None:
    context = world.join()
    assert context is not None
    context.told.add(world.peers[BETWEEN])
    world.die(CREATOR)
    ((to, said),) = world.sent
    assert (to, said) == (BETWEEN, {"over": [7], "lost": ("worker 2", "killed")})

    other = World()
    assert other.join() is not None
    other.say_over(by=BETWEEN, lost=["worker 2", "killed"])
    with pytest.raises(WorkerLostError, match=r"killed \(as worker 'worker 3' says\)"):
        other.join()
    other.say_over()  # its creator lives after all, and has left it
    assert other.join() is None


def test_a_context_is_ended_by_no_other_worker_on_its_creator(world: World) -> None:
    context = world.contexts.new()
    world.say_over(context.id, by=BETWEEN, lost=["me", "killed"])
    assert world.contexts.get(context.id) is context


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


def called(creator: World, context: Context) -> Any:
    """What a call in a context of this worker says of it."""
    recorded = Recorded(context, tracks=True)
    return recorded.sent([], cast("Any", creator.peers[BETWEEN]))


def hears(world: World, said: Any, source: int) -> Context | None:
    """Read what a call says of its context; returns the context that it is run in."""
    recorded = Propagation(world.contexts).received(said, cast("Any", world.peers[source]))
    return None if recorded is None else recorded.context


def test_the_next_call_of_a_creator_ends_the_contexts_that_it_has_left() -> None:
    creator, world = World(CREATOR), World()
    first, second, third = (creator.contexts.new() for _ in range(3))
    said = [called(creator, each) for each in (first, second, third)]
    known = [hears(world, each, CREATOR) for each in said]
    assert [each and each.id for each in known] == [first.id, second.id, third.id]

    creator.contexts.release(second)  # the first one, which is older, goes on
    hears(world, called(creator, third), CREATOR)
    assert len(world.contexts) == 3
    creator.contexts.release(first)
    hears(world, called(creator, third), BETWEEN)  # another worker, whose word may be old
    assert len(world.contexts) == 3
    hears(world, called(creator, third), CREATOR)
    assert [each is not None and each.over for each in known] == [True, True, False]

    late = creator.contexts.new()
    word = called(creator, late)
    creator.contexts.release(late)
    hears(world, called(creator, creator.contexts.new()), CREATOR)
    creator.contexts.release(third)
    hears(world, called(creator, creator.contexts.new()), CREATOR)
    assert hears(world, word, CREATOR) is None


def test_what_a_left_context_keeps_is_freed_before_the_next_call_runs() -> None:
    creator, world = World(CREATOR), World()
    world.executor.submit = lambda task: True  # all threads are busy
    left = creator.contexts.new()
    known = hears(world, called(creator, left), CREATOR)
    assert known is not None
    known.kept.append(object())
    creator.contexts.release(left)
    hears(world, called(creator, creator.contexts.new()), CREATOR)
    assert known.kept == []


@pytest.mark.parametrize("shuts_down", [False, True])
def test_workers_that_get_no_further_call_are_notified_of_the_end_of_contexts(shuts_down: bool) -> None:
    creator = World()
    contexts = [creator.contexts.new() for _ in range(2)]
    for context in contexts:
        context.told.add(creator.peers[BETWEEN])
        creator.contexts.release(context)
    assert creator.sent == []
    [notice] = creator.release if shuts_down else creator.due
    notice()
    assert creator.sent == [(BETWEEN, {"over": [context.id for context in contexts]})]


def test_a_context_that_a_finalizer_makes_in_between_ends_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    creator, world = World(CREATOR), World()
    numbers, made = iter((5, 6, 7)), list[Context]()

    class Counter:
        """Counts, and collects garbage right after the first number was taken."""

        def __next__(self) -> int:
            number = next(numbers)
            if number == 5:
                made.append(creator.contexts.new())
            return number

    monkeypatch.setattr(creator.contexts, "_counter", Counter())
    context = creator.contexts.new()
    for each in (made[0], context):
        assert hears(world, called(creator, each), CREATOR) is not None
