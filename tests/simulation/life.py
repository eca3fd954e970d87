"""One run: a group of workers, what their programs do, what goes wrong, and the end, all decided by a seed.

Faults are of two lengths. Short ones together last less than the options ``lost_after`` and
``reconnect_within`` allow, so nobody who lives may be given up; long ones excuse that. When all are over,
every call ends within what the options say; the programs drop their references, and then nothing may be left:
no object, no entry of any table, no message that is kept to be sent again.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from random import Random
from typing import Final

from rpc.group.connections import CONNECT_SECONDS
from rpc.options import AgentOptions
from rpc.runtime import current
from tests.simulation.clock import Clock, Handle, WorkerLoop
from tests.simulation.gradients import BACKWARD, differentiate
from tests.simulation.leaving import Leaving
from tests.simulation.network import SimulatedNetwork
from tests.simulation.programs import PROGRAMS, introduce
from tests.simulation.truth import Truth, Violation
from tests.simulation.worker import Worker

__all__ = ["Deed", "Life", "Plan"]

_NEWCOMERS: Final = 3
"""Maximum number of living workers beyond the initial number."""

_PASS_DELAYS: Final = 30.0
_PASS_SECONDS: Final = 0.005
"""A backward pass takes about so many times the latency, and so many seconds more."""

_BRIEF: Final = 6.0
"""The options ``lost_after`` and ``reconnect_within`` of short runs, in seconds."""

_PASSES_SHARE: Final = 0.3
"""The share of runs in which workers run backward passes."""

_SWEEPS_SECONDS: Final = 200.0
"""What waits for a message that will not come is given up by then."""


@dataclass(frozen=True)
class Deed:
    """Something that is done, at a time in seconds, with chance of its own: without one the others are the
    same.
    """

    time: float
    what: str
    seed: int
    seconds: float = 0.0
    """How long a fault lasts."""


@dataclass(frozen=True)
class Plan:
    """What a seed decides beforehand."""

    seed: int
    workers: int
    static: bool
    lost_after: float
    reconnect_within: float
    latency: float
    tail: float
    excused: bool
    seconds: float
    deeds: tuple[Deed, ...]
    leave: bool = False
    """Whether workers leave, and in the end all do: some meanwhile, whatever goes wrong then."""

    @classmethod
    def of(cls, seed: int, workers: int = 0) -> Plan:
        """That of a seed; with ``workers``, for a group of so many."""
        chance = Random(seed)
        pick = chance.choice
        lost_after, reconnect_within = pick((6.0, 30.0)), pick((5.0, 30.0))
        patience = min(lost_after, reconnect_within)
        static, excused, seconds = chance.random() < 0.3, chance.random() < 0.3, pick((2.0, 10.0, 40.0))
        latency, tail = pick((0.0002, 0.002, 0.05)), pick((0.0, 0.03))
        if latency * 150 > patience / 10:
            tail = 0.0
        deeds: list[Deed] = []

        def add(what: str, length: float = 0.0, begin: float = 0.0, within: float = seconds) -> None:
            time = begin + chance.random() * within
            deeds.append(Deed(time, what, chance.getrandbits(32), length))

        many, faults = (2 * workers, 30) if workers else (pick((20, 50, 100)), pick((0, 2, 6, 12)))
        weights = pick(
            ({"call": 8, "create": 3, "own": 2, "touch": 3, "release": 4}, dict.fromkeys(PROGRAMS, 1))
        )
        for what in chance.choices(list(weights), list(weights.values()), k=many):
            add(what)
        silence = patience * (2.0 if excused else 0.4)
        kinds = ["cut", "cut", "partition", "pause", "kill", "join"]
        for what in chance.choices(kinds, k=faults):
            length = silence * chance.random() if what in ("partition", "pause") else 0.0
            silence -= 0.0 if excused else length
            add(what, length)
        many = workers or pick((2, 3, 3, 4, 5))
        if leave := chance.random() < 0.4:  # while there are calls and faults
            begin, within = chance.random() * seconds, pick((0.05, 0.5, 5.0))
            for _ in range(many if chance.random() < 0.7 else chance.randint(0, many)):
                add("leave", pick((0.0, 0.0, 0.5, 5.0, 60.0)), begin, within)
            for what in chance.choices(["call", *kinds[:-1]], k=pick((5, 10, 20))):
                length = silence * chance.random() if what in ("partition", "pause") else 0.0
                silence -= 0.0 if excused else length
                add(what, length, begin, within)
        if chance.random() < _PASSES_SHARE:
            for _ in range(pick((5, 15, 40))):
                add(BACKWARD)
        deeds.sort(key=lambda deed: deed.time)
        return cls(
            seed, many, static and not workers, lost_after, reconnect_within,
            latency, tail, excused, seconds, tuple(deeds), leave,
        )  # fmt: skip

    @classmethod
    def of_backward(cls, seed: int) -> Plan:
        """A short run with little but backward passes, among workers some of whom have lost each other, or do
        in the middle of one.
        """
        chance = Random(seed)
        pick = chance.choice
        early, excused = chance.random() < 0.4, chance.random() < 0.7
        apart = 2.0 * _BRIEF
        if early:
            deeds = [Deed(0.0, "estrange", chance.getrandbits(32), apart)]
            deeds += [Deed(apart + 2.0 + each, BACKWARD, chance.getrandbits(32)) for each in range(4)]
        else:
            deeds = [Deed(0.1, BACKWARD, chance.getrandbits(32), apart if excused else 1.0)]
        return cls(
            seed, pick((3, 3, 4)), early, _BRIEF, _BRIEF, pick((0.0002, 0.002, 0.02)), 0.0, early or excused,
            deeds[-1].time + 2.0, tuple(deeds),
        )  # fmt: skip


class Life:
    """A run of a plan; ``tell`` takes the lines of its trace."""

    def __init__(self, plan: Plan, tell: Callable[[str], object] | None = None) -> None:
        self.plan = plan
        self.clock = Clock(plan.seed)
        self.network = SimulatedNetwork(self.clock)
        self.network.latency, self.network.tail = plan.latency, plan.tail
        self.truth = Truth.now = Truth(self.clock)
        self.truth.excused = plan.excused
        self.truth.tell = tell
        self.network.say = None if tell is None else self.truth.say
        self._options = AgentOptions(
            lost_after=plan.lost_after,
            reconnect_within=plan.reconnect_within,
            slow_call_seconds=0,  # there are no threads whose frames could be looked at
        )
        self._world = WorkerLoop(self.clock, "-")  # type: ignore[abstract]
        self._by_loop: dict[WorkerLoop, Worker] = {}
        self._bound = plan.lost_after + plan.reconnect_within + CONNECT_SECONDS + 10.0
        self._ids = 0

    def run(self) -> int:
        """From its start to its end; returns how much has happened. ``Violation`` if a promise is broken."""
        with self.begun():
            self.clock.run(self.plan.seconds)
            self.end()
        return self.clock.happened

    @contextmanager
    def begun(self) -> Iterator[list[Worker]]:
        """The workers of the group, for who decides by himself what happens; ``end`` checks the rest."""
        threads = self.truth.threads
        with (
            self.clock.ruling(),
            threads.ruling(self._current_loop),
            self.truth.watching(),
            _errors_seen(self.truth),
        ):
            try:
                self._begin()
                yield self.truth.living
            finally:
                self.truth.over = True
                threads.end()
                current.agent = None
                for worker in self.truth.workers.values():
                    worker.loop.dead = True

    def _begin(self) -> None:
        self.clock.enter, self.clock.after = self._enter, self._after
        founders = [self._new_worker() for _ in range(self.plan.workers)]
        for worker in founders:
            worker.join([each.member for each in founders], static=self.plan.static)
        for deed in self.plan.deeds:
            self._world.call_later(deed.time, self._do, deed)

    def _enter(self, loop: WorkerLoop) -> None:
        worker = self.truth.current = self._by_loop.get(loop)
        current.agent = None if worker is None else worker.agent

    def _after(self, handle: Handle) -> None:
        self.truth.threads.look(handle.loop)
        self.truth.check_step()

    def _current_loop(self) -> WorkerLoop:
        assert self.truth.current is not None
        return self.truth.current.loop

    def _new_worker(self, worker_id: int = -1) -> Worker:
        if worker_id < 0:
            worker_id, self._ids = self._ids, self._ids + 1
        incarnation = self.clock.chance.getrandbits(40)
        worker = Worker(self.network, worker_id, incarnation, self._options)
        self.truth.workers[incarnation] = worker
        self._by_loop[worker.loop] = worker
        worker.agent.lifecycle.hooks.gone.append(
            lambda peer, reason: self.truth.lost(worker, peer.incarnation, reason)
        )
        return worker

    # ---- deeds

    def _do(self, deed: Deed) -> None:
        chance = Random(deed.seed)
        living = self.truth.living
        busy = [worker for worker in living if worker.shutdown_since is None]
        if deed.what == "leave":
            if busy:
                self.leave(chance.choice(busy), deed.seconds)
        elif deed.what == BACKWARD:
            if busy:
                worker = chance.choice(busy)
                begins = partial(self._part, Random(deed.seed), deed.seconds)
                worker.loop.call_soon(differentiate, self.truth, worker, chance, begins)
        elif deed.what in PROGRAMS:
            if not busy:
                return
            worker = chance.choice(busy)
            worker.loop.call_soon(PROGRAMS[deed.what], self.truth, worker, chance)
        elif living:
            getattr(self, f"_{deed.what}")(living, chance, deed.seconds)

    def _cut(self, living: Sequence[Worker], chance: Random, _: float) -> None:
        connections = self.network.live()
        if connections:
            end = chance.choice(connections)
            end, half = chance.choice((end, end.other)), chance.random() < 0.3
            self.truth.say(f"cut between {end.place} and {end.other.place}{', half' if half else ''}")
            self.network.cut(end, half=half)

    def _partition(self, living: Sequence[Worker], chance: Random, seconds: float) -> None:
        """Some from the others, at times in one direction only."""
        few = chance.sample(living, chance.randint(1, min(max(1, len(living) // 2), 5)))
        one_way = chance.random() < 0.3
        self.truth.say(f"partition {few} from the others for {seconds:.3f} s{', one way' if one_way else ''}")
        for here in few:
            for there in living:
                if there not in few:
                    self.network.block(here.place, there.place)
                    if not one_way:
                        self.network.block(there.place, here.place)
        self._world.call_later(seconds, self._heal)

    def _estrange(self, living: Sequence[Worker], chance: Random, seconds: float) -> None:
        """Two workers are connected, and then do not reach each other; one of them waits for the other."""
        one, other = chance.sample(living, 2)

        def part() -> None:
            self.truth.say(f"{one} and {other} do not reach each other for {seconds:.3f} s")
            self.network.block(one.place, other.place)
            self.network.block(other.place, one.place)
            one.loop.call_soon(introduce, self.truth, one, other.name)
            self._world.call_later(seconds, self._heal)

        one.loop.call_soon(introduce, self.truth, one, other.name)
        self._world.call_later(1.0, part)

    def _part(self, chance: Random, seconds: float, workers: Sequence[Worker]) -> None:
        """In the middle of a backward pass, one of its workers no longer hears another. Both live on, or the
        other dies, and what it has sent meanwhile is lost. The first of them runs the pass, and does not die.
        """
        if not seconds or len(workers) < 2:
            return
        one = chance.choice(workers[1:])
        other = chance.choice([worker for worker in workers if worker is not one])
        dies = not self.plan.excused or chance.random() < 0.5
        soon = self.plan.latency * _PASS_DELAYS + _PASS_SECONDS

        def part() -> None:
            self.truth.say(f"{other} no longer hears {one}")
            self.network.block(one.place, other.place)
            self._world.call_later(soon * chance.random() if dies else seconds, end)

        def end() -> None:
            if dies and one.alive and len(self.truth.living) > 1:
                self.network.lose(one.place, other.place)
                self._end(one, host=chance.random() < 0.5)
                self._join(self.truth.living, chance, 0.0)
            self._heal()

        if chance.random() < 0.7:
            part()
        else:
            self._world.call_later(soon * chance.random(), part)

    def _heal(self) -> None:
        self.truth.say("heal")
        self.network.heal()

    def _pause(self, living: Sequence[Worker], chance: Random, seconds: float) -> None:
        worker = chance.choice(living)
        self.truth.say(f"pause {worker} for {seconds:.3f} s")
        worker.loop.paused_until = max(worker.loop.paused_until, self.clock.now + seconds)

    def _kill(self, living: Sequence[Worker], chance: Random, _: float) -> None:
        if len(living) > 1:
            self._end(chance.choice(living), host=chance.random() < 0.3)

    def _end(self, worker: Worker, *, host: bool) -> None:
        self.truth.say(f"kill {worker}{', with its host' if host else ''}")
        worker.end()
        self.network.kill(worker.place, host=host)

    def _join(self, living: Sequence[Worker], chance: Random, _: float) -> None:
        """A newcomer; under the name of one who has died, if all know that."""
        if self.plan.static or len(living) >= self.plan.workers + _NEWCOMERS:
            return
        taken = {
            each.member.id
            for each in self.truth.workers.values()
            if each.alive or any(other.agent.group.peers.view.find(each.incarnation) for other in living)
        }
        free = sorted({each.member.id for each in self.truth.workers.values()} - taken)
        self.join(chance.choice(free) if free and chance.random() < 0.7 else -1)

    def join(self, worker_id: int = -1) -> None:
        """A newcomer, under a name that is new or free."""
        living = self.truth.living
        worker = self._new_worker(worker_id)
        self.truth.say(f"{worker} joins")
        current.agent = worker.agent
        worker.join([each.member for each in (*living, worker)], static=False)
        for other in living:
            worker.loop.call_soon(introduce, self.truth, worker, other.name)

    def leave(self, worker: Worker, timeout: float = 0.0) -> None:
        """A worker's program ends, and it enters shutdown, with so much time for each of its rounds."""
        worker.shutdown_since = self.clock.now  # what else it is told to do comes too late
        worker.loop.call_soon(Leaving(self.truth, worker, timeout).begin)

    # ---- the end

    def end(self) -> None:
        """No more faults: all that is under way ends, and nothing is left."""
        truth = self.truth
        truth.say("all faults are over")
        self.network.heal()
        paused = max((worker.loop.paused_until for worker in truth.living), default=0.0)
        self.clock.run(max(0.0, paused - self.clock.now))
        if self.plan.leave:
            self._all_leave()
            return
        for call in truth.calls:
            if not call.ended:
                truth.ends_by(call, self.clock.now + self._bound)
        self._until(lambda: all(call.ended or not call.caller.alive for call in truth.calls), self._bound + 5)
        truth.check_references()
        truth.say("all references are dropped")
        self._until(self._has_nothing, self._bound + _SWEEPS_SECONDS)
        for left in self._left():
            raise Violation(f"in the end, {left}")

    def _all_leave(self) -> None:
        """Whoever has not is in shutdown now, and all are let go."""
        for worker in self.truth.living:
            if worker.shutdown_since is None:
                self.leave(worker)
        self._until(lambda: not any(worker.alive for worker in self.truth.workers.values()), 2 * self._bound)
        for worker in self.truth.workers.values():
            if worker.alive:
                raise Violation(f"in the end, {worker} is in shutdown still")

    def _has_nothing(self) -> bool:
        """Whether nothing is left, when what late calls have brought is dropped, too."""
        self.truth.held.clear()
        return next(self._left(), None) is None

    def _until(self, condition: Callable[[], bool], seconds: float) -> None:
        """Let time pass until it holds, or is over."""
        end = self.clock.now + seconds
        while not condition() and self.clock.now < end:
            self.clock.run(1.0)

    def _left(self) -> Iterator[str]:
        """What a living worker still has, in words."""
        truth = self.truth
        for worker in truth.living:
            agent = worker.agent
            counts = agent.extensions["rref"].counts() | agent.extensions["autograd"].observed()
            counts |= {
                "calls": agent.calls.table.unanswered(),
                "messages": agent.messages.control.unacknowledged(),
                "requests": len(agent.calls.requests),
                "postponed": agent.lifecycle.activity.postponed.value,
                "tasks": agent.executor.active(),
                "kept": sum(len(peer.session.sent) for peer in agent.group.peers.all() if peer.lost is None),
            }
            if left := {kind: count for kind, count in counts.items() if count}:
                yield f"{worker} is left with {left}"
        for each in truth.objects:
            if each.made and not each.freed and truth.workers[each.owner].alive:
                yield f"object {each.tag} at {truth.workers[each.owner]} is never freed"


class _Seen(logging.Handler):
    def __init__(self, truth: Truth) -> None:
        super().__init__(logging.ERROR)
        self._truth = truth

    def emit(self, record: logging.LogRecord) -> None:
        error = record.exc_info[1] if record.exc_info else None
        self._truth.broken(
            f"{self._truth.current} logs: {record.getMessage()}{f': {error!r}' if error else ''}"
        )


@contextmanager
def _errors_seen(truth: Truth) -> Iterator[None]:
    """What is logged as an error meanwhile is none that may be; less is not looked at."""
    seen = _Seen(truth)
    loggers = [logging.getLogger(name) for name in ("rpc", "rref", "dist_autograd")]
    before = [(each.level, each.propagate) for each in loggers]
    for each in loggers:
        each.addHandler(seen)
        each.setLevel(logging.ERROR)
        each.propagate = False
    try:
        yield
    finally:
        for each, (level, propagate) in zip(loggers, before, strict=True):
            each.removeHandler(seen)
            each.setLevel(level)
            each.propagate = propagate
