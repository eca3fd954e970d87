"""Simulate elastic jobs: the real deciding code, ``spmd/elastic/agreement.py``, without processes.

python -m tests.simulation.elastic --seeds 3000     # as many runs; the number of a failing one is printed
python -m tests.simulation.elastic --seed 17        # one, and all that happens in it
python -m tests.simulation.elastic_breakages        # each rule left out; the seed that notices it

A run is decided by its seed. Messages between two workers arrive in order, those of different pairs in any
order. A worker may die at any time, and any of its last messages are lost; it may be stopped for any time;
hosts may lose each other for any time, and workers may be lost to some and not to others. The group's log
removes lost workers in any order. Newcomers join; members leave, and live on for a while in some runs; all
finish. In some runs a replica is two or three workers, which die and are stopped one by one.

What must hold after every event: of each step, one attempt at most is ever committed by anybody; members of
one job have the same history, and differ by at most one step; a view has whole replicas. After the last
fault all living members are in one view and commit steps; or, if faults were not only deaths, a part of them
waits that may not go on, which is put out. Deaths on several hosts come one at a time in some runs, each with
a witness on its host, which may leave: then all the others go on, too.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections import defaultdict, deque
from collections.abc import Sequence
from typing import Any, Final

from spmd.elastic import agreement

__all__ = ["Violation", "World", "agreement", "find", "run"]

Ballot = tuple[int, int]

_MOST_WORKERS: Final = 9
_SETTLING: Final = 8000
"""Maximum number of events until all is well after the last fault."""


_FAULTS: Final = (
    "die", "join", "leave", "leave at once", "finish", "propose",
    "stop", "continue", "cut", "heal", "lose", "remove",
)  # fmt: skip
_PARTIAL: Final = ("stop", "cut", "lose", "remove")
"""Faults after which nobody may be allowed to go on."""


class Violation(AssertionError):
    """A promise that a run has broken."""


class Worker:
    """One simulated worker: the real member, and what its shell keeps."""

    def __init__(self, number: int, host: int, step: int, replica: tuple[int, ...]) -> None:
        self.number, self.host = number, host
        self.core = agreement.Member(number, step, replica)
        self.alive, self.stopped, self.stopped_long = True, False, False
        self.lost: set[int] = set()
        self.newcomers: list[int] = []
        self.contributed: tuple[Ballot, int] | None = None
        self.reduced = self.voted = False
        self.votes: dict[tuple[Ballot, int], dict[int, Any]] = defaultdict(dict)
        self.history: list[Ballot] = []
        self.proposal: Any = None
        self.asked: set[int] = set()
        self.poked = self.waits = self.released = False
        self.resigning: set[int] = set()  # whose promises to leave are awaited
        self.forming: tuple[Ballot, tuple[int, ...]] | None = None
        self.proposer = number  # of the view that is formed
        self.cut_off: set[int] = set()  # workers that must notice before the report is sent
        self.reports: dict[Ballot, dict[int, Any]] = defaultdict(dict)
        self.leaving: list[Any] = []  # reports of workers that leave
        self.installing: tuple[Ballot, set[int], frozenset[int]] | None = None
        """Of a proposer: the members that have not completed the view, and those that leave then."""

    @property
    def runs(self) -> bool:
        return self.alive and not self.stopped


class World:
    """All workers of a run, and the messages under way."""

    def __init__(self, seed: int, *, trace: bool = False) -> None:
        self.random = random.Random(seed)
        self.trace = trace
        self.only_deaths = self.random.random() < 0.5
        self.linger = 0.0 if self.only_deaths else self.random.choice((0.0, 0.9))
        """How likely a worker that leaves lives on after its release."""
        self.hosts = self.random.choice((1, 1, 2, 3) if self.only_deaths or self.linger else (1, 2, 3))
        self.is_certain = self.only_deaths and self.hosts == 1
        self.workers: dict[int, Worker] = {}
        self.queues: dict[tuple[int, int], deque[tuple[Any, ...]]] = defaultdict(deque)
        self.apart: set[frozenset[int]] = set()  # pairs of hosts
        self.log: set[int] = set()
        self.truth: dict[int, Ballot] = {}
        self.commits = self.by_exchange = self.views = 0
        self.deaths, self.joins = self.random.randrange(6), self.random.randrange(5)
        self.fault_rate = self.random.choice((0.02, 0.05, 0.1))
        self.weights = {each: self.random.random() ** 2 for each in _FAULTS}
        self.faulty = True
        self.paused: Worker | None = None
        self.end_step: int | None = None
        self.replica_size = 1 if self.linger else self.random.choice((1, 1, 2, 2, 3))
        most = 5 // self.replica_size + 1
        size = self.random.choice((1, 2, 3, 3, 4, 5)) if self.replica_size == 1 else most
        for number in range(5 if self.linger else size):
            self.add_replica(0 if number == 0 else agreement.NEW)
        self.workers[0].newcomers = [each for each in self.workers if each]

    def say(self, *what: object) -> None:
        if self.trace:
            print(*what)

    def add_replica(self, step: int) -> None:
        """Add the workers of a replica; ``step`` is that of the first one."""
        first = len(self.workers)
        replica = tuple(range(first, first + self.replica_size))
        for number in replica:
            self.add(number, step if number == first else agreement.NEW, replica)

    def add(self, number: int, step: int, replica: tuple[int, ...]) -> None:
        worker = Worker(number, self.random.randrange(self.hosts), step, replica)
        for other in self.workers.values():
            if not other.alive:
                worker.lost.add(other.number)
        self.workers[number] = worker
        self.log.add(number)
        self.ask_for_entry(worker)

    def ask_for_entry(self, worker: Worker) -> None:
        """Have others know of a newcomer. Those that do not run, or are apart, do not hear of it."""
        for other in self.workers.values():
            hears = other.runs and other is not worker and not self.are_apart(worker.number, other.number)
            if hears and worker.number not in (*other.newcomers, *other.lost):
                other.newcomers.append(worker.number)

    def newcomers_of(self, worker: Worker) -> list[int]:
        """Return the newcomers that a worker knows, of replicas that are whole as far as it knows."""
        known = {each for each in worker.newcomers if each not in worker.lost} | {worker.number}
        return [
            each
            for each in worker.newcomers
            if each in known and known.issuperset(self.workers[each].core.replica)
        ]

    # ---- messages

    def send(self, source: Worker, to: int, *message: Any) -> None:
        if to not in source.lost and self.workers[to].alive:
            self.queues[source.number, to].append(message)

    def are_apart(self, one: int, other: int) -> bool:
        return frozenset((self.workers[one].host, self.workers[other].host)) in self.apart

    def deliver(self, source: int, to: int) -> None:
        message = self.queues[source, to].popleft()
        worker = self.workers[to]
        if source in worker.lost and message[0] != "closed":
            return
        self.say(f"  {source} -> {to}:", *message)
        getattr(self, f"on_{message[0]}")(worker, source, *message[1:])

    def on_closed(self, worker: Worker, source: int, certain: bool) -> None:
        """The connection is closed for good. On one host, a worker sees whether the other's process runs."""
        if source in worker.lost:
            return
        other = self.workers[source]
        certain = certain or (not other.alive and other.host == worker.host)
        worker.lost.add(source)
        if certain:
            worker.core.witnessed(source)
        if worker.proposal is not None and source in worker.asked:
            worker.proposal = None

    def on_freeze(self, worker: Worker, source: int, ballot: Ballot) -> None:
        try:
            self.send(worker, source, "answer", ballot, worker.core.freeze(ballot))
        except agreement.OutdatedError:
            self.send(worker, source, "refusal", ballot, worker.core.ballot)

    def on_refusal(self, worker: Worker, source: int, ballot: Ballot, later: Ballot) -> None:
        worker.core.outbid(later)
        if worker.proposal is not None and worker.proposal.ballot == ballot:
            worker.proposal = None

    def on_answer(self, worker: Worker, source: int, ballot: Ballot, report: Any) -> None:
        proposal = worker.proposal
        if proposal is None or proposal.ballot != ballot:
            return
        proposal.take(report)
        self.go_on(worker)

    def go_on(self, worker: Worker) -> None:
        proposal = worker.proposal
        missing = proposal.to_ask(worker.lost)
        for each in missing - worker.asked:
            self.send(worker, each, "freeze", proposal.ballot)
        worker.asked |= missing
        if missing:
            return
        plan = proposal.plan()
        self.say("plan of", worker.number, plan)
        if plan.may_go_on and plan.broken:
            for each in plan.broken - worker.resigning:
                self.send(worker, each, "resign", proposal.ballot, list(proposal.reports.values()))
            worker.resigning |= plan.broken
            return
        worker.proposal, worker.waits = None, not plan.may_go_on
        if plan.is_lost:
            for each in proposal.reports:
                self.send(worker, each, "state_lost")
        if not plan.may_go_on:
            return
        for each in plan.members:
            reports = list(proposal.reports.values())
            self.send(worker, each, "install", proposal.ballot, plan.members, plan.released, reports)
        worker.installing = proposal.ballot, set(plan.members), plan.released
        self.release(worker)

    def on_installed(self, worker: Worker, source: int, ballot: Ballot) -> None:
        if worker.installing is not None and worker.installing[0] == ballot:
            worker.installing[1].discard(source)
            self.release(worker)

    def release(self, worker: Worker) -> None:
        """Let workers leave once all members have completed the view without them."""
        assert worker.installing is not None
        _, missing, released = worker.installing
        if not missing:
            for each in released:
                self.send(worker, each, "release")

    def on_resign(self, worker: Worker, source: int, ballot: Ballot, reports: list[Any]) -> None:
        before, prepared = len(worker.history), worker.core.prepared
        try:
            outcome = worker.core.resign(ballot, reports)
        except agreement.OutdatedError:
            return
        if outcome is agreement.Outcome.COMMIT:
            assert prepared is not None
            self.committed(worker, before, prepared)
        self.send(worker, source, "answer", ballot, worker.core.report())

    def on_state_lost(self, worker: Worker, source: int) -> None:
        if self.only_deaths and (replica := self.with_state()):
            raise Violation(f"{worker.number} holds the state to be lost, which {replica} has")
        self.end(worker, goodbye=False)

    def with_state(self) -> tuple[int, ...]:
        """Return the workers of a whole replica that has the state; none if there is none."""
        for each in self.workers.values():
            mates = [self.workers[mate] for mate in each.core.replica]
            has_state = each.core.founder or all(mate.core.step != agreement.NEW for mate in mates)
            if has_state and all(mate.alive and not mate.core.left for mate in mates):
                return each.core.replica
        return ()

    def on_release(self, worker: Worker, source: int) -> None:
        if worker.core.left:
            worker.released = True
            if self.random.random() >= self.linger:
                self.end(worker, goodbye=True)

    def on_install(
        self,
        worker: Worker,
        source: int,
        ballot: Ballot,
        members: tuple[int, ...],
        released: frozenset[int],
        reports: list[Any],
    ) -> None:
        core = worker.core
        if worker.lost.intersection(members):
            return  # the group cannot be formed
        cut_off = core.to_cut_off(members, released, reports) - worker.lost
        try:
            core.install(ballot, members, released)
        except agreement.OutdatedError:
            return
        for each in cut_off:
            self.send(worker, each, "closed", False)
            worker.lost.add(each)
        worker.forming, worker.cut_off = (ballot, members), cut_off
        worker.leaving = [each for each in reports if each.member in released]
        worker.proposer = source
        self.send_report(worker)

    def send_report(self, worker: Worker) -> None:
        """Send the report for the exchange, once those that are cut off must have noticed."""
        if worker.forming is None:
            return
        for each in list(worker.cut_off):
            other = self.workers[each]
            if other.stopped:
                other.stopped_long = True
            if not other.alive or other.stopped or worker.number in other.lost or other.host != worker.host:
                worker.cut_off.discard(each)
        if worker.cut_off:
            return
        ballot, members = worker.forming
        if ballot == worker.core.ballot:
            report = worker.core.report()
            for each in members:
                self.send(worker, each, "report", ballot, report)

    def on_report(self, worker: Worker, source: int, ballot: Ballot, report: Any) -> None:
        worker.reports[ballot][source] = report
        self.try_to_decide(worker)

    def try_to_decide(self, worker: Worker) -> None:
        if worker.forming is None:
            return
        ballot, members = worker.forming
        if set(worker.reports[ballot]) < set(members):
            return
        before = len(worker.history)
        reports = [*(worker.reports[ballot][each] for each in members), *worker.leaving]
        prepared = worker.core.prepared
        try:
            done = worker.core.decide(ballot, members, reports)
        except agreement.OutdatedError:
            return
        except AssertionError as error:
            raise Violation(f"lag: {error}") from error
        worker.forming, worker.waits = None, False
        self.send(worker, worker.proposer, "installed", ballot)
        self.views += 1
        replicas = [self.workers[each].core.replica for each in done.view.members]
        if done.view.members != tuple(each for one in dict.fromkeys(replicas) for each in one):
            raise Violation(f"{done.view} has replicas that are not whole: {set(replicas)}")
        if done.outcome is agreement.Outcome.LOST:
            self.on_state_lost(worker, worker.number)
            return
        if done.outcome is agreement.Outcome.COMMIT:
            assert prepared is not None
            self.committed(worker, before, prepared)
            self.by_exchange += 1
        worker.contributed, worker.reduced, worker.voted = None, False, False
        worker.newcomers = [each for each in worker.newcomers if each not in members]

    # ---- steps

    def committed(self, worker: Worker, step: int, ballot: Ballot) -> None:
        self.say(f"{worker.number} commits step {step} of view {ballot}")
        worker.history.append(ballot)
        self.commits += 1
        worker.contributed, worker.reduced, worker.voted = None, False, False
        if self.end_step is not None and step >= self.end_step:
            raise Violation(f"step {step} is committed after the end of the job at step {self.end_step}")
        if self.truth.setdefault(step, ballot) != ballot:
            raise Violation(f"step {step} is committed in views {self.truth[step]} and {ballot}")

    def on_vote(self, worker: Worker, source: int, ballot: Ballot, vote: Any) -> None:
        worker.votes[ballot, vote.step][source] = vote

    def train(self, worker: Worker) -> None:
        """Do the next thing that the worker's training thread can do."""
        core, view = worker.core, worker.core.view
        if core.missing or (view is None and worker.lost.intersection(core.replica)):
            self.end(worker, goodbye=self.random.random() < 0.5)
            return
        if view is None or core.left or core.departing or core.ended:
            return
        step = view.first if core.step == agreement.NEW else core.step
        key = (view.ballot, step)
        if worker.contributed != key:
            if core.may_begin:
                worker.contributed, worker.reduced, worker.voted = key, False, False
        elif not worker.reduced:
            # A worker that is gone may have contributed before; to a step that some go on from, all have.
            worker.reduced = all(
                other.contributed == key
                or ((other.core.view is view or other.core.view == view) and other.core.step > step)
                for other in (self.workers[each] for each in view.members)
            )
        elif core.step == agreement.NEW:
            donors = [
                self.workers[each] for each in view.counterparts(worker.number) if each not in view.newcomers
            ]
            donors = [
                each for each in donors if each.alive and each.core.view == view and each.core.step == step
            ]
            if donors:
                donor = self.random.choice(donors)
                if core.load(view, step, donor.core.last):
                    worker.history = list(donor.history)
        elif not worker.voted:
            if core.prepare(view):
                worker.voted = True
                vote = core.vote(grow=bool(self.newcomers_of(worker)))
                for each in view.members:
                    self.send(worker, each, "vote", view.ballot, vote)
        elif set(worker.votes[key]) >= set(view.members):
            votes = [worker.votes[key][each] for each in view.members]
            if core.count(view, votes):
                self.committed(worker, step, view.ballot)
                if any(vote.finish for vote in votes):
                    self.end_step = step + 1

    def change_view(self, worker: Worker) -> None:
        """Propose a view, or ask the worker that should."""
        proposer = worker.core.proposer(worker.lost.__contains__)
        if proposer == worker.number or (self.faulty and self.random.random() < 0.2):
            worker.poked = False
            self.propose(worker)
        elif proposer is not None and worker.core.view is not None:
            self.send(worker, proposer, "poke", worker.core.view.ballot)

    def on_poke(self, worker: Worker, source: int, ballot: Ballot) -> None:
        if worker.core.view is not None and worker.core.view.ballot == ballot:
            worker.poked = True

    def propose(self, worker: Worker) -> None:
        self.say("propose", worker.number)
        worker.proposal = agreement.Proposal(worker.core, self.newcomers_of(worker))
        worker.asked, worker.resigning = set(), set()
        self.go_on(worker)

    # ---- faults

    def end(self, worker: Worker, *, goodbye: bool) -> None:
        """End a process. The last of its messages may be lost, unless it says goodbye."""
        self.say("end of", worker.number, "with goodbye" if goodbye else "")
        worker.alive = False
        for other in self.workers.values():
            if other is worker or worker.number in other.lost:
                continue
            queue = self.queues[worker.number, other.number]
            if not goodbye:
                for _ in range(self.random.randrange(len(queue) + 1)):
                    queue.pop()
            if other.number not in worker.lost:
                queue.append(("closed", goodbye or other.host == worker.host))
            else:
                queue.append(("closed", False))

    def lose(self, one: Worker, other: Worker) -> None:
        """``one`` holds ``other`` to be lost, which it is not, or is not certainly."""
        self.say(one.number, "loses", other.number)
        if other.stopped:
            other.stopped_long = True
        self.send(one, other.number, "closed", False)
        self.on_closed(one, other.number, False)

    def read_log(self, worker: Worker) -> None:
        if worker.number not in self.log:
            self.end(worker, goodbye=False)
        else:
            worker.core.was_removed(set(self.workers) - self.log)

    def remove_lost(self, worker: Worker) -> None:
        """Remove a worker from the group's log that another one, which is in it, has lost."""
        lost = worker.lost & self.log
        if self.only_deaths:
            lost = {each for each in lost if not self.workers[each].alive}
        if worker.number in self.log and lost:
            self.log.discard(self.random.choice(sorted(lost)))

    def may_die(self, worker: Worker) -> bool:
        """Whether somebody can be certain of a worker's death, in runs in which all others must go on.

        Of several hosts, one worker dies at a time; a member of its view on its host lives, which may leave.
        """
        if self.is_certain or not self.only_deaths:
            return True
        others = [each for each in self.workers.values() if each.alive and each is not worker]
        known = set[int]().union(*(each.core.partners() for each in others))
        return all(self.workers[each].alive for each in known) and any(
            worker.core.view is not None and each.core.view == worker.core.view and each.host == worker.host
            for each in others
        )

    def fault(self) -> None:
        """Let something go wrong, or somebody come or leave."""
        if self.linger and self.leave_beside_a_pause():
            return
        unused = _PARTIAL if self.only_deaths else ()
        kinds = [each for each in _FAULTS if each not in unused]
        if self.only_deaths and not self.is_certain:
            kinds.append("remove")
        kind = self.random.choices(kinds, [self.weights[each] for each in kinds])[0]
        running = [each for each in self.workers.values() if each.runs]
        living = [each for each in self.workers.values() if each.alive]
        stopped = [each for each in living if each.stopped]
        one, other = self.random.choice(running), self.random.choice(living)
        match kind:
            case "die" if self.deaths and self.may_die(other):
                self.deaths -= 1
                self.end(other, goodbye=False)
            case "join" if self.joins and len(self.workers) + self.replica_size <= _MOST_WORKERS:
                self.joins -= 1
                self.add_replica(agreement.NEW)
            case "leave" if self.random.random() < 0.3:
                one.core.leaving = True
            case "leave at once" if one.core.may_begin and one.contributed is None:
                one.core.departing = self.random.random() < 0.3
            case "finish" if self.random.random() < 0.03:
                one.core.finishing = True
            case "propose" if one.core.view is not None or one.core.step == 0:
                self.propose(one)
            case "stop":
                one.stopped = True
            case "continue" if stopped:
                self.continue_(self.random.choice(stopped))
            case "cut" if self.hosts > 1:
                self.apart.add(frozenset(self.random.sample(range(self.hosts), 2)))
            case "heal":
                self.apart.clear()
            case "lose" if other is not one and other.number not in one.lost:
                if other.stopped or self.are_apart(one.number, other.number):
                    self.lose(one, other)
            case "remove":
                self.remove_lost(one)

    def leave_beside_a_pause(self) -> bool:
        """Do the next of these, if it can be: a worker leaves while another one is stopped, which the rest
        lose; the rest end after a step without it; it goes on.
        """
        living = [each for each in self.workers.values() if each.alive]
        if self.paused is None:
            leavers = [each for each in living if each.runs and each.core.may_begin and not each.contributed]
            one, other = self.random.choice(leavers or living), self.random.choice(living)
            rest = [each for each in living if each.core.view == one.core.view and each not in (one, other)]
            new = any(each.core.step == agreement.NEW for each in (one, other, *rest))
            if not leavers or one is other or other.core.view != one.core.view or len(rest) < 3 or new:
                return False
            one.core.departing = other.stopped = True
            self.paused = other
            for each in rest:
                if other.number not in each.lost:
                    self.lose(each, other)
            return True
        rest = [each for each in living if each.core.view != self.paused.core.view and not each.core.left]
        if self.paused.stopped and any(each.core.step > self.paused.core.step for each in rest):
            for each in rest:
                self.end(each, goodbye=False)
            self.continue_(self.paused)
        return self.random.random() < 0.8

    def continue_(self, worker: Worker) -> None:
        worker.stopped = False
        if worker.stopped_long:
            worker.stopped_long = False
            worker.core.was_stopped()

    # ---- running

    def turn(self) -> bool:
        """Do one thing that can happen now; false if nothing can."""
        choose = self.random
        pairs = [
            (source, to)
            for (source, to), queue in self.queues.items()
            if queue and self.workers[to].runs and not self.are_apart(source, to)
        ]
        running = [each for each in self.workers.values() if each.runs]
        if not running:
            return False
        if self.faulty and choose.random() < self.fault_rate:
            self.fault()
        elif pairs and choose.random() < 0.5:
            self.deliver(*choose.choice(pairs))
        else:
            worker = choose.choice([each for each in running if each.runs])
            if worker.released and choose.random() < 0.02:
                self.end(worker, goodbye=True)
                return True
            what = choose.random()
            if what < 0.1 and not self.is_certain:
                self.read_log(worker)
            elif what < (0.2 if self.faulty else 0.3):
                is_due = worker.poked or worker.core.is_due(worker.lost.__contains__)
                if is_due and (self.faulty or not pairs):
                    self.change_view(worker)
            elif worker.cut_off:
                self.send_report(worker)
            else:
                self.train(worker)
        return True

    def check(self) -> None:
        """Check that histories are prefixes of one another."""
        living = [each for each in self.workers.values() if each.alive and each.core.step != agreement.NEW]
        for worker in living:
            if worker.core.step != len(worker.history):
                raise Violation(
                    f"{worker.number} is at step {worker.core.step} after {len(worker.history)} commits"
                )
            for step, ballot in enumerate(worker.history):
                if self.truth[step] != ballot:
                    raise Violation(f"{worker.number} has committed step {step} in another view")

    def settle(self) -> None:
        """After the last fault: all are well, or have ended."""
        self.faulty = False
        self.apart.clear()
        for worker in self.workers.values():
            worker.core.leaving = worker.core.finishing = False
            if worker.stopped:
                self.continue_(worker)
            if worker.released and worker.alive:
                self.end(worker, goodbye=True)
        goal = max(len(self.truth), 0) + 2
        for turn in range(_SETTLING):
            members = [
                each
                for each in self.workers.values()
                if each.alive and not (each.core.left or each.core.departing)
            ]
            if not any(each.core.step != agreement.NEW for each in members) or any(
                each.core.ended for each in members
            ):
                return
            if (
                all(each.core.step >= goal for each in members)
                and len({each.core.view for each in members}) == 1
            ):
                return
            if turn > _SETTLING // 2 and not self.is_certain and self.random.random() < 0.02:
                one = self.random.choice(members)
                self.remove_lost(one)
                if one.core.view is None:
                    self.ask_for_entry(one)
            self.turn()
        waits = any(each.alive and each.waits for each in self.workers.values())  # which puts them out
        if self.is_certain or (self.only_deaths and self.with_state()) or not waits:
            text = [
                (w.number, w.core.step, w.core.frozen, w.core.hold, w.core.view, w.core.tried, w.lost)
                for w in members
            ]
            raise Violation(f"no progress: {text}")


def run(seed: int, *, trace: bool = False) -> World:
    """Run one simulated job.

    Raises:
        Violation: a promise was broken.
    """
    world = World(seed, trace=trace)
    for _ in range(world.random.choice((200, 500, 1000))):
        if not world.turn():
            break
        world.check()
    world.settle()
    world.check()
    return world


def find(seeds: Sequence[int]) -> int | None:
    """Return the first seed whose run breaks a promise."""
    for seed in seeds:
        try:
            run(seed)
        except Violation:
            return seed
    return None


def main() -> int:
    """Run what the command line asks for; returns the number of failed runs."""
    parser = argparse.ArgumentParser(prog="python -m tests.simulation.elastic", description=__doc__)
    parser.add_argument("--seeds", type=int, default=300)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--seed", type=int)
    options = parser.parse_args()
    if options.seed is not None:
        run(options.seed, trace=True)
        return 0
    seeds = range(options.first, options.first + options.seeds)
    failed = commits = views = by_exchange = 0
    for seed in seeds:
        try:
            world = run(seed)
        except Violation as violation:
            failed += 1
            if failed <= 3:
                print(f"seed {seed}: {violation}")
            continue
        commits, views = commits + world.commits, views + world.views
        by_exchange += world.by_exchange
    print(f"{len(seeds)} runs, {failed} failed; {views} views, {commits} commits, {by_exchange} in exchanges")
    return failed


if __name__ == "__main__":
    sys.exit(main())
