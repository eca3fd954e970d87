"""How the copies of a replicated object stay equal: pure decisions, without I/O, clocks or threads.

*Views.* The copies are in an ordered list, a *view*. The first one is the *primary*, the others are
*backups*. The primary puts the calls in order, one after the other. It sends a call to all backups, which
run it; when each has answered, it runs the call itself and answers the caller. So each copy has run all
calls that any caller has an answer to, and at most one more.

*A death.* A copy leaves the view only if it is *gone for certain*: it has ended or left, as a copy knows that
was in contact with it until then, or it was removed from the group's log, as a copy reads that is still in
the log (``spmd/elastic/agreement.py`` says why only one of two copies can find this). The primary goes on
without a backup that is gone. If all copies before a backup are gone, it becomes the primary: it makes the
remaining copies equal to its own before it takes a call. A call that the old primary had not answered was run
by the new one, or by no copy that is left. The caller repeats the call with the same number, and the new
primary runs it or has the remembered answer.

*Never two primaries that answer.* A primary that is cut off gets no answers from a backup that has taken
over, and cannot go on without it, since that backup is not gone; so it answers no caller.

*Promises.* A worker that cannot keep its copy promises to keep none, and leaves the view by that. From then
on it takes part in later views only: those with a higher number in which the primary that it has promised is
not a backup. An earlier primary, whose messages may still come, had views in which that one was a backup, or
lower numbers.

*Newcomers.* While a copy is missing, the primary adds a candidate at the end of the view, before the next
call: the earlier backups get the view first, and then the newcomer gets it with the state. Until then no call
is answered.

*The beginning.* When all wanted copies have the state for the first time, the primary puts the *opening* in
order, like a call but without a method; calls are taken after it. So a copy knows by its position, and tells
newcomers with the state, that there have been as many copies as wanted.

*Answers* are remembered by each copy until the caller has acknowledged them, or is gone. All copies do so
alike, since acknowledgements and ends of callers are parts of calls: its own next one, or that of another
caller, once the primary has been told.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any, Final, Protocol, TypeAlias

from rpc.errors import RemoteError

__all__ = [
    "Answer",
    "Apply",
    "Call",
    "Copy",
    "DeposedError",
    "Done",
    "Failed",
    "Install",
    "Machine",
    "Message",
    "Outcome",
    "OutdatedCallError",
    "Position",
    "Refusal",
    "Release",
    "State",
    "Steps",
    "Unsendable",
    "View",
]

Position: TypeAlias = tuple[int, int]
"""Number of calls that were run, and the primary that has ordered the last one."""

_START: Final[Position] = (0, 0)


class DeposedError(Exception):
    """Another copy is the primary."""


class OutdatedCallError(Exception):
    """The caller has given the call up, or is gone as far as the copies know."""


@dataclass(frozen=True, slots=True)
class Call:
    """A call of a method.

    Attributes:
        session: incarnation of the caller.
        number: of the call; each repetition has the same.
        answered: all calls of the session with lower numbers are over.
        what: the method and its arguments.
        ended: callers that are gone.
        acknowledged: other callers, each with the first number of which it may not have the answer.
    """

    session: int
    number: int
    answered: int
    what: Any
    ended: tuple[int, ...] = ()
    acknowledged: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a call has returned or raised.

    Attributes:
        value: the value, which does not change any more.
        error: the exception, or None.
        tracked: whether the value has gradients, which only the copy that was called first can compute.
    """

    value: Any
    error: Exception | None = None
    tracked: bool = False

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy of the object gets its answers with its state: an exception that cannot be pickled is sent
        by its text.
        """
        error = self.error
        try:
            pickle.dumps(error)
        except Exception:
            error = RemoteError(f"{type(error).__name__}: {error}", type(error).__qualname__)
        return Outcome, (self.value, error, self.tracked)

    @property
    def failed(self) -> str:
        """The class of the exception, or nothing."""
        return "" if self.error is None else type(self.error).__qualname__


class Machine(Protocol):
    """The object itself."""

    def run(self, what: Any) -> Outcome:
        """Run a method."""

    def snapshot(self) -> Any:
        """Return the whole state."""

    def restore(self, state: Any) -> None:
        """Take over a state that ``snapshot`` has returned."""

    def forget(self, session: int) -> None:
        """Drop what belongs to a caller that is gone."""


@dataclass(frozen=True, slots=True)
class View:
    """An ordered list of copies, by their incarnations; the first is the primary.

    Attributes:
        number: counts the views.
        members: the copies.
    """

    number: int
    members: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class State:
    """All that a copy has: how far it is, the remembered answers, callers that have ended, and the object."""

    position: Position
    answers: dict[int, dict[int, Outcome]]
    floors: dict[int, int]
    ended: frozenset[int]
    machine: Any


@dataclass(frozen=True, slots=True)
class Apply:
    """Run a call, or the opening (None), as the one at this position."""

    view: int
    position: Position
    call: Call | None


@dataclass(frozen=True, slots=True)
class Install:
    """Take part in a view; with a state, take it over first."""

    view: View
    state: State | None


@dataclass(frozen=True, slots=True)
class Release:
    """Keep no copy in this view."""

    view: View


Message: TypeAlias = Apply | Install | Release


@dataclass(frozen=True, slots=True)
class Done:
    """The answer of a backup that has done what it was asked for.

    Attributes:
        position: how far it is.
        failed: the class of the exception that the call has raised, or nothing.
    """

    position: Position
    failed: str = ""


class Refusal(Enum):
    """Why a backup has not done what it was asked for."""

    DEPOSED = "it follows another primary"
    BEHIND = "it has a later view"
    STATE = "it needs the state"
    UNFIT = "it keeps no copy in this view"


@dataclass(frozen=True, slots=True)
class Unsendable:
    """A message that could not be sent to anyone."""

    error: Exception


@dataclass(frozen=True, slots=True)
class Failed:
    """A backup has failed to do what it was asked for, and would again."""

    error: Exception


Answer: TypeAlias = Done | tuple[Refusal, int] | Unsendable | Failed | None
"""What has come of a message; with a refusal comes the number of the backup's view. None: no answer has come,
so it is not known whether the message has arrived.
"""

Steps: TypeAlias = Generator[dict[int, Message], Mapping[int, Answer], Any]
"""What a primary does: it yields messages by addressee, and is sent their answers."""


class Copy:
    """One copy of the object, and what it knows of the others. For one thread at a time.

    Args:
        me: incarnation of this worker.
        machine: the object.
        copies: the wanted number of copies.

    Attributes:
        view: the view, or None while this worker has no copy.
        position: how far this copy is.
        gone: workers that are gone for certain.
        promised: the view in which this worker has promised to keep no copy, or None.
        deposed: whether another copy has taken over from this one.
        candidate: a worker that can keep a copy, which a primary adds when one is missing; or None.
        failure: why the object's state could not be given to another copy, when it was last tried; or None.
    """

    def __init__(self, me: int, machine: Machine, copies: int) -> None:
        self.me, self.copies = me, copies
        self._machine = machine
        self.view: View | None = None
        self.position = _START
        self.gone: set[int] = set()
        self.promised: View | None = None
        self.deposed = False
        self.candidate: int | None = None
        self.failure: Exception | None = None
        self._answers: dict[int, dict[int, Outcome]] = {}
        self._floors: dict[int, int] = {}
        self._ended: frozenset[int] = frozenset()
        self._failed = ""
        self._last = (0, 0)
        """The sender and the serial of the last message."""
        # Of a primary:
        self._pending: tuple[Position, Call | None] | None = None
        """The call that backups may have run, and this copy has not."""
        self._has: dict[int, tuple[int, Position]] = {}
        """View and position of each backup, as it has answered last."""
        self._outcomes: dict[int, str] = {}
        self._need_state: set[int] = set()
        self._new: set[int] = set()
        self._unable: set[int] = set()
        """Copies that cannot get the state; each stays in the view until it has promised to keep none."""
        self._out: set[int] = set()
        """Copies that have promised to keep none."""

    # ---- any copy

    @property
    def is_primary(self) -> bool:
        """Whether this copy puts the calls in order."""
        return self.view is not None and self.view.members[0] == self.me and not self.deposed

    @property
    def is_ready(self) -> bool:
        """Whether calls are taken: there have been as many copies as wanted."""
        return self.position != _START

    @property
    def sessions(self) -> list[int]:
        """The callers that this copy remembers."""
        return list(self._floors)

    def found(self) -> None:
        """Be the first copy. ``settle`` comes next."""
        self.view = View(1, (self.me,))

    def may_take_over(self) -> bool:
        """Whether this copy is a backup, and all copies before it are gone."""
        if self.view is None or self.is_primary or self.deposed:
            return False
        before = self.view.members[: self.view.members.index(self.me)]
        return self.gone.issuperset(before)

    def take_over(self) -> None:
        """Become the primary. ``settle`` comes next."""
        view = self._view()
        members = view.members[view.members.index(self.me) :]
        self.view = View(view.number + 1, members)

    def receive(self, sender: int, serial: int, message: Message) -> Done | tuple[Refusal, int]:
        """Do what a primary asks for; ``serial`` counts its messages: none has effect after a later one.

        Raises:
            Exception: the state could not be taken over. This worker has promised to keep no copy.
        """
        view = self.view
        number = 0 if view is None else view.number
        if sender in self.gone or (view is not None and sender not in view.members):
            return Refusal.DEPOSED, number
        if self._has_promised(message):
            return Refusal.UNFIT, number
        if self._last[0] == sender and self._last[1] >= serial:
            return Refusal.BEHIND, number
        self._last = sender, serial
        if isinstance(message, Release):
            return self._give_up(message.view)
        if isinstance(message, Install):
            return self._install(message)
        if view is None:
            return Refusal.STATE, number
        if (message.view, sender) != (number, view.members[0]):
            return Refusal.BEHIND, number
        if message.position != self.position:
            if message.position[0] != self.position[0] + 1:
                return Refusal.STATE, number
            self._run(message.position, message.call)
        return Done(self.position, self._failed)

    def _install(self, message: Install) -> Done | tuple[Refusal, int]:
        view, new, state = self.view, message.view, message.state
        number = 0 if view is None else view.number
        if view is not None and view != new and new.number <= number:
            return Refusal.BEHIND, number
        if state is not None:
            try:
                self._machine.restore(state.machine)
            except Exception:
                self._give_up(new)
                raise
            self._answers = {session: dict(answers) for session, answers in state.answers.items()}
            self._floors, self._ended = dict(state.floors), state.ended
            self.position = state.position
        elif view is None:
            return Refusal.STATE, number
        self.view = new
        return Done(self.position)

    def _has_promised(self, message: Message) -> bool:
        """Whether a message is of a view in which this worker keeps no copy, by its promise."""
        last = self.promised
        if last is None or isinstance(message, Apply):
            return last is not None and self.view is None
        view = message.view
        return view.number <= last.number or last.members[0] in view.members[1:]

    def _give_up(self, view: View) -> tuple[Refusal, int]:
        self.promised, self.view = view, None
        return Refusal.UNFIT, 0

    def _run(self, position: Position, call: Call | None) -> None:
        self._failed = "" if call is None else self._answer(call).failed
        self.position = position

    def _answer(self, call: Call) -> Outcome:
        for session in call.ended:
            self._answers.pop(session, None)
            self._floors.pop(session, None)
            self._machine.forget(session)
        self._ended |= set(call.ended)
        others = [each for each in call.acknowledged if each[0] in self._floors]
        for session, answered in (*others, (call.session, call.answered)):
            floor = self._floors[session] = max(self._floors.get(session, 0), answered)
            answers = self._answers.get(session, {})
            self._answers[session] = {number: each for number, each in answers.items() if number >= floor}
        outcome = self._machine.run(call.what)
        self._answers[call.session][call.number] = outcome
        return outcome

    def _view(self) -> View:
        if self.view is None:
            raise DeposedError
        return self.view

    # ---- the primary

    def known(self, call: Call) -> Outcome | None:
        """Return the remembered outcome of a call, or None.

        Raises:
            OutdatedCallError: the call must not be run any more.
        """
        if call.session in self._ended or call.number < self._floors.get(call.session, 0):
            raise OutdatedCallError
        return self._answers.get(call.session, {}).get(call.number)

    def replicate(self, call: Call, prepare: Callable[[Any], Any]) -> Steps:
        """Have a call run on all copies, unless it was, and return its outcome.

        Args:
            call: the call.
            prepare: returns what is to be run, given ``call.what``; it may raise, and then nothing is run.
        """
        yield from self.settle()
        found = self.known(call)
        if found is None:
            call = replace(call, what=prepare(call.what))
            self._pending = (self.position[0] + 1, self.me), call
            yield from self.settle()
            found = self.known(call)
        return found

    def has_acknowledged(self, session: int, answered: int) -> bool:
        """Whether the copies know that a caller has its answers up to a call, or remember none of it."""
        return self._floors.get(session, answered) >= answered

    def may_add(self, worker: int) -> bool:
        """Whether a worker can be a candidate."""
        return worker not in self.gone and worker not in self._view().members

    def settle(self) -> Steps:
        """Make all copies equal: those of the view, this one, and the candidate if a copy is missing."""
        while True:
            if not self.is_primary:
                raise DeposedError
            self._drop()
            messages = self._lacking()
            if messages:
                answers = yield messages
                for member, answer in answers.items():
                    self._take(member, messages[member], answer)
            elif self._pending is not None:
                position, call = self._pending
                self._pending = None
                self._run(position, call)
                unlike = {each for each in self._backups() if self._outcomes.get(each) != self._failed}
                self._need_state |= unlike  # methods that are not the same function everywhere
            elif len(self._view().members) < self.copies:
                if not self._add():
                    return
            elif self.is_ready:
                return
            else:
                self._pending = (1, self.me), None

    def _add(self) -> bool:
        """Add the candidate, if there is one and the object can be copied."""
        view, candidate = self._view(), self.candidate
        if candidate is None or not self.may_add(candidate):
            return False
        self.candidate = None
        try:
            self._machine.snapshot()
        except Exception as error:
            self.failure = error
            return False
        self.failure = None
        self.view = View(view.number + 1, (*view.members, candidate))
        self._new.add(candidate)
        self._need_state.add(candidate)
        self._unable.discard(candidate)
        self._out.discard(candidate)
        return True

    def _backups(self) -> tuple[int, ...]:
        return self._view().members[1:]

    def _drop(self) -> None:
        view = self._view()
        stay = tuple(each for each in view.members if each not in self.gone and each not in self._out)
        if stay != view.members:
            self.view = View(view.number + 1, stay)

    def _lacking(self) -> dict[int, Message]:
        """Return what the backups lack; new ones get it last."""
        found = {each: message for each in self._backups() if (message := self._lacks(each)) is not None}
        old = {each: message for each, message in found.items() if each not in self._new}
        return old or found

    def _lacks(self, member: int) -> Message | None:
        view = self._view()
        number, position = self._has.get(member, (0, _START))
        if member in self._unable:
            return Release(view)
        if member not in self._need_state:
            if number != view.number:
                return Install(view, None)
            if self._pending is None and position == self.position:
                return None
            if self._pending is not None and position == self._pending[0]:
                return None
            if self._pending is not None and position == self.position:
                return Apply(view.number, *self._pending)
            self._need_state.add(member)  # it has run what this copy has not, or the other way round
        try:
            return Install(view, self._state())
        except Exception as error:  # the object cannot be copied any more
            self.failure = error
            return Release(view)

    def _state(self) -> State:
        answers = {session: dict(each) for session, each in self._answers.items()}
        return State(self.position, answers, dict(self._floors), self._ended, self._machine.snapshot())

    def _take(self, member: int, message: Message, answer: Answer) -> None:
        view = self._view()
        if isinstance(answer, Done):
            if isinstance(message, Apply):
                self._has[member] = message.view, answer.position
                self._outcomes[member] = answer.failed
            elif isinstance(message, Install):
                self._has[member] = message.view.number, answer.position
                if message.state is not None:
                    self._need_state.discard(member)
                    self._new.discard(member)
        elif isinstance(answer, Failed):
            if isinstance(message, Install) and message.state is not None:
                self._unable.add(member)
            elif not isinstance(message, Release):
                self._need_state.add(member)
        elif isinstance(answer, Unsendable) and isinstance(message, Install):
            self.failure = answer.error
            self._unable.add(member)
        elif isinstance(answer, Unsendable):
            if self._pending is not None:
                self._pending = None
                self._need_state |= set(self._backups()) - self._new  # some may have got it
            raise answer.error
        elif answer is not None:
            refusal, number = answer
            if refusal is Refusal.DEPOSED:
                self.deposed = True
                raise DeposedError
            if refusal is Refusal.BEHIND:
                self.view = replace(view, number=max(number, view.number) + 1)
            elif refusal is Refusal.STATE:
                self._need_state.add(member)
                self._new.add(member)  # perhaps the old primary has added it: see "Newcomers"
            else:
                self._out.add(member)
