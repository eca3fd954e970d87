"""What simulated workers do: they use farcall as users do, but never wait, and tell what they see."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import Any, Final

import rpc
from rref.protocol.messages import State
from rref.reference import RRef
from tests.simulation.truth import Truth, is_usable, state_of
from tests.simulation.worker import Worker

__all__ = ["PROGRAMS", "Thing", "introduce"]

Answer = tuple[int, int, RRef[Any] | None]
"""The number of the call, and maybe a reference, with the tag of its object."""

_TIMEOUTS: Final = (0.0, 0.0, 0.02, 0.5, 5.0, 60.0)


class Thing:
    """What lives on workers, and is referred to. Its worker keeps some of the references it is made with."""

    def __init__(self, tag: int, tags: Sequence[int] = (), refs: Sequence[RRef[Any]] = ()) -> None:
        self.tag = tag
        self.truth = Truth.now
        self.truth.made(tag)
        _keep_some(self.truth, Random(tag), tags, refs)

    def __del__(self) -> None:
        self.truth.freed(self.tag)

    def touch(self, number: int, tag: int) -> Answer:
        """A method that is called through references."""
        Truth.now.ran(number)
        if tag != self.tag:
            Truth.now.broken(f"a reference to object {tag} leads to {self.tag}")
        return number, 0, None


def serve(number: int, seed: int, tags: list[int], refs: list[RRef[Any]]) -> Answer:
    """What is called on other workers: keeps some of the references that it gets, and may answer with one."""
    truth, chance = Truth.now, Random(seed)
    truth.ran(number)
    here = _keep_some(truth, chance, tags, refs)
    if chance.random() < 0.1:
        call(truth, here, chance)
    passed_on = _some(truth, here, chance, 1) if chance.random() < 0.3 else []
    return (number, *passed_on[0]) if passed_on else (number, 0, None)


def call(truth: Truth, here: Worker, chance: Random) -> None:
    """A call of any worker, this one too, with some references; sometimes it is cancelled soon."""
    to = _anybody(here, chance)
    timeout = chance.choice(_TIMEOUTS)
    tags, refs = _arguments(truth, here, chance)
    made = truth.begin("serve", here, here.agent.group.peers.view.resolve(to).incarnation, timeout)
    future = rpc.rpc_async(to, serve, args=(made.number, chance.getrandbits(32), tags, refs), timeout=timeout)
    truth.follow(made, future)
    if chance.random() < 0.1:

        def cancel() -> None:
            made.cancelled = made.future is not None
            if made.future is not None and not made.future.cancel():
                made.cancelled = False

        here.loop.call_later(chance.random() * 0.1, cancel)


def create(truth: Truth, here: Worker, chance: Random) -> None:
    """An object is made on any worker, this one too, with some references."""
    to = _anybody(here, chance)
    tags, refs = _arguments(truth, here, chance)
    made = truth.new_object(here.agent.group.peers.view.resolve(to).incarnation, here)
    ref = rpc.remote(to, Thing, args=(made.tag, tags, refs), timeout=chance.choice(_TIMEOUTS))
    made.creation = ref._creation
    truth.hold(here, made.tag, ref)


def own(truth: Truth, here: Worker, chance: Random) -> None:
    """An object of this worker is to be referred to."""
    made = truth.new_object(here.incarnation, here)
    truth.hold(here, made.tag, RRef(Thing(made.tag)))


def touch(truth: Truth, here: Worker, chance: Random) -> None:
    """A method of an object is called through a reference."""
    for tag, ref in _some(truth, here, chance, 1):
        creation = ref._creation
        if state_of(ref) is State.PENDING and (creation is None or creation.outcome is not None):
            continue  # it would wait
        timeout = chance.choice(_TIMEOUTS)
        made = truth.begin(f"touch {tag}", here, truth.objects[tag].owner, timeout)
        truth.follow(made, ref.rpc_async(timeout).touch(made.number, tag))


def release(truth: Truth, here: Worker, chance: Random) -> None:
    """A reference is dropped."""
    held = truth.held[here]
    if held:
        tag, _ = held.pop(chance.randrange(len(held)))
        truth.say(f"{here} drops a reference to object {tag}")


def introduce(truth: Truth, here: Worker, to: str) -> None:
    """A newcomer calls a member of the group, as ``init_rpc`` does."""
    made = truth.begin("serve", here, here.agent.group.peers.view.resolve(to).incarnation, 60.0)
    truth.follow(made, rpc.rpc_async(to, serve, args=(made.number, 0, [], []), timeout=60.0))


PROGRAMS: Final = {"call": call, "create": create, "own": own, "touch": touch, "release": release}


def _anybody(here: Worker, chance: Random) -> str:
    return chance.choice(here.agent.get_worker_infos()).name


def _arguments(truth: Truth, here: Worker, chance: Random) -> tuple[list[int], list[RRef[Any]]]:
    which = _some(truth, here, chance, chance.choice((0, 0, 1, 2)))
    return [tag for tag, _ in which], [ref for _, ref in which]


def _keep_some(truth: Truth, chance: Random, tags: Sequence[int], refs: Sequence[RRef[Any]]) -> Worker:
    """The worker that has got references keeps some; returns it."""
    here = truth.current
    assert here is not None
    for tag, ref in zip(tags, refs, strict=True):
        truth.check_reference(here, tag, ref)
        if chance.random() < 0.7:
            truth.hold(here, tag, ref)
    return here


def _some(truth: Truth, here: Worker, chance: Random, count: int) -> list[tuple[int, RRef[Any]]]:
    """Return at most ``count`` references that a program may pass on; none once it has given all back."""
    if here.agent.extensions["rref"].released:
        return []
    usable = [(tag, ref) for tag, ref in truth.held[here] if is_usable(ref)]
    return chance.sample(usable, min(count, len(usable)))
