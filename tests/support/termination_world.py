"""A group of simulated workers that call each other, shut down and die, with every choice made by chance.

Calls travel beside the messages of the termination, in any order; a call may cause others, may be waited
for or not, and a wait may time out; whichever, it is under way at its caller until it is answered or its
callee is lost. A death loses any of what was on its way from the dead.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from random import Random
from typing import Any

from rpc.group.termination import (
    Action,
    ActivityReport,
    CutOff,
    Failed,
    Leave,
    Quiescent,
    SendToWorker,
    Termination,
)
from rpc.group.workers import Member, WorkerInfo

ROUNDS = 2

Step = Callable[[], object]


def members(count: int) -> list[Member]:
    """Workers whose incarnations are not in the order of their ranks."""
    return [Member(WorkerInfo(f"worker{rank}", rank), 1000 - 7 * rank, "host", ()) for rank in range(count)]


@dataclass(eq=False)
class Call:
    """A call that its caller has made and that is not answered yet."""

    target: int
    waiting: Task | None


@dataclass(eq=False)
class Task:
    """A call being executed, or the main program: makes its calls one by one, then ends."""

    calls: list[tuple[int, list[object], bool]]
    reply_to: int | None = None
    call: Call | None = None
    waiting: bool = False


@dataclass
class Worker:
    peer: int
    termination: Termination
    running: bool = True
    tasks: list[Task] = field(default_factory=list)
    calls: list[Call] = field(default_factory=list)
    begun: int = 0
    lost: set[int] = field(default_factory=set)
    timeout: float = 0.0
    absent: bool = False
    in_round: bool = False
    outcome: str = ""

    @property
    def active(self) -> int:
        return len(self.tasks) + len(self.calls)

    @property
    def wants_to_enter(self) -> bool:
        return not (self.absent or self.in_round or self.tasks)

    def report(self) -> ActivityReport:
        return ActivityReport(self.active, self.begun)


@dataclass
class InFlight:
    source: int
    target: int
    kind: str
    body: Any
    call: Call | None = None


class World:
    def __init__(self, count: int, chance: Random) -> None:
        group = members(count)
        self.chance = chance
        self.now = 0.0
        self.workers = {m.incarnation: Worker(m.incarnation, Termination(m, group, ROUNDS)) for m in group}
        self.in_flight: list[InFlight] = []
        self.notices: list[tuple[int, int]] = []
        self.posted = 0
        self.undecided_rounds = set(range(ROUNDS))
        paths = [(source, target) for source in self.workers for target in self.workers]
        self.slow = set(chance.sample(paths, chance.randint(0, len(paths))))

    # What workers do.

    def start_program(self, worker: Worker, calls: int, depth: int) -> None:
        worker.tasks.append(Task([self._random_call(depth) for _ in range(calls)]))

    def _random_call(self, depth: int) -> tuple[int, list[object], bool]:
        target = self.chance.choice(list(self.workers))
        children = [self._random_call(depth - 1) for _ in range(self.chance.randint(0, 2))] if depth else []
        return target, list(children), self.chance.random() < 0.5

    def run_task(self, worker: Worker, task: Task) -> None:
        if task.waiting:
            if self.chance.random() < 0.2:
                task.waiting = False  # the wait timed out
            return
        if task.calls:
            target, children, waits = task.calls.pop()
            if target in worker.lost:
                return
            worker.begun += 1
            task.waiting = waits
            call = Call(target, task if waits else None)
            worker.calls.append(call)
            self.in_flight.append(InFlight(worker.peer, target, "call", children, call))
            return
        worker.tasks.remove(task)
        if task.reply_to is not None and task.reply_to not in worker.lost:
            self.in_flight.append(InFlight(worker.peer, task.reply_to, "reply", None, task.call))
        self.something_ended(worker)

    def something_ended(self, worker: Worker) -> None:
        if worker.active == 0:
            self.act(worker, worker.termination.became_idle(worker.report()))

    def enter(self, worker: Worker) -> None:
        worker.in_round = True
        report = worker.report()
        self.act(worker, worker.termination.enter(self.now, report, worker.timeout))

    def deliver(self, item: InFlight) -> None:
        self.in_flight.remove(item)
        target = self.workers[item.target]
        if not target.running or item.source in target.lost:
            return
        if item.kind == "call":
            target.begun += 1
            target.tasks.append(Task(list(item.body), item.source, item.call))
        elif item.kind == "reply":
            assert item.call is not None
            target.calls.remove(item.call)
            if item.call.waiting is not None:
                item.call.waiting.waiting = False
            self.something_ended(target)
        else:
            report = target.report()
            self.act(target, target.termination.receive(item.source, item.body, self.now, report))

    def kill(self, worker: Worker) -> None:
        worker.running = False
        self._gone(worker)

    def kill_one(self) -> None:
        """Kill one of several, preferably one whose calls are still on their way."""
        alive = [worker for worker in self.workers.values() if worker.running]
        calling = [w for w in alive if any(i.source == w.peer and i.kind == "call" for i in self.in_flight)]
        if len(alive) > 1:
            self.kill(self.chance.choice(calling or alive))

    def cut(self, one: Worker, other: Worker) -> None:
        """Their connection breaks; both live."""
        self.notices += [(one.peer, other.peer), (other.peer, one.peer)]

    def _gone(self, worker: Worker) -> None:
        self.in_flight = [item for item in self.in_flight if item.target != worker.peer]
        for other in self.workers.values():
            if other.running and worker.peer not in other.lost:
                self.notices.append((other.peer, worker.peer))

    def notice(self, observer: int, gone: int) -> bool:
        """An observer learns that a connection is closed; what was left on it is not read any more."""
        worker = self.workers[observer]
        left = [item for item in self.in_flight if (item.source, item.target) == (gone, observer)]
        if self.workers[gone].outcome == "left" and left and worker.running:
            return False  # it sent all it had before it closed
        self.notices.remove((observer, gone))
        if not worker.running or gone in worker.lost:
            return True
        worker.lost.add(gone)
        self.in_flight = [item for item in self.in_flight if item not in left]
        for call in [call for call in worker.calls if call.target == gone]:
            worker.calls.remove(call)  # it fails
            if call.waiting is not None:
                call.waiting.waiting = False
        self.act(worker, worker.termination.lost(gone, self.now, worker.report()))
        return True

    def tick(self, worker: Worker) -> None:
        self.act(worker, worker.termination.tick(self.now, worker.report()))

    def act(self, worker: Worker, actions: list[Action]) -> None:
        for action in actions:
            match action:
                case SendToWorker(peer, message):
                    self.posted += 1
                    if self.workers[peer].running and peer not in worker.lost:
                        self.in_flight.append(InFlight(worker.peer, peer, "termination", message))
                        if self.chance.random() < 0.1:
                            self.in_flight.append(InFlight(worker.peer, peer, "termination", message))
                case CutOff(peer):
                    self.cut(worker, self.workers[peer])
                case Quiescent():
                    worker.in_round = False
                    self.check(worker, 0)
                    if self.chance.random() < 0.7:  # references are given back
                        self.start_program(worker, 2, 0)
                case Leave():
                    self.check(worker, 1)
                    worker.outcome = "left"
                    worker.running = False
                    self._gone(worker)
                case Failed(reason):
                    worker.outcome = reason
                    worker.running = False
                    self._gone(worker)

    # What must hold.

    def check(self, decider: Worker, round_number: int) -> None:
        """When a round is declared over, nothing is or can come under way among those it is over for."""
        if round_number not in self.undecided_rounds:
            return
        self.undecided_rounds.discard(round_number)
        view = [w for w in self.workers.values() if w.running and w.peer not in decider.lost]
        for worker in view:
            assert worker.active == 0, f"{worker.peer} has {worker.active} under way"
            for item in self.in_flight:
                if item.target == worker.peer and item.kind == "call":
                    assert item.source in worker.lost, f"a call is on its way to {worker.peer}"

    # Chance.

    def steps(self) -> tuple[list[Step], list[Step]]:
        """Everything that can happen next, and what can happen but is on a slow path."""
        quick: list[Step] = []
        slow: list[Step] = []
        for item in self.in_flight:
            is_slow = item.kind != "termination" and (item.source, item.target) in self.slow
            (slow if is_slow else quick).append(partial(self.deliver, item))
        for observer, gone in self.notices:
            is_slow = (gone, observer) in self.slow
            (slow if is_slow else quick).append(partial(self.notice, observer, gone))
        for worker in self.workers.values():
            if not worker.running:
                continue
            quick += [partial(self.run_task, worker, task) for task in worker.tasks]
            if worker.wants_to_enter:
                quick.append(partial(self.enter, worker))
            due = worker.termination.next_tick
            if due is not None and due <= self.now:
                quick.append(partial(self.tick, worker))
        return quick, slow

    def step(self) -> bool:
        """Let one thing happen; returns whether there was one."""
        quick, slow = self.steps()
        if slow and (not quick or self.chance.random() < 0.02):
            quick = slow
        if quick:
            self.chance.choice(quick)()
            return True
        dues = [w.termination.next_tick for w in self.workers.values() if w.running]
        pending = [due for due in dues if due is not None]
        if not pending:
            return False
        self.now = max(self.now, min(pending))
        return True

    def run_to_end(self, limit: int = 20_000) -> None:
        for _ in range(limit):
            if not self.step():
                return
        raise AssertionError("does not end")
