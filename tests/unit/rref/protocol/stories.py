"""Small programs about one object, whose every course can be run: all interleavings, all deaths."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from rref.protocol.messages import Peer, Ref, RRefId, State
from tests.unit.rref.protocol.simulation import Simulation

Step = tuple[Any, ...]
"""``("own",)``, ``("create", owner)``, ``("create_with", owner)``: with a reference among the arguments,
``("give_up",)``, ``("call", to)``, ``("fetch",)``, ``("drop",)``.
"""


@dataclass(frozen=True)
class Story:
    """What each worker does, in order; and what may befall it.

    Attributes:
        programs: by worker, its steps. Those that use a reference wait until there is one.
        prelude: choices that are taken first; what is explored begins after them.
        mortal: who may die, at any time after.
        deaths: how many of them at most.
        joins: how many workers may join, at any time.
        breaks: pairs whose connection may break, once each.
    """

    programs: dict[Peer, tuple[Step, ...]]
    prelude: tuple[Step, ...] = ()
    mortal: tuple[Peer, ...] = ()
    deaths: int = 0
    joins: int = 0
    breaks: tuple[tuple[Peer, Peer], ...] = ()


class Course:
    """One course of a story, so far."""

    def __init__(self, story: Story) -> None:
        self.story = story
        self.simulation = Simulation(len(story.programs))
        self.done = dict.fromkeys(story.programs, 0)
        self.deaths = story.deaths
        self.joins = story.joins
        self.breaks = list(story.breaks)
        for choice in story.prelude:
            self.take(choice)

    def choices(self) -> list[Step]:
        """All that can happen next; a death, a join or a broken connection need not happen at all."""
        return [*self._program_steps(), *self._events(), *self._misfortunes()]

    def has_ended(self) -> bool:
        """Whether nothing is left that must happen."""
        return not any(True for _ in self._program_steps()) and not any(True for _ in self._events())

    def take(self, choice: Step) -> None:
        """Let ``choice`` happen."""
        simulation = self.simulation
        match choice:
            case ("program", peer):
                self._run(peer, self.story.programs[peer][self.done[peer]])
                self.done[peer] += 1
            case ("arrive", index):
                simulation.arrive(index)
            case ("deliver", index):
                self.simulation.network.deliver(simulation, index)
            case ("finish", peer, rref):
                simulation.finish(peer, rref)
            case ("notice", peer, dead):
                simulation.notice(peer, dead)
            case ("die", peer):
                self.deaths -= 1
                simulation.die(peer)
            case ("join",):
                self.joins -= 1
                simulation.join()
            case ("break", (one, other)):
                self.breaks.remove((one, other))
                simulation.break_link(one, other)

    def state(self) -> bytes:
        """All that decides about the rest of the course."""
        self.simulation.network.posted.sort(key=repr)
        self.simulation.calls.sort(key=repr)
        kept = (self.simulation, self.done, self.deaths, self.joins, self.breaks)
        return pickle.dumps(kept, pickle.HIGHEST_PROTOCOL)

    def restore(self, state: bytes) -> None:
        """Go back to an earlier ``state``."""
        self.simulation, self.done, self.deaths, self.joins, self.breaks = pickle.loads(state)

    def _run(self, peer: Peer, step: Step) -> None:
        simulation = self.simulation
        match step:
            case ("own",):
                simulation.own(peer)
            case ("create", owner):
                simulation.create(peer, owner)
            case ("create_with", owner):
                simulation.create(peer, owner, self._usable(peer)[:1])
            case ("give_up",):
                for ref in list(simulation.workers[peer].creating):
                    simulation.give_up(peer, ref)
            case ("call", to):
                simulation.call(peer, to, [self._usable(peer)[0]])
            case ("fetch",):
                rref = self._fetchable(peer)[0]
                simulation.expect(simulation.objects[rref].owner, rref)
            case ("drop",):
                simulation.release(peer, next(iter(simulation.workers[peer].refs)))

    def _can_run(self, peer: Peer, step: Step) -> bool:
        match step:
            case ("call", to):
                return to in self.simulation.workers and bool(self._usable(peer))
            case ("create_with", _):
                return bool(self._usable(peer))
            case ("fetch",):
                return bool(self._fetchable(peer))
            case ("drop",):
                return bool(self.simulation.workers[peer].refs)
        return True

    def _usable(self, peer: Peer) -> list[Ref]:
        worker = self.simulation.workers[peer]
        return [ref for ref in worker.refs if worker.protocol.state(ref) is not State.FAILED]

    def _fetchable(self, peer: Peer) -> list[RRefId]:
        """Objects that a worker can fetch from a living owner."""
        simulation = self.simulation
        found = [simulation.workers[peer].refs[ref] for ref in self._usable(peer)]
        return [rref for rref in found if simulation.hears(simulation.objects[rref].owner, peer)]

    def _program_steps(self) -> Iterator[Step]:
        for peer in self.simulation.living:
            program = self.story.programs.get(peer, ())
            done = self.done.get(peer, 0)
            if done < len(program) and self._can_run(peer, program[done]):
                yield "program", peer

    def _events(self) -> Iterator[Step]:
        simulation = self.simulation
        for index in range(len(simulation.calls)):
            yield "arrive", index
        for index in range(len(self.simulation.network.posted)):
            yield "deliver", index
        for peer in simulation.living:
            for rref in simulation.workers[peer].running:
                yield "finish", peer, rref
        for peer, dead in simulation.unnoticed():
            yield "notice", peer, dead

    def _misfortunes(self) -> Iterator[Step]:
        living = self.simulation.living
        if self.deaths:
            for peer in self.story.mortal:
                if peer in living:
                    yield "die", peer
        if self.joins:
            yield ("join",)
        for pair in self.breaks:
            if pair[0] in living and pair[1] in living:
                yield "break", pair


def explore(story: Story, most: int = 1_000_000) -> int:
    """Run every course of ``story``, each to its end and the drain; equal states are gone into once.

    Args:
        story: what happens.
        most: fail if there are more states than this.

    Returns:
        how many states there are.

    Raises:
        Violation: a course broke a promise of the protocol; the note says which course.
    """
    course = Course(story)
    start = course.state()
    seen = {start}
    waiting: list[tuple[bytes, tuple[Step, ...]]] = [(start, ())]
    while waiting:
        state, path = waiting.pop()
        course.restore(state)
        choices = course.choices()
        if course.has_ended():
            _drain(course, path)
            course.restore(state)
        for choice in choices:
            _take(course, choice, path)
            after = course.state()
            if after not in seen:
                seen.add(after)
                waiting.append((after, (*path, choice)))
            course.restore(state)
        assert len(seen) <= most, f"more than {most} states"
    return len(seen)


def _take(course: Course, choice: Step, path: tuple[Step, ...]) -> None:
    try:
        course.take(choice)
    except AssertionError as error:
        error.add_note(f"after {path}, {choice}")
        raise


def _drain(course: Course, path: tuple[Step, ...]) -> None:
    try:
        course.simulation.drain()
    except AssertionError as error:
        error.add_note(f"after {path}, and the drain")
        raise
