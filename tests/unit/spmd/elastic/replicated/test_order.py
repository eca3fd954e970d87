"""The copies of a replicated object on a simulated network: a seed chooses every event.

Messages and answers are delayed, doubled and lost; copies are killed between any two of them, or excluded by
the group while they live; workers have no room for a copy, and later have; callers repeat their calls at any
copy. What callers were answered must always be in the state of the copy that answers next, once.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest

from spmd.elastic.replicated.order import (
    Answer,
    Call,
    Copy,
    DeposedError,
    Message,
    Outcome,
    OutdatedCallError,
    Refusal,
    Steps,
)

WORKERS, CALLERS, SEEDS = 5, 2, 150


class Recorded:
    """An object whose state is the list of the calls that were run."""

    def __init__(self) -> None:
        self.ran: list[Any] = []
        self.has_room = True

    def run(self, what: Any) -> Outcome:
        self.ran.append(what)
        if what[1] % 7 == 0:
            return Outcome(None, ValueError(str(len(self.ran))))
        return Outcome(len(self.ran))

    def snapshot(self) -> Any:
        return list(self.ran)

    def restore(self, state: Any) -> None:
        if not self.has_room:
            raise MemoryError
        self.ran = list(state)

    def forget(self, session: int) -> None:
        """Nothing belongs to callers."""


@dataclass(eq=False)
class Sent:
    """A message that is on its way, and the batch that waits for its answer."""

    sender: int
    serial: int
    to: int
    message: Message
    batch: dict[int, Answer]


@dataclass
class Worker:
    copy: Copy
    machine: Recorded
    steps: Steps | None = None
    call: Call | None = None
    waits_for: dict[int, Message] = field(default_factory=dict)
    batch: dict[int, Answer] = field(default_factory=dict)
    serial: int = 0


class World:
    """Copies, callers and a network.

    Attributes:
        answered: what callers were answered.
        had: workers that have had the state.
    """

    def __init__(self, seed: int, copies: int) -> None:
        self.random = random.Random(seed)
        self.copies = copies
        self.workers: dict[int, Worker] = {}
        self.dead: set[int] = set()
        self.excluded: set[int] = set()
        self.sent: list[Sent] = []
        self.answered: dict[tuple[int, int], int] = {}
        self.open: dict[int, set[int]] = {caller: set() for caller in range(CALLERS)}
        self.next = dict.fromkeys(range(CALLERS), 1)
        for me in range(1, WORKERS + 1):
            machine = Recorded()
            self.workers[me] = Worker(Copy(me, machine, copies), machine)
        self.workers[1].copy.found()
        self.had: set[int] = set()
        self.faults = True

    def living(self) -> list[int]:
        return [each for each in self.workers if each not in self.dead]

    def is_there(self) -> bool:
        """Whether the group has a copy that may take calls, now or later."""
        copies = [self.workers[each].copy for each in self.living() if each not in self.excluded]
        return any(copy.view is not None and copy.is_ready for copy in copies)

    # ---- events

    def learn(self, me: int) -> bool:
        """A worker learns who is gone for certain, unless the group has excluded it."""
        copy = self.workers[me].copy
        news = (self.dead | self.excluded) - copy.gone - {me}
        if me in self.excluded or not news:
            return False
        copy.gone.add(self.random.choice(sorted(news)))
        return True

    def begin(self, me: int) -> bool:
        """A worker with nothing to do takes over, adds a copy, or takes a call."""
        worker = self.workers[me]
        copy = worker.copy
        if worker.steps is not None or copy.view is None:
            return False
        if copy.may_take_over():
            copy.take_over()
            return self.drive(worker, copy.settle())
        if not copy.is_primary:
            return False
        if copy.gone.intersection(copy.view.members):
            return self.drive(worker, copy.settle())
        candidates = [
            each for each in self.living() if copy.may_add(each) and self.workers[each].copy.view is None
        ]
        if len(copy.view.members) < self.copies and candidates and self.random.random() < 0.5:
            copy.candidate = self.random.choice(candidates)
            if self.random.random() < 0.5:  # or before the next call
                return self.drive(worker, copy.settle())
        return self.take_call(worker) if copy.is_ready else self.drive(worker, copy.settle())

    def take_call(self, worker: Worker) -> bool:
        caller = self.random.randrange(CALLERS)
        numbers = self.open[caller]
        if len(numbers) < 3 and self.random.random() < 0.5:
            numbers.add(self.next[caller])
            self.next[caller] += 1
        if not numbers:
            return False
        number = self.random.choice(sorted(numbers))
        known = tuple((each, min(numbers)) for each, numbers in self.open.items() if numbers)
        acknowledged = known if self.random.random() < 0.5 else ()
        worker.call = Call(caller, number, min(numbers), (caller, number), (), acknowledged)
        return self.drive(worker, worker.copy.replicate(worker.call, lambda what: what))

    def drive(self, worker: Worker, steps: Steps, answers: Mapping[int, Answer] | None = None) -> bool:
        worker.steps, worker.batch = steps, {}
        try:
            worker.waits_for = steps.send(answers)  # type: ignore[arg-type]
        except StopIteration as end:
            worker.steps, call, worker.call = None, worker.call, None
            if call is not None:
                self.answer(worker, call, end.value)
        except (DeposedError, OutdatedCallError):
            worker.steps = worker.call = None
        else:
            worker.serial += 1
            for to, message in worker.waits_for.items():
                self.sent.append(Sent(worker.copy.me, worker.serial, to, message, worker.batch))
        return True

    def answer(self, worker: Worker, call: Call, outcome: Outcome) -> None:
        """A caller is answered; the copy that answers must have all that was ever answered, once."""
        ran = worker.machine.ran
        assert len(ran) == len(set(ran)), "a call was run twice"
        place = outcome.value if outcome.error is None else int(str(outcome.error))
        assert ran[place - 1] == call.what
        self.answered.setdefault(call.what, place)
        for what, position in self.answered.items():
            assert what in ran[position - 1 : position], "a call was lost"
        self.open[call.session].discard(call.number)

    def arrive(self, sent: Sent, *, again: bool = False, answer_lost: bool = False) -> bool:
        if not again:
            self.sent.remove(sent)
        if sent.to in self.dead:
            answer: Answer = None
        else:
            worker = self.workers[sent.to]
            worker.machine.has_room = not self.faults or self.random.random() < 0.5
            try:
                answer = worker.copy.receive(sent.sender, sent.serial, sent.message)
            except MemoryError:
                answer = Refusal.UNFIT, 0
        if not again:
            self.back(sent, None if answer_lost else answer)
        return True

    def back(self, sent: Sent, answer: Answer) -> None:
        """What has come of a message reaches its sender."""
        worker = self.workers[sent.sender]
        if sent.sender in self.dead or worker.batch is not sent.batch:
            return
        sent.batch[sent.to] = answer
        if len(sent.batch) == len(worker.waits_for):
            assert worker.steps is not None
            self.drive(worker, worker.steps, sent.batch)

    def step(self, faults: bool) -> None:
        """One event, if any can happen."""
        self.faults = faults
        self.had |= {each for each, worker in self.workers.items() if worker.copy.view is not None}
        if any(worker.copy.is_ready for worker in self.workers.values()):
            assert len(self.had) >= self.copies, "calls are taken before there were as many copies as wanted"
        pick = self.random.random()
        living = self.living()
        if faults and pick < 0.02 and living:
            self.dead.add(self.random.choice(living))
            return
        if faults and pick < 0.03 and living:
            self.excluded.add(self.random.choice(living))
            return
        choices: list[Callable[[], bool]] = [partial(self.learn, me) for me in living]
        choices += [partial(self.begin, me) for me in living] * 2
        for sent in self.sent:
            if faults and pick < 0.2:
                choices.append(partial(self.arrive, sent, again=True))
                choices.append(partial(self.arrive, sent, answer_lost=True))
            choices += [partial(self.arrive, sent)] * 3
        self.random.shuffle(choices)
        any(choice() for choice in choices)


@pytest.mark.parametrize("copies", [1, 2, 3])
def test_no_answered_call_is_lost_or_doubled(copies: int) -> None:
    survived = answered = 0
    for seed in range(SEEDS):
        world = World(seed, copies)
        for _ in range(150):
            world.step(faults=True)
        for worker in world.workers.values():
            kept = sum(map(len, worker.copy._answers.values()))
            assert kept <= CALLERS * 4, "acknowledged answers are kept"
        if world.is_there():
            survived += 1
            before = len(world.answered)
            for _ in range(600):
                world.step(faults=False)
                if len(world.answered) > before + 2:
                    break
            assert len(world.answered) > before + 2, f"seed {seed}: no call is answered any more"
        answered += len(world.answered)
    assert survived > SEEDS / 10
    assert answered > SEEDS * 5


def test_answer_that_its_caller_has_is_forgotten_with_the_next_call_of_another_one() -> None:
    copy = Copy(1, Recorded(), 1)
    copy.found()
    for call in (
        Call(7, 1, 1, (7, 1)),
        Call(8, 1, 1, (8, 1), (), ((7, 2), (9, 5))),  # of 9 nothing is known
    ):
        for _ in copy.replicate(call, lambda what: what):
            raise AssertionError("there is no other copy")
    assert copy._answers[7] == {}
    assert list(copy._answers[8]) == [1]
    with pytest.raises(OutdatedCallError):
        copy.known(Call(7, 1, 1, (7, 1)))
    assert copy.sessions == [7, 8]
