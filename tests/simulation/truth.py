"""What is true of all calls and objects of a run, as one knows who sees all workers; and what must hold.

At each step: nothing runs twice, no call ends twice, with the answer to another, in an error that it has no
right to, or later than it must; no object is made twice, or freed while a worker that lives refers to it; no
reference fails whose object is there for its holder; and no worker that lives is given up, unless it could
not be heard for as long as the options say. At the end, nothing is left (``life``).
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import CancelledError
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar, Final
from unittest import mock

from rpc.agent.calls import PendingCall
from rpc.errors import (
    NotInitializedError,
    RpcError,
    RpcTimeoutError,
    RRefError,
    UnknownWorkerError,
    WorkerLostError,
)
from rpc.wire.frames import Frame
from rref.protocol.messages import State
from rref.reference import RRef
from tests.simulation.clock import Clock
from tests.simulation.threads import Threads
from tests.simulation.worker import Worker

__all__ = ["Call", "Object", "Truth", "Violation", "is_usable", "state_of"]

_SLACK: Final = 1.0
"""Seconds by which what is over may be told later: tasks take their time."""


class Violation(AssertionError):
    """A promise was broken."""


@dataclass(eq=False)
class Call:
    """One call, of whichever worker."""

    number: int
    what: str
    caller: Worker
    callee: int
    begun: float
    timeout: float
    future: Any = None
    through: Sequence[int] = ()
    """Of a backward pass, the workers that take part beside its caller."""
    cancelled: bool = False
    runs: int = 0
    ended: bool = False


@dataclass(eq=False)
class Object:
    """One object; ``creation`` is that of the call that makes it, once it is made."""

    tag: int
    owner: int
    creator: Worker
    creation: Any = None
    made: bool = False
    freed: bool = False


class Truth:
    """See the head of the file.

    Attributes:
        now: the truth of the run under way. Programs travel by name, and find it here.
        workers: all that have ever been, by incarnation.
        current: on whose loop something happens now.
        held: what the program of each worker refers to, each by its tag.
        excused: whether a worker has been silent for so long that it may be given up though it lives.
        tell: takes the lines of the trace.
        threads: the threads of the workers.
    """

    now: ClassVar[Truth]

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.workers: dict[int, Worker] = {}
        self.current: Worker | None = None
        self.calls: list[Call] = []
        self.objects: list[Object] = []
        self.held: dict[Worker, list[tuple[int, RRef[Any]]]] = defaultdict(list)
        self.threads = Threads()
        self.excused = False
        self.over = False
        self.tell: Callable[[str], object] | None = None
        self._broken: list[str] = []
        self._due: list[tuple[float, int]] = []

    def say(self, text: str) -> None:
        """A line of the trace."""
        if self.tell is not None:
            self.tell(f"{self.clock.passed:10.4f}  {text}")

    def broken(self, text: str) -> None:
        """A promise is broken. It is raised after the step: programs and callbacks would only be logged."""
        if not self.over:
            self.say(f"VIOLATION: {text}")
            self._broken.append(text)

    @property
    def living(self) -> list[Worker]:
        return [worker for worker in self.workers.values() if worker.stays]

    def estranged(self, one: int, other: int) -> bool:
        """Whether one of two workers is gone, or gone for the other."""
        here, there = self.workers[one], self.workers[other]
        return not (here.stays and there.stays) or here.has_lost(other) or there.has_lost(one)

    # ---- at each step

    def check_step(self) -> None:
        """Raise ``Violation`` if a promise is broken, or a call under way that should have ended."""
        due, now = self._due, self.clock.now
        while due and due[0][0] < now:
            _, number = heapq.heappop(due)
            call = self.calls[number]
            if call.ended or not call.caller.alive:
                continue
            resumed = call.caller.loop.paused_until + _SLACK
            if resumed > now:
                heapq.heappush(due, (resumed, number))
            else:
                self.broken(f"{self._named(call)} pends for ever")
        if self._broken:
            raise Violation(self._broken[0])

    def ends_by(self, call: Call, at: float) -> None:
        """From that time on, a call may not be under way any more."""
        heapq.heappush(self._due, (at + _SLACK, call.number))

    def lost(self, worker: Worker, incarnation: int, reason: str) -> None:
        """A worker has given another up."""
        self.say(f"{worker} loses {self.workers[incarnation]}: {reason}")
        if not self.excused and self.workers[incarnation].stays:
            self.broken(f"{worker} gives up {self.workers[incarnation]}, which lives: {reason}")
        for call in self.calls:
            if call.through:  # which may go on without a worker that has done its part
                continue
            if not call.ended and call.caller is worker and call.callee == incarnation:
                self.ends_by(call, self.clock.now)

    # ---- calls

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Meanwhile, a call that is ended a second time is seen: its future would only ignore that."""
        settle = PendingCall.settle

        def watched(call: PendingCall, outcome: Frame | BaseException) -> bool:
            if call.outcome is not None:
                self.broken(f"{call.asked} of {self.current} completes twice")
            return settle(call, outcome)

        with mock.patch.object(PendingCall, "settle", watched):
            yield

    def begin(self, what: str, caller: Worker, callee: int, timeout: float) -> Call:
        """A call is about to be made; 0 for no timeout."""
        call = Call(len(self.calls), what, caller, callee, self.clock.now, timeout)
        self.calls.append(call)
        self.say(f"{caller} makes {self._named(call)} of {self.workers[callee]}, timeout {timeout:g}")
        if timeout:
            self.ends_by(call, self.clock.now + timeout)
        return call

    def follow(self, call: Call, future: Any) -> None:
        """It was made."""
        call.future = future
        future.add_done_callback(lambda done: self._ended(call, done))

    def check_ended(self, here: Worker) -> None:
        """A worker is told in shutdown that all work has ended: in a static group that of all whom it has not
        lost, else its own.
        """
        for call in self.calls:
            if call.ended or call.future is None or call.through:  # a backward pass may be between two calls
                continue
            caller = call.caller.incarnation
            if call.caller is not here and (
                not here.agent.is_static_group
                or self.estranged(caller, call.callee)
                or self.estranged(here.incarnation, caller)
                or self.estranged(here.incarnation, call.callee)
            ):
                continue
            self.broken(f"{here} is told that all work has ended, and {self._named(call)} has not")

    def left(self, here: Worker) -> None:
        """A worker has left: of its calls, who waits for them has heard."""
        self.say(f"{here} has left")
        for call in self.calls:
            if call.caller is here and call.future is not None and not call.ended and not call.through:
                self.broken(f"{self._named(call)} is lost without an error")

    def ran(self, number: int) -> None:
        """It runs, here."""
        call = self.calls[number]
        call.runs += 1
        self.say(f"{self.current} runs {self._named(call)}")
        if self.current is None or self.current.incarnation != call.callee:
            self.broken(f"{self._named(call)} runs at {self.current}")
        if call.runs > 1:
            self.broken(f"{self._named(call)} runs twice")

    def _ended(self, call: Call, future: Any) -> None:
        if self.over or not call.caller.alive:
            return
        call.ended = True
        call.future = None
        try:
            number, tag, ref = future.value()
        except Exception as error:
            self.say(f"{self._named(call)} ends in {type(error).__name__}: {error}")
            if not self._may_fail(call, error):
                self.broken(f"{self._named(call)} ends in {error!r}")
            return
        self.say(f"{self._named(call)} is answered")
        if number != call.number:
            self.broken(f"{self._named(call)} has the answer to {number}")
        if not call.runs:
            self.broken(f"{self._named(call)} is answered and has not run")
        if ref is not None:
            self.hold(call.caller, tag, ref)

    def _may_fail(self, call: Call, error: Exception) -> bool:
        if call.through:
            return self._may_backward_fail(call, error)
        match error.__cause__ if type(error) is RuntimeError else error:
            case CancelledError():
                return call.cancelled
            case RpcTimeoutError():
                return bool(call.timeout) and self.clock.now >= call.begun + call.timeout
            case WorkerLostError():
                return call.caller.has_lost(call.callee)
            case NotInitializedError():
                return call.caller.leaving
            case RRefError():
                return call.what.startswith("touch") and self.is_given_up(int(call.what.split()[1]))
        return False

    def _may_backward_fail(self, call: Call, error: Exception) -> bool:
        """A backward pass fails only if two of its workers are lost for each other, or do not know each other
        yet, or its own leaves.
        """
        if isinstance(error, UnknownWorkerError) and not call.caller.agent.is_static_group:
            return True
        workers = (call.caller.incarnation, *call.through)
        lost = any(self.estranged(one, other) for one in workers for other in workers if one != other)
        return isinstance(error, RpcError | RuntimeError) and (lost or call.caller.leaving)

    def _named(self, call: Call) -> str:
        return f"call {call.number} ({call.what}) of {call.caller}"

    # ---- objects

    def new_object(self, owner: int, creator: Worker) -> Object:
        """An object is about to be made."""
        made = Object(len(self.objects), owner, creator)
        self.objects.append(made)
        self.say(f"{creator} makes object {made.tag} at {self.workers[owner]}")
        return made

    def made(self, tag: int) -> None:
        """It is made, here."""
        known = self.objects[tag]
        if known.made:
            self.broken(f"object {tag} is made twice")
        known.made = True

    def freed(self, tag: int) -> None:
        """It is destroyed."""
        known = self.objects[tag]
        known.freed = True
        owner = self.workers[known.owner]
        if not owner.stays or self.over:
            return
        self.say(f"{owner} frees object {tag}")
        if self.is_given_up(tag):
            return
        for worker in self.living:
            for held, ref in self.held[worker]:
                state = state_of(ref)
                if held != tag or state is State.FAILED or self.estranged(worker.incarnation, known.owner):
                    continue
                self.broken(f"object {tag} is freed, but {worker} refers to it ({state.name})")

    def hold(self, worker: Worker, tag: int, ref: RRef[Any]) -> None:
        """A program has got a reference, and keeps it; it is of no use if all have been given back here."""
        if worker.agent.extensions["rref"].released:
            return
        self.held[worker].append((tag, ref))
        self.check_reference(worker, tag, ref)

    def check_reference(self, worker: Worker, tag: int, ref: RRef[Any]) -> None:
        """A reference has failed only if it may."""
        if state_of(ref) is State.FAILED and not (
            self.estranged(worker.incarnation, self.objects[tag].owner) or self.is_given_up(tag)
        ):
            reason = ref._references.reason(ref._ref)
            self.broken(f"the reference of {worker} to object {tag} fails: {reason}")

    def check_references(self) -> None:
        """That of all."""
        for worker in self.living:
            for tag, ref in self.held[worker]:
                self.check_reference(worker, tag, ref)

    def is_given_up(self, tag: int) -> bool:
        """Whether its creator has given an object up, or may not have been able to have it made."""
        known = self.objects[tag]
        if known.creation is None:
            return False
        return known.creation.error is not None or (
            not known.made and self.estranged(known.creator.incarnation, known.owner)
        )


def state_of(ref: RRef[Any]) -> State:
    """How a reference stands."""
    return ref._references.state(ref._ref)


def is_usable(ref: RRef[Any]) -> bool:
    """Whether nothing is known against a reference."""
    creation = ref._creation
    return state_of(ref) is not State.FAILED and (creation is None or creation.error is None)
